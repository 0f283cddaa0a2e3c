//! bpf-linker, which links the eBPF crate's LLVM bitcode into a BPF object.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;

use crate::cmd;
use crate::workspace;

const VERSION: &str = "0.13.0";
/// Its LLVM must be at least as new as rustc's: Rust 1.95 has LLVM 22.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
const LLVM_FEATURE: &str = "llvm-22";

/// What a person types to install it.
pub const INSTALL_LINE: &str = "LLVM_PREFIX=/usr/lib/llvm-22 cargo install bpf-linker --version 0.13.0 --locked \
                                --no-default-features --features llvm-22";

/// The one that the build uses, the first on `PATH` or else where `cargo
/// install` puts it, if that is the right version.
#[must_use]
pub fn found() -> Option<PathBuf> {
    let file = cmd::find("bpf-linker").or_else(installed)?;
    let text = cmd::output(Command::new(&file).arg("--version")).ok()?;
    is_version(&text, VERSION).then_some(file)
}

/// `text` is a program's name and its version, which a commit may follow.
fn is_version(text: &str, version: &str) -> bool {
    text.split_whitespace().nth(1) == Some(version)
}

/// Where `cargo install` puts it, whether it is there or not.
fn installed() -> Option<PathBuf> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo"));
    std::env::var_os("CARGO_INSTALL_ROOT")
        .map(PathBuf::from)
        .or(cargo_home)
        .or_else(home)
        .map(|root| root.join("bin/bpf-linker"))
}

/// Builds and installs it where it is missing, and says what it did.
///
/// # Errors
/// If cargo fails, or what it installed is not what is found.
pub fn provide() -> Result<String> {
    if let Some(file) = found() {
        return Ok(format!("{VERSION} already there ({})", file.display()));
    }
    println!("  {INSTALL_LINE}");
    let mut install = workspace::cargo();
    install
        .env("LLVM_PREFIX", LLVM_PREFIX)
        .args([
            "install",
            "bpf-linker",
            "--version",
            VERSION,
            "--locked",
            "--quiet",
        ])
        .args(["--no-default-features", "--features", LLVM_FEATURE]);
    cmd::output(&mut install)?;
    let file = found().with_context(|| {
        format!("bpf-linker {VERSION} was installed, but another version comes first on PATH, or none is found")
    })?;
    Ok(format!("{VERSION} installed ({})", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_type_is_what_is_run() {
        for part in [VERSION, LLVM_PREFIX, LLVM_FEATURE] {
            assert!(INSTALL_LINE.contains(part), "{part}");
        }
    }

    #[test]
    fn the_version_is_compared_as_a_whole() {
        assert!(is_version("bpf-linker 0.13.0\n", "0.13.0"));
        assert!(is_version("bpf-linker 0.13.0 (abc)\n", "0.13.0"));
        assert!(!is_version("bpf-linker 0.13.01\n", "0.13.0"));
        assert!(!is_version("", "0.13.0"));
    }
}
