//! Separate debug files: what `strip` took away, kept elsewhere.
//!
//! A debug file belongs to an image if it has the same build id, or if the image
//! names it (`.gnu_debuglink`) with its checksum. It is looked for where
//! debuggers look, first below the target's own root, then below the host's: a
//! container seldom has debug files, and the host may have them for the same
//! distribution.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::path::PathBuf;

use object::read::ReadRef;

use crate::memory::PinnedProcess;

use super::elf::Elf;
use super::elf::FileCache;
use super::elf::file_cache;
use super::image;
use super::proc;

/// Where debuggers look.
const DEBUG_DIR: &str = "/usr/lib/debug";
/// Largest debug file whose checksum is computed; libruby's has 20 MB.
const MAX_CHECKSUMMED: u64 = 1 << 30;

/// A debug file that belongs to an image.
#[derive(Debug)]
pub struct DebugFile {
    /// Its path, and below whose root.
    pub place: String,
    file: FileCache,
}

impl DebugFile {
    /// Looks for the debug file of an image which the process has mapped from
    /// `path`.
    pub fn find<'data, R: ReadRef<'data>>(
        elf: &Elf<'data, R>,
        path: &Path,
        process: &PinnedProcess,
    ) -> Option<Self> {
        let path = proc::path_in_root(process, path.as_os_str().as_bytes());
        let candidates = candidates(elf, &path);
        let in_target = candidates.iter().filter_map(|candidate| {
            let file = image::open_file_in_root(process, &candidate.path).ok()?;
            Some((candidate, file, "of the process"))
        });
        let on_host = candidates.iter().filter_map(|candidate| {
            let file = image::open_regular(&candidate.path).ok()?;
            Some((candidate, file, "of the host"))
        });
        in_target
            .chain(on_host)
            .find_map(|(candidate, file, whose)| {
                candidate.take(elf, file).map(|file| Self {
                    place: format!("{} {whose}", candidate.path.display()),
                    file,
                })
            })
    }

    /// Looks for the debug file of an image on the host at `path`.
    pub fn find_on_host<'data, R: ReadRef<'data>>(
        elf: &Elf<'data, R>,
        path: &Path,
    ) -> Option<Self> {
        candidates(elf, path).iter().find_map(|candidate| {
            let file = image::open_regular(&candidate.path).ok()?;
            let file = candidate.take(elf, file)?;
            Some(Self {
                place: candidate.path.display().to_string(),
                file,
            })
        })
    }

    /// Its contents.
    pub fn elf(&self) -> Option<Elf<'_, &FileCache>> {
        Elf::parse(&self.file).ok()
    }

    /// The file itself.
    #[must_use]
    pub fn into_file(self) -> File {
        self.file.into_inner().into_file()
    }
}

/// Where a debug file may be.
#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    /// The checksum that the image has of it.
    checksum: Option<u32>,
}

impl Candidate {
    /// The file, if it belongs to the image.
    fn take<'data, R: ReadRef<'data>>(
        &self,
        image: &Elf<'data, R>,
        mut file: File,
    ) -> Option<FileCache> {
        let has_checksum = match (self.checksum, image.build_id()) {
            // A build id says the same, and costs less.
            (Some(checksum), None) => checksum_of(&mut file)? == checksum,
            _ => false,
        };
        let file = file_cache(file);
        let debug = Elf::parse(&file).ok()?;
        let same_build = image.build_id().is_some() && debug.build_id() == image.build_id();
        drop(debug);
        (same_build || has_checksum).then_some(file)
    }
}

fn checksum_of(file: &mut File) -> Option<u32> {
    if file.metadata().ok()?.len() > MAX_CHECKSUMMED {
        return None;
    }
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(hasher.finalize()),
            length => hasher.update(buffer.get(..length)?),
        }
    }
}

fn candidates<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>, path: &Path) -> Vec<Candidate> {
    let mut found = Vec::new();
    if let Some([first, rest @ ..]) = elf.build_id().filter(|id| id.len() > 1) {
        let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
        found.push(Candidate {
            path: format!("{DEBUG_DIR}/.build-id/{first:02x}/{rest}.debug").into(),
            checksum: None,
        });
    }
    // A name only: a path could lead anywhere.
    let link = elf
        .debug_link()
        .filter(|(name, _)| !name.is_empty() && !name.contains(&b'/') && *name != b"..");
    if let (Some((name, checksum)), Some(dir)) = (link, path.parent()) {
        let name = OsStr::from_bytes(name);
        let below = dir.strip_prefix("/").unwrap_or(dir);
        found.extend(
            [
                dir.join(name),
                dir.join(".debug").join(name),
                Path::new(DEBUG_DIR).join(below).join(name),
            ]
            .map(|path| Candidate {
                path,
                checksum: Some(checksum),
            }),
        );
    }
    found
}
