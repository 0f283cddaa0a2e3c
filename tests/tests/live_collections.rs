//! The garbage collector's work stands on top of the stack that made it
//! necessary, in the thread that does it and in no other.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::symbolize::Executed;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Seen;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const FREQUENCY: u64 = 997;
/// Samples of a thread in a phase that are enough.
const ENOUGH: usize = 200;
/// How far a share in samples may be from what the program measured.
const TOLERANCE: f64 = 0.05;
/// Of the samples in a collection, those of the part of it that is rarest.
const RAREST: f64 = 0.02;

#[test]
fn on_debian_2_7_4() -> Result<()> {
    collections_are_where_they_belong("debian-2.7.4", &["collects", "sweeps"])
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    collections_are_where_they_belong("debian-3.1.2", &ALL)
}

#[test]
fn on_debian_3_3_8() -> Result<()> {
    collections_are_where_they_belong("debian-3.3.8", &ALL)
}

#[test]
fn on_debian_3_4_11() -> Result<()> {
    collections_are_where_they_belong("debian-3.4.11", &ALL)
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    collections_are_where_they_belong("source-3.3.8-protected-stripped", &ALL)
}

#[test]
fn on_static_3_4_5() -> Result<()> {
    collections_are_where_they_belong("source-3.4.5-static-stripped", &ALL)
}

/// What `collections.rb` goes through from Ruby 3.1 on.
const ALL: [&str; 5] = ["collects", "sweeps", "litters", "compacts", "ractors"];

/// A phase of `collections.rb`, as that measured it.
struct Phase {
    name: String,
    tid: u32,
    begin: u64,
    end: u64,
    /// CPU time of the collector in that of the thread.
    share: f64,
}

impl Phase {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.strip_prefix("phase\t")?.split('\t');
        let name = fields.next()?.to_owned();
        let tid = fields.next()?.parse().ok()?;
        let mut number = || fields.next()?.parse::<u64>().ok();
        let (begin, end, collecting, cpu) = (number()?, number()?, number()?, number()?);
        Some(Self {
            name,
            tid,
            begin,
            end,
            share: collecting as f64 / cpu as f64,
        })
    }

    /// Its samples, of its own thread and of others.
    fn samples<'a>(&self, seen: &'a [Seen]) -> (Vec<Sample<'a>>, Vec<Sample<'a>>) {
        seen.iter()
            .filter(|seen| (self.begin..=self.end).contains(&seen.time))
            .map(Sample::new)
            .partition(|sample| sample.tid == self.tid)
    }
}

/// A sample's frames, leaf first.
struct Sample<'a> {
    tid: u32,
    collector: Vec<&'a str>,
    ruby: Vec<&'a str>,
}

impl<'a> Sample<'a> {
    fn new(seen: &'a Seen) -> Self {
        let (collector, ruby): (Vec<_>, Vec<_>) = seen
            .frames
            .iter()
            .partition(|frame| frame.code == Executed::Collector);
        let labels = |frames: Vec<&'a rbprof::symbolize::Resolved>| {
            frames
                .into_iter()
                .map(|frame| &*frame.function.label)
                .collect()
        };
        Self {
            tid: seen.tid,
            collector: labels(collector),
            ruby: labels(ruby),
        }
    }

    /// What the collector was doing; empty if that is something else.
    fn phase(&self) -> Result<Option<&'a str>> {
        match *self.collector.as_slice() {
            [] => Ok(None),
            ["(garbage collection)"] => Ok(Some("")),
            [phase, "(garbage collection)"] => Ok(Some(phase)),
            ref other => anyhow::bail!("frames of the collector: {other:?}"),
        }
    }
}

fn collections_are_where_they_belong(name: &str, phases: &[&str]) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let mut target = Target::start(&mut ruby.script(&rig::workload("collections.rb"))?)?;
    let said = target.wait_for("ready")?;
    let outsider = said
        .iter()
        .find_map(|line| line.strip_prefix("outsider\t")?.parse().ok())
        .context("no outsider")?;
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
    target.go_on()?;
    ensure!(target.end()?.success(), "the target failed");

    let measured: Vec<Phase> = said.iter().filter_map(|line| Phase::parse(line)).collect();
    let names: Vec<&str> = measured.iter().map(|phase| &*phase.name).collect();
    ensure!(names == phases, "the target went through {names:?}");
    for seen in &recording.seen {
        ensure!(
            seen.frames
                .iter()
                .skip_while(|frame| frame.code == Executed::Collector)
                .all(|frame| frame.code != Executed::Collector),
            "the collector is below Ruby: {:?}",
            Sample::new(seen).ruby
        );
    }
    for phase in &measured {
        let (own, others) = phase.samples(&recording.seen);
        check(phase, &own, &others, outsider, name)
            .with_context(|| format!("{name}, phase {}", phase.name))?;
    }
    Ok(())
}

fn check(
    phase: &Phase,
    own: &[Sample<'_>],
    others: &[Sample<'_>],
    outsider: u32,
    ruby: &str,
) -> Result<()> {
    let mut collecting = Vec::new();
    for sample in own {
        if let Some(what) = sample.phase()? {
            collecting.push((what, &sample.ruby));
        }
    }
    let share = collecting.len() as f64 / own.len() as f64;
    let part = |what: &str| {
        let count = collecting.iter().filter(|(is, _)| *is == what).count();
        count as f64 / collecting.len() as f64
    };
    let others_collecting: Vec<&Sample<'_>> = others
        .iter()
        .filter(|sample| !sample.collector.is_empty())
        .collect();
    eprintln!(
        "{ruby}, {}: {} samples, {:.1}% collecting ({:.1}% measured): {:.0}% marking, {:.0}% \
         sweeping, {:.0}% compacting, {:.1}% other; {} of {} elsewhere",
        phase.name,
        own.len(),
        100.0 * share,
        100.0 * phase.share,
        100.0 * part("(marking)"),
        100.0 * part("(sweeping)"),
        100.0 * part("(compacting)"),
        100.0 * part(""),
        others_collecting.len(),
        others.len(),
    );
    ensure!(own.len() >= ENOUGH, "only {} samples", own.len());
    let difference = (share - phase.share).abs();
    ensure!(
        difference < TOLERANCE,
        "{share} collecting, {} measured",
        phase.share
    );
    let (callers, needed): (&[&str], &[&str]) = match phase.name.as_str() {
        "collects" => (&["GC.start", "Object#collects"], &["(marking)"]),
        "sweeps" => (
            &["GC.start", "Object#collects"],
            &["(marking)", "(sweeping)"],
        ),
        "litters" => (&["Object#litters"], &["(marking)", "(sweeping)"]),
        // What is compacted all the time often cannot be named. Ruby 3.1 moves
        // objects while it sweeps.
        "compacts" if ruby.contains("3.1") => (&["GC.compact"], &["(sweeping)"]),
        "compacts" => (&["GC.compact"], &["(compacting)"]),
        _ => (&[], &[]),
    };
    // What is freed before rbprof has read it is said to be unreadable.
    let is_withheld = |below: &[&str]| below.first().is_some_and(|it| it.starts_with('<'));
    let withheld = collecting.iter().filter(|(_, below)| is_withheld(below));
    ensure!(
        withheld.count() * 20 <= collecting.len().max(20),
        "too many names are withheld"
    );
    for (_, below) in collecting.iter().filter(|(_, below)| !is_withheld(below)) {
        // Ruby allocates in C methods and in Ruby's own.
        let right = match callers {
            [allocates] if phase.name == "litters" => below.contains(allocates),
            callers => below.starts_with(callers),
        };
        ensure!(right, "collecting on behalf of {below:?}");
    }
    for what in needed {
        ensure!(part(what) > RAREST, "{what} in {} of them", part(what));
    }
    if phase.name == "ractors" {
        ensure!(
            collecting.is_empty(),
            "{} samples of the Ractor that makes no garbage",
            collecting.len()
        );
        ensure!(
            others_collecting.len() >= ENOUGH / 10,
            "{} samples of the other Ractor collecting",
            others_collecting.len()
        );
        return Ok(());
    }
    ensure!(
        others_collecting.is_empty(),
        "{} of {} samples of other threads are said to collect",
        others_collecting.len(),
        others.len()
    );
    // Before 3.0, a thread without the GVL has no frames.
    if phase.name == "collects" && !ruby.contains("2.7") {
        let seen = others.iter().filter(|sample| sample.tid == outsider);
        ensure!(seen.count() >= ENOUGH / 10, "the outsider was hardly seen");
    }
    Ok(())
}
