//! Children and threads are recorded from the moment they exist, and a command
//! from its first instruction.

use std::path::Path;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof_tests::checks::children::Pace;
use rbprof_tests::checks::children::children_are_recorded;
use rbprof_tests::checks::children::innermost;
use rbprof_tests::recording::Recorder;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");

#[test]
fn children_on_debian_2_7_4() -> Result<()> {
    check_children("debian-2.7.4")
}

#[test]
fn children_on_debian_3_1_2() -> Result<()> {
    check_children("debian-3.1.2")
}

#[test]
fn children_on_3_3_8_with_exports() -> Result<()> {
    check_children("source-3.3.8-protected-stripped")
}

fn check_children(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    children_are_recorded(&ruby, Pace::HOST)?;
    Ok(())
}

#[test]
fn a_command_is_recorded_from_its_first_instruction() -> Result<()> {
    for name in [
        "debian-2.7.4",
        "debian-3.1.2",
        "source-3.3.8-protected-stripped",
    ] {
        let Some(ruby) = rig::ruby(name)? else {
            continue;
        };
        let dir = tempfile::tempdir()?;
        let profile = dir.path().join("out.folded");
        let command = ruby.script(&rig::workload("processes.rb"))?;
        let output = record_command(&["-F", "997"], &profile, &through_shell(&command), &[])?;
        ensure!(output.status.success(), "{output:?}");
        let folded = std::fs::read_to_string(&profile)?;
        // Before the Ruby is found, samples have a place and no names.
        let unnamed = samples_with(&folded, "starting");
        let named = samples_with(&folded, "Object#in_beginning");
        eprintln!("{name}: {unnamed} samples before Ruby was found, {named} of the beginning");
        ensure!(unnamed > 0, "{name}: nothing of the start");
        ensure!(named >= 100, "{name}: {named} samples of the beginning");
        for place in [
            "in_parent",
            "in_child",
            "in_grandchild",
            "in_thread_of_grandchild",
        ] {
            let count = samples_with(&folded, &format!("Object#{place}"));
            ensure!(count >= 100, "{name}: {count} samples of {place}");
        }
    }
    Ok(())
}

#[test]
fn the_status_of_a_command_is_passed_through() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let profile = dir.path().join("out.folded");
    let command = ruby.script(&rig::workload("processes.rb"))?;
    for (variable, value, status) in [("STATUS", "3", 3), ("SIGNAL", "TERM", 128 + 15)] {
        let output = record_command(&[], &profile, &words(&command), &[(variable, value)])?;
        ensure!(output.status.code() == Some(status), "{output:?}");
        let folded = std::fs::read_to_string(&profile)?;
        ensure!(samples_with(&folded, "Object#in_parent") > 10, "{folded}");
        std::fs::remove_file(&profile)?;
    }
    Ok(())
}

#[test]
fn a_command_that_cannot_be_started_is_an_error() -> Result<()> {
    if rig::ruby("debian-3.1.2")?.is_none() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let output = record_command(
        &[],
        &dir.path().join("out.folded"),
        &["/no/such/program".to_owned()],
        &[],
    )?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("/no/such/program"), "{said}");
    Ok(())
}

#[test]
fn a_target_that_ends_is_a_success() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let profile = dir.path().join("out.folded");
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .envs([("DEPTH", "20"), ("CPU_MS", "500")]),
    )?;
    target.wait_for("ready")?;
    let rbprof = Command::new(RBPROF)
        .args([
            "record",
            "-d",
            "600",
            "--pid",
            &target.pid().to_string(),
            "-o",
        ])
        .arg(&profile)
        .stderr(Stdio::piped())
        .spawn()?;
    rig::wait_until_recording(rbprof.id())?;
    target.go_on()?;
    target.wait_for("finished")?;
    ensure!(target.end()?.success(), "the target failed");
    let output = rbprof.wait_with_output()?;
    ensure!(output.status.success(), "{output:?}");
    let folded = std::fs::read_to_string(&profile)?;
    let busy = samples_with(&folded, "Depth#busy");
    ensure!(busy >= 20, "{busy} samples: {folded}");
    Ok(())
}

fn record_command(
    options: &[&str],
    profile: &Path,
    command: &[String],
    variables: &[(&str, &str)],
) -> Result<Output> {
    Command::new(RBPROF)
        .arg("record")
        .args(options)
        .arg("-o")
        .arg(profile)
        .arg("--")
        .args(command)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .context("starting rbprof")
}

fn words(command: &Command) -> Vec<String> {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

/// Started as the shims of version managers do it.
fn through_shell(command: &Command) -> Vec<String> {
    ["sh", "-c", "exec \"$@\"", "sh"]
        .into_iter()
        .map(str::to_owned)
        .chain(words(command))
        .collect()
}

/// Samples with a frame of that name in folded stacks.
fn samples_with(folded: &str, label: &str) -> u64 {
    folded
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter(|(stack, _)| stack.split(';').any(|frame| frame.contains(label)))
        .filter_map(|(_, count)| count.parse::<u64>().ok())
        .sum()
}

/// A cluster's master is given, and its workers are there already.
#[test]
fn children_that_exist_already_are_recorded() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let program = "
        def in_worker = loop { 1 + 1 }
        workers = 2.times.map { fork { in_worker } }
        puts 'ready'
        $stdout.flush
        $stdin.gets
        workers.each { |pid| Process.kill(:KILL, pid) }
        Process.waitall
    ";
    let mut target = Target::start(ruby.command().args(["--disable-gems", "-e", program]))?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options::default())? else {
        return Ok(());
    };
    recorder.start(&[target.pid()])?;
    let seen = recorder.seen();
    let deadline = Instant::now() + Duration::from_secs(20);
    recorder.run_until(|| {
        Ok(Instant::now() > deadline || seen.count(|seen| seen.pid != target.pid()) >= 40)
    })?;
    let recording = recorder.finish()?;
    target.go_on()?;
    target.end()?;
    let mut workers: Vec<u32> = recording
        .seen
        .iter()
        .filter(|seen| innermost(seen, "Object#in_worker").is_some())
        .map(|seen| seen.pid)
        .collect();
    workers.sort_unstable();
    workers.dedup();
    ensure!(workers.len() == 2, "workers seen: {workers:?}");
    Ok(())
}

/// A parent that goes away leaves its children to be recorded.
#[test]
fn children_are_recorded_after_their_parent_with_a_duration() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let out = directory.path().join("out.folded");
    let program = "
        fork do
          def in_orphan = loop { 1 + 1 if Process.clock_gettime(3) < 3 or exit!(0) }
          in_orphan
        end
        exit!(0)
    ";
    let command = ruby.command();
    let status = Command::new(RBPROF)
        .args(["record", "-q", "-F", "499", "-d", "30", "-o"])
        .arg(&out)
        .arg("--")
        .arg(command.get_program())
        .args(command.get_args())
        .args(["--disable-gems", "-e", program])
        .status()?;
    ensure!(status.success(), "{status}");
    let folded = std::fs::read_to_string(&out)?;
    let count = samples_with(&folded, "Object#in_orphan");
    // Of about 1,500; the Ruby has to be found first, on a machine that may be
    // slow.
    ensure!(count >= 500, "{count} samples of the orphan:\n{folded}");
    Ok(())
}
