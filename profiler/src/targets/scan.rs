//! Looking through the data of a process for things that no symbol names.

use rbprof_common::process::Range;

use crate::memory::ReadRequest;
use crate::memory::TargetMemory;

/// Most bytes of one stretch of data looked through; libruby has about 150 KiB.
const MAX_DATA: u64 = 16 << 20;

/// The aligned words of each range with the address of the first one. Ranges
/// that cannot be read, or are too long, are left out.
pub(super) fn words<M: TargetMemory>(data: &[Range], memory: &M) -> Vec<(u64, Vec<u64>)> {
    data.iter()
        .filter_map(|range| {
            let start = range.start.checked_next_multiple_of(8)?;
            let length = range.end.checked_sub(start)?;
            if length > MAX_DATA {
                return None;
            }
            let mut words = vec![0_u64; usize::try_from(length / 8).ok()?];
            memory
                .read(start, bytemuck::cast_slice_mut(&mut words))
                .ok()?;
            Some((start, words))
        })
        .collect()
}

/// Whether a word may be the address of something that the C library's or
/// Ruby's allocator, or the linker, has aligned.
pub(super) fn may_be_address(word: u64) -> bool {
    word & 7 == 0 && word > 4096
}

/// Reads `N` words from each address.
pub(super) fn read_each<const N: usize, M: TargetMemory>(
    addresses: &[u64],
    memory: &M,
) -> Vec<Option<[u64; N]>>
where
    [u64; N]: bytemuck::Pod,
{
    let mut words = vec![[0_u64; N]; addresses.len()];
    let mut requests: Vec<_> = addresses
        .iter()
        .zip(&mut words)
        .map(|(&address, words)| ReadRequest {
            address,
            buffer: bytemuck::bytes_of_mut(words),
            done: false,
        })
        .collect();
    memory.read_many(&mut requests);
    let done: Vec<_> = requests.iter().map(|request| request.done).collect();
    words
        .into_iter()
        .zip(done)
        .map(|(words, done)| done.then_some(words))
        .collect()
}
