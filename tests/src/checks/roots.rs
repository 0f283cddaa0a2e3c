//! What has a stack of its own (threads, fibers, ractors) begins with its own
//! frames: the native stack of a fiber ends at its entry.

use anyhow::Result;
use anyhow::ensure;
use rbprof::presentation::NativeFrames;

use super::extension::by_part;
use crate::task::Bench;
use crate::task::IN_DOUBT;
use crate::task::SHAPE_MS;
use crate::task::SLICE_MS;
use crate::task::Task;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time of it all, milliseconds.
    pub cpu_ms: u64,
    /// CPU time of a part at once, milliseconds.
    pub slice_ms: u64,
    /// Samples that are of one of the stacks, at least: threads are made and ended
    /// all the time.
    pub known: f64,
    /// Largest share of stacks that are cut or in doubt.
    pub in_doubt: f64,
    /// What is recorded, each by a command of its own.
    pub native: &'static [NativeFrames],
}

impl Pace {
    /// Of real machines.
    pub const HOST: Self = Self {
        frequency: 997,
        cpu_ms: SHAPE_MS,
        slice_ms: SLICE_MS,
        known: 0.9,
        in_doubt: IN_DOUBT,
        native: &[NativeFrames::Extensions, NativeFrames::All],
    };
    /// Of emulated machines.
    pub const EMULATED: Self = Self {
        frequency: 149,
        cpu_ms: 4_000,
        slice_ms: 200,
        known: 0.8,
        in_doubt: 0.02,
        native: &[NativeFrames::All],
    };
}

/// Each has its own root, and nothing below it: how many samples the smallest
/// recording has.
///
/// # Errors
/// If one has not.
pub fn every_stack_has_its_own(bench: &Bench<'_>, pace: Pace) -> Result<u64> {
    const CPU: &str = "Burn.cpu;~;:burn_cpu;:burn_outer;:burn_middle;:burn_leaf";
    const BLOCK: &str = "Burn.with_block;~;:burn_with_block;:block_outer;:block_middle;:block_leaf";
    let mut chains = vec![
        ("thread", format!("^;block in Roots.thread;{CPU}")),
        ("fiber", format!("^;block in Roots.fiber;{BLOCK}")),
        (
            "block in fiber",
            format!("^;block in Roots.fiber;{BLOCK};~;block (2 levels) in Roots.fiber;Roots.spin"),
        ),
        (
            "fiber in thread",
            format!("^;block (2 levels) in Roots.both;{CPU}"),
        ),
    ];
    // Since 3.0.
    if !bench.ruby.version.starts_with("2.") {
        chains.push(("ractor", "^;block in Roots.ractor;Roots.spin".to_owned()));
    }
    let name = bench.ruby.name;
    let task = Task {
        frequency: pace.frequency,
        cpu_ms: pace.cpu_ms,
        slice_ms: pace.slice_ms,
        native: pace.native,
        ..Task::new(bench, "roots.rb")
    };
    let run = task.run()?;
    run.has_few_doubts(pace.in_doubt)?;
    let mut fewest = u64::MAX;
    for (view, profile) in &run.profiles {
        let found = by_part(profile, *view, &chains);
        eprintln!("{name}: {} of {} known", found.known(), found.all);
        for (part, _) in &chains {
            let count = found.count(part);
            ensure!(
                count * 50 > found.all,
                "{name}: {count} of {part}: {found:#?}"
            );
        }
        ensure!(
            found.known() as f64 >= pace.known * found.all as f64,
            "{name}: {} of {} are known: {found:#?}",
            found.known(),
            found.all
        );
        fewest = fewest.min(found.all);
    }
    Ok(fewest)
}
