//! Stacks of every shape, compared frame by frame with what the program itself
//! knows: how many frames, their labels as Ruby 3.4 has them, files and lines.
//!
//! On every Ruby of the rig, and where it has YJIT, without and with it: the
//! tests are made from the list of Rubies.

#![expect(
    clippy::indexing_slicing,
    reason = "a test that looks past the end has failed"
)]

use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use libtest_mimic::Arguments;
use libtest_mimic::Trial;
use rbprof::kernel::Options;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;
use rbprof_tests::points;
use rbprof_tests::points::Point;
use rbprof_tests::points::TrueFrame;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Recording;
use rbprof_tests::recording::Seen;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use xtask::rubies;
use xtask::rubies::Installed;

/// The labels that Ruby 3.4 prints for the points of `frames.rb`.
const LABELS: &str = include_str!("../truth/live-frames.labels");
/// CPU time at each point, milliseconds.
const SPIN_MS: &str = "12";
/// Ticks per second: 12 in each point.
const FREQUENCY: u64 = 997;
/// Samples that each point must have at least.
const ENOUGH: usize = 4;
/// What rbprof calls a C method whose name it does not know.
const NAMELESS: &str = "<unknown cfunc>";
/// Methods and blocks of `frames.rb` and `points.rb` that YJIT must have
/// compiled at least: there are about 200.
const COMPILED: u64 = 100;

/// Whether Ruby compiles what it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Jit {
    Off,
    /// YJIT, which compiles everything before it runs for the first time.
    Yjit,
}

impl Jit {
    /// What goes into `RUBYOPT`. Without RubyGems, `require` is Ruby's own.
    const fn rubyopt(self) -> &'static str {
        match self {
            Self::Off => "--disable-gems",
            Self::Yjit => "--disable-gems --yjit --yjit-call-threshold=1",
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = vec![
        trial(
            "the_labels_are_those_that_ruby_3_4_prints".to_owned(),
            the_labels_are_those_that_ruby_3_4_prints,
        ),
        trial(
            "frames_of_a_program_on_the_command_line".to_owned(),
            of_a_program_on_the_command_line,
        ),
    ];
    for ruby in rubies::needed() {
        let name = ruby.name;
        trials.push(trial(format!("frames_on_{name}"), move || {
            frames_are_true(name, Jit::Off)
        }));
        if ruby.has_yjit() {
            trials.push(trial(format!("frames_on_{name}_with_yjit"), move || {
                frames_are_true(name, Jit::Yjit)
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(name: String, test: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name, || test().map_err(|error| format!("{error:#}").into()))
}

fn the_labels_are_those_that_ruby_3_4_prints() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.4.11")? else {
        return Ok(());
    };
    let mut target = start_frames(&ruby, "1", Jit::Off)?;
    target.go_on()?;
    let points = points::parse(&target.wait_for("finished")?)?;
    let labels = points::labels_as_text(&points)?;
    if std::env::var_os("RBPROF_BLESS").is_some() {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/truth/live-frames.labels"),
            &labels,
        )?;
    }
    for (is, should) in LABELS.lines().zip(labels.lines()) {
        ensure!(
            is == should,
            "{is} instead of {should}; RBPROF_BLESS=1 rewrites the file"
        );
    }
    ensure!(LABELS.lines().count() == labels.lines().count());
    Ok(())
}

fn start_frames(ruby: &Installed, spin_ms: &str, jit: Jit) -> Result<Target> {
    let mut target = Target::start(
        ruby.script(&rig::workload("frames.rb"))?
            .env("RUBYOPT", jit.rubyopt())
            .env("SPIN_MS", spin_ms),
    )?;
    target.wait_for("ready")?;
    Ok(target)
}

fn frames_are_true(name: &str, jit: Jit) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let target = start_frames(&ruby, SPIN_MS, jit)?;
    let Some((said, recording)) = record(target)? else {
        return Ok(());
    };
    let compiled = points::compiled(&said)?;
    match jit {
        Jit::Off => ensure!(compiled == 0, "YJIT was on"),
        Jit::Yjit => ensure!(compiled >= COMPILED, "YJIT has compiled only {compiled}"),
    }
    c_methods_have_names(&recording)?;
    let mut points = points::parse(&said)?;
    points::relabel(&mut points, LABELS)?;
    compare(&points, &recording, jit)
}

/// Fails if C methods have no names, or there are none. What the collector may
/// have got hold of has no name either; rbprof counts that.
fn c_methods_have_names(recording: &Recording) -> Result<()> {
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
    let counted = recording.account.disbelieved;
    ensure!(
        with > 0 && without <= counted,
        "{with} samples with names of C methods, {without} without, {counted} counted as such"
    );
    Ok(())
}

/// A program on the command line has no file.
fn of_a_program_on_the_command_line() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let mut program = std::fs::read_to_string(rig::workload("points.rb"))?;
    program.push_str(
        r#"
        Points.ready
        class Inline
          def run
            [1].each { Points.at("inline"); i = 0; i += 1 while i < $spin; Points.done }
          end
        end
        Inline.new.run
        eval('Points.at("eval"); i = 0; i += 1 while i < $spin; Points.done')
        Points.finished
        "#,
    );
    let mut target = Target::start(
        ruby.command()
            .args(["--disable-gems", "-e", &program])
            .env("SPIN_MS", SPIN_MS),
    )?;
    target.wait_for("ready")?;
    let Some((said, recording)) = record(target)? else {
        return Ok(());
    };
    let mut points = points::parse(&said)?;
    points::relabel(
        &mut points,
        "inline\n\t1\tblock in Inline#run\n\t1\tArray#each\n\t1\tInline#run\n\t1\t<main>\n\
         eval\n\t1\t<main>\n\t1\tKernel#eval\n\t1\t<main>\n",
    )?;
    ensure!(points[0].frames[3].file == "-e");
    compare(&points, &recording, Jit::Off)
}

/// Records a program that waits to begin, up to its last point; returns what it
/// said as well.
fn record(mut target: Target) -> Result<Option<(Vec<String>, Recording)>> {
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: FREQUENCY,
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
    let status = target.end()?;
    ensure!(status.success(), "the target: {status}");
    Ok(Some((said, recording)))
}

fn compare(points: &[Point], recording: &Recording, jit: Jit) -> Result<()> {
    let mut wrong = Vec::new();
    let (mut whole, mut withheld, mut lineless) = (0, 0, 0);
    for point in points {
        let seen: Vec<&Seen> = recording
            .seen
            .iter()
            .filter(|seen| seen.tid == point.tid && (point.begin..=point.end).contains(&seen.time))
            // The first tick may be before the time is spent, and elsewhere.
            .filter(|seen| place_of("Points.at", seen).is_none())
            .collect();
        let (partly, wholly): (Vec<&Seen>, Vec<&Seen>) =
            seen.into_iter().partition(|seen| is_withheld(seen, jit));
        whole += wholly.len();
        withheld += partly.len() as u64;
        if wholly.len() < ENOUGH {
            wrong.push(format!("{}: only {} samples", point.name, wholly.len()));
        }
        for seen in wholly {
            lineless += usize::from(seen.frames.first().is_some_and(has_no_line));
            if let Err(error) = same_stack(point, seen, jit) {
                wrong.push(format!("{}: {error:#}", point.name));
                break;
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "{} of {} points are wrong:\n{}",
        wrong.len(),
        points.len(),
        wrong.join("\n")
    );
    // Names that the collector may have got hold of before rbprof did are
    // shown as unknown, and counted. That is rare, and never without a count.
    let counted = recording.account.disbelieved;
    println!(
        "{whole} samples whole, {lineless} of them without the leaf's line; {withheld} with names \
         withheld, {counted} counted as such"
    );
    ensure!(
        withheld <= counted,
        "{withheld} withheld, {counted} counted"
    );
    ensure!(
        withheld * 50 <= whole as u64,
        "{withheld} of {whole} withheld"
    );
    Ok(())
}

/// Whether a sample has names or lines that rbprof does not vouch for.
///
/// Machine code does not keep the leaf's place up to date; rbprof says so, with
/// no line, as Ruby does.
fn is_withheld(seen: &Seen, jit: Jit) -> bool {
    seen.frames.iter().enumerate().any(|(at, frame)| {
        let unread = matches!(&*frame.function.label, "<unreadable>" | NAMELESS);
        let compiled = jit == Jit::Yjit && at == 0;
        unread || !compiled && has_no_line(frame)
    })
}

/// Where a sample has the outermost frame with that label.
fn place_of(label: &str, seen: &Seen) -> Option<usize> {
    seen.frames
        .iter()
        .rposition(|frame| &*frame.function.label == label)
}

fn has_no_line(frame: &Resolved) -> bool {
    frame.function.kind == FunctionKind::Ruby && frame.line == 0
}

fn same_stack(point: &Point, seen: &Seen, jit: Jit) -> Result<()> {
    // The last tick may be in what ends the point.
    let own = place_of("Points.done", seen).map_or(0, |at| at + 1);
    let frames = &seen.frames[own..];
    let describe = || {
        let is: Vec<String> = frames.iter().map(show).collect();
        let should: Vec<String> = point.frames.iter().map(show_true).collect();
        let few = |lines: &[String]| lines[..lines.len().min(12)].join("\n    ");
        format!(
            "flags {:#x}, {} frames\n    {}\n  instead of {}\n    {}",
            seen.flags,
            is.len(),
            few(&is),
            should.len(),
            few(&should)
        )
    };
    ensure!(frames.len() == point.frames.len(), "{}", describe());
    for (at, (frame, truth)) in frames.iter().zip(&point.frames).enumerate() {
        let may_lack_line = jit == Jit::Yjit && own + at == 0;
        same_frame(frame, truth, point.frames.get(at + 1), may_lack_line)
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
    if function.kind == FunctionKind::CFunction {
        // Ruby says that a C method is where it was called.
        let place = caller.map_or(("-", 0), |caller| (&caller.file, caller.line));
        ensure!(
            (truth.file.as_str(), truth.line) == place,
            "no C method: {}",
            show_true(truth)
        );
        ensure!((&*function.file, frame.line) == ("<cfunc>", 0), "its place");
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

fn show(frame: &Resolved) -> String {
    let function = &frame.function;
    format!("{} {}:{}", function.label, function.file, frame.line)
}

fn show_true(frame: &TrueFrame) -> String {
    format!("{} {}:{}", frame.label, frame.file, frame.line)
}
