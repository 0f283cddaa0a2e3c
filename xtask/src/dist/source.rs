//! Which tree is built.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;

use crate::cache;
use crate::cmd;

/// What says when the source is from, where Git does not know.
const EPOCH: &str = "SOURCE_DATE_EPOCH";

/// A tree of rbprof's source.
#[derive(Debug)]
pub(super) struct Source {
    /// The folder of the workspace's `Cargo.toml`.
    pub(super) root: PathBuf,
    /// Such as `0.1.0`.
    pub(super) version: String,
    /// When it was committed: seconds since 1970.
    pub(super) time: u64,
    /// The last commit; none without Git.
    pub(super) commit: Option<String>,
    /// Whether it has changes that are not committed.
    pub(super) is_changed: bool,
}

impl Source {
    /// The tree in a folder. Its time is that of the last commit, or where the
    /// environment says `SOURCE_DATE_EPOCH`, that.
    ///
    /// # Errors
    /// If there is neither that variable nor Git with its data.
    pub(super) fn at(root: &Path) -> Result<Self> {
        // A tree that was unpacked may lie in one of something else.
        let has_git = root.join(".git").exists();
        let last = if has_git {
            git(root, &["log", "-1", "--format=%H %ct"])?
        } else {
            String::new()
        };
        let last = last.trim().split_once(' ');
        let epoch = std::env::var(EPOCH).ok();
        let time = epoch.as_deref().or(last.map(|(_, time)| time));
        let time = time.with_context(|| {
            format!("without Git, nothing says when the source is from: set {EPOCH}")
        })?;
        let is_changed = has_git && !git(root, &["status", "--porcelain"])?.trim().is_empty();
        Ok(Self {
            root: root.to_path_buf(),
            // The workspace has one version.
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time: seconds(time)?,
            commit: last.map(|(commit, _)| commit.to_owned()),
            is_changed,
        })
    }

    /// Writes that commit to a new folder.
    ///
    /// # Errors
    /// If there is no commit, Git cannot, or the folder cannot be written.
    pub(super) fn copy_of_commit(&self, place: &Path) -> Result<Self> {
        let commit = self.commit.as_deref().context("there is no commit")?;
        cache::create_dir(place)?;
        let archive = place.with_extension("tar");
        cmd::run(
            Command::new("git")
                .current_dir(&self.root)
                .args(["archive", "--format=tar", "--output"])
                .arg(&archive)
                .arg(commit),
        )?;
        let mut tree = std::fs::File::open(&archive)
            .map(tar::Archive::new)
            .with_context(|| format!("opening {}", archive.display()))?;
        tree.unpack(place)
            .with_context(|| format!("unpacking {}", archive.display()))?;
        std::fs::remove_file(&archive)
            .with_context(|| format!("removing {}", archive.display()))?;
        Ok(Self {
            root: place.to_path_buf(),
            version: self.version.clone(),
            time: self.time,
            commit: Some(commit.to_owned()),
            is_changed: false,
        })
    }
}

fn git(root: &Path, args: &[&str]) -> Result<String> {
    cmd::output(Command::new("git").current_dir(root).args(args))
}

fn seconds(text: &str) -> Result<u64> {
    let number = text.trim().parse();
    number.with_context(|| format!("{text:?} is not a number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn times_are_seconds() {
        assert_eq!(seconds("1700000000\n").unwrap(), 1_700_000_000);
        assert!(seconds("2026-11-30").is_err());
        assert!(seconds("-1").is_err());
    }

    #[test]
    fn a_copy_is_the_commit_with_its_time() {
        let root = workspace::root();
        let source = Source::at(root).unwrap();
        if source.commit.is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let copy = source.copy_of_commit(&folder.path().join("tree")).unwrap();
        assert!(copy.root.join("xtask/Cargo.toml").exists());
        assert_eq!((copy.time, copy.version), (source.time, source.version));
        assert!(!copy.is_changed);
    }
}
