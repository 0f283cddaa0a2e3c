//! `cargo xtask dist`: what a release consists of, the same bytes wherever and
//! whenever it is built from the same commit.
//!
//! | module | what it does |
//! |---|---|
//! | `source` | which tree is built: version, time, whether it is a commit |
//! | `build` | the static binaries, without a trace of the machine that built them |
//! | [`debug`] | puts what only debuggers read into a file of its own |
//! | `metadata` | what cargo knows of the crates |
//! | `contents` | what lies beside the binary |
//! | `notices` | the licences of the crates that are in it |
//! | [`archive`] | `.tar.gz` |
//! | [`checksums`] | `SHA256SUMS`, and comparing |

pub mod archive;
pub mod build;
pub mod checksums;
mod contents;
pub mod debug;
mod metadata;
mod notices;
mod source;

use std::path::Path;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use clap::Args;

use crate::cache;
use crate::vm::Architecture;
use crate::workspace;
use archive::Entry;
use source::Source;

/// What a person asks for.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where to put it [default: dist in the target folder].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// For this processor only.
    #[arg(long)]
    arch: Option<Architecture>,
    /// Build the last commit once more in another folder, and compare.
    #[arg(long)]
    check: bool,
}

/// The file of checksums.
const CHECKSUMS: &str = "SHA256SUMS";
/// For which processors there are binaries.
const ARCHITECTURES: [Architecture; 2] = [Architecture::Amd64, Architecture::Arm64];

/// Does what a person asks for, and prints which files there are then.
///
/// # Errors
/// If something that is needed is not there, something does not compile, or two
/// builds of the same commit differ.
pub fn run(arguments: &Arguments) -> Result<()> {
    let source = Source::at(workspace::root())?;
    if arguments.check && (source.is_changed || source.commit.is_none()) {
        bail!("what is not committed cannot be built elsewhere: commit it, or leave out --check");
    }
    let architectures = arguments
        .arch
        .map_or(ARCHITECTURES.to_vec(), |arch| vec![arch]);
    let target_dir = workspace::target_dir()?;
    let out = arguments.out.clone();
    let out = out.unwrap_or_else(|| target_dir.join("dist"));
    // Not the target folder itself: in that, `dist` is where cargo would put what
    // it compiles for this machine.
    let files = make(
        &source,
        &target_dir.join("dist-build"),
        &architectures,
        &out,
    )?;
    if arguments.check {
        check(&source, &architectures, &files)?;
    }
    println!("{}:", out.display());
    for file in &files {
        println!("  {:>11}  {}", checksums::grouped(file.size), file.name);
    }
    if source.is_changed {
        println!("with changes that are not committed: nobody else can build this");
    }
    Ok(())
}

/// A file of a release.
#[derive(Debug, PartialEq, Eq)]
struct Made {
    name: String,
    /// Bytes.
    size: u64,
    sha256: String,
}

/// Makes all files of a release in the folder `out`. Cargo builds in `target_dir`.
fn make(
    source: &Source,
    target_dir: &Path,
    architectures: &[Architecture],
    out: &Path,
) -> Result<Vec<Made>> {
    cache::create_dir(out)?;
    let begun = Instant::now();
    let programs = build::programs(source, target_dir, architectures)?;
    println!(
        "  built in {} ({:.0} s)",
        source.root.display(),
        begun.elapsed().as_secs_f64()
    );
    let mut files = Vec::new();
    for (&architecture, program) in architectures.iter().zip(&programs) {
        let name = format!("rbprof-{}-linux-{}", source.version, architecture.debian());
        let debug_name = format!("{name}.debug");
        let work = tempfile::tempdir().context("creating a temporary folder")?;
        let stripped = work.path().join("rbprof");
        debug::split(program, architecture, &stripped, &out.join(&debug_name))?;
        let mut entries = contents::of(&source.root)?;
        entries.push(notices::of(source, architecture)?);
        entries.push(Entry::read("rbprof", archive::Mode::Program, &stripped)?);
        let packed = archive::tar_gz(&name, entries, source.time)?;
        let archive_name = format!("{name}.tar.gz");
        write(&out.join(&archive_name), &packed)?;
        files.extend([archive_name, debug_name]);
    }
    let mut made = Vec::new();
    for name in files {
        made.push(look_at(out, &name)?);
    }
    made.sort_by(|one, other| one.name.cmp(&other.name));
    let sums = made
        .iter()
        .map(|file| (file.name.as_str(), file.sha256.as_str()));
    write(&out.join(CHECKSUMS), checksums::text(sums).as_bytes())?;
    made.push(look_at(out, CHECKSUMS)?);
    Ok(made)
}

/// Makes the same from a copy of the last commit in another folder.
fn check(source: &Source, architectures: &[Architecture], files: &[Made]) -> Result<()> {
    let elsewhere = tempfile::Builder::new()
        .prefix("rbprof-built-elsewhere-")
        .tempdir()
        .context("creating a temporary folder")?;
    let copy = source.copy_of_commit(&elsewhere.path().join("tree"))?;
    let out = elsewhere.path().join("out");
    let target_dir = elsewhere.path().join("target");
    let again = make(&copy, &target_dir, architectures, &out)?;
    let different = checksums::different(
        files
            .iter()
            .map(|file| (file.name.as_str(), file.sha256.as_str())),
        again
            .iter()
            .map(|file| (file.name.as_str(), file.sha256.as_str())),
    );
    if different.is_empty() {
        println!("  both builds are equal, byte by byte");
        return Ok(());
    }
    // To be looked at.
    let _kept = elsewhere.keep();
    bail!(
        "two builds of one commit differ in {}; the other one is in {}",
        different.join(", "),
        out.display()
    )
}

fn look_at(folder: &Path, name: &str) -> Result<Made> {
    let file = folder.join(name);
    let content = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
    Ok(Made {
        name: name.to_owned(),
        size: content.len() as u64,
        sha256: cache::sha256(&content),
    })
}

fn write(file: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(file, content).with_context(|| format!("writing {}", file.display()))
}
