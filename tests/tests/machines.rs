//! The virtual machines themselves: what happens in one is known outside, and
//! nothing is left of it. The checks run in them by `cargo xtask vm --all`.

use std::path::PathBuf;

use anyhow::Result;
use anyhow::ensure;
use clap::Parser;
use xtask::vm;

/// The command line of `cargo xtask vm`.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    arguments: vm::Arguments,
}

fn run(words: &[&str]) -> Result<u8> {
    let rbprof = env!("CARGO_BIN_EXE_rbprof-under-test");
    let line = ["vm", "--kernel", "6.1", "--rbprof", rbprof];
    vm::run(&Line::try_parse_from(line.iter().chain(words))?.arguments)
}

/// Files of machines of this process.
fn left_behind() -> Result<Vec<PathBuf>> {
    let own = format!("rbprof-vm-{}-", std::process::id());
    let mut left = Vec::new();
    for file in std::fs::read_dir(std::env::temp_dir())? {
        let file = file?;
        if file.file_name().to_string_lossy().starts_with(&own) {
            left.push(file.path());
        }
    }
    Ok(left)
}

#[test]
fn the_status_of_the_command_is_known_outside() -> Result<()> {
    ensure!(run(&["--", "rbprof", "--version"])? == 0);
    ensure!(run(&["--", "sh", "-c", "echo something; exit 3"])? == 3);
    ensure!(left_behind()?.is_empty());
    Ok(())
}

#[test]
fn a_machine_that_takes_too_long_is_given_up() -> Result<()> {
    let error = run(&["--deadline", "3", "--", "sh", "-c", "sleep 1000"]);
    let error = error.err().map(|error| error.to_string());
    ensure!(
        error.as_deref() == Some("amd64 6.1 was not done within 3 s"),
        "{error:?}"
    );
    ensure!(left_behind()?.is_empty());
    Ok(())
}
