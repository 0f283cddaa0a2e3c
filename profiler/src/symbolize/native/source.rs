//! Symbols in a file of our own, for blazesym to read.
//!
//! Blazesym maps files into memory and trusts them to stay as they are, which
//! files of others need not do: truncating one that is mapped ends the process
//! that has it mapped. So it is given files in memory that nobody else has, with
//! only what was checked: an ELF file of nothing but a symbol table, or a list
//! of the kernel's functions.

use std::fs::File;
use std::io;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::path::PathBuf;

use object::elf;
use rustix::fs::MemfdFlags;

use super::table::Named;

/// Largest list of the kernel's symbols; ours has 15 MB.
const MAX_KALLSYMS: u64 = 128 << 20;
/// All names of a file together; those of a file may overlap each other.
const MAX_NAMES: usize = 64 << 20;

/// A file that only this process has.
#[derive(Debug)]
pub(super) struct Source {
    /// Keeps what `path` leads to.
    _file: File,
    /// Leads to the file as long as this lives.
    pub(super) path: PathBuf,
    /// Bytes of memory it takes, with what blazesym makes of it.
    pub(super) cost: usize,
}

impl Source {
    /// A file of these functions, which are in the order of addresses.
    pub(super) fn of_functions(functions: &[Named<'_>]) -> io::Result<Self> {
        let mut names: Vec<u8> = vec![0];
        let mut symbols: Vec<u8> = vec![0; 24];
        let mut last: Option<(&[u8], u32)> = None;
        for function in functions {
            let at = match last {
                Some((name, at)) if name.as_ptr() == function.name.as_ptr() => at,
                _ => {
                    let at = u32::try_from(names.len()).map_err(io::Error::other)?;
                    // Blazesym wants text.
                    names.extend_from_slice(text(function.name).as_bytes());
                    names.push(0);
                    if names.len() > MAX_NAMES {
                        return Err(io::ErrorKind::FileTooLarge.into());
                    }
                    at
                }
            };
            last = Some((function.name, at));
            symbols.extend_from_slice(&at.to_le_bytes());
            // Bound globally, in the first section; which it is does not matter.
            symbols.extend_from_slice(&[(elf::STB_GLOBAL.0 << 4) | elf::STT_FUNC.0, 0, 1, 0]);
            symbols.extend_from_slice(&function.start.to_le_bytes());
            let size = function.end.saturating_sub(function.start);
            symbols.extend_from_slice(&size.to_le_bytes());
        }
        let indexed = functions.len().saturating_mul(size_of::<usize>());
        Self::new(&elf_file(&symbols, &names), indexed)
    }

    /// A file of the functions in `/proc/kallsyms`, or in another file of that
    /// form; `None` if it shows no addresses.
    pub(super) fn of_kernel(kallsyms: &Path) -> io::Result<Option<Self>> {
        let mut lines = BufReader::new(File::open(kallsyms)?.take(MAX_KALLSYMS));
        let mut functions = Vec::new();
        let mut count = 0_usize;
        let mut line = Vec::new();
        loop {
            line.clear();
            if lines.read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let mut words = line.splitn(3, |&byte| byte == b' ');
            if let (Some(address), Some([b't' | b'T' | b'w' | b'W'])) = (words.next(), words.next())
                && address.iter().any(|&digit| digit != b'0')
            {
                functions.extend_from_slice(&line);
                count += 1;
            }
        }
        if count == 0 {
            return Ok(None);
        }
        // Blazesym keeps each name by itself.
        let parsed = functions.len().saturating_add(count.saturating_mul(48));
        Self::new(&functions, parsed).map(Some)
    }

    fn new(contents: &[u8], extra: usize) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create("rbprof-symbols", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        file.write_all(contents)?;
        Ok(Self {
            path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
            cost: contents.len().saturating_add(extra),
            _file: file,
        })
    }
}

/// Bytes as text, with `\xNN` for what is none.
fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// An ELF file with a symbol table and its names.
fn elf_file(symbols: &[u8], names: &[u8]) -> Vec<u8> {
    const HEADER: u64 = 64;
    const SECTION_NAMES: &[u8] = b"\0.symtab\0.strtab\0.shstrtab\0";
    let names_at = HEADER + symbols.len() as u64;
    let section_names_at = names_at + names.len() as u64;
    let end = section_names_at + SECTION_NAMES.len() as u64;
    let sections_at = end.next_multiple_of(8);

    let mut file = vec![
        0x7f,
        b'E',
        b'L',
        b'F',
        elf::ELFCLASS64.0,
        elf::ELFDATA2LSB.0,
        1,
    ];
    file.resize(16, 0);
    let mut put = |bytes: &[u8]| file.extend_from_slice(bytes);
    put(&elf::ET_DYN.0.to_le_bytes());
    put(&elf::EM_X86_64.0.to_le_bytes());
    put(&1_u32.to_le_bytes());
    put(&[0; 16]); // Neither an entry nor program headers.
    put(&sections_at.to_le_bytes());
    put(&[0; 4]);
    // Sizes and numbers of headers, and which section has the sections' names.
    for value in [64_u16, 0, 0, 64, 4, 3] {
        put(&value.to_le_bytes());
    }
    put(symbols);
    put(names);
    put(SECTION_NAMES);
    file.resize(usize::try_from(sections_at).unwrap_or(usize::MAX), 0);
    file.extend_from_slice(&[0; 64]);
    for (name, kind, offset, size, link, entry) in [
        (
            1_u32,
            elf::SHT_SYMTAB.0,
            HEADER,
            symbols.len() as u64,
            2_u32,
            24_u64,
        ),
        (9, elf::SHT_STRTAB.0, names_at, names.len() as u64, 0, 0),
        (
            17,
            elf::SHT_STRTAB.0,
            section_names_at,
            SECTION_NAMES.len() as u64,
            0,
            0,
        ),
    ] {
        file.extend_from_slice(&name.to_le_bytes());
        file.extend_from_slice(&kind.to_le_bytes());
        file.extend_from_slice(&[0; 16]); // Flags, address.
        file.extend_from_slice(&offset.to_le_bytes());
        file.extend_from_slice(&size.to_le_bytes());
        file.extend_from_slice(&link.to_le_bytes());
        file.extend_from_slice(&1_u32.to_le_bytes()); // The first global symbol.
        file.extend_from_slice(&8_u64.to_le_bytes());
        file.extend_from_slice(&entry.to_le_bytes());
    }
    file
}
