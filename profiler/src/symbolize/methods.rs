//! Method entries.

use rbprof_common::layout::fixed;
use rbprof_common::layout::imemo;

use super::evidence::Reader;
use super::evidence::Unreadable;
use super::iseq::check_imemo;
use crate::memory::TargetMemory;

/// The low bits of a definition's first word: its type. What is above them are
/// counters, which change.
const TYPE_MASK: u64 = 0xf;
/// `VM_METHOD_TYPE_ISEQ`.
const ISEQ: u64 = 0;
/// `VM_METHOD_TYPE_BMETHOD`.
const BMETHOD: u64 = 4;

/// What a method is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// Ruby code: this sequence.
    Iseq(u64),
    /// A block (`define_method`).
    Block,
    /// Something else, mostly a C function.
    Other,
}

/// A method, as a frame's method entry describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Method {
    /// What it is made of.
    pub(super) body: Body,
    /// The ID it was called by: another than `id` for an alias.
    pub(super) called_id: u64,
    /// The ID it was defined under.
    pub(super) id: u64,
    /// The class or module it was defined in.
    pub(super) owner: u64,
}

impl Method {
    /// Reads the method entry at `address`.
    pub(super) fn read<M: TargetMemory>(
        reader: &mut Reader<'_, M>,
        address: u64,
    ) -> Result<Self, Unreadable> {
        check_imemo(reader, address, imemo::MENT)?;
        let definition = reader.word(address.wrapping_add(fixed::METHOD_DEFINITION))?;
        let called_id = reader.word(address.wrapping_add(fixed::METHOD_CALLED_ID))?;
        let owner = reader.word(address.wrapping_add(fixed::METHOD_OWNER))?;
        let kind = definition.wrapping_add(fixed::DEFINITION_TYPE);
        let body = match reader.masked(kind, TYPE_MASK)? {
            ISEQ => Body::Iseq(reader.word(definition.wrapping_add(fixed::DEFINITION_ISEQ))?),
            BMETHOD => Body::Block,
            _ => Body::Other,
        };
        let id = reader.word(definition.wrapping_add(fixed::DEFINITION_ID))?;
        Ok(Self {
            body,
            called_id,
            id,
            owner,
        })
    }
}
