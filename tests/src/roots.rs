//! Where Ruby's roots are, without any symbols: by search and validation. What
//! the profiler does on a live process is another matter and tested elsewhere.

use rbprof::memory::TargetMemory;
use rbprof::symbolize::id_name;
use rbprof_common::Memory;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::roots::Context;
use rbprof_common::roots::read_context;

use crate::coredump::CoreDump;
use crate::coredump::MappedFile;
use crate::coredump::Segment;
use crate::coredump::little_endian;

/// What a stack walk and symbolization begin with.
#[derive(Clone, Copy, Debug)]
pub struct Roots {
    /// Address of the `rb_vm_t`.
    pub vm: u64,
    /// Where the main thread is.
    pub main: Context,
    /// Address of `ruby_global_symbols`.
    pub global_symbols: Option<u64>,
}

/// The one VM of a process that runs Ruby `version`, with its main thread, from
/// the writable `data` of the file that Ruby is in.
///
/// # Panics
/// When there is none, or more than one.
#[expect(clippy::panic, reason = "a helper of tests fails as tests do")]
pub fn find<M: Memory + TargetMemory>(
    memory: &M,
    data: &[Segment],
    layout: &Layout,
    version: Version,
) -> Roots {
    let main_thread = if version < Version::new(3, 0, 0) {
        192
    } else {
        40
    };
    let words: Vec<(u64, u64)> = data
        .iter()
        .flat_map(|&segment| words(memory, segment))
        .collect();
    let mut vms: Vec<(u64, Context)> = words
        .iter()
        .filter_map(|&(_, vm)| Some((vm, main_context(memory, layout, vm, main_thread)?)))
        .collect();
    vms.sort_by_key(|(vm, _)| *vm);
    vms.dedup_by_key(|(vm, _)| *vm);
    let [(vm, main)] = vms.as_slice() else {
        panic!("expected one VM, found {vms:x?}");
    };
    let tables: Vec<u64> = words
        .iter()
        .map(|&(address, _)| address)
        .filter(|&address| is_symbol_table(memory, layout, address))
        .collect();
    assert!(tables.len() <= 1, "several symbol tables: {tables:x?}");
    Roots {
        vm: *vm,
        main: *main,
        global_symbols: tables.first().copied(),
    }
}

/// Where `ruby_current_ec` of the dumped thread is, relative to its thread
/// pointer: every word of its static TLS area that holds `ec`.
#[must_use]
pub fn thread_local_places(dump: &CoreDump, ec: u64) -> Vec<i64> {
    const AREA: u64 = 4096;
    let pointers = dump
        .threads
        .iter()
        .filter_map(|thread| thread.thread_pointer);
    pointers
        .flat_map(|pointer| {
            (1..AREA / 8)
                .map(move |index| pointer - index * 8)
                .filter(|&place| TargetMemory::word(dump, place) == Ok(ec))
                .map(move |place| place.wrapping_sub(pointer).cast_signed())
        })
        .collect()
}

/// Writable memory of the file that Ruby is in, with the memory behind it that
/// has no file (`.bss`).
#[must_use]
pub fn ruby_data(segments: &[Segment], files: &[MappedFile]) -> Vec<Segment> {
    let mut found: Vec<Segment> = Vec::new();
    for segment in segments.iter().filter(|segment| segment.writable) {
        let file = files
            .iter()
            .find(|file| file.start <= segment.start && segment.start < file.end);
        let of_ruby = match file {
            Some(file) => file
                .path
                .rsplit('/')
                .next()
                .is_some_and(|name| name.starts_with("ruby") || name.starts_with("libruby")),
            None => found.last().is_some_and(|last| last.end == segment.start),
        };
        if of_ruby {
            found.push(*segment);
        }
    }
    found
}

/// The words of a segment with their addresses.
fn words<M: TargetMemory>(memory: &M, segment: Segment) -> Vec<(u64, u64)> {
    let len = usize::try_from(segment.end - segment.start).unwrap_or(0);
    let mut bytes = vec![0; len];
    if memory.read(segment.start, &mut bytes).is_err() {
        return Vec::new();
    }
    let addresses = (segment.start..segment.end).step_by(8);
    addresses
        .zip(bytes.chunks_exact(8).map(little_endian))
        .collect()
}

fn main_context<M: Memory>(
    memory: &M,
    layout: &Layout,
    vm: u64,
    main_thread: u64,
) -> Option<Context> {
    if vm == 0 || !vm.is_multiple_of(8) {
        return None;
    }
    let walk = &layout.walk;
    let word = |address: u64, offset: u64| Memory::word(memory, address.wrapping_add(offset)).ok();
    let thread = word(vm, main_thread)?;
    let ec = word(thread, u64::from(walk.thread_ec))?;
    let same = word(thread, u64::from(walk.thread_vm))? == vm
        && word(ec, u64::from(walk.ec_thread))? == thread;
    read_context(ec, walk, memory).ok().filter(|_| same)
}

/// Whether there is a symbol table whose entries 42 and 43 are `*` and `+`.
fn is_symbol_table<M: TargetMemory>(memory: &M, layout: &Layout, address: u64) -> bool {
    let name = |id| id_name(&layout.names, address, id, memory);
    name(42)
        .zip(name(43))
        .is_some_and(|(times, plus)| &*times == "*" && &*plus == "+")
}
