//! Stacks of every shape, compared frame by frame with what the program itself
//! knows: how many frames, their labels as Ruby 3.4 has them, files and lines.
//!
//! On every Ruby of the rig, and where it has YJIT, without and with it: the
//! tests are made from the list of Rubies.

use std::process::ExitCode;

use anyhow::Result;
use anyhow::ensure;
use libtest_mimic::Arguments;
use libtest_mimic::Trial;
use rbprof_tests::checks;
use rbprof_tests::checks::frames::Pace;
use rbprof_tests::frames;
use rbprof_tests::frames::Jit;
use rbprof_tests::frames::LABELS;
use rbprof_tests::frames::SPIN_MS;
use rbprof_tests::points;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use xtask::rubies;

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
    let mut target = frames::start(&ruby, "1", Jit::Off)?;
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

fn frames_are_true(name: &str, jit: Jit) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    checks::frames::frames_are_true(&ruby, jit, Pace::HOST)?;
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
    let Some((said, recording)) = frames::record(target)? else {
        return Ok(());
    };
    let mut points = points::parse(&said)?;
    points::relabel(
        &mut points,
        "inline\n\t1\tblock in Inline#run\n\t1\tArray#each\n\t1\tInline#run\n\t1\t<main>\n\
         eval\n\t1\t<main>\n\t1\tKernel#eval\n\t1\t<main>\n",
    )?;
    let outermost = points.first().and_then(|point| point.frames.get(3));
    ensure!(outermost.is_some_and(|frame| frame.file == "-e"));
    frames::compare(&points, &recording, Jit::Off)
}
