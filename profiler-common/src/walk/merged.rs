//! One stack of native and Ruby frames.
//!
//! The native stack is followed frame by frame. Where it is inside
//! `rb_vm_exec`, an activation of the interpreter, the Ruby frames which that
//! activation runs come next: all from the newest not yet taken to the first
//! one with the FINISH flag, with which the activation ends. A C method has no
//! activation of its own, so that its native frames come before (leafward of)
//! its Ruby frame, and so do those of a block that is written in C.
//!
//! Machine code that a compiler made has no unwind table. It is entered from
//! the interpreter and saves a few registers on the native stack and nothing
//! else, so the walk goes on at the first return address into the interpreter.
//!
//! Whatever happens to the native stack, all Ruby frames are in the result.

use bytemuck::Zeroable as _;

use crate::Memory;
use crate::process::ProcessEntry;
use crate::process::Range;
use crate::roots::Context;
use crate::unwind;
use crate::unwind::Entered;
use crate::unwind::MAY_BE_AARCH64;
use crate::unwind::Registers;
use crate::unwind::Rule;
use crate::unwind::Stepped;
use crate::walk::FrameSink;
use crate::walk::Scratch;
use crate::walk::native;
use crate::walk::native::Mapping;
use crate::walk::native::NoRule;
use crate::walk::native::Tables;
use crate::walk::native::mapping_flags;
use crate::walk::ruby::RubyWalk;
use crate::walk::ruby::Step;
use crate::wire::Frame;
use crate::wire::frame_kind;
use crate::wire::object;
use crate::wire::sample_flags;

/// Steps in the longest walk, of either kind.
pub const MAX_STEPS: u32 = 1 << 17;
/// Most native frames of a stack; bounds what a hostile stack costs.
pub const MAX_NATIVE: u32 = 1 << 14;
/// How far above the stack pointer compiled code's return address into the
/// interpreter is looked for, in words.
const MAX_SCAN: u32 = 128;
/// Most words looked at in all scans of a stack: compiled code is left and
/// entered again at each activation.
const MAX_SCANNED: u32 = 1 << 14;

/// What a walk does next.
mod stage {
    /// Takes the native frame at the registers.
    pub(super) const NATIVE: u32 = 0;
    /// Takes Ruby frames, to the end of the activation.
    pub(super) const RUBY: u32 = 1;
    /// Takes the frame of `rb_vm_exec` that has just been used.
    pub(super) const LEAVE: u32 = 2;
    /// Looks for the native stack above compiled code.
    pub(super) const SCAN: u32 = 3;
    /// Takes all Ruby frames that are left, since there are no native ones.
    pub(super) const REST: u32 = 4;
    /// Nothing.
    pub(super) const DONE: u32 = 5;
}

/// State of a walk over both stacks of a thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Walk {
    /// The Ruby frames that are left.
    ruby: RubyWalk,
    /// The native frame that is next.
    registers: Registers,
    /// The mapping that the last native frame was in.
    mapping: Mapping,
    /// `rb_vm_exec`.
    vm_exec: [Range; 2],
    /// The process's mappings.
    mappings_at: u32,
    mappings: u32,
    /// One of [`stage`].
    stage: u32,
    /// Flags of mappings whose frames are not sent.
    hidden: u32,
    /// Not 0 while there are Ruby frames that have not been taken.
    has_ruby: u32,
    /// Native frames so far.
    native: u32,
    /// Not 0 if the next native step is to tell whether there is a next frame; see
    /// [`Entered::Unclear`].
    checks_entry: u32,
    /// Where the scan is, in words above the stack pointer.
    scan: u32,
    /// Words scanned so far, over all scans.
    scanned: u32,
    /// A frame to put on top of the Ruby frames, if it has a kind.
    collector: Frame,
    /// [`sample_flags`] of the native side.
    flags: u32,
    /// [`sample_flags`] to set if another frame comes that an activation runs.
    leftover: u32,
}

impl Walk {
    /// A walk over the native frames of a thread of `entry`'s process that
    /// begins at `registers` (all 0 where they cannot be had), and over the Ruby
    /// frames of its `context` if it has one.
    #[inline(always)]
    pub fn start(
        &mut self,
        registers: &Registers,
        context: Option<&Context>,
        entry: &ProcessEntry,
    ) {
        self.registers = *registers;
        self.mapping = Mapping::zeroed();
        self.vm_exec = entry.vm_exec;
        self.mappings_at = entry.mappings_at;
        self.mappings = entry.mappings;
        self.hidden = mapping_flags::HIDDEN;
        self.has_ruby = 0;
        self.native = 0;
        self.checks_entry = 0;
        self.scan = 0;
        self.scanned = 0;
        self.collector = Frame::default();
        self.flags = 0;
        self.leftover = 0;
        self.stage = stage::NATIVE;
        match context {
            Some(context) => {
                self.ruby = RubyWalk::start(context, &entry.layout);
                self.has_ruby = 1;
                if entry.mappings == 0 {
                    self.stage = stage::REST;
                } else if registers.sp == 0 {
                    self.cut(0);
                }
            }
            None => {
                // Whatever such a thread does is of interest.
                self.hidden = 0;
                self.ruby = RubyWalk::default();
                if entry.mappings == 0 || registers.sp == 0 {
                    self.stage = stage::DONE;
                }
            }
        }
    }

    /// Puts a frame on top of the Ruby frames: what the thread does on their
    /// behalf.
    #[inline(always)]
    pub const fn collecting(&mut self, frame: Frame) {
        self.collector = frame;
    }

    /// Whether there is nothing to walk.
    #[inline(always)]
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.stage == stage::DONE
    }

    /// The flags of the stack once the walk is over or has to stop.
    #[inline(always)]
    pub fn finish(&mut self) -> u32 {
        if self.stage != stage::DONE {
            self.flags |= sample_flags::TRUNCATED;
        }
        self.flags | self.ruby.flags
    }

    /// Does the next piece of work. `false` when there is none.
    #[inline(always)]
    pub fn step<M: Memory, T: Tables, S: FrameSink>(
        &mut self,
        memory: &M,
        tables: &T,
        scratch: &mut Scratch,
        sink: &mut S,
    ) -> bool {
        match self.stage {
            stage::RUBY | stage::REST => self.ruby_frame(memory, scratch, sink),
            stage::SCAN => self.scan(memory, tables),
            stage::NATIVE | stage::LEAVE => self.native_frame(memory, tables, sink),
            _ => {}
        }
        self.stage != stage::DONE
    }

    #[inline(always)]
    fn ruby_frame<M: Memory, S: FrameSink>(
        &mut self,
        memory: &M,
        scratch: &mut Scratch,
        sink: &mut S,
    ) {
        if self.collector.kind() == frame_kind::COLLECTOR {
            let frame = self.collector;
            self.collector = Frame::default();
            self.push(frame, sink);
            return;
        }
        let before = self.ruby.frames;
        let step = self.ruby.step(memory, scratch, sink);
        // Outermost there may be C functions alone: a fiber or a thread can begin
        // with a block that is written in C, as an Enumerator's does.
        if self.ruby.frames != before && self.ruby.is_executed() {
            self.flags |= self.leftover;
        }
        match step {
            Step::Continue => {}
            Step::ActivationEnd => {
                if self.stage == stage::RUBY {
                    self.stage = stage::LEAVE;
                }
            }
            Step::Done => {
                self.has_ruby = 0;
                if self.stage == stage::REST || self.ruby.flags & sample_flags::TRUNCATED != 0 {
                    self.stage = stage::DONE;
                } else {
                    self.unmatched_activation();
                    self.stage = stage::LEAVE;
                }
            }
        }
    }

    /// Takes the frame at the registers, unless it is `rb_vm_exec` and there are
    /// Ruby frames to take first.
    #[inline(always)]
    fn native_frame<M: Memory, T: Tables, S: FrameSink>(
        &mut self,
        memory: &M,
        tables: &T,
        sink: &mut S,
    ) {
        let checks_entry = MAY_BE_AARCH64 && self.checks_entry != 0;
        let pc = if checks_entry {
            self.registers.pc
        } else {
            self.registers.lookup()
        };
        if !self.mapping.contains(pc) {
            match native::locate(tables, self.mappings_at, self.mappings, pc) {
                Some(mapping) => self.mapping = *mapping,
                None => {
                    if self.push(Frame::native(object::UNKNOWN, pc), sink) {
                        self.cut(sample_flags::UNMAPPED);
                    }
                    return;
                }
            }
        }
        let is_activation =
            !checks_entry && (self.vm_exec[0].contains(pc) || self.vm_exec[1].contains(pc));
        if is_activation && self.stage == stage::NATIVE {
            if self.has_ruby != 0 {
                self.stage = stage::RUBY;
                return;
            }
            self.unmatched_activation();
        }
        // Once, for both: the search is most of this program.
        let own = pc.wrapping_sub(self.mapping.bias);
        let rule = native::rule_for(tables, &self.mapping, own);
        if checks_entry {
            self.checks_entry = 0;
            if rule.is_ok_and(Rule::is_untouched) {
                self.root();
            }
            return;
        }
        self.stage = stage::NATIVE;
        if is_activation {
            if !self.push(Frame::activation(self.mapping.object, own), sink) {
                return;
            }
        } else if self.mapping.flags & self.hidden == 0
            && !self.push(Frame::native(self.mapping.object, own), sink)
        {
            return;
        }
        self.native += 1;
        if self.native >= MAX_NATIVE {
            self.flags |= sample_flags::TRUNCATED;
            self.cut(0);
            return;
        }
        if self.mapping.object == object::ANONYMOUS {
            self.scan = 0;
            self.stage = stage::SCAN;
            return;
        }
        let rule = match rule {
            Ok(rule) => rule,
            Err(NoRule::Row) => {
                self.cut(0);
                return;
            }
            Err(NoRule::Table) => {
                self.cut(sample_flags::NO_TABLE);
                return;
            }
        };
        match unwind::step(&mut self.registers, rule, memory) {
            Stepped::Caller => match self.registers.entered(pc, memory) {
                Entered::ByCall => {}
                Entered::ByReturn => self.root(),
                // The next step tells.
                Entered::Unclear => self.checks_entry = 1,
            },
            Stepped::End => self.root(),
            Stepped::Unknown | Stepped::Unreadable | Stepped::Stuck => self.cut(0),
        }
    }

    /// Looks at the next word above compiled code.
    #[inline(always)]
    fn scan<M: Memory, T: Tables>(&mut self, memory: &M, tables: &T) {
        let place = self
            .registers
            .sp
            .wrapping_add(u64::from(self.scan).wrapping_mul(8));
        self.scan += 1;
        self.scanned += 1;
        if self.scan > MAX_SCAN || self.scanned > MAX_SCANNED {
            self.cut(0);
            return;
        }
        let Ok(word) = memory.word(place) else {
            self.cut(0);
            return;
        };
        let address = word & self.registers.code_mask;
        let Some(mapping) = native::locate(
            tables,
            self.mappings_at,
            self.mappings,
            address.wrapping_sub(1),
        ) else {
            return;
        };
        if mapping.flags & mapping_flags::INTERPRETER == 0 {
            return;
        }
        // What the caller's registers held is there too, and the interpreter may
        // hold addresses of its own instructions in them. Not met on a live Ruby.
        let before = memory.word(address.wrapping_sub(8)).unwrap_or(0);
        if !self.registers.follows_indirect_call(before) {
            return;
        }
        self.mapping = *mapping;
        // With frame pointers, the caller's is the word below.
        if self.registers.fp == place.wrapping_sub(8) {
            match memory.word(self.registers.fp) {
                Ok(fp) => self.registers.fp = fp,
                Err(_) => self.registers.fp_known = 0,
            }
        }
        self.registers.pc = address;
        self.registers.sp = place.wrapping_add(8);
        self.registers.lr = 0;
        self.registers.exact = 0;
        self.stage = stage::NATIVE;
    }

    /// The native stack is complete.
    #[inline(always)]
    fn root(&mut self) {
        self.stage = if self.has_ruby != 0 {
            self.leftover = sample_flags::UNMATCHED;
            stage::REST
        } else {
            stage::DONE
        };
    }

    /// There is an activation for which no Ruby frames are left.
    #[inline(always)]
    fn unmatched_activation(&mut self) {
        // If they cannot be read, that is why.
        if self.ruby.flags & sample_flags::FAULT == 0 {
            self.flags |= sample_flags::UNMATCHED;
        }
    }

    /// The native stack cannot be followed any further.
    #[inline(always)]
    fn cut(&mut self, why: u32) {
        self.flags |= sample_flags::NATIVE_CUT | why;
        self.stage = if self.has_ruby != 0 {
            stage::REST
        } else {
            stage::DONE
        };
    }

    #[inline(always)]
    fn push<S: FrameSink>(&mut self, frame: Frame, sink: &mut S) -> bool {
        let taken = sink.push(frame);
        if !taken {
            self.flags |= sample_flags::TRUNCATED;
            self.stage = stage::DONE;
        }
        taken
    }
}
