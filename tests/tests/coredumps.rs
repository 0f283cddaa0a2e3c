//! Walk and names on the core dumps of `rbspy-testdata`, against stacks that
//! were worked out by hand.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use rbprof::memory::TargetMemory;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;
use rbprof::symbolize::RubyNames;
use rbprof_common::layout;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Machine;
use rbprof_common::layout::Version;
use rbprof_common::layout::collector_flags;
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
        let data = roots::ruby_data(memory.segments(), &memory.files);
        let roots = roots::find(&memory, &data, layout, version);
        Self {
            memory,
            layout,
            roots,
        }
    }

    fn frames(&self) -> Vec<Frame> {
        let mut frames = Frames::default();
        let flags = walk_all(
            &self.roots.main,
            &self.layout.walk,
            &self.memory,
            &mut Scratch::new(),
            &mut frames,
        );
        assert_eq!(flags, 0, "the walk was not complete");
        frames.0
    }

    fn names(&self) -> RubyNames {
        RubyNames::new(self.layout, self.roots.global_symbols).with_vm(self.roots.vm)
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

/// What has to be shown for a frame.
fn expected(truth: &TrueFrame) -> &str {
    let better = truth.c_name.as_ref().or(truth.ruby34_label.as_ref());
    better.unwrap_or(&truth.label)
}

fn same(found: &Resolved, truth: &TrueFrame) -> bool {
    let function = &*found.function;
    let file = match &truth.path {
        Some(path) => function.file.ends_with(path),
        None => function.kind == FunctionKind::CFunction && &*function.file == "<cfunc>",
    };
    let line = truth.line.or(truth.path_line).unwrap_or(0);
    *function.label == *expected(truth) && file && found.line == line
}

/// Dumps that a file of truth may be about: its name there, the dump's file, and
/// the release.
const DUMPS: [(&str, &str, Version); 8] = [
    ("2.7.2", "2.7.2", Version::new(2, 7, 2)),
    ("3.0.0", "3.0.0", Version::new(3, 0, 0)),
    ("3.1.0", "3.1.0", Version::new(3, 1, 0)),
    ("3.2.0", "3.2.0", Version::new(3, 2, 0)),
    ("3.3.0", "3.3.0", Version::new(3, 3, 0)),
    (
        "3.3.0-with-classes",
        "with-classes-3.3.0",
        Version::new(3, 3, 0),
    ),
    ("3.4.5-complex", "complex-3.4.5", Version::new(3, 4, 5)),
    ("4.0.0", "4.0.0", Version::new(4, 0, 0)),
];

/// Checks the stack of a dump against the file of truth for it.
fn check(name: &str) {
    let (_, file, version) = *DUMPS.iter().find(|dump| dump.0 == name).unwrap();
    let truth = truth::all().unwrap();
    let truth = truth.iter().find(|truth| truth.dump == name).unwrap();
    let dump = Dump::load(file, version);
    let stack = dump.stack();
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
fn every_truth_is_checked() {
    for truth in truth::all().unwrap() {
        assert!(
            DUMPS.iter().any(|dump| dump.0 == truth.dump),
            "{}",
            truth.dump
        );
    }
}

#[test]
fn ruby_2_7_2() {
    check("2.7.2");
}

#[test]
fn ruby_3_0_0() {
    check("3.0.0");
}

#[test]
fn ruby_3_1_0() {
    check("3.1.0");
}

#[test]
fn ruby_3_2_0_on_arm64() {
    check("3.2.0");
}

#[test]
fn ruby_3_3_0() {
    check("3.3.0");
}

#[test]
fn ruby_3_3_0_with_classes() {
    check("3.3.0-with-classes");
}

#[test]
fn ruby_3_4_5_complex() {
    check("3.4.5-complex");
}

#[test]
fn ruby_4_0_0() {
    check("4.0.0");
}

/// On x86-64, a thread has its context in one word of its static TLS area, as
/// the search for it on a stripped Ruby expects.
#[test]
fn the_context_is_thread_local() {
    for (_, file, version) in DUMPS {
        let dump = Dump::load(file, version);
        let has_thread_pointer = dump.memory.threads[0].thread_pointer.is_some();
        let thread_local = has_thread_pointer && version >= Version::new(3, 0, 0);
        let places = roots::thread_local_places(&dump.memory, dump.roots.main.ec);
        assert_eq!(
            places.len(),
            usize::from(thread_local),
            "{file}: {places:?}"
        );
    }
}

/// All dumps are of one Ractor, and of threads that do not collect.
#[test]
fn collectors_are_where_the_table_has_them() {
    for (_, file, version) in DUMPS {
        let dump = Dump::load(file, version);
        let vm = dump.roots.vm;
        let word = |addr: u64| TargetMemory::word(&dump.memory, addr).unwrap();
        let machine = if version == Version::new(3, 2, 0) {
            Machine::Aarch64
        } else {
            Machine::X86_64
        };
        if let Some(offsets) = dump.layout.collector_on(machine) {
            let flags = word(word(vm + offsets.vm_objspace) + offsets.objspace.flags);
            eprintln!("{file}: flags {flags:#x}");
            // Flags take 13 bits. A phase may be under way, but none of them is
            // of a thread that collects, or was told not to.
            let impossible = 1 << 3 | collector_flags::DURING_GC | 0xffff_e000;
            assert_eq!(flags & impossible, 0, "{file}: {flags:#x}");
        }
        let ractors = dump.layout.ractors_on(machine);
        assert_eq!(ractors.is_some(), version >= Version::new(3, 0, 0));
        if let Some(offsets) = ractors {
            let ec = dump.roots.main.ec;
            let thread = word(ec + u64::from(dump.layout.walk.ec_thread));
            let ractor = word(thread + u64::from(offsets.thread_ractor));
            assert_eq!(word(ractor + u64::from(offsets.running_ec)), ec, "{file}");
            assert_eq!(word(vm + offsets.vm_ractors) as u32, 1, "{file}");
            assert_eq!(word(vm + offsets.vm_lock_owner), 0, "{file}");
        }
    }
}

#[test]
fn without_a_symbol_table_c_methods_keep_their_class() {
    let dump = Dump::load("3.1.0", Version::new(3, 1, 0));
    let mut names = RubyNames::new(dump.layout, None);
    let mut stack = Vec::new();
    names.resolve(&dump.frames(), &dump.memory, &mut stack);
    assert_eq!(&*stack[0].function.label, "Kernel#<unknown cfunc>");
    assert_eq!(&*stack[0].function.file, "<cfunc>");
}

#[test]
fn remembered_names_stay_the_same_and_hold() {
    let dump = Dump::load("complex-3.4.5", Version::new(3, 4, 5));
    let frames = dump.frames();
    let mut names = dump.names();
    let mut first = Vec::new();
    names.resolve(&frames, &dump.memory, &mut first);
    assert!(names.revalidate(&frames, &dump.memory));
    let mut second = Vec::new();
    names.resolve(&frames, &dump.memory, &mut second);
    assert_eq!(first, second);
}
