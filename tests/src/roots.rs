//! Where Ruby's roots are in a core dump: by search and validation, since a
//! dump has no symbols. What the profiler does on a live process is another
//! matter and tested elsewhere.

use rbprof::memory::TargetMemory;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::roots::Context;
use rbprof_common::roots::read_context;

use crate::coredump::CoreDump;
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

/// The one VM in a dump of Ruby `version`, with its main thread.
///
/// # Panics
/// When there is none, or more than one.
#[must_use]
pub fn find(dump: &CoreDump, layout: &Layout, version: Version) -> Roots {
    let main_thread = if version < Version::new(3, 0, 0) {
        192
    } else {
        40
    };
    let mut vms: Vec<(u64, Context)> = ruby_data(dump)
        .into_iter()
        .flat_map(|segment| words(dump, segment))
        .filter_map(|(_, vm)| Some((vm, main_context(dump, layout, vm, main_thread)?)))
        .collect();
    vms.sort_by_key(|(vm, _)| *vm);
    vms.dedup_by_key(|(vm, _)| *vm);
    let [(vm, main)] = vms.as_slice() else {
        panic!("expected one VM, found {vms:x?}");
    };
    let tables: Vec<u64> = ruby_data(dump)
        .into_iter()
        .flat_map(|segment| words(dump, segment))
        .map(|(address, _)| address)
        .filter(|&address| is_symbol_table(dump, layout, address))
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
    let pointers = dump.threads.iter().filter_map(|thread| thread.thread_pointer);
    pointers
        .flat_map(|pointer| {
            (1..AREA / 8)
                .map(move |index| pointer - index * 8)
                .filter(|&place| dump.word(place) == Ok(ec))
                .map(move |place| place.wrapping_sub(pointer).cast_signed())
        })
        .collect()
}

/// Writable memory of the file that Ruby is in, with the memory behind it that
/// has no file (`.bss`).
fn ruby_data(dump: &CoreDump) -> Vec<Segment> {
    let mut found: Vec<Segment> = Vec::new();
    for segment in dump.segments().iter().filter(|segment| segment.writable) {
        let file = dump
            .files
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
fn words(dump: &CoreDump, segment: Segment) -> Vec<(u64, u64)> {
    let len = usize::try_from(segment.end - segment.start).unwrap_or(0);
    let mut bytes = vec![0; len];
    if dump.read(segment.start, &mut bytes).is_err() {
        return Vec::new();
    }
    let addresses = (segment.start..segment.end).step_by(8);
    addresses
        .zip(bytes.chunks_exact(8).map(little_endian))
        .collect()
}

fn main_context(dump: &CoreDump, layout: &Layout, vm: u64, main_thread: u64) -> Option<Context> {
    if vm == 0 || !vm.is_multiple_of(8) {
        return None;
    }
    let walk = &layout.walk;
    let word = |address: u64, offset: u32| {
        dump.word(address.wrapping_add(u64::from(offset))).ok()
    };
    let thread = dump.word(vm.wrapping_add(main_thread)).ok()?;
    let ec = word(thread, walk.thread_ec)?;
    let same = word(thread, walk.thread_vm)? == vm && word(ec, walk.ec_thread)? == thread;
    read_context(ec, walk, dump).ok().filter(|_| same)
}

/// Whether there is a symbol table whose entries 42 and 43 are `*` and `+`.
fn is_symbol_table(dump: &CoreDump, layout: &Layout, address: u64) -> bool {
    let names = rbprof::symbolize::id_name(&layout.names, address, 42, dump)
        .zip(rbprof::symbolize::id_name(&layout.names, address, 43, dump));
    names.is_some_and(|(times, plus)| &*times == "*" && &*plus == "+")
}
