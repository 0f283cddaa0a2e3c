//! What forbids this process to use BPF and perf events.
//!
//! The kernel answers every refusal with the same two error numbers. Its
//! settings, and what this process is, tell which of them it can have been.

use std::fmt;
use std::fs;
use std::path::Path;

use crate::privileges;
use crate::privileges::CapabilitySet;

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The `bpf` system call, or a program on the way in.
    Bpf,
    /// `perf_event_open`, or the attachment to its event.
    PerfEvent,
}

/// How much of the kernel is closed even to root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lockdown {
    /// Nothing.
    None,
    /// What could change the kernel.
    Integrity,
    /// What could read it, too.
    Confidentiality,
}

impl fmt::Display for Lockdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Integrity => "integrity",
            Self::Confidentiality => "confidentiality",
        })
    }
}

impl Lockdown {
    /// Reads `none [integrity] confidentiality`.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once('[')?;
        match rest.split_once(']')?.0 {
            "none" => Some(Self::None),
            "integrity" => Some(Self::Integrity),
            "confidentiality" => Some(Self::Confidentiality),
            _ => None,
        }
    }
}

/// The settings of the system and of this process that decide what it may do.
/// `None` where a setting cannot be read, or does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restrictions {
    /// Capabilities in effect.
    pub capabilities: CapabilitySet,
    /// Whether those are of the initial user namespace: of another one they are
    /// worth nothing to BPF.
    pub initial_user_namespace: bool,
    /// `/sys/kernel/security/lockdown`.
    pub lockdown: Option<Lockdown>,
    /// `kernel.perf_event_paranoid`.
    pub perf_event_paranoid: Option<i64>,
    /// `kernel.unprivileged_bpf_disabled`.
    pub unprivileged_bpf_disabled: Option<i64>,
    /// `kernel.kptr_restrict`.
    pub kptr_restrict: Option<i64>,
    /// `kernel.yama.ptrace_scope`.
    pub ptrace_scope: Option<i64>,
    /// `Seccomp` of `/proc/self/status`: 0 none, 1 strict, 2 a filter.
    pub seccomp: Option<i64>,
    /// `NoNewPrivs` of `/proc/self/status`.
    pub no_new_privs: Option<i64>,
    /// Hard limit of locked memory (`RLIMIT_MEMLOCK`), bytes; `None`: none.
    pub memlock: Option<u64>,
    /// Whether BPF memory is charged to that limit (before 5.11).
    pub memlock_counts: bool,
}

/// Something that forbids, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hindrance {
    /// What it is.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Hindrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.what, self.remedy)
    }
}

/// How to get capabilities.
const GET_CAPABILITIES: &str = "Run rbprof as root, or give the binary what it needs: setcap \
                                cap_bpf,cap_perfmon,cap_sys_ptrace+ep rbprof";

impl Restrictions {
    /// Those of now. `memlock_counts`: whether the kernel charges BPF memory to
    /// the user's limit.
    #[must_use]
    pub fn now(memlock_counts: bool) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let user_ids = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        Self {
            capabilities: privileges::effective(),
            initial_user_namespace: is_initial(&user_ids),
            lockdown: fs::read_to_string("/sys/kernel/security/lockdown")
                .ok()
                .and_then(|text| Lockdown::parse(&text)),
            perf_event_paranoid: setting("perf_event_paranoid"),
            unprivileged_bpf_disabled: setting("unprivileged_bpf_disabled"),
            kptr_restrict: setting("kptr_restrict"),
            ptrace_scope: setting("yama/ptrace_scope"),
            seccomp: number_in(&status, "Seccomp:"),
            no_new_privs: number_in(&status, "NoNewPrivs:"),
            memlock: limit.maximum,
            memlock_counts,
        }
    }

    /// What may have been the reason, the surest first. Empty: nothing that is
    /// known here.
    #[must_use]
    pub fn hindrances(&self, refused: Refused) -> Vec<Hindrance> {
        let mut found = Vec::new();
        let missing = privileges::missing(self.capabilities);
        if !self.initial_user_namespace {
            found.push(Hindrance {
                what: "This process is in a user namespace (as in a rootless container), where \
                       no capability counts for BPF"
                    .to_owned(),
                remedy: "Run rbprof as root outside of it, or in a container with the host's \
                         users (no userns-remap, not rootless)"
                    .to_owned(),
            });
        } else if !missing.is_empty() {
            let mut what = format!("This process lacks {}", missing.join(", "));
            if refused == Refused::Bpf
                && let Some(setting @ 1..) = self.unprivileged_bpf_disabled
            {
                what.push_str(&format!(
                    ", and kernel.unprivileged_bpf_disabled is {setting}"
                ));
            }
            found.push(Hindrance {
                what,
                remedy: GET_CAPABILITIES.to_owned(),
            });
        }
        if self.lockdown == Some(Lockdown::Confidentiality) && refused == Refused::Bpf {
            found.push(confidentiality(self.lockdown));
        }
        let may_administer = self.capabilities.contains(CapabilitySet::SYS_ADMIN);
        if refused == Refused::PerfEvent
            && let Some(paranoid @ privileges::PARANOID..) = self.perf_event_paranoid
            && !may_administer
        {
            found.push(Hindrance {
                what: format!(
                    "kernel.perf_event_paranoid is {paranoid}, which on this kernel forbids perf \
                     events even to those with CAP_PERFMON"
                ),
                remedy: "Set it to 2 (sysctl kernel.perf_event_paranoid=2), or give rbprof \
                         CAP_SYS_ADMIN as well"
                    .to_owned(),
            });
        }
        if refused == Refused::Bpf
            && self.memlock_counts
            && let Some(limit) = self.memlock
            && !self.capabilities.contains(CapabilitySet::SYS_RESOURCE)
        {
            found.push(Hindrance {
                what: format!(
                    "This kernel (before 5.11) takes the memory of BPF maps from the user's limit \
                     of locked memory, which is {} KiB",
                    limit >> 10
                ),
                remedy: "Raise it (ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit), \
                         or give rbprof CAP_SYS_RESOURCE as well, to raise it itself"
                    .to_owned(),
            });
        }
        if self.seccomp.is_some_and(|mode| mode != 0) && found.is_empty() {
            found.push(Hindrance {
                what: "This process has CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE, so something \
                       else forbids it: most likely the seccomp profile that it runs under (a \
                       container engine's, a service manager's)"
                    .to_owned(),
                remedy: "Allow bpf and perf_event_open in it (docker run --security-opt \
                         seccomp=unconfined, or a profile that allows them)"
                    .to_owned(),
            });
        }
        found
    }
}

/// A kernel that lets nobody read it; whether it is one may not be known.
pub(super) fn confidentiality(lockdown: Option<Lockdown>) -> Hindrance {
    let is = match lockdown {
        Some(_) => "is",
        None => "is most likely",
    };
    Hindrance {
        what: format!(
            "The kernel {is} locked down (lockdown=confidentiality), which forbids BPF programs \
             to read its memory, also to root"
        ),
        remedy: "Boot with lockdown=integrity or without lockdown, or profile on another machine"
            .to_owned(),
    }
}

/// A number below `/proc/sys/kernel`.
fn setting(name: &str) -> Option<i64> {
    let text = fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).ok()?;
    text.trim().parse().ok()
}

/// A number in `/proc/PID/status`.
fn number_in(status: &str, key: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().parse().ok()
}

/// Whether `/proc/PID/uid_map` is that of the initial user namespace: every id
/// stands for itself.
fn is_initial(map: &str) -> bool {
    // Where there are no user namespaces, there is no such file.
    map.is_empty() || map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: CapabilitySet = CapabilitySet::BPF
        .union(CapabilitySet::PERFMON)
        .union(CapabilitySet::SYS_PTRACE);

    fn nothing_forbids() -> Restrictions {
        Restrictions {
            capabilities: THREE,
            initial_user_namespace: true,
            lockdown: Some(Lockdown::None),
            perf_event_paranoid: Some(2),
            unprivileged_bpf_disabled: Some(2),
            kptr_restrict: Some(0),
            ptrace_scope: Some(1),
            seccomp: Some(0),
            no_new_privs: Some(0),
            memlock: Some(65536),
            memlock_counts: false,
        }
    }

    fn said(restrictions: &Restrictions, refused: Refused) -> String {
        let found = restrictions.hindrances(refused);
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        lines.join("\n")
    }

    #[test]
    fn settings_are_read() {
        assert_eq!(
            Lockdown::parse("none [integrity] confidentiality\n"),
            Some(Lockdown::Integrity)
        );
        assert_eq!(Lockdown::parse("[none] integrity"), Some(Lockdown::None));
        assert_eq!(Lockdown::parse("none"), None);
        let status = "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(number_in(status, "Seccomp:"), Some(2));
        assert_eq!(number_in(status, "NoNewPrivs:"), Some(1));
        assert_eq!(number_in(status, "Missing:"), None);
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
    }

    #[test]
    fn where_nothing_is_known_to_forbid_nothing_is_claimed() {
        for refused in [Refused::Bpf, Refused::PerfEvent] {
            assert_eq!(said(&nothing_forbids(), refused), "");
        }
    }

    #[test]
    fn what_forbids_is_named_with_what_to_do() {
        let none = CapabilitySet::empty();
        let it = nothing_forbids;
        for (restrictions, refused, words) in [
            (
                Restrictions {
                    capabilities: none,
                    ..it()
                },
                Refused::Bpf,
                &["lacks CAP_BPF", "unprivileged_bpf_disabled is 2", "setcap"][..],
            ),
            (
                Restrictions {
                    initial_user_namespace: false,
                    ..it()
                },
                Refused::Bpf,
                &["user namespace", "rootless"],
            ),
            (
                Restrictions {
                    lockdown: Some(Lockdown::Confidentiality),
                    ..it()
                },
                Refused::Bpf,
                &["lockdown=confidentiality", "lockdown=integrity"],
            ),
            (
                Restrictions {
                    perf_event_paranoid: Some(3),
                    ..it()
                },
                Refused::PerfEvent,
                &["perf_event_paranoid is 3", "CAP_SYS_ADMIN"],
            ),
            (
                Restrictions {
                    memlock_counts: true,
                    ..it()
                },
                Refused::Bpf,
                &["64 KiB", "ulimit -l", "CAP_SYS_RESOURCE"],
            ),
            (
                Restrictions {
                    seccomp: Some(2),
                    ..it()
                },
                Refused::PerfEvent,
                &["seccomp", "perf_event_open"],
            ),
        ] {
            let said = said(&restrictions, refused);
            for word in words {
                assert!(said.contains(word), "no {word:?} in {said:?}");
            }
        }
        // Of no interest to the `bpf` system call.
        let paranoid = Restrictions {
            perf_event_paranoid: Some(3),
            ..it()
        };
        assert_eq!(said(&paranoid, Refused::Bpf), "");
    }
}
