//! Rubies of another machine: files to read here, and to run in a virtual machine.

use std::path::PathBuf;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use super::RECIPE_FILE;
use super::debian;
use super::extension;
use super::recipes::Packages;
use crate::cache;

/// The files of a Debian package for another machine.
#[derive(Debug)]
pub struct Foreign {
    /// Its name: origin, version, machine.
    pub name: &'static str,
    /// What the interpreter calls `RUBY_VERSION`.
    pub version: &'static str,
    /// The recipe for this machine that is like it.
    pub native_name: &'static str,
    /// What Debian calls the machine.
    pub(super) architecture: &'static str,
    pub(super) packages: Packages,
    /// The file that holds the interpreter, in the root file system.
    library: &'static str,
}

macro_rules! arm64 {
    ($version:literal, $series:literal, $suites:expr, $package:literal) => {
        Foreign {
            name: concat!("debian-", $version, "-arm64"),
            version: $version,
            native_name: concat!("debian-", $version),
            architecture: "arm64",
            packages: Packages {
                suites: $suites,
                include: &[$package, "coreutils", "dash"],
                ruby: concat!("/usr/bin/ruby", $series),
            },
            library: concat!(
                "usr/lib/aarch64-linux-gnu/libruby-",
                $series,
                ".so.",
                $version
            ),
        }
    };
}

/// All there are; the tests need them all.
pub const FOREIGN: &[Foreign] = &[
    arm64!("2.7.4", "2.7", &["bullseye"], "ruby2.7"),
    arm64!("3.1.2", "3.1", &["bookworm"], "ruby3.1"),
    arm64!("3.3.8", "3.3", &["trixie"], "ruby3.3"),
    arm64!(
        "3.4.11",
        "3.4",
        &["sid", "experimental"],
        "ruby3.4/experimental"
    ),
];

impl Foreign {
    /// The file that holds the interpreter.
    ///
    /// # Errors
    /// If it has not been provided yet.
    pub fn library(&self) -> Result<PathBuf> {
        let library = self.root()?.join(self.library);
        if !library.exists() {
            bail!(
                "Ruby {} is not there: run `cargo xtask rubies {}`",
                self.name,
                self.name
            );
        }
        Ok(library)
    }

    /// One line for a person.
    pub(super) fn about(&self) -> String {
        format!(
            "root file system of Debian {} for {}, for virtual machines",
            self.packages.suites.join(" and "),
            self.architecture
        )
    }

    /// Where its files are, or will be.
    pub(super) fn entry(&self) -> Result<PathBuf> {
        let key = cache::sha256(self.text().as_bytes());
        let short: String = key.chars().take(12).collect();
        Ok(cache::dir()?
            .join("rubies")
            .join(format!("{}-{short}", self.name)))
    }

    /// The root file system. It need not be there yet.
    pub(super) fn root(&self) -> Result<PathBuf> {
        Ok(debian::root(&self.entry()?))
    }

    fn text(&self) -> String {
        // Raise this when the code that follows it changes the result.
        const REVISION: u32 = 1;
        format!("revision {REVISION}\n{self:#?}\n")
    }

    /// Fetches its files and builds the extension for it, if they are not there.
    pub(super) fn provide(&self) -> Result<()> {
        self.fetch()?;
        extension::provide_foreign(self)
    }

    fn fetch(&self) -> Result<()> {
        let entry = self.entry()?;
        if entry.exists() {
            println!("  {}: already there ({})", self.name, entry.display());
            return Ok(());
        }
        println!("  {}: {}", self.name, self.about());
        cache::entry(&entry, |place| {
            std::fs::write(place.join(RECIPE_FILE), self.text())?;
            debian::build(&self.packages, Some(self.architecture), place)
        })?;
        let library = self.library();
        library
            .map(drop)
            .or_else(|error| cache::discard(&entry).and(Err(error)))
            .with_context(|| format!("providing {}", self.name))
    }
}
