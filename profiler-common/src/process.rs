//! What the kernel half knows about one target process.

use bytemuck::Pod;
use bytemuck::Zeroable;

pub use crate::collector::Collector;
use crate::layout::WalkLayout;

/// A half-open range of target addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address past the end; `0` in an unused range.
    pub end: u64,
}

impl Range {
    /// Whether `addr` lies inside.
    #[inline(always)]
    #[must_use]
    pub const fn contains(&self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }
}

/// How far the agent is with a process.
pub mod state {
    /// A target whose Ruby has not been found yet (just executed, or not one).
    /// Its samples carry no frames and ask the agent to look again.
    pub const PENDING: u32 = 0;
    /// A target with known, validated roots.
    pub const READY: u32 = 1;
    /// A target that is not a Ruby (a child that executed something else): its
    /// samples are counted and carry no frames.
    pub const NOT_RUBY: u32 = 2;
    /// Not to be profiled, but its children may be: it is followed, and never
    /// sampled.
    pub const IGNORED: u32 = 3;
}

/// Where the pointer to the sampled thread's execution context is.
pub mod root {
    /// Nowhere known.
    pub const NONE: u32 = 0;
    /// `*(thread pointer + ec)`: libruby's TLS block is in the static TLS area.
    pub const TLS_STATIC: u32 = 1;
    /// `*(dtv[module] + ec)`: the general case.
    pub const TLS_DTV: u32 = 2;
    /// `*ec`: one global for the process (Ruby 2.5 to 2.7), which holds the
    /// context of the thread that owns the GVL.
    pub const GLOBAL: u32 = 3;
}

/// How a C library lays out its dynamic thread vector.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct DtvLayout {
    /// From the thread pointer to the pointer to the vector, in bytes.
    pub pointer_offset: i32,
    /// Bytes per entry.
    pub entry_size: u32,
}

impl DtvLayout {
    /// glibc on x86-64.
    pub const GLIBC_X86_64: Self = Self {
        pointer_offset: 8,
        entry_size: 16,
    };
    /// glibc on arm64.
    pub const GLIBC_AARCH64: Self = Self {
        pointer_offset: 0,
        entry_size: 16,
    };
    /// musl on x86-64.
    pub const MUSL_X86_64: Self = Self {
        pointer_offset: 8,
        entry_size: 8,
    };
    /// musl on arm64.
    pub const MUSL_AARCH64: Self = Self {
        pointer_offset: -8,
        entry_size: 8,
    };
}

/// A target process as the kernel half sees it: the value of the process map,
/// whose key is the process id (tgid) in the PID namespace of the agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ProcessEntry {
    /// One of [`state`].
    pub state: u32,
    /// One of [`root`].
    pub root: u32,
    /// Offset or address of the execution context pointer; see [`root`].
    pub ec: i64,
    /// Module id of libruby in the dynamic thread vector.
    pub module: u64,
    /// The C library's dynamic thread vector.
    pub dtv: DtvLayout,
    /// The VM every valid execution context belongs to; `0`: not checked.
    pub vm: u64,
    /// Thread pointer minus `pthread_self()`: zero on x86-64 and the size of
    /// the C library's thread descriptor on arm64. Only for [`root::GLOBAL`].
    pub pthread_bias: u64,
    /// `rb_vm_exec`, and its cold part when the compiler split it.
    pub vm_exec: [Range; 2],
    /// Place of the process's first executable mapping in the table of mappings.
    pub mappings_at: u32,
    /// How many it has there; 0: native frames are not walked.
    pub mappings: u32,
    /// Where the garbage collector keeps what it is doing.
    pub collector: Collector,
    /// Where this Ruby keeps what the walk reads.
    pub layout: WalkLayout,
}

impl ProcessEntry {
    /// A target of which nothing is known yet.
    pub const PENDING: Self = Self {
        state: state::PENDING,
        root: root::NONE,
        ec: 0,
        module: 0,
        dtv: DtvLayout {
            pointer_offset: 0,
            entry_size: 0,
        },
        vm: 0,
        pthread_bias: 0,
        vm_exec: [Range { start: 0, end: 0 }; 2],
        mappings_at: 0,
        mappings: 0,
        collector: Collector::UNKNOWN,
        layout: WalkLayout {
            cfp_size: 0,
            ec_thread: 0,
            thread_vm: 0,
            thread_ec: 0,
            thread_id: 0,
            jit_return: 0,
            zjit: 0,
            reserved: 0,
        },
    };
}
