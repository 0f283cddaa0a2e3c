//! The npm package pprof-format, to read our profiles with.
//!
//! `read.js` prints a profile for comparison. Needs Node.js with npm; where one is
//! missing that is said, unless `RBPROF_REQUIRE_ALL=1` is set, as in CI.

use std::env;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;

/// Whether a program can be run; if not, why the test is skipped.
///
/// # Errors
/// If it cannot, and must.
pub fn available(program: &str, argument: &str) -> Result<bool> {
    let found = Command::new(program)
        .arg(argument)
        .output()
        .is_ok_and(|output| output.status.success());
    let required = env::var_os("RBPROF_REQUIRE_ALL").is_some_and(|value| value == "1");
    ensure!(found || !required, "`{program} {argument}` does not run");
    if !found {
        eprintln!("skipped: `{program} {argument}` does not run; `cargo xtask setup` installs it");
    }
    Ok(found)
}

/// A directory with `read.js` and what it needs, kept between runs; `None` if it
/// cannot be run here.
///
/// # Errors
/// If it cannot be installed, or cannot be run and must.
pub fn reader() -> Result<Option<PathBuf>> {
    if !available("node", "--version")? || !available("npm", "--version")? {
        return Ok(None);
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("pprof-format");
    let target = env::current_exe()?;
    let target = target.parent().context("no folder of this program")?;
    let cache = target.join("pprof-format");
    fs::create_dir_all(&cache)?;
    // Tests run at once.
    let lock = fs::File::create(cache.join("lock"))?;
    lock.lock()?;
    let content = fs::read(source.join("package-lock.json"))?;
    let installed = cache.join("installed-package-lock.json");
    for name in ["package.json", "package-lock.json", "read.js"] {
        fs::copy(source.join(name), cache.join(name))?;
    }
    if fs::read(&installed).is_ok_and(|known| known == content) {
        return Ok(Some(cache));
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]);
    let output = npm.current_dir(&cache).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "npm ci: {stderr}");
    fs::write(installed, content)?;
    Ok(Some(cache))
}
