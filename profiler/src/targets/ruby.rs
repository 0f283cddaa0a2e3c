//! Which mapped file is a Ruby, and where its symbols are.

use std::fmt;
use std::io;

use object::read::ReadRef;

use crate::memory::PinnedProcess;
use crate::memory::TargetMemory;

use super::elf::Elf;
use super::elf::ElfError;
use super::elf::Symbol;
use super::image::Image;
use super::image::ImageError;
use super::mappings::MappedFile;
use super::mappings::Mapping;

/// What every Ruby defines: a string with its version.
pub(crate) const RUBY_VERSION: &[u8] = b"ruby_version";
/// Longest version string; real ones have a dozen bytes.
pub(crate) const MAX_VERSION: u64 = 64;

/// Where a symbol was found, the most trusted first. What stripped builds do
/// not show at all is recovered after these have been asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Exported by the build.
    DynSym,
    /// In the full symbol table, which `strip` would have removed.
    SymTab,
    /// In the full symbol table of a separate debug file.
    DebugFile,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DynSym => ".dynsym",
            Self::SymTab => ".symtab",
            Self::DebugFile => "debug file",
        })
    }
}

/// A symbol and where it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// The symbol.
    pub symbol: Symbol,
    /// Where it was found.
    pub source: Source,
}

impl fmt::Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source)?;
        if self.symbol.protected {
            write!(f, ", protected")?;
        }
        Ok(())
    }
}

/// Looks the names up in the sources, in their order. A source that cannot be
/// read is passed over.
pub fn locate<'data, R: ReadRef<'data>, const N: usize>(
    elf: &Elf<'data, R>,
    names: [&[u8]; N],
) -> [Option<Located>; N] {
    let mut found = names.map(|name| {
        let symbol = elf.dynamic_symbol(name).ok().flatten()?;
        Some(Located {
            symbol,
            source: Source::DynSym,
        })
    });
    if found.iter().any(Option::is_none)
        && let Ok(symbols) = elf.static_symbols(names)
    {
        for (found, symbol) in found.iter_mut().zip(symbols) {
            *found = found.or(symbol.map(|symbol| Located {
                symbol,
                source: Source::SymTab,
            }));
        }
    }
    found
}

/// Looks the names that were not found up in a separate debug file.
pub fn locate_in_debug_file<'data, R: ReadRef<'data>, const N: usize>(
    found: &mut [Option<Located>; N],
    names: [&[u8]; N],
    debug: &Elf<'data, R>,
) {
    let Ok(symbols) = debug.static_symbols(names) else {
        return;
    };
    for (found, symbol) in found.iter_mut().zip(symbols) {
        *found = found.or(symbol.map(|symbol| Located {
            symbol,
            source: Source::DebugFile,
        }));
    }
}

/// A Ruby that a process has mapped.
#[derive(Debug)]
pub struct RubyImage {
    /// The file.
    pub image: Image,
    /// What `ruby_version` holds, read from the process.
    pub version_text: String,
    /// Where that was found.
    pub version_source: VersionSource,
}

/// What tells the version of a Ruby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionSource {
    /// The variable `ruby_version`.
    Symbol(Located),
    /// The text that `ruby -v` prints, in the data of a file that has no symbols
    /// at all: a program that Ruby was linked into.
    Text,
}

impl fmt::Display for VersionSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Symbol(located) => write!(f, "ruby_version in {located}"),
            Self::Text => f.write_str("the text that ruby -v prints, in the data"),
        }
    }
}

/// Why no Ruby was found.
#[derive(Debug)]
pub enum NotFound {
    /// No mapped file defines `ruby_version`.
    Nowhere {
        /// How many ELF files were looked at.
        files: usize,
    },
    /// Not every file could be opened, and the others are no Ruby.
    Unopened {
        /// Path of the first one.
        path: String,
        /// What the system said.
        error: io::Error,
    },
    /// A file defines `ruby_version`, but its text cannot be read.
    Unreadable {
        /// Its path.
        path: String,
    },
}

/// Finds the mapped file that defines `ruby_version`: a shared library, a
/// program that Ruby is linked into, or either under any name, deleted or not.
///
/// File names decide only what is looked at first. A file costs a handful of
/// small reads when it is no Ruby and has no full symbol table.
///
/// A process may have mapped several; `skip` of them are passed over.
///
/// # Errors
/// [`NotFound`].
pub fn find<M: TargetMemory>(
    process: &PinnedProcess,
    memory: &M,
    mappings: &[Mapping],
    mut skip: usize,
) -> Result<RubyImage, NotFound> {
    let mut files = MappedFile::all(mappings);
    files.retain(|file| file.is_executable() || starts_like_elf(file, memory));
    files.sort_by_key(|file| {
        let size: u64 = file
            .mappings
            .iter()
            .map(|mapping| mapping.range.end - mapping.range.start)
            .sum();
        (
            !file.is_executable(),
            !names_ruby(file.path()),
            std::cmp::Reverse(size),
        )
    });
    let mut unopened = None;
    let mut without_dynamic_symbol = Vec::new();
    for file in &files {
        let image = match Image::open(process, memory, file) {
            Ok(image) => image,
            Err(ImageError::Open(error)) => {
                unopened.get_or_insert((file.display_path(), error));
                continue;
            }
            Err(ImageError::Elf(_) | ImageError::NotLoaded) => continue,
        };
        let exported = image.elf().and_then(|elf| {
            let symbol = elf.dynamic_symbol(RUBY_VERSION)?;
            Ok(symbol.filter(|symbol| is_constant(&elf, *symbol)))
        });
        match exported {
            Ok(Some(_)) if skip > 0 => skip -= 1,
            Ok(Some(symbol)) => {
                let source = Source::DynSym;
                return read_version(image, Located { symbol, source }, memory);
            }
            Ok(None) | Err(_) => without_dynamic_symbol.push(image),
        }
    }
    let looked_at = without_dynamic_symbol.len();
    let mut without_symbol = Vec::new();
    // Only now: a full symbol table must be read as a whole.
    for image in without_dynamic_symbol {
        match in_full_table(&image) {
            Ok(Some(_)) if skip > 0 => skip -= 1,
            Ok(Some(symbol)) => {
                let source = Source::SymTab;
                return read_version(image, Located { symbol, source }, memory);
            }
            Ok(None) | Err(_) => without_symbol.push(image),
        }
    }
    // And last of all, since the text of a large file has to be read.
    for image in without_symbol {
        if let Some(version_text) = image.elf().ok().and_then(|elf| version_in_text(&elf)) {
            if skip > 0 {
                skip -= 1;
                continue;
            }
            return Ok(RubyImage {
                image,
                version_text,
                version_source: VersionSource::Text,
            });
        }
    }
    match unopened {
        Some((path, error)) => Err(NotFound::Unopened { path, error }),
        None => Err(NotFound::Nowhere { files: looked_at }),
    }
}

/// Whether a variable is in memory that is not writable. A program that is
/// linked for fixed addresses and uses a library's variable has a copy of it in
/// its own data, under the same name.
pub(crate) fn is_constant<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>, symbol: Symbol) -> bool {
    elf.loads().iter().any(|load| {
        !load.writable
            && symbol
                .value
                .checked_sub(load.address)
                .is_some_and(|inside| inside < load.memory_size)
    })
}

fn in_full_table(image: &Image) -> Result<Option<Symbol>, ElfError> {
    let elf = image.elf()?;
    let [symbol] = elf.static_symbols([RUBY_VERSION])?;
    Ok(symbol.filter(|symbol| is_constant(&elf, *symbol)))
}

/// Code of an interpreter: at least this much, in bytes. It has 2.5 MB.
const MIN_CODE: u64 = 1 << 20;
/// What `ruby -v` prints begins so; the version and a date follow.
const DESCRIPTION: &[u8] = b"ruby ";
/// Longest stretch of a description looked at.
const MAX_DESCRIPTION: usize = 48;

/// The version in the text that `ruby -v` prints, such as `ruby 3.3.8
/// (2025-04-09 revision ...`, if a file is large enough for an interpreter and
/// all such texts in it agree.
pub(crate) fn version_in_text<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Option<String> {
    let loads = elf.loads();
    if !loads
        .iter()
        .any(|load| load.executable && load.file_size >= MIN_CODE)
    {
        return None;
    }
    let mut versions: Vec<String> = loads
        .iter()
        .filter(|load| !load.writable)
        .filter_map(|load| elf.bytes(load.address, load.file_size).ok())
        .flat_map(|bytes| {
            memchr::memmem::find_iter(bytes, DESCRIPTION)
                .filter_map(|at| described_version(bytes.get(at..)?))
        })
        .collect();
    versions.dedup();
    match <[String; 1]>::try_from(versions) {
        Ok([version]) => Some(version),
        Err(_) => None,
    }
}

/// The version in a description.
fn described_version(text: &[u8]) -> Option<String> {
    let text = text.get(..MAX_DESCRIPTION).unwrap_or(text);
    let text = text.strip_prefix(DESCRIPTION)?;
    let open = text.iter().position(|&byte| byte == b'(')?;
    let (name, rest) = text.split_at_checked(open)?;
    // The date of the release: (2025-04-09
    let [b'(', year @ .., b'-'] = rest.get(..6)? else {
        return None;
    };
    if !year.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // The patch level is not part of the version: 2.7.4p191.
    let name = std::str::from_utf8(name).ok()?.trim_end();
    let name = name.split('p').next()?;
    let is_version = |part: &str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
    let mut parts = name.split('.');
    let numbers = [parts.next()?, parts.next()?];
    let last = parts.next()?;
    let patch = last.trim_end_matches("dev");
    let all = numbers.into_iter().chain([patch]).all(is_version);
    (all && parts.next().is_none()).then(|| name.to_owned())
}

fn read_version<M: TargetMemory>(
    image: Image,
    version_source: Located,
    memory: &M,
) -> Result<RubyImage, NotFound> {
    let symbol = version_source.symbol;
    let length = if symbol.size == 0 {
        16
    } else {
        symbol.size.min(MAX_VERSION)
    };
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let text = memory
        .read(image.live(symbol.value), &mut bytes)
        .ok()
        .and_then(|()| {
            let text = bytes.split(|&byte| byte == 0).next()?;
            std::str::from_utf8(text).ok()
        });
    match text {
        Some(text) => Ok(RubyImage {
            version_text: text.to_owned(),
            image,
            version_source: VersionSource::Symbol(version_source),
        }),
        None => Err(NotFound::Unreadable { path: image.path }),
    }
}

/// Whether the file's name says Ruby: such files are looked at first.
pub(crate) fn names_ruby(path: &[u8]) -> bool {
    path.rsplit(|&byte| byte == b'/')
        .next()
        .is_some_and(|name| name.windows(4).any(|part| part == b"ruby"))
}

/// Whether the process has the start of an ELF file mapped: asked where nothing
/// of a file may be executed, since its code may have been moved elsewhere
/// (onto huge pages).
fn starts_like_elf<M: TargetMemory>(file: &MappedFile<'_>, memory: &M) -> bool {
    let mut magic = [0; 4];
    file.mappings
        .iter()
        .find(|mapping| mapping.offset == 0 && mapping.readable)
        .is_some_and(|mapping| memory.read(mapping.range.start, &mut magic).is_ok())
        && magic == *b"\x7fELF"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_what_ruby_says_of_itself() {
        let of = |text: &str| described_version(text.as_bytes());
        for (text, version) in [
            (
                "ruby 3.3.8 (2025-04-09 revision b200bad6cd) [x86_64-linux]",
                "3.3.8",
            ),
            (
                "ruby 2.7.4p191 (2021-07-07 revision a21a3b7d23) [x86_64-linux-gnu]",
                "2.7.4",
            ),
            (
                "ruby 4.1.0dev (2026-05-01 master 0123456789) [aarch64-linux]",
                "4.1.0dev",
            ),
            ("ruby 3.4.11 (2026-01-01", "3.4.11"),
        ] {
            assert_eq!(of(text).as_deref(), Some(version));
        }
        for text in [
            "ruby 3.3 (2025-04-09)",
            "ruby script (2025-04-09)",
            "ruby 3.3.8 (unknown",
            "ruby 3.3.8.1 (2025-",
            "ruby ",
            "ruby 3.3.8 (20",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
