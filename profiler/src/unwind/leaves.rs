//! Code of arm64 that nothing describes, and whose return address is in the link
//! register all along, with the stack as its caller left it:
//!
//! - Linkage stubs, which linkers describe on x86-64 only.
//! - Those functions of the vDSO that neither call nor move the stack. The kernel
//!   describes it on x86-64 only, and a program that often looks at the clock is
//!   often in there.

use memchr::memmem;
use object::read::ReadRef;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::saved;

use crate::targets::elf::Elf;

use super::recognized::Recognized;

/// The rule for such code.
const LEAF: Rule = Rule {
    cfa: cfa::SP,
    ra: saved::SAME,
    fp: saved::SAME,
    extra: 0,
    cfa_offset: 0,
    ra_offset: 0,
    fp_offset: 0,
};
/// Bytes of an instruction.
const SIZE: u64 = 4;
/// `br x17`, with which a linkage stub ends.
const BRANCH: u32 = 0xd61f_0220;
/// What is before that, each with the bits that matter: the target's slot is
/// loaded, and its address is left for the loader.
const STUB: [(u32, u32); 3] = [
    // adrp x16, PAGE
    (0x9f00_001f, 0x9000_0010),
    // ldr x17, [x16, #OFFSET]
    (0xffc0_03ff, 0xf940_0211),
    // add x16, x16, #OFFSET
    (0xffc0_03ff, 0x9100_0210),
];
/// `bti c`, which may come first, where a jump may land.
const LANDING: u32 = 0xd503_245f;
/// The number of a register that stands for the stack pointer, and the link
/// register's.
const SP: u32 = 31;
const LR: u32 = 30;
/// The functions of the vDSO, but for its signal trampoline
/// (arch/arm64/kernel/vdso/vdso.lds.S).
const VDSO: [&[u8]; 4] = [
    b"__kernel_clock_gettime",
    b"__kernel_gettimeofday",
    b"__kernel_clock_getres",
    b"__kernel_getrandom",
];
/// Most bytes of one that are looked at; all together have two pages.
const MAX_FUNCTION: u64 = 1 << 14;

/// The linkage stubs in code at `address`, those side by side as one.
pub(super) fn stubs(address: u64, code: &[u8]) -> Vec<Recognized> {
    let mut found: Vec<Recognized> = Vec::new();
    for at in memmem::find_iter(code, &BRANCH.to_le_bytes()) {
        let place = address.saturating_add(at as u64);
        let Some(first) = at.checked_sub(STUB.len() * SIZE as usize) else {
            continue;
        };
        let words = code.get(first..at).unwrap_or_default();
        let mut both = instructions(words).zip(STUB);
        let is_stub = both.all(|(word, (mask, bits))| word & mask == bits);
        if !place.is_multiple_of(SIZE) || !is_stub {
            continue;
        }
        let before = first.checked_sub(SIZE as usize);
        let landing = before
            .and_then(|before| code.get(before..first))
            .is_some_and(|word| word == LANDING.to_le_bytes());
        let start = address + first as u64 - if landing { SIZE } else { 0 };
        let end = place.saturating_add(SIZE);
        match found.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => found.push(Recognized {
                start,
                end,
                rule: LEAF,
            }),
        }
    }
    found
}

/// The functions of the vDSO that are leaves.
pub(super) fn of_vdso<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Vec<Recognized> {
    let symbols = VDSO
        .iter()
        .filter_map(|name| elf.dynamic_symbol(name).ok().flatten());
    let mut leaves: Vec<_> = symbols
        .filter(|symbol| {
            let code = elf.bytes(symbol.value, symbol.size).unwrap_or_default();
            (1..=MAX_FUNCTION).contains(&symbol.size)
                && code.len() as u64 == symbol.size
                && !instructions(code).any(may_leave)
        })
        .map(|symbol| Recognized {
            start: symbol.value,
            end: symbol.value.saturating_add(symbol.size),
            rule: LEAF,
        })
        .collect();
    leaves.sort_by_key(|leaf| leaf.start);
    leaves
}

fn instructions(code: &[u8]) -> impl Iterator<Item = u32> {
    let (words, _) = code.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word))
}

/// Whether an instruction may change the stack pointer or the link register. The
/// classes are those of the Arm Architecture Reference Manual, C4.1.
fn may_leave(word: u32) -> bool {
    let field = |at: u32| word >> at & 31;
    let (destination, base) = (field(0), field(5));
    match word >> 25 & 15 {
        // Branches: with a link, to a register with a link, system calls. What
        // the others have in the place of a register is none.
        0b1010 | 0b1011 => {
            let with_link = word >> 26 == 0b10_0101;
            let register_with_link = word >> 25 == 0b110_1011 && word >> 21 & 7 == 1;
            // Reads of system registers have a destination.
            let reads_into_link = word >> 20 == 0xd53 && destination == LR;
            with_link || register_with_link || reads_into_link
        }
        // Loads and stores: of the register, of a pair's second, and writing the
        // base back.
        0b0100 | 0b0110 | 0b1100 | 0b1110 => {
            let pair = word >> 27 & 7 == 0b101;
            let writes_back = if pair {
                word >> 23 & 1 != 0
            } else {
                word >> 24 & 1 == 0 && word >> 21 & 1 == 0 && word >> 10 & 1 != 0
            };
            let into_link = destination == LR || pair && field(10) == LR;
            into_link || writes_back && base == SP
        }
        // Data processing with an immediate: those that add or combine can write
        // the stack pointer, unless they set the flags.
        0b1000 | 0b1001 => {
            let adds = word >> 23 & 7 == 0b010 && word >> 29 & 1 == 0;
            let combines = word >> 23 & 7 == 0b100 && word >> 29 & 3 != 3;
            destination == LR || destination == SP && (adds || combines)
        }
        // With registers: an addition of an extended one can.
        0b0101 | 0b1101 => {
            let adds_extended = word >> 21 & 0xff == 0b0101_1001 && word >> 29 & 1 == 0;
            destination == LR || destination == SP && adds_extended
        }
        // Vectors and floating point; `fmov` and the like can write x30.
        0b0111 | 0b1111 => destination == LR,
        // Reserved, or of extensions that are not known here.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn stubs_are_found_with_and_without_a_landing() {
        // Of a libruby: a header that keeps x30, and stubs.
        let stub = [0x9000_1e50, 0xf947_ee11, 0x913f_6210, BRANCH];
        let plain = code(&[&[0xa9bf_7bf0], &stub[..], &stub, &[0xd503_201f]].concat());
        assert_eq!(
            stubs(0x1000, &plain),
            [Recognized {
                start: 0x1004,
                end: 0x1024,
                rule: LEAF
            }]
        );
        let landing = code(&[&[LANDING], &stub[..], &[0xd503_201f, LANDING], &stub].concat());
        let found = stubs(0x1000, &landing);
        let places: Vec<_> = found.iter().map(|it| (it.start, it.end)).collect();
        assert_eq!(places, [(0x1000, 0x1014), (0x1018, 0x102c)]);
        // Another branch through x17; and less than a stub.
        assert!(
            stubs(
                0x1000,
                &code(&[0xd503_201f, 0xf947_ee11, 0x913f_6210, BRANCH])
            )
            .is_empty()
        );
        assert!(stubs(0x1000, &code(&[BRANCH])).is_empty());
    }

    #[test]
    fn what_calls_or_moves_the_stack_is_no_leaf() {
        for (word, what) in [
            (0x9400_0001, "bl"),
            (0xd63f_0020, "blr x1"),
            (0xd73f_0821, "blraa x1, x1"),
            (0xd100_83ff, "sub sp, sp, #32"),
            (0x9100_83ff, "add sp, sp, #32"),
            (0x927c_ec1f, "and sp, x0, #~15"),
            (0x8b21_63ff, "add sp, sp, x1"),
            (0xa9be_7bfd, "stp x29, x30, [sp, #-32]!"),
            (0xa8c2_7bfd, "ldp x29, x30, [sp], #32"),
            (0xf81f_0fe0, "str x0, [sp, #-16]!"),
            (0xf841_07e0, "ldr x0, [sp], #16"),
            (0xf940_07fe, "ldr x30, [sp, #8]"),
            (0xa940_7be1, "ldp x1, x30, [sp]"),
            (0xaa01_03fe, "mov x30, x1"),
            (0xd280_003e, "mov x30, #1"),
            (0xd53b_e05e, "mrs x30, cntvct_el0"),
            (0x9e66_001e, "fmov x30, d0"),
        ] {
            assert!(may_leave(word), "{what}");
        }
        for (word, what) in [
            (0x7100_3c1f, "cmp w0, #15"),
            (0x5400_05e8, "b.hi"),
            (0x17ff_ffde, "b, with bits like x30"),
            (0x3700_0526, "tbnz w6, #0"),
            (0xd53b_e042, "mrs x2, cntvct_el0"),
            (0x8b25_63e5, "add x5, sp, x5"),
            (0xf940_00bf, "ldr xzr, [x5]"),
            (0xa940_ac8c, "ldp x12, x11, [x4, #8]"),
            (0xa900_0025, "stp x5, x0, [x1]"),
            (0xf900_07e1, "str x1, [sp, #8]"),
            (0xd503_39bf, "dmb ishld"),
            (0xd400_0001, "svc #0"),
            (0xd65f_03c0, "ret"),
            (0xd61f_0220, "br x17"),
            (0xeb02_001f, "cmp x0, x2"),
            (0xca02_0045, "eor x5, x2, x2"),
        ] {
            assert!(!may_leave(word), "{what}");
        }
    }
}
