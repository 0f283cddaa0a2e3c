//! What a program says of its own stacks: the lines of `workloads/points.rb`,
//! and the labels that Ruby 3.4 has for them.

use std::fmt::Write as _;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;

/// A moment at which the program knew its stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// What the program calls it.
    pub name: String,
    /// The thread, by the kernel's number.
    pub tid: u32,
    /// From then on, the stack was this one: `CLOCK_MONOTONIC`, nanoseconds.
    pub begin: u64,
    /// Until then.
    pub end: u64,
    /// Leaf first; `rescue` and `ensure` clauses are one with what is around
    /// them, as since Ruby 3.4.
    pub frames: Vec<TrueFrame>,
}

/// A frame as `Thread::Backtrace::Location` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrueFrame {
    /// The label, in the style of the Ruby that printed it.
    pub label: String,
    /// The bare name of the method.
    pub base_label: String,
    /// The file; `-` where there is none.
    pub file: String,
    /// The line; 0 where there is none.
    pub line: u32,
}

/// Reads what a program printed.
///
/// # Errors
/// If it is not what `points.rb` prints.
pub fn parse(lines: &[String]) -> Result<Vec<Point>> {
    let mut points: Vec<Point> = Vec::new();
    let mut inside_clause = false;
    for line in lines {
        let fields: Vec<&str> = line.split('\t').collect();
        match fields.as_slice() {
            ["point", name, tid, begin, end] => {
                inside_clause = false;
                points.push(Point {
                    name: (*name).to_owned(),
                    tid: tid.parse()?,
                    begin: begin.parse()?,
                    end: end.parse()?,
                    frames: Vec::new(),
                });
            }
            ["frame", label, base_label, file, number] => {
                let point = points.last_mut().context("a frame before any point")?;
                if !inside_clause {
                    point.frames.push(TrueFrame {
                        label: (*label).to_owned(),
                        base_label: (*base_label).to_owned(),
                        file: (*file).to_owned(),
                        line: number.parse()?,
                    });
                }
                // Only Ruby before 3.4 says so.
                inside_clause = label.starts_with("rescue in ") || label.starts_with("ensure in ");
            }
            // See [`compiled`].
            ["compiled", _] => {}
            _ => bail!("not a line of points.rb: {line:?}"),
        }
    }
    Ok(points)
}

/// How many code units YJIT had compiled when the program had gone through its
/// points; 0 if YJIT was off.
///
/// # Errors
/// If the program did not say.
pub fn compiled(lines: &[String]) -> Result<u64> {
    let count = lines
        .iter()
        .find_map(|line| line.strip_prefix("compiled\t"))
        .context("the program does not say how much YJIT has compiled")?;
    Ok(count.parse()?)
}

/// The labels of points as text: the name of each point, and its labels, leaf
/// first, each with how often it follows itself.
///
/// # Errors
/// None that can happen.
pub fn labels_as_text(points: &[Point]) -> Result<String> {
    let mut text = String::new();
    for point in points {
        writeln!(text, "{}", point.name)?;
        for same in point.frames.chunk_by(|a, b| a.label == b.label) {
            let label = same.first().map_or("", |frame| &frame.label);
            writeln!(text, "\t{}\t{label}", same.len())?;
        }
    }
    Ok(text)
}

/// Puts the labels in `text`, which [`labels_as_text`] wrote, in the place of
/// the points' own.
///
/// # Errors
/// If the text is of other points, or of stacks of another size.
pub fn relabel(points: &mut [Point], text: &str) -> Result<()> {
    let mut labelled: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        match fields.as_slice() {
            [name] => labelled.push((name, Vec::new())),
            ["", count, label] => {
                let (_, labels) = labelled.last_mut().context("a label before any point")?;
                labels.extend(std::iter::repeat_n(label, count.parse()?));
            }
            _ => bail!("not a line of labels: {line:?}"),
        }
    }
    ensure!(
        labelled.len() == points.len(),
        "{} points, labels for {}",
        points.len(),
        labelled.len()
    );
    for (point, (name, labels)) in points.iter_mut().zip(labelled) {
        ensure!(point.name == name, "{} instead of {name}", point.name);
        ensure!(
            point.frames.len() == labels.len(),
            "{name}: {} frames, {} labels",
            point.frames.len(),
            labels.len()
        );
        for (frame, label) in point.frames.iter_mut().zip(labels) {
            ensure!(
                label.ends_with(&frame.base_label),
                "{name}: {label} is no label of {}",
                frame.base_label
            );
            label.clone_into(&mut frame.label);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(|line| line.replace('|', "\t")).collect()
    }

    #[test]
    fn clauses_are_one_with_what_is_around_them() {
        let points = parse(&lines(
            "point|p|1|2|3\nframe|rescue in rescue in a|a|f|3\nframe|rescue in a|a|f|2\nframe|a|a|f|1\nframe|b|b|f|9",
        ))
        .unwrap();
        let lines: Vec<u32> = points[0].frames.iter().map(|frame| frame.line).collect();
        assert_eq!(lines, [3, 9]);
    }

    #[test]
    fn what_was_compiled_is_no_point() {
        let said = lines("point|p|1|2|3\nframe|a|a|f|1\ncompiled|45");
        assert_eq!(compiled(&said).unwrap(), 45);
        assert_eq!(parse(&said).unwrap().len(), 1);
        assert!(compiled(&said[..2]).is_err());
        assert!(compiled(&lines("compiled|many")).is_err());
    }

    #[test]
    fn labels_of_another_ruby_take_the_place_of_its_own() {
        let new = parse(&lines("point|p|1|2|3\nframe|A#a|a|f|1\nframe|A#a|a|f|2")).unwrap();
        let text = labels_as_text(&new).unwrap();
        assert_eq!(text, "p\n\t2\tA#a\n");
        let mut old = parse(&lines("point|p|1|2|3\nframe|a|a|f|1\nframe|a|a|f|2")).unwrap();
        relabel(&mut old, &text).unwrap();
        assert_eq!(old, new);
        assert!(relabel(&mut old[..0], &text).is_err());
        old[0].frames.pop();
        assert!(relabel(&mut old, &text).is_err());
    }
}
