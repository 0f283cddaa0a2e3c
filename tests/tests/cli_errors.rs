//! What goes wrong is said, with what was tried and what to do; the exit status
//! is 2 for usage and 1 otherwise; nothing that was collected is thrown away.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// A signal that was sent must have had its effect after so long.
const PATIENCE: Duration = Duration::from_secs(30);

fn record(arguments: &[&str]) -> Result<Output> {
    let output = Command::new(RBPROF)
        .arg("record")
        .args(arguments)
        .stdin(Stdio::null())
        .output()?;
    ensure!(!said(&output).contains("panicked"), "{output:?}");
    Ok(output)
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails with exit status `status` and a message with all of `words`.
fn fails(output: &Output, status: i32, words: &[&str]) -> Result<()> {
    let said = said(output);
    ensure!(output.status.code() == Some(status), "{output:?}");
    for word in words {
        ensure!(said.contains(word), "no {word:?} in: {said}");
    }
    Ok(())
}

/// A program that is busy for `cpu_ms`, and waits to begin.
fn busy(name: &str, cpu_ms: u32) -> Result<Option<Target>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(None);
    };
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .env("DEPTH", "20")
            .env("CPU_MS", cpu_ms.to_string()),
    )?;
    target.wait_for("ready")?;
    Ok(Some(target))
}

/// Records this process where `mount` has been done to the files that tell of
/// the kernel; `None` without the right to.
fn record_under(mount: &str) -> Result<Option<Output>> {
    let may = Command::new("unshare").args(["--mount", "true"]).output()?;
    if !may.status.success() {
        rig::skip("mounting needs root")?;
        return Ok(None);
    }
    let script = format!("{mount} && exec \"$0\" record --pid $PPID -d 1 -o -");
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script, RBPROF])
        .stdin(Stdio::null())
        .output()?;
    Ok(Some(output))
}

#[test]
fn a_kernel_without_type_information() -> Result<()> {
    let Some(output) = record_under("mount -t tmpfs none /sys/kernel/btf")? else {
        return Ok(());
    };
    fails(
        &output,
        1,
        &["/sys/kernel/btf/vmlinux", "CONFIG_DEBUG_INFO_BTF"],
    )
}

#[test]
fn a_kernel_that_is_too_old() -> Result<()> {
    let mut release = tempfile::NamedTempFile::new()?;
    std::io::Write::write_all(&mut release, b"5.4.0-1-amd64\n")?;
    let mount = format!(
        "mount --bind {} /proc/sys/kernel/osrelease",
        release.path().display()
    );
    let Some(output) = record_under(&mount)? else {
        return Ok(());
    };
    fails(&output, 1, &["Linux 5.4.0-1-amd64", "5.10", "Upgrade"])
}

/// A program that says of itself that it is a Ruby of this version.
fn pretends(version: &str) -> Result<Output> {
    let directory = tempfile::tempdir()?;
    let source = directory.path().join("pretend.c");
    let program = directory.path().join("pretend");
    let text = format!(
        "#include <unistd.h>\nconst char ruby_version[] = \"{version}\";\n\
         int main(void) {{ write(1, \".\", 1); for (;;) sleep(1); }}\n"
    );
    std::fs::write(&source, text)?;
    let built = Command::new("cc")
        .arg("-rdynamic")
        .arg("-o")
        .args([&program, &source])
        .status()?;
    ensure!(built.success(), "cc: {built}");
    let mut child = Command::new(&program).stdout(Stdio::piped()).spawn()?;
    let mut dot = [0];
    let up = child.stdout.take().context("no output")?;
    std::io::Read::read_exact(&mut { up }, &mut dot)?;
    let output = record(&["--pid", &child.id().to_string(), "-d", "1", "-o", "-"]);
    child.kill()?;
    child.wait()?;
    output
}

#[test]
fn a_ruby_that_is_too_old() -> Result<()> {
    fails(&pretends("2.3.8")?, 1, &["Ruby 2.3.8", "oldest", "2.6"])
}

#[test]
fn a_ruby_that_never_comes_up_is_not_called_idle() -> Result<()> {
    let output = pretends("9.9.9")?;
    ensure!(said(&output).contains("was not up"), "{output:?}");
    Ok(())
}

#[test]
fn nonsense_on_the_command_line_is_usage() -> Result<()> {
    for (arguments, words) in [
        (&[][..], &["--pid"][..]),
        (&["--pid", "0"], &["--pid"]),
        (&["--pid", "1", "--", "ruby"], &["cannot be used with"]),
        (&["--pid", "1", "-d", "0"], &["--duration", "more than 0"]),
        (&["--pid", "1", "-F", "x"], &["--frequency"]),
        (&["--pid", "1", "-o", "x.gif"], &["x.gif", ".pb.gz"]),
        (&["--pid", "1", "--format", "gif"], &["gif", "folded"]),
    ] {
        fails(&record(arguments)?, 2, words).with_context(|| format!("{arguments:?}"))?;
    }
    Ok(())
}

#[test]
fn a_process_that_is_gone() -> Result<()> {
    if rig::ruby("debian-3.1.2")?.is_none() {
        return Ok(());
    }
    let mut child = Command::new("true").spawn()?;
    let pid = child.id().to_string();
    child.wait()?;
    fails(
        &record(&["--pid", &pid, "-o", "-", "--format", "folded"])?,
        1,
        &[&pid, "does not exist"],
    )
}

#[test]
fn a_process_that_runs_no_ruby() -> Result<()> {
    if rig::ruby("debian-3.1.2")?.is_none() {
        return Ok(());
    }
    let mut child = Command::new("sleep").arg("600").spawn()?;
    let pid = child.id().to_string();
    let output = record(&["--pid", &pid, "-o", "-", "--format", "folded"]);
    child.kill()?;
    child.wait()?;
    fails(&output?, 1, &[&pid, "sleep", "no Ruby"])
}

#[test]
fn a_thread_is_no_process() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let mut target = Target::start(&mut ruby.script(&rig::workload("threads.rb"))?)?;
    let lines = target.wait_for("ready")?;
    let tid = lines
        .iter()
        .find_map(|line| line.strip_prefix("thread\talpha\t"))
        .context("no thread")?;
    fails(
        &record(&["--pid", tid, "-o", "-", "--format", "folded"])?,
        1,
        &[tid, "thread", &target.pid().to_string()],
    )
}

#[test]
fn an_output_that_cannot_be_written_is_found_out_first() -> Result<()> {
    let Some(target) = busy("debian-3.1.2", 1)? else {
        return Ok(());
    };
    let pid = target.pid().to_string();
    let start = Instant::now();
    let dir = tempfile::tempdir()?;
    let missing = dir.path().join("missing/out.folded");
    let missing = missing.to_string_lossy();
    // The recording would take ten minutes.
    let output = record(&["--pid", &pid, "-d", "600", "-o", &missing])?;
    fails(&output, 1, &["cannot write", &missing])?;
    ensure!(start.elapsed() < PATIENCE, "it recorded first");
    Ok(())
}

#[test]
fn without_privileges_the_missing_capability_is_named() -> Result<()> {
    let Some(target) = busy("debian-3.1.2", 1)? else {
        return Ok(());
    };
    // Where anybody may start it.
    let dir = tempfile::tempdir()?;
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
    let rbprof = dir.path().join("rbprof");
    std::fs::copy(RBPROF, &rbprof)?;
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&rbprof)
        .args([
            "record",
            "--pid",
            &target.pid().to_string(),
            "-o",
            "-",
            "--format",
            "folded",
        ])
        .output()
        .context("starting setpriv")?;
    fails(&output, 1, &["CAP_BPF", "CAP_PERFMON", "root"])
}

#[test]
fn a_full_disk_costs_only_what_is_on_it() -> Result<()> {
    let Some(mut target) = busy("debian-3.1.2", 300)? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let full = dir.path().join("full");
    std::fs::create_dir(&full)?;
    let other = dir.path().join("other.folded");
    // A file system of its own, gone with the process.
    const SCRIPT: &str = r#"
        full=$1; shift
        mount -t tmpfs -o size=64k tmpfs "$full" || exit 99
        head -c 1000000 /dev/zero > "$full/filler" 2>/dev/null
        exec "$@""#;
    let rbprof = Command::new("unshare")
        .args(["--mount", "--", "sh", "-c", SCRIPT, "sh"])
        .arg(&full)
        .arg(RBPROF)
        .args(["record", "--pid", &target.pid().to_string(), "-o"])
        .arg(full.join("out.pb.gz"))
        .arg("-o")
        .arg(&other)
        .stderr(Stdio::piped())
        .spawn()?;
    rig::wait_until_recording(rbprof.id())?;
    target.go_on()?;
    target.wait_for("finished")?;
    drop(target);
    let output = rbprof.wait_with_output()?;
    fails(&output, 1, &["cannot write", "out.pb.gz", "space"])?;
    ensure!(
        std::fs::read_to_string(&other)?.contains("Depth#busy"),
        "the other output"
    );
    Ok(())
}

#[test]
fn ctrl_c_writes_the_profile() -> Result<()> {
    let Some(mut target) = busy("debian-3.1.2", 60_000)? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let profile = dir.path().join("out.folded");
    let rbprof = start(&target, &profile)?;
    target.go_on()?;
    wait_for_cpu_time(target.pid())?;
    interrupt(&rbprof)?;
    let output = rbprof.wait_with_output()?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(
        std::fs::read_to_string(&profile)?.contains("Depth#busy"),
        "{output:?}"
    );
    Ok(())
}

#[test]
fn a_second_ctrl_c_ends_at_once() -> Result<()> {
    let Some(mut target) = busy("debian-3.1.2", 60_000)? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    // Nobody reads it, so writing waits for ever.
    let pipe = dir.path().join("out.folded");
    ensure!(
        Command::new("mkfifo").arg(&pipe).status()?.success(),
        "mkfifo"
    );
    let mut rbprof = start(&target, &pipe)?;
    target.go_on()?;
    wait_for_cpu_time(target.pid())?;
    interrupt(&rbprof)?;
    wait_until("the recording is over", || {
        Ok(!rig::is_recording(rbprof.id()))
    })?;
    ensure!(rbprof.try_wait()?.is_none(), "it did not wait for a reader");
    wait_until("it ends", || {
        interrupt(&rbprof)?;
        Ok(rbprof.try_wait()?.is_some())
    })?;
    let status = rbprof.wait()?;
    ensure!(status.code() == Some(130), "{status}");
    Ok(())
}

fn start(target: &Target, profile: &Path) -> Result<Child> {
    let rbprof = Command::new(RBPROF)
        .args(["record", "--pid", &target.pid().to_string(), "-o"])
        .arg(profile)
        .stderr(Stdio::piped())
        .spawn()?;
    rig::wait_until_recording(rbprof.id())?;
    Ok(rbprof)
}

fn interrupt(child: &Child) -> Result<()> {
    let pid = child.id().to_string();
    // It may be gone.
    Command::new("kill")
        .args(["-INT", &pid])
        .stderr(Stdio::null())
        .status()?;
    Ok(())
}

/// Waits until the process has taken another half second of CPU time.
fn wait_for_cpu_time(pid: u32) -> Result<()> {
    let begin = cpu_ticks(pid)?;
    wait_until("the target works", || Ok(cpu_ticks(pid)? >= begin + 50))
}

/// CPU time of a process, in hundredths of a second.
fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |at: usize| {
        fields
            .get(at)
            .context("too short")?
            .parse::<u64>()
            .context("a number")
    };
    Ok(field(11)? + field(12)?)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        if start.elapsed() > PATIENCE {
            bail!("waited in vain: {what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
