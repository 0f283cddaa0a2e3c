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
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
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
    /// `sizeof(struct iseq_insn_info_entry)`; the line is its first word.
    pub insn_info_entry: u16,
    /// The largest ID that is an operator (`tLAST_OP_ID`).
    pub last_operator_id: u64,
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
        reserved: 0,
    }
}

const fn names(
    insns_info: u16,
    parent_iseq: u16,
    insn_info_entry: u16,
    last_operator_id: u64,
) -> NameLayout {
    NameLayout {
        insns_info,
        insns_info_size: insns_info + 16,
        succ_index_table: insns_info + 24,
        parent_iseq,
        local_iseq: parent_iseq + 8,
        insn_info_entry,
        last_operator_id,
    }
}

/// Every known layout, oldest first.
pub static LAYOUTS: [Layout; 8] = [
    Layout {
        from: Version::new(2, 6, 0),
        to: Version::new(2, 6, 10),
        walk: walk(56, 56, 24, 32, 72),
        names: names(120, 168, 8, 164),
    },
    Layout {
        from: Version::new(2, 7, 0),
        to: Version::new(2, 7, 8),
        walk: walk(56, 56, 24, 32, 72),
        names: names(120, 168, 8, 168),
    },
    Layout {
        from: Version::new(3, 0, 0),
        to: Version::new(3, 0, 7),
        walk: walk(56, 56, 32, 40, 80),
        names: names(120, 168, 8, 168),
    },
    Layout {
        from: Version::new(3, 1, 0),
        to: Version::new(3, 1, 7),
        walk: walk(64, 48, 32, 40, 80),
        names: names(120, 168, 12, 169),
    },
    Layout {
        from: Version::new(3, 2, 0),
        to: Version::new(3, 2, 11),
        walk: walk(64, 48, 32, 48, 0),
        names: names(112, 160, 12, 169),
    },
    Layout {
        from: Version::new(3, 3, 0),
        to: Version::new(3, 3, 13),
        walk: walk(56, 48, 32, 48, 0),
        names: names(112, 160, 12, 169),
    },
    Layout {
        from: Version::new(3, 4, 0),
        to: Version::new(3, 4, 12),
        walk: walk(56, 48, 32, 48, 0),
        names: names(112, 160, 12, 170),
    },
    Layout {
        from: Version::new(4, 0, 0),
        to: Version::new(4, 0, 9),
        walk: walk(56, 48, 32, 48, 0),
        names: names(112, 168, 12, 171),
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
