//! Fields of `task_struct`, read at offsets that the agent takes from the
//! running kernel's BTF.

use aya_ebpf::Global;
use aya_ebpf::helpers::bpf_probe_read_kernel;

use crate::maps::SIGNAL_LIVE;
use crate::maps::TASK_PID;
use crate::maps::TASK_SIGNAL;
use crate::maps::TASK_TGID;
use crate::maps::TASK_THREAD_POINTER;

/// A `task_struct` in kernel memory.
#[derive(Clone, Copy)]
pub(crate) struct Task(pub(crate) u64);

impl Task {
    #[inline(always)]
    fn field<T: Copy>(self, offset: &Global<u32>) -> Option<T> {
        read_kernel(self.0 + u64::from(offset.load()))
    }

    /// Thread id in the initial PID namespace.
    #[inline(always)]
    pub(crate) fn pid(self) -> Option<u32> {
        self.field(&TASK_PID)
    }

    /// Process id in the initial PID namespace.
    #[inline(always)]
    pub(crate) fn tgid(self) -> Option<u32> {
        self.field(&TASK_TGID)
    }

    /// The user-space thread pointer: `fs` base or `tpidr_el0`.
    #[inline(always)]
    pub(crate) fn thread_pointer(self) -> Option<u64> {
        self.field(&TASK_THREAD_POINTER)
    }

    /// Threads of the process that have not ended yet.
    #[inline(always)]
    pub(crate) fn live_threads(self) -> Option<u32> {
        let signal: u64 = self.field(&TASK_SIGNAL)?;
        read_kernel(signal + u64::from(SIGNAL_LIVE.load()))
    }
}

#[inline(always)]
fn read_kernel<T: Copy>(addr: u64) -> Option<T> {
    // SAFETY: the helper checks the address itself.
    unsafe { bpf_probe_read_kernel(addr as *const T) }.ok()
}
