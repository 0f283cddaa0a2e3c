//! `cargo xtask rubies`: real Ruby interpreters to profile, from Debian's own
//! packages and built from Debian's source packages, cached outside the tree.
//!
//! Tests start one with [`find`] and [`Installed::command`] or
//! [`Installed::script`].

mod chroot;
pub(crate) mod debian;
mod edits;
pub mod extension;
pub mod foreign;
pub mod guests;
pub mod rails;
mod recipes;
mod source;

use std::collections::VecDeque;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

pub use extension::Extension;
pub use foreign::FOREIGN;
pub use foreign::Foreign;
pub use rails::Rails;
pub use recipes::Recipe;

use crate::cache;
use crate::cmd;
use recipes::Origin;
use recipes::RECIPES;

/// The file in an entry that says what it was made by.
const RECIPE_FILE: &str = "recipe.txt";
/// The folder in a root file system where [`Installed::script`] shows the
/// script's folder.
const WORKLOAD: &str = "workload";

/// An interpreter that is there and can be started.
#[derive(Clone, Debug)]
pub struct Installed {
    /// The recipe's name, such as `source-3.3.8-protected`.
    pub name: &'static str,
    /// What the interpreter calls `RUBY_VERSION`.
    pub version: &'static str,
    /// The root file system that it must be started in, if it has its own.
    /// Starting it then needs root.
    pub root: Option<PathBuf>,
    /// The interpreter's file: inside `root` if there is one, and absolute in
    /// either case.
    pub ruby: PathBuf,
}

impl Installed {
    /// A command that starts the interpreter; add its arguments.
    ///
    /// The started process *is* the interpreter: the child's id is the one to
    /// profile. One with a root file system runs chrooted in a mount namespace
    /// of its own, with `/proc`, so that it sees no file of the host.
    #[must_use]
    pub fn command(&self) -> Command {
        self.start(None)
    }

    /// A command that runs a script of the host; add the script's arguments.
    ///
    /// For an interpreter with a root file system, the script's folder appears
    /// there as `/workload`, and that is where the script finds itself.
    ///
    /// # Errors
    /// If `script` does not exist.
    pub fn script(&self, script: &Path) -> Result<Command> {
        let script = script
            .canonicalize()
            .with_context(|| format!("the script {}", script.display()))?;
        let (Some(dir), Some(file)) = (script.parent(), script.file_name()) else {
            bail!("{} is not a file", script.display());
        };
        let mut command = self.start(Some(dir));
        match self.root {
            Some(_) => command.arg(Path::new("/").join(WORKLOAD).join(file)),
            None => command.arg(&script),
        };
        Ok(command)
    }

    /// The C extension `burn` for this interpreter.
    ///
    /// # Errors
    /// If it has not been built yet.
    pub fn extension(&self) -> Result<Extension> {
        extension::find(recipe(self.name)?)
    }

    fn start(&self, workload: Option<&Path>) -> Command {
        let mut command = match &self.root {
            Some(root) => {
                let shown: Vec<_> = workload.iter().map(|folder| (*folder, WORKLOAD)).collect();
                chroot::command(root, &shown, self.ruby.as_os_str())
            }
            None => Command::new(&self.ruby),
        };
        // Settings of the developer's own Ruby are not for this one.
        for variable in [
            "RUBYOPT",
            "RUBYLIB",
            "GEM_HOME",
            "GEM_PATH",
            "BUNDLE_GEMFILE",
        ] {
            command.env_remove(variable);
        }
        command
    }

    /// The interpreter's own idea of its version.
    fn reported_version(&self) -> Result<String> {
        cmd::output(self.command().args(["-e", "print RUBY_VERSION"]))
    }
}

/// The interpreter of that name, from the cache.
///
/// # Errors
/// If no recipe has the name, or the interpreter has not been provided yet.
pub fn find(name: &str) -> Result<Installed> {
    let recipe = recipe(name)?;
    let entry = entry(recipe)?;
    if !entry.exists() {
        bail!("Ruby {name} is not there: run `cargo xtask rubies {name}`");
    }
    Ok(installed(recipe, &entry))
}

/// The interpreters whose root file systems lie in `folder`, each in a folder of
/// its recipe's name, as in a virtual machine that has no cache; in the order of
/// the recipes. Their extensions are found with [`Extension::of_root`].
///
/// An interpreter that was built is none of them: it has no root of its own.
#[must_use]
pub fn below(folder: &Path) -> Vec<Installed> {
    let here = |recipe: &'static Recipe| {
        let Origin::Packages(packages) = &recipe.origin else {
            return None;
        };
        let root = folder.join(recipe.name);
        root.is_dir().then(|| Installed {
            name: recipe.name,
            version: recipe.version,
            root: Some(root),
            ruby: PathBuf::from(packages.ruby),
        })
    };
    RECIPES.iter().filter_map(here).collect()
}

/// The variable that makes the tests need every interpreter.
pub const EVERY_RUBY: &str = "RBPROF_EVERY_RUBY";

/// The interpreters that the tests need.
pub fn needed() -> impl Iterator<Item = &'static Recipe> {
    let every = std::env::var_os(EVERY_RUBY).is_some();
    RECIPES.iter().filter(move |recipe| every || recipe.needed)
}

/// All interpreters.
pub fn all() -> impl Iterator<Item = &'static Recipe> {
    RECIPES.iter()
}

/// Fetches or builds those interpreters, or, if none is named, those that the
/// tests need, and says what it does.
///
/// One that fails does not stop the others.
///
/// # Errors
/// If a name is unknown, or one of them cannot be had.
pub fn provide(names: &[String]) -> Result<()> {
    let (recipes, foreign, rails) = selected(names)?;
    // Those that share a cache entry are made together; the others see that.
    let mut jobs: Vec<Vec<Job>> = Vec::new();
    for recipe in recipes {
        let same = jobs.iter_mut().find(|job| {
            let first = job.first();
            matches!(first, Some(Job::Recipe(it)) if it.entry_name() == recipe.entry_name())
        });
        match same {
            Some(job) => job.push(Job::Recipe(recipe)),
            None => jobs.push(vec![Job::Recipe(recipe)]),
        }
    }
    jobs.extend(foreign.into_iter().map(|each| vec![Job::Foreign(each)]));
    if rails {
        jobs.push(vec![Job::Rails]);
    }
    let jobs = Mutex::new(VecDeque::from(jobs));
    let failed = Mutex::new(Vec::new());
    // The next one, with the lock given back at once.
    let next = || jobs.lock().ok()?.pop_front();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(job) = next() {
                    for part in job {
                        if let Err(error) = part.provide() {
                            eprintln!("  {}: {error:#}", part.name());
                            if let Ok(mut failed) = failed.lock() {
                                failed.push(part.name());
                            }
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        bail!("not provided: {}", failed.join(", "));
    }
    Ok(())
}

/// How many are fetched or built at the same time: much of `configure`, and some
/// of the rest, takes one processor only.
const AT_ONCE: usize = 2;

/// Something to provide.
enum Job {
    Recipe(&'static Recipe),
    Foreign(&'static Foreign),
    Rails,
}

impl Job {
    const fn name(&self) -> &'static str {
        match self {
            Self::Recipe(recipe) => recipe.name,
            Self::Foreign(foreign) => foreign.name,
            Self::Rails => rails::NAME,
        }
    }

    fn provide(&self) -> Result<()> {
        match self {
            Self::Recipe(recipe) => provide_one(recipe),
            Self::Foreign(foreign) => foreign.provide(),
            Self::Rails => rails::provide(),
        }
    }
}

/// Prints what there is: name, whether the tests need it, whether it is cached
/// and where, and what it is.
///
/// # Errors
/// If a name is unknown or the cache's place is.
pub fn list(names: &[String]) -> Result<()> {
    let (recipes, foreign, rails) = if names.is_empty() {
        (RECIPES.iter().collect(), FOREIGN.iter().collect(), true)
    } else {
        selected(names)?
    };
    let line = |name: &str, needed: bool, entry: &Path, about: &str| {
        let need = if needed { "needed" } else { "extra" };
        let state = if entry.exists() {
            entry.display().to_string()
        } else {
            "not cached".to_owned()
        };
        println!("{name:38} {need:6}  {state}\n{:38} {about}", "");
    };
    for each in recipes {
        line(each.name, each.needed, &entry(each)?, &each.about());
    }
    for each in foreign {
        line(each.name, true, &each.entry()?, &each.about());
    }
    if rails {
        line(rails::NAME, true, &rails::entry()?, rails::ABOUT);
    }
    Ok(())
}

/// Interpreters of this machine, files of others, and whether Rails.
type Selected = (Vec<&'static Recipe>, Vec<&'static Foreign>, bool);

/// Those of these names; those that the tests need if there are no names.
fn selected(names: &[String]) -> Result<Selected> {
    if names.is_empty() {
        return Ok((needed().collect(), FOREIGN.iter().collect(), true));
    }
    let (mut recipes, mut foreign) = (Vec::new(), Vec::new());
    let (rails, names): (Vec<_>, Vec<_>) = names.iter().partition(|name| *name == rails::NAME);
    for name in names {
        match FOREIGN.iter().find(|each| each.name == name) {
            Some(each) => foreign.push(each),
            None => recipes.push(recipe(name)?),
        }
    }
    Ok((recipes, foreign, !rails.is_empty()))
}

fn recipe(name: &str) -> Result<&'static Recipe> {
    RECIPES
        .iter()
        .find(|recipe| recipe.name == name)
        .with_context(|| {
            let known = RECIPES.iter().map(|recipe| recipe.name);
            let others = FOREIGN.iter().map(|it| it.name).chain([rails::NAME]);
            let known: Vec<&str> = known.chain(others).collect();
            format!("no Ruby is called {name}; there are {}", known.join(", "))
        })
}

/// Where the recipe's result is, or will be.
///
/// The folder's name carries a hash of the recipe, so that a changed recipe
/// never finds an old result, and of the folder's own place, which a built Ruby's
/// configuration and debug information name.
fn entry(recipe: &Recipe) -> Result<PathBuf> {
    let dir = cache::dir()?.join("rubies");
    let key = cache::sha256(format!("{}\n{}", recipe.text(), dir.display()).as_bytes());
    let short: String = key.chars().take(12).collect();
    Ok(dir.join(format!("{}-{short}", recipe.entry_name())))
}

fn installed(recipe: &Recipe, entry: &Path) -> Installed {
    let (root, ruby) = match &recipe.origin {
        Origin::Packages(packages) => (Some(debian::root(entry)), PathBuf::from(packages.ruby)),
        Origin::Built(built) => (None, entry.join(built.folder()).join("bin/ruby")),
    };
    Installed {
        name: recipe.name,
        version: recipe.version,
        root,
        ruby,
    }
}

fn provide_one(recipe: &Recipe) -> Result<()> {
    provide_interpreter(recipe)?;
    extension::provide(recipe)
}

fn provide_interpreter(recipe: &Recipe) -> Result<()> {
    let start = Instant::now();
    let entry = entry(recipe)?;
    if entry.exists() {
        println!("  {}: already there ({})", recipe.name, entry.display());
        return Ok(());
    }
    println!("  {}: {}", recipe.name, recipe.about());
    cache::entry(&entry, |place| {
        std::fs::write(place.join(RECIPE_FILE), recipe.text())?;
        match &recipe.origin {
            Origin::Packages(packages) => debian::build(packages, None, place),
            Origin::Built(built) => source::build(built.tree, place, &entry),
        }
    })?;
    // All that came with it: the others will find the entry there.
    RECIPES
        .iter()
        .filter(|other| other.entry_name() == recipe.entry_name())
        .try_for_each(|made| check(made, &installed(made, &entry)))
        .or_else(|error| cache::discard(&entry).and(Err(error)))?;
    println!(
        "  {}: done in {:.0} s ({})",
        recipe.name,
        start.elapsed().as_secs_f64(),
        entry.display()
    );
    Ok(())
}

/// Fails unless the interpreter starts, is what the recipe says, and runs from
/// its own files: one that found another's library would be tested in its name.
fn check(recipe: &Recipe, installed: &Installed) -> Result<()> {
    let version = installed.reported_version()?;
    if version != installed.version {
        bail!("calls itself Ruby {version}, not {}", installed.version);
    }
    if recipe.has_yjit() {
        let enabled =
            cmd::output(
                installed
                    .command()
                    .args(["--yjit", "-e", "print RubyVM::YJIT.enabled?"]),
            )?;
        if enabled != "true" {
            bail!("has no YJIT");
        }
    }
    if let Origin::Built(built) = &recipe.origin {
        let maps = cmd::output(
            installed
                .command()
                .args(["-e", "print File.read('/proc/self/maps')"]),
        )?;
        let prefix = installed
            .ruby
            .parent()
            .and_then(Path::parent)
            .context("an installation has a bin folder")?;
        runs_from(prefix, built.tree.is_shared(), &maps)?;
    }
    Ok(())
}

/// Fails unless the Ruby with these `/proc/PID/maps` consists of the program,
/// and the library if `shared`, of the installation `prefix`.
fn runs_from(prefix: &Path, shared: bool, maps: &str) -> Result<()> {
    // Address, access, offset, device, inode, path.
    let mapped = || {
        maps.lines()
            .filter_map(|line| line.splitn(6, ' ').last())
            .map(|path| Path::new(path.trim_start()))
    };
    let program = prefix.join("bin/ruby");
    if !mapped().any(|path| path == program) {
        bail!("does not run from {}", program.display());
    }
    let mut libraries: Vec<&Path> = mapped()
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libruby"))
        })
        .collect();
    libraries.dedup();
    let own = prefix.join("lib");
    match libraries.as_slice() {
        [] if !shared => Ok(()),
        [library] if shared && library.parent() == Some(&own) => Ok(()),
        _ => bail!("in {}: runs from {libraries:?}", prefix.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
        let error = find("source-1.8.7").unwrap_err().to_string();
        assert!(
            error.contains("source-1.8.7") && error.contains("debian-3.1.2"),
            "{error}"
        );
    }

    #[test]
    fn below_a_folder_are_the_roots_that_lie_there() {
        let folder = std::env::temp_dir().join(format!("rbprof-below-{}", std::process::id()));
        for name in [
            "debian-3.3.8",
            "debian-2.7.4",
            "source-3.3.8",
            "debian-1.8.7",
        ] {
            cache::create_dir(&folder.join(name)).unwrap();
        }
        let found = below(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|ruby| (ruby.name, ruby.root.clone(), &*ruby.ruby))
            .collect();
        assert_eq!(
            found,
            [
                (
                    "debian-2.7.4",
                    Some(folder.join("debian-2.7.4")),
                    Path::new("/usr/bin/ruby2.7")
                ),
                (
                    "debian-3.3.8",
                    Some(folder.join("debian-3.3.8")),
                    Path::new("/usr/bin/ruby3.3")
                ),
            ]
        );
    }

    #[test]
    fn a_changed_recipe_has_another_place() {
        let mut places: Vec<PathBuf> = RECIPES
            .iter()
            .map(|recipe| installed(recipe, &entry(recipe).unwrap()))
            .map(|ruby| ruby.root.unwrap_or(ruby.ruby))
            .collect();
        let Origin::Packages(packages) = &recipe("debian-3.3.8").unwrap().origin else {
            panic!()
        };
        let changed = Recipe {
            origin: Origin::Packages(recipes::Packages {
                suites: &["bookworm"],
                ..*packages
            }),
            ..*recipe("debian-3.3.8").unwrap()
        };
        places.push(debian::root(&entry(&changed).unwrap()));
        let count = places.len();
        places.sort();
        places.dedup();
        assert_eq!(places.len(), count);
    }

    #[test]
    fn a_ruby_of_the_host_is_started_directly() {
        let ruby = Installed {
            name: "x",
            version: "3.3.8",
            root: None,
            ruby: "/opt/ruby".into(),
        };
        assert_eq!(cmd::describe(ruby.command().arg("-v")), "/opt/ruby -v");
    }

    #[test]
    fn a_script_is_found_inside_the_root_file_system() {
        let ruby = Installed {
            name: "x",
            version: "3.1.2",
            root: Some("/r".into()),
            ruby: "/usr/bin/ruby".into(),
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let command = ruby.script(&script).unwrap();
        let args: Vec<_> = command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            args[6..],
            [
                "/r",
                env!("CARGO_MANIFEST_DIR"),
                "workload",
                "--",
                "/usr/bin/ruby",
                "/workload/Cargo.toml"
            ]
        );
    }

    #[test]
    fn a_ruby_that_found_another_library_is_found_out() {
        let line = |path: &str| format!("7f00-7f01 r-xp 00000000 fe:00 12   {path}\n");
        let prefix = Path::new("/opt/a b");
        let own = [
            line("/opt/a b/bin/ruby"),
            line("/opt/a b/lib/libruby.so.3.3.8"),
        ]
        .concat();
        assert!(runs_from(prefix, true, &own).is_ok());
        assert!(runs_from(prefix, false, &own).is_err());
        assert!(runs_from(Path::new("/opt/b"), true, &own).is_err());
        let both = own.clone() + &line("/usr/lib/libruby-3.1.so.3.1");
        assert!(runs_from(prefix, true, &both).is_err());
        let single = line("/opt/a b/bin/ruby");
        assert!(runs_from(prefix, false, &single).is_ok());
        assert!(runs_from(prefix, true, &single).is_err());
    }
}
