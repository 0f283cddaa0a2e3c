//! A program that uses the C extension `burn`, recorded by the command `rbprof`
//! as its users start it, and read back from the files that it writes.

use std::collections::HashMap;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use rbprof::presentation::NativeFrames;
use xtask::rubies::Extension;
use xtask::rubies::Installed;

use crate::chains::View;
use crate::checks;
use crate::frames::Jit;
use crate::pprof;
use crate::pprof::Read;
use crate::rig;
use crate::target::Target;

/// A prime, so that nothing in the program keeps in step with it.
const FREQUENCY: u64 = 997;
/// CPU time where only the shape of stacks matters, milliseconds.
pub const SHAPE_MS: u64 = 2_000;
/// CPU time that is spent in one part at once, milliseconds.
pub const SLICE_MS: u64 = 40;
/// Largest share of stacks that are cut or in doubt.
pub const IN_DOUBT: f64 = 0.005;
/// A Ruby whose C library has no unwind tables.
pub const MUSL: &str = "source-3.3.8-musl";
/// What is counted of stacks that are not as they should be.
const DOUBTS: [&str; 7] = [
    "samples lost, ring full",
    MISSING,
    "stacks with native frames in doubt",
    "stacks cut, too deep",
    "stacks cut, memory unreadable",
    "stacks with an unknown frame",
    "unreadable Ruby stacks",
];

const MISSING: &str = "stacks with native frames missing";

/// What it takes to run and record one.
#[derive(Clone, Debug)]
pub struct Bench<'a> {
    /// The command `rbprof`.
    pub rbprof: &'a Path,
    /// The Ruby.
    pub ruby: Installed,
    /// The extension for it.
    pub extension: Extension,
}

/// A program to run and record.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// Where, and with what.
    pub bench: &'a Bench<'a>,
    /// Its name in `workloads/extension`.
    pub script: &'a str,
    /// Whether Ruby compiles it.
    pub jit: Jit,
    /// With the extension that has no symbols.
    pub stripped: bool,
    /// CPU time of it all, milliseconds.
    pub cpu_ms: u64,
    /// CPU time of a part at once, milliseconds.
    pub slice_ms: u64,
    /// Ticks per second.
    pub frequency: u64,
    /// Further variables.
    pub environment: &'a [(&'a str, &'a str)],
    /// It is recorded by as many commands at the same time.
    pub native: &'a [NativeFrames],
}

/// What came of it.
#[derive(Debug)]
pub struct Run {
    ruby: &'static str,
    /// By how they were recorded.
    pub profiles: Vec<(View, Read)>,
    /// CPU time by part, nanoseconds.
    pub spent: HashMap<String, u64>,
}

impl<'a> Task<'a> {
    /// One that is recorded for the shape of its stacks.
    #[must_use]
    pub const fn new(bench: &'a Bench<'a>, script: &'a str) -> Self {
        Self {
            bench,
            script,
            jit: Jit::Off,
            stripped: false,
            cpu_ms: SHAPE_MS,
            slice_ms: SLICE_MS,
            frequency: FREQUENCY,
            environment: &[],
            native: &[NativeFrames::Extensions, NativeFrames::All],
        }
    }

    /// Runs it once, and records it meanwhile.
    ///
    /// # Errors
    /// If it fails, or one of the commands.
    pub fn run(&self) -> Result<Run> {
        let run = self.record();
        run.with_context(|| format!("{} on {}", self.script, self.bench.ruby.name))
    }

    fn record(&self) -> Result<Run> {
        let Bench {
            rbprof,
            ruby,
            extension,
        } = self.bench;
        let folder = if self.stripped {
            &extension.stripped
        } else {
            &extension.folder
        };
        let script = rig::workload("extension").join(self.script);
        let mut target = Target::start(
            ruby.script(&script)?
                .env("RUBYOPT", format!("-W0 {}", self.jit.rubyopt()))
                .env("RUBYLIB", folder)
                .env("CPU_MS", self.cpu_ms.to_string())
                .env("SLICE_MS", self.slice_ms.to_string())
                .envs(self.environment.iter().copied()),
        )?;
        target.wait_for("ready")?;
        let directory = tempfile::tempdir()?;
        let mut recordings = Vec::new();
        for &native in self.native {
            let file = directory.path().join(format!("{native:?}.pb.gz"));
            recordings.push((
                native,
                Recording::start(rbprof, target.pid(), native, self.frequency, &file)?,
                file,
            ));
        }
        for (_, recording, _) in &recordings {
            rig::wait_until_recording(recording.0.id())?;
        }
        for (_, recording, _) in &recordings {
            rig::wait_until_prepared(recording.0.id())?;
        }
        target.go_on()?;
        let said = target.wait_for("finished")?;
        let mut profiles = Vec::new();
        for (native, recording, file) in recordings {
            recording.finish()?;
            let view = View {
                native,
                jit: self.jit,
                stripped: self.stripped,
            };
            profiles.push((view, pprof::read(&std::fs::read(file)?)?));
        }
        target.go_on()?;
        ensure!(target.end()?.success(), "the program failed");
        Ok(Run {
            ruby: ruby.name,
            profiles,
            spent: checks::spent(&said)?,
        })
    }
}

impl Run {
    /// Hardly a stack has missing frames, or may be wrong.
    ///
    /// # Errors
    /// If more are or may be so than [`IN_DOUBT`] of all.
    pub fn is_beyond_doubt(&self) -> Result<()> {
        self.has_few_doubts(IN_DOUBT)
    }

    /// The same with another share.
    ///
    /// # Errors
    /// If more are or may be so than that share.
    pub fn has_few_doubts(&self, allowed: f64) -> Result<()> {
        for (view, profile) in &self.profiles {
            let all: u64 = profile.samples.iter().map(|sample| sample.count).sum();
            for what in DOUBTS {
                // Nobody knows what musl's functions have saved where, and with
                // one of those every thread starts.
                if what == MISSING && self.ruby == MUSL {
                    continue;
                }
                let count = profile.counter(what)?;
                if count > 0 {
                    eprintln!("{:?}: {what}: {count} of {all}", view.native);
                }
                ensure!(
                    count as f64 <= allowed * all as f64,
                    "{:?}: {what}: {count} of {all}",
                    view.native
                );
            }
        }
        Ok(())
    }
}

/// The command, at work; killed when dropped.
struct Recording(Child);

impl Recording {
    fn start(
        rbprof: &Path,
        pid: u32,
        native: NativeFrames,
        frequency: u64,
        file: &Path,
    ) -> Result<Self> {
        let native = match native {
            NativeFrames::Extensions => "extensions",
            NativeFrames::All => "all",
            NativeFrames::None => "none",
        };
        let child = Command::new(rbprof)
            .args(["record", "-q", "--native", native])
            .args(["-F", &frequency.to_string()])
            .args(["--pid", &pid.to_string(), "-o"])
            .arg(file)
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    /// Ends it as Ctrl-C does.
    fn finish(mut self) -> Result<()> {
        let pid = self.0.id().to_string();
        let interrupted = Command::new("kill").args(["-INT", &pid]).status()?;
        ensure!(interrupted.success(), "kill: {interrupted}");
        let status = self.0.wait()?;
        if !status.success() {
            bail!("rbprof: {status}");
        }
        Ok(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
