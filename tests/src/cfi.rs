//! What a file's call frame information says, as gimli reads it, evaluated the
//! long way: with gimli's own search, all of DWARF's rules and its evaluator of
//! expressions. What the profiler makes of the same file is held against it.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use anyhow::bail;
use gimli::AArch64;
use gimli::BaseAddresses;
use gimli::CfaRule;
use gimli::CieOrFde;
use gimli::EhFrame;
use gimli::EhFrameHdr;
use gimli::Encoding;
use gimli::EndianSlice;
use gimli::EvaluationResult;
use gimli::Expression;
use gimli::LittleEndian;
use gimli::Location;
use gimli::ParsedEhFrameHdr;
use gimli::Register;
use gimli::RegisterRule;
use gimli::UnwindContext;
use gimli::UnwindSection as _;
use gimli::Value;
use gimli::Vendor;
use gimli::X86_64;
use object::Object as _;
use object::ObjectSection as _;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// The registers that an unwinder for profiles follows.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Where it stands.
    pub pc: u64,
    /// Its stack pointer.
    pub sp: u64,
    /// Its frame pointer.
    pub fp: u64,
    /// Its link register, on arm64.
    pub lr: u64,
}

/// What the caller's registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Nothing describes the code.
    Undescribed,
    /// There is no caller.
    End,
    /// It takes a register that is not in [`Frame`], or more than registers and
    /// memory.
    Inexpressible,
    /// They are these; the frame pointer is `None` if it cannot be told.
    Is {
        /// The return address.
        pc: u64,
        /// The stack pointer.
        sp: u64,
        /// The frame pointer.
        fp: Option<u64>,
    },
}

/// A function, or part of one, that is described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// First byte.
    pub start: u64,
    /// First byte past the end.
    pub end: u64,
    /// A signal's handler returns to it.
    pub is_trampoline: bool,
}

/// The call frame information of one file.
pub struct Cfi<'a> {
    section: EhFrame<Bytes<'a>>,
    bases: BaseAddresses,
    header: ParsedEhFrameHdr<Bytes<'a>>,
    context: UnwindContext<usize>,
    is_arm64: bool,
}

impl<'a> Cfi<'a> {
    /// That of an ELF file with a search table.
    ///
    /// # Errors
    /// If it has none.
    pub fn of(file: &object::File<'a>) -> Result<Self> {
        let part = |name| -> Result<(u64, &'a [u8])> {
            let section = file.section_by_name(name).context(name)?;
            Ok((section.address(), section.data()?))
        };
        let (address, data) = part(".eh_frame")?;
        let (header_address, header) = part(".eh_frame_hdr")?;
        let bases = BaseAddresses::default()
            .set_eh_frame(address)
            .set_eh_frame_hdr(header_address);
        let header = EhFrameHdr::from(EndianSlice::new(header, LittleEndian));
        let is_arm64 = file.architecture() == object::Architecture::Aarch64;
        let mut section = EhFrame::new(data, LittleEndian);
        if is_arm64 {
            section.set_vendor(Vendor::AArch64);
        }
        Ok(Self {
            section,
            header: header.parse(&bases, 8)?,
            bases,
            context: UnwindContext::new(),
            is_arm64,
        })
    }

    /// Where each function, or part of one, begins and ends, and whether it is
    /// what a signal's handler returns to.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn functions(&self) -> Result<Vec<Described>> {
        let mut found = Vec::new();
        let mut entries = self.section.entries(&self.bases);
        while let Some(entry) = entries.next()? {
            let CieOrFde::Fde(partial) = entry else {
                continue;
            };
            let fde = partial.parse(EhFrame::cie_from_offset)?;
            found.push(Described {
                start: fde.initial_address(),
                end: fde.end_address(),
                is_trampoline: fde.is_signal_trampoline(),
            });
        }
        Ok(found)
    }

    /// Where each row of each function begins and ends.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn rows(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut found = Vec::new();
        let mut entries = self.section.entries(&self.bases);
        while let Some(entry) = entries.next()? {
            let CieOrFde::Fde(partial) = entry else {
                continue;
            };
            let fde = partial.parse(EhFrame::cie_from_offset)?;
            let mut rows = fde.rows(&self.section, &self.bases, &mut self.context)?;
            while let Some(row) = rows.next_row()? {
                if row.start_address() < row.end_address() {
                    found.push((row.start_address(), row.end_address()));
                }
            }
        }
        Ok(found)
    }

    /// The caller of a frame that stands at `lookup`, an address in the file.
    ///
    /// # Errors
    /// If the information is malformed.
    pub fn caller(
        &mut self,
        lookup: u64,
        frame: &Frame,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Result<Caller> {
        let table = self.header.table().context("no search table")?;
        let fde = match table.fde_for_address(
            &self.section,
            &self.bases,
            lookup,
            EhFrame::cie_from_offset,
        ) {
            Ok(fde) => fde,
            Err(gimli::Error::NoUnwindInfoForAddress) => return Ok(Caller::Undescribed),
            Err(error) => bail!("{lookup:#x}: {error}"),
        };
        let row =
            fde.unwind_info_for_address(&self.section, &self.bases, &mut self.context, lookup)?;
        let evaluator = Evaluator {
            section: &self.section,
            encoding: fde.cie().encoding(),
            frame,
            word,
            is_arm64: self.is_arm64,
        };
        let (sp, fp, ra) = if self.is_arm64 {
            (AArch64::SP, AArch64::X29, AArch64::X30)
        } else {
            (X86_64::RSP, X86_64::RBP, X86_64::RA)
        };
        let ra_rule = row.register(ra);
        if ra_rule == Some(RegisterRule::Undefined) {
            return Ok(Caller::End);
        }
        let Ok(cfa) = evaluator.cfa(row.cfa()) else {
            return Ok(Caller::Inexpressible);
        };
        let value = |register, rule: Option<RegisterRule<usize>>| match rule {
            Some(rule) => evaluator.value(register, &rule, cfa),
            None => evaluator.register(register),
        };
        let caller_sp = match row.register(sp) {
            Some(rule) => evaluator.value(sp, &rule, cfa),
            None => Ok(cfa),
        };
        Ok(match (value(ra, ra_rule), caller_sp) {
            (Ok(pc), Ok(sp)) if self.is_arm64 || row.register(ra).is_some() => Caller::Is {
                pc,
                sp,
                fp: value(fp, row.register(fp)).ok(),
            },
            _ => Caller::Inexpressible,
        })
    }
}

/// Evaluates DWARF's rules for one frame.
struct Evaluator<'f, 'a> {
    section: &'f EhFrame<Bytes<'a>>,
    encoding: Encoding,
    frame: &'f Frame,
    word: &'f dyn Fn(u64) -> Option<u64>,
    is_arm64: bool,
}

impl Evaluator<'_, '_> {
    fn register(&self, register: Register) -> Result<u64> {
        match (self.is_arm64, register) {
            (false, X86_64::RSP) | (true, AArch64::SP) => Ok(self.frame.sp),
            (false, X86_64::RBP) | (true, AArch64::X29) => Ok(self.frame.fp),
            (false, X86_64::RA) => Ok(self.frame.pc),
            (true, AArch64::X30) => Ok(self.frame.lr),
            _ => bail!("the value of register {}", register.0),
        }
    }

    fn memory(&self, address: u64) -> Result<u64> {
        (self.word)(address).ok_or_else(|| anyhow!("no memory at {address:#x}"))
    }

    fn cfa(&self, rule: &CfaRule<usize>) -> Result<u64> {
        match rule {
            CfaRule::RegisterAndOffset { register, offset } => {
                Ok(self.register(*register)?.wrapping_add_signed(*offset))
            }
            CfaRule::Expression(expression) => self.expression(expression.get(self.section)?, None),
        }
    }

    fn value(&self, register: Register, rule: &RegisterRule<usize>, cfa: u64) -> Result<u64> {
        match rule {
            RegisterRule::SameValue => self.register(register),
            RegisterRule::Offset(offset) => self.memory(cfa.wrapping_add_signed(*offset)),
            RegisterRule::ValOffset(offset) => Ok(cfa.wrapping_add_signed(*offset)),
            RegisterRule::Register(other) => self.register(*other),
            RegisterRule::Expression(expression) => {
                self.memory(self.expression(expression.get(self.section)?, Some(cfa))?)
            }
            RegisterRule::ValExpression(expression) => {
                self.expression(expression.get(self.section)?, Some(cfa))
            }
            _ => bail!("{rule:?}"),
        }
    }

    fn expression(&self, expression: Expression<Bytes<'_>>, initial: Option<u64>) -> Result<u64> {
        let mut evaluation = expression.evaluation(self.encoding);
        if let Some(initial) = initial {
            evaluation.set_initial_value(initial);
        }
        let mut result = evaluation.evaluate()?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = Value::Generic(self.register(register)?);
                    evaluation.resume_with_register(value)?
                }
                EvaluationResult::RequiresMemory { address, size, .. } => {
                    anyhow::ensure!(size == 8, "a read of {size} bytes");
                    evaluation.resume_with_memory(Value::Generic(self.memory(address)?))?
                }
                other => bail!("{other:?}"),
            };
        }
        match evaluation.as_result().last().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            other => bail!("{other:?}"),
        }
    }
}
