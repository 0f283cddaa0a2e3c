//! A Ruby program that is profiled. It talks in lines: it says `ready` and
//! waits for a line before it begins. One that says nothing for longer than
//! [`rig::patience`] is taken for stuck.

use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::process::Child;
use std::process::ChildStdin;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::mpsc::TryRecvError;
use std::sync::mpsc::channel;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use crate::rig;

/// A running program; killed when dropped.
#[derive(Debug)]
pub struct Target {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    heard: Instant,
}

impl Target {
    /// Starts it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .env("CALIBRATIONS", rig::calibrations().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", xtask::cmd::describe(command)))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("no pipe from the target")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            lines,
            heard: Instant::now(),
        })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The lines it says up to `word`, which it must say, and which is not
    /// among them.
    ///
    /// # Errors
    /// If it ends, or says nothing for longer than [`rig::patience`].
    pub fn wait_for(&mut self, word: &str) -> Result<Vec<String>> {
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(rig::patience()) {
                Ok(line) if line == word => return Ok(said),
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Timeout) => bail!("the target never said {word:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the target ended before it said {word:?}: {said:?}")
                }
            }
        }
    }

    /// The next line it says.
    ///
    /// # Errors
    /// If it ends, or says nothing for longer than [`rig::patience`].
    pub fn next_line(&mut self) -> Result<String> {
        let line = self.lines.recv_timeout(rig::patience());
        line.context("the target said nothing more")
    }

    /// Adds what it has said to `said`; `true` once it has said `word`, which
    /// is not added, or closed its output.
    ///
    /// # Errors
    /// If it says nothing for longer than [`rig::patience`].
    pub fn listen(&mut self, word: &str, said: &mut Vec<String>) -> Result<bool> {
        loop {
            match self.lines.try_recv() {
                Ok(line) if line == word => return Ok(true),
                Ok(line) => {
                    self.heard = Instant::now();
                    said.push(line);
                }
                Err(TryRecvError::Disconnected) => return Ok(true),
                Err(TryRecvError::Empty) if self.heard.elapsed() > rig::patience() => {
                    bail!("the target never said {word:?}")
                }
                Err(TryRecvError::Empty) => return Ok(false),
            }
        }
    }

    /// Lets it go on: sends the line that it waits for.
    ///
    /// # Errors
    /// If it does not take any.
    pub fn go_on(&mut self) -> Result<()> {
        self.heard = Instant::now();
        let stdin = self.stdin.as_mut().context("the target takes no input")?;
        stdin.write_all(b"\n")?;
        stdin.flush()?;
        Ok(())
    }

    /// Closes its input and waits for its end.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn end(mut self) -> Result<ExitStatus> {
        self.stdin = None;
        Ok(self.child.wait()?)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
