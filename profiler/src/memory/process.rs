//! The memory of a live process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rbprof_common::Memory;
use rbprof_common::memory::Window;

use super::Fault;
use super::PinnedProcess;
use super::ReadRequest;
use super::TargetMemory;

/// Most reads one system call takes (`IOV_MAX` of the kernel).
const BATCH: usize = 1024;

/// The memory of a live process, read with `process_vm_readv`, or through
/// `/proc/PID/mem` where that call is forbidden or missing.
///
/// Reading never stops the process. A read that meets a process id which has
/// been reused meanwhile is a [`Fault`]; [`ProcessMemory::process`] tells
/// whether the process is gone.
#[derive(Debug)]
pub struct ProcessMemory {
    process: Arc<PinnedProcess>,
    /// `None`: `process_vm_readv`.
    file: Option<File>,
}

/// Why the memory of a process cannot be read.
#[derive(Debug)]
pub enum OpenError {
    /// The process is gone, or has no memory of its own (a kernel thread).
    Gone,
    /// Not allowed.
    Permission(io::Error),
    /// Something else went wrong.
    Io(io::Error),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => write!(f, "the process is gone"),
            Self::Permission(error) | Self::Io(error) => {
                write!(f, "reading the memory of the process: {error}")
            }
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Permission(error) | Self::Io(error) => Some(error),
            Self::Gone => None,
        }
    }
}

impl ProcessMemory {
    /// The memory of `process`.
    ///
    /// # Errors
    /// [`OpenError::Permission`] without `CAP_SYS_PTRACE` (or the same user and
    /// a permissive Yama), [`OpenError::Gone`] when there is nothing to read.
    pub fn open(process: Arc<PinnedProcess>) -> Result<Self, OpenError> {
        let mut memory = Self {
            process,
            file: None,
        };
        // Nothing is mapped at address 1, so the answer is about the permission
        // only: EFAULT says that there is one.
        let mut byte = [0];
        let mut probe = [ReadRequest {
            address: 1,
            buffer: &mut byte,
            done: false,
        }];
        let Err(error) = vectored(&memory.process, &mut probe) else {
            return Ok(memory);
        };
        match error.raw_os_error() {
            Some(libc::EFAULT) => Ok(memory),
            Some(libc::ESRCH) => Err(OpenError::Gone),
            Some(libc::EPERM | libc::ENOSYS) => {
                memory.file = Some(memory.process.file("mem").map_err(open_error)?);
                Ok(memory)
            }
            _ => Err(OpenError::Io(error)),
        }
    }

    /// The process, which may be gone by now.
    #[must_use]
    pub fn process(&self) -> &Arc<PinnedProcess> {
        &self.process
    }
}

fn open_error(error: io::Error) -> OpenError {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => OpenError::Permission(error),
        Some(libc::ESRCH | libc::ENOENT) => OpenError::Gone,
        _ => OpenError::Io(error),
    }
}

impl TargetMemory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let mut request = [ReadRequest {
            address,
            buffer,
            done: false,
        }];
        self.read_many(&mut request);
        let [request] = request;
        if request.done { Ok(()) } else { Err(Fault) }
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) {
        if let Some(file) = &self.file {
            for request in &mut *requests {
                request.done = file.read_exact_at(request.buffer, request.address).is_ok();
            }
        } else {
            for request in &mut *requests {
                request.done = false;
            }
            let mut rest = &mut *requests;
            while !rest.is_empty() {
                let batch = rest.len().min(BATCH);
                let (now, _) = rest.split_at_mut(batch);
                let finished = match vectored(&self.process, now) {
                    Ok(finished) => finished,
                    Err(error) if error.raw_os_error() == Some(libc::EFAULT) => 0,
                    Err(_) => break,
                };
                // The kernel stops at the first read that it cannot finish:
                // go on behind it.
                let skip = if finished == batch {
                    batch
                } else {
                    finished + 1
                };
                let (_, behind) = rest.split_at_mut(skip);
                rest = behind;
            }
            // Had the process ended before the read, its id might have been
            // another one's by then.
            if !self.process.is_alive() {
                for request in &mut *requests {
                    request.done = false;
                }
            }
        }
    }
}

/// One `process_vm_readv`. Marks the requests that were filled and returns how
/// many of them there are, counted from the front.
fn vectored(process: &PinnedProcess, requests: &mut [ReadRequest<'_>]) -> io::Result<usize> {
    let mut local = Vec::with_capacity(requests.len());
    let mut remote = Vec::with_capacity(requests.len());
    for request in &mut *requests {
        let length = request.buffer.len();
        local.push(libc::iovec {
            iov_base: request.buffer.as_mut_ptr().cast(),
            iov_len: length,
        });
        remote.push(libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address_or_none(request.address)),
            iov_len: length,
        });
    }
    let pid = libc::pid_t::try_from(process.identity().pid)
        .map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: `local` describes exclusively borrowed buffers of the lengths
    // given; `remote` is only interpreted by the kernel, in the other process.
    let copied = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    let mut copied = usize::try_from(copied).map_err(|_| io::Error::last_os_error())?;
    let mut finished = 0;
    for request in requests {
        let Some(rest) = copied.checked_sub(request.buffer.len()) else {
            break;
        };
        copied = rest;
        request.done = true;
        finished += 1;
    }
    Ok(finished)
}

/// An address as the host's `usize`; one that does not fit is nowhere.
fn address_or_none(address: u64) -> usize {
    usize::try_from(address).unwrap_or(usize::MAX)
}

impl Memory for ProcessMemory {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        TargetMemory::word(self, addr)
    }

    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault> {
        super::words3(self, addr)
    }

    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault> {
        super::window(self, addr, dst, words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn own() -> ProcessMemory {
        let process = PinnedProcess::open(std::process::id()).unwrap();
        ProcessMemory::open(Arc::new(process)).unwrap()
    }

    fn through_file() -> ProcessMemory {
        let mut memory = own();
        memory.file = Some(memory.process.file("mem").unwrap());
        memory
    }

    #[test]
    fn a_fault_in_the_middle_costs_that_read_only() {
        let source: Vec<u64> = (0..4096).collect();
        let base = source.as_ptr().addr() as u64;
        for memory in [own(), through_file()] {
            let mut buffers = vec![[0xff_u8; 8]; 3000];
            let mut requests: Vec<_> = buffers
                .iter_mut()
                .enumerate()
                .map(|(i, buffer)| ReadRequest {
                    // Every 700th address is nowhere, the last one of a batch
                    // and the first one of the next among them.
                    address: match i {
                        1023 | 1024 | 2999 => 1,
                        _ if i % 700 == 0 => u64::MAX - 100,
                        _ => base + 8 * i as u64,
                    },
                    buffer,
                    done: false,
                })
                .collect();
            memory.read_many(&mut requests);
            for (i, request) in requests.iter().enumerate() {
                let bad = i % 700 == 0 || matches!(i, 1023 | 1024 | 2999);
                assert_eq!(request.done, !bad, "request {i}");
                if !bad {
                    assert_eq!(*request.buffer, (i as u64).to_le_bytes());
                }
            }
        }
    }

    #[test]
    fn a_read_across_the_end_of_a_mapping_is_a_fault_as_a_whole() {
        // SAFETY: a fresh anonymous mapping of two pages, the second of which
        // is unmapped again at once.
        let page = unsafe {
            let page = libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(page, libc::MAP_FAILED);
            assert_eq!(libc::munmap(page.byte_add(4096), 4096), 0);
            page.addr() as u64
        };
        let other = 77_u64;
        let memory = own();
        let mut across = [0; 4096];
        let mut behind = [0; 8];
        let mut requests = [
            ReadRequest {
                address: page + 2048,
                buffer: &mut across,
                done: true,
            },
            ReadRequest {
                address: (&raw const other).addr() as u64,
                buffer: &mut behind,
                done: false,
            },
        ];
        memory.read_many(&mut requests);
        assert_eq!(requests.map(|request| request.done), [false, true]);
        assert_eq!(behind, 77_u64.to_le_bytes());
        assert!(TargetMemory::read(&memory, page + 4090, &mut [0; 6]).is_ok());
        assert!(TargetMemory::read(&memory, page + 4090, &mut [0; 7]).is_err());
    }

    #[test]
    fn a_dead_process_cannot_be_read() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Arc::new(PinnedProcess::open(child.id()).unwrap());
        let memory = ProcessMemory::open(Arc::clone(&process)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(TargetMemory::word(&memory, 4096), Err(Fault));
        assert!(!memory.process().is_alive());
        assert!(matches!(ProcessMemory::open(process), Err(OpenError::Gone)));
    }

    /// Starts processes until one has the id `pid`, which must be free.
    fn reuse(pid: u32) -> Option<std::process::Child> {
        for _ in 0..200 {
            // The next process gets the next free id behind this one.
            std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
            let mut child = Command::new("sleep").arg("60").spawn().unwrap();
            if child.id() == pid {
                return Some(child);
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
        None
    }

    #[test]
    fn another_process_with_the_same_id_is_not_read() {
        let mut first = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Arc::new(PinnedProcess::open(first.id()).unwrap());
        let memory = ProcessMemory::open(Arc::clone(&process)).unwrap();
        first.kill().unwrap();
        first.wait().unwrap();
        let Some(mut second) = reuse(first.id()) else {
            eprintln!("skipped: the id of a process cannot be chosen here");
            return;
        };
        let other = Arc::new(PinnedProcess::open(second.id()).unwrap());
        let maps = String::from_utf8(other.read("maps").unwrap()).unwrap();
        let address = u64::from_str_radix(maps.split('-').next().unwrap(), 16).unwrap();
        let others = ProcessMemory::open(Arc::clone(&other)).unwrap();
        let readable = TargetMemory::word(&others, address);
        let through_the_first = TargetMemory::word(&memory, address);
        second.kill().unwrap();
        second.wait().unwrap();
        assert!(readable.is_ok());
        assert_eq!(through_the_first, Err(Fault));
        assert_eq!(other.identity().pid, process.identity().pid);
    }

    #[test]
    fn the_walk_reads_through_it() {
        let source: Vec<u64> = (0..600).map(|i| i * 3).collect();
        let base = source.as_ptr().addr() as u64;
        let memory = own();
        assert_eq!(Memory::word(&memory, base + 16), Ok(6));
        assert_eq!(Memory::words3(&memory, base + 8), Ok([3, 6, 9]));
        let mut window = [0; rbprof_common::memory::WINDOW_WORDS];
        assert_eq!(Memory::window(&memory, base, &mut window, 512), Ok(()));
        assert_eq!(window[511], 511 * 3);
        assert_eq!(Memory::window(&memory, base, &mut window, 513), Err(Fault));
        assert_eq!(Memory::window(&memory, 0, &mut window, 1), Err(Fault));
    }
}
