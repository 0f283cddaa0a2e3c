//! Memory of a Ruby process, from a core dump.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::io::Read;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use flate2::bufread::GzDecoder;
use object::LittleEndian as LE;
use object::elf;
use object::elf::FileHeader64;
use object::elf::ProgramHeader64;
use object::read::elf::NoteIterator;
use rbprof::memory::TargetMemory;
use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::Window;

/// Bytes kept together; blocks of zeros are not kept.
const BLOCK: usize = 4096;

/// A core dump: what memory the process had, and what its threads were doing.
#[derive(Debug, Default)]
pub struct CoreDump {
    /// Where there is memory, by address.
    segments: Vec<Segment>,
    /// Memory that is not all zero, by address / [`BLOCK`].
    blocks: HashMap<u64, Box<[u8]>>,
    /// What is mapped from files, by address.
    pub files: Vec<MappedFile>,
    /// Threads; the first is the one that was current.
    pub threads: Vec<Thread>,
}

/// A stretch of memory that is in the dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// First address.
    pub start: u64,
    /// First address past the end.
    pub end: u64,
    /// Whether the process could write to it.
    pub writable: bool,
}

/// A mapping of a file (`NT_FILE`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// First address.
    pub start: u64,
    /// First address past the end.
    pub end: u64,
    /// Path of the file when the dump was made.
    pub path: String,
}

/// A thread (`NT_PRSTATUS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Thread id.
    pub tid: u32,
    /// The base of `fs` on x86-64; other machines do not have it there.
    pub thread_pointer: Option<u64>,
}

impl CoreDump {
    /// Loads `ruby-coredump-NAME.gz` of the crate `rbspy-testdata`.
    ///
    /// # Errors
    /// When the file is not there or is no 64-bit little-endian core dump.
    pub fn load(name: &str) -> Result<Self> {
        let path = data_folder()?.join(format!("ruby-coredump-{name}.gz"));
        let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        let reader = BufReader::with_capacity(1 << 20, GzDecoder::new(BufReader::new(file)));
        Self::read(reader).with_context(|| format!("reading {}", path.display()))
    }

    /// Reads an unpacked core dump.
    ///
    /// # Errors
    /// When it is cut, or no 64-bit little-endian core dump.
    pub fn read(reader: impl Read) -> Result<Self> {
        let mut reader = Counted { reader, at: 0 };
        let header = reader.take(size_of::<FileHeader64<LE>>())?;
        let (header, _) = object::from_bytes::<FileHeader64<LE>>(&header)
            .map_err(|()| anyhow::anyhow!("the file header is cut"))?;
        ensure!(
            header.e_ident.magic == elf::ELFMAG && header.e_type.get(LE) == elf::ET_CORE,
            "not a core dump"
        );
        let machine = header.e_machine.get(LE);

        reader.skip_to(header.e_phoff.get(LE))?;
        let count = usize::from(header.e_phnum.get(LE));
        let headers = reader.take(count * size_of::<ProgramHeader64<LE>>())?;
        let (headers, _) = object::slice_from_bytes::<ProgramHeader64<LE>>(&headers, count)
            .map_err(|()| anyhow::anyhow!("the program headers are cut"))?;
        let mut headers: Vec<_> = headers.iter().filter(|h| h.p_filesz.get(LE) > 0).collect();
        headers.sort_by_key(|header| header.p_offset.get(LE));

        let mut dump = Self::default();
        for header in headers {
            match header.p_type.get(LE) {
                elf::PT_LOAD => {
                    reader.skip_to(header.p_offset.get(LE))?;
                    dump.load_segment(header, &mut reader)?;
                }
                elf::PT_NOTE => {
                    reader.skip_to(header.p_offset.get(LE))?;
                    let notes = reader.take(usize::try_from(header.p_filesz.get(LE))?)?;
                    dump.read_notes(&notes, header.p_align.get(LE), machine)?;
                }
                _ => {}
            }
        }
        dump.segments.sort_unstable();
        dump.files.sort_by_key(|file| file.start);
        Ok(dump)
    }

    /// Where there is memory, by address.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    fn load_segment<R: Read>(
        &mut self,
        header: &ProgramHeader64<LE>,
        reader: &mut Counted<R>,
    ) -> Result<()> {
        let start = header.p_vaddr.get(LE);
        let len = header.p_filesz.get(LE);
        ensure!(
            start.is_multiple_of(BLOCK as u64),
            "a segment begins within a page"
        );
        let mut left = usize::try_from(len)?;
        let mut block = start / BLOCK as u64;
        while left > 0 {
            let mut bytes = reader.take(left.min(BLOCK))?;
            left -= bytes.len();
            bytes.resize(BLOCK, 0);
            if bytes.as_slice() != [0; BLOCK] {
                self.blocks.insert(block, bytes.into());
            }
            block += 1;
        }
        self.segments.push(Segment {
            start,
            end: start + len,
            writable: header.p_flags.get(LE).contains(elf::PF_W),
        });
        Ok(())
    }

    fn read_notes(&mut self, notes: &[u8], align: u64, machine: elf::Machine) -> Result<()> {
        let mut notes = NoteIterator::<FileHeader64<LE>>::new(LE, align, notes)?;
        while let Some(note) = notes.next()? {
            match (note.name(), note.n_type(LE)) {
                (b"CORE", elf::NT_PRSTATUS) => self.threads.push(thread(note.desc(), machine)?),
                (b"CORE", elf::NT_FILE) => self.files.extend(mapped_files(note.desc())?),
                _ => {}
            }
        }
        Ok(())
    }
}

/// `struct elf_prstatus`: the thread id is at 32, the registers at 112.
fn thread(desc: &[u8], machine: elf::Machine) -> Result<Thread> {
    const TID: usize = 32;
    const REGISTERS: usize = 112;
    const FS_BASE: usize = 21;
    let tid = desc.get(TID..TID + 4).context("a thread's status is cut")?;
    let thread_pointer = (machine == elf::EM_X86_64)
        .then(|| word(desc, REGISTERS + 8 * FS_BASE))
        .transpose()?;
    Ok(Thread {
        tid: u32::from_le_bytes(tid.try_into()?),
        thread_pointer,
    })
}

/// `NT_FILE`: count, page size, then (start, end, page offset) of each, then
/// the names.
fn mapped_files(desc: &[u8]) -> Result<Vec<MappedFile>> {
    let count = usize::try_from(word(desc, 0)?)?;
    let names = desc.get(16 + count * 24..).context("the files are cut")?;
    let mut names = names.split(|&byte| byte == 0);
    (0..count)
        .map(|index| {
            Ok(MappedFile {
                start: word(desc, 16 + index * 24)?,
                end: word(desc, 24 + index * 24)?,
                path: String::from_utf8_lossy(names.next().context("a name is missing")?).into(),
            })
        })
        .collect()
}

fn word(bytes: &[u8], at: usize) -> Result<u64> {
    let word = bytes.get(at..at + 8).context("a note is cut")?;
    Ok(u64::from_le_bytes(word.try_into()?))
}

/// A reader that knows where it is.
struct Counted<R> {
    reader: R,
    at: u64,
}

impl<R: Read> Counted<R> {
    fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.reader.read_exact(&mut bytes)?;
        self.at += len as u64;
        Ok(bytes)
    }

    fn skip_to(&mut self, at: u64) -> Result<()> {
        let skipped = at.checked_sub(self.at).context("segments overlap")?;
        std::io::copy(&mut (&mut self.reader).take(skipped), &mut std::io::sink())?;
        self.at = at;
        Ok(())
    }
}

/// Where cargo has unpacked the dumps.
///
/// Only packages for this platform are asked for: building has not fetched
/// those for others.
fn data_folder() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline"])
        .args(["--filter-platform", &platform])
        .args([
            "--manifest-path",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
        ])
        .output()
        .context("running cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let manifest = metadata
        .get("packages")
        .and_then(serde_json::Value::as_array)
        .into_iter()
        .flatten()
        .find(|package| {
            package
                .get("name")
                .is_some_and(|name| name == "rbspy-testdata")
        })
        .and_then(|package| package.get("manifest_path")?.as_str())
        .context("rbspy-testdata is not among the dependencies")?;
    let folder = Path::new(manifest)
        .parent()
        .context("a manifest has no folder")?;
    Ok(folder.join("data"))
}

impl TargetMemory for CoreDump {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let len = buffer.len() as u64;
        let end = address.checked_add(len).ok_or(Fault)?;
        // Segments may lie side by side.
        let mut covered = address;
        while covered < end {
            let next = self
                .segments
                .partition_point(|segment| segment.start <= covered);
            let segment = next
                .checked_sub(1)
                .and_then(|index| self.segments.get(index))
                .filter(|segment| covered < segment.end)
                .ok_or(Fault)?;
            covered = segment.end;
        }
        let mut at = address;
        let mut rest = buffer;
        while !rest.is_empty() {
            let within = (at % BLOCK as u64) as usize;
            let (part, behind) = rest.split_at_mut(rest.len().min(BLOCK - within));
            match self.blocks.get(&(at / BLOCK as u64)) {
                None => part.fill(0),
                Some(block) => {
                    part.copy_from_slice(block.get(within..within + part.len()).ok_or(Fault)?);
                }
            }
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }
}

impl Memory for CoreDump {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        TargetMemory::word(self, addr)
    }

    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault> {
        rbprof::memory::words3(self, addr)
    }

    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault> {
        rbprof::memory::window(self, addr, dst, words)
    }
}

/// The word in eight bytes.
#[must_use]
pub fn little_endian(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}
