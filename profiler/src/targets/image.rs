//! Mapped files, opened through the process that has them mapped.
//!
//! A path of a process means nothing outside its mount namespace, and a file
//! may have been replaced or deleted since it was mapped. So a file is opened
//! by its mapping (`/proc/PID/map_files`), which always leads to the very file;
//! where that is forbidden, by its path below the process's own root, and then
//! it must prove to be the same file.

use std::ffi::CString;
use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::fd::FromRawFd;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rbprof_common::process::Range;

use crate::memory::PinnedProcess;
use crate::memory::TargetMemory;

use super::elf::Elf;
use super::elf::ElfError;
use super::elf::FileCache;
use super::elf::Load;
use super::elf::file_cache;
use super::mappings::MappedFile;
use super::mappings::Mapping;
use super::proc;

/// How much of a file's start is compared with memory where its device and
/// inode numbers cannot be (overlay and Btrfs show others in `maps`): the ELF
/// header, which tells the file's length in effect, the program headers, and
/// where linkers put it the build id.
const COMPARED: usize = 1024;

/// An ELF file as one process has it mapped.
#[derive(Debug)]
pub struct Image {
    /// Its path in the process's mount namespace, for messages.
    pub path: String,
    /// The file has no name any more.
    pub deleted: bool,
    /// What is added to an address in the file to get one in the process.
    pub bias: u64,
    /// What it occupies, from the first mapping to the last.
    pub extent: Range,
    /// The file and its state, as the kernel tells them.
    pub version: Option<FileVersion>,
    file: FileCache,
}

/// A file in one state: nothing changes its contents without changing this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileVersion {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl FileVersion {
    pub(crate) fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

impl Image {
    /// Opens the file of `mapped` and finds out where it was loaded.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open<M: TargetMemory>(
        process: &PinnedProcess,
        memory: &M,
        mapped: &MappedFile<'_>,
    ) -> Result<Self, ImageError> {
        let file = open_mapped(process, memory, mapped).map_err(ImageError::Open)?;
        let version = FileVersion::of(&file);
        let file = file_cache(file);
        let (bias, extent) = {
            let elf = Elf::parse(&file).map_err(ImageError::Elf)?;
            let bias = bias(elf.loads(), &mapped.mappings).ok_or(ImageError::NotLoaded)?;
            (bias, extent(elf.loads(), bias))
        };
        Ok(Self {
            path: mapped.display_path(),
            deleted: mapped.mappings.iter().any(|mapping| mapping.deleted),
            bias,
            extent,
            version,
            file,
        })
    }

    /// The file's contents.
    ///
    /// # Errors
    /// [`ElfError`].
    pub fn elf(&self) -> Result<Elf<'_, &FileCache>, ElfError> {
        Elf::parse(&self.file)
    }

    /// The address in the process of an address in the file.
    #[must_use]
    pub fn live(&self, address: u64) -> u64 {
        self.bias.wrapping_add(address)
    }
}

/// Why a mapped file is no usable image.
#[derive(Debug)]
pub enum ImageError {
    /// It cannot be opened.
    Open(io::Error),
    /// It is no usable ELF file.
    Elf(ElfError),
    /// It is mapped, but not the way a loader does it.
    NotLoaded,
}

/// What is added to an address in the file to get one in the process.
pub(crate) fn bias(loads: &[Load], mappings: &[&Mapping]) -> Option<u64> {
    let of = |mapping: &Mapping| {
        loads
            .iter()
            .find(|load| {
                // The loader maps whole pages, so a mapping may start before
                // the segment does.
                let end = load.offset.saturating_add(load.file_size);
                load.executable == mapping.executable
                    && mapping.offset < end
                    && load.offset
                        < mapping
                            .offset
                            .saturating_add(mapping.range.end - mapping.range.start)
            })
            .map(|load| {
                mapping
                    .range
                    .start
                    .wrapping_sub(mapping.offset)
                    .wrapping_add(load.offset)
                    .wrapping_sub(load.address)
            })
    };
    // Code first: a program may have mapped the file as data besides.
    let code = mappings.iter().filter(|mapping| mapping.executable);
    let data = mappings.iter().filter(|mapping| !mapping.executable);
    code.chain(data).find_map(|mapping| of(mapping))
}

fn extent(loads: &[Load], bias: u64) -> Range {
    let start = loads.iter().map(|load| load.address).min().unwrap_or(0);
    let end = loads
        .iter()
        .map(|load| load.address.saturating_add(load.memory_size))
        .max()
        .unwrap_or(0);
    Range {
        start: bias.wrapping_add(start),
        end: bias.wrapping_add(end),
    }
}

/// Opens a mapped file for reading.
pub(crate) fn open_mapped<M: TargetMemory>(
    process: &PinnedProcess,
    memory: &M,
    mapped: &MappedFile<'_>,
) -> io::Result<File> {
    let mut first_error = None;
    for mapping in &mapped.mappings {
        let name = format!(
            "map_files/{:x}-{:x}",
            mapping.range.start, mapping.range.end
        );
        match process
            .open_below(&name, libc::O_PATH)
            .and_then(|fd| reopen(&fd))
        {
            Ok(file) => return Ok(file),
            Err(error) => {
                let missing = error.kind() == io::ErrorKind::NotFound;
                first_error.get_or_insert(error);
                // A mapping may have been split or merged meanwhile: try the
                // next one. Anything else holds for all of them.
                if !missing {
                    break;
                }
            }
        }
    }
    for fd in [
        process.open_below("exe", libc::O_PATH),
        open_in_root(process, mapped),
    ] {
        let Ok(file) = fd.and_then(|fd| reopen(&fd)) else {
            continue;
        };
        if is_mapped_file(&file, mapped, memory) {
            return Ok(file);
        }
    }
    Err(first_error.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

/// Opens a regular file of the host for reading; anything else is refused before
/// it is opened, since that may have effects, or never return.
///
/// # Errors
/// What the system says.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let found = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)?;
    reopen(&found.into()).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => io::Error::other("not a regular file"),
        _ => error,
    })
}

/// Opens what an `O_PATH` descriptor stands for, if it is a regular file:
/// opening a device may have effects.
fn reopen(fd: &OwnedFd) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if !std::fs::metadata(&path)?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    File::open(path)
}

/// Opens the regular file at a path below the process's root directory.
///
/// # Errors
/// What the system says.
pub(super) fn open_file_in_root(process: &PinnedProcess, path: &Path) -> io::Result<File> {
    reopen(&open_path_in_root(process, path)?)
}

/// Opens the file's path below the process's root directory.
fn open_in_root(process: &PinnedProcess, mapped: &MappedFile<'_>) -> io::Result<OwnedFd> {
    open_path_in_root(process, &proc::path_in_root(process, mapped.path()))
}

/// Opens a path below the process's root directory (Linux 5.6), as an `O_PATH`
/// descriptor.
fn open_path_in_root(process: &PinnedProcess, path: &Path) -> io::Result<OwnedFd> {
    let root = process.open_below("root", libc::O_PATH | libc::O_DIRECTORY)?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all zeroes is a valid `open_how`.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_PATH | libc::O_CLOEXEC).cast_unsigned().into();
    // Symbolic links and `..` must not lead out of the process's root.
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the descriptor is owned, the path is NUL-terminated and `how` is
    // of the size given.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    };
    let fd = libc::c_int::try_from(fd)
        .ok()
        .filter(|&fd| fd >= 0)
        .ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether `file` is the mapped one: by device and inode, or by its start being
/// what the process has in memory.
fn is_mapped_file<M: TargetMemory>(file: &File, mapped: &MappedFile<'_>, memory: &M) -> bool {
    let Ok(metadata) = file.metadata() else {
        return false;
    };
    if metadata.ino() == mapped.id.inode
        && libc::major(metadata.dev()) == mapped.id.major
        && libc::minor(metadata.dev()) == mapped.id.minor
    {
        return true;
    }
    let Some(start) = mapped.mappings.iter().find(|mapping| mapping.offset == 0) else {
        return false;
    };
    let mut here = [0; COMPARED];
    let mut there = [0; COMPARED];
    file.read_exact_at(&mut here, 0).is_ok()
        && memory.read(start.range.start, &mut there).is_ok()
        && here == there
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ProcessMemory;
    use std::sync::Arc;

    #[test]
    fn the_own_program_is_found_where_the_linker_says() {
        let process = Arc::new(PinnedProcess::open(std::process::id()).unwrap());
        let memory = ProcessMemory::open(Arc::clone(&process)).unwrap();
        let mappings = proc::mappings(&process).unwrap();
        let files = MappedFile::all(&mappings);
        let here = the_own_program_is_found_where_the_linker_says as *const () as u64;
        let mapped = files
            .iter()
            .find(|file| {
                file.mappings
                    .iter()
                    .any(|mapping| mapping.range.contains(here))
            })
            .unwrap();
        let image = Image::open(&process, &memory, mapped).unwrap();
        let headers = image.elf().unwrap().program_headers_address().unwrap();
        assert_eq!(proc::program_headers(&process), Some(image.live(headers)));
        assert!(image.extent.contains(here));
        // The way taken without the right to use map_files.
        let fd = open_in_root(&process, mapped).unwrap();
        assert!(is_mapped_file(&reopen(&fd).unwrap(), mapped, &memory));
        let other = files
            .iter()
            .find(|file| file.id != mapped.id && file.is_executable());
        let fd = open_in_root(&process, other.unwrap()).unwrap();
        assert!(!is_mapped_file(&reopen(&fd).unwrap(), mapped, &memory));
    }

    #[test]
    fn devices_are_not_opened() {
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(reopen(&null).is_err());
    }
}
