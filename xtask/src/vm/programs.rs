//! The programs that run in a machine, built for it.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::machines::Architecture;
use crate::cmd;
use crate::setup;
use crate::workspace;

/// The package that has them.
const PACKAGE: &str = "rbprof-tests";
/// The command, as the tests build it, and what checks it.
const RBPROF: &str = "rbprof-under-test";
const CHECKS: &str = "rbprof-guest";

/// The files of both.
#[derive(Debug)]
pub(super) struct Programs {
    pub(super) rbprof: PathBuf,
    /// None where only another command runs.
    pub(super) checks: Option<PathBuf>,
}

/// Somebody's own `rbprof`, with checks if they are to run.
pub(super) fn with(
    rbprof: &Path,
    architecture: Architecture,
    with_checks: bool,
) -> Result<Programs> {
    let built = with_checks.then(|| build(architecture)).transpose()?;
    Ok(Programs {
        rbprof: rbprof.to_path_buf(),
        checks: built.and_then(|built| built.checks),
    })
}

/// Builds them. For this machine that is what its own tests use, with this
/// machine's C library.
pub(super) fn build(architecture: Architecture) -> Result<Programs> {
    let target = match architecture {
        Architecture::Amd64 => None,
        Architecture::Arm64 => Some(setup::targets::ARM64),
    };
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--quiet", "--package", PACKAGE]);
    cargo.args(["--bin", RBPROF, "--bin", CHECKS]);
    if let Some(target) = target {
        cargo.args(["--target", target]);
    }
    if let Some(ebpf_cargo) = setup::rust_src::environment()? {
        cargo.env(setup::rust_src::EBPF_CARGO, ebpf_cargo);
    }
    cmd::run(&mut cargo)?;
    let mut folder = workspace::target_dir()?;
    folder.extend(target);
    folder.push("debug");
    Ok(Programs {
        rbprof: folder.join(RBPROF),
        checks: Some(folder.join(CHECKS)),
    })
}

/// The libraries that a program of this machine needs, the dynamic linker among
/// them; none if it is static.
pub(super) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    Ok(libraries_in(&cmd::output(
        Command::new("ldd").arg(program),
    )?))
}

/// `text`: what `ldd` prints.
fn libraries_in(text: &str) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|line| {
            let file = line.split_once("=>").map_or(line, |(_, file)| file);
            let path = file.split_whitespace().next()?;
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_file() {
        let text = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld.so (0x3)\n";
        assert_eq!(
            libraries_in(text),
            [PathBuf::from("/lib/x/libc.so.6"), "/lib64/ld.so".into()]
        );
        assert!(libraries_in("\tstatically linked\n").is_empty());
    }
}
