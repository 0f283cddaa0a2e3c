//! A running agent.

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::io::BufReader;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use tempfile::TempDir;

use crate::http;
use crate::pprof;
use crate::pprof::Counted;
use crate::rig;

/// Samples per second: many, so that what takes milliseconds has some.
pub const FREQUENCY: u32 = 499;

/// An agent with a folder for its profiles; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    lines: Receiver<String>,
    folder: TempDir,
    port: u16,
}

impl Agent {
    /// Starts `rbprof` as an agent and waits until it profiles. `more`: keys of its
    /// configuration.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(rbprof: &Path, more: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        // It is free again when the agent takes it.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
            .local_addr()?
            .port();
        write(folder.path(), port, more)?;
        let mut child = Command::new(rbprof)
            .arg("agent")
            .arg("--config")
            .arg(folder.path().join("agent.toml"))
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = child.stderr.take().context("no pipe from the agent")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                eprintln!("agent: {line}");
                // Nobody may be interested any more.
                drop(sender.send(line));
            }
        });
        let mut agent = Self {
            child,
            lines,
            folder,
            port,
        };
        agent.wait_for_line(": profiling ")?;
        Ok(agent)
    }

    /// Waits until it says a line with `part` in it.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_for_line(&mut self, part: &str) -> Result<String> {
        loop {
            let line = self.lines.recv_timeout(rig::patience());
            let line = line.with_context(|| format!("the agent never said {part:?}"))?;
            if line.contains(part) {
                return Ok(line);
            }
        }
    }

    /// Gives it another configuration and has it read that.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn reload(&self, more: &str) -> Result<()> {
        write(self.folder.path(), self.port, more)?;
        self.signal(libc::SIGHUP)
    }

    fn signal(&self, signal: i32) -> Result<()> {
        let pid = i32::try_from(self.child.id())?;
        // SAFETY: no memory is involved.
        ensure!(unsafe { libc::kill(pid, signal) } == 0, "no such agent");
        Ok(())
    }

    /// Asks it over HTTP. Gives the status and the body.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn get(&self, path: &str) -> Result<(u16, Vec<u8>)> {
        let answer = http::ask(self.port, "GET", path, &[], None)?;
        Ok((answer.status, answer.bytes))
    }

    /// Asks for something that must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn page(&self, path: &str) -> Result<Vec<u8>> {
        let (status, body) = self.get(path)?;
        ensure!(
            status == 200,
            "{path}: {status} {}",
            String::from_utf8_lossy(&body)
        );
        Ok(body)
    }

    /// The value of a metric, with its labels as they are written.
    ///
    /// # Errors
    /// If there is none.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let page = String::from_utf8(self.page("/metrics")?)?;
        let mut lines = page.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("no {name} in {page}"))?;
        Ok(value.parse()?)
    }

    /// What is said of a process.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn target(&self, pid: u32) -> Result<Option<serde_json::Value>> {
        let page = self.page("/targets?format=json")?;
        let all: Vec<serde_json::Value> = serde_json::from_slice(&page)?;
        Ok(all.into_iter().find(|it| it["pid"] == pid))
    }

    /// Waits until a process is profiled, or is not.
    ///
    /// # Errors
    /// If that takes too long.
    pub fn wait_until(&self, pid: u32, is_profiled: bool) -> Result<()> {
        let what = if is_profiled {
            "profiled"
        } else {
            "not profiled"
        };
        self.wait(pid, what, |target| {
            target.is_some_and(|it| it["profiled"] == true) == is_profiled
        })
    }

    /// Waits until something holds of what is said of a process.
    ///
    /// # Errors
    /// If that takes too long.
    pub fn wait_for(
        &self,
        pid: u32,
        what: &str,
        holds: impl Fn(&serde_json::Value) -> bool,
    ) -> Result<()> {
        self.wait(pid, what, |target| target.is_some_and(&holds))
    }

    fn wait(
        &self,
        pid: u32,
        what: &str,
        holds: impl Fn(Option<&serde_json::Value>) -> bool,
    ) -> Result<()> {
        let start = Instant::now();
        loop {
            let target = self.target(pid)?;
            if holds(target.as_ref()) {
                return Ok(());
            }
            if start.elapsed() > rig::patience() {
                bail!("process {pid} is not {what}: {target:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Tells it to end. Gives how, how long that took, and what it has recorded.
    ///
    /// # Errors
    /// If a profile cannot be read.
    pub fn end(mut self) -> Result<Ended> {
        let start = Instant::now();
        self.signal(libc::SIGTERM)?;
        let status = self.child.wait()?;
        let took = start.elapsed();
        let mut profiles = BTreeMap::new();
        for service in std::fs::read_dir(self.folder.path().join("profiles"))? {
            let service = service?.path();
            if !service.is_dir() {
                continue;
            }
            for file in std::fs::read_dir(&service)? {
                let path = file?.path();
                if path.extension().is_some_and(|extension| extension == "gz") {
                    let profile = pprof::read(&std::fs::read(&path)?)
                        .with_context(|| path.display().to_string())?;
                    profiles.insert(path, profile);
                }
            }
        }
        Ok(Ended {
            status,
            took,
            profiles,
        })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn write(folder: &Path, port: u16, more: &str) -> Result<()> {
    let profiles = folder.join("profiles");
    let text = format!(
        "interval = \"1s\"\nfrequency = {FREQUENCY}\ncpu_budget = 100.0\n{more}\n\
         [http]\nlisten = [\"127.0.0.1:{port}\"]\n\
         [files]\ndirectory = {:?}\n",
        profiles.display().to_string()
    );
    std::fs::write(folder.join("agent.toml"), text)?;
    Ok(())
}

/// What an agent leaves behind.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: ExitStatus,
    /// How long that took.
    pub took: Duration,
    /// The profiles that it wrote.
    pub profiles: BTreeMap<PathBuf, pprof::Read>,
}

impl Ended {
    /// All samples.
    pub fn samples(&self) -> impl Iterator<Item = &Counted> {
        self.profiles.values().flat_map(|profile| &profile.samples)
    }

    /// The samples of a process in which a method runs.
    #[must_use]
    pub fn count(&self, pid: u32, method: &str) -> u64 {
        self.samples()
            .filter(|sample| sample.pid == pid && runs(sample, method))
            .map(|sample| sample.count)
            .sum()
    }

    /// The services under which profiles of a process are.
    #[must_use]
    pub fn services(&self, pid: u32) -> Vec<String> {
        let mut services: Vec<String> = (self.profiles.iter())
            .filter(|(_, profile)| profile.samples.iter().any(|sample| sample.pid == pid))
            .filter_map(|(path, _)| Some(path.parent()?.file_name()?.to_str()?.to_owned()))
            .collect();
        services.dedup();
        services
    }
}

/// Whether a method runs in a sample.
#[must_use]
pub fn runs(sample: &Counted, method: &str) -> bool {
    (sample.frames.iter()).any(|frame| &*frame.function.label == method)
}
