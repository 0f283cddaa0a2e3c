//! Why a recording cannot begin or go on.

use crate::kernel::KernelError;
use crate::memory::OpenError;
use crate::targets::AttachError;

/// Why a recording cannot begin or go on.
#[derive(Debug)]
pub enum SessionError {
    /// A target cannot be profiled.
    Attach(AttachError),
    /// The memory of a target cannot be read.
    Memory {
        /// The target.
        pid: u32,
        /// What the system said.
        error: OpenError,
    },
    /// The kernel half cannot be used.
    Kernel(KernelError),
    /// The system has no room for another thread of rbprof's own.
    Thread(std::io::Error),
    /// The process ids in `/proc` are not those that system calls take.
    Proc,
}

impl std::fmt::Display for SessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attach(error) => error.fmt(f),
            Self::Memory { pid, error } => write!(f, "process {pid}: {error}"),
            Self::Kernel(error) => error.fmt(f),
            Self::Thread(error) => write!(f, "starting a thread: {error}"),
            Self::Proc => f.write_str(
                "/proc is not that of rbprof's own PID namespace, or not mounted: the process ids \
                 there would mean other processes. Mount it anew (unshare --mount-proc, or mount \
                 -t proc proc /proc), and do not put the host's /proc over a container's",
            ),
        }
    }
}

impl std::error::Error for SessionError {}

impl From<AttachError> for SessionError {
    fn from(error: AttachError) -> Self {
        Self::Attach(error)
    }
}

impl From<KernelError> for SessionError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(error)
    }
}
