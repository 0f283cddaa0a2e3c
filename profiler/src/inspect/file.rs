//! What a file says of the Ruby in it.

use std::fmt;
use std::path::Path;

use object::read::ReadRef;
use serde::Serialize;

use rbprof_common::layout::Lookup;
use rbprof_common::layout::Version;
use rbprof_common::layout::lookup;

use super::Missing;
use crate::targets::code;
use crate::targets::debug_file::DebugFile;
use crate::targets::elf::Elf;
use crate::targets::elf::ElfError;
use crate::targets::elf::TlsKind;
use crate::targets::elf::file_cache;
use crate::targets::image::open_regular;
use crate::targets::roots::FIRST_WITH_TLS;
use crate::targets::roots::Symbols;
use crate::targets::ruby;
use crate::targets::ruby::Located;
use crate::targets::ruby::Source;
use crate::targets::ruby::VersionSource;
use crate::targets::tls;

/// The thread-local variable that holds the execution context, from 3.0 on.
pub(super) const CURRENT_EC: &str = "ruby_current_ec";
/// The global variable that holds it, up to 2.7.
pub(super) const CURRENT_EC_GLOBAL: &str = "ruby_current_execution_context_ptr";
/// The interpreter's entry.
const VM_EXEC: &str = "rb_vm_exec";
/// What only an interpreter with YJIT has in its text.
const YJIT_OPTION: &[u8] = b"yjit-call-threshold";
/// What only an interpreter with ZJIT has in its text.
const ZJIT_OPTION: &[u8] = b"zjit-call-threshold";

/// What a file says.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// Its path, as it was given or as the process knows it.
    pub path: String,
    /// Its version, as it calls itself.
    pub version: String,
    /// Where that was found.
    pub version_from: String,
    /// Build id, hexadecimal.
    pub build_id: Option<String>,
    /// `x86-64` or `arm64`.
    pub machine: String,
    /// `shared library` or `program`.
    pub kind: &'static str,
    /// It has no full symbol table.
    pub stripped: bool,
    /// Where its separate debug file is.
    pub debug_file: Option<String>,
    /// The four symbols that a profiler looks for.
    pub symbols: Vec<SymbolReport>,
    /// The thread-local storage of Ruby.
    pub tls: Option<TlsReport>,
    /// Which layout is used, and why.
    pub layout: Option<LayoutReport>,
    /// What the code gives away where symbols are missing.
    pub code: CodeReport,
    /// Calls through the procedure linkage table.
    pub plt: PltReport,
    /// JIT compilers that were built in.
    pub jit_compilers: Vec<&'static str>,
}

/// One symbol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SymbolReport {
    /// Its name.
    pub name: &'static str,
    /// `.dynsym`, `.symtab`, `debug file`; none where it is missing.
    pub source: Option<String>,
    /// `default` or `protected`.
    pub visibility: Option<&'static str>,
    /// Its address in the file, or its offset in the thread-local block.
    pub value: Option<u64>,
    /// Its size in bytes.
    pub size: Option<u64>,
    /// It is thread-local.
    pub thread_local: bool,
}

/// Thread-local storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TlsReport {
    /// How code gets at the variables: the access model, and the relocations.
    pub model: String,
    /// Bytes of the block.
    pub size: u64,
    /// Offset of `ruby_current_ec` in the block.
    pub offset: Option<u64>,
    /// What the offset comes from.
    pub offset_from: Option<&'static str>,
}

/// A layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayoutReport {
    /// First and last release that it was checked with.
    pub checked: [String; 2],
    /// The release at hand is not among them.
    pub assumed: bool,
}

/// What the code gives away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CodeReport {
    /// How many functions `.eh_frame` describes.
    pub functions: usize,
    /// Why the code cannot be analysed.
    pub error: Option<String>,
    /// Addresses of `rb_vm_exec`, and how it was found.
    pub vm_exec: Option<VmExecReport>,
}

/// `rb_vm_exec`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VmExecReport {
    /// First address in the file, and the first behind it.
    pub range: [u64; 2],
    /// The same of the part that the compiler moved away.
    pub cold: Option<[u64; 2]>,
    /// How it was found.
    pub how: String,
}

/// The procedure linkage table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PltReport {
    /// How many functions are called through it (`JUMP_SLOT` relocations).
    pub jump_slots: usize,
    /// `rb_vm_exec` is one of them: the interpreter pays for its export.
    pub vm_exec: bool,
}

/// Why a file cannot be reported on.
#[derive(Debug)]
pub enum FileError {
    /// It cannot be opened.
    Open {
        /// Its path.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is no usable ELF file.
    Elf {
        /// Its path.
        path: String,
        /// What is wrong.
        error: ElfError,
    },
    /// It has no Ruby in it.
    NotRuby {
        /// Its path.
        path: String,
        /// A library that it needs and that may have one.
        library: Option<String>,
    },
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { path, source } => write!(f, "{path}: {source}"),
            Self::Elf { path, error } => write!(f, "{path}: {error}"),
            Self::NotRuby {
                path,
                library: Some(library),
            } => write!(
                f,
                "{path} has no Ruby in it (it defines no ruby_version); it needs {library}: \
                 inspect that file"
            ),
            Self::NotRuby {
                path,
                library: None,
            } => write!(
                f,
                "{path} has no Ruby in it: it defines no ruby_version in .dynsym or .symtab, and no \
                 text in it is what ruby -v prints"
            ),
        }
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open { source, .. } => Some(source),
            Self::Elf { error, .. } => Some(error),
            Self::NotRuby { .. } => None,
        }
    }
}

impl FileReport {
    /// Reads a file of the host.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn of_path(path: &Path) -> Result<Self, FileError> {
        let shown = path.display().to_string();
        let open = |source| FileError::Open {
            path: shown.clone(),
            source,
        };
        let file = file_cache(open_regular(path).map_err(open)?);
        let elf = Elf::parse(&file).map_err(|error| FileError::Elf {
            path: shown.clone(),
            error,
        })?;
        let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let debug = DebugFile::find_on_host(&elf, &absolute);
        Self::of(&elf, &shown, debug.as_ref())
    }

    /// Reports on an image, which has the debug file `debug`.
    ///
    /// # Errors
    /// [`FileError::NotRuby`], [`FileError::Elf`].
    pub fn of<'data, R: ReadRef<'data>>(
        elf: &Elf<'data, R>,
        path: &str,
        debug: Option<&DebugFile>,
    ) -> Result<Self, FileError> {
        let (version_source, version) = version_of(elf).ok_or_else(|| FileError::NotRuby {
            path: path.to_owned(),
            library: elf
                .needed()
                .into_iter()
                .find(|name| ruby::names_ruby(name))
                .map(|name| String::from_utf8_lossy(name).into_owned()),
        })?;
        let mut symbols = Symbols::of(elf);
        if let Some(debug) = debug.and_then(DebugFile::elf) {
            symbols = symbols.completed_by(&debug);
        }
        let parsed = Version::parse(&version);
        let code = code::analyse(elf, symbols.vm_exec.map(|located| located.symbol.value));
        let uses_tls = parsed.is_none_or(|version| version >= FIRST_WITH_TLS);
        Ok(Self {
            path: path.to_owned(),
            build_id: elf.build_id().map(hex),
            machine: elf.machine().to_string(),
            kind: if elf.interpreter().is_some() || elf.has_fixed_address() {
                "program"
            } else {
                "shared library"
            },
            stripped: elf.is_stripped().unwrap_or(true),
            debug_file: debug.map(|debug| debug.place.clone()),
            version_from: version_source.to_string(),
            symbols: symbol_reports(&symbols, version_source, uses_tls),
            tls: uses_tls
                .then(|| tls_report(elf, &symbols, code.as_ref().ok()))
                .flatten(),
            layout: parsed.and_then(layout_report),
            code: code_report(code),
            plt: PltReport {
                jump_slots: elf.jump_slot_count().unwrap_or(0),
                vm_exec: elf.calls_through_plt(VM_EXEC.as_bytes()).unwrap_or(false),
            },
            jit_compilers: jit_compilers(elf),
            version,
        })
    }

    /// What a profile would lack, as far as the file tells.
    #[must_use]
    pub fn missing(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        let found = |name| {
            let mut symbols = self.symbols.iter();
            symbols.any(|symbol| symbol.name == name && symbol.source.is_some())
        };
        match &self.layout {
            None => missing.push(Missing {
                what: format!(
                    "everything: Ruby {} is older than any that rbprof knows",
                    self.version
                ),
                remedy: "use a newer Ruby".to_owned(),
            }),
            Some(layout) if layout.assumed => missing.push(Missing {
                what: format!(
                    "certainty: Ruby {} is newer than what rbprof was checked with ({}); names \
                     and lines may be wrong",
                    self.version, layout.checked[1]
                ),
                remedy: "use a newer rbprof, or a layout made from the debug information of this \
                         very Ruby: rbprof layout --from FILE"
                    .to_owned(),
            }),
            Some(_) => {}
        }
        if self.machine != "x86-64" {
            missing.push(Missing {
                what: format!(
                    "everything, for now: rbprof profiles on x86-64 only, and this is for {}",
                    self.machine
                ),
                remedy: "use a later rbprof".to_owned(),
            });
        }
        if !found(VM_EXEC) && self.code.vm_exec.is_none() {
            missing.push(Missing {
                what: "native frames between Ruby frames: rb_vm_exec is neither named nor found \
                       in the code"
                    .to_owned(),
                remedy: "install the debug symbols of this build, or build with rb_vm_exec \
                         exported"
                    .to_owned(),
            });
        }
        missing
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The version of the Ruby in a file, and where that was found.
fn version_of<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Option<(VersionSource, String)> {
    let [located] = ruby::locate(elf, [ruby::RUBY_VERSION]);
    let Some(located) = located.filter(|located| ruby::is_constant(elf, located.symbol)) else {
        return ruby::version_in_text(elf).map(|version| (VersionSource::Text, version));
    };
    let size = located.symbol.size.clamp(1, ruby::MAX_VERSION);
    let bytes = elf.bytes(located.symbol.value, size).ok()?;
    let text = bytes.split(|&byte| byte == 0).next()?;
    let version = std::str::from_utf8(text).ok()?.to_owned();
    Some((VersionSource::Symbol(located), version))
}

fn symbol_reports(symbols: &Symbols, version: VersionSource, uses_tls: bool) -> Vec<SymbolReport> {
    let version = match version {
        VersionSource::Symbol(located) => Some(located),
        VersionSource::Text => None,
    };
    let context = if uses_tls {
        (CURRENT_EC, symbols.current_ec)
    } else {
        (CURRENT_EC_GLOBAL, symbols.current_ec_global)
    };
    [
        ("ruby_version", version),
        context,
        (VM_EXEC, symbols.vm_exec),
        ("ruby_global_symbols", symbols.global_symbols),
    ]
    .map(|(name, located)| SymbolReport::new(name, located))
    .to_vec()
}

impl SymbolReport {
    fn new(name: &'static str, located: Option<Located>) -> Self {
        let symbol = located.map(|located| located.symbol);
        Self {
            name,
            source: located.map(|located| located.source.to_string()),
            visibility: located
                .filter(|located| located.source == Source::DynSym)
                .map(|located| {
                    if located.symbol.protected {
                        "protected"
                    } else {
                        "default"
                    }
                }),
            value: symbol.map(|symbol| symbol.value),
            size: symbol.map(|symbol| symbol.size),
            thread_local: symbol.is_some_and(|symbol| symbol.tls),
        }
    }

    /// It is in `.dynsym`, which `strip` leaves.
    #[must_use]
    pub fn is_exported(&self) -> bool {
        self.visibility.is_some()
    }
}

fn layout_report(version: Version) -> Option<LayoutReport> {
    let (layout, assumed) = match lookup(version) {
        Lookup::Known(layout) => (layout, false),
        Lookup::Assumed(layout) => (layout, true),
        Lookup::TooOld => return None,
    };
    Some(LayoutReport {
        checked: [layout.from, layout.to].map(|version| version.to_string()),
        assumed,
    })
}

fn code_report(code: Result<code::Analysis, ElfError>) -> CodeReport {
    match code {
        Err(error) => CodeReport {
            functions: 0,
            error: Some(error.to_string()),
            vm_exec: None,
        },
        Ok(code) => CodeReport {
            functions: code.functions,
            error: code.vm_exec.as_ref().err().map(ToString::to_string),
            vm_exec: code.vm_exec.ok().map(|found| VmExecReport {
                range: [found.range.start, found.range.end],
                cold: found.cold.map(|cold| [cold.start, cold.end]),
                how: found.how,
            }),
        },
    }
}

fn tls_report<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    symbols: &Symbols,
    code: Option<&code::Analysis>,
) -> Option<TlsReport> {
    let segment = elf.tls()?;
    let relocations = tls::relocations(elf);
    let count = |kind| relocations.iter().filter(|it| it.kind == kind).count();
    let named = relocations
        .iter()
        .any(|it| it.symbol.as_deref() == Some(CURRENT_EC.as_bytes()));
    let by_kind = [
        (TlsKind::Module, "general dynamic, DTPMOD64"),
        (TlsKind::Descriptor, "descriptors, TLSDESC"),
        (TlsKind::ThreadOffset, "initial exec, TPOFF64"),
    ];
    let mut models: Vec<String> = by_kind
        .into_iter()
        .filter(|(kind, _)| count(*kind) > 0)
        .map(|(kind, name)| format!("{name} x{}", count(kind)))
        .collect();
    if models.is_empty() {
        models.push("local exec: fixed by the linker".to_owned());
    } else if named {
        models.push(format!("one of them names {CURRENT_EC}"));
    }
    let by_symbol = symbols.current_ec.filter(|located| located.symbol.tls);
    let by_code = code.and_then(|code| code.current_ec);
    Some(TlsReport {
        model: models.join("; "),
        size: segment.memory_size,
        offset: by_symbol.map(|located| located.symbol.value).or(by_code),
        offset_from: match (by_symbol, by_code) {
            (Some(_), _) => Some("its symbol"),
            (None, Some(_)) => Some("the code of rb_thread_current"),
            (None, None) => None,
        },
    })
}

fn jit_compilers<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Vec<&'static str> {
    let has = |text: &[u8]| {
        elf.loads()
            .iter()
            .filter(|load| !load.writable)
            .filter_map(|load| elf.bytes(load.address, load.file_size).ok())
            .any(|bytes| memchr::memmem::find(bytes, text).is_some())
    };
    [("YJIT", YJIT_OPTION), ("ZJIT", ZJIT_OPTION)]
        .into_iter()
        .filter(|(_, option)| has(option))
        .map(|(name, _)| name)
        .collect()
}
