//! Where things are in the source tree.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use anyhow::Result;

/// The folder of the workspace's `Cargo.toml`.
#[must_use]
pub fn root() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own)
}

/// Cargo's target folder, as the build that made this program used it.
///
/// # Errors
/// If this program does not lie in a target folder, that is if somebody copied
/// it elsewhere.
pub fn target_dir() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program's own file")?;
    own.parent()
        .and_then(Path::parent)
        .map(Path::to_path_buf)
        .with_context(|| format!("{} is not in a target folder", own.display()))
}

/// The cargo that runs this task, started in the workspace's root.
#[must_use]
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The pinned toolchain's name, such as `1.95.0`.
///
/// # Errors
/// If `rust-toolchain.toml` cannot be read or names no channel.
pub fn toolchain() -> Result<String> {
    let path = root().join("rust-toolchain.toml");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    channel(&text).with_context(|| format!("{} names no channel", path.display()))
}

fn channel(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "channel").then(|| value.trim().trim_matches('"').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_toolchain_is_read() {
        assert_eq!(
            channel("[toolchain]\nchannel = \"1.95.0\"\n"),
            Some("1.95.0".to_owned())
        );
        assert_eq!(channel("[toolchain]\n"), None);
        assert!(toolchain().unwrap().starts_with("1."));
    }

    #[test]
    fn the_root_is_the_workspace() {
        let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[workspace]"));
    }
}
