//! Looks at one live process: which Ruby it runs, and where its roots are.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use object::read::ReadRef;

use rbprof_common::Fault;
use rbprof_common::layout::CollectorLayout;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Lookup;
use rbprof_common::layout::Version;
use rbprof_common::layout::lookup;
use rbprof_common::process::Collector;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::Range;
use rbprof_common::process::state;

use crate::memory::Identity;
use crate::memory::OpenError;
use crate::memory::PinError;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::memory::TargetMemory;

use super::AttachError;
use super::ThreadPointer;
use super::elf::Elf;
use super::elf::ElfError;
use super::global_symbols;
use super::loader;
use super::mappings::Mapping;
use super::proc;
use super::recover;
use super::roots;
use super::roots::Loaded;
use super::roots::RootError;
use super::roots::Symbols;
use super::ruby;
use super::ruby::Located;
use super::ruby::NotFound;
use super::ruby::RubyImage;
use super::tls::CLibrary;
use super::validate;
use super::validate::Evidence;

/// A live process whose Ruby was found and whose roots were validated.
#[derive(Debug)]
pub struct Target {
    /// Which process.
    pub identity: Identity,
    /// A hold on it, for reading its memory later.
    pub process: Arc<PinnedProcess>,
    /// Its command line.
    pub command: String,
    /// Its Ruby.
    pub ruby: RubyFacts,
    /// What the kernel half must know.
    pub entry: ProcessEntry,
    /// Address of `ruby_global_symbols`; `None`: names of C methods are unknown,
    /// perhaps only yet ([`Target::find_global_symbols`]).
    pub global_symbols: Option<u64>,
    /// How each fact was found.
    pub provenance: Vec<Provenance>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Target {
    /// Looks for the symbol table again, in case Ruby had not set it up yet when
    /// it was attached to. The address stays the same from then on.
    #[must_use]
    pub fn find_global_symbols<M: TargetMemory>(&self, memory: &M) -> Option<u64> {
        self.global_symbols
            .or_else(|| global_symbols::scan(&self.ruby.data, self.ruby.version, memory))
    }
}

/// The Ruby of a process.
#[derive(Clone, Debug)]
pub struct RubyFacts {
    /// Its release.
    pub version: Version,
    /// What `ruby_version` holds.
    pub version_text: String,
    /// Where it keeps what rbprof reads.
    pub layout: &'static Layout,
    /// The layout is that of the nearest known release: this one is new.
    pub layout_assumed: bool,
    /// The file that defines it, in the process's mount namespace.
    pub path: String,
    /// The file's build id.
    pub build_id: Option<Vec<u8>>,
    /// What is added to an address in the file to get one in the process.
    pub bias: u64,
    /// Its writable data in the process.
    pub data: Vec<Range>,
    /// The file has no full symbol table.
    pub stripped: bool,
    /// The file has been deleted or replaced since it was loaded.
    pub deleted: bool,
}

/// How one fact was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The fact.
    pub what: &'static str,
    /// How it was found.
    pub how: String,
}

/// How often roots are tried: the process runs on meanwhile, so a fiber switch
/// or the end of a thread may spoil one attempt.
const ATTEMPTS: u32 = 3;
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(2);
/// A process younger than this, in seconds, may still be starting its VM.
const STARTING: f64 = 5.0;

/// Finds the Ruby of the process `pid` and its roots.
///
/// `threads` are the thread pointers of its threads; those that run no Ruby do
/// no harm, but at least one must be a Ruby thread's, or nothing can be
/// validated. The process is neither stopped nor changed.
///
/// # Errors
/// [`AttachError`]; [`AttachError::NotReady`] is worth another try soon.
pub fn attach(pid: u32, threads: &[ThreadPointer]) -> Result<Target, AttachError> {
    Attacher::default().attach(pid, threads)
}

/// What one run of rbprof attaches with: its settings, and later what it has
/// learnt of the files it has seen.
#[derive(Debug, Default)]
pub struct Attacher {
    /// The layout of every Ruby, instead of the table's.
    pub layout: Option<&'static Layout>,
}

impl Attacher {
    /// Looks at process `pid`, as [`attach`] does.
    ///
    /// # Errors
    /// [`AttachError`]; [`AttachError::NotReady`] is worth another try soon.
    pub fn attach(&mut self, pid: u32, threads: &[ThreadPointer]) -> Result<Target, AttachError> {
        let process = PinnedProcess::open(pid).map_err(|error| pin_error(pid, error))?;
        let process = Arc::new(process);
        match look(self, &process, threads) {
            // Whatever went wrong, the end of the process explains it.
            Err(_) if !process.is_alive() => Err(AttachError::Gone { pid }),
            result => result,
        }
    }
}

fn pin_error(pid: u32, error: PinError) -> AttachError {
    match error {
        PinError::Gone => {
            let here = proc::known_elsewhere_as(pid);
            if here.is_empty() {
                AttachError::Gone { pid }
            } else {
                AttachError::OtherPidNamespace { pid, here }
            }
        }
        PinError::Thread { process } => AttachError::Thread { tid: pid, process },
        PinError::Io { what, source } => AttachError::Io { pid, what, source },
    }
}

fn look(
    attacher: &mut Attacher,
    process: &Arc<PinnedProcess>,
    threads: &[ThreadPointer],
) -> Result<Target, AttachError> {
    let pid = process.identity().pid;
    let not_ruby = |looked_at| AttachError::NotRuby {
        pid,
        command: proc::command(process),
        looked_at,
    };
    if proc::is_kernel_thread(process) {
        return Err(not_ruby("it is a thread of the kernel".to_owned()));
    }
    let memory = ProcessMemory::open(Arc::clone(process)).map_err(|error| match error {
        OpenError::Gone => AttachError::Gone { pid },
        OpenError::Permission(error) => trace_permission(pid, "reading its memory", &error),
        OpenError::Io(source) => AttachError::Io {
            pid,
            what: "reading its memory".to_owned(),
            source,
        },
    })?;
    let mappings = proc::mappings(process).map_err(|error| maps_error(pid, error))?;
    let image = ruby::find(process, &memory, &mappings).map_err(|error| match error {
        NotFound::Nowhere { .. } if loader::is_loading(process, &memory, &mappings) => {
            AttachError::NotReady {
                ruby: false,
                pid,
                why: "its libraries are still being loaded".to_owned(),
            }
        }
        NotFound::Nowhere { files } => {
            let program = proc::executable(process).map_or_else(String::new, |path| {
                format!(" ({} among them)", path.display())
            });
            not_ruby(format!(
                "none of the {files} ELF files it has mapped{program} defines ruby_version"
            ))
        }
        NotFound::Unopened { path, error } => AttachError::Permission {
            pid,
            what: format!("opening {path}, which it has mapped: {error}"),
            capability: "CAP_CHECKPOINT_RESTORE (before Linux 5.9: CAP_SYS_ADMIN)",
        },
        NotFound::Unreadable { path } => AttachError::Unsupported {
            pid,
            ruby: path,
            missing: "its ruby_version is not text".to_owned(),
            found: "the symbol was found".to_owned(),
        },
    })?;
    Attach {
        attacher,
        process,
        memory: &memory,
        mappings: &mappings,
        ruby: &image,
        threads,
    }
    .target()
}

fn maps_error(pid: u32, error: io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            trace_permission(pid, "reading its list of mappings", &error)
        }
        Some(libc::ESRCH | libc::ENOENT) => AttachError::Gone { pid },
        _ => AttachError::Io {
            pid,
            what: "reading its list of mappings".to_owned(),
            source: error,
        },
    }
}

fn trace_permission(pid: u32, what: &str, error: &io::Error) -> AttachError {
    AttachError::Permission {
        pid,
        what: format!("{what}: {error}"),
        capability: "CAP_SYS_PTRACE",
    }
}

/// A Ruby that was found, on the way to being a target.
struct Attach<'a> {
    attacher: &'a mut Attacher,
    process: &'a Arc<PinnedProcess>,
    memory: &'a ProcessMemory,
    mappings: &'a [Mapping],
    ruby: &'a RubyImage,
    threads: &'a [ThreadPointer],
}

impl Attach<'_> {
    fn pid(&self) -> u32 {
        self.process.identity().pid
    }

    fn unsupported(&self, missing: String, found: String) -> AttachError {
        AttachError::Unsupported {
            pid: self.pid(),
            ruby: format!("Ruby {} ({})", self.ruby.version_text, self.ruby.image.path),
            missing,
            found,
        }
    }

    fn not_ready(&self, why: String) -> AttachError {
        AttachError::NotReady {
            ruby: true,
            pid: self.pid(),
            why,
        }
    }

    fn malformed(&self, error: ElfError) -> AttachError {
        self.unsupported("its file cannot be read".to_owned(), error.to_string())
    }

    fn target(&mut self) -> Result<Target, AttachError> {
        let mut provenance = Vec::new();
        let mut warnings = Vec::new();
        let elf = self
            .ruby
            .image
            .elf()
            .map_err(|error| self.malformed(error))?;
        let facts = self.facts(&elf)?;
        let how = |what, how| Provenance { what, how };
        provenance.push(how(
            "ruby_version",
            format!("{} of {}", self.ruby.version_source, facts.path),
        ));
        if facts.layout_assumed {
            warnings.push(format!(
                "Ruby {} is newer than what rbprof was checked with ({}.{}.{}); using that layout, \
                 which holds for the running process",
                facts.version_text,
                facts.layout.to.major,
                facts.layout.to.minor,
                facts.layout.to.patch,
            ));
        }

        let symbols = Symbols::of(&elf);
        let vm = self.vm(&symbols, &facts)?;
        let mut entry = ProcessEntry {
            state: state::READY,
            layout: facts.layout.walk,
            vm: vm.as_ref().map_or(0, |(vm, _)| *vm),
            ..ProcessEntry::default()
        };
        let root = self.validated_root(&mut entry, &symbols, &elf, &facts)?;
        entry.collector = self.collector(facts.layout, entry.vm);
        let vm_how = vm.map_or_else(
            || "from the threads' contexts, which agree".to_owned(),
            |(_, how)| how,
        );
        provenance.push(how("VM", vm_how));
        provenance.push(how("execution context", root));

        let code = [symbols.vm_exec, symbols.vm_exec_cold];
        for (range, located) in entry.vm_exec.iter_mut().zip(code) {
            if let Some(Located { symbol, .. }) = located {
                *range = self::range(self.ruby.image.live(symbol.value), symbol.size);
            }
        }
        if let Some(located) = symbols.vm_exec {
            provenance.push(how("rb_vm_exec", located.to_string()));
        }

        let global_symbols = match symbols.global_symbols {
            Some(located) => Some((
                self.ruby.image.live(located.symbol.value),
                located.to_string(),
            )),
            None => global_symbols::scan(&facts.data, facts.version, self.memory)
                .map(|address| (address, "found by scanning Ruby's data".to_owned())),
        };
        if let Some((_, found)) = &global_symbols {
            provenance.push(how("ruby_global_symbols", found.clone()));
        }
        Ok(Target {
            identity: self.process.identity(),
            process: Arc::clone(self.process),
            command: proc::command(self.process),
            ruby: facts,
            entry,
            global_symbols: global_symbols.map(|(address, _)| address),
            provenance,
            warnings,
        })
    }

    fn facts<'data, R: ReadRef<'data>>(
        &self,
        elf: &Elf<'data, R>,
    ) -> Result<RubyFacts, AttachError> {
        let text = &self.ruby.version_text;
        let version = Version::parse(text).ok_or_else(|| {
            self.unsupported(
                "its version is not of the form 3.4.5".to_owned(),
                format!("ruby_version holds {text:?}"),
            )
        })?;
        let (layout, layout_assumed) = match (self.attacher.layout, lookup(version)) {
            (Some(layout), _) | (None, Lookup::Known(layout)) => (layout, false),
            (None, Lookup::Assumed(layout)) => (layout, true),
            (None, Lookup::TooOld) => {
                return Err(AttachError::TooOld {
                    pid: self.pid(),
                    version,
                });
            }
        };
        let image = &self.ruby.image;
        Ok(RubyFacts {
            version,
            version_text: text.clone(),
            layout,
            layout_assumed,
            path: image.path.clone(),
            build_id: elf.build_id().map(<[u8]>::to_vec),
            bias: image.bias,
            data: elf
                .loads()
                .iter()
                .filter(|load| load.writable)
                .map(|load| range(image.live(load.address), load.memory_size))
                .collect(),
            stripped: elf.is_stripped().unwrap_or(true),
            deleted: image.deleted,
        })
    }

    /// The VM and how it was found; `None` where the threads must tell it.
    fn vm(
        &self,
        symbols: &Symbols,
        facts: &RubyFacts,
    ) -> Result<Option<(u64, String)>, AttachError> {
        if let Some(located) = symbols.current_vm {
            let variable = self.ruby.image.live(located.symbol.value);
            return match TargetMemory::word(self.memory, variable) {
                Ok(0) | Err(Fault) => Err(self.not_ready("it has no VM yet".to_owned())),
                Ok(vm) => Ok(Some((vm, format!("ruby_current_vm_ptr in {located}")))),
            };
        }
        if symbols.current_ec.is_some() || facts.version < roots::FIRST_WITH_TLS {
            return Ok(None);
        }
        match recover::vm(&facts.data, &facts.layout.walk, self.memory) {
            Some(vm) => Ok(Some((vm, "found by scanning Ruby's data".to_owned()))),
            None if self.is_young() => Err(self.not_ready("it has no VM yet".to_owned())),
            None => Err(self.unsupported(
                "the build shows neither ruby_current_ec nor ruby_current_vm_ptr, and no VM was \
                 found in its data"
                    .to_owned(),
                symbols.describe(),
            )),
        }
    }

    /// Whether the process may still be starting its VM.
    fn is_young(&self) -> bool {
        proc::age(self.process).is_none_or(|age| age < STARTING)
    }

    /// Finds the root and tries it on the live threads; fills in the VM.
    fn validated_root<'data, R: ReadRef<'data>>(
        &self,
        entry: &mut ProcessEntry,
        symbols: &Symbols,
        elf: &Elf<'data, R>,
        facts: &RubyFacts,
    ) -> Result<String, AttachError> {
        let headers = elf.program_headers_address();
        let is_program = headers.is_some_and(|headers| {
            proc::program_headers(self.process) == Some(self.ruby.image.live(headers))
        });
        let loaded = Loaded {
            version: facts.version,
            bias: self.ruby.image.bias,
            is_program,
            library: CLibrary::of(self.mappings),
            threads: self.threads,
        };
        let mut attempt = 1;
        loop {
            let result = roots::find(entry, symbols, elf, &loaded, self.memory)
                .map_err(|error| match error {
                    RootError::NotReady(why) => self.not_ready(why),
                    RootError::Missing(what) => self.unsupported(what, symbols.describe()),
                })
                .and_then(|how| {
                    let evidence = validate::check(entry, self.threads, self.memory);
                    self.accept(entry, &evidence, symbols, facts)?;
                    Ok(format!(
                        "{how}; valid in {} of {} threads",
                        evidence.validated.len(),
                        self.threads.len()
                    ))
                });
            if result.is_ok() || attempt == ATTEMPTS {
                return result;
            }
            attempt += 1;
            std::thread::sleep(PAUSE);
        }
    }

    /// Whether the evidence suffices; takes the VM from it where no symbol gave
    /// one.
    fn accept(
        &self,
        entry: &mut ProcessEntry,
        evidence: &Evidence,
        symbols: &Symbols,
        facts: &RubyFacts,
    ) -> Result<(), AttachError> {
        if evidence.validated.is_empty() {
            if self.threads.iter().all(|thread| thread.value == 0) {
                return Err(self.not_ready("no thread pointer of it is known".to_owned()));
            }
            if evidence.invalid == 0 || self.is_young() {
                return Err(self.not_ready(format!(
                    "none of {} threads has an execution context",
                    self.threads.len()
                )));
            }
            return Err(self.unsupported(
                format!(
                    "no execution context of its {} threads holds with the layout of {}.{}",
                    self.threads.len(),
                    facts.layout.from.major,
                    facts.layout.from.minor,
                ),
                symbols.describe(),
            ));
        }
        if entry.vm != 0 {
            return Ok(());
        }
        let Some(vm) = evidence.vm() else {
            return Err(self.unsupported(
                "its threads belong to different VMs".to_owned(),
                symbols.describe(),
            ));
        };
        // Not demanded of releases that may keep it elsewhere.
        if !facts.layout_assumed
            && facts.version >= roots::FIRST_WITH_TLS
            && validate::vm_knows_its_main_thread(vm, entry, self.memory) != Ok(true)
        {
            return Err(self.not_ready("its VM has no main thread yet".to_owned()));
        }
        entry.vm = vm;
        Ok(())
    }

    /// Where this Ruby's garbage collector counts its runs, if the layout knows
    /// and what is there can be a count.
    fn collector(&self, layout: &Layout, vm: u64) -> Collector {
        let Some(CollectorLayout {
            vm_objspace,
            flags,
            count,
        }) = layout.collector
        else {
            return Collector::default();
        };
        let Ok(objspace) = TargetMemory::word(self.memory, vm.wrapping_add(vm_objspace)) else {
            return Collector::default();
        };
        let found = Collector {
            count: objspace.wrapping_add(count),
            flags: objspace.wrapping_add(flags),
        };
        match found.epoch(self.memory) {
            0 => Collector::default(),
            _ => found,
        }
    }
}

fn range(start: u64, length: u64) -> Range {
    Range {
        start,
        end: start.saturating_add(length),
    }
}
