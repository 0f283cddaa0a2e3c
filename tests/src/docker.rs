//! A Docker engine of the tests' own: its data, its socket and all else are in
//! a temporary folder, so that one that runs on the machine is left alone. It
//! is gone with its value, and all its containers with it.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use tempfile::TempDir;
use xtask::cmd;
use xtask::rubies::Installed;
use xtask::setup;

use crate::rig;

/// An engine that does not answer for so long is stuck.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same for each step at the end, when it is killed otherwise.
const LAST_PATIENCE: Duration = Duration::from_secs(8);
/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// A running engine.
#[derive(Debug)]
pub struct Docker {
    engine: Child,
    patience: Duration,
    /// After the engine: it must be there until that has ended.
    directory: TempDir,
}

impl Docker {
    /// Starts an engine; `None` if this user cannot, or there is no Docker.
    ///
    /// # Errors
    /// If it does not come up, or nothing may be left out here.
    pub fn start() -> Result<Option<Self>> {
        if !setup::is_root() {
            rig::skip("a container engine needs root")?;
            return Ok(None);
        }
        for program in ["dockerd", "docker"] {
            if cmd::find(program).is_none() {
                rig::skip(&format!(
                    "there is no {program}: `cargo xtask setup` installs it"
                ))?;
                return Ok(None);
            }
        }
        // Sockets have short paths.
        let directory = tempfile::Builder::new().prefix("rbprof").tempdir()?;
        let path = directory.path();
        // Not those of the machine's engine, nor of the user.
        std::fs::write(path.join("daemon.json"), "{}")?;
        std::fs::create_dir(path.join("client"))?;
        let log = File::create(path.join("log"))?;
        // Should this thread die, so does the engine, with its containers.
        let engine = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "--", "dockerd"])
            .args(["--iptables=false", "--ip6tables=false", "--bridge=none"])
            .arg("--config-file")
            .arg(path.join("daemon.json"))
            .arg("--data-root")
            .arg(path.join("data"))
            .arg("--exec-root")
            .arg(path.join("exec"))
            .arg("--pidfile")
            .arg(path.join("pid"))
            .arg(format!("--host=unix://{}/socket", path.display()))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting setpriv")?;
        let mut docker = Self {
            engine,
            patience: PATIENCE,
            directory,
        };
        docker.wait_until_up()?;
        Ok(Some(docker))
    }

    fn wait_until_up(&mut self) -> Result<()> {
        let begin = Instant::now();
        while !self.directory.path().join("socket").exists() {
            let ended = self.engine.try_wait()?;
            if ended.is_some() || begin.elapsed() > PATIENCE {
                bail!(
                    "the container engine does not come up ({ended:?}):\n{}",
                    self.log()
                );
            }
            std::thread::sleep(INTERVAL);
        }
        self.run(&["version"]).map(drop)
    }

    /// An engine that does not answer for so long is stuck, from now on.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The engine's process id, and the folder of all that it has.
    #[must_use]
    pub fn engine(&self) -> (u32, &Path) {
        (self.engine.id(), self.directory.path())
    }

    fn log(&self) -> String {
        let log = std::fs::read(self.directory.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let skip = log.lines().count().saturating_sub(20);
        log.lines().skip(skip).collect::<Vec<_>>().join("\n")
    }

    /// The client of this engine; add what it is to do.
    #[must_use]
    pub fn client(&self) -> Command {
        let mut client = Command::new("docker");
        self.address(&mut client);
        client
    }

    /// The same, for something that is done in a moment.
    fn impatient_client(&self) -> Command {
        let mut client = Command::new("timeout");
        let seconds = self.patience.as_secs().to_string();
        client.args(["--kill-after=2", &seconds, "docker"]);
        self.address(&mut client);
        client
    }

    fn address(&self, client: &mut Command) {
        let path = self.directory.path();
        client
            .arg("--config")
            .arg(path.join("client"))
            .arg(format!("--host=unix://{}/socket", path.display()))
            .env_remove("DOCKER_CONTEXT");
    }

    /// Runs the client, and gives what it prints.
    ///
    /// # Errors
    /// If it fails, or takes too long.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<String> {
        cmd::output(self.impatient_client().args(arguments))
            .with_context(|| format!("the container engine says:\n{}", self.log()))
    }

    /// Runs the client to its end, whatever that is.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn try_run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<Output> {
        let mut client = self.impatient_client();
        Ok(client.args(arguments).stdin(Stdio::null()).output()?)
    }

    /// Makes an image of a Ruby's root file system, with the tests' Ruby
    /// programs in `/workload`.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn import_ruby(&self, image: &str, ruby: &Installed) -> Result<()> {
        let root = ruby.root.as_ref().context("it has no root file system")?;
        let workloads = rig::workload("");
        let parent = workloads.parent().context("no such folder")?;
        self.import(
            image,
            Command::new("tar")
                .args(["-c", "--one-file-system", "--exclude=./workload"])
                .arg("--transform=s,^workloads,./workload,")
                .arg("-C")
                .arg(root)
                .arg(".")
                .arg("-C")
                .arg(parent)
                .arg("workloads"),
        )
    }

    /// Makes an image of a program and the libraries that it is linked with,
    /// as `/program`.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn import_program(&self, image: &str, program: &Path) -> Result<()> {
        let root = self.directory.path().join(image);
        copy_with_libraries(program, &root)?;
        let copy = std::fs::copy(program, root.join("program"));
        copy.with_context(|| format!("copying {}", program.display()))?;
        for directory in ["proc", "sys", "dev", "tmp"] {
            std::fs::create_dir_all(root.join(directory))?;
        }
        self.import(
            image,
            Command::new("tar").arg("-c").arg("-C").arg(root).arg("."),
        )
    }

    fn import(&self, image: &str, tar: &mut Command) -> Result<()> {
        let mut archive = tar.stdout(Stdio::piped()).spawn().context("starting tar")?;
        let bytes = archive.stdout.take().context("no pipe")?;
        let imported = self
            .impatient_client()
            .args(["import", "-", image])
            .stdin(bytes)
            .stdout(Stdio::null())
            .status();
        let packed = archive.wait()?;
        let imported = imported?;
        ensure!(packed.success(), "{}: {packed}", cmd::describe(tar));
        ensure!(
            imported.success(),
            "docker import: {imported}\n{}",
            self.log()
        );
        Ok(())
    }

    /// The process id, here, of a container's first process.
    ///
    /// # Errors
    /// If the container does not run, and does not begin to.
    pub fn pid_of(&self, container: &str) -> Result<u32> {
        let begin = Instant::now();
        loop {
            let inspect = ["inspect", "--format", "{{.State.Status}} {{.State.Pid}}"];
            let output = self.try_run(&[&inspect[..], &[container]].concat())?;
            let state = String::from_utf8_lossy(&output.stdout).into_owned();
            match state.trim().split_once(' ') {
                Some(("running", pid)) => return Ok(pid.parse()?),
                Some(("exited" | "dead", _)) => bail!("container {container} has ended"),
                _ if begin.elapsed() > Duration::from_secs(20) => {
                    bail!("container {container} does not run: {state:?}")
                }
                _ => std::thread::sleep(INTERVAL),
            }
        }
    }

    /// Whether the engine knows a capability by name: that of Debian 12 does
    /// not know `CAP_BPF`.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub fn knows_capability(&self, image: &str, capability: &str) -> Result<bool> {
        let add = format!("--cap-add={capability}");
        let created = self.try_run(&["create", &add, image, "/program"])?;
        Ok(created.status.success())
    }
}

/// Copies the libraries that a program is linked with into `root`, under their
/// own paths.
///
/// # Errors
/// If one of them cannot be copied.
pub fn copy_with_libraries(program: &Path, root: &Path) -> Result<()> {
    std::fs::create_dir_all(root)?;
    let listed = cmd::output(Command::new("ldd").arg(program))?;
    let libraries = listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    let mut copy = Command::new("cp");
    copy.args(["--dereference", "--parents"]);
    copy.args(libraries).arg(root);
    cmd::run(&mut copy)
}

impl Drop for Docker {
    fn drop(&mut self) {
        // Whatever fails here must not keep the rest from being tried.
        let script = r#"
            within=$1; shift
            timeout "$within" "$@" ps --all --quiet |
                timeout "$within" xargs --no-run-if-empty "$@" rm --force"#;
        let mut remove = Command::new("sh");
        remove.args(["-c", script, "sh", &LAST_PATIENCE.as_secs().to_string()]);
        self.address(remove.arg("docker"));
        drop(
            remove
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status(),
        );
        signal("TERM", self.engine.id());
        let begin = Instant::now();
        while matches!(self.engine.try_wait(), Ok(None)) && begin.elapsed() < LAST_PATIENCE {
            std::thread::sleep(INTERVAL);
        }
        drop(self.engine.kill());
        drop(self.engine.wait());
        // What an engine leaves behind that had to be killed.
        let path = self.directory.path();
        for pid in containerds_in(path) {
            // Containers are children of theirs.
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            signal("KILL", pid);
            let children = children.unwrap_or_default();
            for child in children.split_whitespace().filter_map(|id| id.parse().ok()) {
                signal("KILL", child);
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let below = mounts.lines().rev().filter_map(|line| {
            let place = Path::new(line.split(' ').nth(1)?);
            place.starts_with(path).then_some(place)
        });
        for place in below {
            let umount = Command::new("umount").arg("--lazy").arg(place).status();
            drop(umount);
        }
    }
}

/// The processes of the engine in `directory` that are not the engine itself:
/// its containerd, and one for each container.
fn containerds_in(directory: &Path) -> Vec<u32> {
    let directory = directory.as_os_str().as_encoded_bytes();
    let is_one = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let program = line.split(|&byte| byte == 0).next().unwrap_or_default();
        let program = program.rsplit(|&byte| byte == b'/').next();
        program.is_some_and(|program| program.starts_with(b"containerd"))
            && line.windows(directory.len()).any(|part| part == directory)
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| is_one(pid))
        .collect()
}

fn signal(name: &str, pid: u32) {
    let mut kill = Command::new("kill");
    kill.args(["-s", name, &pid.to_string()]);
    // It may be gone.
    drop(kill.stderr(Stdio::null()).status());
}
