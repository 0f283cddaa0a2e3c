//! Ruby strings, as text that can be shown.

use std::sync::Arc;

use rbprof_common::layout::Embedding;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::object_type;

use super::evidence::Reader;
use super::evidence::Unreadable;
use crate::memory::TargetMemory;

/// Longest name or path, in bytes; what is longer is cut and ends with `…`.
const MAX_LEN: usize = 4096;

/// `RSTRING_NOEMBED`: the bytes are elsewhere.
const NOEMBED: u64 = 1 << 13;
/// `RSTRING_FSTR`: one of a kind, in Ruby's table of such strings.
pub(super) const INTERNED: u64 = 1 << 29;
/// `RSTRING_EMBED_LEN_MASK` up to 3.1.
const EMBED_LEN_SHIFT: u32 = 14;
const EMBED_LEN_MASK: u64 = 0x1f << EMBED_LEN_SHIFT;
/// `RString.len`, and where embedded bytes begin up to 3.1.
const LEN: u64 = 16;
/// `RString.as.heap.ptr`, and where embedded bytes begin from 3.2 on.
const POINTER: u64 = 24;

/// Reads the bytes of the string at `string`, at most [`MAX_LEN`] of them, and
/// whether that is all.
pub(super) fn bytes<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    string: u64,
) -> Result<(Vec<u8>, bool), Unreadable> {
    let flags = reader.masked(string, object_type::MASK | NOEMBED)?;
    if flags & object_type::MASK != object_type::STRING {
        return Err(Unreadable);
    }
    let embedded = flags & NOEMBED == 0;
    let (len, data) = match (embedded, layout.embedding) {
        (true, Embedding::Fixed) => {
            let len = reader.masked(string, EMBED_LEN_MASK)? >> EMBED_LEN_SHIFT;
            (len, string.wrapping_add(LEN))
        }
        (true, Embedding::Variable) => (
            reader.word(string.wrapping_add(LEN))?,
            string.wrapping_add(POINTER),
        ),
        (false, _) => (
            reader.word(string.wrapping_add(LEN))?,
            reader.word(string.wrapping_add(POINTER))?,
        ),
    };
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let bytes = reader.bytes(data, len.min(MAX_LEN))?;
    Ok((bytes, len <= MAX_LEN))
}

/// Reads the interned string at `string` as text. Names and paths of code are
/// interned, so another string stands where one was thrown away.
pub(super) fn interned_text<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    string: u64,
) -> Result<Arc<str>, Unreadable> {
    if reader.masked(string, INTERNED)? == 0 {
        return Err(Unreadable);
    }
    text(reader, layout, string)
}

/// Reads the string at `string` as text; see [`shown`].
pub(super) fn text<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    string: u64,
) -> Result<Arc<str>, Unreadable> {
    let (bytes, whole) = bytes(reader, layout, string)?;
    let mut text = shown(&bytes);
    if !whole {
        text.push('…');
    }
    Ok(text.into())
}

/// Bytes as text: what is not UTF-8 is written as `\xNN`.
fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::LAYOUTS;

    use super::super::test_memory::FakeMemory;
    use super::super::test_memory::of_release;
    use super::*;

    fn read(memory: &FakeMemory, layout: &NameLayout) -> Result<Arc<str>, Unreadable> {
        text(&mut Reader::new(memory), layout, 0x1000)
    }

    #[test]
    fn embedded_and_heap_strings_of_both_layouts() {
        for layout in LAYOUTS.iter().map(|layout| &layout.names) {
            let mut memory = FakeMemory::default();
            memory.map(0x1000, 0x1000);
            let data = match layout.embedding {
                Embedding::Fixed => {
                    memory.put(0x1000, object_type::STRING | 5 << 14);
                    0x1010
                }
                Embedding::Variable => {
                    memory.put(0x1000, object_type::STRING);
                    memory.put(0x1010, 5);
                    0x1018
                }
            };
            memory.put_bytes(data, "größ".as_bytes());
            assert_eq!(read(&memory, layout).as_deref(), Ok("grö\\xC3"));

            memory.put(0x1000, object_type::STRING | NOEMBED);
            memory.put(0x1010, 6);
            memory.put(0x1018, 0x1100);
            memory.put_bytes(0x1100, b"a\0b\xff\xfec");
            assert_eq!(read(&memory, layout).as_deref(), Ok("a\0b\\xFF\\xFEc"));
        }
    }

    #[test]
    fn a_hostile_length_is_cut_and_other_objects_are_refused() {
        let layout = &of_release(4, 0).names;
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x4000);
        memory.put(0x1000, object_type::STRING | NOEMBED);
        memory.put(0x1010, u64::MAX);
        memory.put(0x1018, 0x2000);
        let text = read(&memory, layout).unwrap();
        assert_eq!(text.len(), MAX_LEN + "…".len());
        memory.put(0x1000, object_type::ARRAY | NOEMBED);
        assert_eq!(read(&memory, layout), Err(Unreadable));
    }
}
