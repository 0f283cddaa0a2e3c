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

/// Offsets that no release from 2.6 to 4.0 has moved.
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

    /// `rb_iseq_t.body`.
    pub const ISEQ_BODY: u64 = 16;
    /// `rb_iseq_constant_body.type` (32 bits).
    pub const BODY_TYPE: u64 = 0;
    /// `rb_iseq_constant_body.iseq_size` (32 bits), in words.
    pub const BODY_SIZE: u64 = 4;
    /// `rb_iseq_constant_body.iseq_encoded`.
    pub const BODY_ENCODED: u64 = 8;
    /// `rb_iseq_constant_body.location.pathobj`.
    pub const BODY_PATH: u64 = 64;
    /// `rb_iseq_constant_body.location.base_label`.
    pub const BODY_BASE_LABEL: u64 = 72;
    /// `rb_iseq_constant_body.location.label`.
    pub const BODY_LABEL: u64 = 80;
    /// `rb_iseq_constant_body.location.first_lineno`.
    pub const BODY_FIRST_LINE: u64 = 88;

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
        /// From the class to `rb_classext_t.classpath`; the bit that says
        /// whether it is permanent is bit 40 of the word before.
        classpath: u16,
    },
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
    /// For telling whether the garbage collector has run, if that is known.
    pub collector: Option<CollectorLayout>,
}

/// Where a release keeps what its garbage collector is doing. Source: live
/// processes, searched for the value of `GC.count` while it changed; the flags
/// from the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectorLayout {
    /// `rb_vm_t.objspace`; differs between x86-64 and arm64.
    pub vm_objspace: u64,
    /// The word of flags in `rb_objspace_t`, whose low two bits are the mode.
    pub flags: u64,
    /// `rb_objspace_t.profile.count`: collections begun.
    pub count: u64,
}

const fn collector(x86_64: u64, arm64: u64, flags: u64, count: u64) -> Option<CollectorLayout> {
    // The layout is for processes of the machine this is compiled for; that of
    // the kernel half is of no matter, since it gets addresses.
    let vm_objspace = if cfg!(target_arch = "aarch64") {
        arm64
    } else {
        x86_64
    };
    Some(CollectorLayout {
        vm_objspace,
        flags,
        count,
    })
}

/// Modes of the garbage collector.
pub mod collector_mode {
    /// The bits of the flags that tell it.
    pub const MASK: u64 = 3;
    /// Finding out what is in use.
    pub const MARKING: u64 = 1;
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
    }
}

/// Every known layout, oldest first.
pub static LAYOUTS: [Layout; 8] = [
    Layout {
        from: Version::new(2, 6, 0),
        to: Version::new(2, 6, 10),
        walk: walk(56, 56, 24, 32, 72),
        names: NameLayout {
            method_table: ClassField::Direct(32),
            ..old_names(168, 264, 8, 164, 64)
        },
        collector: None,
    },
    Layout {
        from: Version::new(2, 7, 0),
        to: Version::new(2, 7, 8),
        walk: walk(56, 56, 24, 32, 72),
        names: old_names(168, 256, 8, 168, 64),
        collector: collector(1152, 1152, 16, 424),
    },
    Layout {
        from: Version::new(3, 0, 0),
        to: Version::new(3, 0, 7),
        walk: walk(56, 56, 32, 40, 80),
        names: old_names(168, 264, 8, 168, 72),
        collector: None,
    },
    Layout {
        from: Version::new(3, 1, 0),
        to: Version::new(3, 1, 7),
        walk: walk(64, 48, 32, 40, 80).with_jit_return(56),
        names: old_names(168, 280, 12, 169, 80),
        collector: collector(1104, 1128, 16, 440),
    },
    Layout {
        from: Version::new(3, 2, 0),
        to: Version::new(3, 2, 11),
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
        collector: None,
    },
    Layout {
        from: Version::new(3, 3, 0),
        to: Version::new(3, 3, 13),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(160, 288, 169, 1 << 12, class_fields(32, 96, 120), 24, 112),
        collector: collector(1304, 1320, 16, 1392),
    },
    Layout {
        from: Version::new(3, 4, 0),
        to: Version::new(3, 4, 12),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(160, 296, 170, 1 << 13, class_fields(32, 96, 120), 24, 112),
        collector: collector(1296, 1320, 20, 1008),
    },
    Layout {
        from: Version::new(4, 0, 0),
        to: Version::new(4, 0, 9),
        walk: walk(56, 48, 32, 48, 0).with_jit_return(48),
        names: names(168, 304, 171, 1 << 13, class_fields(24, 112, 128), 48, 120),
        collector: None,
    },
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
        Some(layout) if version <= layout.to => Lookup::Known(layout),
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
        assert!(matches!(lookup(Version::new(4, 1, 0)), Lookup::Assumed(l) if l.from.major == 4));
        assert_eq!(lookup(Version::new(2, 5, 9)), Lookup::TooOld);
    }

    #[test]
    fn the_table_is_in_order_without_overlap() {
        for pair in LAYOUTS.windows(2) {
            assert!(pair[0].from <= pair[0].to && pair[0].to < pair[1].from);
        }
    }
}
