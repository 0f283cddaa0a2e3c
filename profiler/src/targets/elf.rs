//! Facts from an ELF image.
//!
//! Everything comes from the program headers and the dynamic segment, as the
//! loader sees them; section headers are needed for `.symtab` only. The file is
//! under the control of whoever runs the target: every read is checked, sizes
//! are bounded, and only what is asked for is read.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

use object::LittleEndian as LE;
use object::U32;
use object::U64;
use object::elf;
use object::read::CompressedData;
use object::read::CompressionFormat;
use object::read::ReadCache;
use object::read::ReadCacheOps;
use object::read::ReadRef;
use object::read::elf::CompressionHeader as _;
use object::read::elf::FileHeader as _;
use object::read::elf::ProgramHeader as _;
use object::read::elf::SectionHeader as _;

/// Longest table read as a whole: `.symtab` of a large program with its names
/// is a tenth of this.
const MAX_TABLE: u64 = 256 << 20;
/// Longest name looked at.
const MAX_NAME: u64 = 512;
/// Longest hash chain followed; real ones have a handful of entries.
const MAX_CHAIN: u32 = 1 << 12;
/// Most segments of one image; real ones have about a dozen.
const MAX_SEGMENTS: usize = 256;
/// Most libraries of one image whose names are looked at.
const MAX_NEEDED: usize = 1 << 10;

/// Why an image cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElfError {
    /// Not an ELF file.
    NotElf,
    /// An ELF file for another kind of machine than rbprof knows (32 bit, big
    /// endian).
    Foreign,
    /// Truncated or corrupted.
    Malformed(&'static str),
}

impl fmt::Display for ElfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotElf => write!(f, "not an ELF file"),
            Self::Foreign => write!(f, "not a 64-bit little-endian ELF file"),
            Self::Malformed(what) => write!(f, "truncated or corrupted: {what}"),
        }
    }
}

impl std::error::Error for ElfError {}

type Result<T> = std::result::Result<T, ElfError>;

/// Turns `object`'s errors into ours.
trait OrMalformed<T> {
    fn or_malformed(self, what: &'static str) -> Result<T>;
}

impl<T, E> OrMalformed<T> for std::result::Result<T, E> {
    fn or_malformed(self, what: &'static str) -> Result<T> {
        self.map_err(|_| ElfError::Malformed(what))
    }
}

impl<T> OrMalformed<T> for Option<T> {
    fn or_malformed(self, what: &'static str) -> Result<T> {
        self.ok_or(ElfError::Malformed(what))
    }
}

/// Most bytes read of one file, and so kept of it: a sparse file may claim any
/// size. A Ruby with all debug information has 60 MB.
const MAX_READ: u64 = 512 << 20;

/// A file that is read piece by piece: unlike a memory mapping it cannot raise
/// a signal when somebody truncates it.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    position: u64,
    /// Bytes that may still be read.
    left: u64,
}

impl FileReader {
    /// The file itself.
    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// Takes so many bytes from what may be read.
    fn spend(&mut self, length: usize) -> std::result::Result<(), ()> {
        self.left = self.left.checked_sub(length as u64).ok_or(())?;
        Ok(())
    }
}

/// A file and what was read of it.
pub type FileCache = ReadCache<FileReader>;

/// Reads `file` piece by piece, on demand.
#[must_use]
pub fn file_cache(file: File) -> FileCache {
    ReadCache::new(FileReader {
        file,
        position: 0,
        left: MAX_READ,
    })
}

impl ReadCacheOps for FileReader {
    fn len(&mut self) -> std::result::Result<u64, ()> {
        self.file.metadata().map(|meta| meta.len()).map_err(|_| ())
    }

    fn seek(&mut self, position: u64) -> std::result::Result<u64, ()> {
        self.position = position;
        Ok(position)
    }

    fn read(&mut self, buffer: &mut [u8]) -> std::result::Result<usize, ()> {
        let length = self.file.read_at(buffer, self.position).map_err(|_| ())?;
        self.spend(length)?;
        self.position = self.position.saturating_add(length as u64);
        Ok(length)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> std::result::Result<(), ()> {
        self.spend(buffer.len())?;
        self.file
            .read_exact_at(buffer, self.position)
            .map_err(|_| ())?;
        self.position = self.position.saturating_add(buffer.len() as u64);
        Ok(())
    }
}

/// What the code is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// x86-64.
    X86_64,
    /// arm64.
    Aarch64,
    /// Something else, by its ELF number.
    Other(u16),
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::X86_64 => write!(f, "x86-64"),
            Self::Aarch64 => write!(f, "arm64"),
            Self::Other(number) => write!(f, "ELF machine {number}"),
        }
    }
}

/// A part of the file that the loader maps (`PT_LOAD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Where it is in the file.
    pub offset: u64,
    /// Its address in the image, before the bias.
    pub address: u64,
    /// Bytes from the file.
    pub file_size: u64,
    /// Bytes in memory; what the file does not give is zero.
    pub memory_size: u64,
    /// Code.
    pub executable: bool,
    /// Data.
    pub writable: bool,
}

impl Load {
    /// Whether an address, before the bias, is in it.
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        match address.checked_sub(self.address) {
            Some(inside) => inside < self.memory_size,
            None => false,
        }
    }
}

/// The initial image of the thread-local variables (`PT_TLS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsSegment {
    /// Address in the image, before the bias.
    pub address: u64,
    /// Bytes in memory.
    pub memory_size: u64,
    /// Alignment, at least 1.
    pub align: u64,
}

/// A symbol that the image defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its address in the image before the bias, or its offset in the
    /// thread-local block.
    pub value: u64,
    /// Bytes; 0 when unknown.
    pub size: u64,
    /// A thread-local variable.
    pub tls: bool,
    /// Its visibility is `protected` (else it is `default`, or the symbol is
    /// not a dynamic one).
    pub protected: bool,
}

/// What a relocation for thread-local variables fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsKind {
    /// One word: the module's id (`DTPMOD64`).
    Module,
    /// One word: the variable's offset in the module's block (`DTPOFF64`).
    BlockOffset,
    /// One word: the variable's offset from the thread pointer (`TPOFF64`).
    ThreadOffset,
    /// Two words: a function and its argument (`TLSDESC`).
    Descriptor,
}

/// A relocation for thread-local variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsRelocation {
    /// What it fills in.
    pub kind: TlsKind,
    /// The address that it fills in, before the bias.
    pub slot: u64,
    /// The variable; `None` for the module's own block.
    pub symbol: Option<Vec<u8>>,
    /// The relocation's addend: an offset in the block.
    pub addend: i64,
}

/// What the dynamic segment says (addresses before the bias; 0: not there).
#[derive(Clone, Copy, Debug, Default)]
struct Dynamic {
    symbols: u64,
    names: u64,
    names_size: u64,
    gnu_hash: u64,
    hash: u64,
    relocations: [(u64, u64); 2],
    /// Where the debugger's hook is stored (`DT_DEBUG`).
    debug_slot: u64,
}

/// An ELF image.
#[derive(Debug)]
pub struct Elf<'data, R: ReadRef<'data>> {
    data: R,
    header: &'data elf::FileHeader64<LE>,
    programs: &'data [elf::ProgramHeader64<LE>],
    loads: Vec<Load>,
    dynamic: Option<Dynamic>,
    /// Where the names of the libraries it needs are, in the names.
    needed: Vec<u64>,
}

impl<'data, R: ReadRef<'data>> Elf<'data, R> {
    /// Reads the headers and the dynamic segment.
    ///
    /// # Errors
    /// [`ElfError`].
    pub fn parse(data: R) -> Result<Self> {
        let ident = data.read_bytes_at(0, 16).map_err(|()| ElfError::NotElf)?;
        if !ident.starts_with(b"\x7fELF") {
            return Err(ElfError::NotElf);
        }
        // EI_CLASS and EI_DATA: 64 bit, little endian.
        if ident.get(4..6) != Some(&[2, 1]) {
            return Err(ElfError::Foreign);
        }
        let header = elf::FileHeader64::<LE>::parse(data).or_malformed("the header")?;
        // Before they are read: the number may be one that only a file of many
        // gigabytes can have.
        if usize::from(header.e_phnum.get(LE)) > MAX_SEGMENTS {
            return Err(ElfError::Malformed("segments that are too many"));
        }
        let programs = header
            .program_headers(LE, data)
            .or_malformed("the program headers")?;
        let loads = programs
            .iter()
            .filter(|program| program.p_type(LE) == elf::PT_LOAD)
            .map(|program| Load {
                offset: program.p_offset(LE),
                address: program.p_vaddr(LE),
                file_size: program.p_filesz(LE),
                memory_size: program.p_memsz(LE),
                executable: program.p_flags(LE).contains(elf::PF_X),
                writable: program.p_flags(LE).contains(elf::PF_W),
            })
            .collect();
        let mut image = Self {
            data,
            header,
            programs,
            loads,
            dynamic: None,
            needed: Vec::new(),
        };
        (image.dynamic, image.needed) = image.read_dynamic()?;
        Ok(image)
    }

    fn read_dynamic(&self) -> Result<(Option<Dynamic>, Vec<u64>)> {
        let mut needed = Vec::new();
        let Some(program) = self.program(elf::PT_DYNAMIC) else {
            return Ok((None, needed));
        };
        let entry_size = size_of::<elf::Dyn64<LE>>() as u64;
        let count = (program.p_filesz(LE) / entry_size).min(4096);
        let entries = self
            .data
            .read_slice_at::<elf::Dyn64<LE>>(program.p_offset(LE), count as usize)
            .or_malformed("the dynamic segment")?;
        let mut found = Dynamic::default();
        let mut plt_kind = 0;
        for (index, entry) in (0_u64..).zip(entries) {
            let value = entry.d_val.get(LE);
            let [table, plt] = &mut found.relocations;
            match entry.d_tag.get(LE) {
                elf::DT_NULL => break,
                elf::DT_NEEDED if needed.len() < MAX_NEEDED => needed.push(value),
                elf::DT_SYMTAB => found.symbols = value,
                elf::DT_STRTAB => found.names = value,
                elf::DT_STRSZ => found.names_size = value,
                elf::DT_GNU_HASH => found.gnu_hash = value,
                elf::DT_HASH => found.hash = value,
                elf::DT_RELA => table.0 = value,
                elf::DT_RELASZ => table.1 = value,
                elf::DT_JMPREL => plt.0 = value,
                elf::DT_PLTRELSZ => plt.1 = value,
                elf::DT_PLTREL => plt_kind = value,
                elf::DT_DEBUG => {
                    found.debug_slot = program
                        .p_vaddr(LE)
                        .wrapping_add(index * entry_size)
                        .wrapping_add(8);
                }
                _ => {}
            }
        }
        if plt_kind != elf::DT_RELA.0.cast_unsigned() {
            found.relocations[1] = (0, 0);
        }
        Ok((Some(found), needed))
    }

    fn program(&self, kind: elf::ProgramType) -> Option<&'data elf::ProgramHeader64<LE>> {
        self.programs
            .iter()
            .find(|program| program.p_type(LE) == kind)
    }

    /// What the code is for.
    #[must_use]
    pub fn machine(&self) -> Machine {
        match self.header.e_machine(LE) {
            elf::EM_X86_64 => Machine::X86_64,
            elf::EM_AARCH64 => Machine::Aarch64,
            other => Machine::Other(other.0),
        }
    }

    /// Whether the image is linked for fixed addresses (`ET_EXEC`).
    #[must_use]
    pub fn has_fixed_address(&self) -> bool {
        self.header.e_type(LE) == elf::ET_EXEC
    }

    /// Where the program or the loader begins (0 in other libraries), before the
    /// bias.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.header.e_entry.get(LE)
    }

    /// What the loader maps.
    #[must_use]
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// The address of the program headers in memory, before the bias.
    #[must_use]
    pub fn program_headers_address(&self) -> Option<u64> {
        let offset = self.header.e_phoff.get(LE);
        let load = self.loads.iter().find(|load| {
            offset
                .checked_sub(load.offset)
                .is_some_and(|inside| inside < load.file_size)
        })?;
        Some(load.address.wrapping_add(offset.wrapping_sub(load.offset)))
    }

    /// The initial image of the thread-local variables.
    #[must_use]
    pub fn tls(&self) -> Option<TlsSegment> {
        self.program(elf::PT_TLS).map(|program| TlsSegment {
            address: program.p_vaddr(LE),
            memory_size: program.p_memsz(LE),
            align: program.p_align(LE).max(1),
        })
    }

    /// The loader that the image asks for (`PT_INTERP`).
    #[must_use]
    pub fn interpreter(&self) -> Option<&'data [u8]> {
        let program = self.program(elf::PT_INTERP)?;
        let start = program.p_offset(LE);
        let end = start.checked_add(program.p_filesz(LE).min(4096))?;
        self.data.read_bytes_at_until(start..end, 0).ok()
    }

    /// Where the loader stores the address of its list of what it has loaded
    /// (`DT_DEBUG`), before the bias.
    #[must_use]
    pub fn debug_slot(&self) -> Option<u64> {
        self.dynamic
            .map(|dynamic| dynamic.debug_slot)
            .filter(|&slot| slot != 0)
    }

    /// The build id (`NT_GNU_BUILD_ID`).
    #[must_use]
    pub fn build_id(&self) -> Option<&'data [u8]> {
        self.programs
            .iter()
            .filter(|program| program.p_filesz(LE) <= 1 << 16)
            .filter_map(|program| program.notes(LE, self.data).ok().flatten())
            .flatten()
            .filter_map(std::result::Result::ok)
            .find(|note| note.name() == b"GNU" && note.n_type(LE) == elf::NT_GNU_BUILD_ID)
            .map(|note| note.desc())
    }

    /// Where in the file the byte at `address` (before the bias) is.
    fn offset_of(&self, address: u64) -> Result<u64> {
        self.loads
            .iter()
            .find_map(|load| {
                let inside = address.checked_sub(load.address)?;
                (inside < load.file_size).then(|| load.offset.checked_add(inside))?
            })
            .or_malformed("an address outside the file")
    }

    /// The bytes at `address` (before the bias) as the file has them.
    ///
    /// # Errors
    /// [`ElfError::Malformed`] when the file does not hold them.
    pub fn bytes(&self, address: u64, length: u64) -> Result<&'data [u8]> {
        if length > MAX_TABLE {
            return Err(ElfError::Malformed("a table that is too large"));
        }
        self.data
            .read_bytes_at(self.offset_of(address)?, length)
            .or_malformed("an address range outside the file")
    }

    /// The bytes from `address` (before the bias) to the end of what the file
    /// has of its segment.
    ///
    /// # Errors
    /// [`ElfError::Malformed`] when the file does not hold them.
    pub fn bytes_to_end(&self, address: u64) -> Result<&'data [u8]> {
        let load = self
            .loads
            .iter()
            .find(|load| {
                address
                    .checked_sub(load.address)
                    .is_some_and(|inside| inside < load.file_size)
            })
            .or_malformed("an address outside the file")?;
        let inside = address - load.address;
        self.bytes(address, load.file_size - inside)
    }

    /// The search table of `.eh_frame` (`PT_GNU_EH_FRAME`) and its address.
    #[must_use]
    pub fn eh_frame_header(&self) -> Option<(u64, &'data [u8])> {
        let program = self.program(elf::PT_GNU_EH_FRAME)?;
        let address = program.p_vaddr(LE);
        let bytes = self.bytes(address, program.p_filesz(LE)).ok()?;
        Some((address, bytes))
    }

    /// A section that is in memory and not compressed, by its name, with its
    /// address.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn section_data(&self, name: &[u8]) -> Result<Option<(u64, &'data [u8])>> {
        self.section_headers()?;
        let sections = self
            .header
            .sections(LE, self.data)
            .or_malformed("the section headers")?;
        let Some((_, section)) = sections.section_by_name(LE, name) else {
            return Ok(None);
        };
        if section.sh_size(LE) > MAX_TABLE {
            return Err(ElfError::Malformed("a section that is too large"));
        }
        let bytes = section.data(LE, self.data).or_malformed("a section")?;
        Ok(Some((section.sh_addr(LE), bytes)))
    }

    /// A section for debuggers, which may be compressed, by its name.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn debug_section(&self, name: &[u8]) -> Result<Option<Cow<'data, [u8]>>> {
        self.section_headers()?;
        let sections = self
            .header
            .sections(LE, self.data)
            .or_malformed("the section headers")?;
        let Some((_, section)) = sections.section_by_name(LE, name) else {
            return Ok(None);
        };
        let Some((header, offset, size)) = section
            .compression(LE, self.data)
            .or_malformed("a compressed section")?
        else {
            let found = self.section_data(name)?;
            return Ok(found.map(|(_, bytes)| Cow::Borrowed(bytes)));
        };
        // Before anything of that size is allocated.
        let uncompressed_size = header.ch_size(LE);
        if size > MAX_TABLE || uncompressed_size > MAX_TABLE {
            return Err(ElfError::Malformed("a section that is too large"));
        }
        let format = match header.ch_type(LE) {
            elf::ELFCOMPRESS_ZLIB => CompressionFormat::Zlib,
            elf::ELFCOMPRESS_ZSTD => CompressionFormat::Zstandard,
            _ => return Err(ElfError::Malformed("a compressed section")),
        };
        let data = self
            .data
            .read_bytes_at(offset, size)
            .or_malformed("a compressed section")?;
        let compressed = CompressedData {
            format,
            data,
            uncompressed_size,
        };
        let bytes = compressed
            .decompress()
            .or_malformed("a compressed section")?;
        Ok(Some(bytes))
    }

    /// The name and the checksum of the separate debug file, as the image has
    /// them (`.gnu_debuglink`).
    #[must_use]
    pub fn debug_link(&self) -> Option<(&'data [u8], u32)> {
        let (_, bytes) = self.section_data(b".gnu_debuglink").ok()??;
        let length = bytes.iter().position(|&byte| byte == 0)?;
        let checksum = bytes.get((length + 1).next_multiple_of(4)..)?.get(..4)?;
        let name = bytes.get(..length)?;
        Some((name, u32::from_le_bytes(checksum.try_into().ok()?)))
    }

    fn word32(&self, address: u64) -> Result<u32> {
        self.data
            .read_at::<U32<LE>>(self.offset_of(address)?)
            .or_malformed("a table outside the file")
            .map(|word| word.get(LE))
    }

    /// The word at `address` (before the bias) as the file has it.
    ///
    /// # Errors
    /// [`ElfError::Malformed`] when the file does not hold it.
    pub fn word64(&self, address: u64) -> Result<u64> {
        self.data
            .read_at::<U64<LE>>(self.offset_of(address)?)
            .or_malformed("a table outside the file")
            .map(|word| word.get(LE))
    }

    /// Finds a symbol that the image defines in `.dynsym`, by the hash table.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn dynamic_symbol(&self, name: &[u8]) -> Result<Option<Symbol>> {
        let Some(dynamic) = self.dynamic else {
            return Ok(None);
        };
        let index = if dynamic.gnu_hash != 0 {
            self.find_gnu(&dynamic, name)?
        } else if dynamic.hash != 0 {
            self.find_sysv(&dynamic, name)?
        } else {
            None
        };
        let Some(index) = index else { return Ok(None) };
        let symbol = self.dynamic_entry(&dynamic, index)?;
        Ok(Some(Symbol::new(symbol)))
    }

    /// Searches the GNU hash table for a defined symbol.
    fn find_gnu(&self, dynamic: &Dynamic, name: &[u8]) -> Result<Option<u32>> {
        // Header: buckets, index of the first hashed symbol, words in the Bloom
        // filter, its shift. Then the filter, the buckets and the chains.
        let table = dynamic.gnu_hash;
        let at = |offset: u64| table.wrapping_add(offset);
        let buckets = self.word32(table)?;
        let first = self.word32(at(4))?;
        let filter_words = self.word32(at(8))?;
        let shift = self.word32(at(12))?;
        if buckets == 0 || !filter_words.is_power_of_two() {
            return Ok(None);
        }
        let hash = gnu_hash(name);
        let word = u64::from((hash / 64) & (filter_words - 1));
        let filter = self.word64(at(16 + 8 * word))?;
        let second = hash.checked_shr(shift).unwrap_or(0);
        if (filter >> (hash % 64)) & (filter >> (second % 64)) & 1 == 0 {
            return Ok(None);
        }
        let bucket_table = 16 + 8 * u64::from(filter_words);
        let chains = bucket_table + 4 * u64::from(buckets);
        let start = self.word32(at(bucket_table + 4 * u64::from(hash % buckets)))?;
        if start < first {
            return Ok(None);
        }
        for step in 0..MAX_CHAIN {
            let index = start.checked_add(step).or_malformed("a hash chain")?;
            let value = self.word32(at(chains + 4 * u64::from(index - first)))?;
            if value | 1 == hash | 1 && self.defines(dynamic, index, name)? {
                return Ok(Some(index));
            }
            if value & 1 != 0 {
                break;
            }
        }
        Ok(None)
    }

    /// Searches the System V hash table for a defined symbol.
    fn find_sysv(&self, dynamic: &Dynamic, name: &[u8]) -> Result<Option<u32>> {
        let at = |index: u64| dynamic.hash.wrapping_add(4 * index);
        let buckets = self.word32(at(0))?;
        if buckets == 0 {
            return Ok(None);
        }
        let mut index = self.word32(at(2 + u64::from(sysv_hash(name) % buckets)))?;
        for _ in 0..MAX_CHAIN {
            if index == 0 {
                break;
            }
            if self.defines(dynamic, index, name)? {
                return Ok(Some(index));
            }
            index = self.word32(at(2 + u64::from(buckets) + u64::from(index)))?;
        }
        Ok(None)
    }

    fn dynamic_entry(&self, dynamic: &Dynamic, index: u32) -> Result<&'data elf::Sym64<LE>> {
        let entry_size = size_of::<elf::Sym64<LE>>() as u64;
        let address = dynamic.symbols.wrapping_add(entry_size * u64::from(index));
        self.data
            .read_at(self.offset_of(address)?)
            .or_malformed("the dynamic symbols")
    }

    /// The names of the libraries that the image needs.
    #[must_use]
    pub fn needed(&self) -> Vec<&'data [u8]> {
        let Some(dynamic) = &self.dynamic else {
            return Vec::new();
        };
        let names = self.needed.iter();
        names
            .filter_map(|&offset| self.dynamic_string(dynamic, offset).ok())
            .collect()
    }

    /// The name of a dynamic symbol.
    fn dynamic_name(&self, dynamic: &Dynamic, symbol: &elf::Sym64<LE>) -> Result<&'data [u8]> {
        self.dynamic_string(dynamic, u64::from(symbol.st_name.get(LE)))
    }

    fn dynamic_string(&self, dynamic: &Dynamic, offset: u64) -> Result<&'data [u8]> {
        let left = dynamic
            .names_size
            .checked_sub(offset)
            .or_malformed("a symbol's name")?;
        let start = self.offset_of(dynamic.names.wrapping_add(offset))?;
        let end = start
            .checked_add(left.min(MAX_NAME))
            .or_malformed("a symbol's name")?;
        self.data
            .read_bytes_at_until(start..end, 0)
            .or_malformed("a symbol's name")
    }

    /// Whether the dynamic symbol has this name and is defined here.
    fn defines(&self, dynamic: &Dynamic, index: u32, name: &[u8]) -> Result<bool> {
        let symbol = self.dynamic_entry(dynamic, index)?;
        Ok(
            symbol.st_shndx.get(LE) != elf::SHN_UNDEF
                && self.dynamic_name(dynamic, symbol)? == name,
        )
    }

    /// The dynamic relocations.
    fn relocations(&self) -> Result<impl Iterator<Item = &'data elf::Rela64<LE>>> {
        let mut tables: [&[elf::Rela64<LE>]; 2] = [&[]; 2];
        let places = self.dynamic.map_or([(0, 0); 2], |it| it.relocations);
        for (table, (address, size)) in tables.iter_mut().zip(places) {
            if address == 0 || size == 0 {
                continue;
            }
            if size > MAX_TABLE {
                return Err(ElfError::Malformed("relocations that are too many"));
            }
            let count = size as usize / size_of::<elf::Rela64<LE>>();
            *table = self
                .data
                .read_slice_at::<elf::Rela64<LE>>(self.offset_of(address)?, count)
                .or_malformed("the dynamic relocations")?;
        }
        Ok(tables.into_iter().flatten())
    }

    /// The calls that go through the procedure linkage table: the address of
    /// each slot, and the index of the symbol that it leads to.
    fn jump_slots(&self) -> Result<impl Iterator<Item = (u64, u32)>> {
        let machine = self.machine();
        Ok(self
            .relocations()?
            .filter_map(move |entry| match (machine, entry.r_type(LE, false)) {
                (Machine::X86_64, elf::R_X86_64_JUMP_SLOT)
                | (Machine::Aarch64, elf::R_AARCH64_JUMP_SLOT) => {
                    Some((entry.r_offset.get(LE), entry.r_sym(LE, false)))
                }
                _ => None,
            }))
    }

    /// How many functions are called through the procedure linkage table.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn jump_slot_count(&self) -> Result<usize> {
        Ok(self.jump_slots()?.count())
    }

    /// Whether the function `name` is called through the procedure linkage
    /// table.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn calls_through_plt(&self, name: &[u8]) -> Result<bool> {
        let Some(dynamic) = &self.dynamic else {
            return Ok(false);
        };
        Ok(self.jump_slots()?.any(|(_, index)| {
            self.dynamic_entry(dynamic, index)
                .and_then(|symbol| self.dynamic_name(dynamic, symbol))
                .is_ok_and(|found| found == name)
        }))
    }

    /// The symbol that the slot at `address` of the procedure linkage table
    /// leads to, if this image defines it.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn imported_at(&self, address: u64) -> Result<Option<Symbol>> {
        let Some(dynamic) = self.dynamic else {
            return Ok(None);
        };
        let Some((_, index)) = self.jump_slots()?.find(|(slot, _)| *slot == address) else {
            return Ok(None);
        };
        let symbol = self.dynamic_entry(&dynamic, index)?;
        let is_defined = symbol.st_shndx.get(LE) != elf::SHN_UNDEF;
        Ok(is_defined.then(|| Symbol::new(symbol)))
    }

    /// The dynamic relocations for thread-local variables.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn tls_relocations(&self) -> Result<Vec<TlsRelocation>> {
        let Some(dynamic) = self.dynamic else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for entry in self.relocations()? {
            let kind = match (self.machine(), entry.r_type(LE, false)) {
                (Machine::X86_64, elf::R_X86_64_DTPMOD64)
                | (Machine::Aarch64, elf::R_AARCH64_TLS_DTPMOD) => TlsKind::Module,
                (Machine::X86_64, elf::R_X86_64_DTPOFF64)
                | (Machine::Aarch64, elf::R_AARCH64_TLS_DTPREL) => TlsKind::BlockOffset,
                (Machine::X86_64, elf::R_X86_64_TPOFF64)
                | (Machine::Aarch64, elf::R_AARCH64_TLS_TPREL) => TlsKind::ThreadOffset,
                (Machine::X86_64, elf::R_X86_64_TLSDESC)
                | (Machine::Aarch64, elf::R_AARCH64_TLSDESC) => TlsKind::Descriptor,
                _ => continue,
            };
            let symbol = match entry.r_sym(LE, false) {
                0 => None,
                index => {
                    let symbol = self.dynamic_entry(&dynamic, index)?;
                    Some(self.dynamic_name(&dynamic, symbol)?.to_vec())
                }
            };
            found.push(TlsRelocation {
                kind,
                slot: entry.r_offset.get(LE),
                symbol,
                addend: entry.r_addend.get(LE),
            });
        }
        Ok(found)
    }

    fn section_headers(&self) -> Result<&'data [elf::SectionHeader64<LE>]> {
        // None, with a table: their number is too large for the header.
        if self.header.e_shnum.get(LE) == 0 && self.header.e_shoff.get(LE) != 0 {
            return Err(ElfError::Malformed("sections that are too many"));
        }
        self.header
            .section_headers(LE, self.data)
            .or_malformed("the section headers")
    }

    fn section(&self, kind: elf::SectionType) -> Result<Option<&'data elf::SectionHeader64<LE>>> {
        let sections = self.section_headers()?;
        Ok(sections.iter().find(|section| section.sh_type(LE) == kind))
    }

    /// Whether the full symbol table has been removed (`strip`).
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn is_stripped(&self) -> Result<bool> {
        Ok(self.section(elf::SHT_SYMTAB)?.is_none())
    }

    /// Finds symbols that the image defines in `.symtab`, in one pass over it.
    ///
    /// # Errors
    /// [`ElfError::Malformed`].
    pub fn static_symbols<const N: usize>(&self, names: [&[u8]; N]) -> Result<[Option<Symbol>; N]> {
        let mut found = [None; N];
        let Some(section) = self.section(elf::SHT_SYMTAB)? else {
            return Ok(found);
        };
        let sections = self.section_headers()?;
        let strings = sections
            .get(section.sh_link(LE) as usize)
            .or_malformed("the symbols' names")?;
        if section.sh_size(LE) > MAX_TABLE || strings.sh_size(LE) > MAX_TABLE {
            return Err(ElfError::Malformed("a symbol table that is too large"));
        }
        let count = section.sh_size(LE) as usize / size_of::<elf::Sym64<LE>>();
        let symbols = self
            .data
            .read_slice_at::<elf::Sym64<LE>>(section.sh_offset(LE), count)
            .or_malformed("the symbols")?;
        let strings = self
            .data
            .read_bytes_at(strings.sh_offset(LE), strings.sh_size(LE))
            .or_malformed("the symbols' names")?;
        for symbol in symbols {
            if symbol.st_shndx.get(LE) == elf::SHN_UNDEF {
                continue;
            }
            let Some(rest) = strings.get(symbol.st_name.get(LE) as usize..) else {
                continue;
            };
            for (name, found) in names.iter().zip(&mut found) {
                let is_it = rest.strip_prefix(*name).and_then(<[u8]>::first) == Some(&0);
                if is_it && found.is_none() {
                    *found = Some(Symbol::new(symbol));
                }
            }
        }
        Ok(found)
    }
}

impl Symbol {
    fn new(symbol: &elf::Sym64<LE>) -> Self {
        Self {
            value: symbol.st_value.get(LE),
            size: symbol.st_size.get(LE),
            tls: symbol.st_type() == elf::STT_TLS,
            protected: symbol.st_visibility() == elf::STV_PROTECTED,
        }
    }
}

/// The hash of `DT_GNU_HASH`.
fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, &byte| {
        hash.wrapping_mul(33).wrapping_add(u32::from(byte))
    })
}

/// The hash of `DT_HASH`.
fn sysv_hash(name: &[u8]) -> u32 {
    name.iter().fold(0, |hash: u32, &byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        let high = hash & 0xf000_0000;
        (hash ^ (high >> 24)) & !high
    })
}

#[cfg(test)]
mod tests;
