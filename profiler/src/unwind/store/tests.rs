//! Tests of the store.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Rule;
use rbprof_common::walk::native;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::NoRule;
use rbprof_common::walk::native::Page;
use rbprof_common::walk::native::Tables;

use super::Full;
use super::Limits;
use super::Maps;
use super::Placed;
use super::QUARANTINE;
use super::Store;
use crate::targets::elf::Elf;
use crate::targets::elf::file_cache;
use crate::unwind;
use crate::unwind::Table;

/// Maps in memory.
pub(crate) struct InMemory {
    limits: Limits,
    mappings: HashMap<u32, Mapping>,
    pages: HashMap<u32, Page>,
    rules: HashMap<u16, Rule>,
    chunks: HashMap<u32, Box<Chunk>>,
}

impl InMemory {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            mappings: HashMap::new(),
            pages: HashMap::new(),
            rules: HashMap::from([(0, Rule::UNKNOWN)]),
            chunks: HashMap::new(),
        }
    }
}

impl Maps for InMemory {
    type Error = Infallible;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn set_mapping(&mut self, at: u32, mapping: &Mapping) -> Result<(), Infallible> {
        assert!(at < self.limits.mappings);
        self.mappings.insert(at, *mapping);
        Ok(())
    }

    fn set_page(&mut self, at: u32, page: Page) -> Result<(), Infallible> {
        assert!(at < self.limits.pages);
        self.pages.insert(at, page);
        Ok(())
    }

    fn set_rule(&mut self, number: u16, rule: &Rule) -> Result<(), Infallible> {
        assert!(u32::from(number) < self.limits.rules);
        assert_eq!(self.rules.insert(number, *rule), None);
        Ok(())
    }

    fn set_chunk(&mut self, number: u32, rows: &Chunk) -> Result<(), Infallible> {
        assert!(number < self.limits.chunks);
        let mut copy: Box<Chunk> = bytemuck::zeroed_box();
        copy.copy_from_slice(rows);
        self.chunks.insert(number, copy);
        Ok(())
    }
}

impl Tables for InMemory {
    fn mapping(&self, at: u32) -> Option<&Mapping> {
        self.mappings.get(&at)
    }

    fn page(&self, at: u32) -> Option<Page> {
        self.pages.get(&at).copied()
    }

    fn chunk(&self, number: u32) -> Option<&Chunk> {
        self.chunks.get(&number).map(|chunk| &**chunk)
    }

    fn rule(&self, number: u16) -> Option<&Rule> {
        self.rules.get(&number)
    }
}

pub(crate) const LIMITS: Limits = Limits {
    mappings: 64,
    pages: 1 << 12,
    rules: 1 << 12,
    chunks: 512,
};

/// The tables of libraries that this test has mapped itself, and so of different
/// sizes.
fn tables() -> Vec<Table> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains(" r-xp "))
        .filter_map(|line| line.split_once('/'))
        .map(|(head, _)| &maps[head.as_ptr() as usize - maps.as_ptr() as usize + head.len()..])
        .filter_map(|rest| rest.lines().next())
        .collect();
    paths.sort_unstable();
    paths.dedup();
    let tables: Vec<Table> = paths
        .iter()
        .map(|path| {
            let file = file_cache(File::open(path).unwrap());
            unwind::compile(&Elf::parse(&file).unwrap(), None).unwrap()
        })
        .collect();
    assert!(tables.len() >= 3, "{paths:?}");
    tables
}

fn mapping(placed: &Placed) -> Mapping {
    Mapping {
        start: 0,
        end: u64::MAX >> 8,
        pages_at: placed.pages_at,
        first_page: placed.first_page,
        pages: placed.pages,
        ..Mapping::default()
    }
}

/// All rules of a table are found where it was put.
fn assert_in_place(table: &Table, placed: &Placed, maps: &InMemory) {
    let mapping = mapping(placed);
    for page in table.pages() {
        let start = u64::from(page.number) * PAGE;
        for row in table.rows_of(*page).iter().step_by(7) {
            for address in [start + u64::from(row.pc), start + u64::from(row.pc) + 1] {
                let found = native::rule_for(maps, &mapping, address).unwrap();
                assert_eq!(*found, table.rule(address), "{address:x}");
            }
        }
    }
}

#[test]
fn tables_are_found_where_they_were_put() {
    let mut maps = InMemory::new(LIMITS);
    let mut store = Store::new(LIMITS);
    let now = Instant::now();
    let tables = tables();
    let placed: Vec<Placed> = tables
        .iter()
        .map(|table| store.place(table, &mut maps, now).unwrap().unwrap())
        .collect();
    for (table, placed) in tables.iter().zip(&placed) {
        assert_in_place(table, placed, &maps);
        let last = u64::from(placed.first_page + placed.pages) * PAGE;
        let nowhere = native::rule_for(&maps, &mapping(placed), last);
        assert_eq!(nowhere, Err(NoRule::Row));
    }
    // Small ones share a chunk.
    let rows: usize = tables.iter().map(|table| table.rows().len()).sum();
    let chunks = store.chunks() as usize;
    assert!(chunks <= rows / (1 << 13) + 2, "{chunks} for {rows} rows");
}

#[test]
fn places_are_used_again_but_not_at_once() {
    let tables = tables();
    let table = tables.iter().max_by_key(|it| it.rows().len()).unwrap();
    let mut maps = InMemory::new(LIMITS);
    let mut store = Store::new(LIMITS);
    let mut now = Instant::now();
    let first = store.place(table, &mut maps, now).unwrap().unwrap();
    let chunks = store.chunks();
    store.remove(&first, now);
    let second = store.place(table, &mut maps, now).unwrap().unwrap();
    assert_ne!(first.pages_at, second.pages_at, "a walk may be there");
    assert_in_place(table, &second, &maps);
    store.remove(&second, now);
    now += QUARANTINE + Duration::from_millis(1);
    for _ in 0..10 {
        let again = store.place(table, &mut maps, now).unwrap().unwrap();
        assert_in_place(table, &again, &maps);
        store.remove(&again, now);
        now += QUARANTINE + Duration::from_millis(1);
    }
    assert!(
        store.chunks() <= 2 * chunks,
        "{} > {chunks}",
        store.chunks()
    );
}

#[test]
fn what_has_no_room_is_refused_and_leaves_nothing_behind() {
    let tables = tables();
    let table = tables.iter().max_by_key(|it| it.rows().len()).unwrap();
    let pages = u32::try_from(table.pages().len()).unwrap();
    for limits in [
        Limits {
            chunks: 1,
            ..LIMITS
        },
        Limits {
            pages: pages / 2,
            ..LIMITS
        },
    ] {
        let mut maps = InMemory::new(limits);
        let mut store = Store::new(limits);
        let mut now = Instant::now();
        for _ in 0..3 {
            assert_eq!(store.place(table, &mut maps, now).unwrap(), Err(Full));
            now += QUARANTINE + Duration::from_millis(1);
        }
        let small = tables.iter().min_by_key(|it| it.rows().len()).unwrap();
        let placed = store.place(small, &mut maps, now).unwrap().unwrap();
        assert_in_place(small, &placed, &maps);
    }
    // Without room for rules, nothing is claimed that is not so.
    let limits = Limits { rules: 8, ..LIMITS };
    let mut maps = InMemory::new(limits);
    let placed = Store::new(limits).place(table, &mut maps, Instant::now());
    let mapping = mapping(&placed.unwrap().unwrap());
    let mut known = 0;
    for page in table.pages() {
        for row in table.rows_of(*page) {
            let address = u64::from(page.number) * PAGE + u64::from(row.pc);
            let rule = *native::rule_for(&maps, &mapping, address).unwrap();
            assert!(rule == Rule::UNKNOWN || rule == table.rule(address));
            known += usize::from(rule != Rule::UNKNOWN);
        }
    }
    assert!(known > 0);
}

#[test]
fn a_mapping_is_found_by_any_address_in_it() {
    let mut maps = InMemory::new(LIMITS);
    let mut store = Store::new(LIMITS);
    let now = Instant::now();
    for count in [1_u64, 2, 3, 7, 16] {
        let pieces: Vec<Mapping> = (1..=count)
            .map(|piece| Mapping {
                start: piece * 0x10_0000,
                end: piece * 0x10_0000 + 0x8000 * piece,
                object: u32::try_from(piece).unwrap(),
                ..Mapping::default()
            })
            .collect();
        let at = store
            .place_mappings(&pieces, &mut maps, now)
            .unwrap()
            .unwrap();
        let len = u32::try_from(count).unwrap();
        for piece in &pieces {
            for address in [piece.start, piece.start + 0x123, piece.end - 1] {
                assert_eq!(native::locate(&maps, at, len, address), Some(piece));
            }
            for address in [piece.start - 1, piece.end] {
                let found = native::locate(&maps, at, len, address);
                assert!(found.is_none_or(|it| it.contains(address)), "{address:x}");
            }
        }
        assert_eq!(native::locate(&maps, at, len, 0), None);
        assert_eq!(native::locate(&maps, at, len, u64::MAX), None);
        assert_eq!(native::locate(&maps, at, 0, pieces[0].start), None);
    }
    let many = vec![Mapping::default(); 64];
    assert_eq!(store.place_mappings(&many, &mut maps, now), Ok(None));
    assert_eq!(store.place_mappings(&[], &mut maps, now), Ok(None));
}
