//! Stacks of every shape, compared frame by frame with what the program itself
//! knows: how many frames, their labels as Ruby 3.4 has them, files and lines.

use anyhow::Result;
use rbprof_tests::frames;
use rbprof_tests::frames::LABELS;
use rbprof_tests::frames::SPIN_MS;
use rbprof_tests::points;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

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
    let mut target = frames::start(&ruby, "1")?;
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

fn frames_are_true(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    let target = frames::start(&ruby, SPIN_MS)?;
    let Some((mut points, recording)) = frames::record(target)? else {
        return Ok(());
    };
    points::relabel(&mut points, LABELS)?;
    frames::compare(&points, &recording)
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
    let Some((mut points, recording)) = frames::record(target)? else {
        return Ok(());
    };
    points::relabel(
        &mut points,
        "inline\n\t1\tblock in Inline#run\n\t1\tArray#each\n\t1\tInline#run\n\t1\t<main>\n\
         eval\n\t1\t<main>\n\t1\tKernel#eval\n\t1\t<main>\n",
    )?;
    assert_eq!(points[0].frames[3].file, "-e");
    frames::compare(&points, &recording)
}
