//! rbprof with as few privileges as it takes, and what it says without them.

use std::fs;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;
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
use serde_json::Value;
use tempfile::TempDir;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// The machine's own Ruby: its files may be read by anybody.
const RUBY: &str = "/usr/bin/ruby";
const PROGRAM: &str = "STDOUT.sync = true; def work = 1000.times { [2, 1].sort }; \
                       puts :ready; loop { work }";
/// A recording that has not begun after so long never will.
const PATIENCE: Duration = Duration::from_secs(60);
/// The three that it takes, as setpriv calls them.
const THREE: [&str; 3] = ["bpf", "perfmon", "sys_ptrace"];

/// rbprof, and a directory to write to, where `nobody` may use them.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777))?;
        fs::copy(RBPROF, directory.path().join("rbprof"))?;
        Ok(Self { directory })
    }

    fn rbprof(&self) -> PathBuf {
        self.directory.path().join("rbprof")
    }

    /// rbprof as `nobody` with exactly these capabilities.
    fn as_nobody(&self, capabilities: &[&str]) -> Command {
        let list = capabilities
            .iter()
            .fold("-all".to_owned(), |list, name| format!("{list},+{name}"));
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(format!("--inh-caps={list}"))
            .arg(format!("--ambient-caps={list}"))
            .arg("--")
            .arg(self.rbprof())
            .current_dir(self.directory.path())
            .stdin(Stdio::null());
        command
    }
}

/// The three, and what this machine's settings want beside them.
fn required() -> Vec<&'static str> {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid")
        .ok()
        .and_then(|text| text.trim().parse::<i64>().ok());
    let mut all = THREE.to_vec();
    if paranoid >= Some(3) {
        all.push("sys_admin");
    }
    all
}

fn busy() -> Result<Option<Target>> {
    if !xtask::setup::is_root() {
        rig::skip("recording needs root")?;
        return Ok(None);
    }
    if !Path::new(RUBY).exists() {
        rig::skip("this machine has no Ruby of its own")?;
        return Ok(None);
    }
    let mut target = Target::start(Command::new(RUBY).args(["-e", PROGRAM]))?;
    target.wait_for("ready")?;
    Ok(Some(target))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn three_capabilities_are_enough_for_an_ordinary_user() -> Result<()> {
    let Some(target) = busy()? else {
        return Ok(());
    };
    let place = Place::new()?;
    let output = place
        .as_nobody(&required())
        .args(["record", "--pid", &target.pid().to_string()])
        .args(["-d", "2", "-o", "out.folded", "--native=all"])
        .output()?;
    ensure!(output.status.success(), "{}", said(&output));
    let stacks = fs::read_to_string(place.directory.path().join("out.folded"))?;
    let samples = |of: &str| -> u64 {
        let lines = stacks.lines().filter(|line| line.contains(of));
        lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    };
    ensure!(samples("Object#work") > 50, "{stacks}");
    // Native frames and their names, of files that are read by their paths.
    ensure!(samples("rb_vm_exec") > 50, "{stacks}");
    Ok(())
}

#[test]
fn each_of_the_three_is_missed() -> Result<()> {
    let Some(target) = busy()? else {
        return Ok(());
    };
    let place = Place::new()?;
    for (left_out, name) in THREE
        .into_iter()
        .zip(["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"])
    {
        let others: Vec<_> = THREE.into_iter().filter(|it| *it != left_out).collect();
        let output = place
            .as_nobody(&others)
            .args(["record", "--pid", &target.pid().to_string()])
            .args(["-d", "1", "-o", "out.folded"])
            .output()?;
        ensure!(output.status.code() == Some(1), "{name}: {output:?}");
        ensure!(said(&output).contains(name), "{name}: {}", said(&output));
    }
    Ok(())
}

/// One of the sets of every thread of a process.
fn capabilities(pid: u32, set: &str) -> Result<Vec<u64>> {
    fs::read_dir(format!("/proc/{pid}/task"))?
        .map(|thread| set_in(&fs::read_to_string(thread?.path().join("status"))?, set))
        .collect()
}

fn set_in(status: &str, set: &str) -> Result<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(set))
        .with_context(|| format!("no {set} in {status}"))?;
    Ok(u64::from_str_radix(
        line.trim_start_matches(':').trim(),
        16,
    )?)
}

/// `CAP_DAC_READ_SEARCH`, `CAP_SYS_PTRACE`, `CAP_SYSLOG`, `CAP_PERFMON`,
/// `CAP_BPF`, `CAP_CHECKPOINT_RESTORE`.
const USED: u64 = 1 << 2 | 1 << 19 | 1 << 34 | 1 << 38 | 1 << 39 | 1 << 40;
const SYS_ADMIN: u64 = 1 << 21;
const NET_BIND_SERVICE: u64 = 1 << 10;

#[test]
fn root_gives_up_what_a_recording_does_not_need() -> Result<()> {
    let Some(target) = busy()? else {
        return Ok(());
    };
    let place = Place::new()?;
    let mut rbprof = Command::new(place.rbprof())
        .args(["record", "--pid", &target.pid().to_string()])
        .args(["-d", "600", "-o", "out.folded"])
        .current_dir(place.directory.path())
        .stderr(Stdio::null())
        .spawn()?;
    let checked = check_recording(rbprof.id());
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(rbprof.id().cast_signed(), libc::SIGINT) };
    let status = rbprof.wait()?;
    checked?;
    ensure!(status.success(), "{status}");
    // It could still write.
    ensure!(place.directory.path().join("out.folded").exists());
    Ok(())
}

fn check_recording(pid: u32) -> Result<()> {
    let start = Instant::now();
    while !rig::is_recording(pid) {
        ensure!(start.elapsed() < PATIENCE, "it does not record");
        std::thread::sleep(Duration::from_millis(20));
    }
    let own = capabilities(std::process::id(), "CapPrm")?;
    let own = own.first().copied().unwrap_or_default();
    let mut wanted = own & USED;
    if required().contains(&"sys_admin") {
        wanted |= own & SYS_ADMIN;
    }
    for set in ["CapPrm", "CapEff"] {
        for held in capabilities(pid, set)? {
            ensure!(held == wanted, "{set}: {held:x}, not {wanted:x}");
        }
    }
    Ok(())
}

#[test]
fn a_command_keeps_what_it_would_have_had() -> Result<()> {
    if busy()?.is_none() {
        return Ok(());
    }
    let place = Place::new()?;
    let arguments = [
        "record",
        "-o",
        "out.folded",
        "--",
        "cat",
        "/proc/self/status",
    ];
    let of_root = Command::new(place.rbprof())
        .args(arguments)
        .current_dir(place.directory.path())
        .output()?;
    let status = String::from_utf8_lossy(&of_root.stdout);
    let own = fs::read_to_string("/proc/self/status")?;
    for set in ["CapEff", "CapPrm", "CapBnd", "CapAmb"] {
        ensure!(
            set_in(&status, set)? == set_in(&own, set)?,
            "{set}: {status}"
        );
    }
    let mut ambient = required();
    ambient.push("net_bind_service");
    let of_nobody = place.as_nobody(&ambient).args(arguments).output()?;
    let status = String::from_utf8_lossy(&of_nobody.stdout);
    for set in ["CapEff", "CapAmb"] {
        let held = set_in(&status, set)?;
        ensure!(held & NET_BIND_SERVICE != 0, "{set}: {status}");
        ensure!(
            held.count_ones() as usize == ambient.len(),
            "{set}: {status}"
        );
    }
    Ok(())
}

/// The report as JSON, and the exit status.
fn system(command: &mut Command) -> Result<(Value, Option<i32>)> {
    let output = command.args(["inspect", "--system", "--json"]).output()?;
    let report = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{} {}", output.status, said(&output)))?;
    Ok((report, output.status.code()))
}

fn held(report: &Value, name: &str) -> Result<bool> {
    let all = report["capabilities"].as_array().context("no list")?;
    let found = all.iter().find(|it| it["name"] == name);
    found
        .and_then(|it| it["held"].as_bool())
        .with_context(|| format!("no {name} in {report}"))
}

#[test]
fn the_system_is_inspected_by_whoever_asks() -> Result<()> {
    if busy()?.is_none() {
        return Ok(());
    }
    let place = Place::new()?;

    let (root, status) = system(&mut Command::new(place.rbprof()))?;
    ensure!(status == Some(0), "{root}");
    ensure!(root["verdict"] != "impossible", "{root}");
    ensure!(held(&root, "CAP_BPF")? && held(&root, "CAP_SYS_PTRACE")?);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(root["kernel"] == release.trim(), "{root}");

    let (three, status) = system(&mut place.as_nobody(&required()))?;
    ensure!(status == Some(0), "{three}");
    ensure!(three["verdict"] == "degraded", "{three}");
    let missing = three["missing"].to_string();
    ensure!(missing.contains("CAP_CHECKPOINT_RESTORE"), "{missing}");

    let (nobody, status) = system(&mut place.as_nobody(&[]))?;
    ensure!(status == Some(1), "{nobody}");
    ensure!(nobody["verdict"] == "impossible", "{nobody}");
    let problem = nobody["problem"].as_str().context("no problem")?;
    for word in ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "setcap"] {
        ensure!(problem.contains(word), "no {word} in {problem}");
    }
    ensure!(!held(&nobody, "CAP_BPF")?);

    // Who may try and who may not come to the same about the kernel.
    let there = |report: &Value| -> Result<Vec<(String, bool)>> {
        let all = report["features"].as_array().context("no list")?;
        Ok(all
            .iter()
            .map(|it| (it["name"].to_string(), it["available"] == true))
            .collect())
    };
    ensure!(there(&root)? == there(&nobody)?, "{root} {nobody}");
    Ok(())
}

#[test]
fn the_page_names_everything_and_ends_with_a_verdict() -> Result<()> {
    let output = Command::new(RBPROF)
        .args(["inspect", "--system"])
        .output()?;
    let page = String::from_utf8_lossy(&output.stdout);
    for name in [
        "kernel",
        "PID namespace",
        "CAP_BPF",
        "perf_event_paranoid",
        "unprivileged_bpf_disabled",
        "lockdown",
        "Seccomp",
        "bpf_loop",
    ] {
        ensure!(
            page.lines().any(|line| line.starts_with(name)),
            "no {name}: {page}"
        );
    }
    match output.status.code() {
        Some(0) => ensure!(page.contains("\nrbprof can record here"), "{page}"),
        Some(1) => ensure!(page.contains("\nrbprof cannot record here: "), "{page}"),
        other => bail!("{other:?}: {page}"),
    }
    Ok(())
}
