//! Deep stacks arrive, and arrive whole.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Looping;
use rbprof::kernel::Options;
use rbprof_common::wire::Counter;
use rbprof_common::wire::sample_flags;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::recording::Seen;
use crate::rig;
use crate::target::Target;

/// Frames that are kept at least where the kernel has no loops.
const LEAST: usize = 2_048;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time of one recording, milliseconds.
    pub cpu_ms: u64,
    /// Share of the samples that arrive whole, at least.
    pub whole: f64,
    /// Share of the ticks that the CPU time gives, at least. Where others use the
    /// machine the program is interrupted at will, and the number varies.
    pub ticks: f64,
}

impl Pace {
    /// Of real machines.
    pub const HOST: Self = Self {
        frequency: 99,
        cpu_ms: 2_000,
        whole: 0.99,
        ticks: 0.8,
    };

    /// Of emulated machines, where thousands of frames take tens of milliseconds.
    #[must_use]
    pub const fn emulated(depth: usize) -> Self {
        Self {
            frequency: if depth > 1_000 { 19 } else { 99 },
            cpu_ms: 1_000,
            whole: 0.95,
            ticks: 0.5,
        }
    }
}

/// A recording of a program that was busy all the time.
#[derive(Debug)]
struct Busy {
    seen: Vec<Seen>,
    /// Ticks that hit the program.
    due: u64,
    truncated: u64,
    /// CPU time that the program took by its own clock, seconds.
    cpu: f64,
}

/// Calls that are deep arrive with each of them: how many samples did.
///
/// # Errors
/// If hardly all of them are whole, or there are fewer than there should be.
pub fn arrives_whole(
    ruby: &Installed,
    depth: usize,
    looping: Looping,
    pace: Pace,
) -> Result<Option<usize>> {
    let Some(busy) = record(ruby, depth, looping, pace)? else {
        return Ok(None);
    };
    let whole = busy
        .seen
        .iter()
        .filter(|seen| {
            let root = seen.frames.last();
            seen.flags & sample_flags::INCOMPLETE == 0
                && root.is_some_and(|frame| &*frame.function.label == "<main>")
                && calls(seen) == depth
        })
        .count();
    eprintln!(
        "{}, depth {depth}, {looping:?}: {} due, {whole} whole; {:.1} expected in {:.2} s of CPU time",
        ruby.name,
        busy.due,
        busy.cpu * pace.frequency as f64,
        busy.cpu
    );
    ensure!(
        whole as f64 >= pace.whole * busy.due as f64,
        "depth {depth}: {whole} of {} samples are whole",
        busy.due
    );
    busy.was_sampled(pace)?;
    Ok(Some(whole))
}

/// Too deep for the walk: the inner part is there, and the stack says that
/// the outer part is not. How many samples were cut.
///
/// # Errors
/// If one is neither cut nor whole, or there are fewer than there should be.
pub fn is_cut(
    ruby: &Installed,
    depth: usize,
    looping: Looping,
    pace: Pace,
) -> Result<Option<usize>> {
    let Some(busy) = record(ruby, depth, looping, pace)? else {
        return Ok(None);
    };
    let mut cut = 0;
    for seen in &busy.seen {
        if seen.flags & sample_flags::TRUNCATED != 0 {
            cut += 1;
            ensure!(seen.frames.len() >= LEAST, "{} frames", seen.frames.len());
            ensure!(
                seen.frames
                    .last()
                    .is_some_and(|frame| &*frame.function.label == "Depth#down"),
                "the outermost frame that was kept: {:?}",
                seen.frames.last()
            );
        } else {
            ensure!(calls(seen) == depth, "{} calls", calls(seen));
        }
    }
    eprintln!(
        "{}, depth {depth}, {looping:?}: {} due, {cut} cut",
        ruby.name, busy.due
    );
    ensure!(
        cut as u64 == busy.truncated,
        "{cut} cut, {} counted",
        busy.truncated
    );
    ensure!(
        busy.seen.len() as f64 >= pace.whole * busy.due as f64,
        "{} of {} samples",
        busy.seen.len(),
        busy.due
    );
    busy.was_sampled(pace)?;
    Ok(Some(cut))
}

impl Busy {
    /// The clock ticks in proportion to CPU time.
    fn was_sampled(&self, pace: Pace) -> Result<()> {
        let expected = self.cpu * pace.frequency as f64;
        ensure!(
            self.due as f64 > pace.ticks * expected,
            "{} ticks in {:.2} s of CPU time",
            self.due,
            self.cpu
        );
        Ok(())
    }
}

fn record(ruby: &Installed, depth: usize, looping: Looping, pace: Pace) -> Result<Option<Busy>> {
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .env("DEPTH", depth.to_string())
            .env("CPU_MS", pace.cpu_ms.to_string()),
    )?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: pace.frequency,
        looping,
        ..Options::default()
    })?
    else {
        return Ok(None);
    };
    recorder.start(&[target.pid()])?;
    target.go_on()?;
    let mut said = Vec::new();
    recorder.run_until(|| target.listen("finished", &mut said))?;
    let recording = recorder.finish()?;
    let spent: f64 = said
        .iter()
        .find_map(|line| line.strip_prefix("spent\t"))
        .context("the target did not say what it spent")?
        .parse()?;
    Ok(Some(Busy {
        seen: recording.seen,
        due: recording.counters.get(Counter::Hit),
        truncated: recording.counters.get(Counter::Truncated),
        cpu: spent / 1e9,
    }))
}

fn calls(seen: &Seen) -> usize {
    seen.frames
        .iter()
        .filter(|frame| &*frame.function.label == "Depth#down")
        .count()
}
