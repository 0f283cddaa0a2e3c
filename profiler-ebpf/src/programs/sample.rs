//! The timer tick: finds the current thread's stack and sends it.
//!
//! There are two entry programs that differ only in how they loop: `sample`
//! with `bpf_loop` (5.17+), and `sample_chained` with bounded loops chained by
//! tail calls. The agent loads the one that its kernel takes.

use core::ffi::c_void;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::BPF_RB_FORCE_WAKEUP;
use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::bpf_get_current_comm;
use aya_ebpf::helpers::bpf_get_smp_processor_id;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::macros::perf_event;
use aya_ebpf::programs::PerfEventContext;
use rbprof_common::process::state;
use rbprof_common::roots;
use rbprof_common::roots::NoContext;
use rbprof_common::walk::FrameSink;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::ruby::MAX_STEPS;
use rbprof_common::walk::ruby::RubyWalk;
use rbprof_common::walk::ruby::Step;
use rbprof_common::wire::CHUNK_FRAMES;
use rbprof_common::wire::Counter;
use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_CHUNKS;
use rbprof_common::wire::MAX_FRAMES;
use rbprof_common::wire::RecordKind;
use rbprof_common::wire::Sample;
use rbprof_common::wire::StackChunk;
use rbprof_common::wire::hash_seed;
use rbprof_common::wire::sample_flags;

use crate::maps::NEXT;
use crate::maps::PROCESSES;
use crate::maps::RECORDS;
use crate::maps::SCRATCH;
use crate::maps::SENT_STACKS;
use crate::maps::STACKS;
use crate::maps::STATE;
use crate::maps::StackBuffer;
use crate::maps::State;
use crate::maps::count;
use crate::memory::UserMemory;
use crate::task::Task;
use crate::task::current_ids;

/// Steps of one link in the chain of tail calls. A chain has at most 33 links
/// (32 on some kernels), so that 2,048 frames and the searches for the method
/// entries of nested blocks fit.
const CHAIN_STEPS: u32 = 192;

/// The tick on kernels with `bpf_loop`.
#[perf_event]
fn sample(ctx: PerfEventContext) -> u32 {
    let Some((state, scratch, stack)) = buffers() else {
        return 0;
    };
    if begin(&ctx, state, stack) {
        let mut work = Work {
            state,
            scratch,
            stack,
        };
        // SAFETY: `walk_step` has the signature the helper wants, and `work`
        // outlives the call.
        unsafe {
            bpf_loop(
                MAX_STEPS,
                walk_step as *mut c_void,
                (&raw mut work).cast(),
                0,
            );
        }
        finish(state, stack);
    }
    0
}

/// What the loop works on.
struct Work {
    state: *mut State,
    scratch: *mut Scratch,
    stack: *mut StackBuffer,
}

unsafe extern "C" fn walk_step(_index: u32, work: *mut c_void) -> i64 {
    // SAFETY: the pointer is the one that was handed to `bpf_loop`; the
    // buffers are this CPU's own.
    let done = unsafe {
        let work = &*work.cast::<Work>();
        step(&mut *work.state, &mut *work.scratch, &mut *work.stack)
    };
    i64::from(done)
}

/// The tick on kernels without `bpf_loop`.
#[perf_event]
fn sample_chained(ctx: PerfEventContext) -> u32 {
    let Some((state, _, stack)) = buffers() else {
        return 0;
    };
    if begin(&ctx, state, stack) {
        // SAFETY: the program array holds perf event programs only.
        unsafe { NEXT.tail_call(&ctx, 0) };
        if let Some((state, _, stack)) = buffers() {
            finish(state, stack);
        }
    }
    0
}

/// A link of the chain: some steps, then the next link.
#[perf_event]
fn sample_chain_link(ctx: PerfEventContext) -> u32 {
    let Some((state, scratch, stack)) = buffers() else {
        return 0;
    };
    // SAFETY: all three are this CPU's own.
    let (state, scratch, stack) = unsafe { (&mut *state, &mut *scratch, &mut *stack) };
    let mut done = false;
    for _ in 0..CHAIN_STEPS {
        if step(state, scratch, stack) {
            done = true;
            break;
        }
    }
    if !done {
        // SAFETY: the program array holds perf event programs only.
        unsafe { NEXT.tail_call(&ctx, 0) };
        // The chain is at its longest.
    }
    finish(state, stack);
    0
}

/// This CPU's buffers.
#[inline(always)]
fn buffers() -> Option<(*mut State, *mut Scratch, *mut StackBuffer)> {
    // SAFETY: the helper has no preconditions.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    Some((
        STATE.get_ptr_mut(0)?,
        SCRATCH.get_ptr_mut(0)?,
        STACKS.get_ptr_mut(cpu)?,
    ))
}

/// Fills in the head of the sample. `true` when there is a Ruby stack to walk;
/// otherwise the sample, if there is one, has been sent.
#[inline(always)]
fn begin(ctx: &PerfEventContext, state: *mut State, stack: *mut StackBuffer) -> bool {
    let Some((tgid, tid)) = current_ids() else {
        return false;
    };
    // SAFETY: the entry is only read; the agent replaces entries whole.
    let Some(entry) = (unsafe { PROCESSES.get(tgid) }) else {
        return false;
    };
    count(Counter::Hit);
    // SAFETY: the element is this CPU's own.
    let state = unsafe { &mut *state };
    // SAFETY: the helpers have no preconditions.
    let (time, cpu) = unsafe { (bpf_ktime_get_ns(), bpf_get_smp_processor_id() as u32) };
    state.sample = Sample {
        kind: RecordKind::Sample as u32,
        flags: if in_kernel(ctx) {
            sample_flags::KERNEL
        } else {
            0
        },
        time,
        tgid,
        tid,
        stack: 0,
        frames: 0,
        cpu,
        epoch: 0,
        comm: bpf_get_current_comm().unwrap_or_default(),
    };
    state.count = 0;
    state.hash = hash_seed(tgid, 0);

    if entry.state != state::READY {
        if entry.state == state::PENDING {
            state.sample.flags |= sample_flags::PENDING;
            count(Counter::Pending);
            // The agent looks at the process again when it sees this.
            send_sample(&state.sample, BPF_RB_FORCE_WAKEUP);
        } else {
            state.sample.flags |= sample_flags::NOT_RUBY;
            count(Counter::NotRuby);
            send_sample(&state.sample, BPF_RB_NO_WAKEUP);
        }
        return false;
    }
    let context = match Task::current().thread_pointer() {
        Some(thread_pointer) => roots::context_of(entry, thread_pointer, &UserMemory),
        None => Err(NoContext::Fault),
    };
    match context {
        Ok(context) => {
            let activity = entry.collector.activity(&UserMemory);
            state.sample.epoch = activity.epoch;
            state.walk = RubyWalk::start(&context, &entry.layout);
            if let Some(frame) =
                (entry.collector).frame(activity, &context, &entry.layout, &UserMemory)
            {
                push(state, stack, frame);
            }
            true
        }
        Err(reason) => {
            if reason == NoContext::None {
                state.sample.flags |= sample_flags::NO_CONTEXT;
                count(Counter::NoContext);
            } else {
                state.sample.flags |= sample_flags::BAD_CONTEXT;
                count(Counter::BadContext);
            }
            aya_log_ebpf::debug!(
                ctx,
                "no execution context in thread {}: {}",
                tid,
                reason as u32
            );
            send_sample(&state.sample, BPF_RB_NO_WAKEUP);
            false
        }
    }
}

/// Puts a frame that is not of the walk on the stack.
#[inline(always)]
fn push(state: &mut State, stack: *mut StackBuffer, frame: Frame) {
    let State { hash, count, .. } = state;
    // SAFETY: the buffer is this CPU's own.
    let stack = unsafe { &mut *stack };
    Sink { hash, count, stack }.push(frame);
}

/// Whether the tick hit kernel mode.
#[inline(always)]
fn in_kernel(ctx: &PerfEventContext) -> bool {
    let data = ctx
        .as_ptr()
        .cast::<aya_ebpf::bindings::bpf_perf_event_data>();
    #[cfg(bpf_target_arch = "x86_64")]
    // SAFETY: the context of a perf event program begins with the registers.
    let in_kernel = unsafe { (*data).regs.cs & 3 != 3 };
    #[cfg(bpf_target_arch = "aarch64")]
    // SAFETY: the context of a perf event program begins with the registers.
    let in_kernel = unsafe { (*data).regs.pstate & 0xf != 0 };
    in_kernel
}

/// One step of the walk; `true` when it is over.
#[inline(always)]
fn step(state: &mut State, scratch: &mut Scratch, stack: &mut StackBuffer) -> bool {
    let State {
        walk, hash, count, ..
    } = state;
    let mut sink = Sink { hash, count, stack };
    walk.step(&UserMemory, scratch, &mut sink) == Step::Done
}

/// Puts frames into the buffer and into the hash.
struct Sink<'a> {
    hash: &'a mut u64,
    count: &'a mut u32,
    stack: &'a mut StackBuffer,
}

impl FrameSink for Sink<'_> {
    #[inline(always)]
    fn push(&mut self, frame: Frame) -> bool {
        let at = *self.count as usize;
        if at >= MAX_FRAMES {
            return false;
        }
        *self.hash = frame.mix(*self.hash);
        *self.count += 1;
        // SAFETY: both indices are masked to the arrays' lengths, which are
        // powers of two; checked indexing would leave a panic in the object.
        unsafe {
            *self
                .stack
                .chunks
                .get_unchecked_mut((at / CHUNK_FRAMES) & (MAX_CHUNKS - 1))
                .frames
                .get_unchecked_mut(at & (CHUNK_FRAMES - 1)) = frame;
        }
        true
    }
}

/// Sends the sample, and before it the frames if they are new.
#[inline(always)]
fn finish(state: *mut State, stack: *mut StackBuffer) {
    // SAFETY: both are this CPU's own.
    let (state, stack) = unsafe { (&mut *state, &mut *stack) };
    if !state.walk.is_done() {
        state.walk.give_up();
    }
    let flags = state.walk.flags;
    for (flag, counter) in [
        (sample_flags::TRUNCATED, Counter::Truncated),
        (sample_flags::FAULT, Counter::Fault),
        (sample_flags::UNKNOWN_FRAME, Counter::UnknownFrame),
        (sample_flags::SEARCH_CUT, Counter::SearchCut),
    ] {
        if flags & flag != 0 {
            count(counter);
        }
    }
    state.sample.flags |= flags;
    state.sample.frames = state.count;
    if state.count == 0 {
        // A Ruby thread before its first frame, or after its last.
        send_sample(&state.sample, BPF_RB_NO_WAKEUP);
        return;
    }
    // Zero means "no stack"; the flags are part of what the id stands for.
    let id = (state.hash ^ u64::from(flags) << 32) | 1;
    state.sample.stack = id;

    // SAFETY: only whether there is an entry is asked.
    let known = unsafe { SENT_STACKS.get(id) }.is_some();
    if known {
        send_sample(&state.sample, BPF_RB_NO_WAKEUP);
        return;
    }
    if send_stack(state, stack, id) {
        count(Counter::NewStack);
        let _ = SENT_STACKS.insert(id, 1, 0);
    } else {
        count(Counter::LostStack);
    }
    // Names are read from memory that the target keeps changing: the sooner
    // the agent looks at a new stack, the better.
    send_sample(&state.sample, BPF_RB_FORCE_WAKEUP);
}

/// Sends the frames; `false` when the ring had no room for all of them.
#[inline(always)]
fn send_stack(state: &State, stack: &mut StackBuffer, id: u64) -> bool {
    let total = state.count;
    for (index, chunk) in stack.chunks.iter_mut().enumerate() {
        let first = (index * CHUNK_FRAMES) as u32;
        if first >= total {
            break;
        }
        let rest = total - first;
        let count = if rest < CHUNK_FRAMES as u32 {
            rest
        } else {
            CHUNK_FRAMES as u32
        };
        chunk.head = StackChunk {
            kind: RecordKind::Stack as u32,
            tgid: state.sample.tgid,
            stack: id,
            first,
            count,
            total,
            flags: state.walk.flags,
        };
        let len = size_of::<StackChunk>() + count as usize * size_of::<Frame>();
        // SAFETY: head and frames are contiguous, and `len` covers the head and
        // the `count` frames that were written.
        let record = unsafe { core::slice::from_raw_parts((&raw const *chunk).cast::<u8>(), len) };
        if RECORDS
            .output::<[u8]>(record, u64::from(BPF_RB_NO_WAKEUP))
            .is_err()
        {
            return false;
        }
    }
    true
}

#[inline(always)]
fn send_sample(sample: &Sample, wake: u32) {
    if RECORDS.output::<Sample>(sample, u64::from(wake)).is_err() {
        count(Counter::LostSample);
    } else {
        count(Counter::Sent);
    }
}
