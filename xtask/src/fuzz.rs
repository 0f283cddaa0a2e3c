//! `cargo xtask fuzz`: what reads files of strangers, under a fuzzer.
//!
//! The fuzzer is libFuzzer, built by the crate `libfuzzer-sys`; the coverage
//! that it needs is an option of the stable compiler. Inputs found before are
//! kept in the cache and are where the next run begins.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use crate::cache;
use crate::cmd;
use crate::workspace;

/// The targets, and the folder or file of `seeds` that each begins with.
const TARGETS: [&str; 4] = ["elf", "eh_frame", "code", "unwind"];
/// Those that read whole files.
const WHOLE_FILES: [&str; 2] = ["elf", "unwind"];
/// Passed to rustc for every crate: coverage for libFuzzer.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 --cfg=fuzzing";
/// Bounds that a hostile file must not break: memory in MiB, and seconds for one
/// input.
const LIMITS: [&str; 3] = ["-rss_limit_mb=1024", "-malloc_limit_mb=512", "-timeout=20"];
/// Largest input, in bytes: the seeds are libraries of 30 KB.
const MAX_LENGTH: u32 = 65536;
/// The same for machine code, of which a few functions say as much as many.
const MAX_CODE: u32 = 4096;

/// Runs each target, or those named, for `seconds`, all at the same time.
///
/// # Errors
/// If a target finds something, or cannot be built.
pub fn run(seconds: u32, names: &[String]) -> Result<()> {
    let targets = selected(names)?;
    let programs = build()?;
    let runs: Vec<_> = targets
        .into_iter()
        .map(|target| {
            let program = programs.join(target);
            (
                target,
                thread::spawn(move || fuzz(target, &program, seconds)),
            )
        })
        .collect();
    let mut failed = Vec::new();
    for (target, run) in runs {
        let result = run.join().unwrap_or_else(|_| bail!("the run panicked"));
        match result {
            Ok(summary) => println!("  {target}: {summary}"),
            Err(error) => {
                eprintln!("  {target}: {error:#}");
                failed.push(target);
            }
        }
    }
    if !failed.is_empty() {
        bail!("the fuzzer found something: {}", failed.join(", "));
    }
    Ok(())
}

fn selected(names: &[String]) -> Result<Vec<&'static str>> {
    if names.is_empty() {
        return Ok(TARGETS.to_vec());
    }
    names
        .iter()
        .map(|name| {
            TARGETS
                .into_iter()
                .find(|target| target == name)
                .with_context(|| {
                    format!(
                        "no fuzz target is called {name}; there are {}",
                        TARGETS.join(", ")
                    )
                })
        })
        .collect()
}

/// Builds all targets; the result is the folder of the programs.
fn build() -> Result<PathBuf> {
    // Named, so that build scripts are not instrumented.
    let host = host()?;
    let dir = workspace::target_dir()?.join("fuzz");
    let mut cargo = workspace::cargo();
    cargo
        .args(["build", "--release", "--locked", "--target", &host])
        .arg("--manifest-path")
        .arg(workspace::root().join("tests/fuzz/Cargo.toml"))
        .arg("--target-dir")
        .arg(&dir)
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            COVERAGE.split_whitespace().collect::<Vec<_>>().join("\x1f"),
        );
    if let Some(ebpf_cargo) = crate::setup::rust_src::environment()? {
        cargo.env(crate::setup::rust_src::EBPF_CARGO, ebpf_cargo);
    }
    cmd::run(&mut cargo)?;
    Ok(dir.join(host).join("release"))
}

fn host() -> Result<String> {
    let version = cmd::output(Command::new("rustc").arg("-vV"))?;
    version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc does not say what machine it is for")
}

/// Runs one target; the result is one line.
fn fuzz(target: &str, program: &Path, seconds: u32) -> Result<String> {
    let found = cache::dir()?.join("fuzz").join(target);
    cache::create_dir(&found)?;
    let seeds = seeds(target)?;
    let crashes = workspace::target_dir()?.join("fuzz/found");
    cache::create_dir(&crashes)?;
    let length = if target == "code" {
        MAX_CODE
    } else {
        MAX_LENGTH
    };
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(&found)
        .arg(&seeds)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/{target}-", crashes.display()))
        .arg(format!("-max_len={length}"))
        .args(["-print_final_stats=1", "-verbosity=1"])
        .args(LIMITS);
    let output = fuzzer
        .output()
        .with_context(|| format!("starting {}", program.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let tail: Vec<&str> = log.lines().rev().take(40).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("{}\nthe input is in {}", tail.join("\n"), crashes.display());
    }
    let statistic = |name: &str| {
        log.lines()
            .find_map(|line| line.strip_prefix(&format!("stat::{name}:")))
            .map_or("?", str::trim)
            .to_owned()
    };
    Ok(format!(
        "{} inputs in {seconds} s, {} new, at most {} MiB",
        statistic("number_of_executed_units"),
        statistic("new_units_added"),
        statistic("peak_rss_mb")
    ))
}

/// What a target begins with: files of the tree, and small libraries in the
/// shape of a Ruby, compiled here.
fn seeds(target: &str) -> Result<PathBuf> {
    let source = workspace::root().join("tests/fuzz/seeds");
    let dir = workspace::target_dir()?.join("fuzz/seeds").join(target);
    cache::create_dir(&dir)?;
    for (name, flags) in [
        ("stripped", ["-s", "-DSTRIPPED"]),
        ("symbols", ["-g0", "-DSTRIPPED"]),
        ("exported", ["-s", "-DEXPORTED"]),
    ] {
        let library = dir.join(format!("{name}.so"));
        let mut compile = Command::new("cc");
        compile
            .args(["-shared", "-fPIC", "-O2", "-w", "-o"])
            .arg(&library)
            .arg(source.join("ruby.c"))
            .args(flags);
        cmd::output(&mut compile)?;
        if WHOLE_FILES.contains(&target) {
            continue;
        }
        // The address that comes first, then the bytes.
        let file = std::fs::read(&library)?;
        std::fs::remove_file(&library)?;
        let (address, bytes) = part(target, &file)
            .with_context(|| format!("no seed for {target} in {}", library.display()))?;
        let mut seed = address.to_le_bytes().to_vec();
        seed.extend_from_slice(&bytes);
        std::fs::write(dir.join(name), seed)?;
    }
    let own = source.join(target);
    if own.is_dir() {
        for file in std::fs::read_dir(&own)? {
            let file = file?;
            std::fs::copy(file.path(), dir.join(file.file_name()))?;
        }
    }
    Ok(dir)
}

/// The section that a target reads.
fn part(target: &str, file: &[u8]) -> Option<(u64, Vec<u8>)> {
    use object::Object as _;
    use object::ObjectSection as _;
    let file = object::File::parse(file).ok()?;
    let name = if target == "eh_frame" {
        ".eh_frame"
    } else {
        ".text"
    };
    let section = file.section_by_name(name)?;
    Some((section.address(), section.data().ok()?.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_a_program_of_the_fuzz_crate() {
        let manifest =
            std::fs::read_to_string(workspace::root().join("tests/fuzz/Cargo.toml")).unwrap();
        for target in TARGETS {
            assert!(manifest.contains(&format!("name = \"{target}\"")));
        }
        assert!(selected(&["elf".to_owned()]).is_ok());
        assert!(selected(&["other".to_owned()]).is_err());
    }

    #[test]
    fn every_target_has_seeds() {
        for target in TARGETS {
            let dir = seeds(target).unwrap();
            assert!(std::fs::read_dir(dir).unwrap().count() >= 3, "{target}");
        }
    }
}
