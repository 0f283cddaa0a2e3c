//! Places side by side, given out and taken back.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::Instant;

use super::QUARANTINE;

/// Places `0..capacity`, given out in stretches.
#[derive(Debug)]
pub(super) struct Ranges {
    /// Free stretches: where, and how long.
    free: BTreeMap<u32, u32>,
    /// Given back, but not to be used before that time.
    quarantine: VecDeque<(Instant, u32, u32)>,
}

impl Ranges {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            free: BTreeMap::from([(0, capacity)]),
            quarantine: VecDeque::new(),
        }
    }

    /// A stretch of `count` places: the first that is long enough.
    pub(super) fn take(&mut self, count: u32, now: Instant) -> Option<u32> {
        self.release(now);
        if count == 0 {
            return None;
        }
        let (&at, &len) = self.free.iter().find(|(_, len)| **len >= count)?;
        self.free.remove(&at);
        if len > count {
            self.free.insert(at + count, len - count);
        }
        Some(at)
    }

    pub(super) fn give_back(&mut self, at: u32, count: u32, now: Instant) {
        if count != 0 {
            self.quarantine.push_back((now + QUARANTINE, at, count));
        }
    }

    /// Frees what has been in quarantine for long enough.
    fn release(&mut self, now: Instant) {
        while let Some(&(until, mut at, mut count)) = self.quarantine.front() {
            if until > now {
                break;
            }
            self.quarantine.pop_front();
            if let Some((&before, &len)) = self.free.range(..at).next_back()
                && before + len == at
            {
                self.free.remove(&before);
                at = before;
                count += len;
            }
            if let Some(len) = self.free.remove(&(at + count)) {
                count += len;
            }
            self.free.insert(at, count);
        }
    }
}
