//! Debian packages.

use std::process::Command;

use anyhow::Result;
use anyhow::bail;

use crate::cmd;

/// How to tell that a package is not needed.
enum Presence {
    /// The package itself is installed.
    Package,
    /// This program is on `PATH`, from whatever source.
    Program(&'static str),
    /// This program runs successfully; being on `PATH` is not enough.
    Runs(&'static [&'static str]),
}

struct Package {
    name: &'static str,
    presence: Presence,
}

const fn package(name: &'static str) -> Package {
    Package {
        name,
        presence: Presence::Package,
    }
}

const fn program(program: &'static str, name: &'static str) -> Package {
    Package {
        name,
        presence: Presence::Program(program),
    }
}

/// A package since Debian 13; before that, a part of `docker.io`.
const CLIENT_OF_ITS_OWN: &str = "docker-cli";

/// What building and testing need.
const PACKAGES: &[Package] = &[
    // bpf-linker.
    package("llvm-22-dev"),
    package("libzstd-dev"),
    package("zlib1g-dev"),
    // C parts of crates, and the Rubies that are built from source.
    program("c++", "build-essential"),
    program("make", "build-essential"),
    program("strip", "binutils"),
    program("tar", "tar"),
    program("xz", "xz-utils"),
    package("libgmp-dev"),
    program("musl-gcc", "musl-tools"),
    // The Rubies that come as Debian root file systems, and starting them.
    program("mmdebstrap", "mmdebstrap"),
    package("debian-archive-keyring"),
    program("unshare", "util-linux"),
    program("setpriv", "util-linux"),
    program("mount", "mount"),
    // Containers: the tests start an engine of their own.
    program("dockerd", "docker.io"),
    program("docker", CLIENT_OF_ITS_OWN),
    // Virtual machines, and what is built for those that are arm64.
    program("qemu-system-x86_64", "qemu-system-x86"),
    program("qemu-system-aarch64", "qemu-system-arm"),
    program("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    package("libc6-dev-arm64-cross"),
    // The demo.
    program("ruby", "ruby"),
    // Foreign readers of our output: `go tool pprof` and npm's `pprof-format`.
    Package {
        name: "golang-go",
        presence: Presence::Runs(&["go", "tool", "pprof", "-h"]),
    },
    program("node", "nodejs"),
    program("npm", "npm"),
];

/// The packages that are not there, by name.
///
/// # Errors
/// If packages are missing on a system without `dpkg`.
pub fn missing() -> Result<Vec<&'static str>> {
    let names = PACKAGES
        .iter()
        .filter(|package| matches!(package.presence, Presence::Package));
    // Fails when one of them is unknown, and lists the others all the same.
    let listed = Command::new("dpkg-query")
        .args(["--show", "--showformat", "${db:Status-Status} ${Package}\n"])
        .args(names.map(|package| package.name))
        .output();
    let Ok(listed) = listed else {
        bail!(
            "this is not a Debian system (there is no dpkg-query): install what CONTRIBUTING.md lists by its own means"
        );
    };
    Ok(missing_from(&String::from_utf8_lossy(&listed.stdout)))
}

fn missing_from(listed: &str) -> Vec<&'static str> {
    let installed = |name: &str| {
        listed
            .lines()
            .any(|line| line.split_once(' ') == Some(("installed", name)))
    };
    let mut names: Vec<&str> = PACKAGES
        .iter()
        .filter(|package| match package.presence {
            Presence::Package => !installed(package.name),
            Presence::Program(program) => cmd::find(program).is_none(),
            Presence::Runs(words) => !runs(words),
        })
        .map(|package| package.name)
        .collect();
    names.dedup();
    names
}

fn runs(words: &[&str]) -> bool {
    let Some((program, args)) = words.split_first() else {
        return false;
    };
    // `go tool pprof -h` prints its usage and exits with 2; without the tool
    // its usage is not printed.
    Command::new(program)
        .args(args)
        .output()
        .is_ok_and(|output| {
            output.status.success() || String::from_utf8_lossy(&output.stderr).contains("usage:")
        })
}

/// What a person types to install `packages`.
#[must_use]
pub fn install_line(packages: &[&str]) -> String {
    format!(
        "apt-get update && apt-get install --no-install-recommends {}",
        packages.join(" ")
    )
}

/// Installs `packages`, and says what it did.
///
/// # Errors
/// If apt's sources do not offer one of them, or apt fails.
pub fn install(packages: &[&str]) -> Result<String> {
    if packages.is_empty() {
        return Ok("already there".to_owned());
    }
    println!("  installing {}", packages.join(" "));
    // One unreachable source must not stop the others; what is then missing is
    // reported below.
    if let Err(error) = cmd::output(apt_get().arg("update")) {
        println!("  apt-get update: {error:#}");
    }
    let packages = separate(packages)?;
    let unknown = without_candidate(&packages)?;
    if !unknown.is_empty() {
        bail!("{}", explain_unknown(&unknown));
    }
    let mut install = apt_get();
    install
        .args(["install", "--yes", "--quiet", "--no-install-recommends"])
        .args(&packages);
    cmd::output(&mut install)?;
    Ok(format!("installed {}", packages.join(" ")))
}

/// The packages without those that are part of others on this system.
///
/// # Errors
/// If apt cannot be asked.
pub fn separate<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let unknown = without_candidate(packages)?;
    let is_part = |name: &str| name == CLIENT_OF_ITS_OWN && unknown.contains(&name);
    Ok(packages
        .iter()
        .copied()
        .filter(|name| !is_part(name))
        .collect())
}

/// `apt-get` that asks no questions.
pub(super) fn apt_get() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    apt
}

/// Those that apt's sources do not offer.
pub(super) fn without_candidate<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let policy = cmd::output(
        Command::new("apt-cache")
            .env("LC_ALL", "C")
            .arg("policy")
            .args(packages),
    )?;
    Ok(packages
        .iter()
        .copied()
        .filter(|package| !has_candidate(&policy, package))
        .collect())
}

/// `policy` is what `apt-cache policy` prints: a paragraph a package, headed
/// `name:`, its second line `Candidate: version` or `Candidate: (none)`. A
/// package that apt has never heard of has no paragraph.
fn has_candidate(policy: &str, package: &str) -> bool {
    policy
        .lines()
        .skip_while(|line| line.strip_suffix(':') != Some(package))
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        .any(|line| {
            line.trim()
                .strip_prefix("Candidate: ")
                .is_some_and(|version| version != "(none)")
        })
}

fn explain_unknown(packages: &[&str]) -> String {
    let mut text = format!("apt's sources offer no {}", packages.join(", no "));
    if packages.contains(&"llvm-22-dev") {
        text.push_str(
            "\nllvm-22-dev: Debian 12 has it in its security suite (bookworm-security), later releases in the \
             release itself; add that suite to apt's sources, or install LLVM 22 with its headers by other means",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installed_package_counts() {
        let all: String = PACKAGES
            .iter()
            .map(|package| format!("installed {}\n", package.name))
            .collect();
        assert!(!missing_from(&all).contains(&"llvm-22-dev"));
        let removed = all.replace("installed llvm-22-dev", "config-files llvm-22-dev");
        assert!(missing_from(&removed).contains(&"llvm-22-dev"));
        assert!(missing_from("").contains(&"libzstd-dev"));
    }

    #[test]
    fn candidates_are_read_from_the_policy() {
        let policy = "llvm-22-dev:\n  Installed: (none)\n  Candidate: 1:22.1.8-1\n  Version table:\n     1:22.1.8-1 500\n\
                      npm:\n  Installed: (none)\n  Candidate: (none)\n  Version table:\n";
        assert!(has_candidate(policy, "llvm-22-dev"));
        assert!(!has_candidate(policy, "npm"));
        assert!(!has_candidate(policy, "never-heard-of"));
    }

    #[test]
    fn the_line_to_type_names_every_package() {
        assert_eq!(
            install_line(&["a", "b"]),
            "apt-get update && apt-get install --no-install-recommends a b"
        );
    }

    #[test]
    fn an_absent_llvm_is_explained() {
        assert!(explain_unknown(&["llvm-22-dev"]).contains("bookworm-security"));
        assert!(!explain_unknown(&["npm"]).contains("LLVM"));
    }
}
