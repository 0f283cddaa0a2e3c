//! Which methods a class has.

use rbprof_common::layout::ClassField;
use rbprof_common::layout::NameLayout;

use super::evidence::Reader;
use super::evidence::Unreadable;
use super::methods::Method;
use super::symbol_table::serial;
use crate::memory::TargetMemory;

/// `struct rb_id_table`: `capa`, and `items`.
const CAPACITY: u64 = 0;
const ITEMS: u64 = 16;
/// An item: the serial number of an ID, or 0; a flag; the value.
const ITEM: usize = 16;
const KEY_MASK: u64 = u32::MAX as u64;
/// Items of the largest table looked at.
const MAX_ITEMS: u32 = 1 << 16;
/// Items read at once.
const CHUNK: u32 = 256;

/// Checks that `class` has a method of the name that `method` was called by or
/// defined under.
pub(super) fn check<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    class: u64,
    method: &Method,
) -> Result<(), Unreadable> {
    let serials = [method.called_id, method.id].map(|id| serial(layout, id));
    if has_any(reader, layout, class, serials)? {
        return Ok(());
    }
    let origin = field(reader, layout.origin, class)?;
    if origin != class && origin != 0 && has_any(reader, layout, origin, serials)? {
        return Ok(());
    }
    Err(Unreadable)
}

fn field<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    field: ClassField,
    class: u64,
) -> Result<u64, Unreadable> {
    match field {
        ClassField::Direct(offset) => reader.word(class.wrapping_add(u64::from(offset))),
        ClassField::Behind { pointer, offset } => {
            let structure = reader.word(class.wrapping_add(u64::from(pointer)))?;
            reader.word(structure.wrapping_add(u64::from(offset)))
        }
    }
}

fn has_any<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    class: u64,
    serials: [u64; 2],
) -> Result<bool, Unreadable> {
    let table = field(reader, layout.method_table, class)?;
    if table == 0 {
        return Ok(false);
    }
    let items = reader.word(table.wrapping_add(ITEMS))?;
    let capacity = reader.peek_word(table.wrapping_add(CAPACITY))? as u32;
    if capacity > MAX_ITEMS {
        return Err(Unreadable);
    }
    let mut bytes = [0; CHUNK as usize * ITEM];
    let mut index = 0;
    while index < capacity {
        let count = (capacity - index).min(CHUNK);
        let bytes = bytes.get_mut(..count as usize * ITEM).ok_or(Unreadable)?;
        let mut item = items.wrapping_add(u64::from(index) * ITEM as u64);
        reader.peek(item, bytes)?;
        for key in bytes.chunks_exact(ITEM) {
            let key = key.first_chunk().map_or(0, |key| u32::from_le_bytes(*key));
            if key != 0 && serials.contains(&u64::from(key)) {
                // Again, for the notes.
                return Ok(reader.masked(item, KEY_MASK)? == u64::from(key));
            }
            item = item.wrapping_add(ITEM as u64);
        }
        index += count;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {

    use super::super::methods::Body;
    use super::super::test_memory::FakeMemory;
    use super::super::test_memory::of_release;
    use super::*;

    #[test]
    fn a_method_is_found_in_its_class_or_behind_what_was_prepended() {
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x4000);
        let (class, origin, table, items) = (0x1000, 0x1800, 0x2000, 0x3000);
        let layout = &of_release(3, 4).names;
        let ClassField::Direct(at) = layout.method_table else {
            panic!("another layout");
        };
        let ClassField::Direct(of_origin) = layout.origin else {
            panic!("another layout");
        };
        memory.put(class + u64::from(of_origin), origin);
        memory.put(class + u64::from(at), table);
        memory.put(table, 300);
        memory.put(table + ITEMS, items);
        memory.put(items + 299 * 16, 1 << 32 | 777);
        let method = |called_id, id| Method {
            body: Body::Other,
            called_id,
            id,
            owner: class,
        };
        let check =
            |memory: &FakeMemory, method| check(&mut Reader::new(memory), layout, class, &method);
        let (known, unknown) = (777 << 4 | 1, 778 << 4);
        assert_eq!(check(&memory, method(known, unknown)), Ok(()));
        assert_eq!(check(&memory, method(unknown, known)), Ok(()));
        assert_eq!(check(&memory, method(unknown, unknown)), Err(Unreadable));

        memory.put(class + u64::from(at), 0);
        assert_eq!(check(&memory, method(known, known)), Err(Unreadable));
        memory.put(origin + u64::from(at), table);
        assert_eq!(check(&memory, method(known, known)), Ok(()));
        memory.put(table, u64::MAX);
        assert_eq!(check(&memory, method(known, known)), Err(Unreadable));
    }
}
