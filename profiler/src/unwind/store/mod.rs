//! Unwind tables where the walk finds them: which rows, pages, rules and
//! mappings are at which place.
//!
//! What a table needs is put in place from the inside out, and taken away from
//! the outside in. A place that was given back is not used again for a while,
//! since a walk may still be reading there ([`QUARANTINE`]).
//!
//! | module | what it does |
//! |---|---|
//! | `ranges` | places side by side, given out and taken back |
//! | `rules` | numbers of rules, shared by all files |
//! | `chunks` | where rows are |

mod chunks;
mod ranges;
mod rules;
#[cfg(test)]
pub(crate) mod tests;

use std::time::Duration;
use std::time::Instant;

use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::Rule;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::Page;

use self::chunks::Chunks;
use self::ranges::Ranges;
use self::rules::Rules;
use super::Table;

/// For how long a place that was given back is left alone: longer than any walk,
/// and than a forked child may need to become known.
pub const QUARANTINE: Duration = Duration::from_secs(5);

/// How much room there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Mappings of all processes.
    pub mappings: u32,
    /// Pages of text of all objects.
    pub pages: u32,
    /// Different rules.
    pub rules: u32,
    /// Chunks of rows.
    pub chunks: u32,
}

/// Where tables are put: the maps of the kernel half.
pub trait Maps {
    /// What can go wrong.
    type Error;

    /// How much room there is.
    fn limits(&self) -> Limits;
    /// Puts a mapping in its place.
    ///
    /// # Errors
    /// Those of the maps, here and below.
    fn set_mapping(&mut self, at: u32, mapping: &Mapping) -> Result<(), Self::Error>;
    /// Puts a page in its place.
    #[expect(clippy::missing_errors_doc, reason = "see above")]
    fn set_page(&mut self, at: u32, page: Page) -> Result<(), Self::Error>;
    /// Puts a rule in its place.
    #[expect(clippy::missing_errors_doc, reason = "see above")]
    fn set_rule(&mut self, number: u16, rule: &Rule) -> Result<(), Self::Error>;
    /// Puts rows in their place; those that were there and are in use must be
    /// the same.
    #[expect(clippy::missing_errors_doc, reason = "see above")]
    fn set_chunk(&mut self, number: u32, rows: &Chunk) -> Result<(), Self::Error>;
}

/// A table that is in place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// As in [`Mapping`].
    pub pages_at: u32,
    /// As in [`Mapping`].
    pub first_page: u32,
    /// As in [`Mapping`].
    pub pages: u32,
    /// Which chunks hold its rows.
    chunks: Vec<u32>,
}

/// There is no room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What is where.
#[derive(Debug)]
pub struct Store {
    mappings: Ranges,
    pages: Ranges,
    rules: Rules,
    chunks: Chunks,
}

impl Store {
    /// A store with so much room.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            mappings: Ranges::new(limits.mappings),
            pages: Ranges::new(limits.pages),
            rules: Rules::new(limits.rules),
            chunks: Chunks::new(limits.chunks),
        }
    }

    /// Puts a table in place. `Ok(Err(Full))` when there is no room.
    ///
    /// # Errors
    /// Those of the maps.
    pub fn place<M: Maps>(
        &mut self,
        table: &Table,
        maps: &mut M,
        now: Instant,
    ) -> Result<Result<Placed, Full>, M::Error> {
        let (Some(first), Some(last)) = (table.pages().first(), table.pages().last()) else {
            return Ok(Err(Full));
        };
        let first_page = first.number;
        let count = last.number - first_page + 1;
        let Some(pages_at) = self.pages.take(count, now) else {
            return Ok(Err(Full));
        };
        let numbers = self.rules.numbers(table.rules(), maps)?;
        let Some((chunks, places)) = self.chunks.put(table, &numbers, maps, now)? else {
            self.pages.give_back(pages_at, count, now);
            return Ok(Err(Full));
        };
        let mut next = pages_at;
        for (page, place) in table.pages().iter().zip(places) {
            // Pages between them that nothing describes.
            let at = pages_at + (page.number - first_page);
            for hole in next..at {
                maps.set_page(hole, Page::default())?;
            }
            maps.set_page(at, place)?;
            next = at + 1;
        }
        Ok(Ok(Placed {
            pages_at,
            first_page,
            pages: count,
            chunks,
        }))
    }

    /// Takes a table away to which no mapping refers any more.
    pub fn remove(&mut self, placed: &Placed, now: Instant) {
        self.pages.give_back(placed.pages_at, placed.pages, now);
        self.chunks.give_back(&placed.chunks, now);
    }

    /// Puts the mappings of a process in place; they must be in ascending order.
    /// `None` when there is no room.
    ///
    /// # Errors
    /// Those of the maps.
    pub fn place_mappings<M: Maps>(
        &mut self,
        mappings: &[Mapping],
        maps: &mut M,
        now: Instant,
    ) -> Result<Option<u32>, M::Error> {
        let Ok(count) = u32::try_from(mappings.len()) else {
            return Ok(None);
        };
        let Some(at) = self.mappings.take(count, now) else {
            return Ok(None);
        };
        for (place, mapping) in (at..).zip(mappings) {
            maps.set_mapping(place, mapping)?;
        }
        Ok(Some(at))
    }

    /// Takes the mappings of a process away.
    pub fn remove_mappings(&mut self, at: u32, count: u32, now: Instant) {
        self.mappings.give_back(at, count, now);
    }

    /// Chunks of rows that are in use or were, each of 64 KiB in the kernel.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks.existing()
    }
}
