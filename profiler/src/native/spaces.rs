//! The executable mappings of target processes, in the kernel half.
//!
//! A forked child has its parent's mappings, so it shares the parent's place
//! until its own are found to differ. When anything about a space changes, it is
//! put in a new place as a whole and its processes are pointed there: what the
//! walk reads never changes under it.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::process::ProcessEntry;
use rbprof_common::process::Range;
use rbprof_common::walk::native;
use rbprof_common::walk::native::MAX_MAPPINGS;
use rbprof_common::walk::native::mapping_flags;
use rbprof_common::wire::object;

use super::compiler::Compiler;
use super::compiler::Contents;
use super::compiler::Job;
use super::compiler::Key;
use super::objects::Objects;
use super::objects::PlacedTable;
use super::objects::TableState;
use super::objects::Version;
use crate::memory::ProcessMemory;
use crate::memory::TargetMemory as _;
use crate::targets::elf::Elf;
use crate::targets::elf::Load;
use crate::targets::elf::file_cache;
use crate::targets::image;
use crate::targets::image::FileVersion;
use crate::targets::mappings::FileId;
use crate::targets::mappings::MappedFile;
use crate::targets::mappings::Mapping;
use crate::targets::proc;
use crate::unwind::store::Maps;
use crate::unwind::store::Store;

/// Past all addresses of user space.
const MAX_ADDRESS: u64 = 1 << 56;
/// The smallest stretch that is taken for reserved by a compiler; Ruby's reserves
/// 48 MiB and more.
const MIN_RESERVED: u64 = 8 << 20;
/// Largest vDSO.
const MAX_VDSO: u64 = 1 << 20;
/// What is looked for is told apart by pages of memory.
const MEMORY_PAGE: u64 = 4096;
/// Most pages that are remembered of a process.
const MAX_MET: usize = 4096;
/// Time between two looks at a process's mappings that samples ask for: after
/// something new, and after what was looked for in vain.
const LOOKS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// The address spaces of all targets.
#[derive(Debug)]
pub struct Spaces {
    /// What is mapped.
    pub objects: Objects,
    store: Store,
    compiler: Compiler,
    spaces: HashMap<u32, Space>,
    next: u32,
    /// Which space a process has.
    processes: HashMap<u32, Member>,
    /// Frames of the interpreter itself are not sent.
    hide_interpreter: bool,
    /// What could not be done, for the user.
    pub warnings: Vec<String>,
}

/// A process's share in a space.
#[derive(Debug)]
struct Member {
    space: u32,
    /// When its mappings were last read, and how long to leave them alone.
    looked: Instant,
    pause: Duration,
    /// Samples ask for another look.
    wants_a_look: bool,
    /// Pages of memory where samples have met code since then that was not known
    /// to be mapped.
    met: HashSet<u64>,
    /// Those where a look has found nothing.
    fruitless: HashSet<u64>,
}

/// The mappings that some processes have in common.
#[derive(Debug, Default)]
struct Space {
    mappings: Vec<Piece>,
    interpreter: Interpreter,
    /// Its place in the kernel half.
    placed: Option<(u32, u32)>,
    members: HashSet<u32>,
    /// The tables its place refers to.
    tables: Vec<Key>,
    is_stale: bool,
}

/// Where a process has its interpreter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interpreter {
    /// From the first mapping of its file to the last.
    pub extent: Range,
    /// The file has other code as well: it is a program that Ruby is linked into.
    pub is_embedded: bool,
}

/// One executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    range: Range,
    bias: u64,
    object: u32,
}

/// A process that must be told of its mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The process.
    pub pid: u32,
    /// See [`ProcessEntry::mappings_at`].
    pub at: u32,
    /// See [`ProcessEntry::mappings`].
    pub count: u32,
}

impl Moved {
    /// Writes it down.
    pub const fn apply(&self, entry: &mut ProcessEntry) {
        entry.mappings_at = self.at;
        entry.mappings = self.count;
    }
}

impl Spaces {
    /// No spaces yet, with room as the maps have it.
    ///
    /// # Errors
    /// The system's, when it has no room for a thread.
    pub fn new<M: Maps>(maps: &M, hide_interpreter: bool) -> io::Result<Self> {
        Ok(Self {
            objects: Objects::default(),
            store: Store::new(maps.limits()),
            compiler: Compiler::start()?,
            spaces: HashMap::new(),
            next: 0,
            processes: HashMap::new(),
            hide_interpreter,
            warnings: Vec::new(),
        })
    }

    /// Reads the mappings of a process whose interpreter is at `interpreter`.
    /// They are in the kernel half after the next [`Spaces::publish`].
    pub fn attach(
        &mut self,
        pid: u32,
        memory: &ProcessMemory,
        interpreter: Interpreter,
        now: Instant,
    ) {
        let mappings = self.read(memory);
        self.leave(pid);
        self.join(pid, mappings, interpreter, memory, now);
    }

    /// A process was forked: it has what its parent has.
    pub fn fork(&mut self, parent: u32, child: u32, now: Instant) {
        let Some(space) = self.processes.get(&parent).map(|member| member.space) else {
            return;
        };
        self.leave(child);
        if let Some(shared) = self.spaces.get_mut(&space) {
            shared.members.insert(child);
            // The child may have copied a place that has been left since.
            shared.is_stale = true;
            self.processes.insert(child, Member::new(space, now));
        }
    }

    /// A process has ended, or runs another program.
    pub fn leave(&mut self, pid: u32) {
        if let Some(member) = self.processes.remove(&pid)
            && let Some(space) = self.spaces.get_mut(&member.space)
        {
            space.members.remove(&pid);
        }
    }

    /// A sample has met code that is not known to be mapped, or an object whose
    /// table is not there.
    ///
    /// What is new is looked at soon, whatever else was looked for in vain.
    pub fn met(&mut self, pid: u32, number: u32, address: u64) {
        let Some(member) = self.processes.get_mut(&pid) else {
            return;
        };
        if let Some(found) = self.objects.get(number) {
            // It may have had to make room for another. If it is being compiled,
            // or there is none, looking does not help.
            let is_gone = matches!(&found.table, TableState::Known(key)
                if !self.objects.tables.contains_key(key));
            member.wants_a_look |= is_gone;
            return;
        }
        member.wants_a_look = true;
        let page = address / MEMORY_PAGE;
        if member.fruitless.contains(&page) {
            return;
        }
        if member.met.len() < MAX_MET && member.met.insert(page) {
            member.pause = LOOKS.0;
        }
    }

    /// Processes whose mappings are to be read again now.
    pub fn due(&mut self, now: Instant) -> Vec<u32> {
        self.processes
            .iter()
            .filter(|(_, member)| {
                member.wants_a_look && now.duration_since(member.looked) >= member.pause
            })
            .map(|(&pid, _)| pid)
            .collect()
    }

    /// Reads the mappings of a process again.
    pub fn refresh(&mut self, pid: u32, memory: &ProcessMemory, now: Instant) {
        let mappings = self.read(memory);
        let Some(member) = self.processes.get_mut(&pid) else {
            return;
        };
        member.wants_a_look = false;
        member.looked = now;
        let Some(space) = self.spaces.get(&member.space) else {
            return;
        };
        if space.mappings == mappings {
            // What the samples meet is in no file that can be opened, or a table
            // that had to make room for another.
            member.pause = LOOKS.1;
            if member.fruitless.len() >= MAX_MET {
                member.fruitless.clear();
            }
            member.fruitless.extend(member.met.drain());
            let id = member.space;
            self.compile_missing(id, memory);
            return;
        }
        let interpreter = space.interpreter;
        self.leave(pid);
        self.join(pid, mappings, interpreter, memory, now);
    }

    /// Whether tables are still being compiled.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        self.compiler.is_busy()
    }

    /// Puts in place what has changed since, waiting up to `patience` for tables
    /// that are being compiled. Gives the processes that must be told.
    ///
    /// # Errors
    /// Those of the maps.
    pub fn publish<M: Maps>(
        &mut self,
        maps: &mut M,
        patience: Duration,
        now: Instant,
    ) -> Result<Vec<Moved>, M::Error> {
        let deadline = Instant::now() + patience;
        while let Some(compiled) = self
            .compiler
            .next(deadline.saturating_duration_since(Instant::now()))
        {
            self.take_table(compiled, maps, now)?;
        }
        self.drop_empty(now);
        let stale: Vec<u32> = self
            .spaces
            .iter()
            .filter(|(_, space)| space.is_stale)
            .map(|(&id, _)| id)
            .collect();
        let mut moved = Vec::new();
        for id in stale {
            moved.extend(self.put(id, maps, now)?);
        }
        Ok(moved)
    }

    /// Puts a space in a new place.
    fn put<M: Maps>(
        &mut self,
        id: u32,
        maps: &mut M,
        now: Instant,
    ) -> Result<Vec<Moved>, M::Error> {
        let Some(space) = self.spaces.get_mut(&id) else {
            return Ok(Vec::new());
        };
        let pieces: Vec<native::Mapping> = space
            .mappings
            .iter()
            .map(|piece| {
                let placed = self.objects.placed(piece.object);
                let is_interpreter = space.interpreter.extent.contains(piece.range.start);
                let mut flags = 0;
                if is_interpreter {
                    flags |= mapping_flags::INTERPRETER;
                    if self.hide_interpreter && !space.interpreter.is_embedded {
                        flags |= mapping_flags::HIDDEN;
                    }
                }
                native::Mapping {
                    start: piece.range.start,
                    end: piece.range.end,
                    bias: piece.bias,
                    object: piece.object,
                    pages_at: placed.map_or(0, |it| it.pages_at),
                    first_page: placed.map_or(0, |it| it.first_page),
                    pages: placed.map_or(0, |it| it.pages),
                    flags,
                    reserved: 0,
                }
            })
            .collect();
        let used: Vec<Key> = space
            .mappings
            .iter()
            .filter_map(|piece| self.objects.placed_key(piece.object).cloned())
            .collect();
        let place = if pieces.is_empty() {
            None
        } else {
            self.store.place_mappings(&pieces, maps, now)?
        };
        let Some(at) = place else {
            if !pieces.is_empty() {
                self.warn("no room for more executable mappings: some native frames are missing");
            }
            return Ok(Vec::new());
        };
        let count = u32::try_from(pieces.len()).unwrap_or(0);
        let before = space.placed.replace((at, count));
        space.is_stale = false;
        let no_longer = std::mem::replace(&mut space.tables, used.clone());
        let moved = space
            .members
            .iter()
            .map(|&pid| Moved { pid, at, count })
            .collect();
        if let Some((at, count)) = before {
            self.store.remove_mappings(at, count, now);
        }
        self.count_users(&used, true);
        self.count_users(&no_longer, false);
        Ok(moved)
    }

    fn count_users(&mut self, tables: &[Key], more: bool) {
        for key in tables {
            if let Some(table) = self.objects.tables.get_mut(key) {
                table.users = if more {
                    table.users + 1
                } else {
                    table.users.saturating_sub(1)
                };
            }
        }
    }

    fn drop_empty(&mut self, now: Instant) {
        let empty: Vec<u32> = self
            .spaces
            .iter()
            .filter(|(_, space)| space.members.is_empty())
            .map(|(&id, _)| id)
            .collect();
        for id in empty {
            if let Some(space) = self.spaces.remove(&id) {
                if let Some((at, count)) = space.placed {
                    self.store.remove_mappings(at, count, now);
                }
                self.count_users(&space.tables, false);
            }
        }
    }

    /// Puts a compiled table in place.
    fn take_table<M: Maps>(
        &mut self,
        compiled: super::compiler::Compiled,
        maps: &mut M,
        now: Instant,
    ) -> Result<(), M::Error> {
        let number = compiled.object;
        let state = match compiled.table {
            Err(why) => TableState::None(why),
            Ok((key, table)) => {
                if !self.objects.tables.contains_key(&key) {
                    let placed = match self.store.place(&table, maps, now)? {
                        Ok(placed) => Some(placed),
                        Err(_) => {
                            self.evict(now);
                            self.store.place(&table, maps, now)?.ok()
                        }
                    };
                    if let Some(placed) = placed {
                        let table = PlacedTable { placed, users: 0 };
                        self.objects.tables.insert(key.clone(), table);
                    } else {
                        self.warn("no room for more unwind tables: some native frames are missing");
                    }
                }
                TableState::Known(key)
            }
        };
        if let Some(object) = self.objects.get_mut(number) {
            object.table = state;
        }
        for space in self.spaces.values_mut() {
            space.is_stale |= space.mappings.iter().any(|piece| piece.object == number);
        }
        Ok(())
    }

    /// Makes room: takes away the tables that no process uses.
    fn evict(&mut self, now: Instant) {
        let unused: Vec<_> = self
            .objects
            .tables
            .iter()
            .filter(|(_, table)| table.users == 0)
            .map(|(key, _)| key.clone())
            .collect();
        for key in unused {
            if let Some(table) = self.objects.tables.remove(&key) {
                self.store.remove(&table.placed, now);
            }
        }
    }

    fn warn(&mut self, warning: &str) {
        if !self.warnings.iter().any(|known| known == warning) {
            self.warnings.push(warning.to_owned());
        }
    }

    fn join(
        &mut self,
        pid: u32,
        mappings: Vec<Piece>,
        interpreter: Interpreter,
        memory: &ProcessMemory,
        now: Instant,
    ) {
        let interpreters = mappings
            .iter()
            .filter(|piece| interpreter.extent.contains(piece.range.start));
        for piece in interpreters {
            if let Some(object) = self.objects.get_mut(piece.object) {
                object.interpreter = Some(interpreter.is_embedded);
            }
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        self.spaces.insert(
            id,
            Space {
                mappings,
                interpreter,
                members: HashSet::from([pid]),
                is_stale: true,
                ..Space::default()
            },
        );
        self.processes.insert(pid, Member::new(id, now));
        // A table may have been taken away while nobody used it.
        self.compile_missing(id, memory);
    }

    fn compile_missing(&mut self, id: u32, memory: &ProcessMemory) {
        let Some(space) = self.spaces.get(&id) else {
            return;
        };
        for piece in &space.mappings {
            let Some(found) = self.objects.get(piece.object) else {
                continue;
            };
            if let TableState::Known(key) = &found.table
                && !self.objects.tables.contains_key(key)
            {
                self.compiler.ask(Job {
                    object: piece.object,
                    contents: found.contents.clone(),
                    path: found.path.clone(),
                    process: Arc::clone(memory.process()),
                });
                if let Some(found) = self.objects.get_mut(piece.object) {
                    found.table = TableState::Compiling;
                }
            }
        }
    }

    /// The executable mappings of a process, in ascending order.
    fn read(&mut self, memory: &ProcessMemory) -> Vec<Piece> {
        let Ok(mappings) = proc::mappings(memory.process()) else {
            return Vec::new();
        };
        let files = MappedFile::all(&mappings);
        let files: HashMap<FileId, &MappedFile<'_>> =
            files.iter().map(|file| (file.id, file)).collect();
        let mut known: HashMap<FileId, Option<(u32, u64)>> = HashMap::new();
        let mut pieces: Vec<Piece> = Vec::new();
        let anonymous = anonymous_code(&mappings);
        for mapping in &mappings {
            if let Some(range) = anonymous
                .iter()
                .find(|range| range.start == mapping.range.start)
            {
                pieces.push(Piece {
                    range: *range,
                    bias: 0,
                    object: object::ANONYMOUS,
                });
                continue;
            }
            // The search takes addresses of user space, which `[vsyscall]` is not in.
            let is_code = mapping.executable && !is_anonymous(mapping);
            if !is_code || mapping.range.end > MAX_ADDRESS {
                continue;
            }
            let found = match mapping.file {
                Some(id) => *known.entry(id).or_insert_with(|| {
                    let mapped = files.get(&id)?;
                    self.object_of_file(mapped, memory)
                }),
                None if mapping.path == b"[vdso]" => self.object_of_vdso(mapping, memory),
                None => None,
            };
            let (object, bias) = found.unwrap_or((object::UNKNOWN, 0));
            // The parts of one object may lie side by side.
            if let Some(last) = pieces.last_mut()
                && last.range.end == mapping.range.start
                && (last.object, last.bias) == (object, bias)
            {
                last.range.end = mapping.range.end;
                continue;
            }
            pieces.push(Piece {
                range: mapping.range,
                bias,
                object,
            });
        }
        if pieces.len() > MAX_MAPPINGS as usize {
            self.warn("a process has too many executable mappings: some native frames are missing");
            pieces.truncate(MAX_MAPPINGS as usize);
        }
        pieces
    }

    /// The object of a mapped file and its bias.
    fn object_of_file(
        &mut self,
        mapped: &MappedFile<'_>,
        memory: &ProcessMemory,
    ) -> Option<(u32, u64)> {
        let file = image::open_mapped(memory.process(), memory, mapped).ok()?;
        let version = FileVersion::of(&file).map(Version::File);
        let number = match version.as_ref().and_then(|it| self.objects.known(it)) {
            Some(number) => number,
            None => {
                let file = Arc::new(file);
                let (loads, build_id) = facts(&file)?;
                self.add(
                    version,
                    mapped.display_path(),
                    Contents::File(file),
                    loads,
                    build_id,
                    memory,
                )?
            }
        };
        let loads = &self.objects.get(number)?.loads;
        Some((number, image::bias(loads, &mapped.mappings)?))
    }

    /// The object that the kernel maps into each process.
    fn object_of_vdso(&mut self, mapping: &Mapping, memory: &ProcessMemory) -> Option<(u32, u64)> {
        let len = mapping.range.end.checked_sub(mapping.range.start)?;
        if len > MAX_VDSO {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        memory.read(mapping.range.start, &mut bytes).ok()?;
        let version = Version::Memory(bytes);
        let number = match self.objects.known(&version) {
            Some(number) => number,
            None => {
                let Version::Memory(bytes) = &version else {
                    return None;
                };
                let bytes: Arc<[u8]> = bytes.as_slice().into();
                let elf = Elf::parse(&*bytes).ok()?;
                let (loads, build_id) = (
                    elf.loads().to_vec(),
                    elf.build_id().unwrap_or_default().to_vec(),
                );
                self.add(
                    Some(version),
                    "[vdso]".to_owned(),
                    Contents::Memory(Arc::clone(&bytes)),
                    loads,
                    build_id,
                    memory,
                )?
            }
        };
        let first = self.objects.get(number)?.loads.first()?.address;
        Some((number, mapping.range.start.wrapping_sub(first)))
    }

    fn add(
        &mut self,
        version: Option<Version>,
        path: String,
        contents: Contents,
        loads: Vec<Load>,
        build_id: Vec<u8>,
        memory: &ProcessMemory,
    ) -> Option<u32> {
        let added = self
            .objects
            .add(version, path.clone(), contents.clone(), loads, build_id);
        match added {
            Some(object) => self.compiler.ask(Job {
                object,
                contents,
                path,
                process: Arc::clone(memory.process()),
            }),
            None => {
                self.warn("too many different files are mapped: some native frames are missing");
            }
        }
        added
    }
}

/// Whether it is memory that belongs to nothing but the process.
fn is_anonymous(mapping: &Mapping) -> bool {
    mapping.file.is_none() && (mapping.path.is_empty() || mapping.path.starts_with(b"[anon"))
}

/// Stretches of memory of the process's own that hold code, or may soon.
///
/// A compiler reserves a large stretch, makes it accessible piece by piece, and
/// makes pieces writable instead of executable for a moment; looking again each
/// time would come too late. So what has any executable piece is code from one
/// end to the other, and so is a large piece that is reserved.
fn anonymous_code(mappings: &[Mapping]) -> Vec<Range> {
    let mut stretches: Vec<(Range, bool)> = Vec::new();
    for mapping in mappings.iter().filter(|mapping| is_anonymous(mapping)) {
        let Range { start, end } = mapping.range;
        let is_reserved = !mapping.readable
            && !mapping.writable
            && !mapping.executable
            && end.saturating_sub(start) >= MIN_RESERVED;
        let is_code = mapping.executable || is_reserved;
        match stretches.last_mut() {
            Some((range, code)) if range.end == start => {
                range.end = end;
                *code |= is_code;
            }
            _ => stretches.push((mapping.range, is_code)),
        }
    }
    stretches
        .into_iter()
        .filter_map(|(range, is_code)| is_code.then_some(range))
        .collect()
}

impl Member {
    fn new(space: u32, now: Instant) -> Self {
        Self {
            space,
            looked: now,
            pause: LOOKS.0,
            wants_a_look: false,
            met: HashSet::new(),
            fruitless: HashSet::new(),
        }
    }
}

fn facts(file: &Arc<File>) -> Option<(Vec<Load>, Vec<u8>)> {
    let cache = file_cache(file.try_clone().ok()?);
    let elf = Elf::parse(&cache).ok()?;
    Some((
        elf.loads().to_vec(),
        elf.build_id().unwrap_or_default().to_vec(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PinnedProcess;
    use crate::unwind::store::QUARANTINE;
    use crate::unwind::store::tests::InMemory;
    use crate::unwind::store::tests::LIMITS;

    #[test]
    fn what_a_compiler_reserves_is_code() {
        let maps = b"1000000-1001000 r-xp 00000000 00:00 0 \n\
            1001000-1002000 rw-p 00000000 00:00 0 \n\
            1002000-3000000 ---p 00000000 00:00 0 \n\
            4000000-4001000 ---p 00000000 00:00 0 \n\
            4001000-4801000 rw-p 00000000 00:00 0 \n\
            5000000-8000000 ---p 00000000 00:00 0 [anon:Ruby:rb_jit_reserve_addr_space]\n\
            9000000-9001000 r-xp 00000000 00:01 5 /lib/a.so\n\
            9001000-9002000 rw-p 00000000 00:00 0 \n\
            a000000-a001000 r-xp 00000000 00:00 0 [vdso]\n";
        let code = anonymous_code(&Mapping::parse_all(maps));
        let code: Vec<_> = code.iter().map(|range| (range.start, range.end)).collect();
        assert_eq!(code, [(0x100_0000, 0x300_0000), (0x500_0000, 0x800_0000)]);
    }

    fn own_memory() -> ProcessMemory {
        let process = PinnedProcess::open(std::process::id()).unwrap();
        ProcessMemory::open(Arc::new(process)).unwrap()
    }

    /// The unwind rule for an address of this process is in place.
    fn is_described(maps: &InMemory, moved: Moved, address: u64) -> bool {
        native::locate(maps, moved.at, moved.count, address).is_some_and(|mapping| {
            native::rule_for(maps, mapping, address.wrapping_sub(mapping.bias)).is_ok()
        })
    }

    #[test]
    fn processes_share_objects_and_tables() {
        let memory = own_memory();
        let mut maps = InMemory::new(LIMITS);
        let mut spaces = Spaces::new(&maps, false).unwrap();
        let now = Instant::now();
        let patience = Duration::from_secs(60);
        let own = processes_share_objects_and_tables as *const () as u64;
        let libc = libc::getpid as *const () as u64;

        spaces.attach(1, &memory, Interpreter::default(), now);
        let moved = spaces.publish(&mut maps, patience, now).unwrap();
        let [first] = moved.as_slice() else {
            panic!("{moved:?}");
        };
        assert_eq!(first.pid, 1);
        for address in [own, libc] {
            assert!(is_described(&maps, *first, address), "{address:x}");
        }
        let chunks = spaces.store.chunks();
        let objects = spaces.objects.all().count();

        // Another one with the same files, and a child.
        spaces.attach(2, &memory, Interpreter::default(), now);
        spaces.fork(1, 3, now);
        let moved = spaces.publish(&mut maps, patience, now).unwrap();
        let of = |pid| moved.iter().find(|it| it.pid == pid).copied().unwrap();
        assert_ne!(of(2).at, of(1).at);
        assert_eq!(of(3).at, of(1).at, "a child has its parent's");
        assert!(is_described(&maps, of(2), own));
        assert_eq!(spaces.objects.all().count(), objects);
        assert_eq!(spaces.store.chunks(), chunks);
        assert!(spaces.publish(&mut maps, patience, now).unwrap().is_empty());

        // What is looked at again and found the same stays where it is. What was
        // looked for in vain is looked for less often, but does not keep what is
        // new waiting.
        spaces.met(2, object::UNKNOWN, 0x1234);
        let mut now = now;
        assert_eq!(spaces.due(now), [0; 0]);
        now += LOOKS.0;
        assert_eq!(spaces.due(now), [2]);
        spaces.refresh(2, &memory, now);
        spaces.met(2, object::UNKNOWN, 0x1238);
        now += LOOKS.0;
        assert_eq!(spaces.due(now), [0; 0]);
        spaces.met(2, object::UNKNOWN, 0x9999);
        assert_eq!(spaces.due(now), [2]);
        spaces.refresh(2, &memory, now);
        spaces.met(2, object::UNKNOWN, 0x9999);
        now += LOOKS.1;
        assert_eq!(spaces.due(now), [2]);
        spaces.refresh(2, &memory, now);
        // An object with its table is no reason to look.
        spaces.met(2, object::FIRST_FILE, 0x1234);
        now += LOOKS.1;
        assert_eq!(spaces.due(now), [0; 0]);
        assert!(spaces.publish(&mut maps, patience, now).unwrap().is_empty());

        // Tables that nobody uses make room when it is needed, and come back.
        for pid in [1, 2, 3] {
            spaces.leave(pid);
        }
        assert!(spaces.publish(&mut maps, patience, now).unwrap().is_empty());
        assert!(spaces.objects.tables.values().all(|table| table.users == 0));
        spaces.evict(now);
        assert!(spaces.objects.tables.is_empty());
        now += QUARANTINE + Duration::from_secs(1);
        spaces.attach(4, &memory, Interpreter::default(), now);
        let moved = spaces.publish(&mut maps, patience, now).unwrap();
        let [again] = moved.as_slice() else {
            panic!("{moved:?}");
        };
        assert!(is_described(&maps, *again, own));
        assert!(is_described(&maps, *again, libc));
        assert_eq!(spaces.objects.all().count(), objects);
        assert!(spaces.store.chunks() <= chunks + 1);
        assert!(spaces.warnings.is_empty(), "{:?}", spaces.warnings);
    }
}
