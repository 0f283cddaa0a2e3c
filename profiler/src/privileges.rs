//! The privileges of this process: what rbprof needs of them, what it has, and
//! how it gives up the rest.
//!
//! Capabilities belong to threads. What is given up is gone from the calling
//! thread and from those that it starts later, so this is done before any are
//! started.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

pub use rustix::thread::CapabilitySet;
use rustix::thread::capabilities;
use rustix::thread::set_capabilities;

/// A capability, and what it is good for.
#[derive(Clone, Copy, Debug)]
pub struct Purpose {
    /// The capability.
    pub capability: CapabilitySet,
    /// Its name: `CAP_BPF`.
    pub name: &'static str,
    /// Whether nothing can be recorded without it.
    pub is_required: bool,
    /// What it is needed for.
    pub purpose: &'static str,
    /// What follows when it is missing.
    pub without: &'static str,
}

/// Every capability that rbprof has a use for while it records.
pub const PURPOSES: [Purpose; 6] = [
    Purpose {
        capability: CapabilitySet::BPF,
        name: "CAP_BPF",
        is_required: true,
        purpose: "load the eBPF programs",
        without: "nothing can be recorded",
    },
    Purpose {
        capability: CapabilitySet::PERFMON,
        name: "CAP_PERFMON",
        is_required: true,
        purpose: "sample all CPUs, and read memory in eBPF programs",
        without: "nothing can be recorded",
    },
    Purpose {
        capability: CapabilitySet::SYS_PTRACE,
        name: "CAP_SYS_PTRACE",
        is_required: true,
        purpose: "read the memory of other processes",
        without: "only processes of the same user can be recorded, and only if Yama \
                  (kernel.yama.ptrace_scope) is off",
    },
    Purpose {
        capability: CapabilitySet::CHECKPOINT_RESTORE,
        name: "CAP_CHECKPOINT_RESTORE",
        is_required: false,
        purpose: "open files that a process has mapped and that its paths do not lead to",
        without: "a Ruby whose files were deleted or replaced since it started, or lie in a \
                  directory that this user may not enter, cannot be recorded",
    },
    Purpose {
        capability: CapabilitySet::SYSLOG,
        name: "CAP_SYSLOG",
        is_required: false,
        purpose: "see the addresses of kernel functions",
        without: "frames of the kernel have no names",
    },
    Purpose {
        capability: CapabilitySet::DAC_READ_SEARCH,
        name: "CAP_DAC_READ_SEARCH",
        is_required: false,
        purpose: "read files of other users",
        without: "programs, libraries and debug files that this user may not read have no names \
                  and no native frames",
    },
];

/// The capabilities that this process can use now.
///
/// Those of a user namespace look the same, and are worth nothing to BPF.
#[must_use]
pub fn effective() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// Whether a capability is among those held, or one that includes it.
#[must_use]
pub fn allows(held: CapabilitySet, wanted: CapabilitySet) -> bool {
    // `CAP_SYS_ADMIN` was split in 5.8 and 5.9, and still stands for its parts.
    const PARTS: CapabilitySet = CapabilitySet::BPF
        .union(CapabilitySet::PERFMON)
        .union(CapabilitySet::CHECKPOINT_RESTORE)
        .union(CapabilitySet::SYSLOG);
    held.contains(wanted)
        || held.contains(CapabilitySet::SYS_ADMIN) && PARTS.contains(wanted)
        || held.contains(CapabilitySet::DAC_OVERRIDE) && wanted == CapabilitySet::DAC_READ_SEARCH
}

/// The names of the required capabilities that are not held.
#[must_use]
pub fn missing(held: CapabilitySet) -> Vec<&'static str> {
    PURPOSES
        .iter()
        .filter(|it| it.is_required && !allows(held, it.capability))
        .map(|it| it.name)
        .collect()
}

/// Gives up every capability that a recording in progress does not need, and
/// writing `outputs` neither. `starts_command`: what a command would inherit is
/// kept for it. Gives what is left.
///
/// A recording needs what is in [`PURPOSES`] until it ends: processes to come
/// are looked at as those at the beginning, events are opened on CPUs that come
/// online.
///
/// # Errors
/// When the system refuses; then nothing has changed.
pub fn give_up_the_rest<'a>(
    outputs: impl Iterator<Item = &'a Path>,
    starts_command: bool,
) -> io::Result<CapabilitySet> {
    let mut sets = capabilities(None)?;
    let mut wanted = needed(sets.effective, perf_event_paranoid());
    for output in outputs {
        wanted |= needed_to_write(output, rustix::process::geteuid().as_raw());
    }
    sets.effective &= wanted;
    // A capability that leaves the permitted set leaves the ambient one, which
    // is what a command of an ordinary user would inherit. Root's get theirs
    // from the bounding set, which is left alone.
    if starts_command {
        wanted |= ambient()?;
    }
    sets.permitted &= wanted;
    set_capabilities(None, sets)?;
    Ok(sets.permitted)
}

/// From this value of `kernel.perf_event_paranoid` on, the kernels that know it
/// (Debian's, Ubuntu's) open perf events only for `CAP_SYS_ADMIN`.
pub const PARANOID: i64 = 3;

/// `kernel.perf_event_paranoid`.
fn perf_event_paranoid() -> Option<i64> {
    let text = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?;
    text.trim().parse().ok()
}

/// What a recording needs of the capabilities that are held.
fn needed(held: CapabilitySet, perf_event_paranoid: Option<i64>) -> CapabilitySet {
    let purposes = PURPOSES
        .iter()
        .fold(CapabilitySet::empty(), |all, it| all | it.capability);
    // Where it has to stand in for others.
    let parts = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::CHECKPOINT_RESTORE;
    if held.contains(parts) && perf_event_paranoid < Some(PARANOID) {
        purposes
    } else {
        purposes | CapabilitySet::SYS_ADMIN
    }
}

/// What it takes to put a file into a place that may be another user's.
fn needed_to_write(path: &Path, user: u32) -> CapabilitySet {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    let is_closed = |place: &Path| {
        place
            .metadata()
            .is_ok_and(|found| found.uid() != user || found.mode() & 0o200 == 0)
    };
    if is_closed(&path) || is_closed(directory) {
        CapabilitySet::DAC_OVERRIDE | CapabilitySet::FOWNER
    } else {
        CapabilitySet::empty()
    }
}

/// What a program that this process starts inherits without being privileged.
fn ambient() -> io::Result<CapabilitySet> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    Ok(set_in(&status, "CapAmb:").unwrap_or(CapabilitySet::empty()))
}

/// One of the sets in `/proc/PID/status`.
fn set_in(status: &str, key: &str) -> Option<CapabilitySet> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let bits = u64::from_str_radix(line.trim(), 16).ok()?;
    Some(CapabilitySet::from_bits_retain(bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(
            missing(CapabilitySet::empty()),
            ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"]
        );
        assert_eq!(missing(CapabilitySet::SYS_ADMIN), ["CAP_SYS_PTRACE"]);
        let three = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_PTRACE;
        assert!(missing(three).is_empty());
    }

    #[test]
    fn sets_are_read() {
        let status = "CapEff:\t000000c000080000\nCapAmb:\t0000000000000400\n";
        let three = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_PTRACE;
        assert_eq!(set_in(status, "CapEff:"), Some(three));
        assert_eq!(
            set_in(status, "CapAmb:"),
            Some(CapabilitySet::NET_BIND_SERVICE)
        );
        assert_eq!(set_in(status, "CapBnd:"), None);
        assert_eq!(set_in("CapEff:\tx\n", "CapEff:"), None);
    }

    #[test]
    fn an_old_engine_s_capability_is_kept_only_where_it_stands_in() {
        let keeps = |held, paranoid| needed(held, paranoid).contains(CapabilitySet::SYS_ADMIN);
        assert!(!keeps(CapabilitySet::all(), Some(2)));
        assert!(!keeps(CapabilitySet::all(), None));
        // Events are opened on CPUs that come online.
        assert!(keeps(CapabilitySet::all(), Some(3)));
        let old = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
        assert!(keeps(old, Some(2)));
    }

    #[test]
    fn writing_into_the_own_directory_takes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let owner = directory.path().metadata().unwrap().uid();
        let path = directory.path().join("new.svg");
        assert!(needed_to_write(&path, owner).is_empty());
        assert!(needed_to_write(&path, owner + 1).contains(CapabilitySet::DAC_OVERRIDE));
    }

    /// The sets are a thread's own, so a thread can try.
    #[test]
    fn the_rest_is_given_up() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            let kept = give_up_the_rest(std::iter::empty(), false).unwrap();
            let after = capabilities(None).unwrap();
            assert_eq!(after.permitted, kept);
            assert_eq!(after.effective, before.effective & kept);
            assert_eq!(after.inheritable, before.inheritable);
            assert!(!after.permitted.contains(CapabilitySet::NET_ADMIN));
            for it in PURPOSES {
                assert_eq!(
                    after.effective.contains(it.capability),
                    before.effective.contains(it.capability),
                    "{}",
                    it.name
                );
            }
        })
        .join()
        .unwrap();
    }
}
