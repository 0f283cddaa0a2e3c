//! A folder outside the source tree for what is slow to fetch or to build.
//!
//! An entry is complete or absent: it is made elsewhere and renamed into place,
//! under a lock, so that neither an interrupted nor a second run can spoil it.

use std::fs::File;
use std::fs::TryLockError;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context;
use anyhow::Result;
use sha2::Digest;
use sha2::Sha256;

/// The environment variable that names the cache's folder.
pub const VARIABLE: &str = "RBPROF_CACHE";

/// The cache's folder: `$RBPROF_CACHE`, else `$XDG_CACHE_HOME/rbprof`, else
/// `~/.cache/rbprof`. It need not exist yet.
///
/// # Errors
/// If none of the three variables is set, or the current folder, which makes a
/// relative one absolute, cannot be known.
pub fn dir() -> Result<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let dir = variable(VARIABLE)
        .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("rbprof")))
        .or_else(|| variable("HOME").map(|dir| dir.join(".cache/rbprof")))
        .with_context(|| format!("no place for the cache: set {VARIABLE}"))?;
    std::path::absolute(&dir).with_context(|| format!("the cache's folder {}", dir.display()))
}

/// The entry's folder if it is there, or what `make` makes of it.
///
/// `make` is given a new empty folder beside the entry, which becomes the entry
/// when it succeeds. What it leaves on failure stays until the next attempt, so
/// that logs can be read.
///
/// # Errors
/// Those of `make`, and of the file system.
pub fn entry(entry: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if entry.exists() {
        return Ok(());
    }
    let parent = entry
        .parent()
        .context("a cache entry has a folder around it")?;
    let name = entry
        .file_name()
        .context("a cache entry has a name")?
        .to_string_lossy();
    create_dir(parent)?;
    let _lock = lock(&parent.join(format!(".{name}.lock")))?;
    if entry.exists() {
        return Ok(()); // Somebody else made it while we waited.
    }
    let unfinished = unfinished(entry)?;
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished)
            .with_context(|| format!("removing {}", unfinished.display()))?;
    }
    create_dir(&unfinished)?;
    make(&unfinished)?;
    std::fs::rename(&unfinished, entry)
        .with_context(|| format!("renaming {} to {}", unfinished.display(), entry.display()))
}

/// Makes an entry absent that turned out not to be what it should be. Its
/// content stays for looking at, until the entry is made again.
///
/// # Errors
/// Those of the file system.
pub fn discard(entry: &Path) -> Result<()> {
    let unfinished = unfinished(entry)?;
    std::fs::rename(entry, &unfinished)
        .with_context(|| format!("renaming {} to {}", entry.display(), unfinished.display()))
}

/// Where an entry is while it is not complete.
fn unfinished(entry: &Path) -> Result<PathBuf> {
    let name = entry.file_name().context("a cache entry has a name")?;
    Ok(entry.with_file_name(format!(".{}.unfinished", name.to_string_lossy())))
}

/// Creates a folder and those around it.
///
/// # Errors
/// Those of the file system, with the folder's name.
pub fn create_dir(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))
}

/// An exclusive lock, held until it is dropped or the process ends.
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            println!("  waiting for another run, which holds {}", path.display());
            file.lock()
                .with_context(|| format!("locking {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("locking {}", path.display()));
        }
    }
    Ok(file)
}

/// SHA-256 as 64 hexadecimal digits.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    struct TempDir(PathBuf);

    impl TempDir {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("rbprof-{name}-{}", std::process::id()));
            create_dir(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_entry_is_made_once() {
        let dir = TempDir::new("once");
        let path = dir.0.join("thing");
        entry(&path, |place| {
            Ok(std::fs::write(place.join("file"), "first")?)
        })
        .unwrap();
        entry(&path, |_| bail!("made twice")).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("file")).unwrap(), "first");
    }

    #[test]
    fn a_failed_entry_is_absent_and_can_be_made_again() {
        let dir = TempDir::new("failed");
        let path = dir.0.join("thing");
        let attempt = entry(&path, |place| {
            std::fs::write(place.join("rest"), "")?;
            bail!("no")
        });
        assert_eq!(attempt.unwrap_err().to_string(), "no");
        assert!(!path.exists());
        entry(&path, |place| Ok(std::fs::write(place.join("file"), "")?)).unwrap();
        assert!(path.join("file").exists());
        assert!(
            !path.join("rest").exists(),
            "what the failed attempt left is gone"
        );
    }

    #[test]
    fn a_discarded_entry_is_made_again() {
        let dir = TempDir::new("discarded");
        let path = dir.0.join("thing-1.2.3");
        entry(&path, |_| Ok(())).unwrap();
        discard(&path).unwrap();
        assert!(!path.exists());
        entry(&path, |_| Ok(())).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn concurrent_runs_make_an_entry_once() {
        let dir = TempDir::new("concurrent");
        let path = dir.0.join("thing");
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    entry(&path, |_| {
                        made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        Ok(())
                    })
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn sha256_is_sha256() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
