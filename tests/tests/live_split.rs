//! Shares of CPU time are measured as they are.

use std::collections::HashMap;

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof_tests::recording::Recorder;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

/// Enough samples that chance alone makes no such difference: where others use
/// the machine, the ticks fall at random.
const FREQUENCY: u64 = 997;
/// Largest difference from the truth, percentage points.
const TOLERANCE: f64 = 2.0;

#[test]
fn on_debian_2_7_4() -> Result<()> {
    shares_are_true("debian-2.7.4")
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    shares_are_true("debian-3.1.2")
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    shares_are_true("source-3.3.8-protected-stripped")
}

fn shares_are_true(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let mut target = Target::start(&mut ruby.script(&rig::workload("split.rb"))?)?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: FREQUENCY,
        ..Options::default()
    })?
    else {
        return Ok(());
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
    let spent: HashMap<&str, f64> = said
        .iter()
        .filter_map(|line| line.strip_prefix("spent\t")?.split_once('\t'))
        .map(|(part, spent)| Ok((part, spent.parse::<f64>()?)))
        .collect::<Result<_>>()?;
    ensure!(spent.len() == 3, "{said:?}");
    let total_samples: f64 = samples.values().sum();
    let total_spent: f64 = spent.values().sum();
    for (part, spent) in spent {
        let truth = spent / total_spent * 100.0;
        let measured = samples.get(part).copied().unwrap_or(0.0) / total_samples * 100.0;
        eprintln!("{name}: {part} {truth:.2}%, measured {measured:.2}% of {total_samples} samples");
        ensure!(
            (measured - truth).abs() <= TOLERANCE,
            "{part} took {truth:.2}% and is shown with {measured:.2}%"
        );
    }
    Ok(())
}
