//! Walk and names on the core dumps of `rbspy-testdata`, against stacks that
//! were worked out by hand.

use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;
use rbprof::symbolize::RubyNames;
use rbprof_common::layout;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::walk::FrameSink;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::walk_all;
use rbprof_common::wire::Frame;
use rbprof_tests::coredump::CoreDump;
use rbprof_tests::roots;
use rbprof_tests::roots::Roots;
use rbprof_tests::truth;
use rbprof_tests::truth::TrueFrame;

/// A dump with everything that was found in it.
struct Dump {
    memory: CoreDump,
    layout: &'static Layout,
    version: Version,
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

impl Dump {
    fn load(file: &str, version: Version) -> Self {
        let memory = CoreDump::load(file).unwrap();
        let layout::Lookup::Known(layout) = layout::lookup(version) else {
            panic!("no layout for {version}");
        };
        let roots = roots::find(&memory, layout, version);
        Self {
            memory,
            layout,
            version,
            roots,
        }
    }

    fn frames(&self) -> Vec<Frame> {
        let mut frames = Frames::default();
        let flags = walk_all(
            &self.roots.main,
            self.layout.walk.cfp_size,
            &self.memory,
            &mut Scratch::new(),
            &mut frames,
        );
        assert_eq!(flags, 0, "the walk was not complete");
        frames.0
    }

    fn names(&self) -> RubyNames {
        RubyNames::new(self.layout, self.version, self.roots.global_symbols).with_vm(self.roots.vm)
    }

    fn stack(&self) -> Vec<Resolved> {
        let mut stack = Vec::new();
        self.names()
            .resolve(&self.frames(), &self.memory, &mut stack);
        stack
    }
}

fn shown(frame: &Resolved) -> String {
    let Function { label, file, .. } = &*frame.function;
    format!("{label} {file}:{}", frame.line)
}

fn same(found: &Resolved, truth: &TrueFrame) -> bool {
    let function = &*found.function;
    let label = match truth.label.rsplit_once("<C function>") {
        Some((class, "")) => {
            function.kind == FunctionKind::CFunction
                && function.label.starts_with(class)
                && !function.base_label.starts_with('<')
        }
        _ => *function.label == *truth.label,
    };
    let file = truth.file.as_ref().is_none_or(|file| {
        function.file.rsplit('/').next() == Some(file)
    });
    label && file && truth.line.is_none_or(|line| found.line == line)
}

/// Checks the stack of a dump against the file of truth for it.
fn check(name: &str, file: &str, version: Version) {
    let dump = Dump::load(file, version);
    let stack = dump.stack();
    let truth = truth::all()
        .unwrap()
        .into_iter()
        .find(|truth| truth.dump == name);
    for frame in &stack {
        println!("{}", shown(frame));
    }
    let truth = truth.unwrap();
    for (index, (found, truth)) in stack.iter().zip(&truth.frames).enumerate() {
        assert!(
            same(found, truth),
            "frame {index}: {} is not {truth:?}",
            shown(found)
        );
    }
    assert_eq!(stack.len(), truth.frames.len());
}

#[test]
fn ruby_2_7_2() {
    check("2.7.2", "2.7.2", Version::new(2, 7, 2));
}

#[test]
fn ruby_3_0_0() {
    check("3.0.0", "3.0.0", Version::new(3, 0, 0));
}

#[test]
fn ruby_3_1_0() {
    check("3.1.0", "3.1.0", Version::new(3, 1, 0));
}

#[test]
fn ruby_3_2_0_arm64() {
    check("3.2.0", "3.2.0", Version::new(3, 2, 0));
}

#[test]
fn ruby_3_3_0() {
    check("3.3.0", "3.3.0", Version::new(3, 3, 0));
}

#[test]
fn ruby_3_3_0_with_classes() {
    check("3.3.0-with-classes", "with-classes-3.3.0", Version::new(3, 3, 0));
}

#[test]
fn ruby_3_4_5_complex() {
    check("3.4.5-complex", "complex-3.4.5", Version::new(3, 4, 5));
}

#[test]
fn ruby_4_0_0() {
    check("4.0.0", "4.0.0", Version::new(4, 0, 0));
}
