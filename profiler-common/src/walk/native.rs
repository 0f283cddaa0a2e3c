//! Native frames: which object an address is in, and the rule that leads from
//! there to the caller.
//!
//! The agent fills the tables: for each process its executable [`Mapping`]s in
//! ascending order, for each object its [`Page`]s of text, and the rows and
//! rules of `unwind`. Everything is published from the inside out (rows before
//! pages, pages before mappings, mappings before the process that uses them),
//! and taken away in the other direction.

use bytemuck::Pod;
use bytemuck::Zeroable;

use crate::unwind;
use crate::unwind::Chunk;
use crate::unwind::PAGE;
use crate::unwind::Rule;

/// Most executable mappings of one process that the search can tell apart.
pub const MAX_MAPPINGS: u32 = 1 << 11;

/// A stretch of executable memory of one process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address past the end.
    pub end: u64,
    /// What is added to the object's own addresses; 0 for what is no file.
    pub bias: u64,
    /// See [`object`](mod@crate::wire::object).
    pub object: u32,
    /// Place of the object's first page in the table of pages.
    pub pages_at: u32,
    /// The number of that page: an own address divided by [`PAGE`].
    pub first_page: u32,
    /// Pages of the object; 0 if it has no unwind table (yet).
    pub pages: u32,
    /// See [`mapping_flags`].
    pub flags: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
}

/// What is special about a mapping.
pub mod mapping_flags {
    /// Frames of it are walked but not sent.
    pub const HIDDEN: u32 = 1 << 0;
    /// It holds Ruby's interpreter.
    pub const INTERPRETER: u32 = 1 << 1;
}

impl Mapping {
    /// Whether `address` lies inside.
    #[inline(always)]
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }
}

/// The rows of one page of an object's text.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Page {
    /// The chunk that holds them.
    pub chunk: u32,
    /// The first of them in the chunk.
    pub first: u16,
    /// How many there are; 0 if nothing describes the page.
    pub count: u16,
}

/// The tables, wherever they are.
pub trait Tables {
    /// The mapping at a place in the table of mappings.
    fn mapping(&self, at: u32) -> Option<&Mapping>;
    /// The page at a place in the table of pages.
    fn page(&self, at: u32) -> Option<Page>;
    /// A chunk of rows.
    fn chunk(&self, number: u32) -> Option<&Chunk>;
    /// The rule with this number.
    fn rule(&self, number: u16) -> Option<&Rule>;
}

/// Searches the `count` (at most [`MAX_MAPPINGS`]) mappings from `first` on for
/// the one that holds `address`.
///
/// Without a branch, as [`unwind::find`].
#[inline(always)]
pub fn locate<T: Tables>(tables: &T, first: u32, count: u32, address: u64) -> Option<&Mapping> {
    let end = u64::from(first).wrapping_add(u64::from(count));
    let mut at = u64::from(first);
    let mut stride = u64::from(MAX_MAPPINGS / 2);
    while stride != 0 {
        let probe = at.wrapping_add(stride);
        let start = tables
            .mapping(probe as u32)
            .map_or(u64::MAX >> 1, |it| it.start);
        // Addresses have at most 56 bits.
        let before = unwind::below(address, start);
        at = at.wrapping_add(stride & unwind::below(probe, end) & !before);
        stride >>= 1;
    }
    tables
        .mapping(at as u32)
        .filter(|mapping| count != 0 && mapping.contains(address))
}

/// Why there is no rule for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRule {
    /// The object has no table (yet).
    Table,
    /// The object's table does not describe the address.
    Row,
}

/// The rule for an object's own `address`.
///
/// # Errors
/// [`NoRule`] says why there is none.
#[inline(always)]
pub fn rule_for<'a, T: Tables>(
    tables: &'a T,
    mapping: &Mapping,
    address: u64,
) -> Result<&'a Rule, NoRule> {
    if mapping.pages == 0 {
        return Err(NoRule::Table);
    }
    let number = (address / PAGE).wrapping_sub(u64::from(mapping.first_page));
    if number >= u64::from(mapping.pages) {
        return Err(NoRule::Row);
    }
    let page = tables
        .page(mapping.pages_at.wrapping_add(number as u32))
        .ok_or(NoRule::Row)?;
    if page.count == 0 {
        return Err(NoRule::Row);
    }
    let chunk = tables.chunk(page.chunk).ok_or(NoRule::Row)?;
    let number = unwind::find(
        chunk,
        u32::from(page.first),
        u32::from(page.count),
        (address % PAGE) as u16,
    );
    tables.rule(number).ok_or(NoRule::Row)
}

const _: () = assert!(size_of::<Mapping>() == 48);
const _: () = assert!(size_of::<Page>() == 8);
