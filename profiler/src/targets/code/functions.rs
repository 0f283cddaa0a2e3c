//! Where functions begin and end: `.eh_frame`, which `strip` leaves.

use gimli::BaseAddresses;
use gimli::CieOrFde;
use gimli::EhFrame;
use gimli::EhFrameHdr;
use gimli::EndianSlice;
use gimli::LittleEndian;
use gimli::Pointer;
use gimli::UnwindSection as _;
use object::read::ReadRef;

use rbprof_common::process::Range;

use crate::targets::elf::Elf;
use crate::targets::elf::ElfError;

/// Most functions taken from one file; libruby has 8,000 to 16,000.
const MAX_FUNCTIONS: usize = 1 << 20;
/// Address and offset size of 64-bit files.
const ADDRESS_SIZE: u8 = 8;

/// The functions of a file in the order of their addresses, before the bias.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Functions(Vec<Range>);

impl Functions {
    /// Reads them from a file.
    ///
    /// # Errors
    /// [`ElfError::Malformed`] when there is no `.eh_frame`, or nothing in it
    /// can be read. What comes before a defect is kept.
    pub fn of<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Result<Self, ElfError> {
        let (address, data) = eh_frame(elf)?;
        Self::parse(address, data)
    }

    /// Reads them from the contents of `.eh_frame`, which is at `address`.
    ///
    /// # Errors
    /// As [`Functions::of`].
    pub fn parse(address: u64, eh_frame: &[u8]) -> Result<Self, ElfError> {
        let section = EhFrame::new(eh_frame, LittleEndian);
        let bases = BaseAddresses::default().set_eh_frame(address);
        let mut ranges = Vec::new();
        let mut entries = section.entries(&bases);
        while ranges.len() < MAX_FUNCTIONS {
            let Ok(Some(entry)) = entries.next() else {
                break;
            };
            let CieOrFde::Fde(partial) = entry else {
                continue;
            };
            let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else {
                continue;
            };
            let range = Range {
                start: fde.initial_address(),
                end: fde.initial_address().saturating_add(fde.len()),
            };
            if range.start < range.end {
                ranges.push(range);
            }
        }
        if ranges.is_empty() {
            return Err(ElfError::Malformed("no function in .eh_frame"));
        }
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        ranges.dedup_by_key(|range| range.start);
        Ok(Self(ranges))
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, lowest address first.
    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.0.iter().copied()
    }

    /// The function that begins at `address`.
    #[must_use]
    pub fn starting_at(&self, address: u64) -> Option<Range> {
        let index = self.0.binary_search_by_key(&address, |range| range.start);
        self.0.get(index.ok()?).copied()
    }

    /// The function that has `address` in it.
    #[must_use]
    pub fn containing(&self, address: u64) -> Option<Range> {
        let after = self.0.partition_point(|range| range.start <= address);
        let range = self.0.get(after.checked_sub(1)?)?;
        range.contains(address).then_some(*range)
    }

    /// The function right before the one that begins at `address`.
    #[must_use]
    pub fn before(&self, address: u64) -> Option<Range> {
        let at = self.0.partition_point(|range| range.start < address);
        self.0.get(at.checked_sub(1)?).copied()
    }
}

/// `.eh_frame` and its address: by the program header that leads to its search
/// table, which is what unwinders in the process use as well, else by name.
pub(crate) fn eh_frame<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
) -> Result<(u64, &'data [u8]), ElfError> {
    if let Some((address, bytes)) = elf.eh_frame_header() {
        let header = EhFrameHdr::from(EndianSlice::new(bytes, LittleEndian));
        let bases = BaseAddresses::default().set_eh_frame_hdr(address);
        if let Ok(parsed) = header.parse(&bases, ADDRESS_SIZE)
            && let Pointer::Direct(start) = parsed.eh_frame_ptr()
            && let Ok(data) = elf.bytes_to_end(start)
        {
            return Ok((start, data));
        }
    }
    match elf.section_data(b".eh_frame")? {
        Some(found) => Ok(found),
        None => Err(ElfError::Malformed("no .eh_frame")),
    }
}
