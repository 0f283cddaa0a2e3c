//! The file's form.
//!
//! A TOML document with a table for each of Ruby's structures, in which fields
//! are named as there. Numbers are bytes from the structure's start, for 64-bit
//! builds. `rbprof layout --version 3.4` writes the table's own row in this
//! form, with a comment for each field: that is its documentation.
//!
//! What is read is checked as far as that goes without a process: whether it
//! fits one is found out when rbprof attaches.

use std::fmt;
use std::fmt::Write as _;
use std::io;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Deserializer;
use serde::de::Error as _;

use rbprof_common::layout::ClassField;
use rbprof_common::layout::ClassNames;
use rbprof_common::layout::CollectorLayout;
use rbprof_common::layout::Embedding;
use rbprof_common::layout::FirstLine;
use rbprof_common::layout::Layout;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::ObjspaceLayout;
use rbprof_common::layout::PerMachine;
use rbprof_common::layout::RactorLayout;
use rbprof_common::layout::Version;
use rbprof_common::layout::WalkLayout;

use crate::targets::image::open_regular;

/// The form that this rbprof reads and writes.
const FORM: u32 = 1;
/// Longest file read; what rbprof writes has 3 KiB.
const MAX_FILE: u64 = 64 << 10;
/// Most characters of a line that an error quotes.
const MAX_QUOTE: usize = 80;

/// Why a file with a layout cannot be used.
#[derive(Debug)]
pub enum LayoutError {
    /// It cannot be read.
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is not of the form.
    Form {
        /// The file.
        path: PathBuf,
        /// The line, from 1, and its text, if it is one line's fault.
        line: Option<(usize, String)>,
        /// What is wrong.
        what: String,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, source } => write!(f, "reading {}: {source}", path.display()),
            Self::Form { path, line, what } => {
                write!(f, "{}", path.display())?;
                match line {
                    Some((number, text)) => write!(f, ":{number}: {what}: {text}"),
                    None => write!(f, ": {what}"),
                }
            }
        }
    }
}

impl std::error::Error for LayoutError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Form { .. } => None,
        }
    }
}

/// Reads a layout from a file. It is never freed: a run of rbprof reads one.
///
/// # Errors
/// [`LayoutError`] names the file, and the line where there is one.
pub fn read(path: &Path) -> Result<&'static Layout, LayoutError> {
    let io_error = |source| LayoutError::Io {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    open_regular(path)
        .map_err(io_error)?
        .take(MAX_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(io_error)?;
    let parsed = if bytes.len() as u64 > MAX_FILE {
        Err(Wrong::whole(format!("longer than {MAX_FILE} bytes")))
    } else {
        std::str::from_utf8(&bytes)
            .map_err(|_| Wrong::whole("not UTF-8 text".to_owned()))
            .and_then(|text| parse(text).map_err(|wrong| wrong.in_text(text)))
    };
    match parsed {
        Ok(layout) => Ok(Box::leak(Box::new(layout))),
        Err(Wrong { what, line, .. }) => Err(LayoutError::Form {
            path: path.to_owned(),
            line,
            what,
        }),
    }
}

/// What is wrong with a text.
#[derive(Debug)]
struct Wrong {
    what: String,
    span: Option<Range<usize>>,
    line: Option<(usize, String)>,
}

impl Wrong {
    fn whole(what: String) -> Self {
        Self {
            what,
            span: None,
            line: None,
        }
    }

    /// The same with the line of the text that its span begins in.
    fn in_text(self, text: &str) -> Self {
        let line = self.span.as_ref().and_then(|span| {
            let before = text.get(..span.start)?;
            let number = before.matches('\n').count();
            let line = text.lines().nth(number).unwrap_or_default();
            let quote = line.trim().chars().take(MAX_QUOTE).collect();
            Some((number + 1, quote))
        });
        Self { line, ..self }
    }
}

fn parse(text: &str) -> Result<Layout, Wrong> {
    let document: Document = ::toml::from_str(text).map_err(|error| Wrong {
        what: error.message().to_owned(),
        span: error.span(),
        line: None,
    })?;
    document.layout().map_err(Wrong::whole)
}

/// A number of bytes: a multiple of `ALIGN`, below `END`.
#[derive(Clone, Copy, Debug)]
struct Bytes<const ALIGN: u64, const END: u64>(u64);

impl<'de, const ALIGN: u64, const END: u64> Deserialize<'de> for Bytes<ALIGN, END> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = u64::deserialize(deserializer)?;
        if !bytes.is_multiple_of(ALIGN) {
            return Err(D::Error::custom(format!(
                "{bytes} is not a multiple of {ALIGN}"
            )));
        }
        if bytes >= END {
            return Err(D::Error::custom(format!("{bytes} is not below {END}")));
        }
        Ok(Self(bytes))
    }
}

impl<const ALIGN: u64, const END: u64> Bytes<ALIGN, END> {
    fn short(self) -> Result<u16, String> {
        u16::try_from(self.0).map_err(|_| format!("{} is too large", self.0))
    }

    fn int(self) -> Result<u32, String> {
        u32::try_from(self.0).map_err(|_| format!("{} is too large", self.0))
    }
}

/// A pointer, a `VALUE`, a counter in a small structure.
type Word = Bytes<8, 4096>;
/// A C `int` in a small structure.
type Int = Bytes<4, 4096>;
/// A pointer in a large structure.
type FarWord = Bytes<8, 65_536>;

/// A release.
#[derive(Clone, Copy, Debug)]
struct Release(Version);

impl<'de> Deserialize<'de> for Release {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Version::parse(&text)
            .map(Self)
            .ok_or_else(|| D::Error::custom("not a release such as \"3.4.5\""))
    }
}

/// One flag of an object.
#[derive(Clone, Copy, Debug)]
struct Flag(u64);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let flag = u64::deserialize(deserializer)?;
        if flag.is_power_of_two() && flag < 1 << 32 {
            Ok(Self(flag))
        } else {
            Err(D::Error::custom(format!("{flag} is not one bit of 32")))
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    form: u32,
    from: Release,
    to: Release,
    rb_control_frame_t: ControlFrame,
    rb_execution_context_t: ExecutionContext,
    rb_thread_t: Thread,
    rb_iseq_t: IseqObject,
    rb_iseq_constant_body: Body,
    iseq_insn_info_entry: InsnInfoEntry,
    constants: Constants,
    objects: Objects,
    class: Class,
    rb_vm_t: Vm,
    rb_ractor_t: Option<Ractor>,
    rb_objspace_t: Option<Objspace>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ControlFrame {
    sizeof: Bytes<8, 257>,
    jit_return: Option<Bytes<8, 257>>,
    #[serde(default)]
    zjit: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecutionContext {
    thread_ptr: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thread {
    vm: Word,
    ec: Word,
    thread_id: Option<Word>,
    ractor: Option<Word>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IseqObject {
    body: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    location: Location,
    insns_info: InsnsInfo,
    parent_iseq: Word,
    local_iseq: Word,
    jit_entry: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Location {
    base_label: Option<Word>,
    label: Word,
    first_lineno: Int,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InsnsInfo {
    body: Word,
    size: Int,
    succ_index_table: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InsnInfoEntry {
    sizeof: Bytes<4, 65>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(non_snake_case, reason = "named as in Ruby")]
struct Constants {
    tLAST_OP_ID: u16,
    RUBY_FL_SINGLETON: Flag,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Objects {
    embedding: EmbeddingForm,
    first_lineno: FirstLineForm,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EmbeddingForm {
    Fixed,
    Variable,
}

#[derive(Debug, Deserialize)]
enum FirstLineForm {
    #[serde(rename = "VALUE")]
    Value,
    #[serde(rename = "int")]
    Int,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    m_tbl: ClassPlace,
    origin_: ClassPlace,
    fields: Option<ClassFields>,
    iv_tbl: Option<ClassIvTbl>,
    shapes: Option<ClassShapes>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassPlace {
    pointer: Option<Word>,
    offset: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassFields {
    attached_object: Word,
    classpath: Word,
    permanent_classpath: BitPlace,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BitPlace {
    byte: Bytes<1, 4096>,
    bit: Bytes<1, 8>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassIvTbl {
    pointer: Word,
    offset: Word,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassShapes {
    iv_ptr: Word,
    vm_search: FarWord,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vm {
    #[serde(default)]
    objspace: Machines,
    ractor: Option<VmRactor>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmRactor {
    cnt: Bytes<4, 65_536>,
    #[serde(default)]
    sync: VmSync,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmSync {
    #[serde(default)]
    lock_owner: Machines,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ractor {
    #[serde(default)]
    threads: RactorThreads,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RactorThreads {
    #[serde(default)]
    running_ec: Machines,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Machines {
    x86_64: Option<FarWord>,
    arm64: Option<FarWord>,
}

impl Machines {
    fn per_machine(&self) -> PerMachine {
        PerMachine {
            x86_64: self.x86_64.map(|offset| offset.0),
            aarch64: self.arm64.map(|offset| offset.0),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Objspace {
    flags: Bytes<4, 65_536>,
    profile: Option<Profile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    count: FarWord,
}

impl Document {
    /// The layout, or what does not fit together.
    fn layout(self) -> Result<Layout, String> {
        if self.form != FORM {
            return Err(format!(
                "form {} is none that this rbprof knows: it reads form {FORM}",
                self.form
            ));
        }
        if self.to.0 < self.from.0 {
            return Err("to is an older release than from".to_owned());
        }
        let walk = self.walk()?;
        let names = self.names()?;
        let ractors = self.ractors()?;
        let Self { from, to, .. } = self;
        Ok(Layout {
            from: from.0,
            to: to.0,
            walk,
            names,
            collector: CollectorLayout {
                vm_objspace: self.rb_vm_t.objspace.per_machine(),
                objspace: self.rb_objspace_t.map(|objspace| ObjspaceLayout {
                    flags: objspace.flags.0,
                    count: objspace.profile.map(|profile| profile.count.0),
                }),
                ractors,
            },
            zjit: self.rb_control_frame_t.zjit,
            development: false,
        })
    }

    fn ractors(&self) -> Result<Option<RactorLayout>, String> {
        match (
            self.rb_thread_t.ractor,
            &self.rb_vm_t.ractor,
            &self.rb_ractor_t,
        ) {
            (None, None, None) => Ok(None),
            (Some(thread_ractor), Some(vm), Some(ractor)) => Ok(Some(RactorLayout {
                thread_ractor: thread_ractor.int()?,
                vm_ractors: vm.cnt.0,
                running_ec: ractor.threads.running_ec.per_machine(),
                vm_lock_owner: vm.sync.lock_owner.per_machine(),
            })),
            _ => Err("rb_thread_t.ractor, rb_vm_t.ractor and rb_ractor_t go together".to_owned()),
        }
    }

    fn walk(&self) -> Result<WalkLayout, String> {
        let frame = &self.rb_control_frame_t;
        let cfp_size = frame.sizeof.int()?;
        // Up to and with `ep`, which rbprof reads.
        if cfp_size < 40 {
            return Err(format!(
                "rb_control_frame_t.sizeof: {cfp_size} is less than the 40 bytes up to ep"
            ));
        }
        let jit_return = match frame.jit_return {
            None => 0,
            Some(offset) => offset.int()?,
        };
        if jit_return >= cfp_size {
            return Err(format!(
                "rb_control_frame_t.jit_return: {jit_return} is not inside of {cfp_size} bytes"
            ));
        }
        if frame.zjit && jit_return == 0 {
            return Err("rb_control_frame_t.zjit needs jit_return".to_owned());
        }
        Ok(WalkLayout {
            cfp_size,
            ec_thread: self.rb_execution_context_t.thread_ptr.int()?,
            thread_vm: self.rb_thread_t.vm.int()?,
            thread_ec: self.rb_thread_t.ec.int()?,
            thread_id: match self.rb_thread_t.thread_id {
                None => 0,
                Some(offset) => offset.int()?,
            },
            jit_return,
            zjit: 0,
            reserved: 0,
        })
    }

    fn names(&self) -> Result<NameLayout, String> {
        let Body {
            location,
            insns_info,
            parent_iseq,
            local_iseq,
            jit_entry,
        } = &self.rb_iseq_constant_body;
        Ok(NameLayout {
            iseq_body: self.rb_iseq_t.body.short()?,
            base_label: location.base_label.map(Bytes::short).transpose()?,
            label: location.label.short()?,
            first_lineno: location.first_lineno.short()?,
            insns_info: insns_info.body.short()?,
            insns_info_size: insns_info.size.short()?,
            succ_index_table: insns_info.succ_index_table.short()?,
            parent_iseq: parent_iseq.short()?,
            local_iseq: local_iseq.short()?,
            jit_entry: jit_entry.short()?,
            insn_info_entry: match self.iseq_insn_info_entry.sizeof.short()? {
                0 => return Err("iseq_insn_info_entry.sizeof is 0".to_owned()),
                size => size,
            },
            last_operator_id: u64::from(self.constants.tLAST_OP_ID),
            embedding: match self.objects.embedding {
                EmbeddingForm::Fixed => Embedding::Fixed,
                EmbeddingForm::Variable => Embedding::Variable,
            },
            first_line: match self.objects.first_lineno {
                FirstLineForm::Value => FirstLine::Fixnum,
                FirstLineForm::Int => FirstLine::Int,
            },
            singleton_flag: self.constants.RUBY_FL_SINGLETON.0,
            class_names: self.class.names()?,
            method_table: self.class.m_tbl.field()?,
            origin: self.class.origin_.field()?,
        })
    }
}

impl Class {
    fn names(&self) -> Result<ClassNames, String> {
        match (&self.fields, &self.iv_tbl, &self.shapes) {
            (None, None, None) => Ok(ClassNames::Unknown),
            (Some(fields), None, None) => Ok(ClassNames::Fields {
                attached_object: fields.attached_object.short()?,
                classpath: fields.classpath.short()?,
                permanent: fields.permanent_classpath.byte.short()?,
                permanent_bit: 1 << fields.permanent_classpath.bit.0,
            }),
            (None, Some(table), None) => Ok(ClassNames::IvarTable {
                extension: table.pointer.short()?,
                iv_tbl: table.offset.short()?,
            }),
            (None, None, Some(shapes)) => Ok(ClassNames::Shapes {
                iv_ptr: shapes.iv_ptr.short()?,
                vm_search: shapes.vm_search.short()?,
            }),
            _ => Err("class: more than one of fields, iv_tbl and shapes".to_owned()),
        }
    }
}

impl ClassPlace {
    fn field(&self) -> Result<ClassField, String> {
        let offset = self.offset.short()?;
        Ok(match self.pointer {
            None => ClassField::Direct(offset),
            Some(pointer) => ClassField::Behind {
                pointer: pointer.short()?,
                offset,
            },
        })
    }
}

/// Writes a layout, with `head` as a comment before it. The fields in `assumed`
/// (such as `rb_thread_t.vm`) are marked as what they are.
#[must_use]
pub fn write(layout: &Layout, head: &str, assumed: &[&str]) -> String {
    let mut page = Page {
        text: String::new(),
        table: String::new(),
        assumed,
    };
    for line in head.lines() {
        page.line(&format!("# {line}"));
    }
    page.line("# Numbers are bytes from the start of the structure. All fields but those marked");
    page.line("# optional must be there.");
    let Layout {
        from,
        to,
        walk,
        names,
        collector,
        zjit,
        development: _,
    } = layout;
    page.field("form", FORM, "of this file");
    page.field(
        "from",
        format_args!("\"{from}\""),
        "first release that it holds for",
    );
    page.field("to", format_args!("\"{to}\""), "last one");
    write_walk(&mut page, walk, *zjit);
    if let Some(RactorLayout { thread_ractor, .. }) = collector.ractors {
        page.field(
            "ractor",
            thread_ractor,
            "optional, with rb_vm_t.ractor and rb_ractor_t: up to 2.7 there is none",
        );
    }
    write_names(&mut page, names);
    write_classes(&mut page, names);
    write_collector(&mut page, collector);
    page.text
}

fn write_walk(page: &mut Page<'_>, walk: &WalkLayout, zjit: bool) {
    let &WalkLayout {
        cfp_size,
        ec_thread,
        thread_vm,
        thread_ec,
        thread_id,
        jit_return,
        zjit: _,
        reserved: _,
    } = walk;
    page.table("rb_control_frame_t");
    page.field("sizeof", cfp_size, "");
    if jit_return != 0 {
        page.field(
            "jit_return",
            jit_return,
            "optional: up to 3.0 there is none",
        );
    }
    let about = "optional: ZJIT keeps pc and iseq behind jit_return (4.1)";
    page.field("zjit", zjit, about);
    page.table("rb_execution_context_t");
    page.field("thread_ptr", ec_thread, "");
    page.table("rb_thread_t");
    page.field("vm", thread_vm, "");
    page.field("ec", thread_ec, "");
    if thread_id != 0 {
        page.field("thread_id", thread_id, "optional: needed up to 2.7");
    }
}

fn write_names(page: &mut Page<'_>, names: &NameLayout) {
    page.table("rb_iseq_t");
    page.field("body", names.iseq_body, "");
    page.table("rb_iseq_constant_body");
    if let Some(offset) = names.base_label {
        page.field(
            "location.base_label",
            offset,
            "optional: from 4.1 on there is none",
        );
    }
    page.field("location.label", names.label, "");
    page.field("location.first_lineno", names.first_lineno, "");
    page.field("insns_info.body", names.insns_info, "");
    page.field("insns_info.size", names.insns_info_size, "");
    page.field("insns_info.succ_index_table", names.succ_index_table, "");
    page.field("parent_iseq", names.parent_iseq, "");
    page.field("local_iseq", names.local_iseq, "");
    page.field("jit_entry", names.jit_entry, "up to 3.2: jit_func");
    page.table("iseq_insn_info_entry");
    page.field("sizeof", names.insn_info_entry, "");
    page.table("constants");
    page.field("tLAST_OP_ID", names.last_operator_id, "");
    let flag = format!("{:#x}", names.singleton_flag);
    page.field("RUBY_FL_SINGLETON", flag, "");
    page.table("objects");
    let (embedding, about) = match names.embedding {
        Embedding::Fixed => (
            "fixed",
            "\"variable\" from 3.2 on: RString has a len of its own",
        ),
        Embedding::Variable => (
            "variable",
            "\"fixed\" up to 3.1: the length is in the flags",
        ),
    };
    page.field("embedding", format_args!("\"{embedding}\""), about);
    let kind = match names.first_line {
        FirstLine::Fixnum => "VALUE",
        FirstLine::Int => "int",
    };
    let about = "type of location.first_lineno: \"VALUE\" or \"int\"";
    page.field("first_lineno", format_args!("\"{kind}\""), about);
}

fn write_classes(page: &mut Page<'_>, names: &NameLayout) {
    page.table("class");
    page.line("# From the address of the class; behind a pointer, from what that points to.");
    for (key, field) in [("m_tbl", names.method_table), ("origin_", names.origin)] {
        match field {
            ClassField::Direct(offset) => {
                page.field(key, format_args!("{{ offset = {offset} }}"), "");
            }
            ClassField::Behind { pointer, offset } => {
                let place = format!("{{ pointer = {pointer}, offset = {offset} }}");
                page.field(key, place, "");
            }
        }
    }
    match names.class_names {
        ClassNames::Unknown => {
            page.line("# Without one of class.fields, class.iv_tbl and class.shapes, classes have");
            page.line("# no names.");
        }
        ClassNames::Fields {
            attached_object,
            classpath,
            permanent,
            permanent_bit,
        } => {
            page.table("class.fields");
            page.field("attached_object", attached_object, "");
            page.field("classpath", classpath, "");
            let bit = permanent_bit.trailing_zeros();
            let place = format!("{{ byte = {permanent}, bit = {bit} }}");
            page.field("permanent_classpath", place, "");
        }
        ClassNames::IvarTable { extension, iv_tbl } => {
            page.table("class.iv_tbl");
            page.field("pointer", extension, "RClass.ptr");
            page.field("offset", iv_tbl, "rb_classext_t.iv_tbl");
        }
        ClassNames::Shapes { iv_ptr, vm_search } => {
            page.table("class.shapes");
            page.field("iv_ptr", iv_ptr, "");
            page.field(
                "vm_search",
                vm_search,
                "how far to look for rb_vm_t.shape_list",
            );
        }
    }
}

fn write_collector(page: &mut Page<'_>, collector: &CollectorLayout) {
    page.table("rb_vm_t");
    let CollectorLayout {
        vm_objspace,
        objspace,
        ractors,
    } = collector;
    let about = "optional; from 3.4 on gc.objspace";
    page.per_machine("objspace", vm_objspace, about);
    if let Some(RactorLayout {
        thread_ractor: _,
        vm_ractors,
        running_ec,
        vm_lock_owner,
    }) = ractors
    {
        page.field("ractor.cnt", vm_ractors, "");
        page.per_machine("ractor.sync.lock_owner", vm_lock_owner, "");
        page.table("rb_ractor_t");
        page.per_machine("threads.running_ec", running_ec, "");
    }
    if let Some(ObjspaceLayout { flags, count }) = objspace {
        page.line("");
        page.line("# Optional.");
        page.open("rb_objspace_t");
        let about = "the word of flags: mode in bits 0 and 1, during_gc in bit 5";
        page.field("flags", flags, about);
        if let Some(count) = count {
            page.field("profile.count", count, "optional");
        }
    }
}

/// A document being written.
struct Page<'a> {
    text: String,
    table: String,
    assumed: &'a [&'a str],
}

impl Page<'_> {
    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    fn table(&mut self, name: &str) {
        self.line("");
        self.open(name);
    }

    fn open(&mut self, name: &str) {
        self.line(&format!("[{name}]"));
        name.clone_into(&mut self.table);
    }

    fn per_machine(&mut self, key: &str, offset: &PerMachine, about: &str) {
        let PerMachine { x86_64, aarch64 } = offset;
        for (machine, offset) in [("x86_64", x86_64), ("arm64", aarch64)] {
            if let Some(offset) = offset {
                self.field(&format!("{key}.{machine}"), offset, about);
            }
        }
    }

    fn field(&mut self, key: &str, value: impl fmt::Display, about: &str) {
        let path = if self.table.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.table)
        };
        let mut line = format!("{key} = {value}");
        let mut about = about.to_owned();
        if self.assumed.contains(&path.as_str()) {
            let note = "not in the debug information";
            about = if about.is_empty() {
                note.to_owned()
            } else {
                format!("{note}; {about}")
            };
        }
        if !about.is_empty() {
            // Writing to a string does not fail.
            let _ = write!(line, "  # {about}");
        }
        self.line(&line);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use rbprof_common::layout::LAYOUTS;

    use super::*;

    fn read_text(text: &[u8]) -> Result<&'static Layout, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        read(file.path()).map_err(|error| {
            let path = file.path().display().to_string();
            error.to_string().replace(&path, "FILE")
        })
    }

    fn ruby_3_4() -> String {
        let layout = super::super::built_in("3.4").unwrap();
        write(layout, "A layout.", &["rb_thread_t.vm"])
    }

    #[test]
    fn every_row_of_the_table_survives_the_form() {
        for layout in &LAYOUTS {
            let text = write(layout, "", &[]);
            let read = read_text(text.as_bytes()).unwrap();
            let expected = Layout {
                development: false,
                ..*layout
            };
            assert_eq!(*read, expected, "{text}");
        }
    }

    #[test]
    fn comments_say_what_was_assumed() {
        let text = ruby_3_4();
        assert!(text.starts_with("# A layout.\n"), "{text}");
        assert!(
            text.contains("\nvm = 32  # not in the debug information\nec = 48\n"),
            "{text}"
        );
    }

    #[test]
    fn errors_name_the_line_and_quote_it() {
        let good = ruby_3_4();
        assert!(read_text(good.as_bytes()).is_ok());
        for (from, to, error) in [
            (
                "\nvm = 32",
                "\nvm = 33",
                "33 is not a multiple of 8: vm = 33",
            ),
            (
                "\nvm = 32",
                "\nvm = 4096",
                "4096 is not below 4096: vm = 4096",
            ),
            ("\nvm = 32", "\nvm = -8", "invalid value: integer `-8`"),
            ("\nvm = 32", "\nvm = \"32\"", "invalid type: string \"32\""),
            (
                "\nvm = 32",
                "\nvn = 32",
                "unknown field `vn`, expected one of `vm`, `ec`",
            ),
            ("\nvm = 32", "\nvm = 32\nvm = 32", "duplicate key: vm = 32"),
            ("0x2000", "0x3000", "12288 is not one bit of 32"),
            ("\"variable\"", "\"some\"", "unknown variant `some`"),
            ("\"3.4.0\"", "\"new\"", "not a release"),
            ("bit = 0", "bit = 8", "8 is not below 8"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            let message = read_text(bad.as_bytes()).unwrap_err();
            let number = bad
                .lines()
                .position(|line| line.contains(to.trim().lines().last().unwrap()));
            assert!(message.contains(error), "{message}\nshould have: {error}");
            let line = message
                .strip_prefix("FILE:")
                .and_then(|rest| rest.split(':').next())
                .and_then(|number| number.parse::<usize>().ok());
            let number = number.unwrap() + 1;
            assert!(
                line == Some(number) || line == Some(number + 1),
                "{message}: line {number}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let good = ruby_3_4();
        for (from, to, error) in [
            (
                "form = 1",
                "form = 2",
                "form 2 is none that this rbprof knows",
            ),
            (
                "\"3.4.12\"",
                "\"3.3.0\"",
                "to is an older release than from",
            ),
            (
                "sizeof = 56",
                "sizeof = 32",
                "rb_control_frame_t.sizeof: 32 is less than",
            ),
            (
                "jit_return = 48",
                "jit_return = 56",
                "rb_control_frame_t.jit_return: 56 is not",
            ),
            (
                "jit_return = 48",
                "zjit = true\n#",
                "rb_control_frame_t.zjit needs jit_return",
            ),
            ("ractor.cnt = ", "# ", "missing field `cnt`"),
            (
                "\nractor = 24",
                "\n#",
                "rb_thread_t.ractor, rb_vm_t.ractor and rb_ractor_t go together",
            ),
            (
                "sizeof = 12",
                "sizeof = 0",
                "iseq_insn_info_entry.sizeof is 0",
            ),
            (
                "[class.fields]",
                "[class.iv_tbl]\npointer = 24\noffset = 8\n[class.fields]",
                "more than one of fields, iv_tbl and shapes",
            ),
        ] {
            let mut bad = good.replacen(from, to, 1);
            if to.starts_with("zjit") {
                bad = bad.replacen("zjit = false", "#", 1);
            }
            let message = read_text(bad.as_bytes()).unwrap_err();
            assert!(message.starts_with("FILE"), "{message}");
            assert!(message.contains(error), "{message}\nshould have: {error}");
        }
        let missing = good.replacen("\nvm = 32  # not in the debug information", "", 1);
        let message = read_text(missing.as_bytes()).unwrap_err();
        assert!(message.contains("missing field `vm`"), "{message}");
    }

    #[test]
    fn files_that_are_no_layouts_are_refused() {
        for (bytes, error) in [
            (&b"\xff\xfe"[..], "FILE: not UTF-8 text"),
            (b"", "missing field"),
            (b"\x7fELF\0\0", "FILE:1: "),
            (&[b'#'; 65 << 10][..], "FILE: longer than 65536 bytes"),
            (&[b'['; 60_000][..], "FILE:1: "),
        ] {
            let message = read_text(bytes).unwrap_err();
            assert!(message.contains(error), "{message}\nshould have: {error}");
            assert!(message.len() < 1000, "{message}");
        }
        let message = read(Path::new("/nowhere/layout.toml"))
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "reading /nowhere/layout.toml: No such file or directory (os error 2)"
        );
    }
}
