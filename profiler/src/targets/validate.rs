//! Whether roots hold for the live process.
//!
//! The process runs on while it is looked at, so one failed thread proves
//! nothing; a thread that validates does: the chance that other memory passes
//! for a context whose thread points back to it and to the VM is nil.

use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::layout::fixed;
use rbprof_common::layout::frame_flags;
use rbprof_common::process::ProcessEntry;
use rbprof_common::roots::Context;
use rbprof_common::roots::NoContext;
use rbprof_common::roots::context_of;

use super::ThreadPointer;

/// `rb_vm_t.main_thread` from Ruby 3.0 on (`ractor.main_thread`).
pub(super) const VM_MAIN_THREAD: u64 = 40;

/// A thread whose context is a valid one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validated {
    /// The native thread.
    pub tid: u32,
    /// Its execution context.
    pub ec: u64,
    /// The Ruby thread it belongs to.
    pub thread: u64,
    /// The VM that the Ruby thread belongs to.
    pub vm: u64,
}

/// What the threads of a process say of its roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Threads with a valid context.
    pub validated: Vec<Validated>,
    /// Threads without a context: not Ruby's, or not Ruby's yet.
    pub without: usize,
    /// Threads with something that is no valid context.
    pub invalid: usize,
}

impl Evidence {
    /// The VM of all threads that validated, if they agree.
    #[must_use]
    pub fn vm(&self) -> Option<u64> {
        let (first, rest) = self.validated.split_first()?;
        rest.iter()
            .all(|other| other.vm == first.vm)
            .then_some(first.vm)
    }
}

/// Tries the roots of `entry` on every thread. A VM in the entry is demanded of
/// every context.
pub fn check<M: Memory>(entry: &ProcessEntry, threads: &[ThreadPointer], memory: &M) -> Evidence {
    let mut evidence = Evidence::default();
    for thread in threads.iter().filter(|thread| thread.value != 0) {
        match check_thread(entry, *thread, memory) {
            Ok(validated) => evidence.validated.push(validated),
            Err(NoContext::None) => evidence.without += 1,
            Err(NoContext::Invalid | NoContext::Fault) => evidence.invalid += 1,
        }
    }
    evidence
}

fn check_thread<M: Memory>(
    entry: &ProcessEntry,
    native: ThreadPointer,
    memory: &M,
) -> Result<Validated, NoContext> {
    let context = context_of(entry, native.value, memory)?;
    let field = |base: u64, offset: u32| memory.word(base.wrapping_add(offset.into()));
    let thread = field(context.ec, entry.layout.ec_thread)?;
    let vm = field(thread, entry.layout.thread_vm)?;
    if field(thread, entry.layout.thread_ec)? != context.ec
        || vm == 0
        || vm & 7 != 0
        || !begins_with_a_dummy(&context, entry.layout.cfp_size, memory)?
    {
        return Err(NoContext::Invalid);
    }
    Ok(Validated {
        tid: native.tid,
        ec: context.ec,
        thread,
        vm,
    })
}

/// Whether the outermost control frame is where the size of one says, and is the
/// dummy that every VM stack begins with: the walk goes by that size.
fn begins_with_a_dummy<M: Memory>(
    context: &Context,
    cfp_size: u32,
    memory: &M,
) -> Result<bool, Fault> {
    let outermost = context.stack_end.wrapping_sub(cfp_size.into());
    let ep = memory.word(outermost.wrapping_add(8 * fixed::CFP_EP as u64))?;
    // Its environment may have left the stack (`TOPLEVEL_BINDING`).
    Ok(memory.word(ep)? & frame_flags::TYPE_MASK == frame_flags::DUMMY)
}

/// Whether the main thread of a VM belongs to it (Ruby 3.0 and later): a second
/// proof for a VM that was not found by its symbol.
///
/// # Errors
/// [`Fault`] when it cannot be read.
pub fn vm_knows_its_main_thread<M: Memory>(
    vm: u64,
    entry: &ProcessEntry,
    memory: &M,
) -> Result<bool, Fault> {
    let main = memory.word(vm.wrapping_add(VM_MAIN_THREAD))?;
    Ok(memory.word(main.wrapping_add(entry.layout.thread_vm.into()))? == vm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::tests::Words;
    use rbprof_common::layout::LAYOUTS;
    use rbprof_common::process::root;

    const TP: u64 = 0x1000;
    const EC: u64 = 0x2000;
    const THREAD: u64 = 0x3000;
    const VM: u64 = 0x4000;
    const STACK: u64 = 0x8000;

    /// A process with one Ruby thread, by the newest layout.
    fn process() -> (ProcessEntry, Words) {
        let layout = LAYOUTS[LAYOUTS.len() - 1].walk;
        let entry = ProcessEntry {
            root: root::TLS_STATIC,
            ec: -8,
            layout,
            ..ProcessEntry::default()
        };
        let outermost = STACK + 8 * 512 - u64::from(layout.cfp_size);
        let words = [
            (TP - 8, EC),
            (EC, STACK),
            (EC + 8, 512),
            (EC + 16, STACK + 2048),
            (EC + u64::from(layout.ec_thread), THREAD),
            (THREAD + u64::from(layout.thread_ec), EC),
            (THREAD + u64::from(layout.thread_vm), VM),
            (VM + VM_MAIN_THREAD, THREAD),
            (outermost + 32, STACK + 16),
            (STACK + 16, frame_flags::DUMMY | frame_flags::FINISH),
        ];
        (entry, Words(words.into()))
    }

    /// (validated, without, invalid)
    fn counts(entry: &ProcessEntry, memory: &Words) -> (usize, usize, usize) {
        let threads = [TP, 0].map(|value| ThreadPointer { tid: 1, value });
        let evidence = check(entry, &threads, memory);
        (evidence.validated.len(), evidence.without, evidence.invalid)
    }

    #[test]
    fn a_context_must_be_its_thread_s_and_its_vm_s() {
        let (mut entry, mut memory) = process();
        assert_eq!(counts(&entry, &memory), (1, 0, 0));
        assert_eq!(vm_knows_its_main_thread(VM, &entry, &memory), Ok(true));
        entry.vm = VM;
        assert_eq!(counts(&entry, &memory), (1, 0, 0));
        entry.vm = VM + 8;
        assert_eq!(counts(&entry, &memory), (0, 0, 1));
        entry.vm = 0;

        let back = THREAD + u64::from(entry.layout.thread_ec);
        memory.0.insert(back, EC + 8);
        assert_eq!(counts(&entry, &memory), (0, 0, 1));
        memory.0.insert(back, EC);
        assert_eq!(counts(&entry, &memory), (1, 0, 0));
        for (at, value) in [
            (STACK + 16, frame_flags::METHOD),
            (STACK + 8 * 512 - 56 + 32, STACK + 8 * 512 - 56),
        ] {
            let right = memory.0.insert(at, value).unwrap();
            assert_eq!(counts(&entry, &memory), (0, 0, 1));
            memory.0.insert(at, right);
        }
        entry.layout.cfp_size = 64;
        assert_eq!(counts(&entry, &memory), (0, 0, 1));
        entry.layout.cfp_size = 56;
        memory.0.insert(EC + 16, STACK - 8);
        assert_eq!(counts(&entry, &memory), (0, 0, 1));
        memory.0.insert(TP - 8, 0);
        assert_eq!(counts(&entry, &memory), (0, 1, 0));
    }

    #[test]
    fn threads_of_two_vms_do_not_tell_the_vm() {
        let one = |vm| Validated {
            tid: 1,
            ec: EC,
            thread: THREAD,
            vm,
        };
        let of = |validated| Evidence {
            validated,
            ..Evidence::default()
        };
        assert_eq!(of(vec![one(8), one(8)]).vm(), Some(8));
        assert_eq!(of(vec![one(8), one(16)]).vm(), None);
        assert_eq!(of(vec![]).vm(), None);
    }
}
