//! `cargo xtask setup`: installs what building and testing need and the machine
//! lacks, and says what it does.

pub mod bpf_linker;
pub mod packages;
pub mod rust_src;
pub mod targets;

use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use anyhow::Result;
use anyhow::bail;

/// Whether this process may install packages and mount file systems.
#[must_use]
pub fn is_root() -> bool {
    // The owner of a process's own folder is its effective user.
    std::fs::metadata("/proc/self").is_ok_and(|data| data.uid() == 0)
}

/// Installs what is missing.
///
/// Only the packages need root. If one is missing and this is not root, nothing
/// is installed: what to install is printed instead.
///
/// # Errors
/// If something is missing and cannot be installed; the error says how to
/// install it by hand.
pub fn run() -> Result<()> {
    let missing = packages::missing()?;
    if !missing.is_empty() && !is_root() {
        println!("missing, to be installed by root:");
        println!(
            "  {}",
            packages::install_line(&packages::separate(&missing)?)
        );
        if !rust_src::is_there()? {
            println!("missing, to be installed by you:");
            println!("  {}", rust_src::install_line()?);
        }
        let targets = targets::missing()?;
        if !targets.is_empty() {
            println!("missing, to be installed by you:");
            println!("  {}", targets::install_line(&targets)?);
        }
        if bpf_linker::found().is_none() {
            println!("missing, to be installed by you, after the packages:");
            println!("  {}", bpf_linker::INSTALL_LINE);
        }
        bail!(
            "{} packages are missing and this is not root; run the lines above",
            missing.len()
        );
    }
    step("Debian packages", || packages::install(&missing))?;
    step("rust-src", rust_src::provide)?;
    step("targets", targets::provide)?;
    step("bpf-linker", bpf_linker::provide)
}

/// Runs one step and prints what came of it and how long it took.
fn step(name: &str, work: impl FnOnce() -> Result<String>) -> Result<()> {
    let start = Instant::now();
    let outcome = work()?;
    println!(
        "  {name}: {outcome} ({:.1} s)",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
