//! The debug files of a release are found by rbprof itself, by build id and by
//! checksum.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::targets::debug_file::DebugFile;
use rbprof::targets::elf::Elf;
use xtask::cmd;
use xtask::dist::build;
use xtask::dist::debug;
use xtask::setup;
use xtask::vm::Architecture;

const PROGRAM: &str = "\
#[unsafe(no_mangle)]
#[inline(never)]
pub extern \"C\" fn rbprof_answer() -> u32 { 42 }
fn main() {
    let call: extern \"C\" fn() -> u32 = std::hint::black_box(rbprof_answer);
    println!(\"{}\", call());
}
";
const SYMBOL: &[u8] = b"rbprof_answer";

/// Compiles the program in a folder and splits it, as a release is.
fn split(folder: &Path) -> Result<PathBuf> {
    let source = folder.join("answer.rs");
    std::fs::write(&source, PROGRAM)?;
    cmd::output(
        Command::new("rustc")
            .current_dir(folder)
            .args(["--edition=2024", "-O", "-Cdebuginfo=line-tables-only"])
            .args(["--target", build::target(Architecture::Amd64)])
            .arg(format!("-Clinker={}", build::LINKER))
            .arg(debug::BUILD_ID)
            .arg(&source),
    )?;
    let stripped = folder.join("stripped");
    debug::split(
        &folder.join("answer"),
        Architecture::Amd64,
        &stripped,
        &folder.join("answer.debug"),
    )?;
    Ok(stripped)
}

/// Whether rbprof finds a debug file with the program's names.
fn has_names(program: &Path) -> Result<bool> {
    let content = std::fs::read(program)?;
    let elf = Elf::parse(content.as_slice())?;
    ensure!(elf.is_stripped()?);
    let Some(found) = DebugFile::find_on_host(&elf, program) else {
        return Ok(false);
    };
    let [symbol] = found
        .elf()
        .context("a debug file that cannot be read")?
        .static_symbols([SYMBOL])?;
    Ok(symbol.is_some())
}

/// The program without its build id, so that only the checksum is left.
fn without_build_id(program: &Path) -> Result<PathBuf> {
    let mut content = std::fs::read(program)?;
    let id = Elf::parse(content.as_slice())?
        .build_id()
        .context("no build id")?
        .to_vec();
    let place = content
        .windows(id.len())
        .position(|window| window == id)
        .context("no build id in the file")?;
    // The type of a note stands before its name, `GNU` and a zero.
    let kind = place.checked_sub(8).context("no note before it")?;
    *content.get_mut(kind).context("no type")? = 0xff;
    let other = program.with_file_name("without");
    std::fs::write(&other, content)?;
    Ok(other)
}

#[test]
fn rbprof_finds_the_debug_file_of_a_release() -> Result<()> {
    if setup::targets::missing()?.contains(&setup::targets::AMD64) {
        ensure!(std::env::var_os("RBPROF_REQUIRE_ALL").is_none());
        eprintln!("skipped: no standard library for {}", setup::targets::AMD64);
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let stripped = split(folder.path())?;
    ensure!(has_names(&stripped)?, "not found by build id");
    let nameless = without_build_id(&stripped)?;
    ensure!(has_names(&nameless)?, "not found by checksum");

    // One that was changed belongs by its build id, and not by its checksum.
    let debug_file = folder.path().join("answer.debug");
    let mut content = std::fs::read(&debug_file)?;
    content.push(0);
    std::fs::write(&debug_file, content)?;
    ensure!(has_names(&stripped)?);
    ensure!(!has_names(&nameless)?, "the checksum was not looked at");
    Ok(())
}
