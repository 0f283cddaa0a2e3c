//! The user registers of the thread that a tick has interrupted.
//!
//! A tick in user mode has them in its context. In kernel mode the context has
//! the kernel's, and the user's are where the kernel saved them on entry, at the
//! top of the thread's kernel stack: a helper says where that is (5.15), or the
//! agent has worked it out. What is found there is taken for registers only if
//! it says that it is of user mode.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::bpf_perf_event_data;
use aya_ebpf::bindings::bpf_user_pt_regs_t;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::bpf_get_current_task_btf;
use aya_ebpf::helpers::generated::bpf_task_pt_regs;
use aya_ebpf::programs::PerfEventContext;
use aya_ebpf::programs::ProbeContext;
use rbprof_common::unwind::Registers;

use crate::maps::HAS_TASK_REGISTERS;
use crate::task::Task;

/// The bits of a user code address. On arm64 those above 48 of a return address
/// may hold its authentication code.
#[cfg(bpf_target_arch = "x86_64")]
const CODE_MASK: u64 = u64::MAX;
#[cfg(bpf_target_arch = "aarch64")]
const CODE_MASK: u64 = (1 << 48) - 1;

/// The registers at a probe in user mode.
#[inline(always)]
pub(crate) fn of_probe(ctx: &ProbeContext) -> Registers {
    // SAFETY: the context of a probe is the registers.
    unsafe { from_context(ctx.regs.cast_const().cast()) }
}

/// The registers that the current thread has in user mode; all 0 if they cannot
/// be had.
#[inline(always)]
pub(crate) fn of_tick(ctx: &PerfEventContext, in_kernel: bool) -> Registers {
    if !in_kernel {
        let data = ctx.as_ptr().cast::<bpf_perf_event_data>();
        // SAFETY: the context of a perf event program begins with the registers.
        return unsafe { from_context((&raw const (*data).regs).cast()) };
    }
    let saved = if HAS_TASK_REGISTERS.load() == 0 {
        match Task::current().saved_registers() {
            Some(saved) => saved,
            None => return Registers::default(),
        }
    } else {
        // SAFETY: the helpers have no preconditions.
        unsafe { bpf_task_pt_regs(bpf_get_current_task_btf()) as u64 }
    };
    from_saved(saved as *const bpf_user_pt_regs_t)
}

#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
unsafe fn from_context(regs: *const bpf_user_pt_regs_t) -> Registers {
    // SAFETY: as the caller says.
    unsafe { Registers::newest((*regs).rip, (*regs).rsp, (*regs).rbp, 0, CODE_MASK) }
}

#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
unsafe fn from_context(regs: *const bpf_user_pt_regs_t) -> Registers {
    // SAFETY: as the caller says.
    unsafe {
        Registers::newest(
            (*regs).pc,
            (*regs).sp,
            (*regs).regs[29],
            (*regs).regs[30],
            CODE_MASK,
        )
    }
}

#[inline(always)]
fn from_saved(saved: *const bpf_user_pt_regs_t) -> Registers {
    let read = |place: *const u64| {
        // SAFETY: the helper checks the address itself.
        unsafe { bpf_probe_read_kernel(place) }.unwrap_or(0)
    };
    // SAFETY: the fields are not read here, only their addresses are taken.
    #[cfg(bpf_target_arch = "x86_64")]
    let [user, pc, sp, fp, lr] = unsafe {
        [
            u64::from(read((&raw const (*saved).cs).cast()) & 3 == 3),
            read((&raw const (*saved).rip).cast()),
            read((&raw const (*saved).rsp).cast()),
            read((&raw const (*saved).rbp).cast()),
            0,
        ]
    };
    // SAFETY: the fields are not read here, only their addresses are taken.
    #[cfg(bpf_target_arch = "aarch64")]
    let [user, pc, sp, fp, lr] = unsafe {
        [
            u64::from(read((&raw const (*saved).pstate).cast()) & 0xf == 0),
            read((&raw const (*saved).pc).cast()),
            read((&raw const (*saved).sp).cast()),
            read((&raw const (*saved).regs[29]).cast()),
            read((&raw const (*saved).regs[30]).cast()),
        ]
    };
    if user == 0 || pc == 0 || sp == 0 {
        return Registers::default();
    }
    Registers::newest(pc, sp, fp, lr, CODE_MASK)
}
