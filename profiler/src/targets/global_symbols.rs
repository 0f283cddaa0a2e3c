//! Ruby's symbol table where no ELF symbol names it.
//!
//! `ruby_global_symbols` is a variable of the image: `{ u32 last id, ..., +16:
//! an array of arrays }`. Debian's builds up to 3.1 export everything else that
//! a profiler needs, but not this. Exactly one place in the image's data may
//! look like it (or exactly one that the code which looks up IDs refers to), and
//! its content must be right: the entry of the ID 43, which is the operator `+`
//! in every release, must be the string `+`.

use rbprof_common::Fault;
use rbprof_common::layout::Version;
use rbprof_common::process::Range;

use crate::memory::TargetMemory;

use super::recover::NotRecovered;
use super::recover::Recovered;
use super::scan;

/// From the variable to the array of arrays, in words.
const IDS: u64 = 2;
/// IDs per inner array.
const UNIT: u64 = 512;
/// Words per ID in an inner array: the string and the symbol.
const ENTRY_WORDS: u64 = 2;
/// IDs that even the smallest Ruby has, and more than any has.
const PLAUSIBLE_IDS: std::ops::Range<u64> = 500..1 << 26;

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

/// Finds `ruby_global_symbols` in the writable data of a Ruby. `references` are
/// places in that data which the functions that look up IDs refer to: the
/// variable itself, or its array.
///
/// # Errors
/// [`NotRecovered`]: nothing looks like it (also before Ruby has set it up), or
/// more than one thing does.
pub fn scan<M: TargetMemory>(
    data: &[Range],
    references: &[u64],
    version: Version,
    memory: &M,
) -> Result<Recovered, NotRecovered> {
    let found: Vec<Recovered> = scan::words(data, memory)
        .into_iter()
        .flat_map(|(start, words)| candidates(start, &words, memory))
        .filter(|&variable| holds_plus(variable, version, memory) == Ok(true))
        .map(|variable| Recovered {
            address: variable,
            is_referenced: references.contains(&variable)
                || references.contains(&variable.wrapping_add(8 * IDS)),
        })
        .collect();
    Recovered::only(&found)
}

/// Addresses where the shape is right: a count, and an array of as many inner
/// arrays as the count needs.
fn candidates<M: TargetMemory>(start: u64, words: &[u64], memory: &M) -> Vec<u64> {
    let behind = words.iter().skip(IDS as usize);
    let (variables, arrays): (Vec<_>, Vec<_>) = (0_u64..)
        .zip(words.iter().zip(behind))
        // The count is 32 bits wide and nothing lies behind it.
        .filter(|(_, (last_id, ids))| {
            PLAUSIBLE_IDS.contains(last_id) && scan::may_be_address(**ids)
        })
        .map(|(index, (&last_id, &ids))| ((start.wrapping_add(8 * index), last_id), ids))
        .unzip();
    let heads = scan::read_each(&arrays, memory);
    variables
        .into_iter()
        .zip(heads)
        .filter(|((_, last_id), head)| {
            let needed = last_id / UNIT + 1;
            head.is_some_and(|[flags, _class, length]| {
                is_heap_array(flags) && length.abs_diff(needed) <= 1
            })
        })
        .map(|((variable, _), _)| variable)
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
