//! Target memory made up for tests, and a sink that keeps the frames.

use std::cell::Cell;
use std::collections::HashMap;

use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::Window;
use rbprof_common::walk::FrameSink;
use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_FRAMES;

/// Memory that answers word by word, and counts how often it is asked.
pub(crate) struct Words<F> {
    answer: F,
    pub(crate) reads: Cell<u64>,
}

impl<F: Fn(u64) -> Option<u64>> Words<F> {
    pub(crate) fn new(answer: F) -> Self {
        Self {
            answer,
            reads: Cell::new(0),
        }
    }

    fn get(&self, addr: u64) -> Result<u64, Fault> {
        (self.answer)(addr).ok_or(Fault)
    }
}

impl<F: Fn(u64) -> Option<u64>> Memory for Words<F> {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        self.reads.set(self.reads.get() + 1);
        self.get(addr)
    }

    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault> {
        self.reads.set(self.reads.get() + 1);
        let word = |n: u64| self.get(addr.checked_add(8 * n).ok_or(Fault)?);
        Ok([word(0)?, word(1)?, word(2)?])
    }

    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault> {
        self.reads.set(self.reads.get() + 1);
        for (n, word) in dst.iter_mut().take(words).enumerate() {
            *word = self.get(addr.checked_add(8 * n as u64).ok_or(Fault)?)?;
        }
        Ok(())
    }
}

/// Memory with just the words that were put there.
#[derive(Default)]
pub(crate) struct Sparse(pub(crate) HashMap<u64, u64>);

impl Sparse {
    pub(crate) fn put(&mut self, addr: u64, value: u64) {
        self.0.insert(addr, value);
    }

    pub(crate) fn memory(&self) -> Words<impl Fn(u64) -> Option<u64> + '_> {
        Words::new(|addr| self.0.get(&addr).copied())
    }
}

/// Keeps the frames, as many as the real sink does.
#[derive(Default)]
pub(crate) struct Frames(pub(crate) Vec<Frame>);

impl FrameSink for Frames {
    fn push(&mut self, frame: Frame) -> bool {
        if self.0.len() == MAX_FRAMES {
            return false;
        }
        self.0.push(frame);
        true
    }
}
