//! Native frames: one step from a function to its caller, by unwind tables.
//!
//! The user half compiles the call frame information of every mapped file to
//! [`Row`]s and [`Rule`]s. A row says from which address on a rule holds, up to
//! the next row; the first row of each [`PAGE`] of text is at its first byte, so
//! that a search in a page always finds one. [`find`] searches, [`step`] steps.
//!
//! A row is 4 bytes: the place in its page, and the number of its rule. Files
//! have 12,000 to 35,000 rows per MB of text but fewer than 800 different
//! rules, so rows that hold their rules would take twice the memory and would
//! have to be packed: for arm64, where both the frame pointer and the return
//! address are anywhere in a frame, not even 32 bits suffice. A rule is one more
//! array lookup a frame, whatever the number of steps of the search, and it is
//! used as it lies there.

#![expect(
    clippy::indexing_slicing,
    reason = "every index is masked to the length of its array"
)]

use bytemuck::Pod;
use bytemuck::Zeroable;

use crate::Memory;

/// Bytes of text whose rows are kept together.
pub const PAGE: u64 = 1 << 16;
/// Rows in a [`Chunk`].
pub const CHUNK_ROWS: usize = 1 << 14;
/// Most rows of one page, which is what [`find`] can tell apart. The densest
/// page of Debian's libraries has half as many.
pub const MAX_PAGE_ROWS: u32 = 1 << 13;

/// From an address on, a rule.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Row {
    /// The address, in its [`PAGE`] of text.
    pub pc: u16,
    /// The number of the rule; 0 is [`Rule::UNKNOWN`].
    pub rule: u16,
}

/// The rows of some pages, each page as a whole.
pub type Chunk = [Row; CHUNK_ROWS];

/// How the canonical frame address is computed: the caller's stack pointer.
pub mod cfa {
    /// Not known. All zero, so that what nobody filled in is not known.
    pub const UNKNOWN: u8 = 0;
    /// There is no caller: the first function of a thread or a coroutine.
    pub const END: u8 = 1;
    /// `sp + cfa_offset`
    pub const SP: u8 = 2;
    /// `fp + cfa_offset`
    pub const FP: u8 = 3;
    /// `*(sp + cfa_offset) + extra`
    pub const SP_DEREF: u8 = 4;
    /// `*(fp + cfa_offset) + extra`
    pub const FP_DEREF: u8 = 5;
    /// `sp + cfa_offset`, and 8 more from byte `extra` of a 16-byte entry of the
    /// procedure linkage table on, where it has pushed a word.
    pub const PLT: u8 = 6;
    /// A signal trampoline: `*(sp + cfa_offset)`. The caller was interrupted: its
    /// pc is where it stood, not a return address, and its link register is two
    /// words below its pc in memory, as arm64's `struct sigcontext` has it.
    pub const SIGNAL: u8 = 7;
}

/// How far into a coroutine's first function a call can be, in bytes. A ractor's, in
/// which more functions are inlined than in a fiber's, have more than 4 KiB.
const MAX_ENTRY: u64 = 1 << 16;
/// Whether a thread may be one of arm64. A kernel half for x86-64 knows that it is
/// not, and leaves what is only for that to no verifier.
pub(crate) const MAY_BE_AARCH64: bool = !cfg!(bpf_target_arch = "x86_64");
/// The first instruction of a signal trampoline on arm64: `mov x8, #139`.
const AARCH64_SIGRETURN: u32 = 0xd280_1168;

/// Where a register of the caller is.
pub mod saved {
    /// In the register: the frame pointer is as it was; the return address is in
    /// the link register.
    pub const SAME: u8 = 0;
    /// In memory, relative to the canonical frame address.
    pub const AT_CFA: u8 = 1;
    /// In memory, relative to the stack pointer.
    pub const AT_SP: u8 = 2;
    /// In memory, relative to the frame pointer.
    pub const AT_FP: u8 = 3;
    /// Nowhere.
    pub const LOST: u8 = 4;
}

/// How to get from a function to its caller.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Rule {
    /// One of [`mod@cfa`].
    pub cfa: u8,
    /// Where the return address is: one of [`saved`].
    pub ra: u8,
    /// Where the caller's frame pointer is: one of [`saved`].
    pub fp: u8,
    /// See [`mod@cfa`]; bytes.
    pub extra: i8,
    /// See [`mod@cfa`]; bytes.
    pub cfa_offset: i32,
    /// Of the return address; bytes.
    pub ra_offset: i32,
    /// Of the caller's frame pointer; bytes.
    pub fp_offset: i32,
}

impl Rule {
    /// Code that no table describes, or none that can be followed.
    pub const UNKNOWN: Self = Self::of(cfa::UNKNOWN, 0, 0);
    /// The end of the stack.
    pub const END: Self = Self::of(cfa::END, 0, 0);
    /// The kernel's signal frame on x86-64, seen from the trampoline that the
    /// handler returns to: `sp` is at the `struct ucontext`, whose registers
    /// begin at byte 40 (`rbp` is the 11th, `rsp` the 16th, `rip` the 17th).
    pub const SIGNAL_X86_64: Self = Self {
        cfa: cfa::SIGNAL,
        ra: saved::AT_SP,
        fp: saved::AT_SP,
        extra: 0,
        cfa_offset: 160,
        ra_offset: 168,
        fp_offset: 120,
    };
    /// The kernel's signal frame on arm64: `sp` is at the `struct rt_sigframe`, a
    /// `siginfo` of 128 bytes and a `ucontext` whose `sigcontext` is at byte 176
    /// (the fault's address, then `x0` to `x30`, `sp` and `pc`).
    pub const SIGNAL_AARCH64: Self = Self {
        cfa: cfa::SIGNAL,
        ra: saved::AT_SP,
        fp: saved::AT_SP,
        extra: 0,
        cfa_offset: 560,
        ra_offset: 568,
        fp_offset: 544,
    };

    /// Whether it is for code that has neither moved the stack nor saved the link
    /// register. Where a call has returned to, it can be only if a function begins
    /// right behind a call that never returns.
    #[inline(always)]
    #[must_use]
    pub const fn is_untouched(&self) -> bool {
        self.cfa == cfa::SP && self.cfa_offset == 0 && self.ra == saved::SAME
    }

    const fn of(cfa: u8, ra: u8, fp: u8) -> Self {
        Self {
            cfa,
            ra,
            fp,
            extra: 0,
            cfa_offset: 0,
            ra_offset: 0,
            fp_offset: 0,
        }
    }
}

/// The registers of a frame that a step needs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Registers {
    /// Where the frame stands; see [`Registers::exact`].
    pub pc: u64,
    /// The stack pointer.
    pub sp: u64,
    /// The frame pointer: `rbp` or `x29`.
    pub fp: u64,
    /// The link register, `x30`; 0 on x86-64, and where it is not known.
    pub lr: u64,
    /// The bits of a code address. On arm64 the others of a return address may
    /// hold its authentication code (`NT_ARM_PAC_MASK` has the complement).
    pub code_mask: u64,
    /// 1 if `pc` is of the instruction that comes next: in the newest frame,
    /// and in one that a signal interrupted. 0 if it is a return address: then
    /// the call before it is where the frame stands, maybe at the very end of
    /// its function.
    pub exact: u32,
    /// 1 if `fp` is known.
    pub fp_known: u32,
}

impl Registers {
    /// The newest frame of a thread. `lr` is 0 on x86-64, and `code_mask` all
    /// ones where addresses are not signed.
    #[inline(always)]
    #[must_use]
    pub const fn newest(pc: u64, sp: u64, fp: u64, lr: u64, code_mask: u64) -> Self {
        Self {
            pc,
            sp,
            fp,
            lr,
            code_mask,
            exact: 1,
            fp_known: 1,
        }
    }

    /// Whether the eight bytes of code before a return address can be those of a
    /// call through a register or memory.
    #[inline(always)]
    #[must_use]
    pub const fn follows_indirect_call(&self, code: u64) -> bool {
        if self.code_mask != u64::MAX {
            // arm64: BLR.
            return (code >> 32) & 0xffff_fc1f == 0xd63f_0000;
        }
        // x86-64: opcode FF with 2 in the middle bits of the next byte, which
        // says as well how many bytes follow: 0, 1, 2, 4 or 5.
        is_call_opcode(code >> 48)
            || is_call_opcode(code >> 40)
            || is_call_opcode(code >> 32)
            || is_call_opcode(code >> 16)
            || is_call_opcode(code >> 8)
    }

    /// Whether the frame that led to these registers, with a place at `callee` (as
    /// [`Registers::lookup`] has it), has no caller: its function was not called
    /// but returned into.
    ///
    /// Ruby's coroutines on arm64 begin like that (coroutine/arm64/Context.S): the
    /// address of their first function is put where the link register is restored
    /// from, and is still in there when that function saves it. So its return
    /// address is its own beginning, and what is before that is no call, or one of
    /// another function that does not return. Elsewhere a coroutine's return
    /// address is 0.
    #[inline(always)]
    #[must_use]
    pub fn entered<M: Memory>(&self, callee: u64, memory: &M) -> Entered {
        let into = callee.wrapping_sub(self.pc);
        let is_aarch64 = MAY_BE_AARCH64 && self.code_mask != u64::MAX;
        if !is_aarch64 || self.exact != 0 || into >= MAX_ENTRY {
            return Entered::ByCall;
        }
        // What cannot be read speaks for neither.
        let Ok(code) = memory.word(self.pc.wrapping_sub(4)) else {
            return Entered::ByCall;
        };
        let (before, at) = (code as u32, (code >> 32) as u32);
        if is_aarch64_branch_with_link(before) {
            // Bits 0 to 25: how many instructions away.
            let distance = ((before << 6).cast_signed() >> 4) - 4;
            let target = (distance as i64).cast_unsigned();
            if target <= into {
                return Entered::ByCall;
            }
            return Entered::Unclear;
        }
        if before & 0xfeff_f000 == 0xd63f_0000 {
            return Entered::Unclear;
        }
        // A signal handler returns to what has not called it, either.
        if at == AARCH64_SIGRETURN {
            return Entered::ByCall;
        }
        Entered::ByReturn
    }

    /// The address to look up: that of the next instruction, or a byte of the
    /// call that has not returned.
    #[inline(always)]
    #[must_use]
    pub const fn lookup(&self) -> u64 {
        self.pc.wrapping_sub((self.exact == 0) as u64)
    }
}

/// Whether an instruction of arm64 is BL, a call of an address that it has.
#[inline(always)]
const fn is_aarch64_branch_with_link(code: u32) -> bool {
    code >> 26 == 0b10_0101
}

/// Whether the first two bytes are those of a near indirect call on x86-64.
#[inline(always)]
const fn is_call_opcode(code: u64) -> bool {
    code & 0x38ff == 0x10ff
}

/// How a function was entered; see [`Registers::entered`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// It has a caller.
    ByCall,
    /// It has none.
    ByReturn,
    /// It has none if its return address is where a function begins: what is
    /// before it is a call, but not of this function.
    Unclear,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// The registers are the caller's.
    Caller,
    /// There is no caller.
    End,
    /// No rule for this code, or one that needs a register which was lost.
    Unknown,
    /// The rule led to memory that cannot be read.
    Unreadable,
    /// The rule led nowhere: the stack pointer moved backwards, or not at all.
    Stuck,
}

/// The number of the rule for address `pc` of a page, whose `count` rows (1 to
/// [`MAX_PAGE_ROWS`]) begin at `first`.
///
/// The same few instructions thirteen times over, without a branch, so that
/// the verifier follows one path and not 2^13.
#[inline(always)]
#[must_use]
pub fn find(rows: &Chunk, first: u32, count: u32, pc: u16) -> u16 {
    const INDEX: u64 = CHUNK_ROWS as u64 - 1;
    let end = u64::from(first).wrapping_add(u64::from(count));
    let mut at = u64::from(first);
    let mut stride = u64::from(MAX_PAGE_ROWS / 2);
    while stride != 0 {
        let probe = at.wrapping_add(stride);
        let row = rows[(probe & INDEX) as usize];
        let before = below(u64::from(pc), u64::from(row.pc));
        at = at.wrapping_add(stride & below(probe, end) & !before);
        stride >>= 1;
    }
    rows[(at & INDEX) as usize].rule
}

/// All ones if `a < b`, else 0; both are below 2^63.
#[inline(always)]
pub(crate) fn below(a: u64, b: u64) -> u64 {
    spread_sign(a.wrapping_sub(b))
}

/// Hidden from LLVM, which knows what it is for and would branch again.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn spread_sign(mut word: u64) -> u64 {
    // SAFETY: an arithmetic shift of one register.
    unsafe {
        core::arch::asm!(
            "{0} s>>= 63",
            inout(reg) word,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    word
}

#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
fn spread_sign(word: u64) -> u64 {
    (word.cast_signed() >> 63).cast_unsigned()
}

#[inline(always)]
fn offset_by(base: u64, offset: i32) -> u64 {
    base.wrapping_add_signed(offset as i64)
}

/// Goes from a frame to its caller. The registers are changed only if there is
/// one ([`Stepped::Caller`]).
///
/// Each step of a plain frame moves the stack pointer up; signal frames may lead
/// anywhere, so whoever loops has to count.
#[inline(always)]
pub fn step<M: Memory>(registers: &mut Registers, rule: &Rule, memory: &M) -> Stepped {
    let Registers {
        sp, fp, fp_known, ..
    } = *registers;
    let uses_fp = matches!(rule.cfa, cfa::FP | cfa::FP_DEREF)
        || rule.ra == saved::AT_FP
        || rule.fp == saved::AT_FP;
    if uses_fp && fp_known == 0 {
        return Stepped::Unknown;
    }
    let extra = rule.extra as i32;
    let frame = match rule.cfa {
        cfa::SP => offset_by(sp, rule.cfa_offset),
        cfa::FP => offset_by(fp, rule.cfa_offset),
        cfa::PLT => {
            let pushed = (registers.pc & 15) as i32 >= extra;
            offset_by(sp, rule.cfa_offset).wrapping_add((pushed as u64) << 3)
        }
        cfa::SP_DEREF | cfa::FP_DEREF | cfa::SIGNAL => {
            let base = if rule.cfa == cfa::FP_DEREF { fp } else { sp };
            match memory.word(offset_by(base, rule.cfa_offset)) {
                Ok(word) => offset_by(word, extra),
                Err(_) => return Stepped::Unreadable,
            }
        }
        cfa::END => return Stepped::End,
        _ => return Stepped::Unknown,
    };
    let is_signal = rule.cfa == cfa::SIGNAL;
    // Only a function that has not called anything may leave the stack alone.
    let is_leaf = registers.exact != 0;
    if !is_signal && (frame < sp || (frame == sp && !is_leaf)) {
        return Stepped::Stuck;
    }
    let place = |kind, offset| {
        let base = match kind {
            saved::AT_SP => sp,
            saved::AT_FP => fp,
            _ => frame,
        };
        offset_by(base, offset)
    };
    let ra_place = place(rule.ra, rule.ra_offset);
    let ra = match rule.ra {
        // A call has overwritten it, so that it is still there only in a leaf.
        saved::SAME if is_leaf => registers.lr,
        saved::SAME => return Stepped::Stuck,
        saved::AT_CFA | saved::AT_SP | saved::AT_FP => match memory.word(ra_place) {
            Ok(word) => word,
            Err(_) => return Stepped::Unreadable,
        },
        _ => return Stepped::Unknown,
    };
    let pc = ra & registers.code_mask;
    if pc == 0 {
        return Stepped::End;
    }
    match rule.fp {
        saved::SAME => {}
        saved::AT_CFA | saved::AT_SP | saved::AT_FP => {
            match memory.word(place(rule.fp, rule.fp_offset)) {
                Ok(word) => {
                    registers.fp = word;
                    registers.fp_known = 1;
                }
                Err(_) => return Stepped::Unreadable,
            }
        }
        _ => registers.fp_known = 0,
    }
    registers.lr = 0;
    registers.exact = 0;
    if is_signal {
        registers.exact = 1;
        if let Ok(lr) = memory.word(ra_place.wrapping_sub(16)) {
            registers.lr = lr;
        }
    }
    registers.pc = pc;
    registers.sp = frame;
    Stepped::Caller
}

const _: () = assert!(size_of::<Row>() == 4);
const _: () = assert!(size_of::<Rule>() == 16);
const _: () = assert!(size_of::<Registers>() == 48);
