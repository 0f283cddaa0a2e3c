//! Rubies for virtual machines: Debian's, each with its root file system.

use std::path::Path;
use std::path::PathBuf;

use anyhow::Result;
use anyhow::bail;

use super::FOREIGN;
use super::RECIPES;
use super::debian;
use super::entry;
use super::extension;
use super::recipes::Origin;
use crate::vm::Architecture;

/// The root file system of a Ruby, and the extension that is to be added to it.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The recipe's name, such as `debian-3.3.8`, on every machine.
    pub name: &'static str,
    /// Its root file system.
    pub root: PathBuf,
    /// The folder of the extension `burn.so`, as this machine sees it.
    pub extension: PathBuf,
}

/// All that there are for that machine.
///
/// # Errors
/// If one has not been provided yet.
pub fn guests(architecture: Architecture) -> Result<Vec<Guest>> {
    let guests: Vec<Guest> = match architecture {
        Architecture::Amd64 => RECIPES
            .iter()
            .filter(|recipe| matches!(recipe.origin, Origin::Packages(_)))
            .map(|recipe| {
                Ok(Guest {
                    name: recipe.name,
                    root: debian::root(&entry(recipe)?),
                    extension: extension::host_folder(recipe)?,
                })
            })
            .collect::<Result<_>>()?,
        Architecture::Arm64 => FOREIGN
            .iter()
            .map(|foreign| {
                Ok(Guest {
                    name: foreign.native_name,
                    root: foreign.root()?,
                    extension: extension::foreign_folder(foreign)?,
                })
            })
            .collect::<Result<_>>()?,
    };
    for guest in &guests {
        let missing = |place: &Path| !place.exists();
        if missing(&guest.root) || missing(&guest.extension) {
            bail!(
                "Ruby {} for {} is not there: run `cargo xtask rubies`",
                guest.name,
                architecture.debian()
            );
        }
    }
    Ok(guests)
}
