//! The binaries: static, and without a trace of where and on what they were
//! built.
//!
//! Everything that ends up in them is Rust's own or from the lock file: musl, its
//! startup files and the linker come with the toolchain. The C and assembly parts of
//! `ring` are compiled by the machine's own compiler.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use memchr::memmem;
use object::Object as _;
use object::ObjectSection as _;

use super::debug;
use super::metadata::Metadata;
use super::source::Source;
use crate::cache;
use crate::cmd;
use crate::setup;
use crate::vm::Architecture;
use crate::workspace;

/// The package that is built, and its program.
pub(super) const PACKAGE: &str = "rbprof";
/// The profile in the workspace's `Cargo.toml`.
const PROFILE: &str = "dist";
/// Comes with the toolchain, so that the machine's own leaves no trace.
pub const LINKER: &str = "rust-lld";

/// What stands in the binaries for the folder of the tree.
const TREE: &str = "/rbprof";
/// The same for the folders with other crates, each in one of its own.
const CRATES: &str = "/crates";
/// The same for what build scripts write.
const TARGET: &str = "/target";
/// The same for the source of the standard library, as in its compiled form;
/// followed by a commit.
const RUST: &str = "/rustc";

/// Rust's name for Linux with musl on a processor.
#[must_use]
pub const fn target(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Amd64 => setup::targets::AMD64,
        Architecture::Arm64 => setup::targets::ARM64,
    }
}

/// Builds the program for each of the processors; where they are, in that order.
/// What is in them are names and lines for debuggers, too. Cargo builds in
/// `target_dir`.
///
/// # Errors
/// If the toolchain lacks something or the build fails.
pub(super) fn programs(
    source: &Source,
    target_dir: &Path,
    architectures: &[Architecture],
) -> Result<Vec<PathBuf>> {
    complete_toolchain()?;
    cache::create_dir(target_dir)?;
    let target_dir = &absolute(target_dir)?;
    let metadata = Metadata::read(source, architectures)?;
    let mut flags = vec![
        "-Ctarget-feature=+crt-static".to_owned(),
        debug::BUILD_ID.to_owned(),
    ];
    let renamed = renamed(source, target_dir, &metadata)?;
    for (from, to) in &renamed {
        flags.push(format!("--remap-path-prefix={from}={to}"));
    }
    let mut cargo = cargo(source);
    cargo.args(["build", "--locked", "--package", PACKAGE]);
    cargo.args(["--profile", PROFILE, "--target-dir"]);
    cargo.arg(target_dir);
    for &architecture in architectures {
        let target = target(architecture);
        cargo.args(["--target", target]);
        cargo.env(linker_variable(target), LINKER);
    }
    // Of two that fit, the later one counts for C compilers as well.
    let c_flags: Vec<String> = (renamed.iter())
        .map(|(from, to)| format!("-ffile-prefix-map={from}={to}"))
        .collect();
    cargo
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("CFLAGS", c_flags.join(" "))
        .env("SOURCE_DATE_EPOCH", source.time.to_string())
        // What a developer may have set for other builds.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_INCREMENTAL");
    cmd::run(&mut cargo)?;
    let mut programs = Vec::new();
    for &architecture in architectures {
        let folder = target_dir.join(target(architecture)).join(PROFILE);
        let program = folder.join(PACKAGE);
        let content =
            std::fs::read(&program).with_context(|| format!("reading {}", program.display()))?;
        fit_for_release(&content, renamed.iter().map(|(from, _)| from.as_str()))
            .with_context(|| program.display().to_string())?;
        programs.push(program);
    }
    Ok(programs)
}

/// Cargo, in a tree.
pub(super) fn cargo(source: &Source) -> Command {
    let mut cargo = workspace::cargo();
    cargo.current_dir(&source.root);
    cargo
}

/// Debian's compiler for the kernel half makes a working program of other bytes.
fn complete_toolchain() -> Result<()> {
    let missing = setup::targets::missing()?;
    if !missing.is_empty() {
        bail!(
            "no standard library for {}: {}",
            missing.join(", "),
            setup::targets::install_line(&missing)?
        );
    }
    if setup::rust_src::source()?.is_none() {
        bail!(
            "a release is compiled by one toolchain, and that lacks rust-src: {}",
            setup::rust_src::install_line()?
        );
    }
    let variable = setup::rust_src::EBPF_CARGO;
    if std::env::var_os(variable).is_some() {
        bail!("a release is compiled by one toolchain: unset {variable}");
    }
    Ok(())
}

fn linker_variable(target: &str) -> String {
    let name = target.to_uppercase().replace('-', "_");
    format!("CARGO_TARGET_{name}_LINKER")
}

/// Which folders have other names in what is built. Of two that fit, the later one
/// counts.
fn renamed(
    source: &Source,
    target_dir: &Path,
    metadata: &Metadata,
) -> Result<Vec<(String, String)>> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let rustc =
        |args: &[&str]| cmd::output(Command::new(&rustc).current_dir(&source.root).args(args));
    let sysroot = PathBuf::from(rustc(&["--print", "sysroot"])?.trim());
    let version = rustc(&["--version", "--verbose"])?;
    let commit = commit(&version).context("rustc does not say which commit it is of")?;
    let mut folders = vec![(absolute(&source.root)?, TREE.to_owned())];
    for folder in metadata.folders_of_crates() {
        folders.push((folder, CRATES.to_owned()));
    }
    let library = sysroot.join("lib/rustlib/src/rust");
    folders.push((library, format!("{RUST}/{commit}")));
    folders.push((target_dir.to_path_buf(), TARGET.to_owned()));
    folders
        .into_iter()
        .map(|(folder, name)| {
            let folder = folder.to_str().context("a folder's name is not UTF-8")?;
            Ok((folder.to_owned(), name))
        })
        .collect()
}

/// `version`: what `rustc --version --verbose` prints.
fn commit(version: &str) -> Option<&str> {
    version
        .lines()
        .find_map(|line| line.strip_prefix("commit-hash: "))
        .filter(|hash| hash.chars().all(|digit| digit.is_ascii_hexdigit()))
}

/// Without links: that is how cargo sees it.
fn absolute(folder: &Path) -> Result<PathBuf> {
    folder
        .canonicalize()
        .with_context(|| format!("looking for {}", folder.display()))
}

/// Checks that a program runs everywhere, and that its bytes are the same whatever
/// the `folders` are called.
///
/// # Errors
/// Why not.
pub fn fit_for_release<'a>(program: &[u8], folders: impl Iterator<Item = &'a str>) -> Result<()> {
    let file = object::File::parse(program).context("reading it as ELF")?;
    ensure!(
        file.section_by_name(".interp").is_none(),
        "it needs a dynamic linker"
    );
    for folder in folders {
        for section in file.sections() {
            ensure!(
                memmem::find(&section.uncompressed_data()?, folder.as_bytes()).is_none(),
                "{} has the name of a folder of this machine, {folder}",
                section.name().unwrap_or("a section"),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_of_a_compiler_is_a_hash() {
        let version = "rustc 1.95.0\nbinary: rustc\ncommit-hash: 59807616e1fa\nhost: x\n";
        assert_eq!(commit(version), Some("59807616e1fa"));
        assert_eq!(commit("commit-hash: unknown\n"), None);
        assert_eq!(commit("rustc 1.95.0\n"), None);
    }

    #[test]
    fn cargo_reads_the_linker_from_the_variable_of_the_target() {
        assert_eq!(
            linker_variable(target(Architecture::Amd64)),
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_LINKER"
        );
    }
}
