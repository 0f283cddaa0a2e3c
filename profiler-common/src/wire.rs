//! The records that cross from the kernel half to the user half.
//!
//! A sample is a small fixed record with a stack id, which is a hash over the
//! process and its frames. The frames themselves cross only when the kernel
//! half does not remember having sent them, in one or more [`StackChunk`]
//! records *before* the sample that needs them.
//!
//! Every record begins with a [`RecordKind`] in its first word, so that a
//! reader can tell them apart; all are multiples of eight bytes.

use bytemuck::Pod;
use bytemuck::Zeroable;

/// Frames in one chunk record.
pub const CHUNK_FRAMES: usize = 1024;
/// Chunks in the largest stack.
pub const MAX_CHUNKS: usize = 16;
/// Frames in the largest stack: more than Ruby's default VM stack of 1 MiB can
/// hold (about 12,000 frames without arguments or locals).
pub const MAX_FRAMES: usize = CHUNK_FRAMES * MAX_CHUNKS;

/// What a record is: the first word of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RecordKind {
    /// [`Sample`].
    Sample = 1,
    /// [`StackChunk`].
    Stack = 2,
    /// [`ProcessEvent`]: a target forked.
    Fork = 3,
    /// [`ProcessEvent`]: a target executed another program.
    Exec = 4,
    /// [`ProcessEvent`]: a target's last thread ended.
    Exit = 5,
    /// [`Mapped`]: a process mapped code of a file.
    Mapped = 6,
}

/// What a frame is: the low four bits of its tag.
pub mod frame_kind {
    /// A frame of Ruby code: `iseq`, `pc` and `method_entry`.
    pub const RUBY: u64 = 1;
    /// A method written in C: `method_entry`.
    pub const CFUNC: u64 = 2;
    /// A block written in C; Ruby's own backtraces leave it out.
    pub const IFUNC: u64 = 3;
    /// A control frame of no known type.
    pub const UNKNOWN: u64 = 4;
    /// Machine code of the process: the object in the first word and the
    /// address in it, see [`Frame::native`](super::Frame::native).
    pub const NATIVE: u64 = 5;
    /// Machine code of the kernel: the address in `pc`.
    pub const KERNEL: u64 = 6;
    /// The garbage collector is at work, on behalf of the frames below: a
    /// [`gc_phase`](super::gc_phase) in the first word.
    pub const COLLECTOR: u64 = 7;
    /// As [`RUBY`], run as machine code that a compiler of Ruby's made.
    pub const RUBY_JIT: u64 = 9;
    /// The mask over the tag.
    pub const MASK: u64 = 0xf;
}

/// Attributes of a frame: the high four bits of its tag.
pub mod frame_attr {
    /// `rb_vm_exec` returns when this frame ends; of a native frame, it is one
    /// of `rb_vm_exec`.
    pub const FINISH: u64 = 0x10;
    /// The block is a method's body (`define_method`).
    pub const BMETHOD: u64 = 0x20;
    /// The search for the method entry was given up; `method_entry` is 0.
    pub const SEARCH_CUT: u64 = 0x40;
    /// Machine code runs the frame, and may not have said where it is: `pc` is
    /// not known, and 0.
    pub const NO_PC: u64 = 0x80;
}

/// What the garbage collector does: the first word of a
/// [`frame_kind::COLLECTOR`] frame.
pub mod gc_phase {
    /// Something else, or it is not known what.
    pub const OTHER: u64 = 0;
    /// Marks what is in use.
    pub const MARKING: u64 = 1;
    /// Frees what is not.
    pub const SWEEPING: u64 = 2;
    /// Moves what is in use.
    pub const COMPACTING: u64 = 3;
}

/// Objects of native frames that are no files.
pub mod object {
    /// Nothing that is known is mapped there: the address is the absolute one.
    pub const UNKNOWN: u32 = 0;
    /// Executable memory that belongs to no file, such as that of a compiler:
    /// the address is the absolute one.
    pub const ANONYMOUS: u32 = 1;
    /// The first that is a file.
    pub const FIRST_FILE: u32 = 2;
}

const TAG_SHIFT: u32 = 56;
const ADDRESS_MASK: u64 = (1 << TAG_SHIFT) - 1;

/// One frame: three words. User addresses have at most 56 bits on the machines
/// that Linux runs on, so the tag is in the highest byte of the first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Frame {
    head: u64,
    /// Address of the *next* instruction to execute; `0` for a C method, or
    /// where it is not known ([`frame_attr::NO_PC`]).
    pub pc: u64,
    /// The method entry (an internal object), or `0`.
    pub method_entry: u64,
}

impl Frame {
    /// A frame with `tag` (a [`frame_kind`] with [`frame_attr`] bits).
    #[inline(always)]
    #[must_use]
    pub const fn new(tag: u64, iseq: u64, pc: u64, method_entry: u64) -> Self {
        Self {
            head: tag << TAG_SHIFT | iseq & ADDRESS_MASK,
            pc,
            method_entry,
        }
    }

    /// A frame of machine code: a place in a mapped object, in the object's own
    /// (ELF) addresses. Where the frame is a caller, it is a byte of the call
    /// instruction, not the one after it.
    #[inline(always)]
    #[must_use]
    pub const fn native(object: u32, address: u64) -> Self {
        Self::new(frame_kind::NATIVE, object as u64, address, 0)
    }

    /// A frame of `rb_vm_exec`, an activation of the interpreter: a native one
    /// with [`frame_attr::FINISH`].
    #[inline(always)]
    #[must_use]
    pub const fn activation(object: u32, address: u64) -> Self {
        Self::new(
            frame_kind::NATIVE | frame_attr::FINISH,
            object as u64,
            address,
            0,
        )
    }

    /// The object of a [`frame_kind::NATIVE`] frame.
    #[must_use]
    pub const fn object(&self) -> u32 {
        (self.head & 0xffff_ffff) as u32
    }

    /// Whether it is of Ruby code, interpreted or compiled.
    #[must_use]
    pub const fn is_ruby(&self) -> bool {
        matches!(self.kind(), frame_kind::RUBY | frame_kind::RUBY_JIT)
    }

    /// One of [`frame_kind`].
    #[must_use]
    pub const fn kind(&self) -> u64 {
        self.head >> TAG_SHIFT & frame_kind::MASK
    }

    /// Whether a [`frame_attr`] is set.
    #[must_use]
    pub const fn has(&self, attr: u64) -> bool {
        self.head >> TAG_SHIFT & attr != 0
    }

    /// The instruction sequence, or `0`.
    #[must_use]
    pub const fn iseq(&self) -> u64 {
        self.head & ADDRESS_MASK
    }

    /// The frame mixed into a running stack hash.
    #[inline(always)]
    #[must_use]
    pub const fn mix(&self, hash: u64) -> u64 {
        // Odd multipliers from SplitMix64 and wyhash; each word gets its own
        // rotation, so that swapping two of them changes the result.
        let word = self.head
            ^ self.pc.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
            ^ self
                .method_entry
                .wrapping_mul(0xa076_1d64_78bd_642f)
                .rotate_left(41);
        let mixed = (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ mixed >> 32
    }
}

/// Where a stack hash starts, for a process and the flags of the stack.
#[inline(always)]
#[must_use]
pub const fn hash_seed(tgid: u32, stack_flags: u32) -> u64 {
    ((tgid as u64) << 32 | stack_flags as u64).wrapping_mul(0x94d0_49bb_1331_11eb) | 1
}

/// What is true of a sample.
pub mod sample_flags {
    /// The sample hit the kernel (a system call, a page fault).
    pub const KERNEL: u32 = 1 << 0;
    /// The thread has no execution context: it runs no Ruby.
    pub const NO_CONTEXT: u32 = 1 << 1;
    /// There was a context, but it was not a valid one.
    pub const BAD_CONTEXT: u32 = 1 << 2;
    /// The stack is longer than the walk may go: outermost frames are missing.
    pub const TRUNCATED: u32 = 1 << 3;
    /// Memory of the stack could not be read: outermost frames are missing.
    pub const FAULT: u32 = 1 << 4;
    /// The agent does not know this process's Ruby (yet).
    pub const PENDING: u32 = 1 << 5;
    /// The process is known not to be a Ruby.
    pub const NOT_RUBY: u32 = 1 << 6;
    /// A control frame had no known type.
    pub const UNKNOWN_FRAME: u32 = 1 << 7;
    /// The search for a method entry was given up in some frame.
    pub const SEARCH_CUT: u32 = 1 << 8;
    /// The native stack could not be followed to its root. All Ruby frames are
    /// there; native ones between and below them are missing.
    pub const NATIVE_CUT: u32 = 1 << 9;
    /// The native stack was cut at an object that has no unwind table (yet).
    pub const NO_TABLE: u32 = 1 << 10;
    /// The native stack was cut at an address where nothing known is mapped.
    pub const UNMAPPED: u32 = 1 << 11;
    /// Native and Ruby frames did not fit together: one side was used up before
    /// the other. All are there, but some may be in the wrong place.
    pub const UNMATCHED: u32 = 1 << 12;

    /// What the walk can set, and what is therefore part of the stack's id.
    pub const OF_STACK: u32 = TRUNCATED
        | FAULT
        | UNKNOWN_FRAME
        | SEARCH_CUT
        | NATIVE_CUT
        | NO_TABLE
        | UNMAPPED
        | UNMATCHED;
    /// What makes a stack incomplete.
    pub const INCOMPLETE: u32 = BAD_CONTEXT | TRUNCATED | FAULT | UNKNOWN_FRAME;
}

/// One tick of the clock in one thread of a target.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Sample {
    /// [`RecordKind::Sample`].
    pub kind: u32,
    /// [`sample_flags`].
    pub flags: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
    /// Process id in the PID namespace of the agent.
    pub tgid: u32,
    /// Thread id in the PID namespace of the agent.
    pub tid: u32,
    /// Id of the stack; `0` when there are no frames.
    pub stack: u64,
    /// Frames in the stack.
    pub frames: u32,
    /// The CPU.
    pub cpu: u32,
    /// [`Collector::epoch`](crate::process::Collector::epoch) of the process.
    pub epoch: u64,
    /// The thread's name, NUL-padded.
    pub comm: [u8; 16],
}

/// Head of a chunk of frames; `count` [`Frame`]s follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StackChunk {
    /// [`RecordKind::Stack`].
    pub kind: u32,
    /// Process id in the PID namespace of the agent.
    pub tgid: u32,
    /// Id of the stack.
    pub stack: u64,
    /// Place of the first frame of this chunk in the stack, leaf first.
    pub first: u32,
    /// Frames in this chunk.
    pub count: u32,
    /// Frames in the whole stack.
    pub total: u32,
    /// [`sample_flags`] of the stack.
    pub flags: u32,
}

/// A target process forked, executed or ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ProcessEvent {
    /// [`RecordKind::Fork`], [`RecordKind::Exec`] or [`RecordKind::Exit`].
    pub kind: u32,
    /// The process (for a fork: the parent).
    pub tgid: u32,
    /// For a fork: the child. Otherwise the same as `tgid`.
    pub child: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
}

/// A file, as the kernel tells it apart from all others: the key of the map of
/// verdicts. An inode number that is used again has another generation on most
/// file systems, and hardly ever the same size on the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct FileKey {
    /// `inode.i_ino`.
    pub inode: u64,
    /// `inode.i_size`, bytes.
    pub size: u64,
    /// `super_block.s_dev`, as the kernel encodes it.
    pub device: u32,
    /// `inode.i_generation`.
    pub generation: u32,
}

/// What is known of a file of code.
pub mod verdict {
    /// It is not known yet; the agent has been asked.
    pub const ASKED: u32 = 0;
    /// It has the interpreter of Ruby in it.
    pub const RUBY: u32 = 1;
    /// It has not.
    pub const NOT_RUBY: u32 = 2;
}

/// Bytes of a file's name in [`Mapped`].
pub const MAX_FILE_NAME: usize = 48;

/// A process has mapped code of a file that has a Ruby in it, or may have.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Mapped {
    /// [`RecordKind::Mapped`].
    pub kind: u32,
    /// Process id in the PID namespace of the agent.
    pub tgid: u32,
    /// One of [`verdict`], as it was before.
    pub verdict: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
    /// The file.
    pub file: FileKey,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
    /// The beginning of the last component of its path, NUL-terminated.
    pub name: [u8; MAX_FILE_NAME],
}

impl Mapped {
    /// The beginning of the file's name.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        let mut parts = self.name.split(|&byte| byte == 0);
        parts.next().unwrap_or(&self.name)
    }
}

/// The thread pointer of one thread, as the task iterator reports it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ThreadPointer {
    /// Process id in the PID namespace of the agent.
    pub tgid: u32,
    /// Thread id in the PID namespace of the agent.
    pub tid: u32,
    /// `fs` base (x86-64) or `tpidr_el0` (arm64).
    pub pointer: u64,
}

/// Per-CPU counters of the kernel half, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Counter {
    /// Ticks that hit a target.
    Hit,
    /// Samples handed to the ring.
    Sent,
    /// Samples that did not fit into the ring.
    LostSample,
    /// Stacks whose frames did not fit into the ring.
    LostStack,
    /// Process events that did not fit into the ring.
    LostEvent,
    /// Stacks sent with their frames.
    NewStack,
    /// Ticks in a target whose Ruby is not known yet.
    Pending,
    /// Ticks in a target that is not a Ruby.
    NotRuby,
    /// Ticks in threads without an execution context.
    NoContext,
    /// Execution contexts that failed validation.
    BadContext,
    /// Stacks cut at the limit.
    Truncated,
    /// Stacks cut by unreadable memory.
    Fault,
    /// Stacks with a control frame of no known type.
    UnknownFrame,
    /// Stacks with a search for a method entry given up.
    SearchCut,
    /// Forked children that did not fit into the process map.
    LostChild,
    /// Native stacks that could not be followed to their root.
    NativeCut,
    /// Stacks whose native and Ruby frames did not fit together.
    Unmatched,
}

impl Counter {
    /// How many there are.
    pub const COUNT: usize = Self::Unmatched as usize + 1;
}

const _: () = {
    assert!(size_of::<Frame>() == 24);
    assert!(size_of::<Sample>() == 64);
    assert!(size_of::<StackChunk>() == 32);
    assert!(size_of::<ProcessEvent>() == 24);
    assert!(size_of::<ThreadPointer>() == 16);
    assert!(size_of::<FileKey>() == 24);
    assert!(size_of::<Mapped>() == 96);
};
