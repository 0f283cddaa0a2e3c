//! What this machine can test. Where `RBPROF_REQUIRE_ALL` is set, as continuous
//! integration does, nothing may be left out.

use std::path::Path;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use anyhow::bail;
use rbprof::kernel::Options;
use xtask::rubies;
use xtask::rubies::Extension;
use xtask::rubies::Installed;
use xtask::setup;

/// The variable that makes an error of every test that cannot run.
const REQUIRE_ALL: &str = "RBPROF_REQUIRE_ALL";
/// The variable that says where the Ruby programs of the tests are.
const WORKLOADS: &str = "RBPROF_WORKLOADS";
/// After so long without a sign, a program is stuck.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same on a machine that is emulated.
const PATIENCE_WITH_EMULATION: Duration = Duration::from_secs(300);

/// Set on a machine that a test run has made for itself.
static EMULATED: OnceLock<()> = OnceLock::new();

/// This is a machine that was made for the tests, emulated by software: it is
/// slow, and nothing may be left out.
pub fn set_emulated() {
    EMULATED.get_or_init(|| ());
}

/// After so long without a sign of life, a program is taken for stuck.
#[must_use]
pub fn patience() -> Duration {
    match EMULATED.get() {
        Some(()) => PATIENCE_WITH_EMULATION,
        None => PATIENCE,
    }
}

/// Bytes of the ring for a recording in this process. Where that is slow, what it
/// has not read yet would not fit into what is enough elsewhere.
#[must_use]
pub fn ring_bytes() -> u32 {
    match EMULATED.get() {
        Some(()) => 64 << 20,
        None => Options::default().ring_bytes,
    }
}

/// How often a program measures how fast it is before it begins. Where others are
/// given the machine now and then, the best of several attempts is the truth.
#[must_use]
pub fn calibrations() -> u32 {
    match EMULATED.get() {
        Some(()) => 5,
        None => 1,
    }
}

/// Waits, on an emulated machine, until a command that records a program has
/// nothing more to do. It reads the files of the program at first, which takes a
/// moment on real machines and seconds there; until then, native frames are
/// missing.
///
/// # Errors
/// If it ends, or goes on for longer than [`patience`].
pub fn wait_until_prepared(pid: u32) -> Result<()> {
    /// Between two looks, and after so many without any work it is idle.
    const LOOK: Duration = Duration::from_millis(100);
    const IDLE_LOOKS: u32 = 8;
    /// Hundredths of a second of CPU time that idling takes between two looks.
    const IDLING: u64 = 2;
    if EMULATED.get().is_none() {
        return Ok(());
    }
    let start = Instant::now();
    let (mut last, mut idle) = (cpu_time(pid)?, 0);
    while idle < IDLE_LOOKS {
        if start.elapsed() > patience() {
            bail!("process {pid} does not come to rest");
        }
        std::thread::sleep(LOOK);
        let now = cpu_time(pid)?;
        idle = if now - last <= IDLING { idle + 1 } else { 0 };
        last = now;
    }
    Ok(())
}

/// The CPU time of a process, in the kernel's hundredths of a second.
fn cpu_time(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind the name, which may hold anything: state, and ten numbers before
    // those of user and kernel mode.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let mut times = fields.split(' ').skip(11).map(str::parse::<u64>);
    match (times.next(), times.next()) {
        (Some(Ok(user)), Some(Ok(kernel))) => Ok(user + kernel),
        _ => bail!("/proc/{pid}/stat has no times: {stat:?}"),
    }
}

/// Says why a test does nothing, or makes an error of it.
///
/// # Errors
/// If nothing may be left out here.
pub fn skip(why: &str) -> Result<()> {
    if EMULATED.get().is_some() {
        bail!("{why}");
    }
    if std::env::var_os(REQUIRE_ALL).is_some() {
        bail!("{why}, and {REQUIRE_ALL} is set");
    }
    eprintln!("skipped: {why}");
    Ok(())
}

/// The Ruby of that name, if this user can start and record it.
///
/// # Errors
/// If it cannot, and nothing may be left out here; or if it is not one that each
/// run of the tests has, also where it happens to be there.
pub fn ruby(name: &str) -> Result<Option<Installed>> {
    if rubies::all().any(|ruby| ruby.name == name)
        && !rubies::needed().any(|ruby| ruby.name == name)
    {
        bail!("{name} is not a Ruby that each run of the tests has");
    }
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

/// The file of a Ruby program that comes with the tests: in the folder that
/// `RBPROF_WORKLOADS` names, if it is set, else in the source tree.
#[must_use]
pub fn workload(name: &str) -> PathBuf {
    let folder = std::env::var_os(WORKLOADS).map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads"),
        PathBuf::from,
    );
    folder.join(name)
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
/// If it ends before, or does not begin within [`patience`].
pub fn wait_until_recording(pid: u32) -> Result<()> {
    let start = Instant::now();
    while !is_recording(pid) {
        let ended = std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .map_or(true, |stat| stat.contains(") Z "));
        if ended || start.elapsed() > patience() {
            bail!("rbprof (process {pid}) does not record");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
