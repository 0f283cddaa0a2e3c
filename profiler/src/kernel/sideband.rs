//! Rubies are found by what perf tells of mappings: where the kernel has no
//! kprobes, as in some virtual machines, or does not describe itself well enough.
//!
//! An event that never counts anything, one per CPU, has the kernel tell of each
//! mapping of code that is made there (`mmap2` of `perf_event_open(2)`). Each of
//! them wakes rbprof, also those of files that are known: that is more work than
//! [`discovery`](super::discovery) is.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;
use std::os::fd::OwnedFd;

use perf_event::Builder;
use perf_event::Sampler;
use perf_event::data::Mmap2;
use perf_event::data::Record;
use perf_event::events::Software;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::MAX_FILE_NAME;
use rbprof_common::wire::Mapped;
use rbprof_common::wire::RecordKind;
use rbprof_common::wire::verdict;
use rustix::event::epoll;

use super::KernelError;

/// Bytes of each CPU's ring: some hundred mappings.
const RING: usize = 1 << 16;
/// Most files remembered.
const MAX_FILES: usize = 1 << 16;

/// The open events, and what is known of files of code.
pub(super) struct SideBand {
    rings: BTreeMap<u32, Sampler>,
    /// Readable when something is in any ring, or in the kernel half's.
    any: OwnedFd,
    files: HashMap<FileKey, bool>,
}

impl SideBand {
    /// Opens the events. `records`: what else its descriptor is to wait for.
    pub(super) fn open(records: BorrowedFd<'_>) -> Result<Self, KernelError> {
        let any = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(watching)?;
        add(&any, records).map_err(watching)?;
        let mut opened = Self {
            rings: BTreeMap::new(),
            any,
            files: HashMap::new(),
        };
        opened.follow_cpus()?;
        Ok(opened)
    }

    /// Opens events on CPUs that have none, closes those of CPUs that are offline.
    pub(super) fn follow_cpus(&mut self) -> Result<(), KernelError> {
        let online = || {
            aya::util::online_cpus()
                .map(BTreeSet::from_iter)
                .map_err(|(file, error)| KernelError::step(format!("reading {file}"), error))
        };
        let cpus = online()?;
        // One that is closed is not waited for any more.
        self.rings.retain(|cpu, _| cpus.contains(cpu));
        for cpu in cpus {
            if self.rings.contains_key(&cpu) {
                continue;
            }
            match ring(cpu) {
                Ok(ring) => {
                    // SAFETY: the ring owns the descriptor, and outlives the call.
                    let descriptor = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
                    add(&self.any, descriptor).map_err(watching)?;
                    self.rings.insert(cpu, ring);
                }
                // The CPU may have gone offline in this very moment.
                Err(_) if !online()?.contains(&cpu) => {}
                Err(error) => return Err(KernelError::step("events that tell of mappings", error)),
            }
        }
        Ok(())
    }

    /// Hands on each mapping of a file that has a Ruby in it, or may have. Gives how
    /// many the kernel had no room for.
    pub(super) fn drain(&mut self, mut each: impl FnMut(Mapped)) -> u64 {
        let mut lost = 0;
        for ring in self.rings.values_mut() {
            while let Some(record) = ring.next_record() {
                match record.parse_record() {
                    Ok(Record::Mmap2(mapping)) => {
                        if let Some(mapped) = told(&mapping, &self.files) {
                            each(mapped);
                        }
                    }
                    Ok(Record::Lost(record)) => lost += record.lost,
                    _ => {}
                }
            }
        }
        lost
    }

    /// Remembers whether there is a Ruby in a file.
    pub(super) fn set(&mut self, file: FileKey, is_ruby: bool) {
        if self.files.len() >= MAX_FILES {
            self.forget_others();
        }
        self.files.insert(file, is_ruby);
    }

    /// Forgets which files have no Ruby in them.
    pub(super) fn forget_others(&mut self) {
        self.files.retain(|_, &mut is_ruby| is_ruby);
    }

    /// A descriptor that becomes readable when something is in any ring.
    pub(super) fn wakeup(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }
}

/// The ring of one CPU.
fn ring(cpu: u32) -> io::Result<Sampler> {
    let mut counter = Builder::new(Software::DUMMY)
        .any_pid()
        .one_cpu(usize::try_from(cpu).unwrap_or(usize::MAX))
        .mmap(true)
        .mmap2(true)
        .wakeup_watermark(1)
        .build()?;
    counter.enable()?;
    counter.sampled(RING)
}

/// What is known of a mapping, unless it is that there is no Ruby in it.
fn told(mapping: &Mmap2<'_>, files: &HashMap<FileKey, bool>) -> Option<Mapped> {
    let inode = mapping.ino().filter(|&inode| inode != 0)?;
    let file = FileKey {
        inode,
        // Not told. Who writes to a file and executes it afterwards may be found
        // later than others.
        size: 0,
        device: device(mapping.maj()?, mapping.min()?),
        generation: (mapping.ino_generation()? & u64::from(u32::MAX)) as u32,
    };
    let verdict = match files.get(&file) {
        Some(false) => return None,
        Some(true) => verdict::RUBY,
        None => verdict::ASKED,
    };
    let mut name = [0; MAX_FILE_NAME];
    let last = mapping.filename.rsplit(|&byte| byte == b'/').next()?;
    // The last byte stays a NUL.
    for (to, from) in name.iter_mut().take(MAX_FILE_NAME - 1).zip(last) {
        *to = *from;
    }
    Some(Mapped {
        kind: RecordKind::Mapped as u32,
        tgid: mapping.pid,
        verdict,
        reserved: 0,
        file,
        time: 0,
        name,
    })
}

/// A device as the kernel encodes it in `super_block.s_dev`.
const fn device(major: u32, minor: u32) -> u32 {
    major << 20 | minor
}

fn add(epoll: &OwnedFd, descriptor: BorrowedFd<'_>) -> rustix::io::Result<()> {
    epoll::add(
        epoll,
        descriptor,
        epoll::EventData::new_u64(0),
        epoll::EventFlags::IN,
    )
}

fn watching(error: rustix::io::Errno) -> KernelError {
    KernelError::step("watching for mappings", io::Error::from(error))
}
