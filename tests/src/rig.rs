//! What this machine can test. Where `RBPROF_REQUIRE_ALL` is set, as continuous
//! integration does, nothing may be left out.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use anyhow::bail;
use xtask::rubies;
use xtask::rubies::Extension;
use xtask::rubies::Installed;
use xtask::setup;

/// The variable that makes an error of every test that cannot run.
const REQUIRE_ALL: &str = "RBPROF_REQUIRE_ALL";
/// A recording that has not begun after so long never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// Says why a test does nothing, or makes an error of it.
///
/// # Errors
/// If nothing may be left out here.
pub fn skip(why: &str) -> Result<()> {
    if std::env::var_os(REQUIRE_ALL).is_some() {
        bail!("{why}, and {REQUIRE_ALL} is set");
    }
    eprintln!("skipped: {why}");
    Ok(())
}

/// The Ruby of that name, if this user can start and record it.
///
/// # Errors
/// If it cannot, and nothing may be left out here.
pub fn ruby(name: &str) -> Result<Option<Installed>> {
    if !setup::is_root() {
        skip("recording needs root")?;
        return Ok(None);
    }
    match rubies::find(name) {
        Ok(ruby) => Ok(Some(ruby)),
        Err(error) => {
            skip(&error.to_string())?;
            Ok(None)
        }
    }
}

/// The C extension `burn` for that Ruby, if it has been built.
///
/// A script that requires it finds it with `RUBYLIB` set to one of its folders.
///
/// # Errors
/// If it has not, and nothing may be left out here.
pub fn extension(ruby: &Installed) -> Result<Option<Extension>> {
    match ruby.extension() {
        Ok(extension) => Ok(Some(extension)),
        Err(error) => {
            skip(&error.to_string())?;
            Ok(None)
        }
    }
}

/// The file of a Ruby program that comes with the tests.
#[must_use]
pub fn workload(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "workloads", name]
        .iter()
        .collect()
}

/// A file of process `pid`, by the path that its mappings show, as this process
/// can open it.
#[must_use]
pub fn file_of(pid: u32, path: &str) -> PathBuf {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    // The mappings of a program in a `chroot` show where that is.
    let inside = std::fs::read_link(&root)
        .ok()
        .filter(|of_program| of_program != Path::new("/"))
        .and_then(|of_program| {
            Path::new(path)
                .strip_prefix(of_program)
                .ok()
                .map(PathBuf::from)
        });
    let inside = inside.unwrap_or_else(|| path.trim_start_matches('/').into());
    root.join(inside)
}

/// Whether that process has the clock's events open, as rbprof has while it
/// records.
#[must_use]
pub fn is_recording(pid: u32) -> bool {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        let number = descriptor.file_name();
        // Since Linux 5.15 the event stands behind a link to the program.
        std::fs::read_link(descriptor.path())
            .is_ok_and(|to| to.as_os_str() == "anon_inode:[perf_event]")
            || std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.display()))
                .is_ok_and(|info| info.contains("link_type:\tperf"))
    })
}

/// Waits until the rbprof with that process id records.
///
/// # Errors
/// If it ends before, or does not begin within a minute.
pub fn wait_until_recording(pid: u32) -> Result<()> {
    let start = Instant::now();
    while !is_recording(pid) {
        let ended = std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .map_or(true, |stat| stat.contains(") Z "));
        if ended || start.elapsed() > PATIENCE {
            bail!("rbprof (process {pid}) does not record");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
