//! The VM of a build that exports nothing.
//!
//! Stripped builds from Ruby 3.3 on show `ruby_version` only. The VM is the one
//! structure that the image's data points to and whose main thread points back
//! to it, with a context that points back to the thread. With the VM known, the
//! thread-local slot that holds contexts of that VM is found by trying the few
//! there are (see [`super::roots`]).

use rbprof_common::layout::WalkLayout;
use rbprof_common::process::Range;

use crate::memory::TargetMemory;

use super::scan;
use super::validate::VM_MAIN_THREAD;

/// Finds the VM (Ruby 3.0 and later) by what the writable data of the image
/// points to. `None` when there is none yet, or more than one fits.
pub(super) fn vm<M: TargetMemory>(data: &[Range], layout: &WalkLayout, memory: &M) -> Option<u64> {
    let mut candidates: Vec<u64> = scan::words(data, memory)
        .into_iter()
        .flat_map(|(_, words)| words)
        .filter(|&word| scan::may_be_address(word))
        .collect();
    candidates.sort_unstable();
    candidates.dedup();
    let addresses: Vec<_> = candidates
        .iter()
        .map(|vm| vm.wrapping_add(VM_MAIN_THREAD))
        .collect();
    let mains = scan::read_each(&addresses, memory);
    let mut found = candidates
        .into_iter()
        .zip(mains)
        .filter_map(|(vm, main)| main.map(|[main]: [u64; 1]| (vm, main)))
        .filter(|&(vm, main)| {
            scan::may_be_address(main) && points_back(vm, main, layout, memory) == Some(true)
        })
        .map(|(vm, _)| vm);
    let only = found.next()?;
    found.next().is_none().then_some(only)
}

/// Whether a main thread belongs to the VM, and its context to it.
fn points_back<M: TargetMemory>(
    vm: u64,
    main: u64,
    layout: &WalkLayout,
    memory: &M,
) -> Option<bool> {
    let field = |base: u64, offset: u32| memory.word(base.wrapping_add(offset.into())).ok();
    if field(main, layout.thread_vm)? != vm {
        return Some(false);
    }
    let ec = field(main, layout.thread_ec)?;
    Some(field(ec, layout.ec_thread)? == main)
}
