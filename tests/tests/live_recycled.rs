//! Names never come from what was thrown away: methods that are defined, run
//! and thrown away all the time, so that Ruby uses their memory again.

#![expect(
    clippy::indexing_slicing,
    reason = "a test that looks past the end has failed"
)]

use std::collections::HashMap;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::profile::Function;
use rbprof::profile::Profile;
use rbprof::symbolize::Resolved;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Seen;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const FREQUENCY: u64 = 997;
/// How long methods are made and thrown away, milliseconds.
const RUN_MS: &str = "4000";

#[test]
fn on_debian_2_7_4() -> Result<()> {
    names_are_of_what_ran("debian-2.7.4")
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    names_are_of_what_ran("debian-3.1.2")
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    names_are_of_what_ran("source-3.3.8-protected-stripped")
}

fn names_are_of_what_ran(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let mut target = Target::start(
        ruby.script(&rig::workload("recycled.rb"))?
            .env("RUN_MS", RUN_MS),
    )?;
    target.wait_for("ready")?;
    let options = Options {
        frequency: FREQUENCY,
        ..Options::default()
    };
    // One looks at every sample; the other is a user's.
    let Some(mut recorder) = Recorder::new(&options)? else {
        return Ok(());
    };
    let Some(mut user) = Recorder::unobserved(&options)? else {
        return Ok(());
    };
    recorder.start(&[target.pid()])?;
    user.start(&[target.pid()])?;
    target.go_on()?;
    let mut said = Vec::new();
    recorder.run_until(|| {
        user.session().poll()?;
        target.listen("finished", &mut said)
    })?;
    let recording = recorder.finish()?;

    let ran = times(&said)?;
    let (mut right, mut unknown, mut wrong) = (0, 0, Vec::new());
    let mut strayed = Strayed::default();
    for seen in &recording.seen {
        for (at, frame) in seen.frames.iter().enumerate() {
            let number = number(&frame.function);
            let unread = &*frame.function.label == "<unreadable>";
            let partly = frame.line == 0
                || frame.function.file.is_empty()
                || number.is_some_and(|number| number % 3 != 1)
                    && frame.function.label == frame.function.base_label;
            unknown += usize::from(unread || number.is_some() && partly);
            let Some(number) = number else {
                continue;
            };
            strayed.look_at(&frame.function, number);
            match was_so(seen, at, frame, number, &ran) {
                Ok(()) => right += 1,
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
    }
    eprintln!(
        "{name}: {} methods, {right} right, {unknown} unknown, {} wrong, {} read again, {} not believed",
        ran.len(),
        wrong.len(),
        recording.account.renamed,
        recording.account.disbelieved
    );
    ensure!(
        wrong.is_empty(),
        "{} wrong: {:#?}",
        wrong.len(),
        wrong.first()
    );
    // How many depends on how soon this process gets its turn.
    strayed.is_none()?;
    ensure!(unknown < right, "{unknown} unknown, {right} right");
    ensure!(right > ran.len() / 2, "only {right} samples in methods");
    ensure!(ran.len() > 100, "only {} methods", ran.len());
    counts_are_possible(&user.finish()?.profile, &ran)
}

/// A profile does not tell when its samples were taken, but no method can have
/// more of them than the clock ticked while it ran.
fn counts_are_possible(profile: &Profile, ran: &HashMap<u64, (u64, u64)>) -> Result<()> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    let mut strayed = Strayed::default();
    for (stack, _, count) in profile.counts() {
        for location in profile.stack(stack) {
            let function = profile
                .location(location)
                .and_then(|location| profile.function(location.function));
            let Some((function, number)) =
                function.and_then(|function| Some((function, number(function)?)))
            else {
                continue;
            };
            strayed.look_at(function, number);
            *counts.entry(number).or_default() += count;
        }
    }
    strayed.is_none()?;
    let mut impossible = Vec::new();
    for (number, count) in &counts {
        let (begin, end) = ran
            .get(number)
            .with_context(|| format!("m_{number} never ran"))?;
        let ticks = (end - begin) as f64 / 1e9 * FREQUENCY as f64;
        if *count as f64 > ticks + 2.0 {
            impossible.push(format!("m_{number}: {count} samples in {ticks:.1} ticks"));
        }
    }
    eprintln!(
        "in the profile: {} methods, {} of them with too many samples",
        counts.len(),
        impossible.len()
    );
    ensure!(impossible.is_empty(), "{impossible:#?}");
    ensure!(
        counts.len() * 2 > ran.len(),
        "only {} methods",
        counts.len()
    );
    Ok(())
}

/// Methods with the file of another.
///
/// Code that was thrown away between its sample and the look at it can still
/// be there while its path is not: where that stood may be another interned
/// string. Only the collector's own count tells.
#[derive(Debug, Default)]
struct Strayed {
    seen: usize,
    strayed: Vec<String>,
}

impl Strayed {
    fn look_at(&mut self, function: &Function, number: u64) {
        self.seen += 1;
        let file = &*function.file;
        if !file.is_empty() && file != format!("/generated/gen_{number}.rb") {
            self.strayed.push(format!("{} in {file}", function.label));
        }
    }

    fn is_none(&self) -> Result<()> {
        let Self { seen, strayed } = self;
        ensure!(
            strayed.is_empty(),
            "{} of {seen} have another's file: {strayed:#?}",
            strayed.len()
        );
        Ok(())
    }
}

/// When each method ran.
fn times(lines: &[String]) -> Result<HashMap<u64, (u64, u64)>> {
    lines
        .iter()
        // What YJIT did is another test's.
        .filter(|line| !line.starts_with("compiled\t"))
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let ["ran", n, begin, end] = fields.as_slice() else {
                anyhow::bail!("not a line of recycled.rb: {line:?}");
            };
            Ok((n.parse()?, (begin.parse()?, end.parse()?)))
        })
        .collect()
}

/// The number of a method that is made and thrown away.
fn number(function: &Function) -> Option<u64> {
    function.base_label.strip_prefix("m_")?.parse().ok()
}

fn was_so(
    seen: &Seen,
    at: usize,
    frame: &Resolved,
    number: u64,
    ran: &HashMap<u64, (u64, u64)>,
) -> Result<()> {
    let function = &frame.function;
    let (begin, end) = ran
        .get(&number)
        .with_context(|| format!("{} never ran", function.label))?;
    ensure!(
        (*begin..=*end).contains(&seen.time),
        "{} did not run at {}, but from {begin} to {end}",
        function.label,
        seen.time
    );
    // The first method is 101, and the three ways follow each other.
    let (label, way) = match number % 3 {
        2 => (format!("Recycled#m_{number}"), "same_class"),
        0 => (format!("C_{number}#m_{number}"), "class_of_its_own"),
        _ => (format!("m_{number}"), "singleton"),
    };
    // What could not be read any more is left out, empty, or 0.
    ensure!(
        *function.label == label || *function.label == format!("m_{number}"),
        "{} is not {label}",
        function.label
    );
    // `def`, an empty line, the two lines of its body, and `end`.
    let lines = [number + 3, number + 4, number + 5, 0];
    ensure!(
        lines.contains(&u64::from(frame.line)),
        "{label} in line {}",
        frame.line
    );
    ensure!(
        u64::from(function.first_line) == number + 1,
        "{label} begins in line {}",
        function.first_line
    );
    let block = format!("block in Recycler#{way}");
    ensure!(
        seen.frames[at + 1..]
            .iter()
            .any(|outer| [&*block, "<unreadable>"].contains(&&*outer.function.label)),
        "{label} was not called from {block}"
    );
    Ok(())
}
