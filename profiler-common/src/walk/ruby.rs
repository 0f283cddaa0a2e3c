//! Ruby frames: control frames from the newest to the oldest.
//!
//! Control frames lie side by side from `ec->cfp` up to the end of the VM
//! stack, newest first. Environments of frames that have not escaped lie on
//! the value stack at the other end, newest highest. So the walk reads either
//! in stretches of up to 4 KiB: a stretch of control frames upwards, a stretch
//! of the value stack downwards. The newest environment of interest is always
//! the highest address of its stretch, so that a stretch never touches pages
//! above what the thread has used.

#![expect(
    clippy::indexing_slicing,
    reason = "every index is masked to the length of its array"
)]

use crate::Fault;
use crate::Memory;
use crate::layout::WalkLayout;
use crate::layout::fixed;
use crate::layout::frame_flags;
use crate::layout::imemo;
use crate::memory::WINDOW_WORDS;
use crate::roots::Context;
use crate::walk::FrameSink;
use crate::walk::KNOWN_ENTRIES;
use crate::walk::Scratch;
use crate::wire::Frame;
use crate::wire::frame_attr;
use crate::wire::frame_kind;
use crate::wire::sample_flags;

/// Steps in the longest walk, over all frames and environments.
pub const MAX_STEPS: u32 = 1 << 17;
/// Reads of target memory in the longest walk: what bounds its cost when the
/// target's memory is hostile. A full VM stack of 1 MiB takes about 420.
pub const MAX_READS: u32 = 1 << 14;
/// Environments in the search for one frame's method entry.
pub const MAX_HOPS: u32 = 4096;

const WINDOW_BYTES: u64 = 8 * WINDOW_WORDS as u64;
const INDEX: usize = WINDOW_WORDS - 1;
/// Words of an environment the walk reads: method entry or cref, specval, flags.
const ENV_BYTES: u64 = 24;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is more to do.
    Continue,
    /// The frame just pushed ends an activation of `rb_vm_exec`: natively, its
    /// caller is the caller of that function. There is more to do.
    ActivationEnd,
    /// The stack is complete, or cut for the reason in [`RubyWalk::flags`].
    Done,
}

/// State of a walk over Ruby frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RubyWalk {
    /// The next control frame.
    cfp: u64,
    /// The dummy record at the base of the VM stack: no frame at or past it.
    limit: u64,
    /// First address past the VM stack.
    stack_end: u64,
    /// Lowest address of the VM stack.
    stack: u64,
    cfp_size: u64,
    /// `jit_return` in a control frame, as a word index; where there is none, 0.
    jit_return: u64,
    /// Mask over it: all bits for the newest frame, none for others, and none
    /// where there is no such field.
    newest: u64,
    /// Mask over it: all bits where there is such a field.
    has_jit_return: u64,
    /// Mask over it: all bits if ZJIT keeps `pc` and `iseq` behind it.
    zjit: u64,
    /// Address and length in bytes of what [`Scratch::frames`] holds.
    frames_at: u64,
    frames_len: u64,
    /// Address and length in bytes of what [`Scratch::values`] holds.
    values_at: u64,
    values_len: u64,
    /// The environment at which the search for the current frame's method
    /// entry goes on; `0` when no search is under way.
    env: u64,
    /// The frame the search is for.
    tag: u64,
    iseq: u64,
    pc: u64,
    /// `jit_return` of the current frame: not 0 if compiled code runs it.
    compiled: u64,
    /// The same, if it is the newest; otherwise 0.
    in_machine_code: u64,
    hops: u32,
    reads: u32,
    /// Frames handed to the sink so far.
    pub(super) frames: u32,
    /// Not 0 if the current frame's `pc` and `iseq` could not be read.
    lost: u32,
    /// [`sample_flags`] that describe the stack so far.
    pub flags: u32,
    /// Not 0 once the walk has ended by itself.
    done: u32,
    reserved: u32,
}

impl RubyWalk {
    /// A walk from the newest control frame of `context`.
    #[inline(always)]
    #[must_use]
    pub fn start(context: &Context, layout: &WalkLayout) -> Self {
        let cfp_size = u64::from(layout.cfp_size);
        Self {
            jit_return: u64::from(layout.jit_return >> 3),
            cfp: context.cfp,
            limit: context.stack_end - cfp_size,
            stack_end: context.stack_end,
            stack: context.stack,
            cfp_size,
            newest: if layout.jit_return == 0 { 0 } else { u64::MAX },
            has_jit_return: if layout.jit_return == 0 { 0 } else { u64::MAX },
            zjit: if layout.zjit == 0 { 0 } else { u64::MAX },
            ..Self::default()
        }
    }

    /// Whether the frame handed out last is run by an activation of
    /// `rb_vm_exec`, as all are but those of C functions.
    #[inline(always)]
    pub(super) const fn is_executed(&self) -> bool {
        let kind = self.tag & frame_kind::MASK;
        (kind != frame_kind::CFUNC && kind != frame_kind::IFUNC)
            || self.tag & frame_attr::FINISH != 0
    }

    /// Whether the walk has ended by itself, not for want of steps.
    #[inline(always)]
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.done != 0
    }

    /// Ends a walk that ran out of steps; returns its flags.
    #[inline(always)]
    pub fn give_up(&mut self) -> u32 {
        self.flags |= sample_flags::TRUNCATED;
        self.flags
    }

    /// Does the next piece of work: takes one control frame, or looks at one
    /// environment of the search for its method entry.
    #[inline(always)]
    pub fn step<M: Memory, S: FrameSink>(
        &mut self,
        memory: &M,
        scratch: &mut Scratch,
        sink: &mut S,
    ) -> Step {
        let step = self.advance(memory, scratch, sink);
        if step == Step::Done {
            self.done = 1;
        }
        step
    }

    #[inline(always)]
    fn advance<M: Memory, S: FrameSink>(
        &mut self,
        memory: &M,
        scratch: &mut Scratch,
        sink: &mut S,
    ) -> Step {
        if self.reads > MAX_READS {
            self.give_up();
            return Step::Done;
        }
        if self.env == 0 {
            match self.take_frame(memory, scratch) {
                Ok(true) => {}
                Ok(false) => return Step::Done,
                Err(Fault) => {
                    self.flags |= sample_flags::FAULT;
                    return Step::Done;
                }
            }
            if self.env == 0 {
                return Step::Continue;
            }
        }
        match self.search(memory, scratch) {
            Ok(None) => Step::Continue,
            Ok(Some(method_entry)) => self.finish_frame(method_entry, sink),
            Err(Fault) => {
                // The frame itself is real; only whose method it is in is not
                // known.
                self.flags |= sample_flags::SEARCH_CUT;
                self.tag |= frame_attr::SEARCH_CUT;
                self.finish_frame(0, sink)
            }
        }
    }

    /// Hands the current frame to the sink and moves on to its caller.
    #[inline(always)]
    fn finish_frame<S: FrameSink>(&mut self, method_entry: u64, sink: &mut S) -> Step {
        self.env = 0;
        if !sink.push(Frame::new(self.tag, self.iseq, self.pc, method_entry)) {
            self.flags |= sample_flags::TRUNCATED;
            return Step::Done;
        }
        self.frames += 1;
        if self.tag & frame_attr::FINISH != 0 {
            Step::ActivationEnd
        } else {
            Step::Continue
        }
    }

    /// Reads the control frame at `cfp` and begins the search for its method
    /// entry, if it is a frame to report. `Ok(false)` at the end of the stack.
    #[inline(always)]
    fn take_frame<M: Memory>(&mut self, memory: &M, scratch: &mut Scratch) -> Result<bool, Fault> {
        if self.cfp >= self.limit {
            return Ok(false);
        }
        let mut offset = self.cfp.wrapping_sub(self.frames_at);
        if self.frames_len == 0 || offset > self.frames_len.wrapping_sub(self.cfp_size) {
            let rest = self.stack_end - self.cfp;
            let len = if rest < WINDOW_BYTES {
                rest
            } else {
                WINDOW_BYTES
            };
            self.frames_len = 0;
            self.reads += 1;
            memory.window(self.cfp, &mut scratch.frames, (len >> 3) as usize)?;
            self.frames_at = self.cfp;
            self.frames_len = len;
            offset = 0;
        }
        let at = (offset >> 3) as usize;
        let pc = scratch.frames[(at + fixed::CFP_PC) & INDEX];
        let iseq = scratch.frames[(at + fixed::CFP_ISEQ) & INDEX];
        let ep = scratch.frames[(at + fixed::CFP_EP) & INDEX];
        let jit_return = scratch.frames[(at + self.jit_return as usize) & INDEX];
        // State is kept in memory, not in registers, and by masks rather than
        // branches: the verifier follows each path on its own.
        self.pc = pc;
        self.iseq = iseq;
        self.lost = 0;
        // Machine code writes its place down before it calls something, and so
        // only in the newest frame `pc` may be an older one, or one of an older
        // frame. Source: `rb_profile_frames`, which gives no line there.
        self.compiled = jit_return & self.has_jit_return;
        self.in_machine_code = jit_return & self.newest;
        self.newest = 0;
        let jit_frame = jit_return & self.zjit;
        if jit_frame != 0 {
            self.take_jit_frame(jit_frame, memory);
        }
        self.cfp += self.cfp_size;

        let flags = match self.env_words(ep, memory, scratch) {
            Ok([_, _, flags]) => flags,
            Err(Fault) => 0,
        };
        let kind = match flags & frame_flags::TYPE_MASK {
            frame_flags::CFUNC => frame_kind::CFUNC,
            frame_flags::IFUNC => frame_kind::IFUNC,
            frame_flags::DUMMY => return Ok(true),
            frame_flags::METHOD
            | frame_flags::BLOCK
            | frame_flags::CLASS
            | frame_flags::TOP
            | frame_flags::EVAL
            | frame_flags::RESCUE
                if self.lost == 0 =>
            {
                frame_kind::RUBY
            }
            _ => {
                self.flags |= sample_flags::UNKNOWN_FRAME;
                frame_kind::UNKNOWN
            }
        };
        self.tag = kind;
        if kind == frame_kind::RUBY && self.compiled != 0 {
            self.tag = frame_kind::RUBY_JIT;
            if self.in_machine_code != 0 {
                self.tag |= frame_attr::NO_PC;
                self.pc = 0;
            }
        }
        self.tag |= (flags & frame_flags::FINISH) / frame_flags::FINISH * frame_attr::FINISH;
        self.tag |= (flags & frame_flags::BMETHOD) / frame_flags::BMETHOD * frame_attr::BMETHOD;
        self.hops = 0;
        // An environment pointer is never 0; a hostile one must not look like
        // "no search under way", or its frame would vanish.
        self.env = if ep == 0 { 1 } else { ep };
        Ok(true)
    }

    /// Takes the `pc` and `iseq` of a frame of ZJIT's. `jit_return` points to a
    /// place on the native stack; the word before it, to what the compiler left
    /// for this call: `{ pc, iseq, ... }`. A C method's frame has neither.
    ///
    /// As `CFP_ZJIT_FRAME` of Ruby 4.1's `zjit.h`; not proven on a live process.
    /// Newer revisions inline methods without a control frame: of these, only
    /// the innermost is shown, in the place of the one it was inlined into.
    #[inline(always)]
    fn take_jit_frame<M: Memory>(&mut self, jit_return: u64, memory: &M) {
        // Until there is something better: what the control frame has may be of
        // another method.
        self.pc = 0;
        self.iseq = 0;
        if jit_return == fixed::JIT_RETURN_C_FRAME {
            return;
        }
        self.reads += 2;
        self.lost = 1;
        let Ok(frame) = memory.word(jit_return.wrapping_sub(fixed::JIT_RETURN_FRAME)) else {
            return;
        };
        if let Ok([pc, iseq, _]) = memory.words3(frame) {
            self.pc = pc;
            self.iseq = iseq;
            self.lost = 0;
        }
    }

    /// Looks at one environment. `Ok(Some(entry))` ends the search, with `0`
    /// for "no method here"; `Ok(None)` has gone on to the parent.
    ///
    /// As Ruby's own `rb_vm_frame_method_entry`: a method entry in any
    /// environment on the way wins; in the method's own (local) environment it
    /// may hide behind special variables.
    #[inline(always)]
    fn search<M: Memory>(
        &mut self,
        memory: &M,
        scratch: &mut Scratch,
    ) -> Result<Option<u64>, Fault> {
        if self.tag & frame_kind::MASK == frame_kind::UNKNOWN {
            return Ok(Some(0));
        }
        let [me_cref, specval, flags] = self.env_words(self.env, memory, scratch)?;
        let local = flags & frame_flags::ENV_LOCAL != 0;
        if me_cref != 0 {
            let found = self.method_entry(me_cref, local, memory, scratch)?;
            if found != 0 || local {
                return Ok(Some(found));
            }
        } else if local {
            return Ok(Some(0));
        }
        self.hops += 1;
        let parent = specval & !3;
        if self.hops >= MAX_HOPS || parent == 0 {
            self.flags |= sample_flags::SEARCH_CUT;
            self.tag |= frame_attr::SEARCH_CUT;
            return Ok(Some(0));
        }
        self.env = parent;
        Ok(None)
    }

    /// The method entry that `object` is, or hides, or `0`.
    #[inline(always)]
    fn method_entry<M: Memory>(
        &mut self,
        object: u64,
        may_be_svar: bool,
        memory: &M,
        scratch: &mut Scratch,
    ) -> Result<u64, Fault> {
        let slot = (object >> 3 ^ object >> 11) as usize & (KNOWN_ENTRIES - 1);
        if scratch.entries[slot] == object {
            return Ok(object);
        }
        self.reads += 1;
        let flags = memory.word(object)?;
        match imemo::of(flags) {
            imemo::MENT => {
                scratch.entries[slot] = object;
                Ok(object)
            }
            imemo::SVAR if may_be_svar => {
                self.reads += 2;
                let inner = memory.word(object.wrapping_add(fixed::SVAR_CREF_OR_ME))?;
                if inner == 0 || imemo::of(memory.word(inner)?) != imemo::MENT {
                    return Ok(0);
                }
                Ok(inner)
            }
            _ => Ok(0),
        }
    }

    /// The words `[me_cref, specval, flags]` that end at environment pointer
    /// `ep`.
    #[inline(always)]
    fn env_words<M: Memory>(
        &mut self,
        ep: u64,
        memory: &M,
        scratch: &mut Scratch,
    ) -> Result<[u64; 3], Fault> {
        let low = ep.wrapping_sub(fixed::ENV_ME_CREF);
        if low < self.stack || low >= self.limit || ep >= self.limit || ep & 7 != 0 {
            // Escaped to the heap (or nonsense, which then does not read).
            self.reads += 1;
            return memory.words3(low);
        }
        let mut offset = low.wrapping_sub(self.values_at);
        if self.values_len == 0 || offset > self.values_len.wrapping_sub(ENV_BYTES) {
            let used = ep + 8 - self.stack;
            let len = if used < WINDOW_BYTES {
                used
            } else {
                WINDOW_BYTES
            };
            self.values_len = 0;
            self.reads += 1;
            memory.window(ep + 8 - len, &mut scratch.values, (len >> 3) as usize)?;
            self.values_at = ep + 8 - len;
            self.values_len = len;
            offset = len - ENV_BYTES;
        }
        let at = (offset >> 3) as usize;
        Ok([
            scratch.values[at & INDEX],
            scratch.values[(at + 1) & INDEX],
            scratch.values[(at + 2) & INDEX],
        ])
    }
}
