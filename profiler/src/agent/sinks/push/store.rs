//! What waits to be sent: in memory while the receiver answers, in the spill while it
//! does not.
//!
//! The oldest is sent first. What is in the spill is older than what is in memory. Once
//! more than may waits in memory, the oldest there goes into the spill, and without
//! one is dropped.

use std::collections::VecDeque;
use std::sync::Arc;

use super::item::Item;
use super::spill::Spill;
use super::spill::Taken;
use crate::agent::sinks::counters::Counters;

/// Where a request came from that is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Memory,
    Spill(u64),
}

#[derive(Debug)]
pub(super) struct Store {
    memory: VecDeque<Item>,
    memory_bytes: u64,
    /// In bytes.
    limit: u64,
    spill: Option<Spill>,
    current: Option<(Origin, Item)>,
    counters: Arc<Counters>,
}

impl Store {
    pub(super) fn new(limit: u64, spill: Option<Spill>, counters: Arc<Counters>) -> Self {
        let mut store = Self {
            memory: VecDeque::new(),
            memory_bytes: 0,
            limit,
            spill,
            current: None,
            counters,
        };
        // Its bound may be another than that of the agent before.
        store.shrink_spill();
        store.publish();
        store
    }

    /// Tells how much waits where.
    fn publish(&self) {
        let current = match &self.current {
            Some((Origin::Memory, item)) => (1, item.size()),
            _ => (0, 0),
        };
        let held = (
            self.memory.len() as u64 + current.0,
            self.memory_bytes + current.1,
        );
        let spilled = (self.spill.as_ref()).map_or((0, 0), |spill| (spill.count(), spill.bytes()));
        self.counters.update(|status| {
            status.held(held.0, held.1);
            (status.spill_queued, status.spill_bytes) = spilled;
        });
    }

    /// How many profiles are in memory only.
    pub(super) fn only_in_memory(&self) -> u64 {
        let current = matches!(self.current, Some((Origin::Memory, _)));
        self.memory.len() as u64 + u64::from(current)
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none()
            && self.memory.is_empty()
            && self.spill.as_ref().is_none_or(|spill| spill.count() == 0)
    }

    /// Whether there is a spill.
    pub(super) const fn has_spill(&self) -> bool {
        self.spill.is_some()
    }

    /// Adds a request; `away`: at once to the spill, if there is one.
    pub(super) fn push(&mut self, item: Item, away: bool) {
        if item.size() > self.limit {
            self.counters.update(|status| status.dropped.overflow += 1);
            self.counters
                .error(&format!("a profile of {} bytes is too large", item.size()));
            return;
        }
        self.memory_bytes += item.size();
        self.memory.push_back(item);
        let limit = if away && self.has_spill() {
            0
        } else {
            self.limit
        };
        self.limit_memory(limit);
        self.publish();
    }

    /// Puts everything into the spill that is only in memory, the request that is being
    /// sent as well.
    pub(super) fn spill_all(&mut self) {
        self.give_back(false);
        if self.has_spill() {
            self.limit_memory(0);
        }
        self.publish();
    }

    /// Moves the oldest from memory to the spill until no more than `to` is left, and
    /// drops what the spill does not take until no more than may waits.
    fn limit_memory(&mut self, to: u64) {
        let mut error = None;
        let (mut spilled, mut dropped) = (0, 0);
        while self.memory_bytes > to {
            let Some(item) = self.memory.pop_front() else {
                break;
            };
            let put = match (&mut self.spill, &error) {
                (Some(spill), None) => spill.put(&item),
                _ => Err(std::io::ErrorKind::Other.into()),
            };
            match put {
                Ok(()) => spilled += 1,
                Err(failed) => {
                    if self.has_spill() && error.is_none() {
                        error = Some(failed);
                    }
                    if self.memory_bytes <= self.limit {
                        self.memory.push_front(item);
                        break;
                    }
                    dropped += 1;
                }
            }
            self.memory_bytes -= item.size();
        }
        self.counters.update(|status| {
            status.spilled += spilled;
            status.dropped.overflow += dropped;
        });
        if let Some(error) = error {
            self.counters
                .error(&format!("cannot write to the spill: {error}"));
        } else if dropped > 0 {
            self.counters
                .error("no room in memory for what cannot be sent: profiles dropped");
        }
        self.shrink_spill();
    }

    fn shrink_spill(&mut self) {
        let keep = match &self.current {
            Some((Origin::Spill(turn), _)) => Some(*turn),
            _ => None,
        };
        let Some(spill) = &mut self.spill else { return };
        match spill.shrink(keep) {
            Ok(0) => {}
            Ok(removed) => {
                self.counters
                    .update(|status| status.dropped.spill_full += removed);
                self.counters
                    .error("no room in the spill: the oldest profiles dropped");
            }
            Err(error) => {
                self.counters
                    .update(|status| status.dropped.spill_full += 1);
                self.counters
                    .error(&format!("cannot remove from the spill: {error}"));
            }
        }
    }

    /// The oldest request of that format, which is being sent from now on. It must be
    /// answered by one of the methods below.
    pub(super) fn take(&mut self, format: &str) -> Option<Item> {
        self.give_back(false);
        while let Some(spill) = &mut self.spill {
            match spill.take() {
                Ok(Taken::Item(turn, item)) if item.head.format == format => {
                    self.current = Some((Origin::Spill(turn), item.clone()));
                    self.publish();
                    return Some(item);
                }
                Ok(Taken::Item(turn, item)) => {
                    let removed = spill.remove(turn);
                    self.counters.update(|status| status.dropped.corrupt += 1);
                    let format = &item.head.format;
                    self.counters.error(&format!(
                        "in the spill is a profile for {format:?}: dropped"
                    ));
                    self.count_unremoved(removed);
                }
                Ok(Taken::Corrupt) => {
                    self.counters.update(|status| status.dropped.corrupt += 1);
                    self.counters
                        .error("a file in the spill is not as it was written: dropped");
                }
                Ok(Taken::Nothing) => break,
                Err(error) => {
                    self.counters.update(|status| status.dropped.corrupt += 1);
                    self.counters
                        .error(&format!("cannot read from the spill: {error}"));
                }
            }
        }
        let item = self.memory.pop_front();
        if let Some(item) = &item {
            self.memory_bytes -= item.size();
            self.current = Some((Origin::Memory, item.clone()));
        }
        self.publish();
        item
    }

    fn count_unremoved(&self, removed: std::io::Result<()>) {
        if let Err(error) = removed {
            self.counters
                .error(&format!("cannot remove from the spill: {error}"));
        }
    }

    /// The size of the body that is being sent.
    pub(super) fn current_bytes(&self) -> u64 {
        (self.current.as_ref()).map_or(0, |(_, item)| item.body.len() as u64)
    }

    /// The request that was being sent needs not be sent again.
    pub(super) fn done(&mut self) {
        if let Some((Origin::Spill(turn), _)) = self.current.take()
            && let Some(spill) = &mut self.spill
        {
            let removed = spill.remove(turn);
            self.count_unremoved(removed);
        }
        self.publish();
    }

    /// The request that was being sent waits again: `last` says whether until all
    /// others had their turn.
    pub(super) fn give_back(&mut self, last: bool) {
        match self.current.take() {
            None => return,
            Some((Origin::Memory, item)) => {
                self.memory_bytes += item.size();
                if last {
                    self.memory.push_back(item);
                } else {
                    self.memory.push_front(item);
                }
                // Others have come since.
                self.limit_memory(self.limit);
            }
            Some((Origin::Spill(turn), _)) => {
                if last && let Some(spill) = &mut self.spill {
                    let moved = spill.put_back_last(turn);
                    self.count_unremoved(moved);
                }
            }
        }
        self.publish();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn store(limit: u64, spill: Option<&Path>) -> Store {
        let spill = spill.map(|path| Spill::open(path.join("spill"), 1 << 20, 1 << 20).unwrap());
        Store::new(limit, spill, Arc::new(Counters::new("test")))
    }

    fn drain(store: &mut Store) -> String {
        let mut bodies = String::new();
        while let Some(item) = store.take("test") {
            bodies.push_str(std::str::from_utf8(&item.body).unwrap());
            store.done();
        }
        assert!(store.is_empty());
        bodies
    }

    #[test]
    fn without_a_spill_the_oldest_is_dropped() {
        let mut store = store(3 * Item::of_text("a").size(), None);
        for text in ["a", "b", "c", "d", "e"] {
            store.push(Item::of_text(text), true);
        }
        let status = store.counters.get();
        assert_eq!((status.queued, status.dropped.overflow), (3, 2));
        store.spill_all();
        assert_eq!(store.only_in_memory(), 3);
        assert_eq!(drain(&mut store), "cde");
        store.push(Item::of_text(&"x".repeat(10_000)), false);
        assert_eq!(store.counters.get().dropped.overflow, 3, "too large");
        assert!(store.is_empty());
    }

    #[test]
    fn what_does_not_fit_goes_into_the_spill() {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(3 * Item::of_text("a").size(), Some(root.path()));
        for text in ["a", "b", "c", "d", "e"] {
            store.push(Item::of_text(text), false);
        }
        let status = store.counters.get();
        assert_eq!((status.queued, status.spill_queued), (3, 2));
        assert_eq!((status.spilled, status.dropped.total()), (2, 0));
        store.push(Item::of_text("f"), true);
        let status = store.counters.get();
        assert_eq!((status.queued, status.spill_queued), (0, 6));
        assert_eq!(drain(&mut store), "abcdef", "in the order of their age");
        let status = store.counters.get();
        assert_eq!((status.spill_queued, status.spill_bytes), (0, 0));
    }

    #[test]
    fn what_is_being_sent_is_not_lost() {
        let root = tempfile::tempdir().unwrap();
        let mut first = store(1 << 20, Some(root.path()));
        first.push(Item::of_text("a"), false);
        first.push(Item::of_text("b"), false);
        first.take("test").unwrap();
        assert_eq!(first.counters.get().queued, 2);
        first.spill_all();
        assert_eq!(
            (first.only_in_memory(), first.counters.get().queued),
            (0, 0)
        );
        first.take("test").unwrap();
        drop(first);
        let mut second = store(1 << 20, Some(root.path()));
        assert_eq!(second.counters.get().spill_queued, 2);
        second.take("test").unwrap();
        second.give_back(true);
        assert_eq!(drain(&mut second), "ba");
    }

    #[test]
    fn another_format_is_dropped() {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(1 << 20, Some(root.path()));
        store.push(Item::of_text("a"), true);
        assert_eq!(store.take("newer"), None);
        let status = store.counters.get();
        assert_eq!((status.dropped.corrupt, status.spill_queued), (1, 0));
    }

    #[test]
    fn a_spill_that_fails_leaves_all_in_memory() {
        let root = tempfile::tempdir().unwrap();
        let mut store = store(3 * Item::of_text("a").size(), Some(root.path()));
        std::fs::remove_dir_all(root.path().join("spill")).unwrap();
        for text in ["a", "b", "c", "d"] {
            store.push(Item::of_text(text), true);
        }
        let status = store.counters.get();
        assert_eq!((status.queued, status.dropped.overflow), (3, 1));
        let error = status.last_error.unwrap().text;
        assert!(error.contains("cannot write to the spill"), "{error}");
        assert_eq!(drain(&mut store), "bcd");
    }
}
