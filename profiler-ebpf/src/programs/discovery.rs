//! Rubies are discovered when they are mapped.
//!
//! Whatever runs Ruby has mapped its interpreter as code: the program itself, or a
//! library of it. So each new mapping of code from a file is looked at, and the
//! file is looked up among those that are known. The agent is told of Rubies, and
//! asked about files that were never seen before; everything else costs a look-up.

use aya_ebpf::bindings::BPF_RB_FORCE_WAKEUP;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::bpf_probe_read_kernel_str_bytes;
use aya_ebpf::macros::kprobe;
use aya_ebpf::programs::ProbeContext;
use rbprof_common::process::ProcessEntry;
use rbprof_common::wire::Counter;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::RecordKind;
use rbprof_common::wire::verdict;

use crate::maps::DENTRY_NAME;
use crate::maps::FILE_DENTRY;
use crate::maps::FILE_INODE;
use crate::maps::INODE_GENERATION;
use crate::maps::INODE_NUMBER;
use crate::maps::INODE_SIZE;
use crate::maps::INODE_SUPER;
use crate::maps::MAPPED;
use crate::maps::PROCESSES;
use crate::maps::RECORDS;
use crate::maps::RUBY_SPACES;
use crate::maps::SUPER_DEVICE;
use crate::maps::VERDICTS;
use crate::maps::VMA_FILE;
use crate::maps::VMA_FLAGS;
use crate::maps::VMA_MM;
use crate::maps::count;
use crate::task::current_ids;

/// `VM_EXEC` of the kernel.
const VM_EXEC: u64 = 4;

/// `perf_event_mmap(vma)`: what the kernel calls for each mapping that is made,
/// and for each whose protection changes, in the process that does it.
#[kprobe]
fn on_mapping(ctx: ProbeContext) -> u32 {
    if let Some(vma) = ctx.arg::<u64>(0) {
        let _ = mapping(vma);
    }
    0
}

#[inline(always)]
fn mapping(vma: u64) -> Option<()> {
    let flags: u64 = read(vma, VMA_FLAGS.load())?;
    if flags & VM_EXEC == 0 {
        return None;
    }
    let file: u64 = read(vma, VMA_FILE.load())?;
    if file == 0 {
        return None;
    }
    let inode: u64 = read(file, FILE_INODE.load())?;
    let super_block: u64 = read(inode, INODE_SUPER.load())?;
    let key = FileKey {
        inode: read(inode, INODE_NUMBER.load())?,
        size: read(inode, INODE_SIZE.load())?,
        device: read(super_block, SUPER_DEVICE.load())?,
        generation: read(inode, INODE_GENERATION.load())?,
    };
    // SAFETY: the value is only read, and a word.
    let known = unsafe { VERDICTS.get(key) }.copied();
    if known == Some(verdict::NOT_RUBY) {
        return None;
    }
    let (tgid, _) = current_ids()?;
    if known == Some(verdict::RUBY) {
        let space: u64 = read(vma, VMA_MM.load())?;
        // SAFETY: the value is only read, and a word.
        let before = unsafe { RUBY_SPACES.get(tgid) }.copied();
        if before == Some(space) {
            return None;
        }
        let _ = RUBY_SPACES.insert(tgid, space, 0);
        // SAFETY: only whether there is an entry is asked.
        let is_target = unsafe { PROCESSES.get(tgid) }.is_some();
        // A target that is about to become another Ruby: `on_exec` sees to it.
        if !is_target && PROCESSES.insert(tgid, ProcessEntry::PENDING, 0).is_err() {
            count(Counter::LostChild);
        }
    } else {
        // Somebody who asks again does so because the answer may have been lost.
        let _ = VERDICTS.insert(key, verdict::ASKED, 0);
    }
    send(file, tgid, known.unwrap_or(verdict::ASKED), key)
}

#[inline(always)]
fn send(file: u64, tgid: u32, verdict: u32, key: FileKey) -> Option<()> {
    let record = MAPPED.get_ptr_mut(0)?;
    // SAFETY: the element is this CPU's own; a kprobe is not interrupted by itself.
    let record = unsafe { &mut *record };
    record.kind = RecordKind::Mapped as u32;
    record.tgid = tgid;
    record.verdict = verdict;
    record.file = key;
    // SAFETY: the helper has no preconditions.
    record.time = unsafe { bpf_ktime_get_ns() };
    let dentry: u64 = read(file, FILE_DENTRY.load())?;
    let name: u64 = read(dentry, DENTRY_NAME.load())?;
    // SAFETY: the helper checks the address itself.
    let read = unsafe { bpf_probe_read_kernel_str_bytes(name as *const u8, &mut record.name) };
    if read.is_err() {
        record.name = [0; rbprof_common::wire::MAX_FILE_NAME];
    }
    if RECORDS
        .output::<rbprof_common::wire::Mapped>(&*record, u64::from(BPF_RB_FORCE_WAKEUP))
        .is_err()
    {
        count(Counter::LostEvent);
        // The next process that maps it asks again.
        let _ = VERDICTS.remove(key);
    }
    Some(())
}

#[inline(always)]
fn read<T: Copy>(base: u64, offset: u32) -> Option<T> {
    // SAFETY: the helper checks the address itself.
    unsafe { bpf_probe_read_kernel((base + u64::from(offset)) as *const T) }.ok()
}
