//! `cargo xtask test`: everything that continuous integration runs.

use std::process::Command;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use anyhow::bail;

use crate::cmd;
use crate::fuzz;
use crate::layouts;
use crate::machine;
use crate::rubies;
use crate::setup;
use crate::workspace;

/// The package of the integration tests.
const LIVE_TESTS: &str = "rbprof-tests";

/// How long each fuzz target runs.
const FUZZ_SECONDS: u32 = 60;

/// What became of one stage.
struct Outcome {
    name: &'static str,
    result: Result<()>,
    took: Duration,
}

/// Runs all stages, also after one has failed, and sums up at the end. With a
/// filter: only the tests whose name contains it, and no lints. With
/// `every_ruby`: on all Rubies that there are.
///
/// # Errors
/// If a stage failed.
pub fn run(filter: Option<&str>, every_ruby: bool) -> Result<()> {
    let every: Vec<String> = if every_ruby {
        rubies::all().map(|recipe| recipe.name.to_owned()).collect()
    } else {
        Vec::new()
    };
    let tests = |args: &[&str]| -> Result<Command> {
        let mut tests = cargo(args)?;
        if every_ruby {
            tests.env(rubies::EVERY_RUBY, "1");
        }
        Ok(tests)
    };
    let mut outcomes = vec![
        stage("setup", setup::run),
        stage("machine", || {
            machine::prepare();
            Ok(())
        }),
        stage("rubies", || {
            rubies::provide(&[])?;
            if every_ruby {
                rubies::provide(&every)?;
            }
            Ok(())
        }),
    ];
    if filter.is_none() {
        outcomes.extend([
            stage("format", || {
                cmd::run(&mut cargo(&["fmt", "--all", "--check"])?)
            }),
            stage("clippy", || {
                cmd::run(&mut cargo(&[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ])?)
            }),
            stage("clippy for BPF", lint_ebpf),
            stage("layouts", layouts::check),
            stage("docs", || {
                let mut doc = cargo(&["doc", "--workspace", "--no-deps"])?;
                cmd::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
            }),
        ]);
    }
    outcomes.extend([
        stage("unit tests", || {
            let mut test = tests(&["test", "--workspace", "--exclude", LIVE_TESTS])?;
            cmd::run(test.args(filter))
        }),
        // Recordings of processes disturb each other, so one at a time.
        stage("integration tests", || {
            let mut test = tests(&["test", "--no-fail-fast", "--package", LIVE_TESTS])?;
            cmd::run(test.args(filter).args(["--", "--test-threads=1"]))
        }),
    ]);
    if filter.is_none() {
        outcomes.push(stage("fuzz", || fuzz::run(FUZZ_SECONDS, &[])));
    }
    sum_up(&outcomes)
}

/// Lints the kernel half as what it really is, for each machine that it runs
/// on: for the host it is an empty program.
fn lint_ebpf() -> Result<()> {
    if setup::rust_src::source()?.is_none() {
        println!("  skipped: it needs rust-src");
        return Ok(());
    }
    for arch in ["x86_64", "aarch64"] {
        let mut clippy = workspace::cargo();
        clippy
            .args([
                "clippy",
                "--release",
                "--package",
                "rbprof-ebpf",
                "--target",
                "bpfel-unknown-none",
            ])
            .args(["-Zbuild-std=core", "--target-dir"])
            // Flags of its own would have the other builds start over.
            .arg(workspace::target_dir()?.join("lint-ebpf"))
            .args(["--", "-D", "warnings"])
            .env("RUSTC_BOOTSTRAP", "1")
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                format!("--cfg=bpf_target_arch=\"{arch}\""),
            );
        cmd::run(&mut clippy)?;
    }
    Ok(())
}

/// Cargo with the environment that the eBPF build needs here.
fn cargo(args: &[&str]) -> Result<Command> {
    let mut cargo = workspace::cargo();
    cargo.args(args);
    if let Some(ebpf_cargo) = setup::rust_src::environment()? {
        cargo.env(setup::rust_src::EBPF_CARGO, ebpf_cargo);
    }
    Ok(cargo)
}

fn stage(name: &'static str, work: impl FnOnce() -> Result<()>) -> Outcome {
    println!("== {name}");
    let start = Instant::now();
    let result = work();
    if let Err(error) = &result {
        eprintln!("{name} failed: {error:#}");
    }
    Outcome {
        name,
        result,
        took: start.elapsed(),
    }
}

fn sum_up(outcomes: &[Outcome]) -> Result<()> {
    println!("== summary");
    for Outcome { name, result, took } in outcomes {
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        println!("  {name:18} {word:6} {:7.1} s", took.as_secs_f64());
    }
    let failed: Vec<&str> = outcomes
        .iter()
        .filter(|outcome| outcome.result.is_err())
        .map(|outcome| outcome.name)
        .collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_stage_fails_the_run_and_is_named() {
        let good = || stage("good", || Ok(()));
        let bad = stage("bad", || bail!("no"));
        assert!(sum_up(&[good(), good()]).is_ok());
        let error = sum_up(&[good(), bad, good()]).unwrap_err().to_string();
        assert_eq!(error, "failed: bad");
    }
}
