//! A `core` for the BPF target: Rust's own source (`rust-src`), which the eBPF
//! build compiles, or else Debian's compiled one.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use super::is_root;
use super::packages;
use crate::cmd;
use crate::workspace;

/// The environment variable that names the cargo with which `profiler`'s build
/// script builds the eBPF crate. Unset: the pinned toolchain's, with its
/// `rust-src`. Set: that cargo and the `rustc` beside it, which must have a
/// compiled `core` for `bpfel-unknown-none`.
pub const EBPF_CARGO: &str = "RBPROF_EBPF_CARGO";

/// Debian's packages of a Rust with a compiled `core` for BPF.
const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf"];
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_CORE: &str = "/usr/lib/rustlib/bpfel-unknown-none/lib";

/// Whether the eBPF crate can be built, by either way.
///
/// # Errors
/// If the pinned toolchain's `rustc` cannot be run.
pub fn is_there() -> Result<bool> {
    Ok(source()?.is_some() || debian_cargo().is_some())
}

/// What a person types to add the component.
///
/// # Errors
/// If the pinned toolchain's name cannot be read.
pub fn install_line() -> Result<String> {
    Ok(cmd::describe(&rustup_add(&workspace::toolchain()?)))
}

/// Adds `rust-src` to the pinned toolchain; where rustup cannot, installs
/// Debian's set. Says what it did.
///
/// # Errors
/// If neither way works.
pub fn provide() -> Result<String> {
    if source()?.is_some() {
        return Ok("already there".to_owned());
    }
    if let Some(cargo) = debian_cargo() {
        return Ok(format!(
            "not there; Debian's compiled core for BPF is: {}",
            explain(&cargo)
        ));
    }
    let toolchain = workspace::toolchain()?;
    let mut add = rustup_add(&toolchain);
    println!("  {}", cmd::describe(&add));
    let refusal = match cmd::output(&mut add) {
        Ok(_) if source()?.is_some() => return Ok(format!("added to {toolchain}")),
        Ok(_) => anyhow::anyhow!(
            "{} succeeded, but the source is not there",
            cmd::describe(&add)
        ),
        Err(error) => error,
    };
    println!("  rustup cannot give rust-src: {refusal:#}");
    provide_debian().with_context(|| {
        format!(
            "no rust-src ({}), and no Debian packages instead",
            cmd::describe(&add)
        )
    })
}

fn rustup_add(toolchain: &str) -> Command {
    let mut add = Command::new("rustup");
    add.args(["component", "add", "rust-src", "--toolchain", toolchain]);
    add
}

/// The standard library's source in the toolchain in use, if it is there.
///
/// # Errors
/// If the toolchain's `rustc` cannot be run.
pub fn source() -> Result<Option<PathBuf>> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let sysroot = cmd::output(
        Command::new(rustc)
            .current_dir(workspace::root())
            .args(["--print", "sysroot"]),
    )?;
    let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    // build-std wants the lock file too.
    Ok(
        (source.join("core/src/lib.rs").exists() && source.join("Cargo.lock").exists())
            .then_some(source),
    )
}

/// What nested builds need in their environment, if anything: the value for
/// [`EBPF_CARGO`] where only Debian's set is there and nobody set another.
///
/// # Errors
/// As [`is_there`].
pub fn environment() -> Result<Option<PathBuf>> {
    if std::env::var_os(EBPF_CARGO).is_some() || source()?.is_some() {
        return Ok(None);
    }
    Ok(debian_cargo())
}

fn debian_cargo() -> Option<PathBuf> {
    let core = std::fs::read_dir(DEBIAN_CORE).ok()?.flatten().any(|file| {
        let name = file.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libcore-") && name.ends_with(".rlib")
    });
    (core && Path::new(DEBIAN_CARGO).exists()).then(|| PathBuf::from(DEBIAN_CARGO))
}

fn provide_debian() -> Result<String> {
    if !is_root() {
        bail!(
            "this is not root; as root: {}",
            packages::install_line(&DEBIAN_PACKAGES)
        );
    }
    packages::install(&DEBIAN_PACKAGES)?;
    let cargo = debian_cargo()
        .with_context(|| format!("the packages are installed, but {DEBIAN_CORE} has no libcore"))?;
    Ok(format!(
        "Debian's compiled core for BPF installed instead: {}",
        explain(&cargo)
    ))
}

fn explain(cargo: &Path) -> String {
    format!(
        "`cargo xtask` sets {EBPF_CARGO}={0}; for builds of your own, export it",
        cargo.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_component_is_added_to_the_pinned_toolchain() {
        let toolchain = workspace::toolchain().unwrap();
        assert_eq!(
            install_line().unwrap(),
            format!("rustup component add rust-src --toolchain {toolchain}")
        );
    }
}
