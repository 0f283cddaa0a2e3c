//! Instruction sequences.

use std::sync::Arc;

use rbprof_common::layout::FirstLine;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::imemo;
use rbprof_common::layout::object_type;

use super::arrays;
use super::evidence::Reader;
use super::evidence::Unreadable;
use super::strings;
use crate::memory::TargetMemory;

/// `enum rb_iseq_type`, the same since 2.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IseqType {
    Top,
    Method,
    Block,
    Class,
    Rescue,
    Ensure,
    Eval,
    Main,
    Plain,
}

impl IseqType {
    fn new(value: u64) -> Result<Self, Unreadable> {
        Ok(match value {
            0 => Self::Top,
            1 => Self::Method,
            2 => Self::Block,
            3 => Self::Class,
            4 => Self::Rescue,
            5 => Self::Ensure,
            6 => Self::Eval,
            7 => Self::Main,
            8 => Self::Plain,
            _ => return Err(Unreadable),
        })
    }
}

/// An instruction sequence, without its strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Iseq {
    /// Address of the object.
    pub(super) address: u64,
    /// Address of its `rb_iseq_constant_body`.
    pub(super) body: u64,
    /// What it is the code of.
    pub(super) kind: IseqType,
    /// The sequence this one stands in, or `0`.
    pub(super) parent: u64,
    /// The method, class or file this one belongs to; may be itself.
    pub(super) local: u64,
    /// Where its instructions are.
    pub(super) code: Code,
}

/// Instructions of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code {
    /// Address of the first one.
    pub(super) start: u64,
    /// How many words they have.
    pub(super) words: u32,
}

impl Code {
    /// Whether `pc`, the address of the next instruction, can belong to a frame
    /// of this code.
    pub(super) fn contains(self, pc: u64) -> bool {
        let offset = pc.wrapping_sub(self.start);
        offset.is_multiple_of(8) && offset / 8 <= u64::from(self.words)
    }
}

/// Internal objects of one type, and nothing else of their flags.
pub(super) fn check_imemo<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    object: u64,
    kind: u64,
) -> Result<(), Unreadable> {
    let mask = object_type::MASK | imemo::TYPE_MASK << imemo::TYPE_SHIFT;
    let flags = reader.masked(object, mask)?;
    if flags & object_type::MASK == object_type::IMEMO && imemo::of(flags) == kind {
        Ok(())
    } else {
        Err(Unreadable)
    }
}

/// Where the instructions of the sequence at `address` are, and its body.
pub(super) fn code<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    address: u64,
) -> Result<(u64, IseqType, Code), Unreadable> {
    const _: () = assert!(fixed::BODY_TYPE == 0 && fixed::BODY_SIZE == 4);
    check_imemo(reader, address, imemo::ISEQ)?;
    let body = reader.word(address.wrapping_add(u64::from(layout.iseq_body)))?;
    let type_and_size = reader.word(body.wrapping_add(fixed::BODY_TYPE))?;
    let start = reader.word(body.wrapping_add(fixed::BODY_ENCODED))?;
    let kind = IseqType::new(type_and_size & u64::from(u32::MAX))?;
    let words = (type_and_size >> 32) as u32;
    Ok((body, kind, Code { start, words }))
}

impl Iseq {
    /// Reads the sequence at `address`.
    pub(super) fn read<M: TargetMemory>(
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        address: u64,
    ) -> Result<Self, Unreadable> {
        let (body, kind, code) = code(reader, layout, address)?;
        Ok(Self {
            address,
            body,
            kind,
            parent: reader.word(body.wrapping_add(u64::from(layout.parent_iseq)))?,
            local: reader.word(body.wrapping_add(u64::from(layout.local_iseq)))?,
            code,
        })
    }

    /// The label Ruby gave it: `block in foo`, `foo`, `<main>`.
    pub(super) fn label<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
    ) -> Result<Arc<str>, Unreadable> {
        self.string(reader, layout, layout.label)
    }

    /// The label without what kind of code it is: `foo`.
    pub(super) fn base_label<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
    ) -> Result<Arc<str>, Unreadable> {
        match layout.base_label {
            Some(offset) => self.string(reader, layout, offset),
            None if self.local == self.address => self.label(reader, layout),
            None => Self::read(reader, layout, self.local)?.label(reader, layout),
        }
    }

    fn string<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        offset: u16,
    ) -> Result<Arc<str>, Unreadable> {
        let string = reader.word(self.body.wrapping_add(u64::from(offset)))?;
        strings::interned_text(reader, layout, string)
    }

    /// The absolute path of its file, or the path Ruby has.
    pub(super) fn path<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
    ) -> Result<Arc<str>, Unreadable> {
        let object = reader.word(self.body.wrapping_add(fixed::BODY_PATH))?;
        let kind = reader.masked(object, object_type::MASK)?;
        if kind != object_type::ARRAY {
            return strings::interned_text(reader, layout, object);
        }
        // [path, realpath]; the latter is nil for code that has no file.
        let real = arrays::element(reader, layout, object, 1)?;
        if is_object(real) {
            return strings::interned_text(reader, layout, real);
        }
        let path = arrays::element(reader, layout, object, 0)?;
        strings::interned_text(reader, layout, path)
    }

    /// The line its definition begins on; `0` when there is none.
    pub(super) fn first_line<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
    ) -> Result<u32, Unreadable> {
        let address = self.body.wrapping_add(u64::from(layout.first_lineno));
        Ok(match layout.first_line {
            FirstLine::Int => line_number(reader.int(address)?),
            FirstLine::Fixnum => u32::try_from(reader.word(address)? >> 1).unwrap_or(0),
        })
    }

    /// Whether there is machine code for it. That changes while a program
    /// runs, so it is no evidence.
    pub(super) fn has_machine_code<M: TargetMemory>(
        body: u64,
        reader: &Reader<'_, M>,
        layout: &NameLayout,
    ) -> bool {
        // Before 3.3 small numbers stand for the states of a compilation.
        const LAST_STATE: u64 = 4096;
        let address = body.wrapping_add(u64::from(layout.jit_entry));
        reader
            .peek_word(address)
            .is_ok_and(|function| function > LAST_STATE)
    }
}

/// A C `int` as a line; what is negative is none.
pub(super) fn line_number(value: u32) -> u32 {
    i32::try_from(value).map_or(0, i32::cast_unsigned)
}

/// Whether a value is a pointer to an object rather than `nil`, a number or
/// another constant.
fn is_object(value: u64) -> bool {
    const PAGE: u64 = 4096;
    value.is_multiple_of(8) && value >= PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pc_belongs_to_the_code_from_its_start_to_its_end() {
        let code = Code {
            start: 0x1000,
            words: 3,
        };
        assert!(code.contains(0x1000) && code.contains(0x1018));
        assert!(!code.contains(0x0ff8) && !code.contains(0x1020) && !code.contains(0x1004));
    }

    #[test]
    fn lines_that_are_not_lines_are_none() {
        assert_eq!(line_number(7), 7);
        assert_eq!(line_number(u32::MAX), 0);
    }
}
