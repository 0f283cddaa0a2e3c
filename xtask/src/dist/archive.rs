//! Archives that are the same bytes whenever they are made from the same files:
//! entries by name, no owner, no time but that of the source.

use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use flate2::Compression;
use flate2::GzBuilder;
use tar::EntryType;
use tar::Header;

/// Who may do what with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Everybody may read it.
    Text,
    /// Everybody may run it.
    Program,
}

impl Mode {
    const fn bits(self) -> u32 {
        match self {
            Self::Text => 0o644,
            Self::Program => 0o755,
        }
    }
}

/// A file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its path below the archive's folder.
    pub name: String,
    /// Who may do what with it.
    pub mode: Mode,
    /// What is in it.
    pub content: Vec<u8>,
}

impl Entry {
    /// A file of this machine.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(name: impl Into<String>, mode: Mode, from: &Path) -> Result<Self> {
        let content = std::fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        Ok(Self {
            name: name.into(),
            mode,
            content,
        })
    }
}

/// The bytes of a `.tar.gz` with one folder that has all the entries, in whatever
/// order they are given. `time`: seconds since 1970.
///
/// # Errors
/// If a name is too long for the format.
pub fn tar_gz(folder: &str, mut entries: Vec<Entry>, time: u64) -> Result<Vec<u8>> {
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    // By default the header has neither a time nor a name nor which system.
    let packer = GzBuilder::new().write(Vec::new(), Compression::best());
    let mut archive = tar::Builder::new(packer);
    let mut folders = vec![String::new()];
    append(
        &mut archive,
        EntryType::Directory,
        &format!("{folder}/"),
        0o755,
        time,
        &[],
    )?;
    for entry in &entries {
        for inner in folders_around(&entry.name) {
            if folders.iter().any(|known| known == inner) {
                continue;
            }
            let place = format!("{folder}/{inner}/");
            append(&mut archive, EntryType::Directory, &place, 0o755, time, &[])?;
            folders.push(inner.to_owned());
        }
        let place = format!("{folder}/{}", entry.name);
        let mode = entry.mode.bits();
        append(
            &mut archive,
            EntryType::Regular,
            &place,
            mode,
            time,
            &entry.content,
        )?;
    }
    let packer = archive.into_inner().context("ending an archive")?;
    packer.finish().context("compressing an archive")
}

/// The folders around a file, the outermost first.
fn folders_around(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('/')
        .filter_map(|(end, _)| name.get(..end))
}

fn append(
    archive: &mut tar::Builder<impl std::io::Write>,
    kind: EntryType,
    place: &str,
    mode: u32,
    time: u64,
    content: &[u8],
) -> Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(time);
    header.set_size(content.len() as u64);
    archive
        .append_data(&mut header, place, content)
        .with_context(|| format!("writing {place} into an archive"))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    const TIME: u64 = 1_700_000_000;

    fn entry(name: &str, mode: Mode, content: &str) -> Entry {
        Entry {
            name: name.to_owned(),
            mode,
            content: content.into(),
        }
    }

    fn entries() -> Vec<Entry> {
        vec![
            entry("rbprof", Mode::Program, "\x7fELF"),
            entry("docs/b.md", Mode::Text, "b"),
            entry("docs/a.md", Mode::Text, "a"),
            entry("README.md", Mode::Text, "read me"),
        ]
    }

    #[test]
    fn the_same_files_make_the_same_bytes_in_any_order() {
        let one = tar_gz("rbprof-1", entries(), TIME).unwrap();
        let mut other = entries();
        other.reverse();
        assert_eq!(one, tar_gz("rbprof-1", other, TIME).unwrap());
        let later = tar_gz("rbprof-1", entries(), TIME + 1).unwrap();
        assert_ne!(one, later, "the time is in it");
    }

    #[test]
    fn nothing_of_this_machine_is_in_the_headers() {
        let bytes = tar_gz("rbprof-1", entries(), TIME).unwrap();
        // No name, no comment, no time.
        assert_eq!(bytes.get(3..8), Some([0; 5].as_slice()));
        let mut archive = tar::Archive::new(GzDecoder::new(bytes.as_slice()));
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let header = entry.header().clone();
            assert_eq!(header.uid().unwrap(), 0);
            assert_eq!(header.gid().unwrap(), 0);
            assert_eq!(header.mtime().unwrap(), TIME);
            assert!(header.username().unwrap().unwrap_or_default().is_empty());
            let path = entry.path().unwrap().to_string_lossy().into_owned();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            found.push((path, header.mode().unwrap(), content));
        }
        let expected = [
            ("rbprof-1/", 0o755, ""),
            ("rbprof-1/README.md", 0o644, "read me"),
            ("rbprof-1/docs/", 0o755, ""),
            ("rbprof-1/docs/a.md", 0o644, "a"),
            ("rbprof-1/docs/b.md", 0o644, "b"),
            ("rbprof-1/rbprof", 0o755, "\x7fELF"),
        ];
        let expected =
            expected.map(|(path, mode, content)| (path.to_owned(), mode, content.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn folders_are_added_from_the_outside() {
        assert_eq!(folders_around("a/b/c").collect::<Vec<_>>(), ["a", "a/b"]);
        assert_eq!(folders_around("c").count(), 0);
    }
}
