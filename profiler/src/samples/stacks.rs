//! The stacks the kernel half has sent, by id.

use std::collections::HashMap;
use std::sync::Arc;

use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_FRAMES;
use rbprof_common::wire::StackChunk;
use rbprof_common::wire::sample_flags;

use super::activations;

/// A stack as the kernel half sent it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    /// The process it was in.
    pub tgid: u32,
    /// [`sample_flags`] of the stack; without [`sample_flags::UNMATCHED`] if the
    /// frames could be put in order.
    pub flags: u32,
    /// Leaf first.
    pub frames: Arc<[Frame]>,
}

/// The frames of a stack in which native and Ruby frames have come apart, put
/// together again; `None` where there is nothing to do, or nothing can be done.
fn unite(flags: u32, frames: &[Frame]) -> Option<Vec<Frame>> {
    let cut = sample_flags::NATIVE_CUT
        | sample_flags::TRUNCATED
        | sample_flags::FAULT
        | sample_flags::UNKNOWN_FRAME;
    if flags & sample_flags::UNMATCHED == 0 || flags & cut != 0 {
        return None;
    }
    activations::reunite(frames)
}

/// Stacks by id, within a budget of frames. What is forgotten here must be
/// forgotten by the kernel half too, or its samples would be lost.
#[derive(Debug)]
pub struct StackTable {
    stacks: HashMap<u64, Entry>,
    /// Stacks of which some chunks have not come yet.
    partial: HashMap<u64, Vec<Frame>>,
    /// Frames in `stacks`.
    frames: usize,
    budget: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    stack: Stack,
    used: u64,
}

impl StackTable {
    /// A table that holds about `budget` frames (24 bytes each).
    #[must_use]
    pub fn new(budget: usize) -> Self {
        Self {
            stacks: HashMap::new(),
            partial: HashMap::new(),
            frames: 0,
            budget,
            clock: 0,
        }
    }

    /// Takes a chunk. `true` when it completes its stack.
    pub fn add(&mut self, chunk: &StackChunk, frames: &[Frame]) -> bool {
        let total = chunk.total as usize;
        if total > MAX_FRAMES {
            return false;
        }
        // Chunks come in order; when one was lost, the rest does not fit.
        let mut so_far = if chunk.first == 0 {
            Vec::with_capacity(total)
        } else {
            self.partial.remove(&chunk.stack).unwrap_or_default()
        };
        if so_far.len() != chunk.first as usize || so_far.len() + frames.len() > total {
            return false;
        }
        so_far.extend_from_slice(frames);
        if so_far.len() < total {
            self.partial.insert(chunk.stack, so_far);
            return false;
        }
        self.clock += 1;
        self.frames += so_far.len();
        let mut flags = chunk.flags;
        if let Some(united) = unite(flags, &so_far) {
            so_far = united;
            flags &= !sample_flags::UNMATCHED;
        }
        let stack = Stack {
            tgid: chunk.tgid,
            flags,
            frames: so_far.into(),
        };
        if let Some(old) = self.stacks.insert(
            chunk.stack,
            Entry {
                stack,
                used: self.clock,
            },
        ) {
            self.frames -= old.stack.frames.len();
        }
        true
    }

    /// The stack with this id.
    pub fn get(&mut self, id: u64) -> Option<&Stack> {
        self.clock += 1;
        let entry = self.stacks.get_mut(&id)?;
        entry.used = self.clock;
        Some(&entry.stack)
    }

    /// Whether the stack with this id is here.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.stacks.contains_key(&id)
    }

    /// Forgets the stacks that were not used for the longest time, if the table
    /// is over its budget, and tells which.
    pub fn shrink(&mut self) -> Vec<u64> {
        if self.frames <= self.budget {
            return Vec::new();
        }
        let mut by_age: Vec<(u64, u64)> = self
            .stacks
            .iter()
            .map(|(&id, entry)| (entry.used, id))
            .collect();
        by_age.sort_unstable();
        let mut gone = Vec::new();
        for (_, id) in by_age {
            if self.frames <= self.budget / 2 {
                break;
            }
            self.remove(id);
            gone.push(id);
        }
        gone
    }

    /// Forgets all stacks of a process, and tells which.
    pub fn forget_process(&mut self, tgid: u32) -> Vec<u64> {
        let gone: Vec<u64> = self
            .stacks
            .iter()
            .filter(|(_, entry)| entry.stack.tgid == tgid)
            .map(|(&id, _)| id)
            .collect();
        for &id in &gone {
            self.remove(id);
        }
        gone
    }

    fn remove(&mut self, id: u64) {
        if let Some(entry) = self.stacks.remove(&id) {
            self.frames -= entry.stack.frames.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(stack: u64, first: u32, count: u32, total: u32) -> (StackChunk, Vec<Frame>) {
        let head = StackChunk {
            tgid: 7,
            stack,
            first,
            count,
            total,
            ..StackChunk::default()
        };
        let frames = (first..first + count)
            .map(|n| Frame::new(1, u64::from(n), 0, 0))
            .collect();
        (head, frames)
    }

    fn add(table: &mut StackTable, stack: u64, first: u32, count: u32, total: u32) -> bool {
        let (head, frames) = chunk(stack, first, count, total);
        table.add(&head, &frames)
    }

    #[test]
    fn chunks_make_a_stack() {
        let mut table = StackTable::new(1 << 20);
        assert!(!add(&mut table, 5, 0, 2, 3));
        assert!(table.get(5).is_none());
        assert!(add(&mut table, 5, 2, 1, 3));
        let stack = table.get(5).unwrap();
        assert_eq!(stack.tgid, 7);
        assert_eq!(
            stack.frames.iter().map(Frame::iseq).collect::<Vec<_>>(),
            [0, 1, 2]
        );
    }

    #[test]
    fn a_stack_with_a_lost_chunk_is_not_made_up() {
        let mut table = StackTable::new(1 << 20);
        assert!(!add(&mut table, 5, 0, 2, 6));
        assert!(!add(&mut table, 5, 4, 2, 6));
        assert!(table.get(5).is_none());
        // Sent again, it is whole.
        assert!(!add(&mut table, 5, 0, 3, 6));
        assert!(add(&mut table, 5, 3, 3, 6));
        assert!(table.contains(5));
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut table = StackTable::new(10);
        for id in 0..4 {
            assert!(add(&mut table, id, 0, 3, 3));
        }
        assert!(table.get(0).is_some());
        assert_eq!(table.shrink(), [1, 2, 3]);
        assert!(table.contains(0));
        assert_eq!(table.shrink(), Vec::<u64>::new());
        assert_eq!(table.forget_process(7), [0]);
    }
}
