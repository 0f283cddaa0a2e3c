//! A hold on a process that survives the reuse of its id.

use std::ffi::CString;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::fd::FromRawFd;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Longest `/proc` file read: `maps` of a process with the kernel's default
/// limit of 65,530 mappings fits several times over.
const MAX_PROC_FILE: u64 = 64 << 20;

/// Which process, so that a later one with the same id is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The process id, as the PID namespace of rbprof's `/proc` has it.
    pub pid: u32,
    /// When the process started, in clock ticks since boot
    /// (`/proc/PID/stat`, field 22).
    pub start_time: u64,
}

/// Why a process could not be held.
#[derive(Debug)]
pub enum PinError {
    /// There is no process of this id (any more).
    Gone,
    /// The id is that of a thread.
    Thread {
        /// The process the thread belongs to.
        process: u32,
    },
    /// Something else went wrong.
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => write!(f, "no such process"),
            Self::Thread { process } => write!(f, "it is a thread of process {process}"),
            Self::Io { what, source } => write!(f, "{what}: {source}"),
        }
    }
}

impl std::error::Error for PinError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Gone | Self::Thread { .. } => None,
        }
    }
}

/// A process held by a descriptor of its `/proc` directory and by a pidfd
/// (Linux 5.3).
///
/// Both stay bound to this very process: once it is gone they answer `ESRCH`,
/// also when its id has been given to another one. The hold neither stops the
/// process nor keeps it alive.
#[derive(Debug)]
pub struct PinnedProcess {
    identity: Identity,
    directory: OwnedFd,
    /// Missing where the system call is forbidden.
    pidfd: Option<OwnedFd>,
}

impl PinnedProcess {
    /// Takes hold of the process `pid`.
    ///
    /// # Errors
    /// [`PinError`]; a zombie counts as gone.
    pub fn open(pid: u32) -> Result<Self, PinError> {
        let path = CString::new(format!("/proc/{pid}")).map_err(|_| PinError::Gone)?;
        let directory = open_at(libc::AT_FDCWD, &path, libc::O_PATH | libc::O_DIRECTORY)
            .map_err(|error| gone_or(error, format!("opening /proc/{pid}")))?;
        let mut pinned = Self {
            identity: Identity { pid, start_time: 0 },
            directory,
            pidfd: pidfd_open(pid),
        };
        // Read through the directory, and after the pidfd was opened: both are
        // then known to be of one process.
        let stat = pinned
            .read("stat")
            .map_err(|error| gone_or(error, format!("reading /proc/{pid}/stat")))?;
        let stat = Stat::parse(&stat).ok_or_else(|| PinError::Io {
            what: format!("reading /proc/{pid}/stat"),
            source: io::ErrorKind::InvalidData.into(),
        })?;
        if matches!(stat.state, b'Z' | b'X' | b'x') {
            return Err(PinError::Gone);
        }
        pinned.identity.start_time = stat.start_time;
        let status = pinned
            .read("status")
            .map_err(|error| gone_or(error, format!("reading /proc/{pid}/status")))?;
        match status_number(&status, b"Tgid:") {
            Some(process) if process != pid => Err(PinError::Thread { process }),
            _ => Ok(pinned),
        }
    }

    /// Which process this is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether the process still exists. As long as it does, its id is its own.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let Some(pidfd) = &self.pidfd else {
            return self.exists("stat");
        };
        // SAFETY: a system call on an owned descriptor; signal 0 is none, and
        // the null pointer asks for default information.
        let status = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                pidfd.as_raw_fd(),
                0,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        status == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
    }

    /// Opens a file below the process's `/proc` directory for reading.
    ///
    /// # Errors
    /// What `openat` says; `ESRCH` or `ENOENT` once the process is gone.
    pub fn file(&self, name: &str) -> io::Result<File> {
        self.open_below(name, libc::O_RDONLY).map(File::from)
    }

    /// Opens a file below the process's `/proc` directory with these flags.
    pub(crate) fn open_below(&self, name: &str, flags: libc::c_int) -> io::Result<OwnedFd> {
        open_at(self.directory.as_raw_fd(), &CString::new(name)?, flags)
    }

    /// Reads a file below the process's `/proc` directory.
    ///
    /// # Errors
    /// What `openat` or `read` says.
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(name)?
            .take(MAX_PROC_FILE)
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads a symbolic link below the process's `/proc` directory.
    ///
    /// # Errors
    /// What `readlinkat` says.
    pub fn link(&self, name: &str) -> io::Result<PathBuf> {
        let name = CString::new(name)?;
        let mut buffer = vec![0_u8; libc::PATH_MAX as usize];
        // SAFETY: the name is NUL-terminated and the kernel writes at most
        // `buffer.len()` bytes into the buffer.
        let length = unsafe {
            libc::readlinkat(
                self.directory.as_raw_fd(),
                name.as_ptr(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        buffer.truncate(length);
        Ok(OsString::from_vec(buffer).into())
    }

    /// Whether a file exists below the process's `/proc` directory.
    fn exists(&self, name: &str) -> bool {
        let Ok(name) = CString::new(name) else {
            return false;
        };
        // SAFETY: an owned descriptor and a NUL-terminated name.
        unsafe { libc::faccessat(self.directory.as_raw_fd(), name.as_ptr(), libc::F_OK, 0) == 0 }
    }
}

/// What is needed of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The state letter.
    pub(crate) state: u8,
    /// The kernel's `PF_` flags.
    pub(crate) flags: u64,
    /// Clock ticks since boot.
    pub(crate) start_time: u64,
}

impl Stat {
    /// Reads the line. The command's name stands in parentheses and may hold
    /// anything, parentheses and newlines included.
    pub(crate) fn parse(line: &[u8]) -> Option<Self> {
        let end = line.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(line.get(end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        // Field 3 is the state, 9 the flags, 22 the start time.
        let state = *fields.next()?.as_bytes().first()?;
        let flags = fields.nth(5)?.parse().ok()?;
        let start_time = fields.nth(12)?.parse().ok()?;
        Some(Self {
            state,
            flags,
            start_time,
        })
    }
}

/// The number behind `key` in `/proc/PID/status`.
fn status_number(status: &[u8], key: &[u8]) -> Option<u32> {
    let line = status
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(key))?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

fn gone_or(source: io::Error, what: String) -> PinError {
    match source.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) => PinError::Gone,
        _ => PinError::Io { what, source },
    }
}

fn open_at(directory: libc::c_int, name: &CString, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated; no mode is needed without O_CREAT.
    let fd = unsafe { libc::openat(directory, name.as_ptr(), flags | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pidfd_open(pid: u32) -> Option<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = libc::c_int::try_from(fd).ok().filter(|&fd| fd >= 0)?;
    // SAFETY: the descriptor is new and nobody else's.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_hostile_command_name_does_not_shift_the_fields() {
        let line = b"42 (a) R 1 (x)\n) S 1 2 3 4 5 4194560 7 8 9 10 11 12 13 14 15 16 17 0 987 19";
        assert_eq!(
            Stat::parse(line),
            Some(Stat {
                state: b'S',
                flags: 4_194_560,
                start_time: 987
            })
        );
        assert_eq!(Stat::parse(b"42 (a"), None);
    }

    #[test]
    fn a_process_is_alive_until_it_is_reaped() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut pinned = PinnedProcess::open(child.id()).unwrap();
        assert!(pinned.identity().start_time > 0);
        assert!(pinned.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!pinned.is_alive());
        assert!(pinned.read("maps").is_err());
        pinned.pidfd = None;
        assert!(!pinned.is_alive());
        assert!(matches!(
            PinnedProcess::open(child.id()),
            Err(PinError::Gone)
        ));
    }

    #[test]
    fn a_thread_is_not_a_process() {
        let own = std::process::id();
        std::thread::spawn(move || {
            // SAFETY: takes no argument and cannot fail.
            let tid = unsafe { libc::gettid() }.cast_unsigned();
            assert!(
                matches!(PinnedProcess::open(tid), Err(PinError::Thread { process }) if process == own)
            );
        })
        .join()
        .unwrap();
    }
}
