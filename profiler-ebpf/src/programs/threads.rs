//! An iterator over all tasks that writes a [`ThreadPointer`] for each thread
//! of the process in `ITERATED`. Unlike reading registers with `ptrace`, it
//! stops nothing. Minimum kernel version: 5.8.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_seq_write;
use rbprof_common::wire::ThreadPointer;

use crate::maps::ITERATED;
use crate::task::Task;

/// `struct bpf_iter_meta` of the kernel, as far as it is used.
#[repr(C)]
struct IterMeta {
    seq: *mut c_void,
}

/// `struct bpf_iter__task` of the kernel.
#[repr(C)]
struct IterTask {
    meta: *const IterMeta,
    task: *const c_void,
}

#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
fn thread_pointers(ctx: *mut c_void) -> i32 {
    let ctx = ctx.cast_const().cast::<IterTask>();
    // SAFETY: the kernel calls an iterator over tasks with this context; the
    // verifier knows the types behind both pointers.
    let (seq, task) = unsafe { ((*(*ctx).meta).seq, (*ctx).task) };
    if task.is_null() {
        return 0;
    }
    let task = Task(task as u64);
    let Some(wanted) = ITERATED.get(0) else {
        return 0;
    };
    let (Some(tgid), Some(tid), Some(pointer)) = (task.tgid(), task.pid(), task.thread_pointer())
    else {
        return 0;
    };
    if tgid == *wanted {
        let record = ThreadPointer { tgid, tid, pointer };
        // SAFETY: `seq` is the file being read and `record` is initialised.
        // A record that does not fit makes the kernel call again.
        unsafe {
            bpf_seq_write(
                seq.cast(),
                (&raw const record).cast(),
                size_of::<ThreadPointer>() as u32,
            )
        };
    }
    0
}
