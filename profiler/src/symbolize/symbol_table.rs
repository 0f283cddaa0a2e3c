//! Names of IDs, through Ruby's global symbol table.

use std::sync::Arc;

use rbprof_common::layout::NameLayout;
use rbprof_common::layout::Version;
use rbprof_common::layout::fixed;

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
/// First release whose table is made of other structures.
const OTHER_FORM: Version = Version::new(4, 1, 0);

/// The symbol table of a process.
#[derive(Debug)]
pub(super) struct SymbolTable {
    /// `ruby_global_symbols`, when it is known and of a known form.
    address: Option<u64>,
    names: Cache<u64, Arc<str>>,
}

impl SymbolTable {
    /// The table at `address`.
    pub(super) fn new(address: Option<u64>, version: Version) -> Self {
        Self {
            address: address.filter(|_| version < OTHER_FORM),
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
    let unit = arrays::element(reader, layout, units, serial / UNIT)?;
    let string = arrays::element(reader, layout, unit, serial % UNIT * 2)?;
    strings::text(reader, layout, string)
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::object_type;

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
        let version = Version::new(3, 2, 0);
        let mut table = SymbolTable::new(Some(0x1000), version);
        let mut name = |memory: &FakeMemory, id| table.name(&Reader::new(memory), layout, id);
        assert_eq!(name(&memory, 43), Ok(Some("+".into())));
        assert_eq!(name(&memory, 700 << 4 | 0xa), Ok(Some("f".into())));
        assert_eq!(name(&memory, 2000 << 4), Err(Unreadable));
        memory.unmap(0x4000);
        assert_eq!(name(&memory, 43), Ok(Some("+".into())));

        let mut none = SymbolTable::new(None, version);
        assert_eq!(none.name(&Reader::new(&memory), layout, 43), Ok(None));
    }
}
