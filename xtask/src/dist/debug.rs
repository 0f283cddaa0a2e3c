//! Separate debug files: what only debuggers read, apart from the program.
//!
//! The program says which file it is, by name and checksum (`.gnu_debuglink`), and
//! both have the same build id. Debuggers find it beside the program or in
//! `/usr/lib/debug`.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use object::Object as _;
use object::ObjectSection as _;

use crate::cmd;
use crate::vm::Architecture;

/// What has the linker compute a build id: one of its output's content.
pub const BUILD_ID: &str = "-Clink-arg=--build-id=sha1";

/// Writes `program` without names and lines to `stripped`, and those to `debug`.
///
/// # Errors
/// If the processor's `objcopy` is not there or fails, or if the two files turn
/// out not to belong together.
pub fn split(
    program: &Path,
    architecture: Architecture,
    stripped: &Path,
    debug: &Path,
) -> Result<()> {
    let objcopy = objcopy(architecture);
    cmd::output(
        Command::new(objcopy)
            .arg("--only-keep-debug")
            .args([program, debug]),
    )?;
    // It is as executable as the program was.
    std::fs::set_permissions(debug, Permissions::from_mode(0o644))
        .with_context(|| format!("changing the mode of {}", debug.display()))?;
    cmd::output(
        Command::new(objcopy)
            .arg("--strip-all")
            .arg(format!("--add-gnu-debuglink={}", debug.display()))
            .args([program, stripped]),
    )?;
    belong_together(stripped, debug)
}

/// Debian has both under such a name, that of the machine itself among them.
/// Elsewhere, one may know all processors.
fn objcopy(architecture: Architecture) -> &'static str {
    let name = match architecture {
        Architecture::Amd64 => "x86_64-linux-gnu-objcopy",
        Architecture::Arm64 => "aarch64-linux-gnu-objcopy",
    };
    cmd::find(name).map_or("objcopy", |_| name)
}

/// Checks that a debugger will take `debug` for the debug file of `stripped`, and
/// that each has what it should have.
///
/// # Errors
/// Why not.
pub fn belong_together(stripped: &Path, debug: &Path) -> Result<()> {
    let of_program = read(stripped)?;
    let of_debug = read(debug)?;
    let program = parse(&of_program, stripped)?;
    let file = parse(&of_debug, debug)?;
    let id = program.build_id()?;
    ensure!(id.is_some(), "{} has no build id", stripped.display());
    ensure!(
        id == file.build_id()?,
        "{} has another build id than {}",
        debug.display(),
        stripped.display()
    );
    let (name, checksum) = program
        .gnu_debuglink()?
        .with_context(|| format!("{} names no debug file", stripped.display()))?;
    ensure!(
        debug.file_name() == Some(OsStr::from_bytes(name)),
        "{} names {}",
        stripped.display(),
        String::from_utf8_lossy(name)
    );
    ensure!(
        checksum == crc32fast::hash(&of_debug),
        "{} is not what {} has the checksum of",
        debug.display(),
        stripped.display()
    );
    ensure!(
        !program.has_debug_symbols() && program.symbols().next().is_none(),
        "{} is not stripped",
        stripped.display()
    );
    let has_lines = file
        .section_by_name(".debug_line")
        .is_some_and(|section| section.size() > 0);
    ensure!(
        has_lines && file.symbols().next().is_some(),
        "{} has no line numbers or no names",
        debug.display()
    );
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("reading {}", file.display()))
}

fn parse<'data>(content: &'data [u8], from: &Path) -> Result<object::File<'data>> {
    object::File::parse(content).with_context(|| format!("reading {} as ELF", from.display()))
}
