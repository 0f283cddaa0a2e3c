//! The functions that an ELF file names, as a list that is safe to search.
//!
//! Any user can map any file, and may change it while it is read. So a file is
//! read piece by piece within limits, and only what makes sense is taken: named
//! functions inside sections of code. Afterwards no two of them overlap in a
//! way that makes a search miss or slow.

use std::cmp::Reverse;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use object::elf;

/// Most symbols in a table that is read; that of V8, the largest thing seen in
/// Ruby programs, has 200,000.
const MAX_SYMBOLS: u64 = 1 << 20;
/// Largest table of symbols or names, bytes.
const MAX_TABLE: u64 = 64 << 20;
/// Longest name, bytes; what is longer is no name.
pub(super) const MAX_NAME: usize = 1 << 13;
/// Sizes of a section header and of a symbol.
const SECTION: usize = 64;
const SYMBOL: usize = 24;

/// A function by its address in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named<'a> {
    /// First byte.
    pub(super) start: u64,
    /// The byte after the last one.
    pub(super) end: u64,
    /// Without terminator; never empty, at most [`MAX_NAME`] bytes.
    pub(super) name: &'a [u8],
}

/// Why a file gives no functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is no 64-bit little-endian ELF file, or a piece of one.
    Malformed,
    /// Its table is larger than is read.
    TooLarge,
}

/// Which table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// `.symtab`, which `strip` removes.
    All,
    /// `.dynsym`: what other objects may use.
    Dynamic,
}

/// A symbol table and its names, as bytes.
#[derive(Debug)]
pub(super) struct RawTable {
    symbols: Vec<u8>,
    names: Vec<u8>,
    /// Addresses and sizes of the sections with code; empty ranges for others.
    code: Vec<(u64, u64)>,
}

struct Section {
    kind: u32,
    flags: u64,
    address: u64,
    offset: u64,
    size: u64,
    link: u32,
}

impl RawTable {
    /// Reads a table; `None` if the file has none.
    pub(super) fn read(file: &File, which: Which) -> Result<Option<Self>, Unusable> {
        let sections = sections(file)?;
        let kind = match which {
            Which::All => elf::SHT_SYMTAB.0,
            Which::Dynamic => elf::SHT_DYNSYM.0,
        };
        let Some(table) = sections.iter().find(|section| section.kind == kind) else {
            return Ok(None);
        };
        let names = (usize::try_from(table.link).ok())
            .and_then(|link| sections.get(link))
            .filter(|names| names.kind == elf::SHT_STRTAB.0)
            .ok_or(Unusable::Malformed)?;
        if table.size / SYMBOL as u64 > MAX_SYMBOLS {
            return Err(Unusable::TooLarge);
        }
        let code = sections
            .iter()
            .map(|section| match section.address.checked_add(section.size) {
                Some(end) if section.flags & elf::SHF_EXECINSTR.0 != 0 => (section.address, end),
                _ => (0, 0),
            })
            .collect();
        Ok(Some(Self {
            symbols: contents(file, table)?,
            names: contents(file, names)?,
            code,
        }))
    }

    /// The functions in it, in the order of the table; the end of one without
    /// a size is that of its section.
    fn functions(&self) -> impl Iterator<Item = Found<'_>> {
        self.symbols.chunks_exact(SYMBOL).filter_map(|symbol| {
            let kind = symbol.get(4)? & 0xf;
            if kind != elf::STT_FUNC.0 && kind != elf::STT_GNU_IFUNC.0 {
                return None;
            }
            let section = usize::from(u16_at(symbol, 6)?);
            let (first, end) = *self.code.get(section).filter(|_| section != 0)?;
            let start = u64_at(symbol, 8)?;
            let size = u64_at(symbol, 16)?;
            if !(first..end).contains(&start) {
                return None;
            }
            let name = self.names.get(u32_at(symbol, 0)? as usize..)?;
            let name = name.get(..memchr::memchr(0, name.get(..name.len().min(MAX_NAME))?)?)?;
            // The version is for linkers: `memcpy@@GLIBC_2.14`.
            let name = match memchr::memchr(b'@', name) {
                Some(version) => name.get(..version)?,
                None => name,
            };
            (!name.is_empty()).then_some(Found {
                sized: size != 0,
                named: Named {
                    start,
                    end: match size {
                        0 => end,
                        _ => start.saturating_add(size).min(end),
                    },
                    name,
                },
            })
        })
    }
}

#[derive(Clone, Copy)]
struct Found<'a> {
    sized: bool,
    named: Named<'a>,
}

/// The functions of several tables of one program, in the order of addresses,
/// and no two with the same one. Where a function lies inside another, what is
/// left of the outer one after it comes as a piece of its own.
pub(super) fn functions(tables: &[RawTable]) -> Vec<Named<'_>> {
    let mut found: Vec<Found<'_>> = tables.iter().flat_map(RawTable::functions).collect();
    found.sort_unstable_by(|a, b| order(a).cmp(&order(b)));
    // The largest of those at one address, under the best of their names.
    let mut distinct: Vec<Found<'_>> = Vec::with_capacity(found.len());
    for next in found {
        match distinct.last_mut() {
            Some(last) if last.named.start == next.named.start => {
                if !last.sized && next.sized {
                    *last = Found {
                        named: Named {
                            name: last.named.name,
                            ..next.named
                        },
                        sized: true,
                    };
                } else if last.sized == next.sized {
                    last.named.end = last.named.end.max(next.named.end);
                }
            }
            _ => distinct.push(next),
        }
    }
    // One without a size ends where the next one begins.
    let mut next_start = u64::MAX;
    for function in distinct.iter_mut().rev() {
        if !function.sized {
            function.named.end = function.named.end.min(next_start);
        }
        next_start = function.named.start;
    }
    without_overlaps(distinct.into_iter().map(|found| found.named))
}

/// By address; of several names for one address the one that people use comes
/// first: `malloc` rather than `__libc_malloc`.
fn order<'a>(found: &Found<'a>) -> (u64, usize, Reverse<bool>, usize, &'a [u8]) {
    let name = found.named.name;
    let underscores = name.iter().take_while(|&&byte| byte == b'_').count();
    // `_ZN` and `_R` are how C++ and Rust begin, and no sign of something internal.
    let underscores = match name {
        [b'_', b'Z' | b'R', ..] => 0,
        _ => underscores,
    };
    (
        found.named.start,
        underscores,
        Reverse(found.sized),
        name.len(),
        name,
    )
}

fn without_overlaps<'a>(sorted: impl Iterator<Item = Named<'a>>) -> Vec<Named<'a>> {
    let mut pieces = Vec::with_capacity(sorted.size_hint().0);
    // Those that have begun and not ended, each inside the one before it.
    let mut open: Vec<Named<'a>> = Vec::new();
    for function in sorted {
        close(&mut open, &mut pieces, function.start);
        pieces.push(function);
        open.push(function);
    }
    close(&mut open, &mut pieces, u64::MAX);
    pieces
}

/// Ends what ends up to `address`, and goes on with what is around it.
fn close<'a>(open: &mut Vec<Named<'a>>, pieces: &mut Vec<Named<'a>>, address: u64) {
    while let Some(ended) = open.pop_if(|last| last.end <= address) {
        while open.pop_if(|outer| outer.end <= ended.end).is_some() {}
        if let Some(outer) = open.last()
            && ended.end < address
        {
            pieces.push(Named {
                start: ended.end,
                ..*outer
            });
        }
    }
}

fn sections(file: &File) -> Result<Vec<Section>, Unusable> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0)
        .map_err(|_| Unusable::Malformed)?;
    if !header.starts_with(&[
        0x7f,
        b'E',
        b'L',
        b'F',
        elf::ELFCLASS64.0,
        elf::ELFDATA2LSB.0,
    ]) {
        return Err(Unusable::Malformed);
    }
    let parse = || {
        let offset = u64_at(&header, 0x28)?;
        let size = usize::from(u16_at(&header, 0x3a)?);
        let count = usize::from(u16_at(&header, 0x3c)?);
        Some((offset, size, count))
    };
    let (offset, size, count) = parse().ok_or(Unusable::Malformed)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    if size != SECTION {
        return Err(Unusable::Malformed);
    }
    // At most 4 MiB: the count has 16 bits.
    let mut bytes = vec![0; count * SECTION];
    file.read_exact_at(&mut bytes, offset)
        .map_err(|_| Unusable::Malformed)?;
    let section = |bytes: &[u8]| {
        Some(Section {
            kind: u32_at(bytes, 4)?,
            flags: u64_at(bytes, 8)?,
            address: u64_at(bytes, 16)?,
            offset: u64_at(bytes, 24)?,
            size: u64_at(bytes, 32)?,
            link: u32_at(bytes, 40)?,
        })
    };
    bytes
        .chunks_exact(SECTION)
        .map(|bytes| section(bytes).ok_or(Unusable::Malformed))
        .collect()
}

fn contents(file: &File, section: &Section) -> Result<Vec<u8>, Unusable> {
    if section.flags & elf::SHF_COMPRESSED.0 != 0 || section.kind == elf::SHT_NOBITS.0 {
        return Err(Unusable::Malformed);
    }
    if section.size > MAX_TABLE {
        return Err(Unusable::TooLarge);
    }
    let length = file.metadata().map_err(|_| Unusable::Malformed)?.len();
    let end = section.offset.checked_add(section.size);
    if end.is_none_or(|end| end > length) {
        return Err(Unusable::Malformed);
    }
    let size = usize::try_from(section.size).map_err(|_| Unusable::TooLarge)?;
    let mut bytes = vec![0; size];
    file.read_exact_at(&mut bytes, section.offset)
        .map_err(|_| Unusable::Malformed)?;
    Ok(bytes)
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(start: u64, end: u64, name: &str) -> Named<'_> {
        Named {
            start,
            end,
            name: name.as_bytes(),
        }
    }

    #[test]
    fn what_is_around_goes_on_after_what_is_inside() {
        let pieces = without_overlaps(
            [
                named(10, 100, "outer"),
                named(20, 40, "inner"),
                named(30, 40, "innermost"),
                named(60, 120, "across"),
                named(200, 210, "alone"),
            ]
            .into_iter(),
        );
        let expected = [
            named(10, 100, "outer"),
            named(20, 40, "inner"),
            named(30, 40, "innermost"),
            named(40, 100, "outer"),
            named(60, 120, "across"),
            named(200, 210, "alone"),
        ];
        assert_eq!(pieces, expected);
    }

    fn table(symbols: &[(&str, u64, u64)]) -> RawTable {
        let mut raw = RawTable {
            symbols: Vec::new(),
            names: vec![0],
            code: vec![(0, 0), (0x1000, 0x2000)],
        };
        for (name, start, size) in symbols {
            let at = u32::try_from(raw.names.len()).unwrap();
            raw.names.extend_from_slice(name.as_bytes());
            raw.names.push(0);
            raw.symbols.extend(at.to_le_bytes());
            raw.symbols.extend([elf::STT_FUNC.0, 0, 1, 0]);
            raw.symbols.extend(start.to_le_bytes());
            raw.symbols.extend(size.to_le_bytes());
        }
        raw
    }

    #[test]
    fn of_several_names_the_usual_one_is_taken() {
        let tables = [
            table(&[
                ("__libc_malloc", 0x1100, 16),
                ("malloc@@GLIBC_2.2.5", 0x1100, 16),
            ]),
            table(&[("_ZN1a1bEv", 0x1200, 4), ("x", 0x1300, 8)]),
        ];
        let expected = [
            named(0x1100, 0x1110, "malloc"),
            named(0x1200, 0x1204, "_ZN1a1bEv"),
            named(0x1300, 0x1308, "x"),
        ];
        assert_eq!(functions(&tables), expected);
    }

    #[test]
    fn sizes_are_held_within_the_code() {
        let tables = [table(&[
            ("no_size", 0x1000, 0),
            ("next", 0x1010, u64::MAX),
            ("outside", 0x3000, 4),
            ("", 0x1500, 4),
        ])];
        let expected = [
            named(0x1000, 0x1010, "no_size"),
            named(0x1010, 0x2000, "next"),
        ];
        assert_eq!(functions(&tables), expected);
    }
}
