//! One row of DWARF's call frame information, to one [`Rule`].

use gimli::AArch64;
use gimli::CfaRule;
use gimli::Encoding;
use gimli::EndianSlice;
use gimli::LittleEndian;
use gimli::Operation;
use gimli::Register;
use gimli::RegisterRule;
use gimli::UnwindExpression;
use gimli::UnwindSection;
use gimli::UnwindTableRow;
use gimli::X86_64;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::saved;

use crate::targets::elf::Machine;

/// What sections are read from.
pub(super) type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// Operations of the longest expression that is known: the one for the
/// procedure linkage table.
const MAX_OPERATIONS: usize = 8;

/// Why a place in the code has no rule, or not all of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The frame is found by another register than the stack and the frame
    /// pointer, whose value in callers the walk does not know.
    Register,
    /// The frame is found by an expression of an unknown form.
    Expression,
    /// The return address is not in memory, or by an expression of an unknown
    /// form.
    ReturnAddress,
    /// The caller's stack pointer is not the canonical frame address.
    StackPointer,
    /// The caller's frame pointer cannot be told. There is a rule, which leads
    /// to the caller.
    FramePointer,
    /// The instructions are malformed.
    Malformed,
    /// There is no room for more rows or rules.
    Limit,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Register,
        Self::Expression,
        Self::ReturnAddress,
        Self::StackPointer,
        Self::FramePointer,
        Self::Malformed,
        Self::Limit,
    ];
}

/// The columns of call frame information that are looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    sp: Register,
    fp: Register,
    ra: Register,
    /// What the absence of a rule for the return address means: on arm64, that
    /// it is in its register.
    has_link_register: bool,
}

impl Columns {
    pub(super) fn of(machine: Machine) -> Option<Self> {
        match machine {
            Machine::X86_64 => Some(Self {
                sp: X86_64::RSP,
                fp: X86_64::RBP,
                ra: X86_64::RA,
                has_link_register: false,
            }),
            Machine::Aarch64 => Some(Self {
                sp: AArch64::SP,
                fp: AArch64::X29,
                ra: AArch64::X30,
                has_link_register: true,
            }),
            Machine::Other(_) => None,
        }
    }
}

/// Where the caller's frame is.
struct Frame {
    cfa: u8,
    offset: i32,
    extra: i8,
}

/// Where a register is saved.
type Place = (u8, i32);

/// What a row is read with.
pub(super) struct Reader<'s, S> {
    pub(super) section: &'s S,
    pub(super) encoding: Encoding,
    pub(super) columns: Columns,
    /// The function is a signal trampoline.
    pub(super) is_signal: bool,
}

impl<'a, S: UnwindSection<Bytes<'a>>> Reader<'_, S> {
    /// The rule of a row.
    pub(super) fn rule(&self, row: &UnwindTableRow<usize>) -> Result<Rule, Reason> {
        let ra = match row.register(self.columns.ra) {
            Some(RegisterRule::Undefined) => return Ok(Rule::END),
            None | Some(RegisterRule::SameValue) if self.columns.has_link_register => {
                (saved::SAME, 0)
            }
            Some(rule) => self.place(&rule).ok_or(Reason::ReturnAddress)?,
            None => return Err(Reason::ReturnAddress),
        };
        let mut frame = self.frame(row.cfa())?;
        if self.is_signal {
            // The one form that there is; see `cfa::SIGNAL`.
            if frame.cfa != cfa::SP_DEREF || frame.extra != 0 || ra.0 != saved::AT_SP {
                return Err(Reason::Expression);
            }
            frame.cfa = cfa::SIGNAL;
        }
        self.check_stack_pointer(row, &frame)?;
        let fp = match row.register(self.columns.fp) {
            None | Some(RegisterRule::SameValue) => (saved::SAME, 0),
            Some(rule) => self.place(&rule).unwrap_or((saved::LOST, 0)),
        };
        Ok(Rule {
            cfa: frame.cfa,
            ra: ra.0,
            fp: fp.0,
            extra: frame.extra,
            cfa_offset: frame.offset,
            ra_offset: ra.1,
            fp_offset: fp.1,
        })
    }

    fn frame(&self, rule: &CfaRule<usize>) -> Result<Frame, Reason> {
        match rule {
            CfaRule::RegisterAndOffset { register, offset } => Ok(Frame {
                cfa: self
                    .base(*register, cfa::SP, cfa::FP)
                    .ok_or(Reason::Register)?,
                offset: i32::try_from(*offset).map_err(|_| Reason::Expression)?,
                extra: 0,
            }),
            CfaRule::Expression(expression) => {
                let operations = self.operations(expression).ok_or(Reason::Expression)?;
                self.frame_by_expression(&operations)
            }
        }
    }

    fn frame_by_expression(&self, operations: &[Operation<Bytes<'a>>]) -> Result<Frame, Reason> {
        let (first, rest) = operations.split_first().ok_or(Reason::Expression)?;
        let &Operation::RegisterOffset {
            register, offset, ..
        } = first
        else {
            return Err(Reason::Expression);
        };
        let offset = i32::try_from(offset).map_err(|_| Reason::Expression)?;
        let based = |at_sp, at_fp| self.base(register, at_sp, at_fp).ok_or(Reason::Register);
        let (kind, extra) = match rest {
            [] => (based(cfa::SP, cfa::FP)?, 0),
            [deref] if is_deref(deref) => (based(cfa::SP_DEREF, cfa::FP_DEREF)?, 0),
            [deref, Operation::PlusConstant { value }]
            | [
                deref,
                Operation::UnsignedConstant { value },
                Operation::Plus,
            ] if is_deref(deref) => (based(cfa::SP_DEREF, cfa::FP_DEREF)?, *value),
            // A word more from that byte of a 16-byte entry on.
            [
                Operation::RegisterOffset {
                    register: pc,
                    offset: 0,
                    ..
                },
                Operation::UnsignedConstant { value: 15 },
                Operation::And,
                Operation::UnsignedConstant { value: from },
                Operation::Ge,
                Operation::UnsignedConstant { value: 3 },
                Operation::Shl,
                Operation::Plus,
            ] if register == self.columns.sp && *pc == X86_64::RA => (cfa::PLT, *from),
            _ => return Err(Reason::Expression),
        };
        Ok(Frame {
            cfa: kind,
            offset,
            extra: i8::try_from(extra).map_err(|_| Reason::Expression)?,
        })
    }

    /// The caller's stack pointer is the canonical frame address, unless there
    /// is a rule that says something else.
    fn check_stack_pointer(
        &self,
        row: &UnwindTableRow<usize>,
        frame: &Frame,
    ) -> Result<(), Reason> {
        match row.register(self.columns.sp) {
            None | Some(RegisterRule::ValOffset(0)) => Ok(()),
            // It is saved where the address is taken from.
            Some(RegisterRule::Expression(expression))
                if frame.cfa == cfa::SIGNAL
                    && self.place(&RegisterRule::Expression(expression))
                        == Some((saved::AT_SP, frame.offset)) =>
            {
                Ok(())
            }
            Some(_) => Err(Reason::StackPointer),
        }
    }

    /// Where a register is saved, if that can be expressed.
    fn place(&self, rule: &RegisterRule<usize>) -> Option<Place> {
        match rule {
            RegisterRule::Offset(offset) => Some((saved::AT_CFA, i32::try_from(*offset).ok()?)),
            RegisterRule::Expression(expression) => {
                let operations = self.operations(expression)?;
                let [
                    Operation::RegisterOffset {
                        register, offset, ..
                    },
                ] = operations.as_slice()
                else {
                    return None;
                };
                let kind = self.base(*register, saved::AT_SP, saved::AT_FP)?;
                Some((kind, i32::try_from(*offset).ok()?))
            }
            _ => None,
        }
    }

    fn base(&self, register: Register, at_sp: u8, at_fp: u8) -> Option<u8> {
        if register == self.columns.sp {
            Some(at_sp)
        } else if register == self.columns.fp {
            Some(at_fp)
        } else {
            None
        }
    }

    /// The operations of an expression; `None` if it is malformed or too long.
    fn operations(
        &self,
        expression: &UnwindExpression<usize>,
    ) -> Option<Vec<Operation<Bytes<'a>>>> {
        let mut iterator = expression.get(self.section).ok()?.operations(self.encoding);
        let mut operations = Vec::new();
        while let Some(operation) = iterator.next().ok()? {
            // The first operation, and what follows it.
            if operations.len() > MAX_OPERATIONS {
                return None;
            }
            operations.push(operation);
        }
        Some(operations)
    }
}

fn is_deref(operation: &Operation<Bytes<'_>>) -> bool {
    matches!(
        operation,
        Operation::Deref {
            size: 8,
            space: false,
            ..
        }
    )
}
