//! Names on a running Ruby, against what that Ruby says of itself.
//!
//! The Ruby is the system's, or what `RBPROF_TEST_RUBY` names: a command with
//! its first arguments (`chroot DIR ruby3.4`).
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail as tests do"
)]

use std::collections::HashMap;

use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;
use rbprof::symbolize::RubyNames;
use rbprof_common::layout;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::roots::Context;
use rbprof_common::roots::read_context;
use rbprof_common::walk::FrameSink;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::walk_all;
use rbprof_common::wire::Frame;
use rbprof_tests::live::Program;
use rbprof_tests::roots;
use rbprof_tests::roots::Roots;

/// A running program whose main thread's stack can be read.
struct Target {
    program: Program,
    layout: &'static Layout,
    roots: Roots,
}

#[derive(Default)]
struct Frames(Vec<Frame>);

impl FrameSink for Frames {
    fn push(&mut self, frame: Frame) -> bool {
        self.0.push(frame);
        true
    }
}

impl Target {
    /// Starts a script; it has to print a line when it is ready.
    fn start(script: &str) -> Self {
        let mut program = Program::start(script).unwrap();
        assert_eq!(program.line().unwrap(), "ready");
        let (layout::Lookup::Known(layout) | layout::Lookup::Assumed(layout)) =
            layout::lookup(program.version)
        else {
            panic!("no layout for {}", program.version);
        };
        let (segments, files) = program.maps().unwrap();
        let data = roots::ruby_data(&segments, &files);
        let roots = roots::find(&program, &data, layout, program.version);
        Self {
            program,
            layout,
            roots,
        }
    }

    fn names(&self) -> RubyNames {
        RubyNames::new(self.layout, self.roots.global_symbols).with_vm(self.roots.vm)
    }

    /// The main thread's frames, and whether the walk was complete.
    fn frames(&self) -> (Vec<Frame>, bool) {
        let mut frames = Frames::default();
        let ec = self.roots.main.ec;
        let Ok(main) = read_context(ec, &self.layout.walk, &self.program) else {
            return (Vec::new(), false);
        };
        let main: Context = main;
        let flags = walk_all(
            &main,
            &self.layout.walk,
            &self.program,
            &mut Scratch::new(),
            &mut frames,
        );
        (frames.0, flags == 0)
    }
}

/// One line of what a program says about a stack.
#[derive(Debug)]
struct Said {
    label: String,
    base_label: String,
    file: String,
    line: u32,
}

impl Said {
    fn read(program: &mut Program) -> Vec<Self> {
        let mut stack = Vec::new();
        loop {
            let line = program.line().unwrap();
            if line.is_empty() {
                return stack;
            }
            let parts: Vec<String> = line.split('\t').map(undump).collect();
            stack.push(Self {
                label: parts[0].clone(),
                base_label: parts[1].clone(),
                file: parts[2].clone(),
                line: parts[3].parse().unwrap(),
            });
        }
    }
}

/// Undoes `String#dump`, with bytes that are not UTF-8 as the profiler shows
/// them.
fn undump(text: &str) -> String {
    let mut text = text.trim_matches('"');
    let mut bytes = Vec::new();
    let mut out = String::new();
    while let Some(first) = text.chars().next() {
        if let Some(escaped) = text.strip_prefix("\\x") {
            bytes.push(u8::from_str_radix(&escaped[..2], 16).unwrap());
            text = &escaped[2..];
            continue;
        }
        if let Some(escaped) = text.strip_prefix("\\u") {
            let code = u32::from_str_radix(&escaped[..4], 16).unwrap();
            bytes.extend(char::from_u32(code).unwrap().to_string().bytes());
            text = &escaped[4..];
            continue;
        }
        if let Some(escaped) = text.strip_prefix('\\') {
            bytes.extend(escaped[..1].bytes());
            text = &escaped[1..];
            continue;
        }
        bytes.extend(first.to_string().bytes());
        text = &text[first.len_utf8()..];
    }
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        for byte in chunk.invalid() {
            out.push_str(&format!("\\x{byte:02X}"));
        }
    }
    out
}

fn shown(frame: &Resolved) -> String {
    let Function { label, file, .. } = &*frame.function;
    format!("{label} {file}:{}", frame.line)
}

#[test]
fn every_kind_of_frame_is_named_as_ruby_names_it() {
    let mut target = Target::start(include_str!("../programs/shape.rb"));
    target.program.send("").unwrap();
    let said = Said::read(&mut target.program);
    let (frames, complete) = target.frames();
    assert!(complete);
    let mut names = target.names();
    let mut found = Vec::new();
    names.resolve(&frames, &target.program, &mut found);
    let expected: Vec<&str> = include_str!("../programs/shape.labels").lines().collect();
    let said = without_bodies_of_clauses(said, target.program.version);
    for (index, ((found, said), expected)) in found.iter().zip(&said).zip(&expected).enumerate() {
        let function = &*found.function;
        let context = format!("frame {index}: {} but {said:?}", shown(found));
        assert_eq!(&*function.label, *expected, "{context}");
        assert_eq!(*function.base_label, *said.base_label, "{context}");
        // Ruby says of a C method where it was called, and from 3.4 on of its
        // own code too.
        if function.kind == FunctionKind::CFunction {
            assert_eq!((&*function.file, found.line), ("<cfunc>", 0), "{context}");
        } else if !function.file.starts_with("<internal:") {
            assert_eq!(
                (&*function.file, found.line),
                (&*said.file, said.line),
                "{context}"
            );
        }
        if target.program.version >= Version::new(3, 4, 0) {
            assert_eq!(*function.label, *said.label, "{context}");
        }
    }
    assert_eq!(found.len(), said.len());
    assert_eq!(found.len(), expected.len());
}

/// Before 3.4, Ruby lists the frame of a `rescue` or `ensure` clause and the one
/// it stands in; from then on, the clause alone.
fn without_bodies_of_clauses(stack: Vec<Said>, version: Version) -> Vec<Said> {
    let mut clause = false;
    stack
        .into_iter()
        .filter(|said| {
            let body = std::mem::take(&mut clause);
            clause = said.label.starts_with("rescue in") || said.label.starts_with("ensure in");
            version >= Version::new(3, 4, 0) || !body
        })
        .collect()
}

/// The number in a name that ends with digits.
fn number(name: &str) -> Option<u64> {
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.parse().ok()
}

/// The number of the class that a frame of the churning program is of.
fn number_of(frame: &Resolved) -> Option<u64> {
    number(
        frame
            .function
            .file
            .strip_suffix(".rb")?
            .strip_prefix("gen")?,
    )
}

/// Everything about a frame of the churning program has the same number in it.
fn assert_of_one_class(frame: &Resolved) {
    let Some(n) = number_of(frame) else {
        return;
    };
    let function = &*frame.function;
    let labels = [
        format!("C{n}#m{n}"),
        format!("C{n}.s{n}"),
        format!("block in C{n}#m{n}"),
        format!("block (2 levels) in C{n}#m{n}"),
        format!("<class:C{n}>"),
        "<main>".to_owned(),
    ];
    // Read outside of a stop, a method entry may belong to another moment: then
    // there is no class, never a wrong one.
    let bare = [
        format!("m{n}"),
        format!("s{n}"),
        format!("block in m{n}"),
        format!("block (2 levels) in m{n}"),
        UNREADABLE.to_owned(),
    ];
    let known = labels.iter().chain(&bare);
    assert!(
        known.clone().any(|label| **label == *function.label),
        "{}",
        shown(frame)
    );
    // The body of the class ends on the line of its `end`.
    let last = n as u32
        + if function.label.starts_with("<class:") {
            3
        } else {
            2
        };
    let lines: Vec<u32> = [0].into_iter().chain(n as u32..=last).collect();
    assert!(lines.contains(&frame.line), "{}", shown(frame));
}

const UNREADABLE: &str = "<unreadable>";

#[test]
fn names_never_come_from_recycled_objects() {
    let target = Target::start(include_str!("../programs/churn.rb"));
    let mut names = target.names();
    let (mut in_method, mut recycled, mut cut, mut seen) = (0, 0, 0, HashMap::new());
    for _ in 0..600 {
        target.program.stop().unwrap();
        // A stop may hit a frame while it is being made.
        let (frames, complete) = target.frames();
        cut += usize::from(!complete);
        if !names.revalidate(&frames, &target.program) {
            recycled += 1;
        }
        let mut stack = Vec::new();
        names.resolve(&frames, &target.program, &mut stack);
        let at = number(&target.program.title().unwrap());
        target.program.cont().unwrap();

        for frame in &frames {
            seen.entry(frame.iseq()).or_insert_with(Vec::new).extend(at);
        }
        for frame in &stack {
            let Some(n) = number_of(frame) else {
                continue;
            };
            assert_of_one_class(frame);
            assert!(!complete || *frame.function.label != *UNREADABLE);
            // The one that is running, not one that was there before.
            assert_eq!(Some(n), at, "{}", shown(frame));
            in_method += usize::from(frame.function.label.contains('C'));
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let reused = seen
        .values()
        .filter(|numbers| numbers.iter().any(|n| *n != numbers[0]))
        .count();
    println!(
        "{in_method} frames in methods, {recycled} stacks recycled, {reused} addresses reused"
    );
    assert!(in_method > 100, "{in_method}");
    assert!(recycled > 5, "{recycled}");
    assert!(cut < 30, "{cut}");
}

#[test]
fn names_read_from_a_running_program_are_of_one_moment() {
    let target = Target::start(include_str!("../programs/churn.rb"));
    let mut names = target.names();
    let mut in_method = 0;
    for _ in 0..3000 {
        let (frames, _) = target.frames();
        names.revalidate(&frames, &target.program);
        let mut stack = Vec::new();
        names.resolve(&frames, &target.program, &mut stack);
        for frame in &stack {
            assert_of_one_class(frame);
            in_method += usize::from(number_of(frame).is_some());
        }
    }
    assert!(in_method > 100, "{in_method}");
}
