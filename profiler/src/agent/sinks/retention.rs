//! Which files of profiles are kept.
//!
//! Files are told by their names, [`names`], and only directories right under the
//! root are looked into; whatever else is there is left alone, and links are not
//! followed. What is remembered is how many bytes there are of each while, so memory
//! does not grow with the files. What others remove is noticed once an hour.

use std::collections::BTreeMap;
use std::fs;
use std::fs::DirEntry;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use super::names;
use crate::output;

/// How finely age is known, as a part of the greatest one.
const STEPS: u32 = 256;
/// How often all files are looked at anew.
const RESCAN: Duration = Duration::from_secs(3600);
/// How long after a failure nothing is removed.
const PAUSE: Duration = Duration::from_secs(60);
/// How many files of a while are put in order at once; further ones wait for the next
/// time.
const MAX_SORTED: usize = 65_536;

/// What one run of [`Retention::enforce`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Removed {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct Retention {
    root: PathBuf,
    max_age: Duration,
    max_size: u64,
    /// Bytes by the number of their while since the epoch. Whiles are a part of the
    /// greatest age, and no file that is kept is older: this stays small.
    bytes: BTreeMap<u64, u64>,
    total: u64,
    scanned: Option<Instant>,
    paused: Option<Instant>,
}

/// What a file takes on the disk. Some file systems keep small ones for nothing.
pub(super) fn size(metadata: &Metadata) -> u64 {
    metadata.len().max(metadata.blocks().saturating_mul(512))
}

impl Retention {
    pub(super) fn new(root: PathBuf, max_age: Duration, max_size: u64) -> Self {
        Self {
            root,
            max_age,
            max_size,
            bytes: BTreeMap::new(),
            total: 0,
            scanned: None,
            paused: None,
        }
    }

    /// What all files take, as far as is known.
    #[cfg(test)]
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Takes note of a new file.
    pub(super) fn add(&mut self, from: SystemTime, size: u64, now: SystemTime) {
        let step = self.step(from, now);
        let bytes = self.bytes.entry(step).or_default();
        *bytes = bytes.saturating_add(size);
        self.total = self.total.saturating_add(size);
    }

    /// Removes what is too old or too much, the oldest first.
    ///
    /// # Errors
    /// If files cannot be listed or removed. Then nothing is removed for a minute.
    pub(super) fn enforce(&mut self, now: SystemTime) -> io::Result<Removed> {
        if self.paused.is_some_and(|since| since.elapsed() < PAUSE) {
            return Ok(Removed::default());
        }
        self.paused = None;
        let result = self.enforce_now(now);
        if result.is_err() {
            self.paused = Some(Instant::now());
        }
        result
    }

    fn enforce_now(&mut self, now: SystemTime) -> io::Result<Removed> {
        if self.scanned.is_none_or(|at| at.elapsed() >= RESCAN) {
            self.scan(now)?;
        }
        let oldest_kept = now.checked_sub(self.max_age).unwrap_or(UNIX_EPOCH);
        let mut removed = Removed::default();
        if let Some((step, _)) = self.bytes.first_key_value()
            && *step < self.step(oldest_kept, now)
        {
            self.remove(now, oldest_kept, &mut removed)?;
        }
        if self.total > self.max_size {
            let enough = self.max_size - self.max_size / 20;
            let (until, over) = self.boundary(enough);
            self.remove(now, until, &mut removed)?;
            if self.total > enough {
                self.remove_oldest_of(now, over, enough, &mut removed)?;
            }
            if self.total > self.max_size {
                // What is known is not what is there.
                self.scan(now)?;
            }
        }
        Ok(removed)
    }

    /// Looks at all files.
    fn scan(&mut self, now: SystemTime) -> io::Result<()> {
        self.bytes.clear();
        self.total = 0;
        let root = self.root.clone();
        each_file(&root, |time, _, entry| {
            match entry.metadata() {
                Ok(metadata) => self.add(time, size(&metadata), now),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        self.scanned = Some(Instant::now());
        Ok(())
    }

    /// The while that a time is in. What is of the future is of now; what is too old,
    /// right before what is not.
    fn step(&self, time: SystemTime, now: SystemTime) -> u64 {
        let step = (self.max_age / STEPS)
            .max(Duration::from_secs(1))
            .as_millis();
        let number = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis() / step).unwrap_or(u64::MAX)
        };
        let oldest = number(now.checked_sub(self.max_age).unwrap_or(UNIX_EPOCH));
        number(time.min(now)).max(oldest.saturating_sub(1))
    }

    fn begin(&self, step: u64) -> SystemTime {
        let length = (self.max_age / STEPS)
            .max(Duration::from_secs(1))
            .as_millis();
        let ms = u128::from(step).saturating_mul(length);
        let since = Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX));
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    }

    /// Up to when all files must go for the rest to be no more than `enough`, and the
    /// while after that, of which some must.
    fn boundary(&self, enough: u64) -> (SystemTime, u64) {
        let mut rest = self.total;
        for (step, bytes) in &self.bytes {
            if rest.saturating_sub(*bytes) < enough {
                return (self.begin(*step), *step);
            }
            rest = rest.saturating_sub(*bytes);
        }
        (UNIX_EPOCH, 0)
    }

    /// Removes all files from before a time.
    fn remove(
        &mut self,
        now: SystemTime,
        until: SystemTime,
        removed: &mut Removed,
    ) -> io::Result<()> {
        let root = self.root.clone();
        each_file(&root, |time, path, entry| {
            if time < until {
                let size = entry.metadata().map_or(0, |metadata| size(&metadata));
                self.remove_file(now, time, size, path, removed)?;
            }
            Ok(())
        })
    }

    /// Removes the oldest files of a while until there is no more than `enough`.
    fn remove_oldest_of(
        &mut self,
        now: SystemTime,
        step: u64,
        enough: u64,
        removed: &mut Removed,
    ) -> io::Result<()> {
        let mut files = Vec::new();
        let root = self.root.clone();
        each_file(&root, |time, path, entry| {
            if self.step(time, now) <= step && files.len() < MAX_SORTED {
                let size = entry.metadata().map_or(0, |metadata| size(&metadata));
                files.push((time, path.to_path_buf(), size));
            }
            Ok(())
        })?;
        files.sort();
        for (time, path, size) in files {
            if self.total <= enough {
                break;
            }
            self.remove_file(now, time, size, &path, removed)?;
        }
        Ok(())
    }

    fn remove_file(
        &mut self,
        now: SystemTime,
        time: SystemTime,
        size: u64,
        path: &Path,
        removed: &mut Removed,
    ) -> io::Result<()> {
        match fs::remove_file(path) {
            Ok(()) => {
                removed.files += 1;
                removed.bytes += size;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let step = self.step(time, now);
        if let Some(bytes) = self.bytes.get_mut(&step) {
            *bytes = bytes.saturating_sub(size);
            if *bytes == 0 {
                self.bytes.remove(&step);
            }
        }
        self.total = self.total.saturating_sub(size);
        // A service that is gone leaves nothing. One that is not gets a new directory.
        if let Some(directory) = path.parent() {
            let _ = fs::remove_dir(directory);
        }
        Ok(())
    }
}

/// Removes the temporary files that an agent which was killed has left.
pub(super) fn remove_leftovers(root: &Path) -> io::Result<u64> {
    let mut removed = 0;
    each_entry(root, |path, _| {
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_some_and(output::is_temporary) {
            fs::remove_file(path)?;
            removed += 1;
        }
        Ok(())
    })?;
    Ok(removed)
}

/// All files of profiles, with the times in their names.
fn each_file(
    root: &Path,
    mut see: impl FnMut(SystemTime, &Path, &DirEntry) -> io::Result<()>,
) -> io::Result<()> {
    each_entry(root, |path, entry| {
        let name = path.file_name().and_then(|name| name.to_str());
        match name.and_then(names::time) {
            Some(time) => see(time, path, entry),
            None => Ok(()),
        }
    })
}

/// All regular files in the directories of a directory.
fn each_entry(
    root: &Path,
    mut see: impl FnMut(&Path, &DirEntry) -> io::Result<()>,
) -> io::Result<()> {
    for service in fs::read_dir(root)? {
        let service = service?;
        if !service.file_type()?.is_dir() {
            continue;
        }
        let files = match fs::read_dir(service.path()) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for file in files {
            let file = file?;
            if file.file_type()?.is_file() {
                see(&file.path(), &file)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const NOW_S: u64 = 1_796_080_500;

    fn at(before: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW_S - before)
    }

    fn put(root: &Path, service: &str, before: u64, pid: u32, bytes: usize) -> PathBuf {
        let directory = root.join(service);
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(names::file(at(before), Some(pid), 1));
        fs::write(&path, vec![7; bytes]).unwrap();
        path
    }

    fn retention(root: &Path, max_age_s: u64, max_size: u64) -> Retention {
        Retention::new(root.to_path_buf(), Duration::from_secs(max_age_s), max_size)
    }

    #[test]
    fn what_is_too_old_goes() {
        let root = tempfile::tempdir().unwrap();
        let old = put(root.path(), "a", 3700, 1, 10);
        let older = put(root.path(), "b", 900_000, 1, 10);
        let new = put(root.path(), "a", 3500, 1, 10);
        let mut retention = retention(root.path(), 3600, 1 << 30);
        let removed = retention.enforce(at(0)).unwrap();
        assert_eq!(removed.files, 2);
        assert!(!old.exists() && !older.exists() && new.exists());
        assert!(
            !root.path().join("b").exists(),
            "an empty service goes, too"
        );
        // It becomes too old while we run.
        let later = at(0) + Duration::from_secs(130);
        assert_eq!(retention.enforce(later).unwrap().files, 1);
        assert_eq!(retention.total(), 0);
    }

    #[test]
    fn the_oldest_goes_where_there_is_too_much() {
        let root = tempfile::tempdir().unwrap();
        // Of one while and of several.
        let paths: Vec<PathBuf> = (0..40)
            .map(|n| {
                put(
                    root.path(),
                    if n % 2 == 0 { "a" } else { "b" },
                    8000 - n * 100,
                    1,
                    4096,
                )
            })
            .collect();
        let close: Vec<PathBuf> = (0..10)
            .map(|n| put(root.path(), "a", 10 - n, 1, 4096))
            .collect();
        let mut retention = retention(root.path(), 7 * 86_400, 20 * 4096);
        let removed = retention.enforce(at(0)).unwrap();
        assert_eq!(removed.files, 31, "a twentieth is free");
        assert_eq!(retention.total(), 19 * 4096);
        for (n, path) in paths.iter().chain(&close).enumerate() {
            assert_eq!(path.exists(), n >= 31, "{n}");
        }
        // A file more, as the sink does.
        let new = put(root.path(), "c", 0, 1, 8192);
        retention.add(at(0), 8192, at(0));
        assert_eq!(retention.enforce(at(0)).unwrap().files, 2);
        assert!(new.exists());
    }

    #[test]
    fn files_of_one_moment_go_in_order() {
        let root = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (1..=9)
            .map(|pid| put(root.path(), "a", 5, pid, 4096))
            .collect();
        let mut retention = retention(root.path(), 60, 4 * 4096);
        retention.enforce(at(0)).unwrap();
        let left = paths.iter().filter(|path| path.exists()).count();
        assert_eq!(left, 3);
    }

    #[test]
    fn files_of_others_stay() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let linked = put(elsewhere.path(), "a", 900_000, 1, 10);
        symlink(elsewhere.path().join("a"), root.path().join("link")).unwrap();
        let ours = put(root.path(), "a", 900_000, 1, 10);
        let link = ours.with_file_name(names::file(at(900_000), Some(2), 1));
        symlink(&linked, &link).unwrap();
        let notes = root.path().join("a/notes.txt");
        fs::write(&notes, "x").unwrap();
        let deep = put(&root.path().join("a"), "deep", 900_000, 1, 10);
        let flat = root.path().join(names::file(at(900_000), Some(1), 1));
        fs::write(&flat, "x").unwrap();
        let removed = retention(root.path(), 60, 1 << 20).enforce(at(0)).unwrap();
        assert_eq!(removed.files, 1);
        assert!(!ours.exists());
        for path in [&linked, &link, &notes, &deep, &flat] {
            assert!(path.symlink_metadata().is_ok(), "{}", path.display());
        }
    }

    #[test]
    fn leftovers_go_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let profile = put(root.path(), "a", 0, 1, 10);
        let leftover = root.path().join("a/.rbprof-Ab12Cd.tmp");
        let other = root.path().join("a/.other-Ab12Cd.tmp");
        for path in [&leftover, &other] {
            fs::write(path, "half").unwrap();
        }
        assert_eq!(remove_leftovers(root.path()).unwrap(), 1);
        assert!(!leftover.exists() && other.exists() && profile.exists());
    }

    #[test]
    fn a_root_that_is_gone_is_an_error_now_and_then() {
        let root = tempfile::tempdir().unwrap();
        let mut retention = retention(&root.path().join("gone"), 60, 1 << 20);
        retention.enforce(at(0)).unwrap_err();
        retention.enforce(at(0)).unwrap();
    }
}
