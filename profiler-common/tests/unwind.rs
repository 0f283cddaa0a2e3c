//! The search in unwind tables, and single steps over memory made up for it.

use std::collections::HashMap;

use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::Window;
use rbprof_common::unwind::CHUNK_ROWS;
use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::Entered;
use rbprof_common::unwind::MAX_PAGE_ROWS;
use rbprof_common::unwind::Registers;
use rbprof_common::unwind::Row;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::Stepped;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::find;
use rbprof_common::unwind::saved;
use rbprof_common::unwind::step;

/// Memory with just these words.
struct Words(HashMap<u64, u64>);

impl Memory for Words {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        self.0.get(&addr).copied().ok_or(Fault)
    }

    fn words3(&self, _: u64) -> Result<[u64; 3], Fault> {
        Err(Fault)
    }

    fn window(&self, _: u64, _: &mut Window, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }
}

fn words<const N: usize>(words: [(u64, u64); N]) -> Words {
    Words(HashMap::from(words))
}

const SP: u64 = 0x7000;
const FP: u64 = 0x7100;
const LR: u64 = 0x1234;

fn newest() -> Registers {
    Registers::newest(0x4000, SP, FP, 0, u64::MAX)
}

fn newest_arm64() -> Registers {
    Registers::newest(0x4000, SP, FP, LR, (1 << 48) - 1)
}

/// As compilers for x86-64 without frame pointers do it.
fn by_sp(offset: i32) -> Rule {
    Rule {
        cfa: cfa::SP,
        ra: saved::AT_CFA,
        cfa_offset: offset,
        ra_offset: -8,
        ..Rule::UNKNOWN
    }
}

fn chunk(rows: &[Row], first: usize) -> Box<Chunk> {
    // What is around them must not matter.
    let noise = Row { pc: 0, rule: 9999 };
    Box::new(std::array::from_fn(|n| {
        let row = n.checked_sub(first).and_then(|index| rows.get(index));
        row.copied().unwrap_or(noise)
    }))
}

#[test]
fn the_search_finds_the_last_row_at_or_before_a_pc() {
    let lengths = [1, 2, 3, 5, 8, 100, 4095, 4096, 4097, 8191, 8192];
    for (n, &length) in lengths.iter().enumerate() {
        let stride = (65536 / length) as u16;
        let rows: Vec<Row> = (0..length)
            .map(|index| Row {
                pc: (index as u16).wrapping_mul(stride),
                rule: index as u16,
            })
            .collect();
        for first in [0, 1, 777, CHUNK_ROWS - length] {
            let chunk = chunk(&rows, first);
            for pc in (0..=u16::MAX).step_by(1 + 7 * n) {
                let after = rows.partition_point(|row| row.pc <= pc);
                let found = find(&chunk, first as u32, length as u32, pc);
                assert_eq!(found, rows[after - 1].rule, "{pc:#x} of {length}");
            }
        }
    }
    assert_eq!(lengths.last(), Some(&(MAX_PAGE_ROWS as usize)));
}

#[test]
fn the_search_stays_in_its_chunk_whatever_it_is_asked() {
    let chunk = chunk(&[], 0);
    for first in [0, CHUNK_ROWS as u32 - 1, u32::MAX] {
        for count in [0, 1, MAX_PAGE_ROWS, u32::MAX] {
            assert_eq!(find(&chunk, first, count, u16::MAX), 9999);
        }
    }
}

#[test]
fn a_frame_by_the_stack_pointer() {
    let mut registers = newest();
    let rule = Rule {
        fp: saved::AT_CFA,
        fp_offset: -16,
        ..by_sp(32)
    };
    let memory = words([(SP + 24, 0x5000), (SP + 16, 0x7200)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.pc, registers.sp), (0x5000, SP + 32));
    assert_eq!((registers.fp, registers.fp_known), (0x7200, 1));
    // The call is what is looked up, not what follows it.
    assert_eq!((registers.exact, registers.lookup()), (0, 0x4fff));
    assert_eq!(newest().lookup(), 0x4000);
}

#[test]
fn a_frame_by_the_frame_pointer() {
    let mut registers = newest();
    let rule = Rule {
        cfa: cfa::FP,
        fp: saved::AT_FP,
        ..by_sp(16)
    };
    let memory = words([(FP + 8, 0x5000), (FP, 0x7200)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.sp, registers.fp), (FP + 16, 0x7200));
}

#[test]
fn a_frame_pointer_that_was_lost_is_not_used() {
    let mut registers = newest();
    let rule = Rule {
        fp: saved::LOST,
        ..by_sp(8)
    };
    let memory = words([(SP, 0x5000), (SP + 8, 0x5000), (FP + 8, 0x6000)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!(registers.fp_known, 0);
    let by_fp = Rule {
        cfa: cfa::FP,
        ..by_sp(16)
    };
    let before = registers;
    assert_eq!(step(&mut registers, &by_fp, &memory), Stepped::Unknown);
    assert_eq!(registers, before);
    assert_eq!(step(&mut registers, &by_sp(8), &memory), Stepped::Caller);
}

#[test]
fn a_frame_whose_address_is_in_memory() {
    // A function that aligned its stack: at fp - 8 is where it came from.
    let mut registers = newest();
    let rule = Rule {
        cfa: cfa::FP_DEREF,
        fp: saved::AT_FP,
        extra: 0,
        ..by_sp(-8)
    };
    let memory = words([(FP - 8, 0x7300), (0x72f8, 0x5000), (FP, 0x7400)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.sp, registers.fp), (0x7300, 0x7400));
    // As OpenSSL keeps its stack pointer: without the return address.
    let mut registers = newest();
    let rule = Rule {
        cfa: cfa::SP_DEREF,
        extra: 8,
        ..by_sp(40)
    };
    let memory = words([(SP + 40, 0x7300), (0x7300, 0x5000)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.sp, registers.pc), (0x7308, 0x5000));
}

#[test]
fn the_procedure_linkage_table_pushes_a_word() {
    let rule = Rule {
        cfa: cfa::PLT,
        extra: 11,
        ..by_sp(8)
    };
    let memory = words([(SP, 0x5000), (SP + 8, 0x6000)]);
    for (pc, caller, sp) in [
        (0x4000, 0x5000, SP + 8),
        (0x400a, 0x5000, SP + 8),
        (0x400b, 0x6000, SP + 16),
    ] {
        let mut registers = Registers { pc, ..newest() };
        assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
        assert_eq!((registers.pc, registers.sp), (caller, sp));
    }
}

#[test]
fn a_signal_on_x86_64() {
    // Returned to by the handler; on a stack of its own, above the other one.
    let mut registers = Registers {
        sp: 0x9000,
        exact: 0,
        ..newest()
    };
    let memory = words([(0x90a8, 0x4444), (0x90a0, SP), (0x9078, 0x7200)]);
    let rule = Rule::SIGNAL_X86_64;
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.pc, registers.sp), (0x4444, SP));
    assert_eq!((registers.fp, registers.fp_known), (0x7200, 1));
    // It stands there; nothing was called.
    assert_eq!(registers.lookup(), 0x4444);
}

#[test]
fn a_signal_on_arm64_gives_the_link_register_back() {
    let mut registers = Registers {
        sp: 0x9000,
        exact: 0,
        lr: 0,
        fp_known: 0,
        ..newest_arm64()
    };
    let memory = words([
        (0x9000 + 568, 0x4444),
        (0x9000 + 560, SP),
        (0x9000 + 552, LR),
        (0x9000 + 544, 0x7200),
    ]);
    let rule = Rule::SIGNAL_AARCH64;
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    let expected = Registers::newest(0x4444, SP, 0x7200, LR, (1 << 48) - 1);
    assert_eq!(registers, expected);
    // The interrupted function may be a leaf.
    let leaf = Rule {
        cfa: cfa::SP,
        ..Rule::UNKNOWN
    };
    assert_eq!(step(&mut registers, &leaf, &memory), Stepped::Caller);
    assert_eq!((registers.pc, registers.sp, registers.lr), (LR, SP, 0));
    // What called it is not.
    assert_eq!(step(&mut registers, &leaf, &memory), Stepped::Stuck);
}

#[test]
fn a_signed_return_address_is_stripped() {
    let mut registers = newest_arm64();
    let rule = Rule {
        fp: saved::AT_CFA,
        ra_offset: -24,
        fp_offset: -32,
        ..by_sp(32)
    };
    let memory = words([(SP + 8, 0x002a_0000_0000_5000), (SP, 0x7200)]);
    assert_eq!(step(&mut registers, &rule, &memory), Stepped::Caller);
    assert_eq!((registers.pc, registers.fp), (0x5000, 0x7200));
    // In the register, too.
    let mut registers = Registers {
        lr: 0x7f2a_0000_0000_5000,
        ..newest_arm64()
    };
    let leaf = Rule {
        cfa: cfa::SP,
        ..Rule::UNKNOWN
    };
    assert_eq!(step(&mut registers, &leaf, &memory), Stepped::Caller);
    assert_eq!(registers.pc, 0x5000);
}

#[test]
fn a_function_that_was_returned_into_has_no_caller() {
    const ENTRY: u64 = 0x5_0000;
    let at = |pc| Registers {
        pc,
        exact: 0,
        ..newest_arm64()
    };
    let after = |code: u64| words([(ENTRY - 4, 0xd503_233f_0000_0000 | code)]);
    let nop = 0xd503_201f;
    // Its return address is its own beginning, wherever in it the call is.
    for callee in [ENTRY, ENTRY + 4, ENTRY + 0x2000] {
        assert_eq!(at(ENTRY).entered(callee, &after(nop)), Entered::ByReturn);
    }
    // There is a call of something between the two: of the function itself.
    for call in [0x9400_0001, 0x9400_0002, 0x9400_0003] {
        assert_eq!(at(ENTRY).entered(ENTRY + 8, &after(call)), Entered::ByCall);
    }
    // Of something else, or of nobody knows what.
    for call in [
        0x9400_0000,
        0x9400_0004,
        0x97ff_ff00,
        0xd63f_0020,
        0xd73f_0821,
        0xd63f_083f,
    ] {
        assert_eq!(at(ENTRY).entered(ENTRY + 8, &after(call)), Entered::Unclear);
    }
    // A caller that is elsewhere, whatever is before it.
    for callee in [ENTRY - 1, ENTRY - 0x100, ENTRY + 0x1_0000] {
        assert_eq!(at(ENTRY).entered(callee, &after(nop)), Entered::ByCall);
    }
    // A signal handler returns into the trampoline.
    let trampoline = words([(ENTRY - 4, 0xd280_1168_0000_0000 | nop)]);
    assert_eq!(at(ENTRY).entered(ENTRY + 8, &trampoline), Entered::ByCall);
    // What a signal interrupted was not called there.
    let interrupted = Registers::newest(ENTRY, SP, FP, LR, (1 << 48) - 1);
    assert_eq!(interrupted.entered(ENTRY + 8, &after(nop)), Entered::ByCall);
    assert_eq!(at(ENTRY).entered(ENTRY + 8, &words([])), Entered::ByCall);
    // On x86-64 such a function's return address is 0.
    let x86 = Registers {
        code_mask: u64::MAX,
        ..at(ENTRY)
    };
    assert_eq!(x86.entered(ENTRY + 8, &after(nop)), Entered::ByCall);
}

#[test]
fn a_step_that_does_not_lead_to_a_caller_changes_nothing() {
    let lost_ra = Rule {
        ra: saved::LOST,
        ..by_sp(8)
    };
    let unreadable_fp = Rule {
        fp: saved::AT_SP,
        fp_offset: 0x500,
        ..by_sp(8)
    };
    let zero = by_sp(16);
    let memory = words([(SP, 0x5000), (SP + 8, 0)]);
    for (rule, expected) in [
        (Rule::UNKNOWN, Stepped::Unknown),
        (Rule::END, Stepped::End),
        (lost_ra, Stepped::Unknown),
        (unreadable_fp, Stepped::Unreadable),
        (by_sp(800), Stepped::Unreadable),
        (by_sp(-8), Stepped::Stuck),
        // Around the end of memory.
        (by_sp(i32::MIN), Stepped::Unreadable),
        // Where a thread begins, some C libraries put a 0.
        (zero, Stepped::End),
        (Rule::SIGNAL_X86_64, Stepped::Unreadable),
        (Rule { cfa: 99, ..zero }, Stepped::Unknown),
    ] {
        let mut registers = newest();
        assert_eq!(step(&mut registers, &rule, &memory), expected, "{rule:?}");
        assert_eq!(registers, newest());
    }
}

#[test]
fn a_caller_s_frame_moves_the_stack_pointer() {
    let mut registers = Registers {
        exact: 0,
        ..newest()
    };
    let memory = words([(SP - 8, 0x5000)]);
    assert_eq!(step(&mut registers, &by_sp(0), &memory), Stepped::Stuck);
    registers.exact = 1;
    assert_eq!(step(&mut registers, &by_sp(0), &memory), Stepped::Caller);
}

#[test]
fn any_rule_over_any_memory_ends() {
    // What a table, the registers or the memory hold is not to be trusted.
    struct Noise;
    impl Memory for Noise {
        fn word(&self, addr: u64) -> Result<u64, Fault> {
            Ok(addr.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        }
        fn words3(&self, _: u64) -> Result<[u64; 3], Fault> {
            Err(Fault)
        }
        fn window(&self, _: u64, _: &mut Window, _: usize) -> Result<(), Fault> {
            Err(Fault)
        }
    }
    for kind in 0..=u8::MAX {
        for place in 0..6 {
            for offset in [0, 8, -8, i32::MIN, i32::MAX] {
                for sp in [0, SP, u64::MAX] {
                    let rule = Rule {
                        cfa: kind,
                        ra: place,
                        fp: 5 - place,
                        extra: -128,
                        cfa_offset: offset,
                        ra_offset: offset,
                        fp_offset: offset,
                    };
                    let mut registers = Registers { sp, ..newest() };
                    if step(&mut registers, &rule, &Noise) == Stepped::Caller {
                        assert!(kind == cfa::SIGNAL || registers.sp >= sp);
                    }
                }
            }
        }
    }
}
