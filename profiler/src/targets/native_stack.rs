//! What is on the native stacks of a live process.
//!
//! The code of a stripped file tells which function looks like `rb_vm_exec`. In
//! a process that runs Ruby, a return address into it is on the native stack of
//! every Ruby thread: the thread runs Ruby because that function was called. A
//! stack holds what was there before as well, and that proves as much.

use rbprof_common::process::Range;

use crate::memory::TargetMemory;

use super::ThreadPointer;
use super::mappings::Mapping;

/// Bytes read at once.
const CHUNK: u64 = 256 << 10;
/// Most bytes of one stack looked through, from its base: the main thread's has
/// up to 8 MiB by default.
const MAX_STACK: u64 = 16 << 20;
/// Most threads looked at.
const MAX_THREADS: usize = 16;

/// Whether a native stack of the process holds one of `addresses`, which are
/// sorted.
pub(super) fn holds_any<M: TargetMemory>(
    addresses: &[u64],
    mappings: &[Mapping],
    threads: &[ThreadPointer],
    memory: &M,
) -> bool {
    !addresses.is_empty() && stacks(mappings, threads).any(|stack| holds(addresses, stack, memory))
}

/// The mappings that are stacks: the main thread's by its name, and those of
/// the other threads, whose thread pointer is at the base of their stack.
fn stacks(mappings: &[Mapping], threads: &[ThreadPointer]) -> impl Iterator<Item = Range> {
    let main = mappings.iter().filter(|mapping| mapping.path == b"[stack]");
    let others = mappings.iter().filter(|mapping| {
        mapping.writable
            && mapping.file.is_none()
            && threads
                .iter()
                .any(|thread| mapping.range.contains(thread.value))
    });
    main.chain(others)
        .map(|mapping| mapping.range)
        .take(MAX_THREADS)
}

fn holds<M: TargetMemory>(addresses: &[u64], stack: Range, memory: &M) -> bool {
    // From the base, where the first call of Ruby is.
    let mut end = stack.end & !7;
    let lowest = stack.start.max(end.saturating_sub(MAX_STACK));
    let mut words = Vec::new();
    while end > lowest {
        let start = lowest.max(end.saturating_sub(CHUNK));
        words.resize(usize::try_from((end - start) / 8).unwrap_or(0), 0_u64);
        if memory
            .read(start, bytemuck::cast_slice_mut(&mut words))
            .is_err()
        {
            // Below what the thread has used.
            return false;
        }
        if words
            .iter()
            .any(|word| addresses.binary_search(word).is_ok())
        {
            return true;
        }
        end = start;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::tests::Words;

    #[test]
    fn a_return_address_is_found_on_any_thread_s_stack() {
        let maps = b"10000-10100 rw-p 00000000 00:00 0 [stack]\n\
                     20000-20100 rw-p 00000000 00:00 0\n\
                     30000-30100 rw-p 00000000 00:00 0\n";
        let mappings = Mapping::parse_all(maps);
        let threads = [ThreadPointer {
            tid: 2,
            value: 0x200c0,
        }];
        let mut memory = Words::default();
        for base in [0x10000, 0x20000, 0x30000] {
            memory
                .0
                .extend((base..base + 0x100).step_by(8).map(|at| (at, 0)));
        }
        let holds = |memory: &Words| holds_any(&[0x4444, 0x5555], &mappings, &threads, memory);
        assert!(!holds(&memory));
        memory.0.insert(0x30010, 0x5555);
        assert!(!holds(&memory), "not a stack");
        memory.0.insert(0x20010, 0x5555);
        assert!(holds(&memory));
        memory.0.insert(0x20010, 0);
        memory.0.insert(0x10000, 0x4444);
        assert!(holds(&memory));
        assert!(!holds_any(&[], &mappings, &threads, &memory));
    }
}
