//! Rubies built from a Debian source package's upstream tarball.

use std::ffi::OsStr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;
use object::Object;
use object::ObjectSymbol;
use object::SymbolFlags;
use object::elf;

use super::debian;
use super::edits;
use super::recipes::Exports;
use super::recipes::Source;
use crate::cache;
use crate::cmd;

/// What the export proposal exports.
const EXPORTED: [&str; 3] = ["ruby_current_ec", "rb_vm_exec", "ruby_global_symbols"];

/// The installation's prefix in a cache entry.
pub(super) fn prefix(entry: &Path) -> PathBuf {
    entry.join("prefix")
}

/// Builds, installs and strips a Ruby in the new cache entry `place`, which
/// will be renamed to `entry`: that is the prefix it is configured for.
pub(super) fn build(version: &str, source: &Source, place: &Path, entry: &Path) -> Result<()> {
    let tree = place.join("build");
    let staged = place.join("staged");
    let log = place.join("build.log");
    unpack(&debian::tarball(version, source)?, &tree)?;
    leave_out_bundled_gems(&tree)?;
    edits::apply(source.edits, &tree)?;

    let prefix_arg = format!("--prefix={}", prefix(entry).display());
    let mut configure = builder("./configure", &tree);
    configure.arg(prefix_arg).args(source.configure);
    timed("configure", || cmd::logged(&mut configure, &log))?;

    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    timed("make", || {
        cmd::logged(builder("make", &tree).arg(format!("-j{jobs}")), &log)
    })?;

    // The prefix is part of the program, but not yet its place.
    let mut install = builder("make", &tree);
    install
        .arg("install")
        .arg(format!("DESTDIR={}", staged.display()));
    timed("make install", || cmd::logged(&mut install, &log))?;
    let inside = prefix(entry);
    let inside = inside
        .strip_prefix("/")
        .context("the cache's folder is absolute")?;
    std::fs::rename(staged.join(inside), prefix(place)).context("taking the installation")?;
    for rest in [&tree, &staged] {
        std::fs::remove_dir_all(rest).with_context(|| format!("removing {}", rest.display()))?;
    }

    let objects = interpreter_objects(&prefix(place))?;
    cmd::logged(
        Command::new("strip").arg("--strip-all").args(&objects),
        &log,
    )?;
    check_exports(&objects, source.exports)
}

fn unpack(tarball: &Path, tree: &Path) -> Result<()> {
    cache::create_dir(tree)?;
    // The times of files stay as they are: `make` would otherwise remake
    // generated ones.
    let mut tar = Command::new("tar");
    tar.arg("-xf")
        .arg(tarball)
        .arg("-C")
        .arg(tree)
        .arg("--strip-components=1");
    cmd::output(&mut tar).map(drop)
}

/// Debian's tarballs lack the gems that upstream's bundle, and the installation
/// would fetch them; it takes an empty list as well.
fn leave_out_bundled_gems(tree: &Path) -> Result<()> {
    let list = tree.join("gems/bundled_gems");
    std::fs::write(&list, "").with_context(|| format!("emptying {}", list.display()))
}

/// A command in the source tree, without settings that would change the build.
fn builder(program: &str, tree: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(tree).env("LC_ALL", "C");
    for variable in [
        "CC",
        "CFLAGS",
        "CPPFLAGS",
        "CXX",
        "LDFLAGS",
        "LIBS",
        "MAKEFLAGS",
        "DESTDIR",
        "RUBYOPT",
        "RUBYLIB",
    ] {
        command.env_remove(variable);
    }
    command
}

fn timed(what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    work()?;
    println!("    {what}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The files that hold the interpreter: `bin/ruby`, and `libruby` if shared.
fn interpreter_objects(prefix: &Path) -> Result<Vec<PathBuf>> {
    let mut objects = vec![prefix.join("bin/ruby")];
    let lib = prefix.join("lib");
    for file in std::fs::read_dir(&lib).with_context(|| format!("reading {}", lib.display()))? {
        let file = file?;
        // Not the links, which lead to the same file.
        if file.file_type()?.is_file() && is_libruby(&file.file_name()) {
            objects.push(file.path());
        }
    }
    Ok(objects)
}

fn is_libruby(name: &OsStr) -> bool {
    name.to_string_lossy().starts_with("libruby.so")
}

/// The visibility of each symbol of [`EXPORTED`] that an ELF file exports.
fn exported(elf_file: &[u8]) -> Result<Vec<elf::SymbolVisibility>> {
    let file = object::File::parse(elf_file)?;
    if file
        .symbol_table()
        .is_some_and(|table| object::ObjectSymbolTable::symbols(&table).next().is_some())
    {
        bail!("it still has a symbol table");
    }
    let visibilities = file
        .dynamic_symbols()
        .filter(|symbol| !symbol.is_undefined())
        .filter_map(|symbol| {
            let wanted = symbol.name().is_ok_and(|name| EXPORTED.contains(&name));
            match symbol.flags() {
                SymbolFlags::Elf { st_info, st_other }
                    if wanted && st_info.st_bind() == elf::STB_GLOBAL =>
                {
                    Some(st_other.visibility())
                }
                _ => None,
            }
        });
    Ok(visibilities.collect())
}

/// Fails unless the stripped files export what the recipe says.
fn check_exports(objects: &[PathBuf], expected: Exports) -> Result<()> {
    let mut found = Vec::new();
    for path in objects {
        let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        found.extend(exported(&bytes).with_context(|| format!("checking {}", path.display()))?);
    }
    let all =
        |visibility| found.len() == EXPORTED.len() && found.iter().all(|&each| each == visibility);
    let right = match expected {
        Exports::Stock => found.len() < EXPORTED.len(),
        Exports::Default => all(elf::STV_DEFAULT),
        Exports::Protected => all(elf::STV_PROTECTED),
    };
    if !right {
        bail!("exports of {EXPORTED:?} are not {expected:?}: found visibilities {found:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_library_itself_is_stripped() {
        assert!(is_libruby(OsStr::new("libruby.so.3.3.8")));
        assert!(!is_libruby(OsStr::new("libruby-static.a")));
    }

    #[test]
    fn a_file_with_a_symbol_table_is_not_stripped() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(
            exported(&own)
                .unwrap_err()
                .to_string()
                .contains("symbol table")
        );
    }
}
