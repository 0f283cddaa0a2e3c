//! Fork, exec and exit of targets.

use aya_ebpf::bindings::BPF_RB_FORCE_WAKEUP;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::raw_tracepoint;
use aya_ebpf::programs::RawTracePointContext;
use rbprof_common::process::ProcessEntry;
use rbprof_common::wire::Counter;
use rbprof_common::wire::ProcessEvent;
use rbprof_common::wire::RecordKind;

use crate::maps::DISCOVER;
use crate::maps::PROCESSES;
use crate::maps::RECORDS;
use crate::maps::RUBY_SPACES;
use crate::maps::count;
use crate::task::Task;
use crate::task::current_ids;

/// `sched_process_fork(parent, child)`: a target's child is a target from its
/// first instruction. Its memory is a copy, so its roots are the same.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
fn on_fork(ctx: RawTracePointContext) {
    let _ = forked(&ctx);
}

#[inline(always)]
fn forked(ctx: &RawTracePointContext) -> Option<()> {
    let parent = Task(ctx.arg::<u64>(0)).tgid()?;
    let child = Task(ctx.arg::<u64>(1)).tgid()?;
    if parent == child {
        return None;
    }
    // SAFETY: the entry is only read; the agent replaces entries whole.
    let entry = unsafe { PROCESSES.get(parent) }?;
    if PROCESSES.insert(child, entry, 0).is_err() {
        count(Counter::LostChild);
    }
    send(RecordKind::Fork, parent, child);
    Some(())
}

/// `sched_process_exec`: what was known of the process is void.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
fn on_exec(ctx: RawTracePointContext) {
    let Some((tgid, _)) = current_ids() else {
        return;
    };
    // SAFETY: only whether there is an entry is asked.
    if unsafe { PROCESSES.get(tgid) }.is_none() {
        return;
    }
    aya_log_ebpf::debug!(&ctx, "process {} executed another program", tgid);
    // Where Rubies are discovered, a program is one once it maps one: the code of
    // the program itself has been mapped already, that of its libraries will be.
    if DISCOVER.load() != 0 && !has_mapped_ruby(tgid) {
        let _ = PROCESSES.remove(tgid);
        send(RecordKind::Exit, tgid, tgid);
        return;
    }
    let _ = PROCESSES.insert(tgid, ProcessEntry::PENDING, 0);
    send(RecordKind::Exec, tgid, tgid);
}

/// Whether the address space that a process has now is one that it has mapped a
/// Ruby in.
#[inline(always)]
fn has_mapped_ruby(tgid: u32) -> bool {
    // SAFETY: the value is only read, and a word.
    let space = unsafe { RUBY_SPACES.get(tgid) }.copied();
    space.is_some() && Task::current().address_space() == space
}

/// `sched_process_exit`, which comes once per thread: the process has ended
/// with its last one.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
fn on_exit(ctx: RawTracePointContext) {
    let Some((tgid, _)) = current_ids() else {
        return;
    };
    // SAFETY: only whether there is an entry is asked.
    if unsafe { PROCESSES.get(tgid) }.is_none() {
        return;
    }
    if Task(ctx.arg::<u64>(0)).live_threads() == Some(0) {
        let _ = PROCESSES.remove(tgid);
        send(RecordKind::Exit, tgid, tgid);
    }
}

#[inline(always)]
fn send(kind: RecordKind, tgid: u32, child: u32) {
    // SAFETY: the helper has no preconditions.
    let time = unsafe { bpf_ktime_get_ns() };
    let event = ProcessEvent {
        kind: kind as u32,
        tgid,
        child,
        reserved: 0,
        time,
    };
    if RECORDS
        .output::<ProcessEvent>(event, u64::from(BPF_RB_FORCE_WAKEUP))
        .is_err()
    {
        count(Counter::LostEvent);
    }
}
