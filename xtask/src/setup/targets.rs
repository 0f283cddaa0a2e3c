//! The standard library for the other machine that rbprof runs on.

use std::path::Path;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use crate::cmd;
use crate::workspace;

/// What rbprof is compiled for, to run on an arm64 machine whatever its C
/// library.
pub const ARM64: &str = "aarch64-unknown-linux-musl";
/// The same for this machine.
pub const AMD64: &str = "x86_64-unknown-linux-musl";

/// All that must be there.
const NEEDED: [&str; 2] = [ARM64, AMD64];

/// The targets whose standard library is not there.
///
/// # Errors
/// If the pinned toolchain's `rustc` cannot be run.
pub fn missing() -> Result<Vec<&'static str>> {
    let mut missing = Vec::new();
    for target in NEEDED {
        if !is_there(target)? {
            missing.push(target);
        }
    }
    Ok(missing)
}

/// What a person types to add them.
///
/// # Errors
/// If the pinned toolchain's name cannot be read.
pub fn install_line(targets: &[&str]) -> Result<String> {
    Ok(cmd::describe(&add(targets)?))
}

/// Adds those that are missing. Says what it did.
///
/// # Errors
/// If rustup cannot give them.
pub fn provide() -> Result<String> {
    let targets = missing()?;
    if targets.is_empty() {
        return Ok("already there".to_owned());
    }
    let mut add = add(&targets)?;
    println!("  {}", cmd::describe(&add));
    cmd::output(&mut add).with_context(|| {
        format!(
            "no standard library for {}: where rustup cannot fetch it, unpack the \
             toolchain's rust-std of that target into its sysroot",
            targets.join(", ")
        )
    })?;
    match missing()?.as_slice() {
        [] => Ok(format!("added {}", targets.join(", "))),
        still => bail!(
            "{} succeeded, but {} is not there",
            cmd::describe(&add),
            still.join(", ")
        ),
    }
}

fn add(targets: &[&str]) -> Result<Command> {
    let mut add = Command::new("rustup");
    add.args(["target", "add", "--toolchain", &workspace::toolchain()?]);
    add.args(targets);
    Ok(add)
}

fn is_there(target: &str) -> Result<bool> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let folder = cmd::output(Command::new(rustc).current_dir(workspace::root()).args([
        "--print",
        "target-libdir",
        "--target",
        target,
    ]))?;
    let files = std::fs::read_dir(Path::new(folder.trim()));
    Ok(files.is_ok_and(|files| {
        files
            .flatten()
            .any(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_added_to_the_pinned_toolchain() {
        let toolchain = workspace::toolchain().unwrap();
        assert_eq!(
            install_line(&[ARM64]).unwrap(),
            format!("rustup target add --toolchain {toolchain} {ARM64}")
        );
    }
}
