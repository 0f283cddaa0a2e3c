//! Names and paths as text: made harmless, made short.
//!
//! Names come from the target and may hold anything. What would break a line,
//! move a terminal's cursor, reorder text or be illegal in XML is written as
//! an escape.

use std::borrow::Cow;
use std::fmt::Write as _;

use unicode_width::UnicodeWidthChar;
use unicode_width::UnicodeWidthStr;

/// Replaces every character that is not plain text by `\n`, `\xNN` or
/// `\u{NNNN}`.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    escape(text, is_unsafe)
}

/// A frame's name in a folded stack: [`plain`], and without what has a meaning
/// in that format. That is `;` everywhere, space at both ends, and a first `#`
/// before a space, which readers take for a comment.
pub(super) fn folded(text: &str) -> Cow<'_, str> {
    let text = match escape(text, |c| c == ';' || is_unsafe(c)) {
        Cow::Borrowed(text) if text.trim() == text && !text.starts_with("# ") => {
            return Cow::Borrowed(text);
        }
        text => text,
    };
    let inner = text.trim();
    let starts = text.len() - text.trim_start().len();
    let mut out = String::with_capacity(text.len() + 8);
    let (before, rest) = text.split_at_checked(starts).unwrap_or((&text, ""));
    push_escaped(&mut out, before);
    match inner.strip_prefix("# ") {
        Some(rest) if before.is_empty() => {
            out.push_str("\\x23 ");
            out.push_str(rest);
        }
        _ => out.push_str(inner),
    }
    push_escaped(&mut out, rest.strip_prefix(inner).unwrap_or(""));
    Cow::Owned(out)
}

fn escape(text: &str, needs: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&needs) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if needs(c) {
            push_escape(&mut out, c);
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

fn push_escaped(out: &mut String, text: &str) {
    for c in text.chars() {
        push_escape(out, c);
    }
}

fn push_escape(out: &mut String, c: char) {
    // Writing to a string does not fail.
    let _ = match c {
        '\n' => write!(out, "\\n"),
        '\r' => write!(out, "\\r"),
        '\t' => write!(out, "\\t"),
        c if c.is_ascii() => write!(out, "\\x{:02x}", u32::from(c)),
        c => write!(out, "\\u{{{:x}}}", u32::from(c)),
    };
}

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Line and paragraph separators, direction marks and overrides.
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // Private use: the flame graph's own marks are among these.
            | '\u{e000}'..='\u{f8ff}'
            // A byte order mark, and what XML does not allow.
            | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Escapes text for an XML element.
pub(super) fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c => out.push(c),
        }
    }
    out
}

/// Columns a text takes on a terminal.
pub(super) fn columns(text: &str) -> usize {
    text.width()
}

/// Shortens a text to at most `width` columns. The middle goes, and more of the
/// end is kept than of the beginning: methods have their name there.
pub(super) fn shorten(text: &str, width: usize) -> Cow<'_, str> {
    if columns(text) <= width {
        return Cow::Borrowed(text);
    }
    let room = width.saturating_sub(1);
    let head = take(text.chars(), room / 3);
    let used = columns(&head);
    let tail: String = take(text.chars().rev(), room - used)
        .chars()
        .rev()
        .collect();
    Cow::Owned(format!("{head}…{tail}"))
}

/// Shortens a text to at most `width` columns; the end goes.
pub(super) fn shorten_end(text: &str, width: usize) -> Cow<'_, str> {
    if columns(text) <= width {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}…", take(text.chars(), width.saturating_sub(1))))
}

/// Shortens a path to at most `width` columns: whole directories go from the
/// beginning, and the file's name stays as long as it fits.
pub(super) fn shorten_path(path: &str, width: usize) -> Cow<'_, str> {
    if columns(path) <= width {
        return Cow::Borrowed(path);
    }
    let tail = (path.match_indices('/'))
        .filter_map(|(at, _)| path.get(at..))
        .find(|tail| columns(tail) < width)
        .map_or_else(|| take_back(path, width.saturating_sub(1)), str::to_owned);
    Cow::Owned(format!("…{tail}"))
}

/// The most of the end of a text that fits.
fn take_back(text: &str, width: usize) -> String {
    take(text.chars().rev(), width).chars().rev().collect()
}

/// The most of the beginning of a text that fits.
fn take(chars: impl Iterator<Item = char>, width: usize) -> String {
    let mut left = width;
    chars
        .map_while(|c| {
            left = left.checked_sub(c.width().unwrap_or(0))?;
            Some(c)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_is_left_alone() {
        for text in ["block in Foo#bar", "Größe#ändern", "表#示", "a\\b", ""] {
            assert!(matches!(plain(text), Cow::Borrowed(same) if same == text));
        }
    }

    #[test]
    fn what_a_terminal_or_xml_would_act_on_is_escaped() {
        assert_eq!(plain("a\n\r\tb"), "a\\n\\r\\tb");
        assert_eq!(plain("\x1b[31m\x7f\0"), "\\x1b[31m\\x7f\\x00");
        assert_eq!(plain("\u{202e}x\u{85}"), "\\u{202e}x\\u{85}");
        assert_eq!(plain("\u{e000}\u{ffff}"), "\\u{e000}\\u{ffff}");
    }

    #[test]
    fn folded_names_keep_their_meaning() {
        assert_eq!(folded("Foo#bar"), "Foo#bar");
        assert_eq!(folded("#<Class:0x1>#bar"), "#<Class:0x1>#bar");
        assert_eq!(folded("a;b"), "a\\x3bb");
        assert_eq!(folded(" a b "), "\\x20a b\\x20");
        assert_eq!(folded("# a"), "\\x23 a");
        assert_eq!(folded("  "), "\\x20\\x20");
        assert_eq!(folded("\u{2003}x\u{2003}"), "\\u{2003}x\\u{2003}");
        assert_eq!(folded("a;\n"), "a\\x3b\\n");
    }

    #[test]
    fn labels_lose_their_middle() {
        let label = "block in ActiveRecord::Relation::QueryMethods#where!";
        assert_eq!(shorten(label, 52), label);
        assert_eq!(shorten(label, 30), "block in …:QueryMethods#where!");
        assert_eq!(columns(&shorten(label, 30)), 30);
        // Two columns a character: one column may stay empty.
        assert_eq!(shorten("一二三四五六七八九十", 9), "一…八九十");
        assert_eq!(shorten("abc", 1), "…");
        assert_eq!(shorten_end("abcdef", 4), "abc…");
        assert_eq!(shorten_end("abcd", 4), "abcd");
    }

    #[test]
    fn paths_lose_directories_first() {
        let path = "/usr/lib/ruby/gems/3.3.0/gems/activerecord-7.2.2/lib/active_record/base.rb:12";
        assert_eq!(
            shorten_path(path, 60),
            "…/3.3.0/gems/activerecord-7.2.2/lib/active_record/base.rb:12"
        );
        assert_eq!(shorten_path(path, 30), "…/lib/active_record/base.rb:12");
        assert_eq!(shorten_path(path, 14), "…/base.rb:12");
        assert_eq!(shorten_path(path, 8), "…e.rb:12");
        assert_eq!(shorten_path(path, 99), path);
    }
}
