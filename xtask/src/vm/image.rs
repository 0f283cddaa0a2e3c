//! What a machine finds in its file system: a shell, rbprof, the checks, the
//! workloads, and the Rubies with their root file systems.

use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;

use super::archive::Archive;
use super::machines::Architecture;
use super::programs;
use super::programs::Programs;
use crate::cache;
use crate::cmd;
use crate::rubies::debian::Kind;
use crate::rubies::debian::PrivateApt;
use crate::rubies::guests::Guest;
use crate::rubies::guests::guests;
use crate::workspace;

/// What runs first.
const INIT: &str = include_str!("init.sh");
/// The suite that the shell is from.
const SUITE: &str = "trixie";
/// Where the checks look for Rubies.
const RUBIES: &str = "rubies";
/// Where a Ruby finds the extension.
const EXTENSION: &str = "opt/rbprof-test/burn";

/// What a Ruby does without: in an emulated machine each megabyte takes time, and
/// memory twice.
const LEFT_OUT: &[&str] = &[
    "boot",
    "dev",
    "etc",
    "opt/rbprof-test",
    "usr/include",
    "usr/lib/apt",
    "usr/lib/dpkg",
    "usr/lib/git-core",
    "usr/lib/systemd",
    "usr/lib/ruby/gems",
    "usr/sbin",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/doc",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/perl",
    "usr/share/perl5",
    "usr/share/zoneinfo",
    "var",
];
/// The same below the folder of libraries, which is called after the processor.
const LIBRARIES_LEFT_OUT: &[&str] = &["gconv", "perl", "perl5", "perl-base", "security"];

/// What goes into a machine.
pub(super) struct Content<'a> {
    pub(super) architecture: Architecture,
    pub(super) programs: &'a Programs,
    /// A program with its arguments.
    pub(super) command: &'a [String],
    /// What stands before the exit status on the console.
    pub(super) mark: &'a str,
}

/// Writes the whole file system to the end of a file.
pub(super) fn write(content: &Content<'_>, file: File) -> Result<File> {
    let mut archive = Archive::new(file);
    for folder in ["proc", "sys", "dev", "tmp", "run", "root"] {
        archive.folder(folder)?;
    }
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("command", 0o755, script(content).as_bytes())?;
    archive.file("mark", 0o644, content.mark.as_bytes())?;
    archive.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    )?;
    archive.file("etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
    archive.copy("bin/busybox", &busybox(content.architecture)?)?;
    let programs = content.programs;
    archive.copy("bin/rbprof", &programs.rbprof)?;
    if let Some(checks) = &programs.checks {
        archive.copy("bin/rbprof-guest", checks)?;
    }
    if content.architecture == Architecture::Amd64 {
        // Those of the checks are those of the rbprof that is built with them.
        let linked = programs.checks.as_ref().unwrap_or(&programs.rbprof);
        for library in programs::libraries(linked)? {
            let place = library.to_string_lossy();
            archive.copy(place.trim_start_matches('/'), &library)?;
        }
    }
    let workloads = workspace::root().join("tests/workloads");
    archive.tree("workloads", &workloads, &|_| false)?;
    let mut file = archive.finish()?;
    for guest in guests(content.architecture)? {
        let mut ruby = File::open(ruby(&guest)?)?;
        std::io::copy(&mut ruby, &mut file)
            .with_context(|| format!("copying Ruby {} into a machine", guest.name))?;
    }
    Ok(file)
}

fn script(content: &Content<'_>) -> String {
    let mut words = content.command.iter();
    let mut command = Command::new(words.next().map_or("sh", String::as_str));
    command.args(words);
    format!("#!/bin/sh\nexec {}\n", cmd::describe(&command))
}

/// The archive of a Ruby, from the cache.
fn ruby(guest: &Guest) -> Result<PathBuf> {
    // Raise this when the code that follows it changes the result.
    const REVISION: u32 = 1;
    let text = format!("{REVISION} {guest:?} {LEFT_OUT:?} {LIBRARIES_LEFT_OUT:?}");
    let key: String = cache::sha256(text.as_bytes()).chars().take(12).collect();
    let entry = cache::dir()?
        .join("guests")
        .join(format!("{}-{key}", guest.name));
    cache::entry(&entry, |place| {
        let mut archive = Archive::new(File::create(place.join("root.cpio"))?);
        let root = format!("{RUBIES}/{}", guest.name);
        archive.tree(&root, &guest.root, &is_left_out)?;
        for folder in ["dev", "etc", "tmp", "proc", "workload"] {
            archive.folder(&format!("{root}/{folder}"))?;
        }
        archive.tree(&format!("{root}/{EXTENSION}"), &guest.extension, &|_| false)?;
        archive.finish().map(drop)
    })?;
    Ok(entry.join("root.cpio"))
}

fn is_left_out(path: &str) -> bool {
    let library = path
        .strip_prefix("usr/lib/")
        .and_then(|path| path.split_once('/'))
        .filter(|(folder, _)| folder.ends_with("-linux-gnu"))
        .map(|(_, path)| path);
    LEFT_OUT.contains(&path) || library.is_some_and(|path| LIBRARIES_LEFT_OUT.contains(&path))
}

/// The shell with its usual programs, from the cache or the mirror.
fn busybox(architecture: Architecture) -> Result<PathBuf> {
    let name = architecture.debian();
    let entry = cache::dir()?
        .join("packages")
        .join(format!("busybox-static-{SUITE}-{name}"));
    cache::entry(&entry, |place| {
        let lists = place.join("apt");
        let apt = PrivateApt::new(Kind::Binary, SUITE, Some(name), &lists)?;
        apt.unpack("busybox-static", place, &place.join("files"))?;
        std::fs::remove_dir_all(lists).context("removing apt's lists")
    })?;
    let file = |place: &str| Some(entry.join("files").join(place)).filter(|file| file.exists());
    file("usr/bin/busybox")
        .or_else(|| file("bin/busybox"))
        .with_context(|| format!("no busybox in {}", entry.display()))
}

/// Everything that [`write`] needs besides what was built, so that it is fetched
/// before many machines want it at the same time.
pub(super) fn provide(architecture: Architecture) -> Result<()> {
    busybox(architecture)?;
    for guest in guests(architecture)? {
        ruby(&guest)?;
    }
    Ok(())
}

/// A file that only its owner can see, at a place for such files.
pub(super) fn temporary() -> Result<(File, PathBuf)> {
    let place = std::env::temp_dir().join(format!(
        "rbprof-vm-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = File::create(&place).with_context(|| format!("creating {}", place.display()))?;
    Ok((file, place))
}

/// Removes such a file if it is still there.
pub(super) struct Removed<'a>(pub(super) &'a Path);

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        // Whoever used it may have removed it.
        drop(std::fs::remove_file(self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ruby_does_without_what_only_people_read() {
        assert!(is_left_out("usr/share/man"));
        assert!(is_left_out("usr/lib/aarch64-linux-gnu/gconv"));
        assert!(!is_left_out("usr/lib/aarch64-linux-gnu/ruby"));
        assert!(!is_left_out("usr/lib/ruby"));
        assert!(!is_left_out("usr/lib/gconv"));
    }
}
