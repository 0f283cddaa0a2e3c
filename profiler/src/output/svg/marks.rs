//! What inferno cannot be told, put into its output afterwards.
//!
//! To inferno a frame is its name: frames of one name are one frame, the name
//! is what the box shows, and the tooltip has the name and the counts. To keep
//! apart methods of one name in two files, and to have the file in the tooltip
//! but not in the box, a frame is called `NAME` + [`FRAME`] + a number, and
//! [`replace`] turns that into the name in the box and `NAME (COUNTS, FILE)` in
//! the tooltip. The script in the file takes the box's text from the tooltip up
//! to the last parenthesis, so that stays right on resizing and zooming, and it
//! searches tooltips: for files, too.
//!
//! The marks are characters for private use, which names cannot contain
//! because [`text::plain`](super::super::text::plain) escapes them.

use std::io;
use std::io::Write;

/// Between a frame's name and its number.
pub(super) const FRAME: char = '\u{e000}';
/// Before the number of an element, anywhere in a text.
pub(super) const ELEMENT: char = '\u{e001}';

/// Copies `svg`, with marks replaced. `detail` gives what stands behind the
/// counts in the tooltip of a frame, `elements` are those that are referred to
/// by their numbers; all as XML.
pub(super) fn replace<'a>(
    svg: &str,
    detail: impl Fn(usize) -> Option<&'a str>,
    elements: &[String],
    mut out: impl Write,
) -> io::Result<()> {
    let mut rest = svg;
    while let Some(at) = rest.find([FRAME, ELEMENT]) {
        let (before, marked) = rest.split_at(at);
        out.write_all(before.as_bytes())?;
        let mut chars = marked.chars();
        let mark = chars.next();
        let after = chars.as_str();
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, after) = after.split_at(digits);
        let number = number.parse::<usize>().ok();
        rest = after;
        if mark == Some(ELEMENT) {
            if let Some(element) = number.and_then(|number| elements.get(number)) {
                out.write_all(element.as_bytes())?;
            }
        } else if let Some((counts, after)) = tooltip(after) {
            let counts = match counts.strip_prefix(" (1 samples") {
                Some(percent) => format!(" (1 sample{percent}"),
                None => counts.to_owned(),
            };
            out.write_all(counts.as_bytes())?;
            if let Some(detail) = number.and_then(&detail) {
                write!(out, ", {detail}")?;
            }
            rest = after;
        } else if let Some(end) = after.find('<') {
            // In the box: nothing is left but perhaps the dots of a number
            // that was cut, which say nothing.
            rest = after.get(end..).unwrap_or("");
        }
    }
    out.write_all(rest.as_bytes())
}

/// Splits ` (COUNTS)</title>...` before the closing parenthesis.
fn tooltip(text: &str) -> Option<(&str, &str)> {
    if !text.starts_with(" (") {
        return None;
    }
    text.find(')').and_then(|end| text.split_at_checked(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(svg: &str) -> String {
        let mut out = Vec::new();
        let detail = |number: usize| ["/a.rb:1"].get(number).copied();
        replace(svg, detail, &["<k/>".to_owned()], &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_tooltip_gets_the_file_and_the_box_the_name() {
        let svg = "<title>f (x)\u{e000}0 (5 samples, 1.00%)</title><text>f (x)\u{e000}0</text>";
        let expected = "<title>f (x) (5 samples, 1.00%, /a.rb:1)</title><text>f (x)</text>";
        assert_eq!(replaced(svg), expected);
    }

    #[test]
    fn numbers_that_were_cut_vanish() {
        assert_eq!(replaced("<text>f\u{e000}1..</text>"), "<text>f</text>");
        assert_eq!(replaced("<text>f\u{e000}..</text>"), "<text>f</text>");
        assert_eq!(replaced("<text>lo..</text>"), "<text>lo..</text>");
    }

    #[test]
    fn frames_without_a_file_and_one_sample() {
        let svg = "<title>f\u{e000}9 (1 samples, 1.00%)</title>";
        assert_eq!(replaced(svg), "<title>f (1 sample, 1.00%)</title>");
        assert_eq!(replaced("a \u{e001}0 \u{e001}7b"), "a <k/> b");
    }
}
