//! Names of IDs, through Ruby's global symbol table.
//!
//! The table (`ruby_global_symbols.ids`) has a unit for every 512 serial
//! numbers. What it and its units are made of tells the objects' types:
//!
//! - up to 4.0, arrays: of units, and of the string and the symbol by turns;
//! - from 4.1 on, C structures kept as objects: a directory of units (in its
//!   first revisions still an array), and lists of `{ symbol, string }`.
//!   Source: what others read of revision a68e42cfad; **not proven on a live
//!   process**.

use std::sync::Arc;

use rbprof_common::layout::NameLayout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::object_type;

use super::arrays;
use super::cache::Cache;
use super::evidence::Reader;
use super::evidence::Unreadable;
use super::strings;
use crate::memory::TargetMemory;

/// Symbols in one array of the table.
const UNIT: u64 = 512;
/// Bits of an ID that is not an operator below its serial number.
const SCOPE_BITS: u32 = 4;
/// Names remembered.
const CAPACITY: usize = 1 << 14;
/// `RTypedData.type`, whose lowest bit says that the structure lies in the
/// object, and `RTypedData.data`, the structure then or else its address (4.1).
const DATA_TYPE: u64 = 24;
const DATA_EMBEDDED: u64 = 1;
const DATA: u64 = 32;
/// `struct id_entry_dir`: `capa`, and `entries`.
const DIRECTORY_CAPACITY: u64 = 0;
const DIRECTORY_ENTRIES: u64 = 8;
/// `rb_darray(sym_id_entry)`: `size`, and the entries behind `capa`.
const LIST_SIZE: u64 = 0;
const LIST_ENTRIES: u64 = 16;
/// `sym_id_entry`: its size, and `str`.
const ENTRY: u64 = 16;
const ENTRY_STRING: u64 = 8;

/// The symbol table of a process.
#[derive(Debug)]
pub(super) struct SymbolTable {
    /// `ruby_global_symbols`, when it is known.
    address: Option<u64>,
    names: Cache<u64, Arc<str>>,
}

impl SymbolTable {
    /// The table at `address`.
    pub(super) fn new(address: Option<u64>) -> Self {
        Self {
            address,
            names: Cache::new(CAPACITY),
        }
    }

    /// The name of `id`, or `None` when there is no table to look it up in.
    ///
    /// An ID keeps its name for as long as the process lives, and Ruby never
    /// gives its number to another: what was read once needs no evidence.
    pub(super) fn name<M: TargetMemory>(
        &mut self,
        reader: &Reader<'_, M>,
        layout: &NameLayout,
        id: u64,
    ) -> Result<Option<Arc<str>>, Unreadable> {
        let Some(table) = self.address else {
            return Ok(None);
        };
        if let Some(name) = self.names.get(id) {
            return Ok(Some(name));
        }
        let name = read_name(&mut reader.aside(), layout, table, id)?;
        self.names.insert(id, Arc::clone(&name));
        Ok(Some(name))
    }
}

/// The serial number of an ID.
pub(super) fn serial(layout: &NameLayout, id: u64) -> u64 {
    if id > layout.last_operator_id {
        id >> SCOPE_BITS
    } else {
        id
    }
}

/// The name of `id` in the table at `table`.
pub(super) fn read_name<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    table: u64,
    id: u64,
) -> Result<Arc<str>, Unreadable> {
    let serial = serial(layout, id);
    let units = reader.word(table.wrapping_add(fixed::SYMBOLS_IDS))?;
    let unit = match object_type(reader, units)? {
        object_type::ARRAY => arrays::element(reader, layout, units, serial / UNIT)?,
        object_type::DATA => directory_unit(reader, units, serial / UNIT)?,
        _ => return Err(Unreadable),
    };
    let string = match object_type(reader, unit)? {
        object_type::ARRAY => arrays::element(reader, layout, unit, serial % UNIT * 2)?,
        object_type::DATA => list_string(reader, unit, serial % UNIT)?,
        _ => return Err(Unreadable),
    };
    strings::text(reader, layout, string)
}

fn object_type<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    object: u64,
) -> Result<u64, Unreadable> {
    reader.masked(object, object_type::MASK)
}

/// The C structure that an object keeps.
fn structure<M: TargetMemory>(reader: &mut Reader<'_, M>, object: u64) -> Result<u64, Unreadable> {
    let data = object.wrapping_add(DATA);
    if reader.word(object.wrapping_add(DATA_TYPE))? & DATA_EMBEDDED == 0 {
        reader.word(data)
    } else {
        Ok(data)
    }
}

/// The unit at `index` of a directory.
fn directory_unit<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    object: u64,
    index: u64,
) -> Result<u64, Unreadable> {
    let directory = structure(reader, object)?;
    if index >= reader.word(directory.wrapping_add(DIRECTORY_CAPACITY))? {
        return Err(Unreadable);
    }
    let entries = reader.word(directory.wrapping_add(DIRECTORY_ENTRIES))?;
    reader.word(entries.wrapping_add(index.wrapping_mul(8)))
}

/// The string at `index` of a unit that is a list.
fn list_string<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    object: u64,
    index: u64,
) -> Result<u64, Unreadable> {
    let list = structure(reader, object)?;
    if index >= reader.word(list.wrapping_add(LIST_SIZE))? {
        return Err(Unreadable);
    }
    let entry = list
        .wrapping_add(LIST_ENTRIES)
        .wrapping_add(index.wrapping_mul(ENTRY));
    reader.word(entry.wrapping_add(ENTRY_STRING))
}

#[cfg(test)]
mod tests {
    use super::super::test_memory::FakeMemory;
    use super::super::test_memory::of_release;
    use super::*;

    #[test]
    fn operators_and_other_ids_are_found_by_their_serial_number() {
        let layout = &of_release(3, 2).names;
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x20);
        memory.map(0x2000, 0x40);
        memory.map(0x3000, 0x40);
        memory.map(0x4000, 0x3000);
        memory.map(0x8000, 0x100);
        memory.put(0x1010, 0x2000);
        memory.put(0x2000, object_type::ARRAY | 1 << 13 | 2 << 15);
        memory.put(0x2010, 0x3000);
        memory.put(0x2018, 0x3000);
        memory.put(0x3000, object_type::ARRAY);
        memory.put(0x3010, 1024);
        memory.put(0x3020, 0x4000);
        memory.put(0x4000 + 43 * 16, 0x8000);
        memory.put(0x4000 + (700 - 512) * 16, 0x8040);
        for (at, name) in [(0x8000, b"+"), (0x8040, b"f")] {
            memory.put(at, object_type::STRING);
            memory.put(at + 16, 1);
            memory.put_bytes(at + 24, name);
        }
        let mut table = SymbolTable::new(Some(0x1000));
        let mut name = |memory: &FakeMemory, id| table.name(&Reader::new(memory), layout, id);
        assert_eq!(name(&memory, 43), Ok(Some("+".into())));
        assert_eq!(name(&memory, 700 << 4 | 0xa), Ok(Some("f".into())));
        assert_eq!(name(&memory, 2000 << 4), Err(Unreadable));
        memory.unmap(0x4000);
        assert_eq!(name(&memory, 43), Ok(Some("+".into())));

        let mut none = SymbolTable::new(None);
        assert_eq!(none.name(&Reader::new(&memory), layout, 43), Ok(None));
    }

    /// A table as of 4.1, with two units of which the first has 300 entries and
    /// the second all 512: 43 is `+`, and 700 is `f`.
    fn directory(ids_are_array: bool, embedded: bool) -> FakeMemory {
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x20);
        memory.map(0x2000, 0x40);
        memory.map(0x2800, 0x40);
        memory.map(0x3000, 0x4000);
        memory.map(0x8000, 0x4000);
        memory.map(0xd000, 0x100);
        memory.put(0x1000, 900);
        memory.put(0x1010, 0x2000);
        let units = [0x3000, 0x8000];
        if ids_are_array {
            memory.put(0x2000, object_type::ARRAY | 1 << 13 | 2 << 15);
            memory.put(0x2010, units[0]);
            memory.put(0x2018, units[1]);
        } else {
            memory.put(0x2000, object_type::DATA);
            memory.put(0x2000 + 24, u64::from(embedded));
            let at = if embedded { 0x2020 } else { 0x2820 };
            memory.put(0x2020, at);
            memory.put(at, 2);
            memory.put(at + 8, 0x2800);
            memory.put(0x2800, units[0]);
            memory.put(0x2808, units[1]);
        }
        for (unit, size, index, string) in [
            (units[0], 300, 43, 0xd000),
            (units[1], 512, 700 - 512, 0xd040),
        ] {
            memory.put(unit, object_type::DATA);
            memory.put(unit + 24, 0x7f00_0000_0000);
            let list = unit + 0x100;
            memory.put(unit + 32, list);
            memory.put(list, size);
            memory.put(list + 8, 512);
            memory.put(list + 16 + index * 16, 0xbad);
            memory.put(list + 16 + index * 16 + 8, string);
        }
        for (at, name) in [(0xd000, b"+"), (0xd040, b"f")] {
            memory.put(at, object_type::STRING);
            memory.put(at + 16, 1);
            memory.put_bytes(at + 24, name);
        }
        memory
    }

    #[test]
    fn the_table_of_4_1_is_found_by_what_it_is_made_of() {
        let layout = &of_release(4, 1).names;
        for (ids_are_array, embedded) in [(true, false), (false, false), (false, true)] {
            let memory = directory(ids_are_array, embedded);
            let name = |id| read_name(&mut Reader::new(&memory), layout, 0x1000, id);
            assert_eq!(name(43), Ok("+".into()));
            assert_eq!(name(174), Err(Unreadable), "no string there");
            assert_eq!(name(175 << 4), Err(Unreadable), "no string there");
            assert_eq!(name(700 << 4 | 0xa), Ok("f".into()));
            assert_eq!(name(301 << 4), Err(Unreadable), "past the list's end");
            assert_eq!(name(1024 << 4), Err(Unreadable), "past the directory's end");
            assert_eq!(name(u64::MAX), Err(Unreadable));
        }
        let mut memory = directory(false, false);
        for kind in [0, object_type::STRING, object_type::CLASS] {
            memory.put(0x8000, kind);
            let found = read_name(&mut Reader::new(&memory), layout, 0x1000, 700 << 4);
            assert_eq!(found, Err(Unreadable));
        }
    }
}
