//! Code that nothing describes and that is known all the same.
//!
//! - Signal trampolines: musl's, and those of the arm64 vDSO since Linux 5.8. The
//!   code of one is two instructions, the number of `rt_sigreturn` and the system
//!   call, and nobody else has them.
//! - The entry point, where glibc's loader and musl have no description: it has
//!   no caller.
//! - The system call with which glibc starts a thread, on x86-64. It returns in
//!   the new thread as well, where nothing called it, so glibc describes it for
//!   neither. But it takes its time in the thread that makes it, and a program
//!   that starts many is often seen there. In the new thread, the rule reads the
//!   lowest word of its thread-local block, which is 0 unless all of glibc's
//!   reserve there is used up: no caller.
//! - What is in `leaves`, on arm64.

use memchr::memmem;
use object::read::ReadRef;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::saved;

use crate::targets::elf::Elf;
use crate::targets::elf::Machine;

use super::leaves;

/// `mov $15, %rax; syscall`, as assemblers encode it in full and in short.
const X86_64: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05],
    &[0xb8, 15, 0, 0, 0, 0x0f, 0x05],
];
/// `mov x8, #139; svc #0`
const AARCH64: [&[u8]; 1] = [&[0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4]];
/// `mov $435, %eax; syscall; test %rax, %rax; jl`, of glibc's `clone3`. Its older
/// `clone` leaves something else on the new thread's stack.
const CLONE3: &[u8] = &[0xb8, 0xb3, 1, 0, 0, 0x0f, 0x05, 0x48, 0x85, 0xc0, 0x7c];
/// Where the description ends: at the system call.
const CLONE3_CALL: u64 = 5;
/// What is behind the jump's distance: `je`, to the new thread's code, its
/// distance, and `ret`.
const CLONE3_RETURN: [(usize, u8); 2] = [(12, 0x74), (14, 0xc3)];
/// A function that has left the stack as it found it.
const UNTOUCHED_STACK: Rule = Rule {
    cfa: cfa::SP,
    ra: saved::AT_CFA,
    fp: saved::SAME,
    extra: 0,
    cfa_offset: 8,
    ra_offset: -8,
    fp_offset: 0,
};
/// Most trampolines of one file; real ones have one.
const MAX_TRAMPOLINES: usize = 16;
/// Bytes at the entry point that are taken for its function, at most. The
/// loader's is the longest, with 80.
const ENTRY: u64 = 128;

/// Code and its rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recognized {
    /// Where the rule begins. For a trampoline one byte before its first, since
    /// the return address of the handler, which was not called from there, is
    /// looked up less one.
    pub(super) start: u64,
    /// Where it ends, unless something that is described begins before.
    pub(super) end: u64,
    pub(super) rule: Rule,
}

/// Finds such code in the executable segments `text`.
pub(super) fn find<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    text: &[(u64, u64)],
) -> Vec<Recognized> {
    let mut found = Vec::new();
    for &(start, end) in text {
        let Ok(code) = elf.bytes(start, end.saturating_sub(start)) else {
            continue;
        };
        find_in(elf.machine(), start, code, &mut found);
    }
    if elf.machine() == Machine::X86_64 {
        for &(start, end) in text {
            if let Ok(code) = elf.bytes(start, end.saturating_sub(start)) {
                found.extend(thread_start(start, code));
            }
        }
    }
    if elf.machine() == Machine::Aarch64 {
        for &(start, end) in text {
            if let Ok(code) = elf.bytes(start, end.saturating_sub(start)) {
                found.extend(leaves::stubs(start, code));
            }
        }
        found.extend(leaves::of_vdso(elf));
    }
    // Where linkers put nothing, or the first function of a library.
    let entry = elf.entry();
    let is_in = |&(start, end): &(u64, u64)| {
        (start..end).contains(&entry) && !found.iter().any(|it: &Recognized| it.start == entry)
    };
    if let Some((_, end)) = text.iter().copied().find(is_in) {
        found.push(Recognized {
            start: entry,
            end: entry.saturating_add(ENTRY).min(end),
            rule: Rule::END,
        });
    }
    found
}

fn find_in(machine: Machine, address: u64, code: &[u8], found: &mut Vec<Recognized>) {
    let (patterns, rule) = match machine {
        Machine::X86_64 => (X86_64.as_slice(), Rule::SIGNAL_X86_64),
        Machine::Aarch64 => (AARCH64.as_slice(), Rule::SIGNAL_AARCH64),
        Machine::Other(_) => return,
    };
    for pattern in patterns {
        let room = MAX_TRAMPOLINES.saturating_sub(found.len());
        let places = memmem::find_iter(code, pattern).map(|at| address.saturating_add(at as u64));
        let aligned = places.filter(|place| machine != Machine::Aarch64 || place % 4 == 0);
        found.extend(aligned.take(room).map(|place| Recognized {
            start: place.saturating_sub(1),
            end: place.saturating_add(pattern.len() as u64),
            rule,
        }));
    }
}

/// The end of `clone3`, if it is in there.
fn thread_start(address: u64, code: &[u8]) -> Option<Recognized> {
    let at = memmem::find(code, CLONE3)?;
    let function = code.get(at..)?;
    let returns = |&(offset, byte): &(usize, u8)| function.get(offset) == Some(&byte);
    CLONE3_RETURN.iter().all(returns).then(|| {
        let place = address.saturating_add(at as u64);
        Recognized {
            start: place.saturating_add(CLONE3_CALL),
            end: place.saturating_add(15),
            rule: UNTOUCHED_STACK,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_write_one_are_found() {
        let mut code = vec![0x90; 16];
        code.extend_from_slice(X86_64[0]);
        code.extend_from_slice(X86_64[1]);
        let mut found = Vec::new();
        find_in(Machine::X86_64, 0x1000, &code, &mut found);
        let places: Vec<_> = found.iter().map(|it| (it.start, it.end)).collect();
        assert_eq!(places, [(0x100f, 0x1019), (0x1018, 0x1020)]);
        assert!(found.iter().all(|it| it.rule == Rule::SIGNAL_X86_64));
    }

    #[test]
    fn the_start_of_a_thread_is_found_from_the_system_call_on() {
        let mut code = vec![0x90; 16];
        code.extend_from_slice(CLONE3);
        code.extend_from_slice(&[0x14, 0x74, 0x01, 0xc3, 0x31, 0xed]);
        let found = thread_start(0x1000, &code).unwrap();
        assert_eq!((found.start, found.end), (0x1015, 0x101f));
        // Something else may begin like it.
        for place in [28, 30] {
            let mut other = code.clone();
            other[place] ^= 1;
            assert_eq!(thread_start(0x1000, &other), None);
        }
        assert_eq!(thread_start(0x1000, &code[..29]), None);
    }

    #[test]
    fn an_arm64_instruction_is_aligned() {
        let mut code = vec![0; 2];
        code.extend_from_slice(AARCH64[0]);
        let mut found = Vec::new();
        find_in(Machine::Aarch64, 0x1000, &code, &mut found);
        assert!(found.is_empty());
        find_in(Machine::Aarch64, 0x1002, &code, &mut found);
        assert_eq!(found.len(), 1);
    }
}
