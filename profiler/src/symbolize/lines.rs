//! From the program counter to the line: Ruby's table of instruction positions.
//!
//! Positions are kept in a succinct bit vector (`struct succ_index_table` in
//! `iseq.c`, the same since 2.6): how many entries of `insns_info` begin at or
//! before a position is the number of the entry that covers it.
//!
//! - Positions below 54: the number itself, seven bits each, nine in a word.
//! - Positions from 54 on: blocks of 512, each with the number at its begin
//!   (`rank`), seven numbers of nine bits relative to that for its parts of 64
//!   positions (`small_block_ranks`), and one bit per position.

use rbprof_common::layout::NameLayout;

use super::evidence::Reader;
use super::evidence::Unreadable;
use super::iseq;
use crate::memory::TargetMemory;

/// Positions whose numbers are kept directly.
const IMMEDIATE: u64 = 54;
const IMMEDIATE_PER_WORD: u64 = 9;
const IMMEDIATE_BITS: u64 = 7;
/// `sizeof(imm_part)`.
const BLOCKS: u64 = IMMEDIATE / IMMEDIATE_PER_WORD * 8;
/// Positions in a block, and its size: rank, small ranks, bits.
const BLOCK: u64 = 512;
const BLOCK_BYTES: u64 = 8 + 8 + BLOCK / 8;
const SMALL_RANKS: u64 = 8;
const SMALL_RANK_BITS: u64 = 9;
const BITS: u64 = 16;

/// The line of a frame of the sequence at `address` whose next instruction is
/// at `pc`; `0` when Ruby has none.
pub(super) fn line<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    address: u64,
    pc: u64,
) -> Result<u32, Unreadable> {
    let (body, _, code) = iseq::code(reader, layout, address)?;
    if !code.contains(pc) {
        return Ok(0);
    }
    // The instruction under way is the one before the next.
    let position = (pc.wrapping_sub(code.start) / 8).saturating_sub(1);
    if position >= u64::from(code.words) {
        return Ok(0);
    }
    let entries = reader.word(body.wrapping_add(u64::from(layout.insns_info)))?;
    let count = reader.int(body.wrapping_add(u64::from(layout.insns_info_size)))?;
    let entry = match count {
        0 => return Ok(0),
        1 => 0,
        _ => {
            let table = reader.word(body.wrapping_add(u64::from(layout.succ_index_table)))?;
            let covering = rank(reader, table, position)?;
            if covering == 0 || covering > u64::from(count) {
                return Ok(0);
            }
            covering - 1
        }
    };
    let offset = entry.wrapping_mul(u64::from(layout.insn_info_entry));
    Ok(iseq::line_number(reader.int(entries.wrapping_add(offset))?))
}

/// How many entries begin at or before `position`.
fn rank<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    table: u64,
    position: u64,
) -> Result<u64, Unreadable> {
    let Some(position) = position.checked_sub(IMMEDIATE) else {
        let word = reader.word(table.wrapping_add(position / IMMEDIATE_PER_WORD * 8))?;
        let shift = position % IMMEDIATE_PER_WORD * IMMEDIATE_BITS;
        return Ok(word >> shift & ((1 << IMMEDIATE_BITS) - 1));
    };
    let block = table
        .wrapping_add(BLOCKS)
        .wrapping_add(position / BLOCK * BLOCK_BYTES);
    let (small, bit) = (position % BLOCK / 64, position % 64);
    let rank = reader.int(block)?;
    let small_rank = match small.checked_sub(1) {
        None => 0,
        Some(index) => {
            let ranks = reader.word(block.wrapping_add(SMALL_RANKS))?;
            ranks >> (index * SMALL_RANK_BITS) & ((1 << SMALL_RANK_BITS) - 1)
        }
    };
    let bits = reader.word(block.wrapping_add(BITS + small * 8))?;
    let up_to_here = bits << (63 - bit);
    Ok(u64::from(rank) + small_rank + u64::from(up_to_here.count_ones()))
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::LAYOUTS;
    use rbprof_common::layout::fixed;
    use rbprof_common::layout::imemo;
    use rbprof_common::layout::object_type;

    use super::super::test_memory::FakeMemory;
    use super::super::test_memory::of_release;
    use super::*;

    const ISEQ: u64 = 0x1000;
    const BODY: u64 = 0x2000;
    const TABLE: u64 = 0x3000;
    const ENTRIES: u64 = 0x10000;
    const CODE: u64 = 0x50000;

    /// A sequence of `words` words whose entries begin at `starts`, with a
    /// table written as `succ_index_table_create` does it.
    fn sequence(layout: &NameLayout, words: u64, starts: &[u64]) -> FakeMemory {
        let mut memory = FakeMemory::default();
        memory.map(ISEQ, 0x100);
        memory.map(BODY, 0x200);
        memory.map(TABLE, 0x2000);
        memory.map(ENTRIES, 0x20000);
        memory.put(ISEQ, object_type::IMEMO | imemo::ISEQ << 12);
        memory.put(ISEQ + u64::from(layout.iseq_body), BODY);
        memory.put(BODY, 1 | words << 32);
        memory.put(BODY + fixed::BODY_ENCODED, CODE);
        memory.put(BODY + u64::from(layout.insns_info), ENTRIES);
        memory.put(
            BODY + u64::from(layout.insns_info_size),
            starts.len() as u64,
        );
        memory.put(BODY + u64::from(layout.succ_index_table), TABLE);
        for (index, _) in starts.iter().enumerate() {
            let entry = ENTRIES + index as u64 * u64::from(layout.insn_info_entry);
            memory.put(entry, 100 + index as u64);
        }
        let upto = |position: u64| starts.iter().filter(|&&start| start <= position).count() as u64;
        for word in 0..6 {
            let ranks = (0..9).map(|slot| upto(word * 9 + slot) << (slot * 7));
            memory.put(TABLE + word * 8, ranks.sum());
        }
        let last = words.saturating_sub(IMMEDIATE).div_ceil(BLOCK);
        for block in 0..last {
            let base = IMMEDIATE + block * BLOCK;
            let before = upto(base - 1);
            let at = TABLE + 48 + block * 80;
            memory.put(at, before);
            let small =
                (1..8).map(|part| (upto(base + part * 64 - 1) - before) << ((part - 1) * 9));
            memory.put(at + 8, small.sum());
            for part in 0..8 {
                let bits = (0..64)
                    .filter(|bit| starts.contains(&(base + part * 64 + bit)))
                    .map(|bit| 1 << bit);
                memory.put(at + 16 + part * 8, bits.sum());
            }
        }
        memory
    }

    #[test]
    fn every_position_finds_the_entry_that_covers_it() {
        for layout in LAYOUTS.iter().map(|layout| &layout.names) {
            let words = 1500;
            let starts: Vec<u64> = (0..words)
                .filter(|at| at % 7 == 0 || at % 11 == 3)
                .collect();
            let memory = sequence(layout, words, &starts);
            for position in 0..words {
                let covering = starts.iter().filter(|&&start| start <= position).count();
                // Ranks of the immediate part have seven bits only.
                assert!(position >= IMMEDIATE || covering < 128);
                let pc = CODE + (position + 1) * 8;
                let found = line(&mut Reader::new(&memory), layout, ISEQ, pc);
                assert_eq!(found, Ok(100 + covering as u32 - 1), "at {position}");
            }
        }
    }

    #[test]
    fn a_single_entry_covers_everything_and_none_nothing() {
        let layout = &of_release(3, 1).names;
        let at = |memory: &FakeMemory, pc| line(&mut Reader::new(memory), layout, ISEQ, pc);
        let memory = sequence(layout, 10, &[0]);
        assert_eq!(at(&memory, CODE), Ok(100));
        assert_eq!(at(&memory, CODE + 80), Ok(100));
        assert_eq!(at(&memory, CODE + 88), Ok(0));
        assert_eq!(at(&memory, CODE - 8), Ok(0));
        let memory = sequence(layout, 10, &[]);
        assert_eq!(at(&memory, CODE), Ok(0));
    }

    #[test]
    fn a_table_that_points_past_the_entries_gives_no_line() {
        let layout = &of_release(3, 1).names;
        let mut memory = sequence(layout, 10, &[0, 5]);
        memory.put(TABLE, u64::MAX);
        let found = line(&mut Reader::new(&memory), layout, ISEQ, CODE + 8);
        assert_eq!(found, Ok(0));
    }
}
