//! The pieces of a release, on a small program: a whole one takes minutes.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use xtask::cache;
use xtask::cmd;
use xtask::dist::archive;
use xtask::dist::archive::Entry;
use xtask::dist::archive::Mode;
use xtask::dist::build;
use xtask::dist::checksums;
use xtask::dist::debug;
use xtask::setup;
use xtask::vm::Architecture;

const PROGRAM: &str = "\
#[inline(never)]
fn answer(number: u32) -> u32 { number + 1 }
fn main() { println!(\"{}\", answer(41)); }
";
const TIME: u64 = 1_700_000_000;

/// Whether this machine can build for x86-64 with musl: continuous integration
/// must be able to.
fn can_build() -> Result<bool> {
    if !setup::targets::missing()?.contains(&setup::targets::AMD64) {
        return Ok(true);
    }
    ensure!(
        std::env::var_os("RBPROF_REQUIRE_ALL").is_none(),
        "no standard library for {}",
        setup::targets::AMD64
    );
    eprintln!("skipped: no standard library for {}", setup::targets::AMD64);
    Ok(false)
}

/// Compiles the program in a folder, which gets another name in it if asked for.
fn compile(folder: &Path, flags: &[&str]) -> Result<PathBuf> {
    std::fs::write(folder.join("answer.rs"), PROGRAM)?;
    cmd::output(
        Command::new("rustc")
            .current_dir(folder)
            .args(["--edition=2024", "-O", "-Cdebuginfo=line-tables-only"])
            .args(["--target", build::target(Architecture::Amd64)])
            .arg(format!("-Clinker={}", build::LINKER))
            .args(flags)
            .arg(folder.join("answer.rs")),
    )?;
    Ok(folder.join("answer"))
}

/// A program without names, and its debug file.
fn split(folder: &Path) -> Result<(PathBuf, PathBuf)> {
    let program = compile(folder, &[debug::BUILD_ID])?;
    let stripped = folder.join("stripped");
    let debug_file = folder.join("answer-1-linux-amd64.debug");
    debug::split(&program, Architecture::Amd64, &stripped, &debug_file)?;
    Ok((stripped, debug_file))
}

#[test]
fn a_program_runs_without_its_debug_file_and_is_known_with_it() -> Result<()> {
    if !can_build()? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let (stripped, debug_file) = split(folder.path())?;
    let size = |file: &Path| file.metadata().map(|data| data.len());
    ensure!(size(&stripped)? < size(&folder.path().join("answer"))?);
    if cfg!(target_arch = "x86_64") {
        ensure!(cmd::output(&mut Command::new(&stripped))? == "42\n");
    }
    if cmd::find("gdb").is_some() {
        // What it does not find is a failure of gdb's, so not one of ours.
        let said = |program: &Path| -> Result<String> {
            let mut gdb = Command::new("gdb");
            gdb.args(["--batch", "--nx", "-ex", "info line answer.rs:2"]);
            let output = gdb.arg(program).output()?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let with = said(&stripped)?;
        ensure!(with.contains("Line 2 of"), "{with}");
        std::fs::rename(&debug_file, folder.path().join("elsewhere"))?;
        let without = said(&stripped)?;
        ensure!(!without.contains("Line 2 of"), "{without}");
    }
    Ok(())
}

#[test]
fn a_debug_file_of_another_program_is_refused() -> Result<()> {
    if !can_build()? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let (stripped, debug_file) = split(folder.path())?;
    debug::belong_together(&stripped, &debug_file)?;
    let refusal = |stripped: &Path, debug_file: &Path| {
        let refused = debug::belong_together(stripped, debug_file);
        refused
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };

    let whole = folder.path().join("answer");
    let error = refusal(&whole, &debug_file);
    ensure!(error.contains("names no debug file"), "{error}");

    let renamed = folder.path().join("other.debug");
    std::fs::copy(&debug_file, &renamed)?;
    let error = refusal(&stripped, &renamed);
    ensure!(
        error.contains("names answer-1-linux-amd64.debug"),
        "{error}"
    );

    let mut content = std::fs::read(&debug_file)?;
    content.push(0);
    std::fs::write(&debug_file, content)?;
    let error = refusal(&stripped, &debug_file);
    ensure!(error.contains("checksum"), "{error}");

    let elsewhere = tempfile::tempdir()?;
    let other = compile(elsewhere.path(), &[debug::BUILD_ID, "-Copt-level=0"])?;
    let error = refusal(&stripped, &other);
    ensure!(error.contains("another build id"), "{error}");

    let nameless = compile(elsewhere.path(), &["-Clink-arg=--build-id=none"])?;
    let error = refusal(&nameless, &debug_file);
    ensure!(error.contains("no build id"), "{error}");
    Ok(())
}

#[test]
fn a_program_that_tells_its_folder_or_needs_a_linker_is_not_fit() -> Result<()> {
    if !can_build()? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let name = folder.path().to_str().context("not UTF-8")?;
    let fit = |program: &Path| build::fit_for_release(&std::fs::read(program)?, [name].into_iter());

    let error = fit(&compile(folder.path(), &[])?).unwrap_err().to_string();
    ensure!(error.contains("the name of a folder"), "{error}");
    let remap = format!("--remap-path-prefix={name}=/tree");
    fit(&compile(folder.path(), &[&remap])?)?;

    let own = std::env::current_exe()?;
    let error = fit(&own).unwrap_err().to_string();
    ensure!(error.contains("dynamic linker"), "{error}");
    Ok(())
}

#[test]
fn the_same_program_of_two_folders_is_the_same_archive() -> Result<()> {
    if !can_build()? {
        return Ok(());
    }
    let pack = || -> Result<(Vec<u8>, Vec<u8>)> {
        let folder = tempfile::tempdir()?;
        let name = folder.path().to_str().context("not UTF-8")?;
        let remap = format!("--remap-path-prefix={name}=/tree");
        let program = compile(folder.path(), &[debug::BUILD_ID, &remap])?;
        let stripped = folder.path().join("stripped");
        let debug_file = folder.path().join("answer.debug");
        debug::split(&program, Architecture::Amd64, &stripped, &debug_file)?;
        let entries = vec![Entry::read("answer", Mode::Program, &stripped)?];
        let packed = archive::tar_gz("answer-1", entries, TIME)?;
        Ok((packed, std::fs::read(debug_file)?))
    };
    let (one, other) = (pack()?, pack()?);
    ensure!(one.0 == other.0, "the archives differ");
    ensure!(one.1 == other.1, "the debug files differ");
    Ok(())
}

#[test]
fn foreign_programs_read_archive_and_checksums() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let entries = vec![Entry {
        name: "docs/a.md".to_owned(),
        mode: Mode::Text,
        content: b"text\n".to_vec(),
    }];
    let packed = archive::tar_gz("rbprof-1", entries, TIME)?;
    std::fs::write(folder.path().join("rbprof-1.tar.gz"), &packed)?;
    let mut tar = Command::new("tar");
    tar.args(["--list", "--verbose", "--gzip", "--utc", "--full-time"]);
    tar.args(["--numeric-owner", "--file"]);
    let listed = cmd::output(tar.arg(folder.path().join("rbprof-1.tar.gz")))?;
    let lines: Vec<Vec<&str>> = listed
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let line = |mode, size, name| vec![mode, "0/0", size, "2023-11-14", "22:13:20", name];
    let expected = [
        line("drwxr-xr-x", "0", "rbprof-1/"),
        line("drwxr-xr-x", "0", "rbprof-1/docs/"),
        line("-rw-r--r--", "5", "rbprof-1/docs/a.md"),
    ];
    ensure!(lines == expected, "{listed}");

    let sum = cache::sha256(&packed);
    let sums = checksums::text([("rbprof-1.tar.gz", sum.as_str())]);
    std::fs::write(folder.path().join("SHA256SUMS"), sums)?;
    let mut check = Command::new("sha256sum");
    check.current_dir(folder.path());
    cmd::output(check.args(["--check", "--strict", "SHA256SUMS"]))?;
    Ok(())
}
