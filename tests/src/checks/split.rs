//! Shares of CPU time are measured as they are.

use std::collections::HashMap;

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use xtask::rubies::Installed;

use super::spent;
use crate::recording::Recorder;
use crate::rig;
use crate::target::Target;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// How long the program runs at least, milliseconds.
    pub run_ms: u64,
    /// Largest difference from the truth, percentage points.
    pub tolerance: f64,
}

impl Pace {
    /// Of real machines: enough samples that chance alone makes no such
    /// difference. Where others use the machine, the ticks fall at random.
    pub const HOST: Self = Self {
        frequency: 997,
        run_ms: 10_000,
        tolerance: 2.0,
    };
    /// Of emulated machines: some 3,600 samples, whose shares have a standard deviation
    /// of 0.8 points if their times are random.
    pub const EMULATED: Self = Self {
        frequency: 299,
        run_ms: 12_000,
        tolerance: 3.0,
    };
}

/// The largest difference from the truth that any part has, percentage points.
///
/// # Errors
/// If that is more than the pace allows.
pub fn shares_are_true(ruby: &Installed, pace: Pace) -> Result<Option<f64>> {
    let name = ruby.name;
    let mut target = Target::start(
        ruby.script(&rig::workload("split.rb"))?
            .env("RUN_MS", pace.run_ms.to_string()),
    )?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: pace.frequency,
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

    let mut samples: HashMap<&str, f64> = HashMap::new();
    for seen in &recording.seen {
        let part = seen.frames.iter().find_map(|frame| {
            ["large", "medium", "small"]
                .into_iter()
                .find(|part| *frame.function.label == format!("Parts#{part}"))
        });
        if let Some(part) = part {
            *samples.entry(part).or_default() += 1.0;
        }
    }
    let spent: HashMap<String, f64> = spent(&said)?;
    ensure!(spent.len() == 3, "{said:?}");
    let total_samples: f64 = samples.values().sum();
    let total_spent: f64 = spent.values().sum();
    let mut largest = 0.0_f64;
    for (part, spent) in spent {
        let truth = spent / total_spent * 100.0;
        let measured = samples.get(&*part).copied().unwrap_or(0.0) / total_samples * 100.0;
        eprintln!("{name}: {part} {truth:.2}%, measured {measured:.2}% of {total_samples} samples");
        ensure!(
            (measured - truth).abs() <= pace.tolerance,
            "{part} took {truth:.2}% and is shown with {measured:.2}%"
        );
        largest = largest.max((measured - truth).abs());
    }
    Ok(Some(largest))
}
