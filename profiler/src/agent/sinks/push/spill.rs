//! Requests in files, for when the receiver is away.
//!
//! Each is in a file of its own, named by its turn, which is written under a temporary
//! name and then gets its own. Files are not forced onto the disk: they outlive the
//! agent, and a crash of the machine costs those of the last half a minute. What such a
//! crash leaves of a file is told by its checksum.

use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::fs::TryLockError;
use std::io;
use std::io::ErrorKind;
use std::io::Read as _;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use super::item::Item;
use crate::output;

/// How many files there may be, whatever their size: each takes memory.
const MAX_FILES: usize = 65_536;
/// What the head of a file and all before it can take beyond an item's size, in bytes.
const MARGIN: u64 = 64 << 10;

/// A directory of files that wait.
#[derive(Debug)]
pub(super) struct Spill {
    directory: PathBuf,
    /// In bytes.
    limit: u64,
    /// Largest body that is read, in bytes.
    largest: u64,
    /// Sizes by turn.
    files: BTreeMap<u64, u64>,
    bytes: u64,
    /// Held for as long as this lives.
    _lock: File,
}

/// What became of a file that was to be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is this, and stays until it is removed.
    Item(u64, Item),
    /// It was not as it was written, and is gone.
    Corrupt,
    /// There is none.
    Nothing,
}

impl Spill {
    /// Uses a directory, which is made if there is none; what is in it counts.
    ///
    /// # Errors
    /// If the directory cannot be used, or another agent uses it.
    pub(super) fn open(directory: PathBuf, limit: u64, largest: u64) -> Result<Self> {
        fs::create_dir_all(&directory)
            .with_context(|| format!("making the directory {}", directory.display()))?;
        let path = directory.join("lock");
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .with_context(|| format!("opening {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("another rbprof uses {}", directory.display())
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("locking {}", path.display()));
            }
        }
        let mut spill = Self {
            directory,
            limit,
            largest,
            files: BTreeMap::new(),
            bytes: 0,
            _lock: lock,
        };
        spill
            .scan()
            .with_context(|| format!("reading {}", spill.directory.display()))?;
        Ok(spill)
    }

    fn scan(&mut self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if !entry.file_type()?.is_file() {
                continue;
            }
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(turn) = turn(name) {
                let size = entry.metadata()?.len();
                self.files.insert(turn, size);
                self.bytes = self.bytes.saturating_add(size);
            } else if output::is_temporary(name) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// How many files there are.
    pub(super) fn count(&self) -> u64 {
        self.files.len() as u64
    }

    /// Their size.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn path(&self, turn: u64) -> PathBuf {
        self.directory.join(format!("{turn:020}.spill"))
    }

    /// Puts a request at the end of the line.
    ///
    /// # Errors
    /// If it cannot be written. Then it is in no file.
    pub(super) fn put(&mut self, item: &Item) -> io::Result<()> {
        let last = self.files.last_key_value().map_or(0, |(turn, _)| *turn);
        let turn = last
            .checked_add(1)
            .ok_or_else(|| io::Error::other("out of numbers"))?;
        let path = self.path(turn);
        let mut temporary = output::temporary_beside(&path)?;
        output::buffered(temporary.as_file_mut(), |out| item.write(out))?;
        let size = temporary.as_file().metadata()?.len();
        temporary.persist_noclobber(&path)?;
        self.files.insert(turn, size);
        self.bytes = self.bytes.saturating_add(size);
        Ok(())
    }

    /// Removes the oldest, but for one of that turn, until all is within bounds.
    /// Returns how many.
    pub(super) fn shrink(&mut self, keep: Option<u64>) -> io::Result<u64> {
        let mut removed = 0;
        while self.bytes > self.limit || self.files.len() > MAX_FILES {
            let mut turns = self.files.keys().copied();
            let Some(oldest) = turns.find(|turn| Some(*turn) != keep) else {
                break;
            };
            self.remove(oldest)?;
            removed += 1;
        }
        Ok(removed)
    }

    /// The oldest request.
    ///
    /// # Errors
    /// If it cannot be read. Its file stays, and is tried again by the next agent.
    pub(super) fn take(&mut self) -> io::Result<Taken> {
        let Some((&turn, _)) = self.files.first_key_value() else {
            return Ok(Taken::Nothing);
        };
        let limit = self.largest.saturating_add(MARGIN);
        let mut content = Vec::new();
        let read =
            File::open(self.path(turn)).and_then(|file| file.take(limit).read_to_end(&mut content));
        if let Err(error) = read {
            self.forget(turn);
            // Somebody has removed it.
            return if error.kind() == ErrorKind::NotFound {
                Ok(Taken::Corrupt)
            } else {
                Err(error)
            };
        }
        match Item::read(&content.into()) {
            Some(item) => Ok(Taken::Item(turn, item)),
            None => {
                self.remove(turn)?;
                Ok(Taken::Corrupt)
            }
        }
    }

    /// Puts a request at the end of the line that was taken.
    ///
    /// # Errors
    /// If that cannot be done. Then it stays where it is.
    pub(super) fn put_back_last(&mut self, turn: u64) -> io::Result<()> {
        let last = self.files.last_key_value().map_or(0, |(turn, _)| *turn);
        let (Some(&size), Some(next)) = (self.files.get(&turn), last.checked_add(1)) else {
            return Ok(());
        };
        if turn != last {
            fs::rename(self.path(turn), self.path(next))?;
            self.files.remove(&turn);
            self.files.insert(next, size);
        }
        Ok(())
    }

    /// Removes a request.
    ///
    /// # Errors
    /// If its file cannot be removed. It is not read again by this agent.
    pub(super) fn remove(&mut self, turn: u64) -> io::Result<()> {
        self.forget(turn);
        match fs::remove_file(self.path(turn)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn forget(&mut self, turn: u64) {
        if let Some(size) = self.files.remove(&turn) {
            self.bytes = self.bytes.saturating_sub(size);
        }
    }
}

/// The turn in a file's name; `None` if it is none of ours.
fn turn(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".spill")?;
    let valid = digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit());
    valid.then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn open(directory: &Path, limit: u64) -> Spill {
        Spill::open(directory.join("spill"), limit, 1 << 20).unwrap()
    }

    fn drain(spill: &mut Spill) -> Vec<String> {
        let mut bodies = Vec::new();
        loop {
            match spill.take().unwrap() {
                Taken::Item(turn, item) => {
                    spill.remove(turn).unwrap();
                    bodies.push(String::from_utf8(item.body.to_vec()).unwrap());
                }
                Taken::Corrupt => bodies.push("corrupt".to_owned()),
                Taken::Nothing => return bodies,
            }
        }
    }

    #[test]
    fn what_is_put_outlives_who_put_it() {
        let root = tempfile::tempdir().unwrap();
        let mut spill = open(root.path(), 1 << 20);
        for text in ["a", "b", "c"] {
            spill.put(&Item::of_text(text)).unwrap();
        }
        let (count, bytes) = (spill.count(), spill.bytes());
        drop(spill);
        let leftover = root.path().join("spill/.rbprof-Ab12Cd.tmp");
        fs::write(&leftover, "half").unwrap();
        fs::write(root.path().join("spill/1.spill"), "not ours").unwrap();
        let mut spill = open(root.path(), 1 << 20);
        assert!(!leftover.exists());
        assert_eq!((spill.count(), spill.bytes()), (count, bytes));
        spill.put(&Item::of_text("d")).unwrap();
        assert_eq!(drain(&mut spill), ["a", "b", "c", "d"]);
        assert_eq!((spill.count(), spill.bytes()), (0, 0));
        assert!(root.path().join("spill/1.spill").exists());
    }

    #[test]
    fn the_oldest_goes_where_there_is_no_room() {
        let root = tempfile::tempdir().unwrap();
        let mut spill = open(root.path(), 1000);
        for n in 0..20 {
            spill
                .put(&Item::of_text(&format!("{n} {}", "x".repeat(100))))
                .unwrap();
            spill.shrink(Some(1)).unwrap();
            assert!(spill.bytes() <= 1000);
        }
        let left = drain(&mut spill);
        assert!(left[0].starts_with("0 "), "that one is being sent");
        assert!(left[1].starts_with("15 "), "{left:?}");
        assert!(left.last().unwrap().starts_with("19 "));
    }

    #[test]
    fn a_corrupt_file_is_skipped() {
        let root = tempfile::tempdir().unwrap();
        let mut spill = open(root.path(), 1 << 20);
        for text in ["a", "b", "c", "d"] {
            spill.put(&Item::of_text(text)).unwrap();
        }
        let path = |turn: u64| root.path().join(format!("spill/{turn:020}.spill"));
        fs::write(path(1), "").unwrap();
        let mut content = fs::read(path(2)).unwrap();
        *content.last_mut().unwrap() ^= 1;
        fs::write(path(2), content).unwrap();
        fs::remove_file(path(3)).unwrap();
        assert_eq!(drain(&mut spill), ["corrupt", "corrupt", "corrupt", "d"]);
        assert!(!path(1).exists() && !path(2).exists());
    }

    #[test]
    fn a_request_can_be_put_back() {
        let root = tempfile::tempdir().unwrap();
        let mut spill = open(root.path(), 1 << 20);
        for text in ["a", "b"] {
            spill.put(&Item::of_text(text)).unwrap();
        }
        spill.put_back_last(1).unwrap();
        assert_eq!(drain(&mut spill), ["b", "a"]);
        spill.put(&Item::of_text("c")).unwrap();
        spill.put_back_last(1).unwrap();
        spill.put_back_last(99).unwrap();
        assert_eq!(drain(&mut spill), ["c"]);
    }

    #[test]
    fn one_agent_uses_it_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let spill = open(root.path(), 1 << 20);
        let again = Spill::open(root.path().join("spill"), 1, 1).unwrap_err();
        assert!(again.to_string().contains("another rbprof"), "{again}");
        drop(spill);
        open(root.path(), 1 << 20);
    }
}
