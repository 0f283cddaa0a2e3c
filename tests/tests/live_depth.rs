//! Deep stacks arrive, and arrive whole.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Looping;
use rbprof::kernel::Options;
use rbprof_common::wire::Counter;
use rbprof_common::wire::sample_flags;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Seen;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

/// CPU time of one recording, milliseconds.
const CPU_MS: u64 = 2_000;
const FREQUENCY: u64 = 99;
/// Frames that are kept at least where the kernel has no loops.
const LEAST: usize = 2_048;

#[test]
fn on_debian_2_7_4() -> Result<()> {
    for depth in [20, 2_000, 8_000] {
        arrives_whole("debian-2.7.4", depth, Looping::Probe)?;
    }
    Ok(())
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    for depth in [20, 2_000, 8_000] {
        arrives_whole("debian-3.1.2", depth, Looping::Probe)?;
    }
    Ok(())
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    for depth in [20, 2_000, 8_000] {
        arrives_whole("source-3.3.8-protected-stripped", depth, Looping::Probe)?;
    }
    Ok(())
}

#[test]
fn without_loops_in_the_kernel() -> Result<()> {
    // Two frames above and one below the recursion.
    arrives_whole("debian-3.1.2", 2_000, Looping::TailCalls)?;
    is_cut("debian-3.1.2", 8_000, Looping::TailCalls)
}

fn arrives_whole(name: &str, depth: usize, looping: Looping) -> Result<()> {
    let Some(busy) = record(name, depth, looping)? else {
        return Ok(());
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
        "{name}, depth {depth}, {looping:?}: {} due, {whole} whole; {:.1} expected in {:.2} s of CPU time",
        busy.due,
        busy.cpu * FREQUENCY as f64,
        busy.cpu
    );
    ensure!(
        whole as f64 >= 0.99 * busy.due as f64,
        "depth {depth}: {whole} of {} samples are whole",
        busy.due
    );
    busy.was_sampled()
}

/// Too deep for the walk: the inner part is there, and the stack says that
/// the outer part is not.
fn is_cut(name: &str, depth: usize, looping: Looping) -> Result<()> {
    let Some(busy) = record(name, depth, looping)? else {
        return Ok(());
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
        "{name}, depth {depth}, {looping:?}: {} due, {cut} cut",
        busy.due
    );
    ensure!(
        cut as u64 == busy.truncated,
        "{cut} cut, {} counted",
        busy.truncated
    );
    ensure!(
        busy.seen.len() as f64 >= 0.99 * busy.due as f64,
        "{} of {} samples",
        busy.seen.len(),
        busy.due
    );
    busy.was_sampled()
}

/// A recording of a program that was busy all the time.
struct Busy {
    seen: Vec<Seen>,
    /// Ticks that hit the program.
    due: u64,
    truncated: u64,
    /// CPU time that the program took by its own clock, seconds.
    cpu: f64,
}

impl Busy {
    /// The clock ticks in proportion to CPU time. Where others use the machine
    /// the program is interrupted at will, and the number varies.
    fn was_sampled(&self) -> Result<()> {
        let expected = self.cpu * FREQUENCY as f64;
        ensure!(
            self.due as f64 > 0.8 * expected,
            "{} ticks in {:.2} s of CPU time",
            self.due,
            self.cpu
        );
        Ok(())
    }
}

fn record(name: &str, depth: usize, looping: Looping) -> Result<Option<Busy>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(None);
    };
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .env("DEPTH", depth.to_string())
            .env("CPU_MS", CPU_MS.to_string()),
    )?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: FREQUENCY,
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
