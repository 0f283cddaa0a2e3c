//! What a name was read from, and whether that still stands there.
//!
//! Ruby frees and reuses instruction sequences, method entries, classes and
//! strings while it is sampled. So whatever is read on the way to a name is
//! noted down as it was; a cached name is good for as long as every note still
//! holds, since the same words lead to the same name.

use std::cell::Cell;

use rbprof_common::Fault;

use crate::memory::ReadRequest;
use crate::memory::TargetMemory;

/// A value was not there, or was not what it had to be: unmapped memory, or an
/// object of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

impl From<Fault> for Unreadable {
    fn from(_: Fault) -> Self {
        Self
    }
}

/// Up to eight bytes of target memory, little-endian, as far as they mattered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Note {
    address: u64,
    /// The bits that mattered; zero above the last byte that was read.
    mask: u64,
    value: u64,
}

impl Note {
    /// Bytes from `address` to the last one that mattered.
    fn len(&self) -> u64 {
        8 - u64::from(self.mask.leading_zeros() / 8)
    }

    fn end(&self) -> u64 {
        self.address.saturating_add(self.len())
    }
}

/// Everything a name was read from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Evidence(Box<[Note]>);

/// Target memory that takes notes.
#[derive(Debug)]
pub(super) struct Reader<'a, M> {
    memory: &'a M,
    notes: Vec<Note>,
    complete: bool,
}

impl<'a, M: TargetMemory> Reader<'a, M> {
    /// A reader with no notes.
    pub(super) fn new(memory: &'a M) -> Self {
        Self {
            memory,
            notes: Vec::new(),
            complete: true,
        }
    }

    /// Marks what is being read as incomplete: usable now, but to be read again
    /// next time.
    pub(super) fn give_up_part(&mut self) {
        self.complete = false;
    }

    /// Reads a word of which everything matters.
    pub(super) fn word(&mut self, address: u64) -> Result<u64, Unreadable> {
        self.masked(address, u64::MAX)
    }

    /// Reads the bits of a word that are set in `mask`.
    pub(super) fn masked(&mut self, address: u64, mask: u64) -> Result<u64, Unreadable> {
        let value = self.memory.word(address)? & mask;
        self.note(address, mask, value);
        Ok(value)
    }

    /// Reads a C `int` or `unsigned int`.
    pub(super) fn int(&mut self, address: u64) -> Result<u32, Unreadable> {
        let mut bytes = [0; 4];
        self.memory.read(address, &mut bytes)?;
        let value = u32::from_le_bytes(bytes);
        self.note(address, u64::from(u32::MAX), u64::from(value));
        Ok(value)
    }

    /// Reads `len` bytes; the caller bounds the length.
    pub(super) fn bytes(&mut self, address: u64, len: usize) -> Result<Vec<u8>, Unreadable> {
        let mut bytes = vec![0; len];
        self.memory.read(address, &mut bytes)?;
        let mut at = address;
        for chunk in bytes.chunks(8) {
            let mask = u64::MAX >> (8 * (8 - chunk.len()));
            self.note(at, mask, little_endian(chunk));
            at = at.wrapping_add(8);
        }
        Ok(bytes)
    }

    /// Fills `buffer` without taking notes: for searches, whose result is then
    /// read again with [`Reader::word`].
    pub(super) fn peek(&self, address: u64, buffer: &mut [u8]) -> Result<(), Unreadable> {
        Ok(self.memory.read(address, buffer)?)
    }

    /// Reads a word without taking notes.
    pub(super) fn peek_word(&self, address: u64) -> Result<u64, Unreadable> {
        Ok(self.memory.word(address)?)
    }

    /// Another reader of the same memory, without notes.
    pub(super) fn aside(&self) -> Self {
        Self::new(self.memory)
    }

    /// The notes, or `None` when something was missing.
    pub(super) fn finish(self) -> Option<Evidence> {
        let Self {
            memory: _,
            mut notes,
            complete,
        } = self;
        notes.sort_unstable();
        notes.dedup();
        complete.then(|| Evidence(notes.into()))
    }

    fn note(&mut self, address: u64, mask: u64, value: u64) {
        if mask != 0 {
            self.notes.push(Note {
                address,
                mask,
                value,
            });
        }
    }
}

/// Memory that can be read so often and no more: what bounds the time that a
/// hostile target can take.
#[derive(Debug)]
pub(super) struct Metered<'a, M> {
    memory: &'a M,
    left: Cell<u32>,
}

impl<'a, M> Metered<'a, M> {
    /// Memory that can be read `reads` times.
    pub(super) fn new(memory: &'a M, reads: u32) -> Self {
        Self {
            memory,
            left: Cell::new(reads),
        }
    }
}

impl<M: TargetMemory> TargetMemory for Metered<'_, M> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.left.set(self.left.get().checked_sub(1).ok_or(Fault)?);
        self.memory.read(address, buffer)
    }
}

/// Bytes that are read though nobody asked for them, to save a request.
const GAP: u64 = 128;
/// The smallest page of any machine: a gap within one cannot be unmapped when
/// both of its sides are mapped.
const PAGE: u64 = 4096;
/// The largest stretch read in one request.
const MAX_STRETCH: u64 = 16 * PAGE;
/// Notes looked at in one round: bounds the memory of a verification.
const ROUND: usize = 1 << 17;

/// Reads everything again, in as few requests as possible, and says of each
/// piece of evidence whether it holds.
pub(super) fn verify<M: TargetMemory>(evidence: &[&Evidence], memory: &M) -> Vec<bool> {
    let mut holds = vec![true; evidence.len()];
    let mut notes = Vec::new();
    for (owner, Evidence(of_owner)) in evidence.iter().enumerate() {
        notes.extend(of_owner.iter().map(|&note| (note, owner)));
        if notes.len() >= ROUND {
            verify_round(&mut notes, memory, &mut holds);
            notes.clear();
        }
    }
    verify_round(&mut notes, memory, &mut holds);
    holds
}

/// A contiguous piece of target memory, and where the notes on it end.
struct Stretch {
    start: u64,
    end: u64,
    notes_end: usize,
}

fn verify_round<M: TargetMemory>(notes: &mut [(Note, usize)], memory: &M, holds: &mut [bool]) {
    notes.sort_unstable();
    let stretches = stretches(notes);
    let mut buffers: Vec<Vec<u8>> = stretches
        .iter()
        .map(|stretch| vec![0; usize::try_from(stretch.end - stretch.start).unwrap_or(0)])
        .collect();
    let mut requests: Vec<ReadRequest<'_>> = stretches
        .iter()
        .zip(&mut buffers)
        .map(|(stretch, buffer)| ReadRequest {
            address: stretch.start,
            buffer,
            done: false,
        })
        .collect();
    memory.read_many(&mut requests);

    let mut notes = notes.iter().peekable();
    let mut seen = 0;
    for (stretch, request) in stretches.iter().zip(&requests) {
        while seen < stretch.notes_end
            && let Some((note, owner)) = notes.next()
        {
            seen += 1;
            let found = request.done.then(|| {
                let from = usize::try_from(note.address - stretch.start).ok()?;
                let to = usize::try_from(note.end() - stretch.start).ok()?;
                request.buffer.get(from..to)
            });
            let same = found
                .flatten()
                .is_some_and(|bytes| little_endian(bytes) & note.mask == note.value);
            if !same && let Some(of_owner) = holds.get_mut(*owner) {
                *of_owner = false;
            }
        }
    }
}

/// The stretches of memory that sorted notes lie on.
fn stretches(notes: &[(Note, usize)]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (index, (note, _)) in notes.iter().enumerate() {
        if let Some(last) = stretches.last_mut()
            && joins(last, note)
        {
            last.end = last.end.max(note.end());
            last.notes_end = index + 1;
            continue;
        }
        stretches.push(Stretch {
            start: note.address,
            end: note.end(),
            notes_end: index + 1,
        });
    }
    stretches
}

fn joins(last: &Stretch, note: &Note) -> bool {
    let near = note.address <= last.end
        || note.address - last.end <= GAP && (last.end - 1) / PAGE == note.address / PAGE;
    near && note.end() - last.start <= MAX_STRETCH
}

/// Up to eight bytes as a number.
fn little_endian(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .take(8)
        .rev()
        .fold(0, |value, &byte| value << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::super::test_memory::FakeMemory;
    use super::*;

    fn evidence_of(memory: &FakeMemory, read: impl Fn(&mut Reader<'_, FakeMemory>)) -> Evidence {
        let mut reader = Reader::new(memory);
        read(&mut reader);
        reader.finish().unwrap()
    }

    #[test]
    fn evidence_holds_until_a_bit_that_mattered_changes() {
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x100);
        memory.put(0x1000, 0xff05);
        memory.put_bytes(0x1010, b"a name of 18 bytes");
        let masked = evidence_of(&memory, |reader| {
            assert_eq!(reader.masked(0x1000, 0x1f), Ok(5));
        });
        let text = evidence_of(&memory, |reader| {
            assert_eq!(reader.bytes(0x1010, 18).unwrap(), b"a name of 18 bytes");
        });
        assert_eq!(verify(&[&masked, &text], &memory), [true, true]);

        memory.put(0x1000, 0xee05);
        memory.put_bytes(0x1022, b"behind the name");
        assert_eq!(verify(&[&masked, &text], &memory), [true, true]);

        memory.put_bytes(0x1021, b"S");
        assert_eq!(verify(&[&masked, &text], &memory), [true, false]);

        memory.put(0x1000, 0xee07);
        assert_eq!(verify(&[&masked, &text], &memory), [false, false]);
    }

    #[test]
    fn evidence_on_unmapped_memory_does_not_hold() {
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x1000);
        memory.map(0x5000, 0x1000);
        let gone = evidence_of(&memory, |reader| {
            reader.word(0x5000).unwrap();
        });
        let kept = evidence_of(&memory, |reader| {
            reader.word(0x1ff8).unwrap();
        });
        memory.unmap(0x5000);
        assert_eq!(verify(&[&gone, &kept], &memory), [false, true]);
    }

    #[test]
    fn near_notes_share_a_request() {
        let mut memory = FakeMemory::default();
        memory.map(0x1000, 0x3000);
        let many = evidence_of(&memory, |reader| {
            for at in (0x1000..0x2000).step_by(64) {
                reader.word(at).unwrap();
            }
            reader.word(0x3000).unwrap();
        });
        memory.requests.set(0);
        assert_eq!(verify(&[&many, &many], &memory), [true, true]);
        assert_eq!(memory.requests.get(), 2);
    }
}
