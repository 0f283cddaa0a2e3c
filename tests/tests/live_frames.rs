//! Stacks of every shape, compared frame by frame with what the program itself
//! knows: how many frames, their labels as Ruby 3.4 has them, files and lines.

#![expect(
    clippy::indexing_slicing,
    reason = "a test that looks past the end has failed"
)]

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
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
use xtask::rubies::Installed;

/// The labels that Ruby 3.4 prints for the points of `frames.rb`.
const LABELS: &str = include_str!("../truth/live-frames.labels");
/// CPU time at each point, milliseconds.
const SPIN_MS: &str = "20";
/// Ticks per second: 20 in each point.
const FREQUENCY: u64 = 997;
/// Samples that each point must have at least.
const ENOUGH: usize = 5;

#[test]
fn on_debian_2_7_4() -> Result<()> {
    frames_are_true("debian-2.7.4")
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    frames_are_true("debian-3.1.2")
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    frames_are_true("source-3.3.8-protected")
}

/// Stripped, and exports nothing that leads to its stacks.
#[test]
fn on_debian_3_3_8() -> Result<()> {
    frames_are_true("debian-3.3.8")
}

/// Stripped, and exports nothing that leads to its stacks.
#[test]
fn on_debian_3_4_11() -> Result<()> {
    frames_are_true("debian-3.4.11")
}

#[test]
fn the_labels_are_those_that_ruby_3_4_prints() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.4.11")? else {
        return Ok(());
    };
    let mut target = start_frames(&ruby, "1")?;
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
        assert_eq!(is, should, "RBPROF_BLESS=1 rewrites the file");
    }
    assert_eq!(LABELS.lines().count(), labels.lines().count());
    Ok(())
}

fn start_frames(ruby: &Installed, spin_ms: &str) -> Result<Target> {
    // Without RubyGems, `require` is Ruby's own.
    let mut target = Target::start(
        ruby.script(&rig::workload("frames.rb"))?
            .env("RUBYOPT", "--disable-gems")
            .env("SPIN_MS", spin_ms),
    )?;
    target.wait_for("ready")?;
    Ok(target)
}

fn frames_are_true(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let target = start_frames(&ruby, SPIN_MS)?;
    let Some((mut points, recording)) = record(target)? else {
        return Ok(());
    };
    points::relabel(&mut points, LABELS)?;
    compare(&points, &recording)
}

/// A program on the command line has no file.
#[test]
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
    let Some((mut points, recording)) = record(target)? else {
        return Ok(());
    };
    points::relabel(
        &mut points,
        "inline\n\t1\tblock in Inline#run\n\t1\tArray#each\n\t1\tInline#run\n\t1\t<main>\n\
         eval\n\t1\t<main>\n\t1\tKernel#eval\n\t1\t<main>\n",
    )?;
    assert_eq!(points[0].frames[3].file, "-e");
    compare(&points, &recording)
}

/// Records a program that waits to begin, up to its last point.
fn record(mut target: Target) -> Result<Option<(Vec<Point>, Recording)>> {
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
    Ok(Some((points::parse(&said)?, recording)))
}

fn compare(points: &[Point], recording: &Recording) -> Result<()> {
    let mut wrong = Vec::new();
    let (mut whole, mut withheld) = (0, 0);
    for point in points {
        let seen: Vec<&Seen> = recording
            .seen
            .iter()
            .filter(|seen| seen.tid == point.tid && (point.begin..=point.end).contains(&seen.time))
            .collect();
        let (partly, wholly): (Vec<&Seen>, Vec<&Seen>) =
            seen.into_iter().partition(|seen| is_withheld(seen));
        whole += wholly.len();
        withheld += partly.len() as u64;
        if wholly.len() < ENOUGH {
            wrong.push(format!("{}: only {} samples", point.name, wholly.len()));
        }
        for seen in wholly {
            if let Err(error) = same_stack(point, seen) {
                wrong.push(format!("{}: {error:#}", point.name));
                break;
            }
        }
    }
    // Names that the collector may have got hold of before rbprof did are
    // shown as unknown, and counted. That is rare, and never without a count.
    let counted = recording.account.disbelieved;
    println!("{whole} samples whole, {withheld} with names withheld, {counted} counted as such");
    ensure!(
        withheld <= counted,
        "{withheld} withheld, {counted} counted"
    );
    ensure!(
        withheld * 50 <= whole as u64,
        "{withheld} of {whole} withheld"
    );
    ensure!(
        wrong.is_empty(),
        "{} of {} points are wrong:\n{}",
        wrong.len(),
        points.len(),
        wrong.join("\n")
    );
    Ok(())
}

/// Whether a sample has names or lines that rbprof does not vouch for.
fn is_withheld(seen: &Seen) -> bool {
    seen.frames.iter().any(|frame| {
        let unread = &*frame.function.label == "<unreadable>";
        unread || frame.function.kind == FunctionKind::Ruby && frame.line == 0
    })
}

fn same_stack(point: &Point, seen: &Seen) -> Result<()> {
    // The first and the last tick may be in what frames the point.
    let own = seen
        .frames
        .iter()
        .rposition(|frame| matches!(&*frame.function.label, "Points.at" | "Points.done"))
        .map_or(0, |at| at + 1);
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
        same_frame(frame, truth, point.frames.get(at + 1))
            .with_context(|| format!("frame {at}: {}", describe()))?;
    }
    Ok(())
}

fn same_frame(frame: &Resolved, truth: &TrueFrame, caller: Option<&TrueFrame>) -> Result<()> {
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
        ensure!(
            (&*function.file, frame.line) == (&truth.file, truth.line),
            "its place"
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
