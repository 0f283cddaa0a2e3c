//! The program `workloads/frames.rb`, which holds stacks of every shape, and
//! the comparison of what was recorded with what it says of itself.

use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Executed;
use rbprof::symbolize::Resolved;
use rbprof_common::wire::Counter;
use xtask::rubies::Installed;

use crate::points::Point;
use crate::points::TrueFrame;
use crate::pprof::Counted;
use crate::recording::Recorder;
use crate::recording::Recording;
use crate::recording::Seen;
use crate::rig;
use crate::target::Target;

/// The labels that Ruby 3.4 prints for the points of `frames.rb`.
pub const LABELS: &str = include_str!("../truth/live-frames.labels");
/// CPU time at each point, milliseconds.
pub const SPIN_MS: &str = "20";
/// Ticks per second: 20 in each point.
pub const FREQUENCY: u64 = 997;
/// Samples that each point must have at least.
pub const ENOUGH: u64 = 5;
/// What rbprof calls a C method whose name it does not know.
const NAMELESS: &str = "<unknown cfunc>";
/// What rbprof calls the garbage collector.
const COLLECTION: &str = "(garbage collection)";
/// What the names of Ruby's own files begin with.
const INTERNAL: &str = "<internal:";
/// How many samples there may be for one with names that are withheld.
const WHOLE_TO_WITHHELD: u64 = 50;

/// Whether Ruby compiles what it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jit {
    /// It does not.
    Off,
    /// YJIT, which compiles everything before it runs for the first time.
    Yjit,
}

impl Jit {
    /// What goes into `RUBYOPT`. Without RubyGems, `require` is Ruby's own.
    #[must_use]
    pub const fn rubyopt(self) -> &'static str {
        match self {
            Self::Off => "--disable-gems",
            Self::Yjit => "--disable-gems --yjit --yjit-call-threshold=1",
        }
    }
}

/// Starts `frames.rb`, up to where it waits to begin.
///
/// # Errors
/// If it does not come that far.
pub fn start(ruby: &Installed, spin_ms: &str, jit: Jit) -> Result<Target> {
    let mut command = ruby.script(&rig::workload("frames.rb"))?;
    start_with(command.env("RUBYOPT", jit.rubyopt()), spin_ms)
}

/// The same, with a command that runs it in some way of its own.
///
/// # Errors
/// As [`start`].
pub fn start_with(command: &mut Command, spin_ms: &str) -> Result<Target> {
    command.env("SPIN_MS", spin_ms);
    if !command
        .get_envs()
        .any(|(name, value)| name == "RUBYOPT" && value.is_some())
    {
        command.env("RUBYOPT", Jit::Off.rubyopt());
    }
    let mut target = Target::start(command)?;
    target.wait_for("ready")?;
    Ok(target)
}

/// Records a program that waits to begin, up to its last point, and gives what it
/// said as well; `None` if this machine does not allow it.
///
/// # Errors
/// If it cannot be recorded, or fails.
pub fn record(target: Target) -> Result<Option<(Vec<String>, Recording)>> {
    record_at(FREQUENCY, target)
}

/// The same with so many ticks per second.
///
/// # Errors
/// As [`record`].
pub fn record_at(frequency: u64, target: Target) -> Result<Option<(Vec<String>, Recording)>> {
    let pid = target.pid();
    record_with(frequency, target, pid, || Ok(()))
}

/// The same where the program has the process id `pid` here; `look` is called
/// again and again meanwhile.
///
/// # Errors
/// As [`record`], and those of `look`.
pub fn record_as(
    target: Target,
    pid: u32,
    look: impl FnMut() -> Result<()>,
) -> Result<Option<(Vec<String>, Recording)>> {
    record_with(FREQUENCY, target, pid, look)
}

fn record_with(
    frequency: u64,
    mut target: Target,
    pid: u32,
    mut look: impl FnMut() -> Result<()>,
) -> Result<Option<(Vec<String>, Recording)>> {
    let Some(mut recorder) = Recorder::new(&Options {
        frequency,
        ring_bytes: rig::ring_bytes(),
        ..Options::default()
    })?
    else {
        return Ok(None);
    };
    recorder.start(&[pid])?;
    target.go_on()?;
    let mut said = Vec::new();
    recorder.run_until(|| {
        look()?;
        target.listen("finished", &mut said)
    })?;
    let recording = recorder.finish()?;
    target.go_on()?;
    let status = target.end()?;
    ensure!(status.success(), "the target: {status}");
    Ok(Some((said, recording)))
}

/// Compares each sample of a recording with the point that it was taken at.
///
/// # Errors
/// If one has another stack, or a point has hardly any samples.
pub fn compare(points: &[Point], recording: &Recording, jit: Jit) -> Result<()> {
    compare_some(points, recording, jit, ENOUGH).map(|_| ())
}

/// The same where each point must have `enough` samples; gives how many samples
/// there were.
///
/// # Errors
/// As [`compare`].
pub fn compare_some(points: &[Point], recording: &Recording, jit: Jit, enough: u64) -> Result<u64> {
    let mut wrong = Vec::new();
    let (mut whole, mut withheld, mut lineless) = (0, 0, 0);
    for point in points {
        let mut seen: Vec<&Seen> = recording
            .seen
            .iter()
            .filter(|seen| seen.tid == point.tid && (point.begin..=point.end).contains(&seen.time))
            // The first tick may be before the time is spent, and elsewhere.
            .filter(|seen| place_of("Points.at", &seen.frames).is_none())
            .collect();
        // Where a `while` ends, Ruby 2.7 has instructions of no line.
        if seen.last().is_some_and(|seen| has_left_the_loop(seen, jit)) {
            seen.pop();
            lineless += 1;
        }
        let (partly, wholly): (Vec<&Seen>, Vec<&Seen>) = seen
            .into_iter()
            .partition(|seen| is_withheld(&seen.frames, jit));
        whole += wholly.len();
        for seen in &partly {
            println!("{}: withheld in {:?}", point.name, seen.frames);
        }
        let partly = partly.len() as u64;
        withheld += partly;
        if (wholly.len() as u64) < enough {
            wrong.push(format!(
                "{}: only {} samples, {partly} with names withheld, in {} ms",
                point.name,
                wholly.len(),
                (point.end - point.begin) / 1_000_000
            ));
        }
        for (index, seen) in wholly.into_iter().enumerate() {
            // The first may be on the way from what begins the point to where
            // it is: one that YJIT compiles at that moment takes a while.
            if index == 0 && is_around(point, &seen.frames, jit) {
                continue;
            }
            lineless += usize::from(seen.frames.first().is_some_and(has_no_line));
            if let Err(error) = same_stack(point, &seen.frames, jit)
                .with_context(|| format!("flags {:#x}", seen.flags))
            {
                wrong.push(format!("{}: {error:#}", point.name));
                break;
            }
        }
    }
    println!("{lineless} samples without the leaf's line");
    for lost in [Counter::LostSample, Counter::LostStack] {
        let count = recording.counters.get(lost);
        if count > 0 {
            println!("{lost:?}: {count}");
        }
    }
    verdict(
        points,
        &wrong,
        whole as u64,
        withheld,
        recording.account.disbelieved + recording.account.unreadable,
    )?;
    Ok(whole as u64)
}

/// Fails if C methods have no names, or there are none. What the collector may
/// have got hold of has no name either; rbprof counts that.
///
/// # Errors
/// As said.
pub fn c_methods_have_names(recording: &Recording) -> Result<()> {
    let is_c = |frame: &&Resolved| frame.function.kind == FunctionKind::CFunction;
    let (mut with, mut without) = (0, 0);
    for seen in &recording.seen {
        let mut c_methods = seen.frames.iter().filter(is_c).peekable();
        if c_methods.peek().is_none() {
            continue;
        }
        if c_methods.any(|frame| frame.function.label.contains(NAMELESS)) {
            without += 1;
        } else {
            with += 1;
        }
    }
    let counted = recording.account.disbelieved + recording.account.unreadable;
    ensure!(
        with > 0 && without <= counted && without * WHOLE_TO_WITHHELD <= with,
        "{with} samples with names of C methods, {without} without, {counted} counted as such"
    );
    Ok(())
}

/// Compares the samples of a profile with points: every point's stack must be
/// there in its thread, and every stack that ends on the line of a point must
/// be a point's, or what is around one just before and after it.
///
/// # Errors
/// If a stack is another, or a point has hardly any samples.
pub fn compare_profile(points: &[Point], samples: &[Counted]) -> Result<()> {
    let mut wrong = Vec::new();
    let (mut whole, mut withheld, mut around) = (0, 0, 0);
    let mut counts = vec![0; points.len()];
    for sample in samples {
        // Machine code is of no concern here.
        let frames: Vec<Resolved> = sample
            .frames
            .iter()
            .filter(|frame| {
                !matches!(
                    frame.code,
                    Executed::Native { .. } | Executed::Kernel { .. }
                )
            })
            .cloned()
            .collect();
        let Some(leaf) = own_frames(&frames).first() else {
            continue;
        };
        let mut here = points
            .iter()
            .zip(&mut counts)
            .filter(|(point, _)| {
                let of_point = point.frames.first();
                point.tid == sample.tid && of_point.is_some_and(|of_point| is_place(leaf, of_point))
            })
            .peekable();
        if here.peek().is_none() {
            continue;
        }
        if is_withheld(&frames, Jit::Off) {
            withheld += sample.count;
            continue;
        }
        whole += sample.count;
        let mut errors = Vec::new();
        let mut found = false;
        for (point, count) in here {
            if is_around(point, &frames, Jit::Off) {
                around += sample.count;
                found = true;
            }
            match same_stack(point, &frames, Jit::Off) {
                Ok(()) => {
                    *count += sample.count;
                    found = true;
                }
                Err(error) => errors.push(format!("{}: {error:#}", point.name)),
            }
        }
        if !found {
            wrong.push(errors.join("\n  or "));
        }
    }
    for (point, count) in points.iter().zip(counts) {
        if count < ENOUGH {
            wrong.push(format!("{}: only {count} samples", point.name));
        }
    }
    ensure!(
        around * WHOLE_TO_WITHHELD <= whole,
        "{around} of {whole} samples are around a point, not at it"
    );
    verdict(points, &wrong, whole, withheld, withheld)
}

/// Whether the frames are those around a point that is in a block on the very
/// line.
fn is_around(point: &Point, frames: &[Resolved], jit: Jit) -> bool {
    let frames = own_frames(frames);
    let inner = point.frames.len().checked_sub(frames.len());
    let around = inner.and_then(|inner| point.frames.get(inner..));
    inner != Some(0)
        && around.is_some_and(|around| {
            let mut both = frames.iter().zip(around).enumerate();
            both.all(|(at, (frame, truth))| {
                let may_lack_line = jit == Jit::Yjit && at == 0;
                same_frame(frame, truth, around.get(at + 1), may_lack_line).is_ok()
            })
        })
}

fn verdict(
    points: &[Point],
    wrong: &[String],
    whole: u64,
    withheld: u64,
    counted: u64,
) -> Result<()> {
    ensure!(
        wrong.is_empty(),
        "{} of {} points are wrong:\n{}",
        wrong.len(),
        points.len(),
        wrong.join("\n")
    );
    // Names that the collector may have got hold of before rbprof did are
    // shown as unknown, and counted, as are those that cannot be read. That is rare,
    // and never without a count.
    println!("{whole} samples whole, {withheld} with names withheld, {counted} counted as such");
    ensure!(
        withheld <= counted,
        "{withheld} withheld, {counted} counted"
    );
    ensure!(
        withheld * WHOLE_TO_WITHHELD <= whole,
        "{withheld} of {whole} withheld"
    );
    Ok(())
}

/// Whether a sample has names or lines that rbprof does not vouch for.
///
/// Machine code does not keep the leaf's place up to date; rbprof says so, with
/// no line, as Ruby does.
fn is_withheld(frames: &[Resolved], jit: Jit) -> bool {
    let frames = without_collector(frames);
    frames.iter().enumerate().any(|(at, frame)| {
        let unread = matches!(&*frame.function.label, "<unreadable>" | NAMELESS);
        let compiled = jit == Jit::Yjit && at == 0;
        unread || !compiled && has_no_line(frame)
    })
}

/// Whether nothing is missing but the line of the innermost frame, which Ruby code
/// runs.
fn has_left_the_loop(seen: &Seen, jit: Jit) -> bool {
    let frames = without_collector(&seen.frames);
    frames.split_first().is_some_and(|(leaf, callers)| {
        has_no_line(leaf)
            && &*leaf.function.label != "<unreadable>"
            && !is_withheld(callers, Jit::Off)
            && jit == Jit::Off
    })
}

/// Where a sample has the outermost frame with that label.
fn place_of(label: &str, frames: &[Resolved]) -> Option<usize> {
    frames
        .iter()
        .rposition(|frame| &*frame.function.label == label)
}

fn has_no_line(frame: &Resolved) -> bool {
    frame.function.kind == FunctionKind::Ruby && frame.line == 0
}

/// The frames that Ruby itself knows of: those of the garbage collector stand on
/// top of them.
fn without_collector(frames: &[Resolved]) -> &[Resolved] {
    let above = place_of(COLLECTION, frames).map_or(0, |at| at + 1);
    frames.get(above..).unwrap_or_default()
}

/// The frames around a point, without those of what frames it.
fn own_frames(frames: &[Resolved]) -> &[Resolved] {
    let frames = without_collector(frames);
    // The first and the last tick may be in there.
    let own = frames
        .iter()
        .rposition(|frame| matches!(&*frame.function.label, "Points.at" | "Points.done"))
        .map_or(0, |at| at + 1);
    frames.get(own..).unwrap_or_default()
}

fn same_stack(point: &Point, frames: &[Resolved], jit: Jit) -> Result<()> {
    let all = without_collector(frames).len();
    let frames = own_frames(frames);
    let is_leaf = |at| jit == Jit::Yjit && all == frames.len() && at == 0;
    let describe = || {
        let is: Vec<String> = frames.iter().map(show).collect();
        let should: Vec<String> = point.frames.iter().map(show_true).collect();
        let few = |lines: &[String]| {
            lines
                .iter()
                .take(12)
                .cloned()
                .collect::<Vec<_>>()
                .join("\n    ")
        };
        format!(
            "{} frames\n    {}\n  instead of {}\n    {}",
            is.len(),
            few(&is),
            should.len(),
            few(&should)
        )
    };
    ensure!(frames.len() == point.frames.len(), "{}", describe());
    for (at, (frame, truth)) in frames.iter().zip(&point.frames).enumerate() {
        same_frame(frame, truth, point.frames.get(at + 1), is_leaf(at))
            .with_context(|| format!("frame {at}: {}", describe()))?;
    }
    Ok(())
}

fn same_frame(
    frame: &Resolved,
    truth: &TrueFrame,
    caller: Option<&TrueFrame>,
    may_lack_line: bool,
) -> Result<()> {
    let function = &frame.function;
    let place = caller.map_or(("-", 0), |caller| (&*caller.file, caller.line));
    let is_where_called = (truth.file.as_str(), truth.line) == place;
    if function.kind == FunctionKind::CFunction {
        // Ruby says that a C method is where it was called.
        ensure!(is_where_called, "no C method: {}", show_true(truth));
        ensure!((&*function.file, frame.line) == ("<cfunc>", 0), "its place");
    } else if is_where_called && function.file.starts_with(INTERNAL) {
        // From 3.4 on Ruby says so of its own methods that are written in Ruby
        // as well, such as `Array#each` under YJIT; rbprof says where they are.
        ensure!(frame.line > 0 || may_lack_line, "its line");
    } else {
        ensure!(*function.file == truth.file, "its file");
        ensure!(
            frame.line == truth.line || may_lack_line && has_no_line(frame),
            "its line"
        );
    }
    ensure!(*function.base_label == truth.base_label, "its name");
    ensure!(*function.label == truth.label, "its label");
    Ok(())
}

fn is_place(frame: &Resolved, truth: &TrueFrame) -> bool {
    (&*frame.function.file, frame.line) == (&truth.file, truth.line)
}

fn show(frame: &Resolved) -> String {
    let function = &frame.function;
    format!("{} {}:{}", function.label, function.file, frame.line)
}

fn show_true(frame: &TrueFrame) -> String {
    format!("{} {}:{}", frame.label, frame.file, frame.line)
}
