//! What can go wrong between user space and the kernel, with what to do.

use std::fmt;
use std::io;

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
    /// The kernel refused for want of a privilege.
    Denied {
        /// What was tried.
        what: String,
        /// The capabilities that this process lacks.
        missing: Vec<&'static str>,
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
                missing,
                error,
            } => {
                write!(f, "{what}: {error}. ")?;
                if missing.is_empty() {
                    write!(
                        f,
                        "This process has CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE, so something \
                         else forbids it: look at /proc/sys/kernel/perf_event_paranoid (3 or more \
                         forbids), kernel lockdown, a seccomp profile, or a security module"
                    )
                } else {
                    write!(
                        f,
                        "This process lacks {}. Run rbprof as root, or give the binary what it \
                         needs: setcap cap_bpf,cap_perfmon,cap_sys_ptrace+ep rbprof",
                        missing.join(", ")
                    )
                }
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

    #[expect(clippy::needless_pass_by_value, reason = "for use with `map_err`")]
    pub(super) fn map(error: aya::maps::MapError) -> Self {
        Self::from_error("using a BPF map", &error, false)
    }

    pub(super) fn load(what: &str, error: impl std::error::Error + 'static) -> Self {
        Self::from_error(
            &format!("loading {what} into the kernel (bpf system call)"),
            &error,
            true,
        )
    }

    pub(super) fn attach(what: &str, error: impl std::error::Error + 'static) -> Self {
        Self::from_error(&format!("attaching to {what}"), &error, false)
    }

    fn from_error(what: &str, error: &(dyn std::error::Error + 'static), load: bool) -> Self {
        let text = chain(error);
        let os = os_error(error);
        if matches!(os, Some(libc::EPERM | libc::EACCES)) && !(load && verifier_spoke(&text)) {
            return Self::Denied {
                what: what.to_owned(),
                missing: missing_capabilities(),
                error: text,
            };
        }
        if load {
            return Self::Load {
                what: what.to_owned(),
                error: text,
            };
        }
        Self::Step {
            what: what.to_owned(),
            error: text,
        }
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

/// The capabilities rbprof needs that this process does not have.
/// `CAP_SYS_ADMIN` stands in for the first two, as the kernel has it.
fn missing_capabilities() -> Vec<&'static str> {
    const SYS_PTRACE: u32 = 19;
    const SYS_ADMIN: u32 = 21;
    const PERFMON: u32 = 38;
    const BPF: u32 = 39;
    let effective = std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        })
        .unwrap_or(0);
    let has = |capability: u32| effective >> capability & 1 != 0;
    let mut missing = Vec::new();
    if !has(BPF) && !has(SYS_ADMIN) {
        missing.push("CAP_BPF");
    }
    if !has(PERFMON) && !has(SYS_ADMIN) {
        missing.push("CAP_PERFMON");
    }
    if !has(SYS_PTRACE) {
        missing.push("CAP_SYS_PTRACE");
    }
    missing
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
    fn a_lack_of_privilege_names_the_capabilities() {
        let text = KernelError::Denied {
            what: "loading sample".into(),
            missing: vec!["CAP_BPF"],
            error: "Operation not permitted".into(),
        }
        .to_string();
        assert!(
            text.contains("lacks CAP_BPF") && text.contains("setcap"),
            "{text}"
        );
    }
}
