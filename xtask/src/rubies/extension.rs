//! The C extension `burn.so`, which spends CPU time in known chains of C
//! functions: `tests/extension/burn.c` says what it does.
//!
//! It is compiled on this machine, with the headers of the Ruby that is to load
//! it, and lies where that Ruby can see it: in its root file system, if it has
//! one.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use super::debian;
use super::entry;
use super::foreign::Foreign;
use super::recipes::Libc;
use super::recipes::Origin;
use super::recipes::Packages;
use super::recipes::Recipe;
use super::recipes::folder;
use crate::cache;
use crate::cmd;
use crate::workspace;

/// Its source, in the source tree.
const SOURCE: &str = "tests/extension/burn.c";
/// What `require "burn"` finds.
const FILE: &str = "burn.so";
/// The folder in its cache entry that has it without symbols.
const STRIPPED: &str = "stripped";
/// The folder for what is added to a root file system.
pub(super) const ADDED: &str = "opt/rbprof-test";
/// Of the compiler.
///
/// Linked to no library, the extension names no version of a libc symbol,
/// and so loads into a system whose libc is older than this machine's.
const FLAGS: &[&str] = &[
    "-O2",
    "-g",
    "-shared",
    "-fPIC",
    "-nostdlib",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
];

/// The extension, built for one Ruby.
///
/// That Ruby finds it in the folders that `-I` or `RUBYLIB` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The folder of `burn.so` with symbols and debug information, as the Ruby
    /// sees it.
    pub folder: PathBuf,
    /// The folder of a `burn.so` without them, as the Ruby sees it.
    pub stripped: PathBuf,
    /// `burn.so` with symbols and debug information, as this process sees it.
    pub file: PathBuf,
    /// `burn.so` without them, as this process sees it.
    pub stripped_file: PathBuf,
}

/// The folder under a root file system where a virtual machine has it, without
/// the slash at the front.
pub const IN_A_MACHINE: &str = "opt/rbprof-test/burn";

impl Extension {
    /// The one in a root file system of [`super::below`], at [`IN_A_MACHINE`]
    /// there.
    ///
    /// # Errors
    /// If it is not there.
    pub fn of_root(root: &Path) -> Result<Self> {
        let found = Self::at(root, Path::new(IN_A_MACHINE));
        if !found.file.exists() {
            bail!("no extension in {}", root.display());
        }
        Ok(found)
    }

    /// The one in `folder` under `root`.
    fn at(root: &Path, folder: &Path) -> Self {
        let inside = Path::new("/").join(folder);
        let host = root.join(folder);
        Self {
            stripped: inside.join(STRIPPED),
            folder: inside,
            file: host.join(FILE),
            stripped_file: host.join(STRIPPED).join(FILE),
        }
    }
}

/// The extension for `recipe`'s Ruby.
///
/// # Errors
/// If it has not been built yet.
pub(super) fn find(recipe: &Recipe) -> Result<Extension> {
    let place = Place::of(recipe)?;
    if !place.on_host().exists() {
        let name = recipe.name;
        bail!("the extension for Ruby {name} is not there: run `cargo xtask rubies {name}`");
    }
    Ok(Extension::at(&place.root, &place.folder))
}

/// Builds it if it is not there.
pub(super) fn provide(recipe: &Recipe) -> Result<()> {
    let place = Place::of(recipe)?.on_host();
    build(recipe.name, &place, compiler(recipe), || {
        match &recipe.origin {
            Origin::Packages(packages) => debian_headers(packages, recipe.version, None),
            Origin::Built(built) => {
                let installation = folder(built.variant, built.stripped);
                Ok(entry(recipe)?.join(installation).join("include"))
            }
        }
    })
}

/// Builds it for a Ruby of another machine, if it is not there.
pub(super) fn provide_foreign(foreign: &Foreign) -> Result<()> {
    let place = foreign_folder(foreign)?;
    build(foreign.name, &place, foreign_compiler(), || {
        debian_headers(
            &foreign.packages,
            foreign.version,
            Some(foreign.architecture),
        )
    })
}

/// The folder of the extension, as this machine sees it. It need not be there yet.
pub(super) fn host_folder(recipe: &Recipe) -> Result<PathBuf> {
    Ok(Place::of(recipe)?.on_host())
}

/// The folder of the extension for a Ruby of another machine, as this machine
/// sees it. It need not be there yet.
pub(super) fn foreign_folder(foreign: &Foreign) -> Result<PathBuf> {
    let key = key(&source()?, foreign_compiler().cc, FLAGS);
    Ok(foreign.root()?.join(ADDED).join(format!("burn-{key}")))
}

fn build(
    name: &str,
    place: &Path,
    compiler: Compiler,
    headers: impl FnOnce() -> Result<PathBuf>,
) -> Result<()> {
    if place.exists() {
        return Ok(());
    }
    let headers = headers()?;
    cache::entry(place, |new| {
        compile(new, compiler, &include_folders(&headers)?)
    })
    .with_context(|| format!("building the extension for {name}"))?;
    println!("  {name}: extension built ({})", place.display());
    Ok(())
}

/// Its source.
fn source() -> Result<String> {
    let source = workspace::root().join(SOURCE);
    std::fs::read_to_string(&source).with_context(|| format!("reading {}", source.display()))
}

/// What compiles it.
#[derive(Clone, Copy)]
struct Compiler {
    cc: &'static str,
    strip: &'static str,
}

/// Where it is, or will be.
struct Place {
    /// The root file system of its Ruby; `/` if that has none of its own.
    root: PathBuf,
    /// Where it is under that.
    folder: PathBuf,
}

impl Place {
    fn of(recipe: &Recipe) -> Result<Self> {
        // The Ruby's own recipe is part of the place around it.
        let key = key(&source()?, compiler(recipe).cc, FLAGS);
        let name = format!("burn-{key}");
        let entry = entry(recipe)?;
        Ok(match recipe.origin {
            Origin::Packages(_) => Self {
                root: debian::root(&entry),
                folder: Path::new(ADDED).join(name),
            },
            Origin::Built(_) => Self {
                root: PathBuf::from("/"),
                folder: entry.join(name),
            },
        })
    }

    fn on_host(&self) -> PathBuf {
        self.root.join(&self.folder)
    }
}

/// What sets one build apart from others for the same Ruby.
fn key(source: &str, compiler: &str, flags: &[&str]) -> String {
    // Raise this when the code that follows it changes the result.
    const REVISION: u32 = 2;
    let text = format!("revision {REVISION}\n{compiler} {flags:?}\n{source}");
    cache::sha256(text.as_bytes()).chars().take(12).collect()
}

const fn compiler(recipe: &Recipe) -> Compiler {
    let cc = match &recipe.origin {
        Origin::Packages(_) => "cc",
        Origin::Built(built) => match built.tree.libc {
            Libc::Glibc => "cc",
            Libc::Musl => "musl-gcc",
        },
    };
    Compiler { cc, strip: "strip" }
}

/// All foreign Rubies are of one architecture.
const fn foreign_compiler() -> Compiler {
    Compiler {
        cc: "aarch64-linux-gnu-gcc",
        strip: "aarch64-linux-gnu-strip",
    }
}

fn compile(place: &Path, compiler: Compiler, include: &[PathBuf]) -> Result<()> {
    let log = place.join("build.log");
    let (whole, stripped) = (place.join(FILE), place.join(STRIPPED));
    let mut cc = Command::new(compiler.cc);
    // Debug information names the source from the root of the source tree, which
    // may lie elsewhere when the extension is used.
    let tree = workspace::root();
    cc.current_dir(tree).args(FLAGS);
    cc.arg(format!("-ffile-prefix-map={}=.", tree.display()));
    // As the system's own: only warnings of our code are of interest.
    for folder in include {
        cc.arg("-isystem").arg(folder);
    }
    cc.arg("-o").arg(&whole).arg(SOURCE);
    cmd::logged(&mut cc, &log)?;
    cache::create_dir(&stripped)?;
    let mut strip = Command::new(compiler.strip);
    strip
        .args(["--strip-all", "-o"])
        .arg(stripped.join(FILE))
        .arg(&whole);
    cmd::logged(&mut strip, &log)
}

/// The folder `usr/include` with the headers of Debian's Ruby.
fn debian_headers(
    packages: &Packages,
    version: &str,
    architecture: Option<&str>,
) -> Result<PathBuf> {
    // Binary packages of one source have one version.
    let series = version
        .rsplit_once('.')
        .map_or(version, |(series, _)| series);
    let suite = packages.suites.last().context("a Ruby is of some suite")?;
    let unpacked = debian::unpacked(&format!("ruby{series}-dev"), version, suite, architecture)?;
    Ok(unpacked.join("usr/include"))
}

/// The folders to search for headers: that of most, and that of `ruby/config.h`,
/// which depends on the machine.
fn include_folders(include: &Path) -> Result<[PathBuf; 2]> {
    let mut folders = Vec::new();
    for outer in subfolders(include)? {
        folders.extend(subfolders(&outer)?);
        folders.push(outer);
    }
    let with = |file: &str| {
        let mut found = folders.iter().filter(|folder| folder.join(file).is_file());
        match (found.next(), found.next()) {
            (Some(folder), None) => Ok(folder.clone()),
            _ => bail!("not exactly one {file} in {}", include.display()),
        }
    };
    Ok([with("ruby/ruby.h")?, with("ruby/config.h")?])
}

fn subfolders(folder: &Path) -> Result<Vec<PathBuf>> {
    let files =
        std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let paths = files.flatten().map(|file| file.path());
    Ok(paths.filter(|path| path.is_dir()).collect())
}

#[cfg(test)]
mod tests {
    use super::super::recipes::RECIPES;
    use super::*;

    #[test]
    fn each_ruby_sees_it_where_it_is() {
        for recipe in RECIPES {
            let place = Place::of(recipe).unwrap();
            let host = place.on_host();
            let inside = Extension::at(&place.root, &place.folder).folder;
            let entry = entry(recipe).unwrap();
            assert!(inside.is_absolute());
            match recipe.origin {
                Origin::Packages(_) => {
                    let inside = inside.strip_prefix("/").unwrap();
                    assert_eq!(host, debian::root(&entry).join(inside));
                }
                Origin::Built(_) => assert_eq!(host, inside),
            }
            assert!(host.starts_with(entry));
        }
    }

    #[test]
    fn another_source_or_compiler_or_flag_makes_another_one() {
        let keys = [
            key("a", "cc", &["-g"]),
            key("b", "cc", &["-g"]),
            key("a", "musl-gcc", &["-g"]),
            key("a", "cc", &["-g", "-O2"]),
        ];
        for (index, one) in keys.iter().enumerate() {
            assert!(!keys[index + 1..].contains(one));
        }
    }
}
