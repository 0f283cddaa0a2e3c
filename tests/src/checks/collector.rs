//! The garbage collector's work stands on the stack of the thread that does it.

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::rig;
use crate::target::Target;

/// Collects all the time, for a second of CPU time.
const PROGRAM: &str = "
    $stdout.sync = true
    keep = Array.new(100_000) { Object.new }
    puts :ready
    gets
    cpu = -> { Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) }
    finish = cpu.() + 1
    GC.start while cpu.() < finish
    puts :finished
    gets
";
const FREQUENCY: u64 = 99;
/// Samples that there must be at least, and the share of the collector among them.
const ENOUGH: u32 = 30;
const SHARE: f64 = 0.8;
const COLLECTION: &str = "(garbage collection)";
const PHASES: [&str; 2] = ["(marking)", "(sweeping)"];

/// What a program does that collects all the time: how many samples say so, of how
/// many.
///
/// # Errors
/// If too few do.
pub fn collections_are_seen(ruby: &Installed) -> Result<Option<(u32, u32)>> {
    let mut target = Target::start(ruby.command().args(["--disable-gems", "-e", PROGRAM]))?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: FREQUENCY,
        ring_bytes: rig::ring_bytes(),
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
    target.go_on()?;
    ensure!(target.end()?.success(), "the program failed");

    let (mut all, mut collecting, mut phases) = (0_u32, 0_u32, 0_u32);
    for seen in recording.seen.iter().filter(|it| !it.frames.is_empty()) {
        let has = |label: &str| seen.frames.iter().any(|it| &*it.function.label == label);
        all += 1;
        if !has(COLLECTION) {
            continue;
        }
        collecting += 1;
        phases += u32::from(PHASES.iter().any(|phase| has(phase)));
        let root = seen.frames.last().map(|frame| &*frame.function.label);
        ensure!(root == Some("<main>"), "a collection below {root:?}");
    }
    let name = ruby.name;
    eprintln!("{name}: {collecting} of {all} samples of the collector, {phases} in a phase");
    ensure!(all >= ENOUGH, "{all} samples");
    ensure!(
        f64::from(collecting) >= SHARE * f64::from(all)
            && f64::from(phases) >= SHARE * f64::from(collecting),
        "{collecting} of {all} samples of the collector, {phases} in a phase"
    );
    Ok(Some((collecting, all)))
}
