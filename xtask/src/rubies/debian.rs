//! What comes from a Debian mirror: root file systems, source packages and the
//! files of single packages.
//!
//! The mirror is the one that this machine's apt uses, with another suite; apt
//! checks its signatures against Debian's archive keys.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use super::WORKLOAD;
use super::recipes::Packages;
use super::recipes::Tree;
use crate::cache;
use crate::cmd;

/// The environment variable that names a mirror instead of apt's own.
const MIRROR: &str = "RBPROF_DEBIAN_MIRROR";

/// The keys' file, under the names that Debian's releases give it.
const KEYRINGS: [&str; 2] = [
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];

/// The root file system in a cache entry.
pub(super) fn root(entry: &Path) -> PathBuf {
    entry.join("root")
}

/// Makes a root file system in the new cache entry `place`.
///
/// The packages are unpacked and not configured: that takes seconds, and Ruby
/// does without. `architecture` is another machine's, as Debian calls it.
pub(super) fn build(packages: &Packages, architecture: Option<&str>, place: &Path) -> Result<()> {
    let mirror = mirror()?;
    let keyring = keyring()?;
    let root = root(place);
    let (Some(suite), log) = (packages.suites.first(), place.join("build.log")) else {
        bail!("a root file system is of some suite");
    };
    let settings = place.join("apt.conf");
    std::fs::write(&settings, transport_settings()?)
        .with_context(|| format!("writing {}", settings.display()))?;
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .arg("--variant=extract")
        .args(architecture.map(|name| format!("--architectures={name}")))
        .arg(format!("--aptopt={}", settings.display()))
        .arg(format!("--include={}", packages.include.join(",")))
        .arg(format!("--keyring={keyring}"))
        .arg(suite)
        .arg(&root)
        .args(
            packages
                .suites
                .iter()
                .map(|suite| format!("deb {mirror} {suite} main")),
        );
    cmd::logged(&mut mmdebstrap, &log)?;
    complete(&root)
}

/// How this machine's apt fetches, as apt's configuration text: proxies,
/// certificates, whether a mirror may be out of date. mmdebstrap reads none of
/// the machine's configuration by itself.
fn transport_settings() -> Result<String> {
    Ok(acquire_settings(&cmd::output(
        Command::new("apt-config").arg("dump"),
    )?))
}

/// `dump`: what `apt-config dump` prints. Which indexes to fetch is another
/// matter than how.
fn acquire_settings(dump: &str) -> String {
    dump.lines()
        .filter(|line| line.starts_with("Acquire::") && !line.starts_with("Acquire::IndexTargets"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Adds what Debian's own installation would make by scripts.
fn complete(root: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        if !root.join(name).exists() && root.join("usr").join(name).exists() {
            link(&format!("usr/{name}"), &root.join(name))?;
        }
    }
    for name in ["proc", "sys", "dev", "run", "root", "tmp", WORKLOAD] {
        cache::create_dir(&root.join(name))?;
    }
    let shell = root.join("bin/sh");
    if shell.symlink_metadata().is_err() {
        link("dash", &shell)?;
    }
    // Mount points and files that a test may want to see, on a system without
    // device nodes (mmdebstrap without root makes none).
    let null = root.join("dev/null");
    if !null.exists() {
        File::create(&null).with_context(|| format!("creating {}", null.display()))?;
    }
    Ok(())
}

fn link(target: &str, place: &Path) -> Result<()> {
    symlink(target, place).with_context(|| format!("linking {} to {target}", place.display()))
}

/// The upstream tarball of a source package, from the cache or the mirror.
pub(super) fn tarball(source: &Tree) -> Result<PathBuf> {
    let entry = cache::dir()?
        .join("sources")
        .join(format!("{}-{}", source.package, source.version));
    cache::entry(&entry, |place| download(source, place))?;
    let file = only_file(&entry, ".orig.tar.")?;
    let bytes = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
    let sum = cache::sha256(&bytes);
    if sum != source.sha256 {
        bail!(
            "{} has SHA-256 {sum}, not {}",
            file.display(),
            source.sha256
        );
    }
    Ok(file)
}

fn download(source: &Tree, place: &Path) -> Result<()> {
    let apt = PrivateApt::new(Kind::Source, source.suite, None, &place.join("apt"))?;
    let full = apt.version(source.package, source.version)?;
    let mut get = apt.command("apt-get");
    get.current_dir(place)
        .args(["source", "--download-only"])
        .arg(format!("{}={full}", source.package));
    cmd::output(&mut get)?;
    std::fs::remove_dir_all(place.join("apt")).context("removing apt's lists")
}

/// A folder with the files of a binary package, without those that it depends on,
/// from the cache or the mirror. `architecture` is another machine's, as Debian
/// calls it.
pub(super) fn unpacked(
    package: &str,
    version: &str,
    suite: &str,
    architecture: Option<&str>,
) -> Result<PathBuf> {
    let of_machine = architecture.map_or_else(String::new, |name| format!("-{name}"));
    let entry = cache::dir()?
        .join("packages")
        .join(format!("{package}-{version}-{suite}{of_machine}"));
    cache::entry(&entry, |place| {
        let apt = PrivateApt::new(Kind::Binary, suite, architecture, &place.join("apt"))?;
        let full = apt.version(package, version)?;
        apt.unpack(&format!("{package}={full}"), place, &place.join("files"))?;
        std::fs::remove_dir_all(place.join("apt")).context("removing apt's lists")
    })?;
    Ok(entry.join("files"))
}

/// The file in `dir` whose name holds `part`.
fn only_file(dir: &Path, part: &str) -> Result<PathBuf> {
    let files = std::fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let mut found = files.flatten().map(|file| file.path()).filter(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().contains(part))
    });
    match (found.next(), found.next()) {
        (Some(file), None) => Ok(file),
        _ => bail!("{} does not hold exactly one *{part}*", dir.display()),
    }
}

/// What packages apt is to know of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Source,
    Binary,
}

/// apt with one suite and a state of its own: nothing on the machine changes, and
/// no root is needed.
pub(crate) struct PrivateApt {
    config: PathBuf,
    kind: Kind,
}

impl PrivateApt {
    /// `architecture` is another machine's, as Debian calls it.
    pub(crate) fn new(
        kind: Kind,
        suite: &str,
        architecture: Option<&str>,
        dir: &Path,
    ) -> Result<Self> {
        for part in ["state/lists/partial", "cache/archives/partial"] {
            cache::create_dir(&dir.join(part))?;
        }
        let sources = dir.join("sources.list");
        let word = match kind {
            Kind::Source => "deb-src",
            Kind::Binary => "deb",
        };
        let line = format!(
            "{word} [signed-by={}] {} {suite} main\n",
            keyring()?,
            mirror()?
        );
        std::fs::write(&sources, line).with_context(|| format!("writing {}", sources.display()))?;
        let config = dir.join("apt.conf");
        let dir = dir.display();
        let machine = architecture.map_or_else(String::new, |name| {
            format!("APT::Architecture \"{name}\";\nAPT::Architectures {{ \"{name}\"; }};\n")
        });
        let text = format!(
            "{machine}\
             Dir::Etc::SourceList \"{dir}/sources.list\";\n\
             Dir::Etc::SourceParts \"/dev/null\";\n\
             Dir::State \"{dir}/state\";\n\
             Dir::Cache \"{dir}/cache\";\n\
             APT::Update::Post-Invoke-Success {{}};\n\
             APT::Sandbox::User \"\";\n"
        );
        std::fs::write(&config, text).with_context(|| format!("writing {}", config.display()))?;
        let apt = Self { config, kind };
        cmd::output(apt.command("apt-get").args(["--error-on=any", "update"]))?;
        Ok(apt)
    }

    /// Downloads a package (in apt's notation) into `place` and unpacks its files
    /// into `into`.
    pub(crate) fn unpack(&self, package: &str, place: &Path, into: &Path) -> Result<()> {
        let mut get = self.command("apt-get");
        get.current_dir(place).arg("download").arg(package);
        cmd::output(&mut get)?;
        let file = only_file(place, ".deb")?;
        let mut unpack = Command::new("dpkg-deb");
        cmd::output(unpack.arg("--extract").arg(&file).arg(into))?;
        std::fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))
    }

    /// The packages that `package`, in its newest version, depends on, without
    /// the versions that they must have.
    pub(crate) fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        let mut show = self.command("apt-cache");
        let text = cmd::output(show.args(["show", "--no-all-versions", package]))?;
        Ok(dependencies_in(&text))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Read after the machine's own configuration, so proxies stay in force.
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C");
        command
    }

    /// The Debian version of `package` whose upstream version is `upstream`.
    fn version(&self, package: &str, upstream: &str) -> Result<String> {
        let show: &[&str] = match self.kind {
            Kind::Source => &["showsrc", "--only-source"],
            Kind::Binary => &["show"],
        };
        let text = cmd::output(self.command("apt-cache").args(show).arg(package))?;
        let versions: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("Version: "))
            .collect();
        match of_upstream(&versions, upstream) {
            Some(version) => Ok(version.to_owned()),
            None => bail!(
                "the mirror has no {package} {upstream}, only {}",
                versions.join(", ")
            ),
        }
    }
}

/// What the paragraph of a package in apt's lists says that it depends on.
fn dependencies_in(paragraph: &str) -> Vec<String> {
    let lines = paragraph
        .lines()
        .filter_map(|line| line.strip_prefix("Depends: "));
    let each = lines.flat_map(|line| line.split([',', '|']));
    let names = each.filter_map(|one| one.split_whitespace().next());
    names.map(str::to_owned).collect()
}

/// The first of `versions`, such as `3.3.8-2`, that packages `upstream`.
fn of_upstream<'a>(versions: &[&'a str], upstream: &str) -> Option<&'a str> {
    let upstream_of = |version: &'a str| {
        version
            .rsplit_once('-')
            .map_or(version, |(upstream, _)| upstream)
    };
    versions
        .iter()
        .copied()
        .find(|version| upstream_of(version) == upstream)
}

fn keyring() -> Result<&'static str> {
    KEYRINGS
        .into_iter()
        .find(|file| Path::new(file).exists())
        .context("Debian's archive keys are missing: install debian-archive-keyring")
}

/// The address of a Debian mirror.
fn mirror() -> Result<String> {
    if let Some(mirror) = std::env::var(MIRROR)
        .ok()
        .filter(|mirror| !mirror.is_empty())
    {
        return Ok(mirror);
    }
    // apt itself reads its sources' two notations; only what it has fetched
    // says that it is Debian.
    let targets = cmd::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN)\t$(LABEL)\t$(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    debian_address(&targets).with_context(|| {
        format!("apt knows no Debian mirror: run `apt-get update`, or set {MIRROR} to the address of one")
    })
}

/// `targets`: origin, label, address a line. Suites such as security have an
/// address of their own and another label.
fn debian_address(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let address = line.strip_prefix("Debian\tDebian\t")?;
        Some(address.trim_end_matches('/').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_debians_own_archive() {
        let targets = "Vendor\tVendor\thttp://a.example/apt/\n\
                       Debian\tDebian-Security\thttp://b.example/debian-security/\n\
                       Debian\tDebian\thttp://b.example/debian/\n";
        assert_eq!(
            debian_address(targets).as_deref(),
            Some("http://b.example/debian")
        );
        assert_eq!(
            debian_address("Vendor\tVendor\thttp://a.example/apt/\n"),
            None
        );
    }

    #[test]
    fn dependencies_are_named_without_versions() {
        let paragraph =
            "Package: a\nPre-Depends: z\nDepends: b (= 1.2-1), c | d (>= 3), e\nRecommends: f\n";
        assert_eq!(dependencies_in(paragraph), ["b", "c", "d", "e"]);
        assert!(dependencies_in("Package: a\n").is_empty());
    }

    #[test]
    fn only_settings_of_the_transport_are_passed_on() {
        let dump = "APT \"\";\nAPT::Architecture \"amd64\";\nAcquire \"\";\n\
                    Acquire::IndexTargets \"\";\nAcquire::http::Proxy \"http://p\";\n";
        assert_eq!(
            acquire_settings(dump),
            "Acquire::http::Proxy \"http://p\";\n"
        );
    }

    #[test]
    fn a_version_is_chosen_by_its_upstream_part() {
        let versions = ["3.4.11-1~exp1", "3.4.5-1~exp1"];
        assert_eq!(of_upstream(&versions, "3.4.5"), Some("3.4.5-1~exp1"));
        assert_eq!(of_upstream(&versions, "3.4.1"), None);
        assert_eq!(of_upstream(&["3.3.8"], "3.3.8"), Some("3.3.8"));
    }
}
