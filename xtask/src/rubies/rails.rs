//! Debian's Ruby on Rails with an application that Rails itself generated: code
//! that nobody here wrote, for tests on a program of real size.
//!
//! It is served by Debian's Puma, either on Debian's Ruby or on the one built
//! from the same version's source, with YJIT. The latter takes its libraries,
//! gems and their compiled extensions from the same root file system.

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use super::RECIPE_FILE;
use super::chroot;
use super::debian;
use super::recipes::Packages;
use crate::cache;
use crate::cmd;

/// Its name for `cargo xtask rubies`.
pub const NAME: &str = "debian-rails";
/// One line for a person.
pub(super) const ABOUT: &str =
    "root file system of Debian trixie with Rails, Puma and a generated application";

const PACKAGES: Packages = Packages {
    suites: &["trixie"],
    include: &[
        "ruby3.3",
        // The program `ruby`, which scripts of the application name.
        "ruby",
        "coreutils",
        "dash",
        "ruby-rails",
        "puma",
        "ruby-sqlite3",
    ],
    ruby: "/usr/bin/ruby3.3",
};

/// Where the application is.
const APPLICATION: &str = "/srv/blog";
/// The application's folder of databases.
const STORAGE: &str = "srv/blog/storage";
/// The database's file there.
const DATABASE: &str = "production.sqlite3";

/// How the application is made, in the root file system.
///
/// `--minimal` and what is skipped besides it leave gems that Debian has. The
/// database's place is given by an environment variable, for `--minimal` leaves
/// it open.
const GENERATE: &str = "\
set -e
rails new /srv/blog --minimal --database=sqlite3 --skip-bundle --skip-git --skip-test \
    --skip-asset-pipeline --skip-brakeman --skip-rubocop --skip-ci
cd /srv/blog
bundle install --local
bin/rails generate scaffold Post title:string body:text
bin/rails db:migrate
bin/rails runner '50.times { |n| Post.create!(title: %(Post #{n}), body: %(Lorem ipsum dolor. ) * 20) }'
";

/// What the application's programs need to know.
const ENVIRONMENT: &[(&str, &str)] = &[
    ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
    ("LANG", "C.UTF-8"),
    ("RAILS_ENV", "production"),
    ("RAILS_LOG_LEVEL", "warn"),
    // Nobody's sessions are to be kept secret.
    ("SECRET_KEY_BASE_DUMMY", "1"),
    ("DATABASE_URL", "sqlite3:storage/production.sqlite3"),
];

/// The Ruby with YJIT, of the version that Debian's gems are compiled for.
const WITH_YJIT: &str = "source-3.3.8";
/// Where its installation appears in the root file system.
const BUILT: &str = "opt/rbprof-test/ruby";
/// The folder in the root file system with the built interpreter's library under
/// the name that Debian's extensions want.
const LIBRARIES: &str = "opt/rbprof-test/lib";

/// The root file system with Rails and the application.
#[derive(Clone, Debug)]
pub struct Rails {
    root: PathBuf,
}

/// A Ruby that serves the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpreter {
    /// Debian's own 3.3.8: stripped, without YJIT.
    Debian,
    /// 3.3.8 as built from source, with symbols, and with YJIT switched on.
    Yjit,
}

/// Rails, from the cache.
///
/// # Errors
/// If it has not been provided yet.
pub fn find() -> Result<Rails> {
    let entry = entry()?;
    if !entry.exists() {
        bail!("Rails is not there: run `cargo xtask rubies {NAME}`");
    }
    Ok(Rails {
        root: debian::root(&entry),
    })
}

impl Rails {
    /// A command that serves the application with `threads` threads on a free port
    /// of 127.0.0.1. Needs root.
    ///
    /// The started process *is* the server, and ends with the thread that starts
    /// it. It says `* Listening on http://127.0.0.1:PORT` on its standard output
    /// when it is ready. `storage` is an empty folder for its database.
    ///
    /// # Errors
    /// If the Ruby has not been provided yet, or the database's rows cannot be
    /// copied.
    pub fn server(
        &self,
        interpreter: Interpreter,
        threads: u32,
        storage: &Path,
    ) -> Result<Command> {
        let rows = self.root.join(STORAGE).join(DATABASE);
        std::fs::copy(&rows, storage.join(DATABASE))
            .with_context(|| format!("copying {}", rows.display()))?;
        let mut shown = vec![(storage, STORAGE)];
        let installation;
        let mut server = match interpreter {
            Interpreter::Debian => chroot::command(&self.root, &shown, OsStr::new(PACKAGES.ruby)),
            Interpreter::Yjit => {
                installation = built()?;
                shown.push((&installation, BUILT));
                let program = Path::new("/").join(BUILT).join("bin/ruby");
                chroot::command(&self.root, &shown, program.as_os_str())
            }
        };
        server
            .args(["/usr/bin/puma", "--dir", APPLICATION])
            .args(["--bind", "tcp://127.0.0.1:0", "--environment", "production"])
            .arg("--threads")
            .arg(format!("{threads}:{threads}"));
        // A server must not outlive the tests, however these end.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(server.get_program())
            .args(server.get_args())
            .env_clear()
            .envs(ENVIRONMENT.iter().copied());
        if interpreter == Interpreter::Yjit {
            command
                .env("RUBY_YJIT_ENABLE", "1")
                .env("LD_LIBRARY_PATH", Path::new("/").join(LIBRARIES))
                .env("RUBYLIB", library_path());
        }
        Ok(command)
    }

    /// A file that the server names, as this process can open it.
    #[must_use]
    pub fn file(&self, inside: &str) -> PathBuf {
        self.root.join(inside.trim_start_matches('/'))
    }
}

/// The installation of the Ruby with YJIT.
fn built() -> Result<PathBuf> {
    let ruby = super::find(WITH_YJIT)?.ruby;
    let prefix = ruby.parent().and_then(Path::parent);
    prefix
        .map(Path::to_path_buf)
        .context("an installation has a bin folder")
}

/// Debian's `$LOAD_PATH`: the built Ruby lacks extensions that Rails wants, and
/// finds gems as Debian's own RubyGems does.
fn library_path() -> String {
    let machine = format!("/usr/lib/{}-linux-gnu/ruby", std::env::consts::ARCH);
    [
        "/usr/lib/ruby/vendor_ruby/3.3.0",
        &format!("{machine}/vendor_ruby/3.3.0"),
        "/usr/lib/ruby/vendor_ruby",
        "/usr/lib/ruby/3.3.0",
        &format!("{machine}/3.3.0"),
    ]
    .join(":")
}

/// Where it is, or will be.
pub(super) fn entry() -> Result<PathBuf> {
    let key = cache::sha256(text().as_bytes());
    let short: String = key.chars().take(12).collect();
    Ok(cache::dir()?.join("rubies").join(format!("{NAME}-{short}")))
}

fn text() -> String {
    // Raise this when the code that follows it changes the result.
    const REVISION: u32 = 1;
    format!("revision {REVISION}\n{PACKAGES:#?}\n{ENVIRONMENT:#?}\n{GENERATE}\n")
}

/// Makes it, if it is not there.
pub(super) fn provide() -> Result<()> {
    let start = Instant::now();
    let entry = entry()?;
    if entry.exists() {
        println!("  {NAME}: already there ({})", entry.display());
        return Ok(());
    }
    println!("  {NAME}: {ABOUT}");
    cache::entry(&entry, |place| {
        std::fs::write(place.join(RECIPE_FILE), text())?;
        debian::build(&PACKAGES, None, place)?;
        let root = debian::root(place);
        generate(&root, &place.join("build.log"))?;
        let libraries = root.join(LIBRARIES);
        cache::create_dir(&libraries)?;
        cache::create_dir(&root.join(BUILT))?;
        symlink(
            "../ruby/lib/libruby.so.3.3",
            libraries.join("libruby-3.3.so.3.3"),
        )
        .context("naming the built library as Debian does")
    })?;
    println!(
        "  {NAME}: done in {:.0} s ({})",
        start.elapsed().as_secs_f64(),
        entry.display()
    );
    Ok(())
}

fn generate(root: &Path, log: &Path) -> Result<()> {
    let mut shell = chroot::command(root, &[], OsStr::new("/bin/sh"));
    shell
        .args(["-c", GENERATE])
        .env_clear()
        .envs(ENVIRONMENT.iter().copied());
    cmd::logged(&mut shell, log)?;
    let rows = root.join(STORAGE).join(DATABASE);
    if !rows.exists() {
        bail!("the application has no {}", rows.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::extension::ADDED;
    use super::*;

    #[test]
    fn what_is_added_lies_where_additions_belong() {
        assert!(BUILT.starts_with(ADDED) && LIBRARIES.starts_with(ADDED));
    }

    #[test]
    fn the_application_is_generated_where_the_server_looks() {
        assert!(GENERATE.contains(&format!("rails new {APPLICATION} ")));
        assert!(GENERATE.contains(&format!("cd {APPLICATION}\n")));
        assert_eq!(format!("/{STORAGE}"), format!("{APPLICATION}/storage"));
        let database = format!("sqlite3:storage/{DATABASE}");
        assert!(ENVIRONMENT.contains(&("DATABASE_URL", &database)));
    }
}
