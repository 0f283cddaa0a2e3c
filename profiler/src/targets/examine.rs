//! From a Ruby that was found in a process to a target: its symbols, its code,
//! its roots, each tried on the live process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object::read::ReadRef;

use rbprof_common::Fault;
use rbprof_common::collector::collects;
use rbprof_common::layout::CollectorOffsets;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Lookup;
use rbprof_common::layout::Machine;
use rbprof_common::layout::ObjspaceLayout;
use rbprof_common::layout::RactorOffsets;
use rbprof_common::layout::Version;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::lookup;
use rbprof_common::process::Collector;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::Range;
use rbprof_common::process::root;
use rbprof_common::process::state;
use rbprof_common::roots::context_of;

use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::memory::TargetMemory;

use super::AttachError;
use super::ThreadPointer;
use super::attach::Attacher;
use super::code::Analysis;
use super::debug_file::DebugFile;
use super::elf::Elf;
use super::elf::ElfError;
use super::elf::Symbol;
use super::mappings::Mapping;
use super::proc;
use super::recover;
use super::recover::NotRecovered;
use super::roots;
use super::roots::Loaded;
use super::roots::RootError;
use super::roots::Symbols;
use super::ruby;
use super::ruby::RubyImage;
use super::ruby::Source;
use super::ruby::VersionSource;
use super::target::Provenance;
use super::target::RubyFacts;
use super::target::Target;
use super::target::VmExecCandidate;
use super::tls::CLibrary;
use super::validate;
use super::validate::Evidence;
use super::zjit;

/// How often roots are tried: the process runs on meanwhile, so a fiber switch
/// or the end of a thread may spoil one attempt.
const ATTEMPTS: u32 = 3;
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(2);
/// A process younger than this, in seconds, may still be starting its VM.
const STARTING: f64 = 5.0;

/// What there is to say of a Ruby.
#[derive(Debug, Default)]
struct Notes {
    provenance: Vec<Provenance>,
    warnings: Vec<String>,
}

impl Notes {
    fn new(facts: &RubyFacts, version: VersionSource, given: Option<&Layout>) -> Self {
        let mut notes = Self::default();
        notes.found("version", format!("{version} of {}", facts.path));
        if let Some(debug_file) = &facts.debug_file {
            notes.found("debug file", debug_file.clone());
        }
        if facts.layout_assumed && given.is_none() {
            let to = facts.layout.to;
            notes.warnings.push(format!(
                "Ruby {} is newer than what rbprof was checked with ({to}); using that layout, \
                 which holds for the running process",
                facts.version_text,
            ));
        }
        notes
    }

    fn found(&mut self, what: &'static str, how: String) {
        self.provenance.push(Provenance { what, how });
    }

    fn missing(&mut self, what: &'static str, why: &str) {
        self.found(what, format!("not found: {why}"));
    }
}

/// A Ruby that was found, on the way to being a target.
pub(super) struct Examination<'a> {
    pub(super) attacher: &'a mut Attacher,
    pub(super) process: &'a Arc<PinnedProcess>,
    pub(super) memory: &'a ProcessMemory,
    pub(super) mappings: &'a [Mapping],
    pub(super) ruby: &'a RubyImage,
    pub(super) threads: &'a [ThreadPointer],
}

impl Examination<'_> {
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

    /// Finds everything, or why it cannot be profiled.
    ///
    /// # Errors
    /// [`AttachError`].
    pub(super) fn target(&mut self) -> Result<Target, AttachError> {
        let elf = self
            .ruby
            .image
            .elf()
            .map_err(|error| self.malformed(error))?;
        let mut facts = self.facts(&elf)?;
        let mut notes = Notes::new(&facts, self.ruby.version_source, self.attacher.layout);
        let code = self.code(&elf, &facts, &mut notes);
        let references = code.as_ref().map(|code| &*code.symbol_references);
        facts.symbol_references = self.places(references, &facts);

        let vm = self.vm(&facts, code.as_deref())?;
        let mut entry = ProcessEntry {
            state: state::READY,
            layout: facts.layout.walk,
            vm: vm.as_ref().map_or(0, |(vm, _)| *vm),
            ..ProcessEntry::default()
        };
        let root = self.validated_root(&mut entry, &elf, &facts, code.as_deref())?;
        entry.collector = self.collector(facts.layout, &entry);
        if facts.layout.zjit {
            entry.layout = self.walk_layout(&elf, &entry, facts.layout, &mut notes);
        }
        let vm_how = vm.map_or_else(
            || "from the threads' contexts, which agree".to_owned(),
            |(_, how)| how,
        );
        notes.found("VM", vm_how);
        notes.found("execution context", root);

        let vm_exec_candidate = self.vm_exec(&mut entry, &facts, code.as_deref(), &mut notes);
        let global_symbols = self.global_symbols(&facts, &mut notes);
        Ok(Target {
            identity: self.process.identity(),
            process: Arc::clone(self.process),
            command: proc::command(self.process),
            ruby: facts,
            entry,
            vm_exec_candidate,
            global_symbols,
            provenance: notes.provenance,
            warnings: notes.warnings,
        })
    }

    /// How to walk frames of a Ruby that reads them in another way while ZJIT is
    /// on.
    fn walk_layout<'data, R: ReadRef<'data>>(
        &self,
        elf: &Elf<'data, R>,
        entry: &ProcessEntry,
        layout: &Layout,
        notes: &mut Notes,
    ) -> WalkLayout {
        let [variable] = ruby::locate(elf, [zjit::ENTRY]);
        let variable = variable.map(|located| self.ruby.image.live(located.symbol.value));
        let contexts: Vec<_> = self
            .threads
            .iter()
            .filter_map(|thread| context_of(entry, thread.value, self.memory).ok())
            .collect();
        let found = zjit::is_on(variable, &contexts, &layout.walk, self.memory);
        if let Some((on, how)) = found {
            let state = if on { "on" } else { "off" };
            notes.found("ZJIT", format!("{state}, by {how}"));
        }
        layout.walk_with_zjit(found.is_some_and(|(on, _)| on))
    }

    /// What the code of the file gives away, where symbols do not tell all.
    fn code<'data, R: ReadRef<'data>>(
        &mut self,
        elf: &Elf<'data, R>,
        facts: &RubyFacts,
        notes: &mut Notes,
    ) -> Option<Arc<Analysis>> {
        let symbols = &facts.symbols;
        // The part of `rb_vm_exec` that the compiler moved away is never
        // exported.
        let exported = symbols
            .vm_exec
            .is_some_and(|located| located.source == Source::DynSym);
        if symbols.suffice(facts.version) && !exported {
            return None;
        }
        let vm_exec = symbols.vm_exec.map(|located| located.symbol.value);
        match self
            .attacher
            .analyses
            .of(elf, self.ruby.image.version, vm_exec)
        {
            Ok(analysis) => Some(analysis),
            Err(error) => {
                notes.missing("code", &format!("the file cannot be analysed: {error}"));
                None
            }
        }
    }

    /// Addresses in the file as addresses in the process.
    fn live(&self, addresses: Option<&[u64]>) -> Vec<u64> {
        let image = &self.ruby.image;
        let addresses = addresses.unwrap_or_default().iter();
        addresses.map(|&address| image.live(address)).collect()
    }

    /// Places in the process's data that code refers to, also by way of the
    /// global offset table.
    fn places(&self, references: Option<&[u64]>, facts: &RubyFacts) -> Vec<u64> {
        let mut places = self.live(references);
        let behind: Vec<u64> = places
            .iter()
            .filter_map(|&place| TargetMemory::word(self.memory, place).ok())
            .filter(|&word| facts.data.iter().any(|data| data.contains(word)))
            .collect();
        places.extend(behind);
        places
    }

    /// Fills in where `rb_vm_exec` is. Returns it instead where only the code
    /// tells it and the process has not called it yet.
    fn vm_exec(
        &self,
        entry: &mut ProcessEntry,
        facts: &RubyFacts,
        code: Option<&Analysis>,
        notes: &mut Notes,
    ) -> Option<VmExecCandidate> {
        let live = |part: Range| Range {
            start: self.ruby.image.live(part.start),
            end: self.ruby.image.live(part.end),
        };
        let by_code = code.map(|code| &code.vm_exec);
        if let Some(located) = facts.symbols.vm_exec {
            let Symbol { value, size, .. } = located.symbol;
            let cold = match (facts.symbols.vm_exec_cold, by_code) {
                (Some(cold), _) => Some(range(cold.symbol.value, cold.symbol.size)),
                (None, Some(Ok(found))) => found.cold,
                (None, _) => None,
            };
            entry.vm_exec = [
                live(range(value, size)),
                cold.map_or(Range::default(), live),
            ];
            notes.found("rb_vm_exec", located.to_string());
            return None;
        }
        match by_code {
            Some(Ok(found)) => {
                let candidate = VmExecCandidate {
                    ranges: [live(found.range), found.cold.map_or(Range::default(), live)],
                    returns: self.live(Some(&found.returns)),
                    how: format!("by the code of the file: {}", found.how),
                };
                if !candidate.is_on_a_stack(self.mappings, self.threads, self.memory) {
                    return Some(candidate);
                }
                entry.vm_exec = candidate.ranges;
                notes.provenance.push(candidate.provenance());
            }
            Some(Err(error)) => notes.missing("rb_vm_exec", &error.to_string()),
            None => notes.missing("rb_vm_exec", "nothing tells where it is"),
        }
        None
    }

    /// Where `ruby_global_symbols` is.
    fn global_symbols(&self, facts: &RubyFacts, notes: &mut Notes) -> Option<u64> {
        if let Some(located) = facts.symbols.global_symbols {
            notes.found("ruby_global_symbols", located.to_string());
            return Some(self.ruby.image.live(located.symbol.value));
        }
        match facts.scan_for_global_symbols(self.memory) {
            Ok(found) => {
                notes.found("ruby_global_symbols", found.how("rb_id2str"));
                Some(found.address)
            }
            // Perhaps only yet; whoever uses the target looks again.
            Err(NotRecovered::Nothing) => None,
            Err(NotRecovered::Ambiguous(count)) => {
                notes.missing(
                    "ruby_global_symbols",
                    &format!("{count} places in Ruby's data look like it"),
                );
                None
            }
        }
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
        let (symbols, debug_file) = self.symbols(elf, version);
        let headers = elf.program_headers_address();
        Ok(RubyFacts {
            version,
            version_text: text.clone(),
            layout,
            layout_assumed,
            path: image.path.clone(),
            build_id: elf.build_id().map(<[u8]>::to_vec),
            bias: image.bias,
            extent: image.extent,
            data: elf
                .loads()
                .iter()
                .filter(|load| load.writable)
                .map(|load| range(image.live(load.address), load.memory_size))
                .collect(),
            stripped: elf.is_stripped().unwrap_or(true),
            deleted: image.deleted,
            is_program: headers.is_some_and(|headers| {
                proc::program_headers(self.process) == Some(image.live(headers))
            }),
            symbols,
            debug_file,
            symbol_references: Vec::new(),
        })
    }

    /// The symbols of the file and, where it lacks some, of its debug file, with
    /// that file's place.
    fn symbols<'data, R: ReadRef<'data>>(
        &self,
        elf: &Elf<'data, R>,
        version: Version,
    ) -> (Symbols, Option<String>) {
        if self.attacher.ignore_symbols {
            return (Symbols::default(), None);
        }
        let symbols = Symbols::of(elf);
        if symbols.suffice(version) {
            return (symbols, None);
        }
        let path = Path::new(&self.ruby.image.path);
        let debug = DebugFile::find(elf, path, self.process);
        match debug.as_ref().and_then(|debug| Some((debug.elf()?, debug))) {
            Some((contents, debug)) => (symbols.completed_by(&contents), Some(debug.place.clone())),
            None => (symbols, None),
        }
    }

    /// The VM and how it was found; `None` where the threads must tell it.
    fn vm(
        &self,
        facts: &RubyFacts,
        code: Option<&Analysis>,
    ) -> Result<Option<(u64, String)>, AttachError> {
        let symbols = &facts.symbols;
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
        let references = self.places(code.map(|code| &*code.vm_references), facts);
        let walk = &facts.layout.walk;
        match recover::vm(&facts.data, &references, walk, self.memory) {
            Ok(vm) => Ok(Some((vm.address, vm.how("ruby_vm_at_exit")))),
            Err(NotRecovered::Nothing) if self.is_young() => {
                Err(self.not_ready("it has no VM yet".to_owned()))
            }
            Err(NotRecovered::Nothing) => Err(self.unsupported(
                "the build shows neither ruby_current_ec nor ruby_current_vm_ptr, and no VM was \
                 found in its data"
                    .to_owned(),
                symbols.describe(),
            )),
            Err(NotRecovered::Ambiguous(count)) => Err(self.unsupported(
                format!(
                    "the build shows neither ruby_current_ec nor ruby_current_vm_ptr, and {count} \
                     structures that its data points to look like the VM"
                ),
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
        elf: &Elf<'data, R>,
        facts: &RubyFacts,
        code: Option<&Analysis>,
    ) -> Result<String, AttachError> {
        let symbols = &facts.symbols;
        let references = code.map(|code| &*code.context_references);
        let places_in_code = self.places(references, facts);
        let loaded = Loaded {
            version: facts.version,
            bias: self.ruby.image.bias,
            is_program: facts.is_program,
            library: CLibrary::of(self.mappings),
            threads: self.threads,
            offset_in_code: code.and_then(|code| code.current_ec),
            places_in_code: &places_in_code,
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
                    self.accept(entry, &evidence, facts)?;
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
        facts: &RubyFacts,
    ) -> Result<(), AttachError> {
        let symbols = &facts.symbols;
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

    /// Where this Ruby's garbage collector keeps what it is doing, if the layout
    /// knows and what is there can be that.
    fn collector(&self, layout: &Layout, entry: &ProcessEntry) -> Collector {
        let Some(CollectorOffsets {
            vm_objspace,
            objspace: ObjspaceLayout { flags, count },
        }) = layout.collector_on(Machine::HOST)
        else {
            return Collector::UNKNOWN;
        };
        if has_another_collector(self.mappings) {
            return Collector::UNKNOWN;
        }
        let vm = entry.vm;
        let Ok(objspace) = TargetMemory::word(self.memory, vm.wrapping_add(vm_objspace)) else {
            return Collector::UNKNOWN;
        };
        let found = Collector {
            count: count.map_or(0, |count| objspace.wrapping_add(count)),
            flags: objspace.wrapping_add(flags),
            ..who_collects(layout, entry)
        };
        let count_is_none = count.is_some() && found.epoch(self.memory) == 0;
        if count_is_none || TargetMemory::word(self.memory, found.flags).is_err() {
            return Collector::UNKNOWN;
        }
        found
    }
}

/// Whether a garbage collector other than Ruby's own is loaded (3.4 on, where
/// `RUBY_GC_LIBRARY` may name one): nothing is known of how it keeps its state.
fn has_another_collector(mappings: &[Mapping]) -> bool {
    mappings.iter().any(|mapping| {
        let name = mapping.path.rsplit(|&byte| byte == b'/').next();
        name.and_then(|name| name.strip_prefix(b"librubygc."))
            .is_some_and(|which| !which.starts_with(b"default."))
    })
}

/// What tells which thread of a process collects.
fn who_collects(layout: &Layout, entry: &ProcessEntry) -> Collector {
    if entry.root == root::GLOBAL {
        return Collector {
            collects: collects::CONTEXT,
            ..Collector::UNKNOWN
        };
    }
    let Some(RactorOffsets {
        thread_ractor,
        vm_ractors,
        running_ec,
        vm_lock_owner,
    }) = layout.ractors_on(Machine::HOST)
    else {
        return Collector::UNKNOWN;
    };
    Collector {
        ractors: entry.vm.wrapping_add(vm_ractors),
        lock_owner: entry.vm.wrapping_add(vm_lock_owner),
        thread_ractor,
        running_ec,
        collects: collects::RACTOR,
        ..Collector::UNKNOWN
    }
}

fn range(start: u64, length: u64) -> Range {
    Range {
        start,
        end: start.saturating_add(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_garbage_collector_that_is_not_ruby_s_own_is_noticed() {
        let mapped = |path: &str| {
            let line = format!("7f0000000000-7f0000001000 r-xp 00000000 08:01 42 {path}\n");
            has_another_collector(&Mapping::parse_all(line.as_bytes()))
        };
        assert!(mapped("/usr/lib/ruby/gc/librubygc.mmtk.so"));
        assert!(!mapped("/usr/lib/ruby/gc/librubygc.default.so"));
        assert!(!mapped("/usr/lib/libruby.so.3.4"));
        assert!(!mapped("/librubygc.mmtk.so/other.so"));
    }
}
