//! Ruby's symbol table where no ELF symbol names it.
//!
//! `ruby_global_symbols` is a variable of the image: `{ u32 last id, ..., +16:
//! an array of arrays }`. Debian's builds up to 3.1 export everything else that
//! a profiler needs, but not this. Exactly one place in the image's data may
//! look like it, and its content must be right: the entry of the ID 43, which
//! is the operator `+` in every release, must be the string `+`.

use rbprof_common::Fault;
use rbprof_common::layout::Version;
use rbprof_common::process::Range;

use crate::memory::ReadRequest;
use crate::memory::TargetMemory;

/// From the variable to the array of arrays, in words.
const IDS: u64 = 2;
/// IDs per inner array.
const UNIT: u64 = 512;
/// Words per ID in an inner array: the string and the symbol.
const ENTRY_WORDS: u64 = 2;
/// IDs that even the smallest Ruby has, and more than any has.
const PLAUSIBLE_IDS: std::ops::Range<u64> = 500..1 << 26;
/// Most bytes of data looked through; libruby has about 100 KiB.
const MAX_DATA: u64 = 16 << 20;

/// The type in `RBasic.flags`.
const TYPE_MASK: u64 = 0x1f;
/// A string.
const T_STRING: u64 = 5;
/// An array.
const T_ARRAY: u64 = 7;
/// The array's elements are in the object (`RARRAY_EMBED_FLAG`).
const ARRAY_EMBED: u64 = 1 << 13;
/// The string's bytes are not in the object (`RSTRING_NOEMBED`).
const STRING_NOEMBED: u64 = 1 << 13;
/// `RArray.as.heap.len`, `RArray.as.heap.ptr`, `RString.as.heap.ptr`.
const ARRAY_LENGTH: u64 = 16;
const ARRAY_POINTER: u64 = 32;
const STRING_POINTER: u64 = 24;

/// Finds `ruby_global_symbols` in the writable data of a Ruby. `None` when
/// nothing looks like it (also before Ruby has set it up), or more than one
/// thing does.
pub fn scan<M: TargetMemory>(data: &[Range], version: Version, memory: &M) -> Option<u64> {
    let mut found = data
        .iter()
        .filter(|range| range.end.saturating_sub(range.start) <= MAX_DATA)
        .flat_map(|range| {
            let start = range.start.saturating_add(7) & !7;
            let words = range.end.saturating_sub(start) / 8;
            let words = read_words(start, words, memory).unwrap_or_default();
            candidates(start, &words, memory)
        })
        .filter(|&variable| holds_plus(variable, version, memory) == Ok(true));
    let only = found.next()?;
    found.next().is_none().then_some(only)
}

fn read_words<M: TargetMemory>(start: u64, count: u64, memory: &M) -> Result<Vec<u64>, Fault> {
    let mut words = vec![0_u64; usize::try_from(count).map_err(|_| Fault)?];
    memory.read(start, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

/// Addresses where the shape is right: a count, and an array of as many inner
/// arrays as the count needs.
fn candidates<M: TargetMemory>(start: u64, words: &[u64], memory: &M) -> Vec<u64> {
    struct Candidate {
        variable: u64,
        last_id: u64,
        ids: u64,
    }
    let behind = words.iter().skip(IDS as usize);
    let candidates: Vec<_> = (0_u64..)
        .zip(words.iter().zip(behind))
        // The count is 32 bits wide and nothing lies behind it.
        .filter(|(_, (last_id, ids))| {
            PLAUSIBLE_IDS.contains(last_id) && **ids & 7 == 0 && **ids > 4096
        })
        .map(|(index, (&last_id, &ids))| Candidate {
            variable: start.wrapping_add(8 * index),
            last_id,
            ids,
        })
        .collect();
    let mut heads = vec![[0_u64; 3]; candidates.len()];
    let mut requests: Vec<_> = candidates
        .iter()
        .zip(&mut heads)
        .map(|(candidate, head)| ReadRequest {
            address: candidate.ids,
            buffer: bytemuck::cast_slice_mut(head),
            done: false,
        })
        .collect();
    memory.read_many(&mut requests);
    let done: Vec<_> = requests.iter().map(|request| request.done).collect();
    candidates
        .iter()
        .zip(heads)
        .zip(done)
        .filter(|((candidate, [flags, _class, length]), done)| {
            let needed = candidate.last_id / UNIT + 1;
            *done && is_heap_array(*flags) && length.abs_diff(needed) <= 1
        })
        .map(|((candidate, _), _)| candidate.variable)
        .collect()
}

fn is_heap_array(flags: u64) -> bool {
    flags & TYPE_MASK == T_ARRAY && flags & ARRAY_EMBED == 0
}

/// Whether the table calls the ID of `+` so.
fn holds_plus<M: TargetMemory>(variable: u64, version: Version, memory: &M) -> Result<bool, Fault> {
    let ids = memory.word(variable.wrapping_add(8 * IDS))?;
    let Some(first) = element(ids, 0, memory)? else {
        return Ok(false);
    };
    let Some(string) = element(first, u64::from(b'+') * ENTRY_WORDS, memory)? else {
        return Ok(false);
    };
    let flags = memory.word(string)?;
    if flags & TYPE_MASK != T_STRING {
        return Ok(false);
    }
    let bytes = if flags & STRING_NOEMBED != 0 {
        memory.word(string.wrapping_add(STRING_POINTER))?
    } else if version < Version::new(3, 2, 0) {
        string.wrapping_add(16)
    } else {
        string.wrapping_add(24)
    };
    let mut text = [0; 2];
    memory.read(bytes, &mut text)?;
    Ok(text == *b"+\0")
}

/// An element of an array on the heap.
fn element<M: TargetMemory>(array: u64, index: u64, memory: &M) -> Result<Option<u64>, Fault> {
    if !is_heap_array(memory.word(array)?)
        || memory.word(array.wrapping_add(ARRAY_LENGTH))? <= index
    {
        return Ok(None);
    }
    let elements = memory.word(array.wrapping_add(ARRAY_POINTER))?;
    memory.word(elements.wrapping_add(8 * index)).map(Some)
}
