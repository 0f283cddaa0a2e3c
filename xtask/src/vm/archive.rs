//! File systems as the kernel unpacks them when it boots: cpio archives in the
//! `newc` format, of which any number may follow each other in one file.

use std::fs::File;
use std::io::BufWriter;
use std::io::Read as _;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use cpio::newc::Builder;
use cpio::newc::ModeFileType;

/// What the size of each archive is a multiple of, so that the next one can
/// follow.
const ALIGNMENT: u64 = 512;

/// An archive in the making.
pub(super) struct Archive {
    file: BufWriter<File>,
    /// Folders that are in it.
    folders: Vec<String>,
    /// The number of the next file: two with the same number would be links to
    /// each other.
    number: u32,
}

impl Archive {
    /// Begins one at the end of a file.
    pub(super) fn new(file: File) -> Self {
        Self {
            file: BufWriter::new(file),
            folders: Vec::new(),
            number: 1,
        }
    }

    /// Adds a folder and those around it, if they are not there.
    pub(super) fn folder(&mut self, place: &str) -> Result<()> {
        if place.is_empty() || self.folders.iter().any(|folder| folder == place) {
            return Ok(());
        }
        if let Some((outer, _)) = place.rsplit_once('/') {
            self.folder(outer)?;
        }
        self.add(place, 0o755, ModeFileType::Directory, &[])?;
        self.folders.push(place.to_owned());
        Ok(())
    }

    /// Adds a file, and the folders around it.
    pub(super) fn file(&mut self, place: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.folder(around(place))?;
        self.add(place, mode, ModeFileType::Regular, content)
    }

    /// Adds a symbolic link, and the folders around it.
    pub(super) fn link(&mut self, place: &str, to: &[u8]) -> Result<()> {
        self.folder(around(place))?;
        self.add(place, 0o777, ModeFileType::Symlink, to)
    }

    /// Adds a copy of a file of this machine, links followed.
    pub(super) fn copy(&mut self, place: &str, from: &Path) -> Result<()> {
        let data = from
            .metadata()
            .with_context(|| format!("looking at {}", from.display()))?;
        self.file(place, data.mode() & 0o7777, &read(from)?)
    }

    /// Adds a folder of this machine with all that is in it, but for what `skip`
    /// leaves out by its path in that folder. Devices and sockets are left out.
    pub(super) fn tree(
        &mut self,
        place: &str,
        from: &Path,
        skip: &dyn Fn(&str) -> bool,
    ) -> Result<()> {
        self.folder(place)?;
        self.subtree(place, from, "", skip)
    }

    fn subtree(
        &mut self,
        place: &str,
        from: &Path,
        inside: &str,
        skip: &dyn Fn(&str) -> bool,
    ) -> Result<()> {
        let folder = from.join(inside);
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .and_then(Iterator::collect::<std::io::Result<_>>)
            .with_context(|| format!("reading {}", folder.display()))?;
        // The same archive every time.
        files.sort_by_key(std::fs::DirEntry::file_name);
        for file in files {
            let name = file.file_name();
            let name = name.to_string_lossy();
            let path = if inside.is_empty() {
                name.into_owned()
            } else {
                format!("{inside}/{name}")
            };
            if skip(&path) {
                continue;
            }
            let own = format!("{place}/{path}");
            let kind = file.file_type()?;
            if kind.is_symlink() {
                let to = std::fs::read_link(file.path())?;
                self.link(&own, to.as_os_str().as_bytes())?;
            } else if kind.is_dir() {
                self.folder(&own)?;
                self.subtree(place, from, &path, skip)?;
            } else if kind.is_file() {
                self.copy(&own, &file.path())?;
            }
        }
        Ok(())
    }

    fn add(&mut self, place: &str, mode: u32, kind: ModeFileType, content: &[u8]) -> Result<()> {
        let Ok(size) = u32::try_from(content.len()) else {
            bail!("{place} is larger than an archive can hold");
        };
        let mut writer = Builder::new(place)
            .ino(self.number)
            .mode(mode)
            .set_mode_file_type(kind)
            .write(&mut self.file, size);
        self.number += 1;
        writer
            .write_all(content)
            .and_then(|()| writer.finish().map(drop))
            .with_context(|| format!("writing {place} into an archive"))
    }

    /// Ends it, so that another one can follow.
    pub(super) fn finish(self) -> Result<File> {
        let writer = cpio::newc::trailer(self.file).context("ending an archive")?;
        let file = writer.into_inner().context("ending an archive")?;
        let size = file.metadata()?.len();
        file.set_len(size.next_multiple_of(ALIGNMENT))?;
        Ok(file)
    }
}

fn around(place: &str) -> &str {
    place.rsplit_once('/').map_or("", |(outer, _)| outer)
}

fn read(file: &Path) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(file)
        .and_then(|mut file| file.read_to_end(&mut content))
        .with_context(|| format!("reading {}", file.display()))?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_is_in_it_with_the_folders_around() {
        let place = std::env::temp_dir().join(format!("rbprof-archive-{}", std::process::id()));
        std::fs::create_dir_all(place.join("from/left-out")).unwrap();
        std::fs::write(place.join("from/a"), "text").unwrap();
        std::os::unix::fs::symlink("a", place.join("from/b")).unwrap();
        let mut archive = Archive::new(File::create(place.join("archive")).unwrap());
        archive.file("init", 0o755, b"#!").unwrap();
        archive
            .tree("x/y", &place.join("from"), &|path| path == "left-out")
            .unwrap();
        archive.finish().unwrap();

        let bytes = std::fs::read(place.join("archive")).unwrap();
        std::fs::remove_dir_all(&place).unwrap();
        assert_eq!(bytes.len() as u64 % ALIGNMENT, 0);
        let mut rest: &[u8] = &bytes;
        let mut found = Vec::new();
        loop {
            let mut entry = cpio::newc::Reader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            let (name, mode) = (entry.entry().name().to_owned(), entry.entry().mode());
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            found.push((name, mode & 0o170_000, content));
            rest = entry.finish().unwrap();
        }
        let entry = |name: &str, kind, content: &str| (name.to_owned(), kind, content.to_owned());
        assert_eq!(
            found,
            [
                entry("init", 0o100_000, "#!"),
                entry("x", 0o040_000, ""),
                entry("x/y", 0o040_000, ""),
                entry("x/y/a", 0o100_000, "text"),
                entry("x/y/b", 0o120_000, "a"),
            ]
        );
    }
}
