//! Where the execution context of a thread is, in this build of Ruby.

use object::read::ReadRef;

use rbprof_common::Memory;
use rbprof_common::layout::Version;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::root;
use rbprof_common::roots::read_context;

use crate::memory::TargetMemory;

use super::ThreadPointer;
use super::elf::Elf;
use super::elf::Machine;
use super::ruby::Located;
use super::ruby::locate;
use super::ruby::locate_in_debug_file;
use super::tls;
use super::tls::Access;
use super::tls::CLibrary;
use super::validate;

/// The thread-local pointer to the execution context, from Ruby 3.0 on.
const CURRENT_EC: &[u8] = b"ruby_current_ec";
/// The first release with it.
pub(crate) const FIRST_WITH_TLS: Version = Version::new(3, 0, 0);
/// Farthest from `pthread_self()` that a thread pointer is believed to be: the
/// size of the C library's thread descriptor, which lies before the thread
/// pointer on arm64.
const MAX_PTHREAD_BIAS: u64 = 1 << 14;

/// Most bytes of a thread-local block tried; libruby's has 16 to 176.
const MAX_TLS_BLOCK: u64 = 4096;

/// The symbols of a Ruby that matter for its roots.
#[derive(Clone, Copy, Debug, Default)]
pub struct Symbols {
    /// `ruby_current_ec` (3.0 and later, thread-local).
    pub current_ec: Option<Located>,
    /// `ruby_current_execution_context_ptr` (up to 2.7).
    pub current_ec_global: Option<Located>,
    /// `ruby_current_vm_ptr`.
    pub current_vm: Option<Located>,
    /// `rb_vm_exec`.
    pub vm_exec: Option<Located>,
    /// The part of `rb_vm_exec` that the compiler moved away; never exported.
    pub vm_exec_cold: Option<Located>,
    /// `ruby_global_symbols`.
    pub global_symbols: Option<Located>,
}

/// Their names, in the order of the fields.
const NAMES: [&[u8]; 6] = [
    CURRENT_EC,
    b"ruby_current_execution_context_ptr",
    b"ruby_current_vm_ptr",
    b"rb_vm_exec",
    b"rb_vm_exec.cold",
    b"ruby_global_symbols",
];

impl Symbols {
    /// Looks them up in an image.
    pub fn of<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Self {
        locate(elf, NAMES).into()
    }

    /// Looks those that were not found up in the image's debug file.
    #[must_use]
    pub fn completed_by<'data, R: ReadRef<'data>>(self, debug: &Elf<'data, R>) -> Self {
        let mut found = [
            self.current_ec,
            self.current_ec_global,
            self.current_vm,
            self.vm_exec,
            self.vm_exec_cold,
            self.global_symbols,
        ];
        locate_in_debug_file(&mut found, NAMES, debug);
        found.into()
    }

    /// Whether everything that a profile of this release needs is there.
    #[must_use]
    pub fn suffice(&self, version: Version) -> bool {
        let context = if version < FIRST_WITH_TLS {
            self.current_ec_global
        } else {
            self.current_ec
        };
        context.is_some() && self.vm_exec.is_some() && self.global_symbols.is_some()
    }

    /// What was found, for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        let named = [
            ("ruby_current_ec", self.current_ec),
            ("ruby_current_execution_context_ptr", self.current_ec_global),
            ("ruby_current_vm_ptr", self.current_vm),
            ("rb_vm_exec", self.vm_exec),
            ("ruby_global_symbols", self.global_symbols),
        ];
        let found: Vec<_> = named
            .iter()
            .filter_map(|(name, located)| located.map(|located| format!("{name} in {located}")))
            .collect();
        if found.is_empty() {
            "of what is needed, its symbol tables hold ruby_version only".to_owned()
        } else {
            format!("found: ruby_version, {}", found.join(", "))
        }
    }
}

impl From<[Option<Located>; 6]> for Symbols {
    fn from(found: [Option<Located>; 6]) -> Self {
        let [
            current_ec,
            current_ec_global,
            current_vm,
            vm_exec,
            vm_exec_cold,
            global_symbols,
        ] = found;
        Self {
            current_ec,
            current_ec_global,
            current_vm,
            vm_exec,
            vm_exec_cold,
            global_symbols,
        }
    }
}

/// Why there are no roots.
#[derive(Debug, PartialEq, Eq)]
pub enum RootError {
    /// Not yet.
    NotReady(String),
    /// This build does not show them; says what is missing.
    Missing(String),
}

/// Where Ruby was loaded, and by what.
#[derive(Clone, Copy, Debug)]
pub struct Loaded<'a> {
    /// Its release.
    pub version: Version,
    /// What is added to an address in the file.
    pub bias: u64,
    /// It is the main program itself.
    pub is_program: bool,
    /// The process's C library.
    pub library: CLibrary,
    /// The process's threads.
    pub threads: &'a [ThreadPointer],
    /// The offset of the variable in Ruby's thread-local block as the code of
    /// an exported function has it, where that was asked.
    pub offset_in_code: Option<u64>,
    /// Places in the process's data that the code of the same function refers
    /// to.
    pub places_in_code: &'a [u64],
}

/// Fills in the root of `entry`, whose layout is set already, and its VM if it
/// is known. Returns how the root was found.
///
/// # Errors
/// [`RootError`].
pub fn find<'data, R, M>(
    entry: &mut ProcessEntry,
    symbols: &Symbols,
    elf: &Elf<'data, R>,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<String, RootError>
where
    R: ReadRef<'data>,
    M: TargetMemory + Memory,
{
    if loaded.version < FIRST_WITH_TLS {
        return find_global(entry, symbols, loaded, memory);
    }
    if let Some(located) = symbols.current_ec.filter(|located| located.symbol.tls) {
        let offset = located.symbol.value;
        let how = find_thread_local(entry, offset, elf, loaded, memory)?;
        return Ok(format!("{located}; {how}"));
    }
    recover_thread_local(entry, elf, loaded, memory)
}

/// Where nothing names the variable: the one word of Ruby's thread-local block
/// that holds contexts of the VM, which must be known (without it, the words
/// beside it may pass too).
fn recover_thread_local<'data, R, M>(
    entry: &mut ProcessEntry,
    elf: &Elf<'data, R>,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<String, RootError>
where
    R: ReadRef<'data>,
    M: TargetMemory + Memory,
{
    let size = match elf.tls() {
        Some(tls) if entry.vm != 0 => tls.memory_size.min(MAX_TLS_BLOCK),
        _ => {
            return Err(RootError::Missing(
                "the build shows no ruby_current_ec".to_owned(),
            ));
        }
    };
    let mut fitting = Vec::new();
    for offset in (0..size).step_by(8) {
        let mut trial = *entry;
        let Ok(how) = find_thread_local(&mut trial, offset, elf, loaded, memory) else {
            continue;
        };
        let evidence = validate::check(&trial, loaded.threads, memory);
        if !evidence.validated.is_empty() {
            fitting.push((offset, trial, how));
        }
    }
    let by_code = loaded.offset_in_code;
    if let Some(by_code) = by_code {
        if let Some(at) = fitting.iter().position(|(offset, ..)| *offset == by_code) {
            // Two that know nothing of each other agree; what else may look
            // like a context is none.
            let (_, trial, how) = fitting.swap_remove(at);
            *entry = trial;
            return Ok(format!(
                "offset {by_code:#x} in Ruby's thread-local block by the code of \
                 rb_thread_current, and by trying each variable; {how}"
            ));
        }
        if !fitting.is_empty() {
            return Err(RootError::Missing(format!(
                "the code of rb_thread_current has ruby_current_ec at offset {by_code:#x} of the \
                 thread-local block, but what looks like it in the process is at {}",
                fitting
                    .iter()
                    .map(|(offset, ..)| format!("{offset:#x}"))
                    .collect::<Vec<_>>()
                    .join(", ")
            )));
        }
    }
    match <[_; 1]>::try_from(fitting) {
        Ok([(offset, trial, how)]) => {
            *entry = trial;
            Ok(format!(
                "offset {offset:#x} in Ruby's thread-local block by trying each variable; {how}"
            ))
        }
        Err(none) if none.is_empty() => Err(RootError::NotReady(
            "no thread has an execution context yet".to_owned(),
        )),
        Err(_) => Err(RootError::Missing(
            "the build shows no ruby_current_ec, and several variables look like it".to_owned(),
        )),
    }
}

/// Up to 2.7: one global for all threads.
fn find_global<M: TargetMemory + Memory>(
    entry: &mut ProcessEntry,
    symbols: &Symbols,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<String, RootError> {
    let (variable, how) = match symbols.current_ec_global {
        Some(located) => {
            let variable = loaded.bias.wrapping_add(located.symbol.value);
            (variable, located.to_string())
        }
        None => recover_global(entry, loaded, memory)?,
    };
    entry.root = root::GLOBAL;
    entry.ec = variable.cast_signed();
    let bias = pthread_bias(entry, variable, loaded.threads, memory);
    entry.pthread_bias = bias.unwrap_or(0);
    Ok(format!("{how}; one global, the GVL owner's"))
}

/// Where nothing names the global: the one place that the code of
/// `rb_thread_current` refers to and that holds a context.
fn recover_global<M: TargetMemory + Memory>(
    entry: &ProcessEntry,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<(u64, String), RootError> {
    let field =
        |base: u64, offset: u32| TargetMemory::word(memory, base.wrapping_add(offset.into())).ok();
    let layout = &entry.layout;
    let holds_context = |place: u64| {
        let ec = field(place, 0).filter(|&ec| ec != 0)?;
        let thread = field(ec, layout.ec_thread)?;
        let back = field(thread, layout.thread_ec)?;
        Some(back == ec && read_context(ec, layout, memory).is_ok())
    };
    let mut found = loaded
        .places_in_code
        .iter()
        .copied()
        .filter(|&place| holds_context(place) == Some(true));
    match (found.next(), found.next()) {
        (Some(place), None) => Ok((
            place,
            "the only context among what the code of rb_thread_current refers to".to_owned(),
        )),
        (None, _) if loaded.places_in_code.is_empty() => Err(RootError::Missing(
            "the build shows no ruby_current_execution_context_ptr".to_owned(),
        )),
        // The owner of the GVL changes, and for a moment there is none.
        (None, _) => Err(RootError::NotReady(
            "no thread has an execution context yet".to_owned(),
        )),
        (Some(_), Some(_)) => Err(RootError::Missing(
            "the build shows no ruby_current_execution_context_ptr, and several variables look \
             like it"
                .to_owned(),
        )),
    }
}

/// The thread pointer minus `pthread_self()`, learnt from the thread that owns
/// the current execution context.
fn pthread_bias<M: TargetMemory>(
    entry: &ProcessEntry,
    variable: u64,
    threads: &[ThreadPointer],
    memory: &M,
) -> Option<u64> {
    let field = |base: u64, offset: u32| memory.word(base.wrapping_add(offset.into())).ok();
    let ec = field(variable, 0)?;
    let thread = field(ec, entry.layout.ec_thread)?;
    let owner = field(thread, entry.layout.thread_id)?;
    threads
        .iter()
        .filter_map(|thread| thread.value.checked_sub(owner))
        .min()
        .filter(|&bias| bias <= MAX_PTHREAD_BIAS)
}

/// From 3.0 on: the variable at `offset` in Ruby's thread-local block.
fn find_thread_local<'data, R, M>(
    entry: &mut ProcessEntry,
    offset: u64,
    elf: &Elf<'data, R>,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<String, RootError>
where
    R: ReadRef<'data>,
    M: TargetMemory + Memory,
{
    let machine = elf.machine();
    if loaded.is_program {
        let distance = elf
            .tls()
            .and_then(|tls| tls::in_main_program(machine, tls, offset))
            .ok_or_else(|| {
                RootError::Missing("the program's thread-local segment makes no sense".to_owned())
            })?;
        entry.root = root::TLS_STATIC;
        entry.ec = distance;
        return Ok(format!(
            "the main program's own block, {distance:+} from the thread pointer"
        ));
    }
    let relocations = tls::relocations(elf);
    let (bias, name) = (loaded.bias, CURRENT_EC);
    match tls::access(machine, &relocations, bias, name, offset, memory) {
        Access::ThreadOffset(distance) => {
            entry.root = root::TLS_STATIC;
            entry.ec = distance;
            Ok(format!(
                "{distance:+} from the thread pointer, by its relocation"
            ))
        }
        Access::Descriptor(distance) => {
            entry.root = root::TLS_STATIC;
            entry.ec = distance;
            Ok(format!(
                "in the static area, {distance:+} from the thread pointer, by its descriptor"
            ))
        }
        Access::Block { module, offset } => {
            let how = through_block(entry, module, offset, machine, loaded, memory)?;
            Ok(format!("module {module} by its relocation; {how}"))
        }
        Access::NotLoaded => Err(RootError::NotReady(
            "the loader has not relocated libruby yet".to_owned(),
        )),
        Access::Unknown => {
            let module = search(entry, offset, machine, loaded, memory)?;
            let how = through_block(entry, module, offset, machine, loaded, memory)?;
            Ok(format!("module {module} by trying all; {how}"))
        }
    }
}

/// Reaches a variable in the block of a module: at a constant distance from the
/// thread pointer where the process proves it, else through the vector.
fn through_block<M: TargetMemory>(
    entry: &mut ProcessEntry,
    module: u64,
    offset: u64,
    machine: Machine,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<String, RootError> {
    let library = loaded.library;
    if let Some(distance) = tls::fold(library, machine, module, loaded.threads, memory) {
        let distance = distance.wrapping_add_unsigned(offset);
        entry.root = root::TLS_STATIC;
        entry.ec = distance;
        return Ok(format!(
            "in the static area, {distance:+} from the thread pointer"
        ));
    }
    set_block(entry, module, offset, machine, library)?;
    Ok(format!(
        "offset {offset:#x}, through the thread vector ({library})"
    ))
}

fn set_block(
    entry: &mut ProcessEntry,
    module: u64,
    offset: u64,
    machine: Machine,
    library: CLibrary,
) -> Result<(), RootError> {
    let dtv = library.dtv(machine).ok_or_else(|| {
        RootError::Missing(format!("rbprof does not know the threads of {machine}"))
    })?;
    entry.root = root::TLS_DTV;
    entry.ec = offset.cast_signed();
    entry.module = module;
    entry.dtv = dtv;
    Ok(())
}

/// Where nothing tells the module's id (thread-local descriptors): the one
/// module whose block holds a valid context at `offset`.
fn search<M: TargetMemory + Memory>(
    entry: &ProcessEntry,
    offset: u64,
    machine: Machine,
    loaded: &Loaded<'_>,
    memory: &M,
) -> Result<u64, RootError> {
    let mut trial = *entry;
    set_block(&mut trial, 0, offset, machine, loaded.library)?;
    let mut fitting =
        tls::modules(trial.dtv, loaded.library, loaded.threads, memory).filter(|&module| {
            trial.module = module;
            !validate::check(&trial, loaded.threads, memory)
                .validated
                .is_empty()
        });
    match (fitting.next(), fitting.next()) {
        (Some(module), None) => Ok(module),
        (None, _) => Err(RootError::NotReady(
            "no thread has an execution context yet".to_owned(),
        )),
        (Some(_), Some(_)) => Err(RootError::Missing(
            "which module's thread-local block is Ruby's cannot be told".to_owned(),
        )),
    }
}
