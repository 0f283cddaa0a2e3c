//! What can go wrong between user space and the kernel, with what to do.

use std::fmt;
use std::io;

use super::features::Feature;
use super::features::Features;
use super::restrictions;
use super::restrictions::Hindrance;
use super::restrictions::Lockdown;
use super::restrictions::Refused;
use super::restrictions::Restrictions;

/// Oldest kernel rbprof works on: the ring buffer map (5.8), BTF and the task
/// iterator (5.8), mixing tail calls with subprograms (5.10).
const OLDEST: (u32, u32) = (5, 10);

/// Why the kernel half could not be loaded, attached or read.
#[derive(Debug)]
pub enum KernelError {
    /// The kernel is older than 5.10.
    TooOld(String),
    /// The kernel gives no type information, or lacks a field.
    NoBtf(String),
    /// The kernel refused: something forbids it.
    Denied {
        /// What was tried.
        what: String,
        /// What forbids it, as far as that can be told.
        hindrances: Vec<Hindrance>,
        /// What the kernel said.
        error: String,
    },
    /// The verifier or the kernel refused a program.
    Load {
        /// The program.
        what: String,
        /// What the kernel said.
        error: String,
    },
    /// A system call failed.
    Step {
        /// What was tried.
        what: String,
        /// What the kernel said.
        error: String,
    },
    /// The compiled kernel half lacks a part: a mistake in the build.
    Object(String),
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooOld(release) => write!(
                f,
                "this kernel is Linux {release}; rbprof needs {}.{} or newer (BPF ring buffers, \
                 task iterators). Upgrade the kernel, or profile on another machine",
                OLDEST.0, OLDEST.1
            ),
            Self::NoBtf(why) => write!(
                f,
                "the kernel gives no usable type information: {why}. rbprof needs a kernel built \
                 with CONFIG_DEBUG_INFO_BTF=y, as distribution kernels are; in a container, \
                 /sys must be mounted"
            ),
            Self::Denied {
                what,
                hindrances,
                error,
            } => {
                write!(f, "{what}: {error}.")?;
                for hindrance in hindrances {
                    write!(f, " {hindrance}.")?;
                }
                if hindrances.is_empty() {
                    f.write_str(
                        " This process has CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE, so something \
                         else forbids it: a security module (SELinux, AppArmor) or a seccomp \
                         profile. Look for its refusal in the kernel's log (dmesg, ausearch), or \
                         try without it",
                    )?;
                }
                f.write_str(" (`rbprof inspect --system` shows what rbprof may do here)")
            }
            Self::Load { what, error } => write!(
                f,
                "the kernel refused to load {what}: {error}. This is a bug of rbprof or a kernel \
                 it does not know; please report it with the output of `uname -a`"
            ),
            Self::Step { what, error } => write!(f, "{what}: {error}"),
            Self::Object(what) => write!(f, "the compiled kernel half is damaged: {what}"),
        }
    }
}

impl std::error::Error for KernelError {}

impl KernelError {
    pub(super) fn step(what: impl Into<String>, error: impl std::error::Error) -> Self {
        Self::Step {
            what: what.into(),
            error: chain(&error),
        }
    }

    pub(super) fn map(error: aya::maps::MapError) -> Self {
        Self::refusal("using a BPF map", &error, Refused::Bpf)
            .unwrap_or_else(|| Self::step("using a BPF map", error))
    }

    pub(super) fn load(what: &str, error: impl std::error::Error + 'static) -> Self {
        let what = format!("loading {what} into the kernel (bpf system call)");
        if !verifier_spoke(&chain(&error))
            && let Some(refusal) = Self::refusal(&what, &error, Refused::Bpf)
        {
            return refusal;
        }
        Self::Load {
            what,
            error: chain(&error),
        }
    }

    pub(super) fn attach(what: &str, error: impl std::error::Error + 'static) -> Self {
        let what = format!("attaching to {what}");
        let refused = Refused::Bpf;
        Self::refusal(&what, &error, refused).unwrap_or_else(|| Self::step(what, error))
    }

    pub(super) fn perf_event(error: impl std::error::Error + 'static) -> Self {
        let what = "sampling a CPU (perf_event_open)";
        let refused = Refused::PerfEvent;
        Self::refusal(what, &error, refused).unwrap_or_else(|| Self::step(what, error))
    }

    /// The kernel has not what nothing can be recorded without.
    pub(super) fn lacks(feature: Feature) -> Self {
        let lockdown = Restrictions::now(false).lockdown;
        // Where the setting cannot be read, it is the likeliest reason.
        if feature == Feature::KernelReads
            && matches!(lockdown, None | Some(Lockdown::Confidentiality))
        {
            return Self::Denied {
                what: "reading kernel memory in eBPF programs".to_owned(),
                hindrances: vec![restrictions::confidentiality(lockdown)],
                error: format!("no {}", feature.name()),
            };
        }
        let (major, minor) = feature.since();
        Self::Step {
            what: "looking for what rbprof needs of the kernel".to_owned(),
            error: format!(
                "no {}, which Linux has since {major}.{minor}, unless it is built without \
                 (CONFIG_BPF_SYSCALL, CONFIG_BPF_EVENTS, CONFIG_PERF_EVENTS)",
                feature.name()
            ),
        }
    }

    /// An error that is about what this process may do.
    fn refusal(
        what: &str,
        error: &(dyn std::error::Error + 'static),
        refused: Refused,
    ) -> Option<Self> {
        if !matches!(os_error(error), Some(libc::EPERM | libc::EACCES)) {
            return None;
        }
        let memlock_counts = !Features::probe().has(Feature::UnlimitedMaps);
        Some(Self::Denied {
            what: what.to_owned(),
            hindrances: Restrictions::now(memlock_counts).hindrances(refused),
            error: chain(error),
        })
    }
}

/// The kernel keeps the ids of processes in other ways than rbprof knows.
pub(super) fn unknown_ids() -> KernelError {
    KernelError::NoBtf(format!(
        "{} does not describe the ids of PID namespaces (task_struct.thread_pid, pid.numbers) as \
         rbprof knows them; in the host's own PID namespace (docker run --pid=host, hostPID: \
         true) it can do without",
        super::btf::VMLINUX
    ))
}

/// Whether a failed load came with the verifier's reasons, which makes EACCES
/// its verdict and not a matter of privileges.
fn verifier_spoke(text: &str) -> bool {
    text.contains("processed ") && text.contains(" insns")
}

/// The message of an error with those of its causes, without repetition.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        next = cause.source();
    }
    text
}

/// The operating system's error number behind an error.
fn os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(number) = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            return Some(number);
        }
        next = cause.source();
    }
    None
}

/// The running kernel's release, such as `6.12.9-amd64`.
#[must_use]
pub fn kernel_release_text() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// The running kernel's major and minor version.
#[must_use]
pub fn kernel_release() -> Option<(u32, u32)> {
    parse_release(&kernel_release_text())
}

fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Refuses kernels that are too old.
pub(super) fn check_kernel() -> Result<(), KernelError> {
    match kernel_release() {
        Some(release) if release < OLDEST => Err(KernelError::TooOld(kernel_release_text())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_read() {
        assert_eq!(parse_release("6.12.9-amd64"), Some((6, 12)));
        assert_eq!(parse_release("5.10.0-28-cloud-amd64"), Some((5, 10)));
        assert_eq!(parse_release("nonsense"), None);
    }

    #[test]
    fn a_refusal_says_what_forbids_and_what_to_do() {
        let denied = |hindrances| {
            KernelError::Denied {
                what: "loading sample".into(),
                hindrances,
                error: "Operation not permitted".into(),
            }
            .to_string()
        };
        assert_eq!(
            denied(vec![Hindrance {
                what: "This process lacks CAP_BPF".into(),
                remedy: "Run rbprof as root".into(),
            }]),
            "loading sample: Operation not permitted. This process lacks CAP_BPF. Run rbprof as \
             root. (`rbprof inspect --system` shows what rbprof may do here)"
        );
        assert!(denied(Vec::new()).contains("security module"));
    }
}
