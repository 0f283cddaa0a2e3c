//! A layout from the debug information (DWARF 4 or 5, compressed or not) of a
//! Ruby, or of the file that holds it apart from the Ruby.
//!
//! | module | what it does |
//! |---|---|
//! | `types` | structures and constants in the debug information |
//!
//! What debug information does not have (macros, or a structure that this build
//! does not show) is taken from the nearest row of the table and named, so that
//! the file can say so. What rbprof takes for fixed ([`fixed`]) is compared: a
//! Ruby that has moved it cannot be read by this rbprof.

mod types;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::Path;

use gimli::EndianSlice;
use gimli::LittleEndian;
use gimli::SectionId;
use object::Object as _;
use object::ObjectSection as _;

use rbprof_common::layout::ClassField;
use rbprof_common::layout::ClassNames;
use rbprof_common::layout::CollectorLayout;
use rbprof_common::layout::Embedding;
use rbprof_common::layout::FirstLine;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Lookup;
use rbprof_common::layout::Machine;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::ObjspaceLayout;
use rbprof_common::layout::PerMachine;
use rbprof_common::layout::RactorLayout;
use rbprof_common::layout::Version;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::collector_flags;
use rbprof_common::layout::fixed;
use rbprof_common::layout::frame_flags;
use rbprof_common::layout::imemo;
use rbprof_common::layout::lookup;
use rbprof_common::layout::object_type;

use self::types::Place;
use self::types::Types;
use crate::targets::elf::Elf;
use crate::targets::elf::file_cache;
use crate::targets::image::open_regular;

/// Largest section of debug information read; that of a Ruby with all its
/// extensions has 50 MB.
const MAX_SECTION: u64 = 512 << 20;
/// Longest text in `ruby_version`.
const MAX_VERSION: u64 = 64;

/// Why no layout can be made of a file.
#[derive(Debug)]
pub enum DwarfError {
    /// It cannot be read.
    Io(io::Error),
    /// It is no ELF file, or a damaged one.
    NotElf(String),
    /// It is for a machine whose Rubies rbprof does not know.
    Foreign(String),
    /// It has no debug information.
    NoDebugInfo,
    /// A section is too large to be read.
    TooLarge {
        /// Its name.
        section: &'static str,
        /// Its size in bytes.
        size: u64,
    },
    /// Its debug information is damaged, or of a kind that is not read.
    Malformed(String),
    /// Its debug information is not of a Ruby.
    NotRuby(&'static str),
    /// It does not say which release it is.
    NoVersion,
    /// The release is older than any that rbprof knows.
    TooOld(Version),
    /// This Ruby has moved what rbprof takes for fixed.
    Moved {
        /// The field or constant.
        what: String,
        /// Where it is, or its value.
        found: u64,
        /// Where it is in every release that rbprof knows.
        expected: u64,
    },
}

impl fmt::Display for DwarfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::NotElf(why) => write!(f, "not a whole ELF file: {why}"),
            Self::Foreign(machine) => write!(
                f,
                "an ELF file for {machine}; rbprof knows Rubies of x86-64 and arm64"
            ),
            Self::NoDebugInfo => f.write_str(
                "no debug information in it (no .debug_info). Give the unstripped file, or the \
                 .debug file that was split off it",
            ),
            Self::TooLarge { section, size } => {
                write!(
                    f,
                    "its section {section} has {size} bytes, which is too much"
                )
            }
            Self::Malformed(what) => write!(f, "its debug information cannot be read: {what}"),
            Self::NotRuby(missing) => write!(
                f,
                "its debug information is not that of a Ruby: it has no {missing}. In a shared \
                 build, Ruby is libruby.so, not the program"
            ),
            Self::NoVersion => f.write_str(
                "no ruby_version in it that could be read; say which release it is with --version",
            ),
            Self::TooOld(version) => {
                write!(f, "Ruby {version} is older than any that rbprof knows")
            }
            Self::Moved {
                what,
                found,
                expected,
            } => write!(
                f,
                "{what} is {found} in this Ruby; this rbprof can only read Rubies where it is \
                 {expected}"
            ),
        }
    }
}

impl std::error::Error for DwarfError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// A layout, and where it is from.
#[derive(Debug)]
pub struct FromDwarf {
    /// The layout.
    pub layout: Layout,
    /// The row of the table that what is missing was taken from.
    pub base: &'static Layout,
    /// What was taken from it, as named in the file's form.
    pub assumed: Vec<&'static str>,
}

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Makes a layout of the debug information in the file at `path`.
///
/// `version` is the release, if the file itself need not be asked: files with
/// debug information alone do not have what `ruby_version` holds.
///
/// # Errors
/// [`DwarfError`].
pub fn layout_of(path: &Path, version: Option<Version>) -> Result<FromDwarf, DwarfError> {
    let cache = file_cache(open_regular(path).map_err(DwarfError::Io)?);
    let file =
        object::File::parse(&cache).map_err(|error| DwarfError::NotElf(error.to_string()))?;
    let machine = machine_of(&file)?;
    let sections = gimli::DwarfSections::load(|id| section(&file, id))?;
    let dwarf = sections.borrow(|section| EndianSlice::new(section, LittleEndian));
    if dwarf.units().next().map_err(malformed)?.is_none() {
        return Err(DwarfError::NoDebugInfo);
    }
    let version = version
        .or_else(|| version_of(&cache))
        .ok_or(DwarfError::NoVersion)?;
    let base = match lookup(version) {
        Lookup::Known(layout) | Lookup::Assumed(layout) => layout,
        Lookup::TooOld => return Err(DwarfError::TooOld(version)),
    };
    let types = Types::read(&dwarf, &STRUCTURES, &CONSTANTS).map_err(malformed)?;
    Reading {
        types,
        base,
        machine,
        assumed: Vec::new(),
    }
    .layout(version)
}

fn malformed(error: gimli::Error) -> DwarfError {
    DwarfError::Malformed(error.to_string())
}

fn machine_of<'data>(
    file: &object::File<'data, impl object::ReadRef<'data>>,
) -> Result<Machine, DwarfError> {
    let architecture = file.architecture();
    match architecture {
        object::Architecture::X86_64 if file.is_64() => Ok(Machine::X86_64),
        object::Architecture::Aarch64 if file.is_64() && file.is_little_endian() => {
            Ok(Machine::Aarch64)
        }
        _ => Err(DwarfError::Foreign(format!("{architecture:?}"))),
    }
}

fn section<'data>(
    file: &object::File<'data, impl object::ReadRef<'data>>,
    id: SectionId,
) -> Result<Cow<'data, [u8]>, DwarfError> {
    let Some(section) = file.section_by_name(id.name()) else {
        return Ok(Cow::Borrowed(&[]));
    };
    let unreadable =
        |error: object::Error| DwarfError::Malformed(format!("{}: {error}", id.name()));
    let data = section.compressed_data().map_err(unreadable)?;
    // Before anything of that size is allocated.
    if data.uncompressed_size > MAX_SECTION {
        return Err(DwarfError::TooLarge {
            section: id.name(),
            size: data.uncompressed_size,
        });
    }
    data.decompress().map_err(unreadable)
}

/// What `ruby_version` of the file holds.
fn version_of<'data, R: object::ReadRef<'data>>(data: R) -> Option<Version> {
    let elf = Elf::parse(data).ok()?;
    let name = b"ruby_version";
    let symbol = match elf.dynamic_symbol(name) {
        Ok(Some(symbol)) => symbol,
        _ => {
            let [symbol] = elf.static_symbols([name]).ok()?;
            symbol?
        }
    };
    let text = elf.bytes(symbol.value, symbol.size.min(MAX_VERSION)).ok()?;
    let text = text.split(|&byte| byte == 0).next()?;
    Version::parse(std::str::from_utf8(text).ok()?)
}

const CFP: &str = "rb_control_frame_struct";
const EC: &str = "rb_execution_context_struct";
const THREAD: &str = "rb_thread_struct";
const RACTOR: &str = "rb_ractor_struct";
const VM: &str = "rb_vm_struct";
const ISEQ: &str = "rb_iseq_struct";
const BODY: &str = "rb_iseq_constant_body";
const INSN_INFO: &str = "iseq_insn_info_entry";
const METHOD: &str = "rb_method_entry_struct";
const DEFINITION: &str = "rb_method_definition_struct";
const CLASS: &str = "RClass_and_rb_classext_t";
const OBJSPACE: &str = "rb_objspace";
const SYMBOLS: &str = "rb_symbols_t";
const STRING: &str = "RString";
const ARRAY: &str = "RArray";
const BASIC: &str = "RBasic";
const ID_TABLE: &str = "rb_id_table";
const JIT_FRAME: &str = "zjit_jit_frame";

/// Every structure that is looked at, by its tag or the name of its type.
const STRUCTURES: [&str; 18] = [
    CFP, EC, THREAD, RACTOR, VM, ISEQ, BODY, INSN_INFO, METHOD, DEFINITION, CLASS, OBJSPACE,
    SYMBOLS, STRING, ARRAY, BASIC, ID_TABLE, JIT_FRAME,
];

/// Every constant that is looked at.
const CONSTANTS: [&str; 26] = [
    LAST_OPERATOR,
    SINGLETON,
    "imemo_svar",
    "imemo_ment",
    "imemo_iseq",
    "VM_METHOD_TYPE_ISEQ",
    "VM_METHOD_TYPE_CFUNC",
    "VM_METHOD_TYPE_BMETHOD",
    "VM_FRAME_MAGIC_METHOD",
    "VM_FRAME_MAGIC_BLOCK",
    "VM_FRAME_MAGIC_CLASS",
    "VM_FRAME_MAGIC_TOP",
    "VM_FRAME_MAGIC_CFUNC",
    "VM_FRAME_MAGIC_IFUNC",
    "VM_FRAME_MAGIC_EVAL",
    "VM_FRAME_MAGIC_RESCUE",
    "VM_FRAME_MAGIC_DUMMY",
    "VM_FRAME_FLAG_FINISH",
    "VM_FRAME_FLAG_BMETHOD",
    "VM_ENV_FLAG_LOCAL",
    "RUBY_T_CLASS",
    "RUBY_T_MODULE",
    "RUBY_T_STRING",
    "RUBY_T_ARRAY",
    "RUBY_T_ICLASS",
    "RUBY_T_IMEMO",
];
const LAST_OPERATOR: &str = "tLAST_OP_ID";
const SINGLETON: &str = "RUBY_FL_SINGLETON";

/// Fields that rbprof takes to be at the same place in every Ruby.
const FIXED_FIELDS: [(&str, &str, u64); 24] = [
    (EC, "vm_stack", fixed::EC_VM_STACK),
    (EC, "vm_stack_size", fixed::EC_VM_STACK_SIZE),
    (EC, "cfp", fixed::EC_CFP),
    (CFP, "pc", 8 * fixed::CFP_PC as u64),
    (CFP, "iseq", 8 * fixed::CFP_ISEQ as u64),
    (CFP, "_iseq", 8 * fixed::CFP_ISEQ as u64),
    (CFP, "ep", 8 * fixed::CFP_EP as u64),
    (BODY, "type", fixed::BODY_TYPE),
    (BODY, "iseq_size", fixed::BODY_SIZE),
    (BODY, "iseq_encoded", fixed::BODY_ENCODED),
    (BODY, "location.pathobj", fixed::BODY_PATH),
    (INSN_INFO, "line_no", 0),
    (METHOD, "def", fixed::METHOD_DEFINITION),
    (METHOD, "called_id", fixed::METHOD_CALLED_ID),
    (METHOD, "owner", fixed::METHOD_OWNER),
    (DEFINITION, "body.iseq.iseqptr", fixed::DEFINITION_ISEQ),
    (DEFINITION, "original_id", fixed::DEFINITION_ID),
    (BASIC, "klass", fixed::OBJECT_CLASS),
    (SYMBOLS, "ids", fixed::SYMBOLS_IDS),
    (STRING, "as.heap.ptr", 24),
    (ARRAY, "as.heap.ptr", 32),
    (ID_TABLE, "items", 16),
    (JIT_FRAME, "pc", 0),
    (JIT_FRAME, "iseq", 8),
];

/// Constants that rbprof takes to be the same in every Ruby.
const FIXED_CONSTANTS: [(&str, u64); 24] = [
    ("imemo_svar", imemo::SVAR),
    ("imemo_ment", imemo::MENT),
    ("imemo_iseq", imemo::ISEQ),
    ("VM_METHOD_TYPE_ISEQ", 0),
    ("VM_METHOD_TYPE_CFUNC", 1),
    ("VM_METHOD_TYPE_BMETHOD", 4),
    ("VM_FRAME_MAGIC_METHOD", frame_flags::METHOD),
    ("VM_FRAME_MAGIC_BLOCK", frame_flags::BLOCK),
    ("VM_FRAME_MAGIC_CLASS", frame_flags::CLASS),
    ("VM_FRAME_MAGIC_TOP", frame_flags::TOP),
    ("VM_FRAME_MAGIC_CFUNC", frame_flags::CFUNC),
    ("VM_FRAME_MAGIC_IFUNC", frame_flags::IFUNC),
    ("VM_FRAME_MAGIC_EVAL", frame_flags::EVAL),
    ("VM_FRAME_MAGIC_RESCUE", frame_flags::RESCUE),
    ("VM_FRAME_MAGIC_DUMMY", frame_flags::DUMMY),
    ("VM_FRAME_FLAG_FINISH", frame_flags::FINISH),
    ("VM_FRAME_FLAG_BMETHOD", frame_flags::BMETHOD),
    ("VM_ENV_FLAG_LOCAL", frame_flags::ENV_LOCAL),
    ("RUBY_T_CLASS", object_type::CLASS),
    ("RUBY_T_MODULE", object_type::MODULE),
    ("RUBY_T_STRING", object_type::STRING),
    ("RUBY_T_ARRAY", object_type::ARRAY),
    ("RUBY_T_ICLASS", object_type::ICLASS),
    ("RUBY_T_IMEMO", object_type::IMEMO),
];

/// A layout being put together.
struct Reading<'a> {
    types: Types<'a>,
    base: &'static Layout,
    machine: Machine,
    assumed: Vec<&'static str>,
}

impl Reading<'_> {
    fn layout(mut self, version: Version) -> Result<FromDwarf, DwarfError> {
        for missing in [CFP, EC, BODY] {
            if !self.types.has(missing) {
                return Err(DwarfError::NotRuby(missing));
            }
        }
        self.check_fixed()?;
        let layout = Layout {
            from: version,
            to: version,
            walk: self.walk()?,
            names: self.names()?,
            collector: self.collector()?,
            // Ruby has this structure only since ZJIT's frames are read through
            // it.
            zjit: self.types.has(JIT_FRAME),
            development: false,
        };
        Ok(FromDwarf {
            layout,
            base: self.base,
            assumed: self.assumed,
        })
    }

    fn check_fixed(&self) -> Result<(), DwarfError> {
        for (structure, path, expected) in FIXED_FIELDS {
            if let Some(place) = self.find(structure, &[path])?
                && place.offset != expected
            {
                return Err(DwarfError::Moved {
                    what: format!("the offset of {structure}.{path}"),
                    found: place.offset,
                    expected,
                });
            }
        }
        for (name, expected) in FIXED_CONSTANTS {
            if let Some(found) = self.types.constant(name)
                && found != expected
            {
                return Err(DwarfError::Moved {
                    what: name.to_owned(),
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// The first of the paths that the structure has.
    fn find(&self, structure: &str, paths: &[&str]) -> Result<Option<Place>, DwarfError> {
        for path in paths {
            if let Some(place) = self.types.place(structure, path).map_err(malformed)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// The offset of a field, or the base's if the structure is not shown.
    /// `name` is its name in the file's form.
    fn offset<T: TryFrom<u64>>(
        &mut self,
        name: &'static str,
        structure: &str,
        paths: &[&str],
        base: T,
    ) -> Result<T, DwarfError> {
        let place = self.find(structure, paths)?;
        self.number(name, place.map(|place| place.offset), base)
    }

    fn number<T: TryFrom<u64>>(
        &mut self,
        name: &'static str,
        found: Option<u64>,
        base: T,
    ) -> Result<T, DwarfError> {
        match found {
            None => {
                self.assumed.push(name);
                Ok(base)
            }
            Some(found) => T::try_from(found)
                .map_err(|_| DwarfError::Malformed(format!("{name}: {found} is too large"))),
        }
    }

    fn walk(&mut self) -> Result<WalkLayout, DwarfError> {
        let base = self.base.walk;
        let size = self.types.size(CFP);
        let jit_return = self.find(CFP, &["jit_return"])?;
        let thread_id = self.find(THREAD, &["thread_id"])?;
        Ok(WalkLayout {
            cfp_size: self.number("rb_control_frame_t.sizeof", size, base.cfp_size)?,
            ec_thread: self.offset(
                "rb_execution_context_t.thread_ptr",
                EC,
                &["thread_ptr"],
                base.ec_thread,
            )?,
            thread_vm: self.offset("rb_thread_t.vm", THREAD, &["vm"], base.thread_vm)?,
            thread_ec: self.offset("rb_thread_t.ec", THREAD, &["ec"], base.thread_ec)?,
            // Not there in every release, so nothing is missing.
            thread_id: self.number("", Some(thread_id.map_or(0, |place| place.offset)), 0)?,
            jit_return: self.number("", Some(jit_return.map_or(0, |place| place.offset)), 0)?,
            zjit: 0,
            reserved: 0,
        })
    }

    fn names(&mut self) -> Result<NameLayout, DwarfError> {
        let base = self.base.names;
        let first_lineno = self.find(BODY, &["location.first_lineno"])?;
        let first_line = match first_lineno.and_then(|place| place.size) {
            Some(4) => FirstLine::Int,
            Some(8) => FirstLine::Fixnum,
            _ => {
                self.assumed.push("objects.first_lineno");
                base.first_line
            }
        };
        let embedding = if self.find(STRING, &["len"])?.is_some() {
            Embedding::Variable
        } else if self.find(STRING, &["as.heap.len"])?.is_some() {
            Embedding::Fixed
        } else {
            self.assumed.push("objects.embedding");
            base.embedding
        };
        let last_operator_id = self.types.constant(LAST_OPERATOR);
        let singleton_flag = self.types.constant(SINGLETON);
        let entry = self.types.size(INSN_INFO);
        let base_label = self.find(BODY, &["location.base_label"])?;
        let (class_names, method_table, origin) = self.classes()?;
        let mut body = |name, paths: &[&str], base: u16| self.offset(name, BODY, paths, base);
        Ok(NameLayout {
            label: body(
                "rb_iseq_constant_body.location.label",
                &["location.label"],
                base.label,
            )?,
            first_lineno: body(
                "rb_iseq_constant_body.location.first_lineno",
                &["location.first_lineno"],
                base.first_lineno,
            )?,
            insns_info: body(
                "rb_iseq_constant_body.insns_info.body",
                &["insns_info.body"],
                base.insns_info,
            )?,
            insns_info_size: body(
                "rb_iseq_constant_body.insns_info.size",
                &["insns_info.size"],
                base.insns_info_size,
            )?,
            succ_index_table: body(
                "rb_iseq_constant_body.insns_info.succ_index_table",
                &["insns_info.succ_index_table"],
                base.succ_index_table,
            )?,
            parent_iseq: body(
                "rb_iseq_constant_body.parent_iseq",
                &["parent_iseq"],
                base.parent_iseq,
            )?,
            local_iseq: body(
                "rb_iseq_constant_body.local_iseq",
                &["local_iseq"],
                base.local_iseq,
            )?,
            jit_entry: body(
                "rb_iseq_constant_body.jit_entry",
                &["jit_entry", "jit_func"],
                base.jit_entry,
            )?,
            base_label: base_label
                .map(|place| self.number("", Some(place.offset), 0))
                .transpose()?,
            iseq_body: self.offset("rb_iseq_t.body", ISEQ, &["body"], base.iseq_body)?,
            insn_info_entry: self.number(
                "iseq_insn_info_entry.sizeof",
                entry,
                base.insn_info_entry,
            )?,
            last_operator_id: self.number(
                "constants.tLAST_OP_ID",
                last_operator_id,
                base.last_operator_id,
            )?,
            singleton_flag: self.number(
                "constants.RUBY_FL_SINGLETON",
                singleton_flag,
                base.singleton_flag,
            )?,
            embedding,
            first_line,
            class_names,
            method_table,
            origin,
        })
    }

    /// Where classes have their names, methods, and origin. Up to 3.2, as in the
    /// base: their form differs more than debug information tells.
    fn classes(&mut self) -> Result<(ClassNames, ClassField, ClassField), DwarfError> {
        let base = self.base.names;
        let fields = [
            self.find(CLASS, &["classext.as.singleton_class.attached_object"])?,
            self.find(CLASS, &["classext.classpath"])?,
            self.find(CLASS, &["classext.permanent_classpath"])?,
            self.find(CLASS, &["classext.m_tbl", "rclass.m_tbl"])?,
            self.find(CLASS, &["classext.origin_"])?,
        ];
        let [
            Some(attached),
            Some(classpath),
            Some(permanent),
            Some(methods),
            Some(origin),
        ] = fields
        else {
            self.assumed.extend([
                "class.m_tbl",
                "class.origin_",
                "class.fields.attached_object",
                "class.fields.classpath",
                "class.fields.permanent_classpath",
                "class.iv_tbl.pointer",
                "class.iv_tbl.offset",
                "class.shapes.iv_ptr",
                "class.shapes.vm_search",
            ]);
            return Ok((base.class_names, base.method_table, base.origin));
        };
        let names = ClassNames::Fields {
            attached_object: self.number("", Some(attached.offset), 0)?,
            classpath: self.number("", Some(classpath.offset), 0)?,
            permanent: self.number("", Some(permanent.offset), 0)?,
            // A whole `bool` has its first bit.
            permanent_bit: 1 << permanent.bit.unwrap_or(0),
        };
        Ok((
            names,
            ClassField::Direct(self.number("", Some(methods.offset), 0)?),
            ClassField::Direct(self.number("", Some(origin.offset), 0)?),
        ))
    }

    fn collector(&mut self) -> Result<CollectorLayout, DwarfError> {
        let base = self.base.collector;
        let pointer = self.find(VM, &["gc.objspace", "objspace"])?;
        let flags = self.find(OBJSPACE, &["flags"])?;
        let count = self.find(OBJSPACE, &["profile.count"])?;
        // What the file does not say of its own machine is not known; of the
        // other, as in the base.
        let vm_objspace = self.here(pointer, base.vm_objspace);
        self.assumed.push(match self.machine {
            Machine::X86_64 => "rb_vm_t.objspace.arm64",
            Machine::Aarch64 => "rb_vm_t.objspace.x86_64",
        });
        Ok(CollectorLayout {
            vm_objspace,
            objspace: match (flags, count) {
                // Flags with another meaning are of no use.
                _ if !self.has_known_flags()? => None,
                (Some(flags), Some(count)) => Some(ObjspaceLayout {
                    flags: flags.offset,
                    count: Some(count.offset),
                }),
                _ => {
                    self.assumed
                        .extend(["rb_objspace_t.flags", "rb_objspace_t.profile.count"]);
                    base.objspace
                }
            },
            ractors: self.ractors()?,
        })
    }

    /// Whether the bit that says that a thread collects is the one that rbprof
    /// looks at; also where that is not shown.
    fn has_known_flags(&self) -> Result<bool, DwarfError> {
        let flags = self.find(OBJSPACE, &["flags"])?;
        let during_gc = self.find(OBJSPACE, &["flags.during_gc"])?;
        Ok(flags
            .zip(during_gc)
            .and_then(|(flags, during_gc)| {
                let byte = during_gc.offset.checked_sub(flags.offset)?;
                Some(8 * byte + u64::from(during_gc.bit?))
            })
            .is_none_or(|bit| bit == u64::from(collector_flags::DURING_GC.trailing_zeros())))
    }

    /// Which thread collects: all of it, or nothing. What is wrong there is worse
    /// than nothing.
    fn ractors(&mut self) -> Result<Option<RactorLayout>, DwarfError> {
        let fields = [
            self.find(THREAD, &["ractor"])?,
            self.find(VM, &["ractor.cnt"])?,
            self.find(RACTOR, &["threads.running_ec"])?,
            self.find(VM, &["ractor.sync.lock_owner"])?,
        ];
        let [
            Some(thread_ractor),
            Some(vm_ractors),
            running_ec @ Some(_),
            lock_owner @ Some(_),
        ] = fields
        else {
            return Ok(None);
        };
        let unknown = PerMachine {
            x86_64: None,
            aarch64: None,
        };
        let base = self.base.collector.ractors;
        self.assumed.extend(match self.machine {
            Machine::X86_64 => [
                "rb_ractor_t.threads.running_ec.arm64",
                "rb_vm_t.ractor.sync.lock_owner.arm64",
            ],
            Machine::Aarch64 => [
                "rb_ractor_t.threads.running_ec.x86_64",
                "rb_vm_t.ractor.sync.lock_owner.x86_64",
            ],
        });
        Ok(Some(RactorLayout {
            thread_ractor: self.number("", Some(thread_ractor.offset), 0)?,
            vm_ractors: vm_ractors.offset,
            running_ec: self.here(running_ec, base.map_or(unknown, |base| base.running_ec)),
            vm_lock_owner: self.here(lock_owner, base.map_or(unknown, |base| base.vm_lock_owner)),
        }))
    }

    /// The base's offsets with that on the file's own machine.
    fn here(&self, place: Option<Place>, base: PerMachine) -> PerMachine {
        let found = place.map(|place| place.offset);
        match self.machine {
            Machine::X86_64 => PerMachine {
                x86_64: found,
                ..base
            },
            Machine::Aarch64 => PerMachine {
                aarch64: found,
                ..base
            },
        }
    }
}
