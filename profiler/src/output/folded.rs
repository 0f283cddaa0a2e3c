//! Folded stacks: one line per stack, for `flamegraph.pl`, speedscope, and
//! everything that reads lines.
//!
//! ```text
//! <main>;Report#total;Array#map 40
//! ```
//!
//! Outermost frame first, frames separated by `;`, then a space and the number
//! of samples. Lines are sorted by frame and each stack is there once. In names,
//! `;`, control characters, and space at either end are written as `\xNN` or
//! `\u{NNNN}`.

use std::io;
use std::io::Write;

use indexmap::IndexSet;

use super::merged::Merged;
use super::text;
use crate::profile::Labels;
use crate::profile::Location;
use crate::profile::Profile;

/// What a folded stack shows besides the labels of its frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldedOptions {
    /// File and line behind each frame's label: `Foo#bar (/app/foo.rb:12)`.
    /// Frames of one function at different lines are then different frames.
    pub lines: bool,
    /// The thread as the outermost frame: `worker 1 (tid 4243)`.
    pub threads: bool,
}

/// What stands for a stack without frames.
const NO_FRAMES: &str = "[no frames]";

/// Writes folded stacks.
///
/// # Errors
/// Those of `out`.
pub fn write(profile: &Profile, options: FoldedOptions, mut out: impl Write) -> io::Result<()> {
    let mut names: IndexSet<String> = IndexSet::new();
    let keys: Vec<u32> = (profile.locations())
        .map(|(_, location)| key(&mut names, frame_name(profile, location, options.lines)))
        .collect();
    let threads: Vec<u32> = if options.threads {
        (profile.label_sets())
            .map(|(_, labels)| key(&mut names, thread_name(labels)))
            .collect()
    } else {
        Vec::new()
    };
    let merged = Merged::new(profile, &keys, None, |labels| {
        threads.get(labels.index()).copied()
    });
    let name = |key: u32| names.get_index(key as usize).map_or("", String::as_str);

    // The line up to the current node, and where it was shorter.
    let mut line = String::new();
    let mut open: Vec<(u32, usize)> = Vec::new();
    for id in merged.tree.preorder(name) {
        if let Some(node) = merged.tree.node(id) {
            while let Some((last, length)) = open.last() {
                line.truncate(*length);
                if *last == node.parent {
                    break;
                }
                open.pop();
            }
            if open.is_empty() {
                line.clear();
            } else {
                line.push(';');
            }
            line.push_str(name(node.key));
            open.push((id, line.len()));
        }
        let count = merged.own(id);
        if count > 0 {
            let stack = if line.is_empty() { NO_FRAMES } else { &line };
            writeln!(out, "{stack} {count}")?;
        }
    }
    Ok(())
}

fn key(names: &mut IndexSet<String>, name: String) -> u32 {
    u32::try_from(names.insert_full(name).0).unwrap_or(u32::MAX)
}

fn frame_name(profile: &Profile, location: &Location, lines: bool) -> String {
    let Some(function) = profile.function(location.function) else {
        return String::new();
    };
    let name = match (lines, &*function.file, location.line) {
        (false, ..) | (true, "", _) => text::folded(&function.label),
        (true, file, 0) => {
            return text::folded(&format!("{} ({file})", function.label)).into_owned();
        }
        (true, file, line) => {
            return text::folded(&format!("{} ({file}:{line})", function.label)).into_owned();
        }
    };
    name.into_owned()
}

fn thread_name(labels: &Labels) -> String {
    let name = (labels.thread_name.as_deref())
        .or(labels.comm.as_deref())
        .unwrap_or("thread");
    text::folded(&format!("{name} (tid {})", labels.tid)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::example;
    use crate::profile::StackId;

    fn written(profile: &Profile, options: FoldedOptions) -> String {
        let mut out = Vec::new();
        write(profile, options, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_per_stack() {
        let text = written(&example::profile(), FoldedOptions::default());
        let expected = "\
<main>;Shop::Server#run;Kernel#loop;block in Shop::Server#run;Shop::Order#total 20
<main>;Shop::Server#run;Kernel#loop;block in Shop::Server#run;Shop::Order#total;Array#map 40
[stack truncated];Shop.fib;Shop.fib;Array#map 7
block in Shop::Server#run;Shop.fib;Shop.fib 3
block in Shop::Server#run;Shop.fib;Shop.fib;Shop.fib 30
";
        assert_eq!(text, expected);
    }

    #[test]
    fn machine_code_is_a_frame_like_any_other() {
        let mut builder = example::Builder::default();
        let stack = [
            "main:1",
            "a:c@/zlib.so",
            "shop::f(int):n@/zlib.so",
            "[libz.so.1]:n",
            "read:k",
        ];
        builder.sample(1, &stack, 3);
        let text = written(&builder.profile, FoldedOptions::default());
        assert_eq!(text, "main;a;shop::f(int);[libz.so.1];read 3\n");
        let options = FoldedOptions {
            lines: true,
            threads: false,
        };
        let text = written(&builder.profile, options);
        let expected = "main (/app/a.rb:1);a (/zlib.so);shop::f(int) (/zlib.so);[libz.so.1];\
             read ([kernel.kallsyms]) 3\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn files_lines_and_threads_on_demand() {
        let options = FoldedOptions {
            lines: true,
            threads: true,
        };
        let text = written(&example::profile(), options);
        let expected = "ruby (tid 4242);<main> (/app/bin/shop:40);\
             Shop::Server#run (/app/lib/shop/server.rb:14);Kernel#loop (<cfunc>);\
             block in Shop::Server#run (/app/lib/shop/server.rb:15);\
             Shop::Order#total (/app/lib/shop/order.rb:31) 20";
        assert_eq!(text.lines().next(), Some(expected));
        let truncated = "worker 4243 (tid 4243);[stack truncated];Shop.fib (/app/lib/shop.rb:5)";
        assert!(text.contains(truncated), "{text}");
    }

    #[test]
    fn stacks_that_look_alike_are_one() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["main:1", "x:2"], 1);
        builder.sample(2, &["main:1", "x:3"], 1);
        builder.sample(2, &["main:9@/other.rb", "x:3"], 1);
        let text = written(&builder.profile, FoldedOptions::default());
        assert_eq!(text, "main;x 3\n");
    }

    #[test]
    fn names_cannot_break_lines() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["a;b\n9:1", "# c :1"], 2);
        let labels = builder.profile.label_sets().next().unwrap().0;
        builder.profile.add(StackId::EMPTY, labels, 5);
        let text = written(&builder.profile, FoldedOptions::default());
        assert_eq!(text, "[no frames] 5\na\\x3bb\\n9;\\x23 c\\x20 2\n");
    }

    #[test]
    fn deep_stacks_are_written_whole() {
        let mut builder = example::Builder::default();
        builder.sample(1, &vec!["f:1"; 10_000], 1);
        let text = written(&builder.profile, FoldedOptions::default());
        assert_eq!(text.matches('f').count(), 10_000);
    }
}
