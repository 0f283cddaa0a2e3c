//! Unwind tables: the call frame information of a file (`.eh_frame`, or
//! `.debug_frame` where there is none), compiled to the rows that the walk over
//! native frames searches.
//!
//! A file belongs to whoever runs the target. What a file can cost is bounded
//! by its size: the instructions that are executed, the rows, the text. What is
//! beyond a bound, or malformed, is unknown to the table, and counted.
//!
//! | module | what it does |
//! |---|---|
//! | `frames` | the functions of a section, and what their instructions say |
//! | `rules` | one row of DWARF to one [`Rule`] |
//! | `builder` | rules by address, to rows by page |
//! | [`store`] | tables in place, for the walk |
//! | `recognized` | code that nothing describes and that is known all the same |
//! | `leaves` | the part of that which keeps its return address in a register |

mod builder;
mod frames;
mod leaves;
mod recognized;
mod rules;
pub mod store;

use std::fmt;

use gimli::BaseAddresses;
use gimli::DebugFrame;
use gimli::EhFrame;
use gimli::LittleEndian;
use gimli::Vendor;
use object::read::ReadRef;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Row;
use rbprof_common::unwind::Rule;

use crate::targets::code::functions::eh_frame;
use crate::targets::elf::Elf;
use crate::targets::elf::ElfError;
use crate::targets::elf::Machine;

use self::builder::Builder;
pub use self::rules::Reason;

/// Most text of one file that gets rows, in bytes.
const MAX_TEXT: u64 = 1 << 30;

/// Why a file has no unwind table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnwindError {
    /// Its machine is not one that the walk knows.
    Machine(Machine),
    /// It describes no function, neither in `.eh_frame` nor in `.debug_frame`.
    NoFunctions,
    /// It cannot be read.
    Elf(ElfError),
}

impl fmt::Display for UnwindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(machine) => write!(f, "no unwinding on {machine}"),
            Self::NoFunctions => write!(f, "neither .eh_frame nor .debug_frame has a function"),
            Self::Elf(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for UnwindError {}

impl From<ElfError> for UnwindError {
    fn from(error: ElfError) -> Self {
        Self::Elf(error)
    }
}

/// A stretch of [`PAGE`] bytes of text, and which rows are its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its address in the image, before the bias, divided by [`PAGE`].
    pub number: u32,
    /// Its first row, which is at the first byte of the page.
    pub first: u32,
    /// Its rows: 1 to [`MAX_PAGE_ROWS`].
    ///
    /// [`MAX_PAGE_ROWS`]: rbprof_common::unwind::MAX_PAGE_ROWS
    pub count: u32,
}

/// Some of the rows and of the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Rows of the file's call frame information, before any were merged.
    pub rows: u32,
    /// The text that they describe, in bytes.
    pub text: u64,
}

/// What a table is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Functions with call frame information. A function that the compiler
    /// split counts for each part.
    pub functions: u32,
    /// Signal trampolines and entry points that nothing describes and that were
    /// recognized.
    pub recognized: u32,
    /// All that is described.
    pub described: Share,
    /// What could not be expressed, by [`Reason`].
    inexpressible: [Share; Reason::ALL.len()],
}

impl Statistics {
    /// How much could not be expressed for that reason.
    #[must_use]
    pub fn inexpressible(&self, reason: Reason) -> Share {
        self.inexpressible
            .get(reason as usize)
            .copied()
            .unwrap_or_default()
    }

    fn count(&mut self, reason: Reason, text: u64) {
        if let Some(share) = self.inexpressible.get_mut(reason as usize) {
            share.rows = share.rows.saturating_add(1);
            share.text = share.text.saturating_add(text);
        }
    }
}

/// The unwind table of one file. Addresses are those in the file, before the
/// bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pages: Vec<Page>,
    rows: Vec<Row>,
    rules: Vec<Rule>,
    statistics: Statistics,
}

impl Table {
    /// The pages that have any rule, lowest address first.
    #[must_use]
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// The rows of all pages, one page after the other.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The rows of one page.
    #[must_use]
    pub fn rows_of(&self, page: Page) -> &[Row] {
        let start = page.first as usize;
        self.rows
            .get(start..start.saturating_add(page.count as usize))
            .unwrap_or_default()
    }

    /// The rules by number; the first is [`Rule::UNKNOWN`].
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// What it is made of.
    #[must_use]
    pub const fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Bytes of the rows and rules.
    #[must_use]
    pub fn size(&self) -> usize {
        size_of_val(self.rows.as_slice()) + size_of_val(self.rules.as_slice())
    }

    /// The rule for an address: [`Rule::UNKNOWN`] outside of all functions.
    #[must_use]
    pub fn rule(&self, address: u64) -> Rule {
        self.lookup(address).unwrap_or(Rule::UNKNOWN)
    }

    fn lookup(&self, address: u64) -> Option<Rule> {
        let number = u32::try_from(address / PAGE).ok()?;
        let page = self.pages.binary_search_by_key(&number, |it| it.number);
        let rows = self.rows_of(*self.pages.get(page.ok()?)?);
        let pc = (address % PAGE) as u16;
        let after = rows.partition_point(|row| row.pc <= pc);
        let row = rows.get(after.checked_sub(1)?)?;
        self.rules.get(usize::from(row.rule)).copied()
    }
}

/// Compiles the unwind table of a file. `debug_file`, if there is one, is looked
/// at for `.debug_frame` where the file itself describes no function.
///
/// # Errors
/// [`UnwindError`]. What comes before a defect is kept, and what a function's
/// defect leaves out is counted.
pub fn compile<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    debug_file: Option<&Elf<'data, R>>,
) -> Result<Table, UnwindError> {
    let machine = elf.machine();
    let columns = rules::Columns::of(machine).ok_or(UnwindError::Machine(machine))?;
    let mut builder = Builder::default();
    let text = text(elf);
    let recognized = recognized::find(elf, &text);
    let mut compiled = false;
    if let Ok((address, data)) = eh_frame(elf) {
        let mut section = EhFrame::new(data, LittleEndian);
        if machine == Machine::Aarch64 {
            section.set_vendor(Vendor::AArch64);
        }
        let bases = BaseAddresses::default().set_eh_frame(address);
        compiled = frames::compile(
            &section,
            &bases,
            data.len(),
            columns,
            &text,
            &recognized,
            &mut builder,
        );
    }
    for file in [Some(elf), debug_file].into_iter().flatten() {
        if compiled {
            break;
        }
        let Some(data) = file.debug_section(b".debug_frame")? else {
            continue;
        };
        let mut section = DebugFrame::new(&data, LittleEndian);
        section.set_address_size(8);
        if machine == Machine::Aarch64 {
            section.set_vendor(Vendor::AArch64);
        }
        compiled = frames::compile(
            &section,
            &BaseAddresses::default(),
            data.len(),
            columns,
            &text,
            &recognized,
            &mut builder,
        );
    }
    if !compiled {
        // The arm64 vDSO. An entry point alone is no table.
        if recognized.iter().all(|it| it.rule == Rule::END) {
            return Err(UnwindError::NoFunctions);
        }
        frames::put_recognized(&recognized, &mut builder);
    }
    Ok(builder.finish())
}

/// The executable segments: where each begins and ends. Nothing else gets rows.
fn text<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Vec<(u64, u64)> {
    let mut left = MAX_TEXT;
    let mut text = Vec::new();
    for load in elf.loads().iter().filter(|load| load.executable) {
        let Some(rest) = left.checked_sub(load.file_size) else {
            break;
        };
        let end = load.address.saturating_add(load.file_size);
        // The numbers of pages have 32 bits.
        if end / PAGE < u64::from(u32::MAX) {
            left = rest;
            text.push((load.address, end));
        }
    }
    text
}

#[cfg(test)]
mod tests;
