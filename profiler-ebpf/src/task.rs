//! Fields of `task_struct`, read at offsets that the agent takes from the
//! running kernel's BTF.
//!
//! Process and thread ids are those of the agent's PID namespace, here and in
//! everything that is sent. In the initial one they are fields of the task;
//! elsewhere the task's `struct pid` has them, one per namespace from the
//! initial one inwards. A task that is not in the agent's namespace has none.

use aya_ebpf::Global;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::bpf_get_current_task;

use crate::maps::NAMESPACE;
use crate::maps::PID_LEVEL;
use crate::maps::PID_NUMBERS;
use crate::maps::PidNamespace;
use crate::maps::SIGNAL_LIVE;
use crate::maps::STACK_REGISTERS;
use crate::maps::TASK_LEADER;
use crate::maps::TASK_MM;
use crate::maps::TASK_PID;
use crate::maps::TASK_SIGNAL;
use crate::maps::TASK_STACK;
use crate::maps::TASK_TGID;
use crate::maps::TASK_THREAD_PID;
use crate::maps::TASK_THREAD_POINTER;
use crate::maps::TRANSLATE_IDS;

/// A `task_struct` in kernel memory.
#[derive(Clone, Copy)]
pub(crate) struct Task(pub(crate) u64);

/// `struct upid` of the kernel: a task's id in one PID namespace.
#[repr(C)]
#[derive(Clone, Copy)]
struct Upid {
    number: u32,
    padding: u32,
    namespace: u64,
}

/// Process and thread id of the current task.
#[inline(always)]
pub(crate) fn current_ids() -> Option<(u32, u32)> {
    if TRANSLATE_IDS.load() == 0 {
        let ids = bpf_get_current_pid_tgid();
        return Some(((ids >> 32) as u32, ids as u32));
    }
    let task = Task::current();
    Some((task.tgid()?, task.tid()?))
}

impl Task {
    /// The task that runs.
    #[inline(always)]
    pub(crate) fn current() -> Self {
        // SAFETY: the helper has no preconditions.
        Self(unsafe { bpf_get_current_task() })
    }

    #[inline(always)]
    fn field<T: Copy>(self, offset: &Global<u32>) -> Option<T> {
        read_kernel(self.0 + u64::from(offset.load()))
    }

    /// Thread id.
    #[inline(always)]
    pub(crate) fn tid(self) -> Option<u32> {
        if TRANSLATE_IDS.load() == 0 {
            self.field(&TASK_PID)
        } else {
            self.number()
        }
    }

    /// Process id.
    #[inline(always)]
    pub(crate) fn tgid(self) -> Option<u32> {
        if TRANSLATE_IDS.load() == 0 {
            self.field(&TASK_TGID)
        } else {
            Self(self.field(&TASK_LEADER)?).number()
        }
    }

    /// The task's own id in the agent's PID namespace.
    #[inline(always)]
    fn number(self) -> Option<u32> {
        let agents = NAMESPACE.get(0)?;
        let (pid, level) = self.pid()?;
        if level < agents.level {
            return None;
        }
        let upid = upid(pid, agents.level)?;
        (upid.namespace == agents.address).then_some(upid.number)
    }

    /// The innermost PID namespace that the task is in.
    #[inline(always)]
    pub(crate) fn namespace(self) -> Option<PidNamespace> {
        let (pid, level) = self.pid()?;
        Some(PidNamespace {
            address: upid(pid, level)?.namespace,
            level,
            reserved: 0,
        })
    }

    /// The task's `struct pid`, and how deep its namespace is; `None` once it
    /// has been reaped.
    #[inline(always)]
    fn pid(self) -> Option<(u64, u32)> {
        let pid: u64 = self.field(&TASK_THREAD_PID)?;
        Some((pid, read_kernel(pid + u64::from(PID_LEVEL.load()))?))
    }

    /// The user-space thread pointer: `fs` base or `tpidr_el0`.
    #[inline(always)]
    pub(crate) fn thread_pointer(self) -> Option<u64> {
        self.field(&TASK_THREAD_POINTER)
    }

    /// Where the kernel has saved the user's registers: at the top of the
    /// thread's kernel stack.
    #[inline(always)]
    pub(crate) fn saved_registers(self) -> Option<u64> {
        let offset = STACK_REGISTERS.load();
        if offset == 0 {
            return None;
        }
        let stack: u64 = self.field(&TASK_STACK)?;
        Some(stack + u64::from(offset))
    }

    /// Address of the `mm_struct` of the process.
    #[inline(always)]
    pub(crate) fn address_space(self) -> Option<u64> {
        self.field(&TASK_MM)
    }

    /// Threads of the process that have not ended yet.
    #[inline(always)]
    pub(crate) fn live_threads(self) -> Option<u32> {
        let signal: u64 = self.field(&TASK_SIGNAL)?;
        read_kernel(signal + u64::from(SIGNAL_LIVE.load()))
    }
}

/// The id that a `struct pid` has in the namespace at this level.
#[inline(always)]
fn upid(pid: u64, level: u32) -> Option<Upid> {
    let numbers = pid + u64::from(PID_NUMBERS.load());
    read_kernel(numbers + u64::from(level) * size_of::<Upid>() as u64)
}

#[inline(always)]
fn read_kernel<T: Copy>(addr: u64) -> Option<T> {
    // SAFETY: the helper checks the address itself.
    unsafe { bpf_probe_read_kernel(addr as *const T) }.ok()
}
