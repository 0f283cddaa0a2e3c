//! What the kernel half shares with the agent.

use aya_ebpf::Global;
use aya_ebpf::btf_maps;
use aya_ebpf::macros::btf_map;
use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;
use aya_ebpf::maps::HashMap;
use aya_ebpf::maps::LruHashMap;
use aya_ebpf::maps::PerCpuArray;
use aya_ebpf::maps::ProgramArray;
use aya_ebpf::maps::RingBuf;
use rbprof_common::process::ProcessEntry;
use rbprof_common::unwind::Chunk as Rows;
use rbprof_common::unwind::Registers;
use rbprof_common::unwind::Rule;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::merged::Walk;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::Page;
use rbprof_common::wire::CHUNK_FRAMES;
use rbprof_common::wire::Counter;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_CHUNKS;
use rbprof_common::wire::Mapped;
use rbprof_common::wire::Sample;
use rbprof_common::wire::StackChunk;

/// Targets, by process id (tgid).
#[map]
pub(crate) static PROCESSES: HashMap<u32, ProcessEntry> = HashMap::with_max_entries(4096, 0);

/// What is known of files of code: a [`verdict`](rbprof_common::wire::verdict).
#[map]
pub(crate) static VERDICTS: LruHashMap<FileKey, u32> = LruHashMap::with_max_entries(16384, 0);

/// Processes that have mapped a Ruby, and the address space (`mm_struct`) that
/// they did it in: an `exec` makes another one.
#[map]
pub(crate) static RUBY_SPACES: LruHashMap<u32, u64> = LruHashMap::with_max_entries(4096, 0);

/// The record of a mapping in the making: large for a BPF stack.
#[map]
pub(crate) static MAPPED: PerCpuArray<Mapped> = PerCpuArray::with_max_entries(1, 0);

/// Ids of the stacks whose frames were sent.
#[map]
pub(crate) static SENT_STACKS: LruHashMap<u64, u8> = LruHashMap::with_max_entries(16384, 0);

/// Records for the agent. The agent sets the size.
#[map]
pub(crate) static RECORDS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// [`Counter`]s.
#[map]
pub(crate) static COUNTERS: PerCpuArray<u64> =
    PerCpuArray::with_max_entries(Counter::COUNT as u32, 0);

/// The sample in the making.
#[map]
pub(crate) static STATE: PerCpuArray<State> = PerCpuArray::with_max_entries(1, 0);

/// Working memory of the walk.
#[map]
pub(crate) static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// Frames of the stack in the making, one element per CPU: too large for a
/// per-CPU map. The agent sets the number of elements.
#[map]
pub(crate) static STACKS: Array<StackBuffer> = Array::with_max_entries(1, 0);

/// The program that goes on with a walk, on kernels without `bpf_loop`.
#[map]
pub(crate) static NEXT: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Executable mappings, side by side for each process, in ascending order. The
/// agent sets the number of elements, here and below.
#[map]
pub(crate) static MAPPINGS: Array<Mapping> = Array::with_max_entries(1, 0);

/// Pages of text, side by side for each object.
#[map]
pub(crate) static PAGES: Array<Page> = Array::with_max_entries(1, 0);

/// What rows refer to.
#[map]
pub(crate) static RULES: Array<Rule> = Array::with_max_entries(1, 0);

/// Rows. Each chunk is a map of its own, so that memory is taken as it is
/// needed.
#[btf_map]
pub(crate) static CHUNKS: btf_maps::ArrayOfMaps<btf_maps::Array<Rows, 1>, MAX_CHUNKS_OF_ROWS> =
    btf_maps::ArrayOfMaps::new();

/// Most chunks: 64 MiB of rows.
pub(crate) const MAX_CHUNKS_OF_ROWS: usize = 1024;

/// The kernel's own frames of the sample in the making.
#[map]
pub(crate) static KERNEL_STACK: PerCpuArray<KernelStack> = PerCpuArray::with_max_entries(1, 0);

/// Addresses of kernel functions, innermost first.
pub(crate) type KernelStack = [u64; MAX_KERNEL_FRAMES];

/// More than `kernel.perf_event_max_stack` has by default.
pub(crate) const MAX_KERNEL_FRAMES: usize = 128;

/// The process that the thread iterator is asked about.
#[map]
pub(crate) static ITERATED: Array<u32> = Array::with_max_entries(1, 0);

/// The PID namespace that the agent is in, where that is not the initial one.
#[map]
pub(crate) static NAMESPACE: Array<PidNamespace> = Array::with_max_entries(1, 0);

/// Not 0: samples that hit the kernel have its frames.
#[unsafe(no_mangle)]
pub(crate) static KERNEL_FRAMES: Global<u32> = Global::new(0);
/// Not 0: the kernel has `bpf_task_pt_regs` (5.15).
#[unsafe(no_mangle)]
pub(crate) static HAS_TASK_REGISTERS: Global<u32> = Global::new(0);
/// Offset of `task_struct.stack`.
#[unsafe(no_mangle)]
pub(crate) static TASK_STACK: Global<u32> = Global::new(0);
/// Offset in a kernel stack of the user's registers, for kernels without that
/// helper; 0 where it is not known.
#[unsafe(no_mangle)]
pub(crate) static STACK_REGISTERS: Global<u32> = Global::new(0);
/// Not 0: ids must be translated to those of [`NAMESPACE`].
#[unsafe(no_mangle)]
pub(crate) static TRANSLATE_IDS: Global<u32> = Global::new(0);
/// Offset of `task_struct.pid`.
#[unsafe(no_mangle)]
pub(crate) static TASK_PID: Global<u32> = Global::new(0);
/// Offset of `task_struct.tgid`.
#[unsafe(no_mangle)]
pub(crate) static TASK_TGID: Global<u32> = Global::new(0);
/// Offset of `task_struct.group_leader`.
#[unsafe(no_mangle)]
pub(crate) static TASK_LEADER: Global<u32> = Global::new(0);
/// Offset of `task_struct.thread_pid`.
#[unsafe(no_mangle)]
pub(crate) static TASK_THREAD_PID: Global<u32> = Global::new(0);
/// Offset of `pid.level`.
#[unsafe(no_mangle)]
pub(crate) static PID_LEVEL: Global<u32> = Global::new(0);
/// Offset of `pid.numbers`.
#[unsafe(no_mangle)]
pub(crate) static PID_NUMBERS: Global<u32> = Global::new(0);
/// Offset of `task_struct.signal`.
#[unsafe(no_mangle)]
pub(crate) static TASK_SIGNAL: Global<u32> = Global::new(0);
/// Offset of `signal_struct.live`.
#[unsafe(no_mangle)]
pub(crate) static SIGNAL_LIVE: Global<u32> = Global::new(0);
/// Offset of the user thread pointer in `task_struct`.
#[unsafe(no_mangle)]
pub(crate) static TASK_THREAD_POINTER: Global<u32> = Global::new(0);

/// Not 0: Rubies are discovered, and targets are only those.
#[unsafe(no_mangle)]
pub(crate) static DISCOVER: Global<u32> = Global::new(0);
/// Offset of `vm_area_struct.vm_flags`.
#[unsafe(no_mangle)]
pub(crate) static VMA_FLAGS: Global<u32> = Global::new(0);
/// Offset of `vm_area_struct.vm_file`.
#[unsafe(no_mangle)]
pub(crate) static VMA_FILE: Global<u32> = Global::new(0);
/// Offset of `vm_area_struct.vm_mm`.
#[unsafe(no_mangle)]
pub(crate) static VMA_MM: Global<u32> = Global::new(0);
/// Offset of `task_struct.mm`.
#[unsafe(no_mangle)]
pub(crate) static TASK_MM: Global<u32> = Global::new(0);
/// Offset of `file.f_inode`.
#[unsafe(no_mangle)]
pub(crate) static FILE_INODE: Global<u32> = Global::new(0);
/// Offset of `file.f_path.dentry`.
#[unsafe(no_mangle)]
pub(crate) static FILE_DENTRY: Global<u32> = Global::new(0);
/// Offset of `dentry.d_name.name`.
#[unsafe(no_mangle)]
pub(crate) static DENTRY_NAME: Global<u32> = Global::new(0);
/// Offset of `inode.i_ino`.
#[unsafe(no_mangle)]
pub(crate) static INODE_NUMBER: Global<u32> = Global::new(0);
/// Offset of `inode.i_size`.
#[unsafe(no_mangle)]
pub(crate) static INODE_SIZE: Global<u32> = Global::new(0);
/// Offset of `inode.i_generation`.
#[unsafe(no_mangle)]
pub(crate) static INODE_GENERATION: Global<u32> = Global::new(0);
/// Offset of `inode.i_sb`.
#[unsafe(no_mangle)]
pub(crate) static INODE_SUPER: Global<u32> = Global::new(0);
/// Offset of `super_block.s_dev`.
#[unsafe(no_mangle)]
pub(crate) static SUPER_DEVICE: Global<u32> = Global::new(0);

/// A PID namespace.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PidNamespace {
    /// Address of the kernel's `struct pid_namespace`.
    pub(crate) address: u64,
    /// Namespaces around it: 0 for the initial one.
    pub(crate) level: u32,
    pub(crate) reserved: u32,
}

/// A sample in the making, with its walk.
#[repr(C)]
pub(crate) struct State {
    pub(crate) walk: Walk,
    /// Those of user mode.
    pub(crate) registers: Registers,
    pub(crate) sample: Sample,
    /// Running hash over the frames.
    pub(crate) hash: u64,
    /// Frames so far.
    pub(crate) count: u32,
    /// Frames of the kernel, and which of them is next.
    pub(crate) kernel_frames: u32,
    pub(crate) kernel_next: u32,
    /// Flags of the walk once it is over.
    pub(crate) stack_flags: u32,
}

/// A chunk record as it is sent.
#[repr(C)]
pub(crate) struct Chunk {
    pub(crate) head: StackChunk,
    pub(crate) frames: [Frame; CHUNK_FRAMES],
}

/// A whole stack, cut into records.
#[repr(C)]
pub(crate) struct StackBuffer {
    pub(crate) chunks: [Chunk; MAX_CHUNKS],
}

/// Adds one to a counter of this CPU.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the pointer is to this CPU's own element of the map.
        unsafe { *value += 1 };
    }
}
