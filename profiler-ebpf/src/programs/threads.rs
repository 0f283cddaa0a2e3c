//! An iterator over all tasks that writes a [`ThreadPointer`] for each thread
//! of the process in `ITERATED`. Unlike reading registers with `ptrace`, it
//! stops nothing. Minimum kernel version: 5.8.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_seq_write;
use rbprof_common::wire::ThreadPointer;

use crate::maps::ITERATED;
use crate::programs::iterator::step;
use crate::task::Task;

#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
fn thread_pointers(ctx: *mut c_void) -> i32 {
    let (seq, task) = step(ctx);
    if task.is_null() {
        return 0;
    }
    let task = Task(task as u64);
    let Some(wanted) = ITERATED.get(0) else {
        return 0;
    };
    let (Some(tgid), Some(tid), Some(pointer)) = (task.tgid(), task.tid(), task.thread_pointer())
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
