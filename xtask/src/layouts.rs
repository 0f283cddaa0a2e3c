//! `cargo xtask layouts`: compares the table of layouts with generated bindings
//! of every Ruby release.
//!
//! The bindings are outside the workspace, since they take a minute to compile;
//! see `tests/layouts`.

use anyhow::Result;

use crate::cmd;
use crate::workspace;

/// Compiles the comparison: it is one of constants, so that there is nothing to
/// run.
///
/// # Errors
/// If the table disagrees with the bindings.
pub fn check() -> Result<()> {
    let manifest = workspace::root().join("tests/layouts/Cargo.toml");
    let mut format = workspace::cargo();
    format
        .args(["fmt", "--check", "--manifest-path"])
        .arg(&manifest);
    cmd::run(&mut format)?;
    let mut check = workspace::cargo();
    check
        .args(["check", "--locked", "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(workspace::target_dir()?.join("layouts"));
    cmd::run(&mut check)
}
