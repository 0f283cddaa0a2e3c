//! The methods that took the most time, as a table for a terminal.

use std::cmp::Reverse;

use super::merged;
use super::summary;
use super::text;
use crate::profile::Function;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::Profile;

/// What a table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopOptions {
    /// Methods at most.
    pub rows: usize,
    /// Columns of the terminal. Less than 50 are taken as 50.
    pub width: usize,
}

impl Default for TopOptions {
    fn default() -> Self {
        Self {
            rows: 20,
            width: 100,
        }
    }
}

/// How much of a profile is in one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The function.
    pub function: FunctionId,
    /// Samples in which it was the innermost frame.
    pub own: u64,
    /// Samples in which it was on the stack, however often.
    pub total: u64,
}

/// The share of every function that has samples: most of its own first, then
/// most in total, then by name.
#[must_use]
pub fn shares(profile: &Profile) -> Vec<Share> {
    let tree = profile.stack_tree();
    let mut own = vec![0_u64; tree.len()];
    for (stack, _, count) in profile.counts() {
        if let Some(own) = own.get_mut(stack.index()) {
            *own = own.saturating_add(count);
        }
    }
    let total = merged::totals(tree, own.clone());

    let mut sums: Vec<Sum> = (profile.functions())
        .map(|(function, _)| Sum {
            open: 0,
            share: Share {
                function,
                own: 0,
                total: 0,
            },
        })
        .collect();
    let functions: Vec<usize> = (profile.locations())
        .map(|(_, location)| location.function.index())
        .collect();
    // The nodes between the root and the current one, with their functions.
    let mut open: Vec<(u32, usize)> = Vec::new();
    for id in tree.preorder(|key| key) {
        let Some(node) = tree.node(id) else { continue };
        while let Some((last, function)) = open.last() {
            if *last == node.parent {
                break;
            }
            if let Some(sum) = sums.get_mut(*function) {
                sum.open -= 1;
            }
            open.pop();
        }
        let Some(&function) = functions.get(node.key as usize) else {
            continue;
        };
        if let Some(sum) = sums.get_mut(function) {
            // A method that calls itself is counted where it is entered first.
            if sum.open == 0 {
                let total = total.get(id as usize).copied().unwrap_or(0);
                sum.share.total = sum.share.total.saturating_add(total);
            }
            let own = own.get(id as usize).copied().unwrap_or(0);
            sum.share.own = sum.share.own.saturating_add(own);
            sum.open += 1;
        }
        open.push((id, function));
    }

    let mut shares: Vec<Share> = (sums.into_iter())
        .map(|sum| sum.share)
        .filter(|share| share.total > 0)
        .collect();
    let name = |share: &Share| {
        let function = profile.function(share.function)?;
        Some((&function.label, &function.file, function.first_line))
    };
    shares.sort_by(|a, b| {
        let key = |share: &Share| (Reverse(share.own), Reverse(share.total));
        key(a).cmp(&key(b)).then_with(|| name(a).cmp(&name(b)))
    });
    shares
}

struct Sum {
    /// How often the function is on the current path.
    open: usize,
    share: Share,
}

/// Columns before the method's name: `100.0%  100.0%  12345678  `.
const NUMBERS: usize = 26;

/// A table of the methods with the most samples, under a heading that says what
/// was measured and what is missing. Ends with a line feed; no line is wider
/// than the width asked for, unless that is too little.
#[must_use]
pub fn render(profile: &Profile, options: TopOptions) -> String {
    let width = options.width.max(50);
    let mut lines = wrap(&[summary::headline(profile)], width, "");
    lines.extend(wrap(&summary::facts(profile), width, "  "));
    let losses = summary::losses(profile);
    if !losses.is_empty() {
        lines.extend(wrap(&losses, width, "  "));
    }
    for warning in &profile.metadata.warnings {
        lines.extend(wrap(
            &[format!("warning: {}", text::plain(warning))],
            width,
            "  ",
        ));
    }
    lines.push(String::new());

    let shares = shares(profile);
    if shares.is_empty() {
        lines.push(match profile.total() {
            0 => "No samples: the target used no CPU while it was observed.".to_owned(),
            _ => "No stacks: none of the samples could be read.".to_owned(),
        });
    } else {
        table(profile, &shares, options.rows, width, &mut lines);
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A function as the table shows it.
struct Row<'a> {
    share: &'a Share,
    label: String,
    place: String,
}

fn table(profile: &Profile, shares: &[Share], rows: usize, width: usize, lines: &mut Vec<String>) {
    let rows: Vec<Row<'_>> = (shares.iter())
        .take(rows)
        .filter_map(|share| {
            let function = profile.function(share.function)?;
            Some(Row {
                share,
                label: text::plain(&function.label).into_owned(),
                place: place(function),
            })
        })
        .collect();
    let widest =
        |of: fn(&Row<'_>) -> usize, least: usize| rows.iter().map(of).fold(least, usize::max);
    let (label_width, place_width) = split(
        width - NUMBERS - 2,
        widest(|row| text::columns(&row.label), "METHOD".len()),
        widest(|row| text::columns(&row.place), "FILE".len()),
    );
    let padding = " ".repeat(label_width - "METHOD".len());
    lines.push(format!("  SELF   TOTAL   SAMPLES  METHOD{padding}  FILE"));
    for Row {
        share,
        label,
        place,
    } in &rows
    {
        let label = text::shorten(label, label_width);
        let padding = " ".repeat(label_width.saturating_sub(text::columns(&label)));
        let line = format!(
            "{:>5.1}%  {:>5.1}%  {:>8}  {label}{padding}  {}",
            percent(share.own, profile.total()),
            percent(share.total, profile.total()),
            share.own,
            text::shorten_path(place, place_width),
        );
        lines.push(line.trim_end().to_owned());
    }
    let more = shares.len() - rows.len();
    if more > 0 {
        let rest: u64 = (shares.iter().skip(rows.len()))
            .map(|share| share.own)
            .fold(0, u64::saturating_add);
        let s = if more == 1 { "" } else { "s" };
        lines.push(format!(
            "{:>5.1}%          {rest:>8}  … {more} more function{s}",
            percent(rest, profile.total()),
        ));
    }
}

/// Divides the columns between label and place. The place may have what it
/// needs up to two fifths, and whatever the label does not need.
fn split(room: usize, label: usize, place: usize) -> (usize, usize) {
    if label + place <= room {
        return (label, place);
    }
    let place_least = place.min(room * 2 / 5);
    let label = label.min(room - place_least);
    (label, room - label)
}

fn place(function: &Function) -> String {
    match (function.kind, function.first_line) {
        (FunctionKind::CFunction, _) if &*function.file == "<cfunc>" => "(C)".to_owned(),
        (_, 0) => text::plain(&function.file).into_owned(),
        (_, line) => format!("{}:{line}", text::plain(&function.file)),
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        100.0 * part as f64 / whole as f64
    }
}

/// Joins items with commas into lines of at most `width` columns. An item that
/// is wider alone is shortened.
fn wrap(items: &[String], width: usize, indent: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        let item = text::shorten(item, width - indent.len());
        match lines.last_mut() {
            Some(line) if text::columns(line) + 2 + text::columns(&item) <= width => {
                line.push_str(", ");
                line.push_str(&item);
            }
            _ => lines.push(format!("{indent}{item}")),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::example;

    #[test]
    fn a_table_of_the_top_methods() {
        let options = TopOptions { rows: 4, width: 76 };
        let expected = "\
CPU profile of puma 6.4 [shop] (pid 4242)
  100 samples, 10.0 s at 99 Hz, 2 threads, Ruby 3.3.8
  2 samples lost, 7 stacks truncated
  warning: libfoo.so has no symbols

  SELF   TOTAL   SAMPLES  METHOD                     FILE
 47.0%   47.0%        47  Array#map                  (C)
 33.0%   40.0%        33  Shop.fib                   /app/lib/shop.rb:4
 20.0%   60.0%        20  Shop::Order#total          …/lib/shop/order.rb:30
  0.0%   93.0%         0  block in Shop::Server#run  …/lib/shop/server.rb:14
  0.0%                 0  … 4 more functions
";
        let text = render(&example::profile(), options);
        assert_eq!(text, expected);
    }

    #[test]
    fn machine_code_is_shown_with_its_file() {
        let mut builder = example::Builder::default();
        let deflate = "Zlib::Deflate#deflate:c@/usr/lib/ruby/zlib.so";
        let stack = [
            "main:1",
            deflate,
            "zrun:n@/usr/lib/ruby/zlib.so",
            "[libz.so.1]:n",
            "read:k",
        ];
        builder.sample(1, &stack, 3);
        let text = render(&builder.profile, TopOptions { rows: 9, width: 90 });
        let rows: Vec<Vec<&str>> = (text.lines().skip(4))
            .map(|line| line.split_whitespace().skip(3).collect())
            .collect();
        let expected: [&[&str]; 6] = [
            &["read", "[kernel.kallsyms]"],
            &["Zlib::Deflate#deflate", "/usr/lib/ruby/zlib.so"],
            &["[libz.so.1]"],
            &["main", "/app/a.rb:1"],
            &["zrun", "/usr/lib/ruby/zlib.so"],
            &[],
        ];
        assert_eq!(
            rows[..rows.len().min(6)],
            expected[..rows.len().min(6)],
            "{text}"
        );
    }

    #[test]
    fn it_fits_the_terminal() {
        for width in 50..130 {
            let text = render(&example::profile(), TopOptions { rows: 9, width });
            for line in text.lines() {
                assert!(text::columns(line) <= width, "{width}: {line}");
            }
        }
        let narrow = render(&example::profile(), TopOptions { rows: 9, width: 50 });
        assert!(narrow.contains("Array#map"), "{narrow}");
        assert!(narrow.contains("  …op.rb:4\n"), "{narrow}");
    }

    #[test]
    fn recursion_counts_once_for_a_stack() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["a:1", "b:1", "a:2", "b:2", "a:1"], 10);
        builder.sample(1, &["b:1", "c:1"], 5);
        builder.sample(2, &["a:1", "b:1"], 1);
        let name = |share: &Share| {
            let function = builder.profile.function(share.function).unwrap();
            (function.label.to_string(), share.own, share.total)
        };
        let shares: Vec<_> = shares(&builder.profile).iter().map(name).collect();
        let expected = [
            ("a".to_owned(), 10, 11),
            ("c".to_owned(), 5, 5),
            ("b".to_owned(), 1, 16),
        ];
        assert_eq!(shares, expected);
    }

    #[test]
    fn names_cannot_act_on_the_terminal() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["\x1b[2Jx:1@/a\nb.rb:7"], 1);
        let text = render(&builder.profile, TopOptions::default());
        assert!(!text.contains('\x1b'));
        assert!(text.contains("\\x1b[2Jx  /a\\nb.rb:7\n"), "{text}");
    }

    #[test]
    fn nothing_is_said_to_be_nothing() {
        let text = render(&Profile::default(), TopOptions::default());
        let expected = "CPU profile\n  0 samples, 0.00 s, 0 threads\n\n\
             No samples: the target used no CPU while it was observed.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn columns_are_shared_fairly() {
        assert_eq!(split(60, 20, 30), (20, 30));
        assert_eq!(split(60, 90, 90), (36, 24));
        assert_eq!(split(60, 10, 90), (10, 50));
        assert_eq!(split(60, 90, 10), (50, 10));
    }
}
