//! The kernels, from Debian's packages.

use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use super::machines::Machine;
use crate::cache;
use crate::rubies::debian::Kind;
use crate::rubies::debian::PrivateApt;

/// The kernel's file in a cache entry, and the one that names its release.
const FILE: &str = "vmlinuz";
const RELEASE: &str = "release";

/// The file of a machine's kernel, from the cache or the mirror.
pub(super) fn provide(machine: &Machine) -> Result<PathBuf> {
    let entry = entry(machine)?;
    cache::entry(&entry, |place| fetch(machine, place))
        .with_context(|| format!("fetching the kernel of {}", machine.name()))?;
    Ok(entry.join(FILE))
}

/// Its release, such as `6.12.9-cloud-amd64`; `None` if it has not been fetched.
pub(super) fn release(machine: &Machine) -> Option<String> {
    let release = std::fs::read_to_string(entry(machine).ok()?.join(RELEASE)).ok()?;
    Some(release.trim().to_owned())
}

/// Where it is, or will be.
fn entry(machine: &Machine) -> Result<PathBuf> {
    let recipe = format!("{} {} {}", machine.version, machine.suite, machine.package);
    let key: String = cache::sha256(recipe.as_bytes()).chars().take(12).collect();
    let name = machine.name().replace(' ', "-");
    Ok(cache::dir()?.join("kernels").join(format!("{name}-{key}")))
}

fn fetch(machine: &Machine, place: &Path) -> Result<()> {
    let architecture = machine.architecture.debian();
    let lists = place.join("apt");
    let apt = PrivateApt::new(Kind::Binary, machine.suite, Some(architecture), &lists)?;
    // What depends on the newest one; since 7.x, that has its file in a package
    // that it depends on.
    let image = only(&apt.dependencies(machine.package)?, "linux-image-")?;
    let release = image.trim_start_matches("linux-image-");
    if !release.starts_with(&format!("{}.", machine.version)) {
        bail!(
            "Debian {} has Linux {release}, not {}",
            machine.suite,
            machine.version
        );
    }
    let binary =
        only(&apt.dependencies(&image)?, "linux-binary-").unwrap_or_else(|_| image.clone());
    let files = place.join("files");
    apt.unpack(&binary, place, &files)?;
    // Since 7.x it lies beside its modules.
    let file = [
        format!("boot/vmlinuz-{release}"),
        format!("usr/lib/modules/{release}/vmlinuz"),
    ]
    .iter()
    .map(|file| files.join(file))
    .find(|file| file.exists())
    .with_context(|| format!("no kernel in {binary}"))?;
    std::fs::copy(&file, place.join(FILE))
        .with_context(|| format!("copying {}", file.display()))?;
    std::fs::write(place.join(RELEASE), release)?;
    for folder in [files, lists] {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("removing {}", folder.display()))?;
    }
    Ok(())
}

/// The name that begins so, of which there must be one.
fn only(names: &[String], beginning: &str) -> Result<String> {
    let mut found = names.iter().filter(|name| name.starts_with(beginning));
    match (found.next(), found.next()) {
        (Some(name), None) => Ok(name.clone()),
        _ => bail!("not exactly one {beginning}* among {names:?}"),
    }
}
