//! Rubies built from a Debian source package's upstream tarball.
//!
//! A tree is configured, built and installed once, as it is. Its variants differ
//! in a few declarations: for them the tree is edited, and only the interpreter
//! is made again. A cache entry holds a complete installation for each variant,
//! with and without symbols, whose files are the same except for the
//! interpreter itself (hard links).

use std::ffi::OsStr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;
use object::Object;
use object::ObjectSection;
use object::ObjectSymbol;
use object::SymbolFlags;
use object::elf;

use super::debian;
use super::edits;
use super::recipes::Exports;
use super::recipes::Libc;
use super::recipes::Tree;
use super::recipes::Variant;
use super::recipes::folder;
use crate::cache;
use crate::cmd;

/// What the export proposal exports.
const EXPORTED: [&str; 3] = ["ruby_current_ec", "rb_vm_exec", "ruby_global_symbols"];

/// Builds all interpreters of `tree` in the new cache entry `place`, which will
/// be renamed to `entry`.
pub(super) fn build(tree: &Tree, place: &Path, entry: &Path) -> Result<()> {
    let make = Build {
        tree,
        source: place.join("build"),
        log: place.join("build.log"),
    };
    unpack(&debian::tarball(tree)?, &make.source)?;
    leave_out_bundled_gems(&make.source)?;
    let Some((first, others)) = tree.variants.split_first() else {
        bail!("the tree {} gives no interpreter", tree.name);
    };

    let whole = place.join(folder(first, false));
    make.whole(first, &entry.join(folder(first, false)), &whole)?;
    let objects = interpreter_objects(&whole, tree.is_shared())?;
    for variant in others {
        let prefix = place.join(folder(variant, false));
        copy_with_links(&whole, &prefix)?;
        make.again(variant, &prefix, &objects)?;
    }
    for variant in tree.variants {
        let prefix = place.join(folder(variant, false));
        check(&prefix, &objects, variant.exports, false)?;
        let stripped = place.join(folder(variant, true));
        copy_with_links(&prefix, &stripped)?;
        make.strip(&prefix, &stripped, &objects)?;
        check(&stripped, &objects, variant.exports, true)?;
    }
    std::fs::remove_dir_all(&make.source)
        .with_context(|| format!("removing {}", make.source.display()))
}

/// A tree under way.
struct Build<'a> {
    tree: &'a Tree,
    source: PathBuf,
    log: PathBuf,
}

impl Build<'_> {
    /// Configures the tree for `prefix`, builds everything, and installs it in
    /// `place`.
    fn whole(&self, variant: &Variant, prefix: &Path, place: &Path) -> Result<()> {
        edits::apply(variant.edits, &self.source)?;
        let mut configure = self.command("./configure");
        configure
            .arg(format!("--prefix={}", prefix.display()))
            .args(self.tree.configure)
            .args(compiler(self.tree.libc));
        self.timed("configure", &mut configure)?;
        self.timed("make", self.command("make").arg(jobs()))?;

        // The prefix is part of the program, but not yet its place.
        let staged = self.source.join("staged");
        let mut install = self.command("make");
        install
            .arg("install")
            .arg(format!("DESTDIR={}", staged.display()));
        self.timed("make install", &mut install)?;
        let inside = prefix
            .strip_prefix("/")
            .context("the cache's folder is absolute")?;
        std::fs::rename(staged.join(inside), place).context("taking the installation")?;
        edits::revert(variant.edits, &self.source)
    }

    /// Makes the interpreter again, edited, and puts it into `prefix`.
    fn again(&self, variant: &Variant, prefix: &Path, objects: &[PathBuf]) -> Result<()> {
        edits::apply(variant.edits, &self.source)?;
        let mut make = self.command("make");
        make.arg(jobs()).arg("program");
        self.timed(&format!("make {}", variant.name), &mut make)?;
        for object in objects {
            let name = object.file_name().context("an object has a name")?;
            let place = prefix.join(object);
            remove(&place)?;
            std::fs::copy(self.source.join(name), &place)
                .with_context(|| format!("copying {}", name.display()))?;
        }
        edits::revert(variant.edits, &self.source)
    }

    /// Replaces the interpreter in the installation `to` by the one in `from`
    /// without its symbols.
    fn strip(&self, from: &Path, to: &Path, objects: &[PathBuf]) -> Result<()> {
        for object in objects {
            let (from, to) = (from.join(object), to.join(object));
            remove(&to)?;
            let mut strip = Command::new("strip");
            strip.args(["--strip-all", "-o"]).arg(&to).arg(&from);
            cmd::logged(&mut strip, &self.log)?;
        }
        Ok(())
    }

    /// A command in the source tree, without settings that would change the
    /// build.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.source).env("LC_ALL", "C");
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

    fn timed(&self, what: &str, command: &mut Command) -> Result<()> {
        let start = Instant::now();
        cmd::logged(command, &self.log)?;
        println!(
            "    {}: {what}: {:.0} s",
            self.tree.name,
            start.elapsed().as_secs_f64()
        );
        Ok(())
    }
}

/// `make`'s argument for as many jobs as there are processors.
fn jobs() -> String {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    format!("-j{jobs}")
}

/// Arguments of `configure` that name the compiler.
fn compiler(libc: Libc) -> Vec<String> {
    match libc {
        Libc::Glibc => Vec::new(),
        // Only the kernel's headers are taken from the machine's own.
        Libc::Musl => vec![
            "CC=musl-gcc".to_owned(),
            format!(
                "CPPFLAGS=-idirafter /usr/include -idirafter /usr/include/{}-linux-gnu",
                std::env::consts::ARCH
            ),
        ],
    }
}

fn remove(file: &Path) -> Result<()> {
    std::fs::remove_file(file).with_context(|| format!("removing {}", file.display()))
}

/// Copies an installation whose files are not to be changed, only replaced.
fn copy_with_links(from: &Path, to: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.args(["--archive", "--link", "--no-target-directory"])
        .arg(from)
        .arg(to);
    cmd::output(&mut copy).map(drop)
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

/// The files that hold the interpreter, relative to `prefix`: `bin/ruby`, and
/// `libruby` if shared.
fn interpreter_objects(prefix: &Path, shared: bool) -> Result<Vec<PathBuf>> {
    let mut objects = vec![PathBuf::from("bin/ruby")];
    let lib = prefix.join("lib");
    for file in std::fs::read_dir(&lib).with_context(|| format!("reading {}", lib.display()))? {
        let file = file?;
        // Not the links, which lead to the same file.
        if file.file_type()?.is_file() && is_libruby(&file.file_name()) {
            objects.push(Path::new("lib").join(file.file_name()));
        }
    }
    if objects.len() != 1 + usize::from(shared) {
        bail!("the interpreter is in {objects:?}");
    }
    Ok(objects)
}

fn is_libruby(name: &OsStr) -> bool {
    name.to_string_lossy().starts_with("libruby.so")
}

/// What matters of an ELF file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Symbols {
    /// The visibility of each symbol of [`EXPORTED`] that the file exports.
    exported: Vec<elf::SymbolVisibility>,
    /// Whether there is a symbol table besides the exports.
    table: bool,
    /// Whether there is debug information.
    debug: bool,
}

fn symbols(elf_file: &[u8]) -> Result<Symbols> {
    let file = object::File::parse(elf_file)?;
    let exported = file
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
    Ok(Symbols {
        exported: exported.collect(),
        table: file
            .symbol_table()
            .is_some_and(|table| object::ObjectSymbolTable::symbols(&table).next().is_some()),
        debug: file
            .sections()
            .any(|section| section.name().is_ok_and(|name| name.contains("debug_info"))),
    })
}

/// Fails unless the files export and hold what the recipe says.
fn check(prefix: &Path, objects: &[PathBuf], expected: Exports, stripped: bool) -> Result<()> {
    let mut exported = Vec::new();
    for object in objects {
        let path = prefix.join(object);
        let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let found =
            symbols(&bytes).with_context(|| format!("the symbols of {}", path.display()))?;
        if (found.table, found.debug) != (!stripped, !stripped) {
            bail!(
                "{}: symbol table {}, debug information {}, stripped {stripped}",
                path.display(),
                found.table,
                found.debug
            );
        }
        exported.extend(found.exported);
    }
    if !is_as_expected(&exported, expected) {
        bail!(
            "{}: exports of {EXPORTED:?} are not {expected:?}: found visibilities {exported:?}",
            prefix.display()
        );
    }
    Ok(())
}

fn is_as_expected(found: &[elf::SymbolVisibility], expected: Exports) -> bool {
    let all =
        |visibility| found.len() == EXPORTED.len() && found.iter().all(|&each| each == visibility);
    match expected {
        Exports::Stock => found.is_empty(),
        Exports::Default => all(elf::STV_DEFAULT),
        Exports::Protected => all(elf::STV_PROTECTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_library_itself_holds_the_interpreter() {
        assert!(is_libruby(OsStr::new("libruby.so.3.3.8")));
        assert!(!is_libruby(OsStr::new("libruby-static.a")));
    }

    #[test]
    fn symbols_and_debug_information_are_told() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = symbols(&own).unwrap();
        assert!(found.table && found.debug && found.exported.is_empty());
        assert!(symbols(b"\x7fELF").is_err());
    }

    #[test]
    fn exports_are_all_there_and_alike_or_none() {
        let of = |visibility| vec![visibility; EXPORTED.len()];
        let (default, protected) = (of(elf::STV_DEFAULT), of(elf::STV_PROTECTED));
        assert!(is_as_expected(&[], Exports::Stock));
        assert!(!is_as_expected(&default[1..], Exports::Stock));
        assert!(is_as_expected(&default, Exports::Default));
        assert!(!is_as_expected(&default[1..], Exports::Default));
        assert!(!is_as_expected(&default, Exports::Protected));
        assert!(is_as_expected(&protected, Exports::Protected));
        let mixed = [default[0], protected[0], protected[0]];
        assert!(!is_as_expected(&mixed, Exports::Protected));
    }
}
