//! Where each Ruby release keeps what rbprof reads: the one place for offsets
//! into Ruby's structures.
//!
//! All offsets are in bytes, for 64-bit builds. The same row serves x86-64 and
//! arm64 unless a field says otherwise. Source of the numbers: the generated
//! bindings of the crate `rbspy-ruby-structs`, and for what they lack, the
//! headers and live processes of the release itself.

use bytemuck::Pod;
use bytemuck::Zeroable;

/// A Ruby release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The `3` of 3.4.5.
    pub major: u16,
    /// The `4` of 3.4.5.
    pub minor: u16,
    /// The `5` of 3.4.5.
    pub patch: u16,
}

impl Version {
    /// The release `major.minor.patch`.
    #[must_use]
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// Reads what `ruby_version` holds: `3.4.5`, perhaps with something behind
    /// the patch level (`4.1.0dev`).
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        let rest = parts.next()?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let patch = rest.get(..digits)?.parse().ok()?;
        Some(Self {
            major,
            minor,
            patch,
        })
    }
}

impl core::fmt::Display for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The machines whose Rubies are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Machine {
    /// x86-64.
    X86_64,
    /// arm64.
    Aarch64,
}

impl Machine {
    /// The machine that this is compiled for: that of every process here.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") {
        Self::Aarch64
    } else {
        Self::X86_64
    };
}

/// An offset that depends on the machine, since it lies behind a structure of
/// the C library; `None` where it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerMachine {
    /// On x86-64.
    pub x86_64: Option<u64>,
    /// On arm64.
    pub aarch64: Option<u64>,
}

impl PerMachine {
    /// The offset on that machine.
    #[must_use]
    pub const fn on(&self, machine: Machine) -> Option<u64> {
        match machine {
            Machine::X86_64 => self.x86_64,
            Machine::Aarch64 => self.aarch64,
        }
    }
}

/// Offsets that no release from 2.6 to 4.0 has moved, nor 4.1 so far.
pub mod fixed {
    /// `rb_execution_context_t.vm_stack`.
    pub const EC_VM_STACK: u64 = 0;
    /// `rb_execution_context_t.vm_stack_size`, in words.
    pub const EC_VM_STACK_SIZE: u64 = 8;
    /// `rb_execution_context_t.cfp`.
    pub const EC_CFP: u64 = 16;

    /// `rb_control_frame_t.pc`, as a word index.
    pub const CFP_PC: usize = 0;
    /// `rb_control_frame_t.iseq`, as a word index.
    pub const CFP_ISEQ: usize = 2;
    /// `rb_control_frame_t.ep`, as a word index.
    pub const CFP_EP: usize = 4;

    /// From `rb_control_frame_t.jit_return` down to the pointer to ZJIT's frame.
    pub const JIT_RETURN_FRAME: u64 = 8;
    /// What is in `rb_control_frame_t.jit_return` of a C method's frame
    /// (`ZJIT_JIT_RETURN_C_FRAME`): it has neither `pc` nor `iseq`.
    pub const JIT_RETURN_C_FRAME: u64 = 1;

    /// `rb_iseq_constant_body.type` (32 bits).
    pub const BODY_TYPE: u64 = 0;
    /// `rb_iseq_constant_body.iseq_size` (32 bits), in words.
    pub const BODY_SIZE: u64 = 4;
    /// `rb_iseq_constant_body.iseq_encoded`.
    pub const BODY_ENCODED: u64 = 8;
    /// `rb_iseq_constant_body.location.pathobj`.
    pub const BODY_PATH: u64 = 64;

    /// `rb_callable_method_entry_t.def`.
    pub const METHOD_DEFINITION: u64 = 16;
    /// `rb_callable_method_entry_t.called_id`.
    pub const METHOD_CALLED_ID: u64 = 24;
    /// `rb_callable_method_entry_t.owner`.
    pub const METHOD_OWNER: u64 = 32;
    /// `rb_method_definition_t.type`, in the low four bits.
    pub const DEFINITION_TYPE: u64 = 0;
    /// `rb_method_definition_t.body.iseq.iseqptr`.
    pub const DEFINITION_ISEQ: u64 = 8;
    /// `rb_method_definition_t.original_id`.
    pub const DEFINITION_ID: u64 = 32;

    /// `RBasic.klass`.
    pub const OBJECT_CLASS: u64 = 8;
    /// `RClass.super` (up to 3.4).
    pub const CLASS_SUPER: u64 = 16;

    /// `rb_symbols_t.ids`.
    pub const SYMBOLS_IDS: u64 = 16;

    /// Bytes from the environment pointer down to the method entry or cref.
    pub const ENV_ME_CREF: u64 = 16;

    /// `svar.cref_or_me` of an internal object that holds special variables.
    pub const SVAR_CREF_OR_ME: u64 = 8;
}

/// Frame and environment flags: the word at the environment pointer.
pub mod frame_flags {
    /// The bits that tell the frame's type.
    pub const TYPE_MASK: u64 = 0x7fff_0001;
    /// A method written in Ruby.
    pub const METHOD: u64 = 0x1111_0001;
    /// A block written in Ruby.
    pub const BLOCK: u64 = 0x2222_0001;
    /// The body of `class` or `module`.
    pub const CLASS: u64 = 0x3333_0001;
    /// The top level of a file.
    pub const TOP: u64 = 0x4444_0001;
    /// A method written in C.
    pub const CFUNC: u64 = 0x5555_0001;
    /// A block written in C.
    pub const IFUNC: u64 = 0x6666_0001;
    /// Evaluated code.
    pub const EVAL: u64 = 0x7777_0001;
    /// A `rescue` or `ensure` clause.
    pub const RESCUE: u64 = 0x7888_0001;
    /// The frame at the base of a VM stack.
    pub const DUMMY: u64 = 0x7999_0001;

    /// `rb_vm_exec` returns when this frame ends.
    pub const FINISH: u64 = 0x20;
    /// The block is the body of a method made by `define_method`.
    pub const BMETHOD: u64 = 0x40;
    /// The environment is a method's own: the search for its entry ends here.
    pub const ENV_LOCAL: u64 = 0x2;
}

/// Types of objects: the low five bits of their flags.
pub mod object_type {
    /// The mask over the type.
    pub const MASK: u64 = 0x1f;
    /// A class.
    pub const CLASS: u64 = 0x02;
    /// A module.
    pub const MODULE: u64 = 0x03;
    /// A string.
    pub const STRING: u64 = 0x05;
    /// An array.
    pub const ARRAY: u64 = 0x07;
    /// A C structure that Ruby keeps as an object.
    pub const DATA: u64 = 0x0c;
    /// An internal object; see [`imemo`](super::imemo).
    pub const IMEMO: u64 = 0x1a;
    /// A module as it stands in a chain of superclasses.
    pub const ICLASS: u64 = 0x1c;
}

/// Types of internal objects (`imemo`).
pub mod imemo {
    /// Where the type is in the object's flags.
    pub const TYPE_SHIFT: u64 = 12;
    /// How many values it has.
    pub const TYPE_MASK: u64 = 0xf;
    /// Special variables, which hide the method entry behind them.
    pub const SVAR: u64 = 2;
    /// A method entry.
    pub const MENT: u64 = 6;
    /// An instruction sequence.
    pub const ISEQ: u64 = 7;

    /// The internal type in an object's flags.
    #[inline(always)]
    #[must_use]
    pub const fn of(flags: u64) -> u64 {
        (flags >> TYPE_SHIFT) & TYPE_MASK
    }
}

/// What the walk must know of a release: sent to the kernel with each process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct WalkLayout {
    /// `sizeof(rb_control_frame_t)`.
    pub cfp_size: u32,
    /// `rb_execution_context_t.thread_ptr`.
    pub ec_thread: u32,
    /// `rb_thread_t.vm`.
    pub thread_vm: u32,
    /// `rb_thread_t.ec`.
    pub thread_ec: u32,
    /// `rb_thread_t.thread_id`, the native handle (`pthread_t`); used only
    /// where one global holds the execution context (up to 2.7).
    pub thread_id: u32,
    /// `rb_control_frame_t.jit_return`: not 0 in a frame that machine code
    /// runs. 0 where there is no such field (up to 3.0).
    pub jit_return: u32,
    /// Not 0 if ZJIT is on in the process and keeps the `pc` and `iseq` of its
    /// frames behind `jit_return` (4.1). Other JITs keep return addresses there.
    pub zjit: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
}

impl WalkLayout {
    /// The same with `rb_control_frame_t.jit_return` at `offset`.
    const fn with_jit_return(self, offset: u32) -> Self {
        Self {
            jit_return: offset,
            ..self
        }
    }
}

/// How strings and arrays that need no memory of their own are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embedding {
    /// In a slot of 40 bytes, with the length in the object's flags (up to 3.1).
    Fixed,
    /// In a slot of any size. A string has its length in a field of its own
    /// (3.2 on); an array has more bits of its flags for it.
    Variable,
}

/// How a location's `first_lineno` is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstLine {
    /// As a Ruby Integer (up to 3.1).
    Fixnum,
    /// As a C `int`.
    Int,
}

/// Where a class keeps its name, and a singleton class the object it belongs
/// to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassNames {
    /// Hidden instance variables (`__classpath__`, `__attached__`) in an
    /// `st_table` (up to 3.1).
    IvarTable {
        /// `RClass.ptr`, which points to the class extension.
        extension: u16,
        /// `rb_classext_t.iv_tbl`.
        iv_tbl: u16,
    },
    /// The same hidden instance variables in an array, laid out by the class's
    /// shape (3.2 only).
    Shapes {
        /// From the class to `rb_classext_t.iv_ptr`.
        iv_ptr: u16,
        /// How many bytes of `rb_vm_t` to search for `shape_list`: its place
        /// depends on the size of the C library's mutexes.
        vm_search: u16,
    },
    /// Fields of the class extension, which lies right behind the class
    /// (3.3 on).
    Fields {
        /// From the class to `rb_classext_t.as.singleton_class.attached_object`.
        attached_object: u16,
        /// From the class to `rb_classext_t.classpath`.
        classpath: u16,
        /// From the class to the byte with `rb_classext_t.permanent_classpath`.
        permanent: u16,
        /// The bit of that byte, as a mask.
        permanent_bit: u8,
    },
    /// Not known: classes have no names. The places of their methods are of no
    /// matter then.
    Unknown,
}

/// Where a field of a class is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassField {
    /// At this offset from the class.
    Direct(u16),
    /// In a structure of its own.
    Behind {
        /// From the class to the pointer to the structure.
        pointer: u16,
        /// From the structure to the field.
        offset: u16,
    },
}

/// What the symbolizer must know of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameLayout {
    /// `rb_iseq_t.body`.
    pub iseq_body: u16,
    /// `rb_iseq_constant_body.location.base_label`; `None` where there is none
    /// (4.1): the label of `local_iseq` says the same.
    pub base_label: Option<u16>,
    /// `rb_iseq_constant_body.location.label`.
    pub label: u16,
    /// `rb_iseq_constant_body.location.first_lineno`.
    pub first_lineno: u16,
    /// `rb_iseq_constant_body.insns_info.body`.
    pub insns_info: u16,
    /// `rb_iseq_constant_body.insns_info.size`.
    pub insns_info_size: u16,
    /// `rb_iseq_constant_body.insns_info.succ_index_table`.
    pub succ_index_table: u16,
    /// `rb_iseq_constant_body.parent_iseq`.
    pub parent_iseq: u16,
    /// `rb_iseq_constant_body.local_iseq`.
    pub local_iseq: u16,
    /// `rb_iseq_constant_body.jit_func` or `jit_entry`: machine code for the
    /// sequence, if there is any.
    pub jit_entry: u16,
    /// `sizeof(struct iseq_insn_info_entry)`; the line is its first word.
    pub insn_info_entry: u16,
    /// The largest ID that is an operator (`tLAST_OP_ID`).
    pub last_operator_id: u64,
    /// How small strings and arrays are kept.
    pub embedding: Embedding,
    /// How a location's first line is kept.
    pub first_line: FirstLine,
    /// The flag of a class that says it is a singleton class
    /// (`RUBY_FL_SINGLETON`).
    pub singleton_flag: u64,
    /// Where class names are.
    pub class_names: ClassNames,
    /// The methods of a class: its `m_tbl`.
    pub method_table: ClassField,
    /// What has the methods of a class that something was prepended to:
    /// `rb_classext_t.origin_`.
    pub origin: ClassField,
}

/// One release series: the versions it was checked against and the offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// First release with this layout.
    pub from: Version,
    /// Last release that was checked.
    pub to: Version,
    /// For the walk.
    pub walk: WalkLayout,
    /// For the symbolizer.
    pub names: NameLayout,
    /// For telling whether the garbage collector has run, and who collects.
    pub collector: CollectorLayout,
    /// Where ZJIT is on, it keeps the `pc` and `iseq` of its frames behind
    /// `rb_control_frame_t.jit_return` (4.1).
    pub zjit: bool,
    /// The release is not out: the numbers are those of one revision of its
    /// development, and never count as checked.
    pub development: bool,
}

impl Layout {
    /// For the walk over frames of a process in which ZJIT is on or off.
    #[must_use]
    pub const fn walk_with_zjit(&self, on: bool) -> WalkLayout {
        WalkLayout {
            zjit: (self.zjit && on) as u32,
            ..self.walk
        }
    }

    /// Where the garbage collector keeps what it is doing on that machine, if
    /// that is known.
    #[must_use]
    pub const fn collector_on(&self, machine: Machine) -> Option<CollectorOffsets> {
        let (Some(vm_objspace), Some(objspace)) = (
            self.collector.vm_objspace.on(machine),
            self.collector.objspace,
        ) else {
            return None;
        };
        Some(CollectorOffsets {
            vm_objspace,
            objspace,
        })
    }

    /// Where Ruby keeps which thread runs on that machine, if all of it is
    /// known.
    #[must_use]
    pub const fn ractors_on(&self, machine: Machine) -> Option<RactorOffsets> {
        let Some(RactorLayout {
            thread_ractor,
            vm_ractors,
            running_ec,
            vm_lock_owner,
        }) = self.collector.ractors
        else {
            return None;
        };
        match (running_ec.on(machine), vm_lock_owner.on(machine)) {
            (Some(running_ec), Some(vm_lock_owner)) => Some(RactorOffsets {
                thread_ractor,
                vm_ractors,
                running_ec: running_ec as u32,
                vm_lock_owner,
            }),
            _ => None,
        }
    }
}

/// Where a release keeps what its garbage collector is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectorLayout {
    /// `rb_vm_t.objspace`, from 3.4 on `gc.objspace`.
    pub vm_objspace: PerMachine,
    /// Inside of it.
    pub objspace: Option<ObjspaceLayout>,
    /// What tells which thread collects (3.0 on).
    pub ractors: Option<RactorLayout>,
}

/// What is looked at in `rb_objspace_t`. Source: live processes, searched for
/// the value of `GC.count` while it changed; the flags from the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjspaceLayout {
    /// The word of [`collector_flags`].
    pub flags: u64,
    /// `rb_objspace_t.profile.count`: collections begun.
    pub count: Option<u64>,
}

/// Where the garbage collector of a process keeps what it is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectorOffsets {
    /// `rb_vm_t.objspace`.
    pub vm_objspace: u64,
    /// Inside of it.
    pub objspace: ObjspaceLayout,
}

/// Where a release keeps which thread of a Ractor has its lock, and which
/// Ractor that of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RactorLayout {
    /// `rb_thread_t.ractor`.
    pub thread_ractor: u32,
    /// `rb_vm_t.ractor.cnt` (32 bits).
    pub vm_ractors: u64,
    /// `rb_ractor_t.threads.running_ec`, behind two mutexes of the C library.
    pub running_ec: PerMachine,
    /// `rb_vm_t.ractor.sync.lock_owner`, behind one.
    pub vm_lock_owner: PerMachine,
}

/// [`RactorLayout`] on one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RactorOffsets {
    /// `rb_thread_t.ractor`.
    pub thread_ractor: u32,
    /// `rb_vm_t.ractor.cnt` (32 bits).
    pub vm_ractors: u64,
    /// `rb_ractor_t.threads.running_ec`.
    pub running_ec: u32,
    /// `rb_vm_t.ractor.sync.lock_owner`.
    pub vm_lock_owner: u64,
}

/// A collector whose pointer is at these offsets in the VM.
const fn collector(
    x86_64: u64,
    aarch64: Option<u64>,
    objspace: Option<ObjspaceLayout>,
    ractors: Option<RactorLayout>,
) -> CollectorLayout {
    CollectorLayout {
        vm_objspace: PerMachine {
            x86_64: Some(x86_64),
            aarch64,
        },
        objspace,
        ractors,
    }
}

const fn objspace(flags: u64, count: Option<u64>) -> Option<ObjspaceLayout> {
    Some(ObjspaceLayout { flags, count })
}

/// Ractors whose `threads.running_ec` is at that offset on x86-64. Mutexes of
/// the C library have 48 bytes on arm64 rather than 40.
const fn ractors(running_ec: u64) -> Option<RactorLayout> {
    Some(RactorLayout {
        thread_ractor: 24,
        vm_ractors: 24,
        running_ec: PerMachine {
            x86_64: Some(running_ec),
            aarch64: Some(running_ec + 16),
        },
        vm_lock_owner: PerMachine {
            x86_64: Some(88),
            aarch64: Some(96),
        },
    })
}

/// Flags of the garbage collector, the same from 2.6 to 4.0.
pub mod collector_flags {
    /// The bits that tell the mode: a [`gc_phase`](crate::wire::gc_phase). It
    /// stays set between two slices of a phase.
    pub const MODE: u64 = 3;
    /// The mode of finding out what is in use.
    pub const MARKING: u64 = 1;
    /// A thread is collecting at this moment.
    pub const DURING_GC: u64 = 1 << 5;
}

const fn walk(
    cfp_size: u32,
    ec_thread: u32,
    thread_vm: u32,
    thread_ec: u32,
    thread_id: u32,
) -> WalkLayout {
    WalkLayout {
        cfp_size,
        ec_thread,
        thread_vm,
        thread_ec,
        thread_id,
        jit_return: 0,
        zjit: 0,
        reserved: 0,
    }
}

/// Hidden instance variables of a class, up to 3.1.
const IVAR_TABLE: ClassNames = ClassNames::IvarTable {
    extension: 24,
    iv_tbl: 8,
};

/// A field of the class extension, up to 3.1.
const fn in_extension(offset: u16) -> ClassField {
    ClassField::Behind {
        pointer: 24,
        offset,
    }
}

/// Names up to 3.1. The size of `insns_info` has not changed since 2.6.
const fn old_names(
    parent_iseq: u16,
    jit_entry: u16,
    insn_info_entry: u16,
    last_operator_id: u64,
    origin: u16,
) -> NameLayout {
    NameLayout {
        iseq_body: 16,
        base_label: Some(72),
        label: 80,
        first_lineno: 88,
        insns_info: 120,
        insns_info_size: 136,
        succ_index_table: 144,
        parent_iseq,
        local_iseq: parent_iseq + 8,
        jit_entry,
        insn_info_entry,
        last_operator_id,
        embedding: Embedding::Fixed,
        first_line: FirstLine::Fixnum,
        singleton_flag: 1 << 12,
        class_names: IVAR_TABLE,
        method_table: in_extension(16),
        origin: in_extension(origin),
    }
}

/// Names from 3.2 on.
const fn names(
    parent_iseq: u16,
    jit_entry: u16,
    last_operator_id: u64,
    singleton_flag: u64,
    class_names: ClassNames,
    method_table: u16,
    origin: u16,
) -> NameLayout {
    NameLayout {
        iseq_body: 16,
        base_label: Some(72),
        label: 80,
        first_lineno: 88,
        insns_info: 112,
        insns_info_size: 128,
        succ_index_table: 136,
        parent_iseq,
        local_iseq: parent_iseq + 8,
        jit_entry,
        insn_info_entry: 12,
        last_operator_id,
        embedding: Embedding::Variable,
        first_line: FirstLine::Int,
        singleton_flag,
        class_names,
        method_table: ClassField::Direct(method_table),
        origin: ClassField::Direct(origin),
    }
}

/// Fields of a class whose extension begins at `extension`.
const fn class_fields(extension: u16, attached_object: u16, classpath: u16) -> ClassNames {
    ClassNames::Fields {
        attached_object: extension + attached_object,
        classpath: extension + classpath,
        // The first of the bits between two counters and the path.
        permanent: extension + classpath - 3,
        permanent_bit: 1,
    }
}

/// Ruby 3.1, whose `rb_vm_t` grew by a word in 3.1.5.
const fn ruby_3_1(from: u16, to: u16, vm_objspace: u64) -> Layout {
    Layout {
        from: Version::new(3, 1, from),
        to: Version::new(3, 1, to),
        walk: walk(64, 48, 32, 40, 80).with_jit_return(56),
        names: old_names(168, 280, 12, 169, 80),
        // Three mutexes of the C library lie before it, of 48 bytes each on
        // arm64 rather than 40.
        collector: collector(
            vm_objspace,
            Some(vm_objspace + 24),
            objspace(16, Some(440)),
            ractors(520),
        ),
        zjit: false,
        development: false,
    }
}

/// Ruby 3.2, whose `rb_vm_t` grew twice.
const fn ruby_3_2(from: u16, to: u16, vm_objspace: u64) -> Layout {
    Layout {
        from: Version::new(3, 2, from),
        to: Version::new(3, 2, to),
        walk: walk(64, 48, 32, 48, 0).with_jit_return(56),
        names: names(
            160,
            288,
            169,
            1 << 12,
            ClassNames::Shapes {
                iv_ptr: 32,
                vm_search: 1024,
            },
            24,
            112,
        ),
        collector: collector(
            vm_objspace,
            Some(vm_objspace + 24),
            objspace(16, None),
            ractors(520),
        ),
        zjit: false,
        development: false,
    }
}

/// Ruby 4.0, whose `rb_vm_t` and `rb_ractor_t` grew by a word in 4.0.6.
const fn ruby_4_0(from: u16, to: u16, vm_objspace: u64, running_ec: u64) -> Layout {
    Layout {
        from: Version::new(4, 0, from),
        to: Version::new(4, 0, to),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(168, 304, 171, 1 << 13, class_fields(24, 112, 128), 48, 120),
        collector: collector(
            vm_objspace,
            Some(vm_objspace + 24),
            objspace(28, None),
            ractors(running_ec),
        ),
        zjit: false,
        development: false,
    }
}

/// Ruby 4.1 as it was in development in September 2026 (revision a68e42cfad):
/// what others read from debug information of that revision, on both machines.
/// **Not proven on a live process**, and still changing: a user of such a Ruby
/// should make a layout of its own debug information.
///
/// Assumed to be as in 4.0, since nothing is known: the structures of threads
/// and execution contexts, and the distance from `local_iseq` to `parent_iseq`
/// and `jit_entry`. Not known: where classes keep their methods, and so their
/// names; where the garbage collector keeps its state, which is no longer the
/// VM's but each Ractor's.
const RUBY_4_1_DEV: Layout = Layout {
    from: Version::new(4, 1, 0),
    to: Version::new(4, 1, 0),
    walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
    names: NameLayout {
        iseq_body: 8,
        base_label: None,
        label: 72,
        first_lineno: 80,
        insns_info: 104,
        insns_info_size: 120,
        succ_index_table: 112,
        ..names(152, 288, 174, 1 << 13, ClassNames::Unknown, 0, 0)
    },
    collector: CollectorLayout {
        vm_objspace: PerMachine {
            x86_64: None,
            aarch64: None,
        },
        objspace: None,
        ractors: None,
    },
    zjit: true,
    development: true,
};

/// Every known layout, oldest first. `cargo xtask layouts` compares it with
/// generated bindings of every release.
pub static LAYOUTS: [Layout; 13] = [
    Layout {
        from: Version::new(2, 6, 0),
        to: Version::new(2, 6, 10),
        walk: walk(56, 56, 24, 32, 72),
        names: NameLayout {
            method_table: ClassField::Direct(32),
            ..old_names(168, 264, 8, 164, 64)
        },
        collector: collector(1224, None, objspace(16, None), None),
        zjit: false,
        development: false,
    },
    Layout {
        from: Version::new(2, 7, 0),
        to: Version::new(2, 7, 8),
        walk: walk(56, 56, 24, 32, 72),
        names: old_names(168, 256, 8, 168, 64),
        collector: collector(1152, Some(1176), objspace(16, Some(424)), None),
        zjit: false,
        development: false,
    },
    Layout {
        from: Version::new(3, 0, 0),
        to: Version::new(3, 0, 7),
        walk: walk(56, 56, 32, 40, 80),
        names: old_names(168, 264, 8, 168, 72),
        collector: collector(1088, None, objspace(16, None), ractors(520)),
        zjit: false,
        development: false,
    },
    ruby_3_1(0, 4, 1104),
    ruby_3_1(5, 7, 1112),
    ruby_3_2(0, 2, 1128),
    ruby_3_2(3, 3, 1136),
    ruby_3_2(4, 11, 1144),
    Layout {
        from: Version::new(3, 3, 0),
        to: Version::new(3, 3, 13),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(160, 288, 169, 1 << 12, class_fields(32, 96, 120), 24, 112),
        collector: collector(1304, Some(1328), objspace(16, Some(1392)), ractors(384)),
        zjit: false,
        development: false,
    },
    Layout {
        from: Version::new(3, 4, 0),
        to: Version::new(3, 4, 12),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(160, 296, 170, 1 << 13, class_fields(32, 96, 120), 24, 112),
        collector: collector(1296, Some(1320), objspace(20, Some(1008)), ractors(384)),
        zjit: false,
        development: false,
    },
    ruby_4_0(0, 5, 1248, 312),
    ruby_4_0(6, 9, 1256, 320),
    RUBY_4_1_DEV,
];

/// What the table has for a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A layout that was checked against this very release series and patch.
    Known(&'static Layout),
    /// The nearest known layout, for a release the table has not seen: use it
    /// only if it validates against the live process, and say so.
    Assumed(&'static Layout),
    /// Older than anything in the table.
    TooOld,
}

/// The layout of a release.
#[must_use]
pub fn lookup(version: Version) -> Lookup {
    match LAYOUTS.iter().rev().find(|layout| layout.from <= version) {
        None => Lookup::TooOld,
        Some(layout) if version <= layout.to && !layout.development => Lookup::Known(layout),
        Some(layout) => Lookup::Assumed(layout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_ruby_writes_them() {
        assert_eq!(Version::parse("3.4.5"), Some(Version::new(3, 4, 5)));
        assert_eq!(Version::parse("4.1.0dev"), Some(Version::new(4, 1, 0)));
        assert_eq!(Version::parse("3.4"), None);
        assert_eq!(Version::parse("three"), None);
    }

    #[test]
    fn unknown_releases_get_the_nearest_layout_and_say_so() {
        assert!(matches!(lookup(Version::new(3, 3, 8)), Lookup::Known(l) if l.walk.cfp_size == 56));
        assert!(matches!(lookup(Version::new(3, 3, 99)), Lookup::Assumed(l) if l.from.minor == 3));
        for version in [Version::new(4, 1, 0), Version::new(4, 2, 0)] {
            assert!(
                matches!(lookup(version), Lookup::Assumed(l) if l.from == Version::new(4, 1, 0))
            );
        }
        assert_eq!(lookup(Version::new(2, 5, 9)), Lookup::TooOld);
    }

    #[test]
    fn the_table_is_in_order_without_overlap() {
        for pair in LAYOUTS.windows(2) {
            assert!(pair[0].from <= pair[0].to && pair[0].to < pair[1].from);
        }
    }
}
