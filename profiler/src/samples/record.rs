//! One record of the ring.

use rbprof_common::wire::Frame;
use rbprof_common::wire::Mapped;
use rbprof_common::wire::ProcessEvent;
use rbprof_common::wire::RecordKind;
use rbprof_common::wire::Sample;
use rbprof_common::wire::StackChunk;

/// A record as the kernel half sent it.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// A tick in a target.
    Sample(Sample),
    /// Some or all frames of a stack.
    Stack(StackChunk, Vec<Frame>),
    /// A target forked.
    Fork(ProcessEvent),
    /// A target executed another program.
    Exec(ProcessEvent),
    /// A target ended.
    Exit(ProcessEvent),
    /// A process mapped code of a file.
    Mapped(Mapped),
}

impl Record {
    /// Decodes a record; `None` when it is none that this version knows.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let kind = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
        if kind == RecordKind::Sample as u32 {
            return Some(Self::Sample(head(bytes)?));
        }
        if kind == RecordKind::Stack as u32 {
            let chunk: StackChunk = head(bytes)?;
            let frames = bytes.get(size_of::<StackChunk>()..)?;
            let wanted = (chunk.count as usize).checked_mul(size_of::<Frame>())?;
            let frames = frames.get(..wanted)?;
            let frames = frames
                .chunks_exact(size_of::<Frame>())
                .map(bytemuck::pod_read_unaligned)
                .collect();
            return Some(Self::Stack(chunk, frames));
        }
        if kind == RecordKind::Mapped as u32 {
            return Some(Self::Mapped(head(bytes)?));
        }
        let event: ProcessEvent = head(bytes)?;
        if kind == RecordKind::Fork as u32 {
            Some(Self::Fork(event))
        } else if kind == RecordKind::Exec as u32 {
            Some(Self::Exec(event))
        } else if kind == RecordKind::Exit as u32 {
            Some(Self::Exit(event))
        } else {
            None
        }
    }
}

fn head<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Option<T> {
    bytes
        .get(..size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_decoded_with_its_frames() {
        let chunk = StackChunk {
            kind: RecordKind::Stack as u32,
            count: 2,
            total: 2,
            ..StackChunk::default()
        };
        let frames = [Frame::new(1, 16, 32, 48), Frame::new(2, 0, 0, 64)];
        let mut bytes = bytemuck::bytes_of(&chunk).to_vec();
        bytes.extend(bytemuck::cast_slice(&frames));
        assert_eq!(
            Record::decode(&bytes),
            Some(Record::Stack(chunk, frames.to_vec()))
        );
        for len in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..len]), None);
        }
    }

    #[test]
    fn an_unknown_kind_is_no_record() {
        assert_eq!(Record::decode(&[9; 64]), None);
    }
}
