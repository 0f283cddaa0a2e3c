//! Where rows are: in chunks of equal size, each of which is filled once, by one
//! table or several.

use std::time::Instant;

use rbprof_common::unwind::CHUNK_ROWS;
use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::Row;
use rbprof_common::walk::native::Page as Place;

use super::Maps;
use super::QUARANTINE;
use super::Table;

/// How a chunk is used.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// Tables that have rows in it.
    tables: u32,
    /// Not to be filled anew before that time.
    quarantine: Option<Instant>,
}

/// Which chunks exist, and the one that is being filled.
pub(super) struct Chunks {
    chunks: Vec<Use>,
    capacity: u32,
    /// The chunk that is not full yet, and its rows; nobody else has them.
    open: Option<(u32, Box<Chunk>, usize)>,
}

impl std::fmt::Debug for Chunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chunks")
            .field("chunks", &self.chunks.len())
            .finish_non_exhaustive()
    }
}

impl Chunks {
    pub(super) const fn new(capacity: u32) -> Self {
        Self {
            chunks: Vec::new(),
            capacity,
            open: None,
        }
    }

    pub(super) fn existing(&self) -> u32 {
        u32::try_from(self.chunks.len()).unwrap_or(u32::MAX)
    }

    /// Puts the rows of a table in place, with the rules' numbers in `numbers`.
    /// The chunks used, and where each page's rows are; `None` when there is no
    /// room.
    #[expect(clippy::type_complexity, reason = "said above")]
    pub(super) fn put<M: Maps>(
        &mut self,
        table: &Table,
        numbers: &[u16],
        maps: &mut M,
        now: Instant,
    ) -> Result<Option<(Vec<u32>, Vec<Place>)>, M::Error> {
        let mut used: Vec<u32> = Vec::new();
        let mut places = Vec::with_capacity(table.pages().len());
        for page in table.pages() {
            let rows = table.rows_of(*page);
            let fits = self
                .open
                .as_ref()
                .is_some_and(|(_, _, filled)| filled + rows.len() <= CHUNK_ROWS);
            if !fits {
                self.close(maps)?;
                let Some(number) = self.free(now) else {
                    self.give_back(&used, now);
                    return Ok(None);
                };
                self.open = Some((number, bytemuck::zeroed_box(), 0));
            }
            let Some((number, chunk, filled)) = &mut self.open else {
                return Ok(None);
            };
            if used.last() != Some(number) {
                used.push(*number);
                if let Some(chunk) = self.chunks.get_mut(*number as usize) {
                    chunk.tables += 1;
                }
            }
            let room = chunk.iter_mut().skip(*filled);
            for (place, row) in room.zip(rows) {
                *place = Row {
                    pc: row.pc,
                    rule: numbers.get(usize::from(row.rule)).copied().unwrap_or(0),
                };
            }
            // Both are below the size of a chunk.
            #[expect(clippy::cast_possible_truncation, reason = "said above")]
            places.push(Place {
                chunk: *number,
                first: *filled as u16,
                count: rows.len() as u16,
            });
            *filled += rows.len();
        }
        if let Some((number, chunk, _)) = &self.open {
            maps.set_chunk(*number, chunk)?;
        }
        Ok(Some((used, places)))
    }

    fn close<M: Maps>(&mut self, maps: &mut M) -> Result<(), M::Error> {
        match self.open.take() {
            Some((number, chunk, _)) => maps.set_chunk(number, &chunk),
            None => Ok(()),
        }
    }

    /// A chunk without rows.
    fn free(&mut self, now: Instant) -> Option<u32> {
        let free = self.chunks.iter().position(|chunk| {
            chunk.tables == 0 && chunk.quarantine.is_some_and(|until| until <= now)
        });
        let number = match free {
            Some(number) => number,
            None if self.chunks.len() < self.capacity as usize => {
                self.chunks.push(Use::default());
                self.chunks.len() - 1
            }
            None => return None,
        };
        if let Some(chunk) = self.chunks.get_mut(number) {
            chunk.quarantine = None;
        }
        u32::try_from(number).ok()
    }

    /// Takes back the rows of a table.
    pub(super) fn give_back(&mut self, used: &[u32], now: Instant) {
        for &number in used {
            if let Some(chunk) = self.chunks.get_mut(number as usize) {
                chunk.tables = chunk.tables.saturating_sub(1);
                if chunk.tables == 0 {
                    chunk.quarantine = Some(now + QUARANTINE);
                    if self.open.as_ref().is_some_and(|(open, ..)| *open == number) {
                        self.open = None;
                    }
                }
            }
        }
    }
}
