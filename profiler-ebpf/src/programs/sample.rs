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
use aya_ebpf::helpers::generated::bpf_get_stack;
use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::helpers::generated::bpf_send_signal_thread;
use aya_ebpf::macros::perf_event;
use aya_ebpf::macros::uprobe;
use aya_ebpf::programs::PerfEventContext;
use aya_ebpf::programs::ProbeContext;
use rbprof_common::process::state;
use rbprof_common::roots;
use rbprof_common::roots::NoContext;
use rbprof_common::walk::FrameSink;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::merged::MAX_STEPS;
use rbprof_common::wire::CHUNK_FRAMES;
use rbprof_common::wire::Counter;
use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_CHUNKS;
use rbprof_common::wire::MAX_FRAMES;
use rbprof_common::wire::RecordKind;
use rbprof_common::wire::Sample;
use rbprof_common::wire::StackChunk;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::hash_seed;
use rbprof_common::wire::sample_flags;

use crate::maps::KERNEL_FRAMES;
use crate::maps::KERNEL_STACK;
use crate::maps::KernelStack;
use crate::maps::MAX_KERNEL_FRAMES;
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
use crate::registers;
use crate::tables::UnwindTables;
use crate::task::Task;
use crate::task::current_ids;

/// Steps of one link in the chain of tail calls. A chain has at most 33 links
/// (32 on some kernels): 32,768 steps, of which a frame takes one or, in a
/// block, one more for each environment around it.
const CHAIN_STEPS: u32 = 1024;

/// The tick on kernels with `bpf_loop`.
#[perf_event]
fn sample(ctx: PerfEventContext) -> u32 {
    let Some((state, scratch, stack)) = buffers() else {
        return 0;
    };
    if begin_tick(&ctx, state) {
        walk(state, scratch, stack);
    }
    0
}

/// The same at a place in the target's code, for tests that want to know the
/// stack beforehand. A thread that was sampled gets `SIGSTOP` there.
#[uprobe]
fn sample_here(ctx: ProbeContext) -> u32 {
    let Some((state, scratch, stack)) = buffers() else {
        return 0;
    };
    // SAFETY: the element is this CPU's own.
    unsafe { (*state).registers = registers::of_probe(&ctx) };
    if begin(&ctx, state, false) {
        walk(state, scratch, stack);
        // SAFETY: the helper has no preconditions.
        unsafe { bpf_send_signal_thread(SIGSTOP) };
    }
    0
}

/// As user space has it, on all machines that matter here.
const SIGSTOP: u32 = 19;

/// Walks a stack that has been begun, and sends it.
#[inline(always)]
fn walk(state: *mut State, scratch: *mut Scratch, stack: *mut StackBuffer) {
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
    let Some((state, _, _)) = buffers() else {
        return 0;
    };
    if begin_tick(&ctx, state) {
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
    let mut done = false;
    for _ in 0..CHAIN_STEPS {
        // SAFETY: the function has no preconditions.
        if unsafe { chain_step(0) } == 0 {
            done = true;
            break;
        }
    }
    if !done {
        // SAFETY: the program array holds perf event programs only.
        unsafe { NEXT.tail_call(&ctx, 0) };
        // The chain is at its longest.
    }
    if let Some((state, _, stack)) = buffers() {
        finish(state, stack);
    }
    0
}

/// One step, as a function that the verifier goes through once and not for
/// every step anew. `0` when the walk is over.
#[inline(never)]
#[unsafe(no_mangle)]
unsafe extern "C" fn chain_step(more: u32) -> u32 {
    let Some((state, scratch, stack)) = buffers() else {
        return 0;
    };
    // SAFETY: all three are this CPU's own.
    let (state, scratch, stack) = unsafe { (&mut *state, &mut *scratch, &mut *stack) };
    // The verifier wants every argument of such a function to be used.
    u32::from(!step(state, scratch, stack)) | more
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

/// Begins the sample of a tick, as [`begin`].
#[inline(always)]
fn begin_tick(ctx: &PerfEventContext, state: *mut State) -> bool {
    let in_kernel = in_kernel(ctx);
    // First, and put away: what LLVM keeps in registers across it, the verifier
    // may take for uninitialized.
    // SAFETY: the element is this CPU's own.
    unsafe { (*state).registers = registers::of_tick(ctx, in_kernel) };
    begin(ctx, state, in_kernel)
}

/// Fills in the head of the sample. `true` when there is a Ruby stack to walk;
/// otherwise the sample, if there is one, has been sent.
#[inline(always)]
fn begin<C: EbpfContext>(ctx: &C, state: *mut State, in_kernel: bool) -> bool {
    let Some((tgid, tid)) = current_ids() else {
        return false;
    };
    // SAFETY: the entry is only read; the agent replaces entries whole.
    let Some(entry) = (unsafe { PROCESSES.get(tgid) }) else {
        return false;
    };
    if entry.state == state::IGNORED {
        return false;
    }
    count(Counter::Hit);
    // SAFETY: the element is this CPU's own.
    let state = unsafe { &mut *state };
    // SAFETY: the helpers have no preconditions.
    let (time, cpu) = unsafe { (bpf_ktime_get_ns(), bpf_get_smp_processor_id() as u32) };
    state.sample = Sample {
        kind: RecordKind::Sample as u32,
        flags: if in_kernel { sample_flags::KERNEL } else { 0 },
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
            state.walk.start(&state.registers, Some(&context), entry);
            let activity = entry.collector.activity(&UserMemory);
            state.sample.epoch = activity.epoch;
            if let Some(frame) =
                (entry.collector).frame(activity, &context, &entry.layout, &UserMemory)
            {
                state.walk.collecting(frame);
            }
        }
        Err(NoContext::None) => {
            state.sample.flags |= sample_flags::NO_CONTEXT;
            count(Counter::NoContext);
            state.walk.start(&state.registers, None, entry);
        }
        Err(reason) => {
            state.sample.flags |= sample_flags::BAD_CONTEXT;
            count(Counter::BadContext);
            aya_log_ebpf::debug!(
                ctx,
                "no execution context in thread {}: {}",
                tid,
                reason as u32
            );
            send_sample(&state.sample, BPF_RB_NO_WAKEUP);
            return false;
        }
    }
    take_kernel_stack(ctx, state);
    true
}

/// Takes the kernel's own frames, which come first.
#[inline(always)]
fn take_kernel_stack<C: EbpfContext>(ctx: &C, state: &mut State) {
    state.kernel_frames = 0;
    state.kernel_next = 0;
    if KERNEL_FRAMES.load() == 0 || state.sample.flags & sample_flags::KERNEL == 0 {
        return;
    }
    let Some(stack) = KERNEL_STACK.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: the buffer is this CPU's own and has that size.
    let bytes = unsafe {
        bpf_get_stack(
            ctx.as_ptr(),
            stack.cast(),
            size_of::<KernelStack>() as u32,
            0,
        )
    };
    if bytes > 0 {
        state.kernel_frames = (bytes / 8) as u32;
    }
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
        walk,
        hash,
        count,
        kernel_next,
        kernel_frames,
        ..
    } = state;
    let mut sink = Sink { hash, count, stack };
    if *kernel_next < *kernel_frames {
        let at = *kernel_next as usize & (MAX_KERNEL_FRAMES - 1);
        *kernel_next += 1;
        let Some(stack) = KERNEL_STACK.get_ptr(0) else {
            return true;
        };
        // SAFETY: the index is masked to the array's length, a power of two.
        let address = unsafe { *(*stack).get_unchecked(at) };
        sink.push(Frame::new(frame_kind::KERNEL, 0, address, 0));
        return false;
    }
    !walk.step(&UserMemory, &UnwindTables, scratch, &mut sink)
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
    let flags = state.walk.finish();
    state.stack_flags = flags;
    for (flag, counter) in [
        (sample_flags::TRUNCATED, Counter::Truncated),
        (sample_flags::FAULT, Counter::Fault),
        (sample_flags::UNKNOWN_FRAME, Counter::UnknownFrame),
        (sample_flags::SEARCH_CUT, Counter::SearchCut),
        (sample_flags::NATIVE_CUT, Counter::NativeCut),
        (sample_flags::UNMATCHED, Counter::Unmatched),
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
        // The agent has been asked for what is missing; it may have been busy.
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
            flags: state.stack_flags,
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
