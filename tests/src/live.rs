//! Memory of a Ruby program that is running, for tests that need no kernel
//! half: the program is not stopped, and its stack is read through
//! `/proc/PID/mem`.

use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::process::Child;
use std::process::ChildStdin;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use rbprof::memory::TargetMemory;
use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::layout::Version;
use rbprof_common::memory::Window;

use crate::coredump::MappedFile;
use crate::coredump::Segment;

/// A running Ruby program. Ends with this value.
#[derive(Debug)]
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    memory: File,
    /// What it runs on.
    pub version: Version,
}

impl Program {
    /// Starts `script` with the Ruby named by `RBPROF_TEST_RUBY`, or `ruby`.
    /// The script gets [`Program::PREAMBLE`] before it.
    ///
    /// # Errors
    /// When there is no such Ruby.
    pub fn start(script: &str) -> Result<Self> {
        let ruby = std::env::var("RBPROF_TEST_RUBY").unwrap_or_else(|_| "ruby".into());
        let mut words = ruby.split_whitespace();
        let mut child = Command::new(words.next().unwrap_or("ruby"))
            .args(words)
            .args(["-W0", "-Ku", "-e", &format!("{}\n{script}", Self::PREAMBLE)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {ruby}"))?;
        let input = child.stdin.take().context("no standard input")?;
        let mut output = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut version = String::new();
        output.read_line(&mut version)?;
        let memory = File::open(format!("/proc/{}/mem", child.id()))?;
        Ok(Self {
            child,
            input,
            output,
            memory,
            version: Version::parse(&version).context("no version")?,
        })
    }

    /// What every script begins with: prints the version.
    pub const PREAMBLE: &str = "STDOUT.sync = true; puts RUBY_VERSION";

    /// The next line the program prints.
    ///
    /// # Errors
    /// When it prints no more.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "the program has ended");
        Ok(line.trim_end_matches('\n').to_owned())
    }

    /// Sends a line to the program.
    ///
    /// # Errors
    /// When it has ended.
    pub fn send(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}")?;
        self.input.flush()?;
        Ok(())
    }

    /// Stops the program and waits until all of it has stopped.
    ///
    /// # Errors
    /// When it has ended.
    pub fn stop(&self) -> Result<()> {
        self.signal("-STOP")?;
        while !self.has_stopped()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Lets a stopped program go on.
    ///
    /// # Errors
    /// When it has ended.
    pub fn cont(&self) -> Result<()> {
        self.signal("-CONT")
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let status = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status()?;
        anyhow::ensure!(status.success(), "the program has ended");
        Ok(())
    }

    fn has_stopped(&self) -> Result<bool> {
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let stat = fs::read_to_string(task?.path().join("stat"))?;
            let state = stat.rsplit(") ").next().unwrap_or_default();
            if !state.starts_with('T') {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The title the program has given itself.
    ///
    /// # Errors
    /// When it has ended.
    pub fn title(&self) -> Result<String> {
        let title = fs::read(format!("/proc/{}/cmdline", self.child.id()))?;
        let title = title.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(title).trim_end_matches('.').into())
    }

    /// What memory it has, and which files are mapped there.
    ///
    /// # Errors
    /// When it has ended.
    pub fn maps(&self) -> Result<(Vec<Segment>, Vec<MappedFile>)> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.child.id()))?;
        let mut segments = Vec::new();
        let mut files = Vec::new();
        for line in maps.lines() {
            let mut fields = line.split_whitespace();
            let (start, end) = fields
                .next()
                .and_then(|range| range.split_once('-'))
                .context("a mapping without a range")?;
            let start = u64::from_str_radix(start, 16)?;
            let end = u64::from_str_radix(end, 16)?;
            let writable = fields.next().is_some_and(|flags| flags.contains('w'));
            segments.push(Segment {
                start,
                end,
                writable,
            });
            if let Some(path) = fields.nth(3) {
                files.push(MappedFile {
                    start,
                    end,
                    path: path.to_owned(),
                });
            }
        }
        Ok((segments, files))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TargetMemory for Program {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.memory
            .read_exact_at(buffer, address)
            .map_err(|_| Fault)
    }
}

impl Memory for Program {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        TargetMemory::word(self, addr)
    }

    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault> {
        rbprof::memory::words3(self, addr)
    }

    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault> {
        rbprof::memory::window(self, addr, dst, words)
    }
}
