//! Elements of Ruby arrays.

use rbprof_common::layout::Embedding;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::object_type;

use super::evidence::Reader;
use super::evidence::Unreadable;
use crate::memory::TargetMemory;

/// `RARRAY_EMBED_FLAG`.
const EMBED: u64 = 1 << 13;
/// `RARRAY_EMBED_LEN_MASK`: two bits up to 3.1, seven from 3.2 on.
const EMBED_LEN_SHIFT: u32 = 15;
/// `RArray.len`, and where embedded elements begin.
const LEN: u64 = 16;
/// `RArray.as.heap.ptr`.
const POINTER: u64 = 32;

/// The element at `index` of the array at `array`.
pub(super) fn element<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    array: u64,
    index: u64,
) -> Result<u64, Unreadable> {
    let flags = reader.masked(array, object_type::MASK | EMBED)?;
    if flags & object_type::MASK != object_type::ARRAY {
        return Err(Unreadable);
    }
    let (len, data) = if flags & EMBED == 0 {
        (
            reader.word(array.wrapping_add(LEN))?,
            reader.word(array.wrapping_add(POINTER))?,
        )
    } else {
        let mask = match layout.embedding {
            Embedding::Fixed => 0x3 << EMBED_LEN_SHIFT,
            Embedding::Variable => 0x7f << EMBED_LEN_SHIFT,
        };
        let len = reader.masked(array, mask)? >> EMBED_LEN_SHIFT;
        (len, array.wrapping_add(LEN))
    };
    if index >= len {
        return Err(Unreadable);
    }
    reader.word(data.wrapping_add(index.wrapping_mul(8)))
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::LAYOUTS;

    use super::super::test_memory::FakeMemory;
    use super::*;

    #[test]
    fn embedded_and_heap_arrays_within_their_bounds() {
        for layout in LAYOUTS.iter().map(|layout| &layout.names) {
            let mut memory = FakeMemory::default();
            memory.map(0x1000, 0x1000);
            let at = |memory: &FakeMemory, index| {
                element(&mut Reader::new(memory), layout, 0x1000, index)
            };
            memory.put(0x1000, object_type::ARRAY | EMBED | 2 << EMBED_LEN_SHIFT);
            memory.put(0x1010, 71);
            memory.put(0x1018, 72);
            assert_eq!(at(&memory, 1), Ok(72));
            assert_eq!(at(&memory, 2), Err(Unreadable));

            memory.put(0x1000, object_type::ARRAY);
            memory.put(0x1010, 9);
            memory.put(0x1020, 0x1100);
            memory.put(0x1140, 73);
            assert_eq!(at(&memory, 8), Ok(73));
            assert_eq!(at(&memory, 9), Err(Unreadable));
            memory.put(0x1000, object_type::STRING);
            assert_eq!(at(&memory, 0), Err(Unreadable));
        }
    }
}
