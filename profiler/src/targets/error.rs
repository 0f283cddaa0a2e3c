//! Why a process cannot be profiled.

use std::fmt;
use std::io;

use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Version;

/// Why a process cannot be profiled; says what was tried, on which process, and
/// what to do.
#[derive(Debug)]
pub enum AttachError {
    /// There is no such process (any more).
    Gone {
        /// Its id.
        pid: u32,
    },
    /// The id is that of a thread.
    Thread {
        /// The thread.
        tid: u32,
        /// Its process.
        process: u32,
    },
    /// The process runs no Ruby.
    NotRuby {
        /// The process.
        pid: u32,
        /// Its command line.
        command: String,
        /// What was looked at.
        looked_at: String,
    },
    /// The process is still starting: worth another try soon.
    NotReady {
        /// Whether a Ruby was found in it already.
        ruby: bool,
        /// The process.
        pid: u32,
        /// What was missing.
        why: String,
    },
    /// Its Ruby is older than any that rbprof knows.
    TooOld {
        /// The process.
        pid: u32,
        /// Its Ruby.
        version: Version,
    },
    /// Its Ruby does not show what is needed.
    Unsupported {
        /// The process.
        pid: u32,
        /// Its Ruby: version and file.
        ruby: String,
        /// What is missing.
        missing: String,
        /// What there is.
        found: String,
    },
    /// Not allowed.
    Permission {
        /// The process.
        pid: u32,
        /// What was tried.
        what: String,
        /// The capability that allows it.
        capability: &'static str,
    },
    /// There is no such process here, but processes have this id in PID
    /// namespaces of their own.
    OtherPidNamespace {
        /// The id asked for.
        pid: u32,
        /// The ids and names that these processes have here.
        here: Vec<(u32, String)>,
    },
    /// Something else went wrong.
    Io {
        /// The process.
        pid: u32,
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

impl AttachError {
    /// Whether another Ruby in the same process could do better.
    #[must_use]
    pub const fn is_about_this_ruby(&self) -> bool {
        matches!(
            self,
            Self::NotReady { ruby: true, .. } | Self::TooOld { .. } | Self::Unsupported { .. }
        )
    }

    /// Whether it may be otherwise in a moment, although the process does not
    /// look as if it were starting: what was read of it may be older and newer
    /// than the beginning of a program.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::NotReady { .. } | Self::NotRuby { .. } | Self::Unsupported { .. }
        )
    }
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone { pid } => write!(f, "process {pid} does not exist (any more)"),
            Self::Thread { tid, process } => write!(
                f,
                "{tid} is a thread of process {process}; give the process's id"
            ),
            Self::NotRuby {
                pid,
                command,
                looked_at,
            } => write!(f, "process {pid} ({command}) runs no Ruby: {looked_at}"),
            Self::NotReady {
                pid,
                why,
                ruby: true,
            } => write!(f, "Ruby in process {pid} is not up yet: {why}; try again"),
            Self::NotReady {
                pid,
                why,
                ruby: false,
            } => write!(f, "process {pid} is still starting: {why}; try again"),
            Self::TooOld { pid, version } => {
                write!(f, "process {pid} runs Ruby {version}")?;
                match LAYOUTS.first() {
                    Some(oldest) => write!(
                        f,
                        "; the oldest that can be profiled is {}.{}",
                        oldest.from.major, oldest.from.minor
                    ),
                    None => Ok(()),
                }
            }
            Self::Unsupported {
                pid,
                ruby,
                missing,
                found,
            } => write!(
                f,
                "{ruby} in process {pid} cannot be profiled: {missing} ({found})"
            ),
            Self::Permission {
                pid,
                what,
                capability,
            } => write!(
                f,
                "not allowed on process {pid}: {what}; run as root or with {capability}"
            ),
            Self::OtherPidNamespace { pid, here } => {
                write!(f, "process {pid} does not exist here; ")?;
                for (index, (id, name)) in here.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{id} ({name})")?;
                }
                write!(
                    f,
                    " has this id in a PID namespace of its own: give the id it has here"
                )
            }
            Self::Io { pid, what, source } => write!(f, "process {pid}: {what}: {source}"),
        }
    }
}

impl std::error::Error for AttachError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
