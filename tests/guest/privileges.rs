//! What rbprof may do with few privileges, and what it says where something
//! forbids it: docs/kernels.md has both.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::process::Output;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use rustix::thread::CapabilitySet;
use xtask::rubies::Installed;

use crate::user::as_nobody;

/// What recording takes.
const THREE: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_PTRACE);
const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// An ordinary user with three capabilities records; without them, or where the
/// kernel's setting wants more, is told so.
///
/// # Errors
/// If not.
pub(crate) fn few_are_enough(rbprof: &Path, ruby: &Installed) -> Result<()> {
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .envs([("DEPTH", "20"), ("CPU_MS", "600000")]),
    )?;
    target.wait_for("ready")?;
    target.go_on()?;
    let pid = target.pid().to_string();
    let before = fs::read_to_string(PARANOID).context(PARANOID)?;
    fs::write(PARANOID, "2")?;

    let system = as_nobody(THREE, rbprof)?
        .args(["inspect", "--system"])
        .output()?;
    ensure!(
        system.status.success(),
        "inspect --system: {}",
        said(&system)
    );
    let record = |capabilities| -> Result<Output> {
        let profile = profile();
        let mut command = as_nobody(capabilities, rbprof)?;
        command.args(["record", "-q", "--pid", &pid, "-d", "2", "-o", &profile]);
        Ok(command.output()?)
    };
    let recorded = record(THREE)?;
    ensure!(recorded.status.success(), "record: {}", said(&recorded));
    let stacks = fs::read_to_string(profile())?;
    ensure!(stacks.contains("Depth#down;Depth#busy"), "{stacks}");
    fs::remove_file(profile())?;

    let refused = record(CapabilitySet::empty())?;
    let words = said(&refused);
    ensure!(
        refused.status.code() == Some(1) && words.contains("CAP_SYS_PTRACE"),
        "without any: {words}"
    );
    let refused = as_nobody(CapabilitySet::empty(), rbprof)?
        .args(["inspect", "--system"])
        .output()?;
    let words = said(&refused);
    ensure!(
        refused.status.code() == Some(1)
            && words.contains("CAP_BPF")
            && words.contains("CAP_PERFMON"),
        "inspect --system without any: {words}"
    );

    // Debian's kernels have a patch that makes this forbid everything.
    fs::write(PARANOID, "3")?;
    let refused = record(THREE)?;
    let words = said(&refused);
    ensure!(
        refused.status.success() || words.contains("kernel.perf_event_paranoid is 3"),
        "with perf_event_paranoid: {words}"
    );
    eprintln!(
        "perf_event_paranoid 3: {}",
        if refused.status.success() {
            "recorded"
        } else {
            "refused, and said so"
        }
    );
    fs::write(PARANOID, before.trim())?;
    Ok(())
}

/// Where the kernel is locked down, root is told so. It stays locked down.
///
/// # Errors
/// If not.
pub(crate) fn lockdown_is_named(rbprof: &Path) -> Result<()> {
    fs::write(LOCKDOWN, "confidentiality").context(LOCKDOWN)?;
    let refused = Command::new(rbprof)
        .args(["inspect", "--system"])
        .output()?;
    let words = said(&refused);
    ensure!(
        refused.status.code() == Some(1) && words.contains("lockdown=confidentiality"),
        "{words}"
    );
    Ok(())
}

fn profile() -> String {
    "/tmp/few-privileges.folded".to_owned()
}

fn said(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
