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
    /// rbprof runs in a PID namespace of its own.
    PidNamespace,
}

impl std::fmt::Display for SessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attach(error) => error.fmt(f),
            Self::Memory { pid, error } => write!(f, "process {pid}: {error}"),
            Self::Kernel(error) => error.fmt(f),
            Self::PidNamespace => f.write_str(
                "rbprof runs in a PID namespace of its own, where process ids are not those of \
                 the kernel. Run it on the host, or in a container that shares the host's \
                 (docker run --pid=host, hostPID: true)",
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
