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

/// Something found by looking through the data of a live process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Its address.
    pub address: u64,
    /// Code that must know it refers to the place where it was found.
    pub is_referenced: bool,
}

/// Why nothing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRecovered {
    /// Nothing fits, perhaps only yet.
    Nothing,
    /// So many fit, and the code does not tell them apart.
    Ambiguous(usize),
}

impl Recovered {
    /// How it was found; `getter` is the code that refers to it.
    #[must_use]
    pub fn how(&self, getter: &str) -> String {
        if self.is_referenced {
            format!("the only one in Ruby's data, where {getter} looks for it")
        } else {
            "the only one in Ruby's data".to_owned()
        }
    }

    /// The one candidate, or the one that the code refers to.
    pub(super) fn only(candidates: &[Self]) -> Result<Self, NotRecovered> {
        let mut referenced = candidates.iter().filter(|it| it.is_referenced);
        match (candidates, referenced.next(), referenced.next()) {
            ([], ..) => Err(NotRecovered::Nothing),
            (_, Some(only), None) | ([only], ..) => Ok(*only),
            _ => Err(NotRecovered::Ambiguous(candidates.len())),
        }
    }
}

/// Finds the VM (Ruby 3.0 and later) by what the writable data of the image
/// points to. `references` are places in that data where a function that needs
/// the VM looks.
///
/// # Errors
/// [`NotRecovered`].
pub(super) fn vm<M: TargetMemory>(
    data: &[Range],
    references: &[u64],
    layout: &WalkLayout,
    memory: &M,
) -> Result<Recovered, NotRecovered> {
    let mut candidates: Vec<Recovered> = scan::words(data, memory)
        .into_iter()
        .flat_map(|(start, words)| (start..).step_by(8).zip(words))
        .filter(|&(_, word)| scan::may_be_address(word))
        .map(|(place, address)| Recovered {
            address,
            is_referenced: references.contains(&place),
        })
        .collect();
    // The same VM may be found in several places: one that is referred to
    // stands for all.
    candidates.sort_unstable_by_key(|it| (it.address, !it.is_referenced));
    candidates.dedup_by_key(|it| it.address);
    // If one fits of those that code refers to, the others do not matter; there are
    // thousands of them.
    let (referenced, others): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|it| it.is_referenced);
    let mut found = fitting(&referenced, layout, memory);
    if found.len() != 1 {
        found.extend(fitting(&others, layout, memory));
    }
    Recovered::only(&found)
}

/// Those that are a VM.
fn fitting<M: TargetMemory>(
    candidates: &[Recovered],
    layout: &WalkLayout,
    memory: &M,
) -> Vec<Recovered> {
    let addresses: Vec<_> = candidates
        .iter()
        .map(|vm| vm.address.wrapping_add(VM_MAIN_THREAD))
        .collect();
    let mains = scan::read_each(&addresses, memory);
    candidates
        .iter()
        .zip(mains)
        .filter_map(|(vm, main)| main.map(|[main]: [u64; 1]| (vm, main)))
        .filter(|&(vm, main)| {
            scan::may_be_address(main)
                && points_back(vm.address, main, layout, memory) == Some(true)
        })
        .map(|(vm, _)| *vm)
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::tests::Words;
    use rbprof_common::layout::LAYOUTS;

    const DATA: Range = Range {
        start: 0x10000,
        end: 0x10100,
    };

    /// A VM at `vm` with everything that a VM must have.
    fn add_vm(memory: &mut Words, vm: u64, layout: &WalkLayout) {
        let (thread, ec) = (vm + 0x1000, vm + 0x2000);
        memory.0.extend([
            (vm + VM_MAIN_THREAD, thread),
            (thread + u64::from(layout.thread_vm), vm),
            (thread + u64::from(layout.thread_ec), ec),
            (ec + u64::from(layout.ec_thread), thread),
        ]);
    }

    #[test]
    fn one_vm_is_found_and_of_several_the_one_that_code_refers_to() {
        let layout = &LAYOUTS[LAYOUTS.len() - 1].walk;
        let mut memory = Words::default();
        memory
            .0
            .extend((DATA.start..DATA.end).step_by(8).map(|at| (at, 0)));
        let find = |memory: &Words, references: &[u64]| vm(&[DATA], references, layout, memory);
        assert_eq!(find(&memory, &[]), Err(NotRecovered::Nothing));

        add_vm(&mut memory, 0x2_0000, layout);
        memory.0.insert(DATA.start + 0x40, 0x2_0000);
        memory.0.insert(DATA.start + 0x80, 0x2_0000);
        let only = |address, is_referenced| {
            Ok(Recovered {
                address,
                is_referenced,
            })
        };
        assert_eq!(find(&memory, &[]), only(0x2_0000, false));
        assert_eq!(find(&memory, &[DATA.start + 0x80]), only(0x2_0000, true));

        add_vm(&mut memory, 0x5_0000, layout);
        memory.0.insert(DATA.start + 0x90, 0x5_0000);
        assert_eq!(find(&memory, &[]), Err(NotRecovered::Ambiguous(2)));
        assert_eq!(find(&memory, &[DATA.start + 0x90]), only(0x5_0000, true));
        // Code that refers to both tells nothing.
        let both = [DATA.start + 0x90, DATA.start + 0x40];
        assert_eq!(find(&memory, &both), Err(NotRecovered::Ambiguous(2)));
    }
}
