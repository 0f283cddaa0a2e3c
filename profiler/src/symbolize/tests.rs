//! Tests over made-up memory: what real programs cannot be brought to do.

use std::cell::Cell;

use rbprof_common::Fault;
use rbprof_common::layout::Embedding;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::imemo;
use rbprof_common::layout::object_type;
use rbprof_common::wire::frame_attr;

use super::test_memory::FakeMemory;
use super::test_memory::of_release;
use super::*;

const ISEQ: u64 = 0x10_0000;
const METHOD: u64 = 0x20_0000;
const CLASS: u64 = 0x30_0000;
const CODE: u64 = 0x40_0000;
const WORDS: u64 = 20;

/// A method `Foo#bar` of Ruby 3.4 at `/a.rb:3`, with line 4 all over.
struct Program {
    layout: &'static Layout,
    memory: FakeMemory,
    strings: u64,
}

impl Program {
    fn new() -> Self {
        let layout = of_release(3, 4);
        assert_eq!(layout.names.embedding, Embedding::Variable);
        let mut program = Self {
            layout,
            memory: FakeMemory::default(),
            strings: 0x50_0000,
        };
        for at in [ISEQ, METHOD, CLASS] {
            program.memory.map(at, 0x4000);
        }
        program.memory.map(program.strings, 0x4000);
        program.iseq(ISEQ, 1, 0, "bar");
        program.method(METHOD, ISEQ);
        program.class(CLASS, "Foo");
        program
    }

    fn string(&mut self, text: &str) -> u64 {
        let at = self.strings;
        self.memory.put(at, object_type::STRING | strings::INTERNED);
        self.memory.put(at + 16, text.len() as u64);
        self.memory.put_bytes(at + 24, text.as_bytes());
        self.strings += 24 + text.len().next_multiple_of(8) as u64;
        at
    }

    fn iseq(&mut self, at: u64, kind: u64, parent: u64, label: &str) {
        let names = &self.layout.names;
        let body = at + 0x100;
        let label = self.string(label);
        let path = self.string("/a.rb");
        let memory = &mut self.memory;
        memory.put(at, object_type::IMEMO | imemo::ISEQ << 12);
        memory.put(at + u64::from(names.iseq_body), body);
        memory.put(body, kind | WORDS << 32);
        memory.put(body + fixed::BODY_ENCODED, CODE);
        memory.put(body + fixed::BODY_PATH, path);
        if let Some(base_label) = names.base_label {
            memory.put(body + u64::from(base_label), label);
        }
        memory.put(body + u64::from(names.label), label);
        memory.put(body + u64::from(names.first_lineno), 3);
        memory.put(body + u64::from(names.insns_info), at + 0x800);
        memory.put(body + u64::from(names.insns_info_size), 1);
        memory.put(body + u64::from(names.parent_iseq), parent);
        let local = if parent == 0 { at } else { ISEQ };
        memory.put(body + u64::from(names.local_iseq), local);
        memory.put(at + 0x800, 4);
    }

    fn method(&mut self, at: u64, iseq: u64) {
        let memory = &mut self.memory;
        memory.put(at, object_type::IMEMO | imemo::MENT << 12);
        memory.put(at + fixed::METHOD_DEFINITION, at + 0x100);
        memory.put(at + fixed::METHOD_OWNER, CLASS);
        memory.put(at + fixed::METHOD_CALLED_ID, 1000 << 4);
        memory.put(at + 0x100 + fixed::DEFINITION_ID, 1000 << 4);
        memory.put(at + 0x100 + fixed::DEFINITION_ISEQ, iseq);
    }

    fn class(&mut self, at: u64, name: &str) {
        let name = self.string(name);
        self.memory.put(at, object_type::CLASS);
        self.memory.put(at + 32 + 112, 1 << 40);
        self.memory.put(at + 32 + 120, name);
        // One method.
        self.memory.put(at + 24, at + 0x800);
        self.memory.put(at + 0x800, 1);
        self.memory.put(at + 0x810, at + 0x900);
        self.memory.put(at + 0x900, 1000);
    }

    fn names(&self) -> RubyNames {
        RubyNames::new(self.layout, None)
    }

    fn resolve(&self, names: &mut RubyNames, frames: &[Frame]) -> Vec<String> {
        let mut out = Vec::new();
        names.resolve(frames, &self.memory, &mut out);
        out.iter()
            .map(|frame| {
                let function = &frame.function;
                format!("{} {}:{}", function.label, function.file, frame.line)
            })
            .collect()
    }
}

fn ruby(iseq: u64, pc: u64, method_entry: u64) -> Frame {
    Frame::new(frame_kind::RUBY, iseq, pc, method_entry)
}

const FRAME: Frame = Frame::new(frame_kind::RUBY, ISEQ, CODE + 8, METHOD);

#[test]
fn the_collector_is_shown_with_what_it_does_on_top() {
    let program = Program::new();
    let mut names = program.names();
    let shown = |names: &mut RubyNames, phase| {
        let collector = Frame::new(frame_kind::COLLECTOR, phase, 0, 0);
        let mut out = Vec::new();
        names.resolve(&[collector, FRAME], &program.memory, &mut out);
        let codes: Vec<Executed> = out.iter().map(|frame| frame.code).collect();
        let (last, above) = codes.split_last().unwrap();
        assert_eq!(*last, Executed::Ruby);
        assert!(above.iter().all(|code| *code == Executed::Collector));
        let labels = out.iter().map(|frame| frame.function.label.to_string());
        labels.collect::<Vec<_>>()
    };
    let collection = "(garbage collection)";
    for (phase, label) in [
        (gc_phase::MARKING, "(marking)"),
        (gc_phase::SWEEPING, "(sweeping)"),
        (gc_phase::COMPACTING, "(compacting)"),
    ] {
        assert_eq!(shown(&mut names, phase), [label, collection, "Foo#bar"]);
    }
    for phase in [gc_phase::OTHER, 4, u64::MAX] {
        assert_eq!(shown(&mut names, phase), [collection, "Foo#bar"]);
    }
}

#[test]
fn only_frames_that_ruby_shows_are_shown() {
    let program = Program::new();
    let frames = [
        FRAME,
        Frame::new(frame_kind::IFUNC, 0, 0, METHOD),
        ruby(ISEQ, 0, METHOD),
        Frame::new(frame_kind::UNKNOWN | frame_attr::FINISH, ISEQ, 7, 0),
    ];
    let found = program.resolve(&mut program.names(), &frames);
    assert_eq!(found, ["Foo#bar /a.rb:4", "<unknown frame> :0"]);
}

#[test]
fn a_clause_stands_for_the_code_around_it() {
    let mut program = Program::new();
    let (rescue, ensure) = (ISEQ + 0x1000, ISEQ + 0x2000);
    program.iseq(rescue, 4, ISEQ, "rescue in bar");
    program.iseq(ensure, 5, rescue, "ensure in rescue in bar");
    let pc = CODE + 8;
    let frames = [
        ruby(ensure, pc, METHOD),
        ruby(rescue, pc, METHOD),
        FRAME,
        FRAME,
        ruby(rescue, pc, METHOD),
        // Not the code around the clause, so not hidden by it.
        ruby(ensure, pc, METHOD),
    ];
    let found = program.resolve(&mut program.names(), &frames);
    assert_eq!(found, ["Foo#bar /a.rb:4"; 4]);
}

#[test]
fn a_steady_stack_is_checked_in_one_round() {
    let program = Program::new();
    let mut names = program.names();
    let frames = vec![FRAME; 5000];
    assert_eq!(program.resolve(&mut names, &frames).len(), 5000);
    program.memory.rounds.set(0);
    program.memory.requests.set(0);
    assert!(names.revalidate(&frames, &program.memory));
    assert_eq!(program.memory.rounds.get(), 1);
    assert!(program.memory.requests.get() < 16);
    program.memory.requests.set(0);
    assert_eq!(program.resolve(&mut names, &frames).len(), 5000);
    assert_eq!(program.memory.requests.get(), 0);
}

#[test]
fn a_name_does_not_survive_the_object_it_was_read_from() {
    type Change = fn(&mut Program);
    let changes: [(Change, &str); 9] = [
        (|p| p.iseq(ISEQ, 1, 0, "other"), "Foo#other /a.rb:4"),
        (|p| p.class(CLASS, "Other"), "Other#bar /a.rb:4"),
        // Anonymous now.
        (|p| p.memory.put(CLASS + 32 + 112, 0), "bar /a.rb:4"),
        // A class that has no such method.
        (|p| p.memory.put(CLASS + 0x900, 1001), "bar /a.rb:4"),
        // The entry is now that of a method made of other code.
        (|p| p.method(METHOD, ISEQ + 0x1000), "bar /a.rb:4"),
        // No longer what they were.
        (|p| p.memory.put(METHOD, object_type::STRING), "bar /a.rb:4"),
        (
            |p| p.memory.put(METHOD, object_type::IMEMO | imemo::SVAR << 12),
            "bar /a.rb:4",
        ),
        (|p| p.memory.put(ISEQ, 0), "<unreadable> :0"),
        (
            |p| {
                p.memory
                    .put(ISEQ + 0x100 + fixed::BODY_ENCODED, CODE + 0x1000);
            },
            "<unreadable> :0",
        ),
    ];
    for (index, (change, expected)) in changes.into_iter().enumerate() {
        let mut program = Program::new();
        let mut names = program.names();
        assert_eq!(program.resolve(&mut names, &[FRAME]), ["Foo#bar /a.rb:4"]);
        assert!(names.revalidate(&[FRAME], &program.memory));
        change(&mut program);
        assert!(
            !names.revalidate(&[FRAME], &program.memory),
            "change {index}"
        );
        assert_eq!(
            program.resolve(&mut names, &[FRAME]),
            [expected],
            "change {index}"
        );
    }
}

#[test]
fn bytes_of_a_name_are_evidence() {
    let mut program = Program::new();
    let mut names = program.names();
    program.resolve(&mut names, &[FRAME]);
    let label = program
        .memory
        .word(ISEQ + 0x100 + u64::from(program.layout.names.label))
        .unwrap();
    program.memory.put_bytes(label + 24, b"baz");
    assert!(!names.revalidate(&[FRAME], &program.memory));
    assert_eq!(program.resolve(&mut names, &[FRAME]), ["Foo#baz /a.rb:4"]);
}

#[test]
fn a_pc_outside_of_the_code_is_another_sequence_unless_there_is_machine_code() {
    let mut program = Program::new();
    let stale = ruby(ISEQ, CODE + 8 * (WORDS + 1), METHOD);
    let mut names = program.names();
    assert_eq!(
        program.resolve(&mut names, &[FRAME, stale]),
        ["Foo#bar /a.rb:4", "<unreadable> :0"]
    );
    let jit = ISEQ + 0x100 + u64::from(program.layout.names.jit_entry);
    program.memory.put(jit, 0x7fff_0000);
    assert_eq!(
        program.resolve(&mut names, &[FRAME, stale]),
        ["Foo#bar /a.rb:4", "Foo#bar /a.rb:0"]
    );
}

#[test]
fn a_frame_whose_pc_machine_code_hides_is_shown_without_a_line() {
    let program = Program::new();
    let hidden = Frame::new(frame_kind::RUBY | frame_attr::NO_PC, ISEQ, 0, METHOD);
    assert_eq!(
        program.resolve(&mut program.names(), &[hidden, FRAME]),
        ["Foo#bar /a.rb:0", "Foo#bar /a.rb:4"]
    );
}

/// Memory of which one byte is another whenever it is read.
struct Flickering<'a> {
    memory: &'a FakeMemory,
    label: u64,
    reads: Cell<u64>,
}

impl TargetMemory for Flickering<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.memory.read(address, buffer)?;
        if let Some(at) = self.label.checked_sub(address)
            && let Some(byte) = buffer.get_mut(at as usize)
        {
            self.reads.set(self.reads.get() + 1);
            *byte = b'a' + (self.reads.get() % 26) as u8;
        }
        Ok(())
    }
}

#[test]
fn a_name_that_changes_while_it_is_read_is_not_shown() {
    let program = Program::new();
    let label = program
        .memory
        .word(ISEQ + 0x100 + u64::from(program.layout.names.label))
        .unwrap();
    let memory = Flickering {
        memory: &program.memory,
        label: label + 24,
        reads: Cell::new(0),
    };
    let mut out = Vec::new();
    program.names().resolve(&[FRAME, FRAME], &memory, &mut out);
    let labels: Vec<&str> = out.iter().map(|frame| &*frame.function.label).collect();
    assert_eq!(labels, [UNREADABLE, UNREADABLE]);
}

/// Memory made up by an enemy: every address can be read, objects are of the
/// type that leads on, and point anywhere, also at themselves.
struct Hostile {
    seed: u64,
    reads: Cell<u64>,
    largest: Cell<usize>,
}

impl Hostile {
    fn word_at(&self, address: u64) -> u64 {
        let mut x = (address / 8)
            .wrapping_add(self.seed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 32;
        let kind = [
            object_type::IMEMO | imemo::ISEQ << 12,
            object_type::IMEMO | imemo::MENT << 12,
            object_type::STRING | 1 << 13,
            object_type::ARRAY,
            object_type::CLASS,
            object_type::CLASS | 3 << 12,
        ][(x >> 8) as usize % 6];
        // Sequences of the types that have parents.
        let chain = [2, 4, 5, 6][(x >> 8) as usize % 4] | 0xffff << 32;
        match x % 16 {
            0 => kind,
            1 => chain,
            2 => x,
            3 => x >> 40,
            4 => u64::MAX,
            5 => 0,
            // Few places, so that there are cycles.
            _ => 0x1000 + (x >> 16) % 512 * 8,
        }
    }
}

impl TargetMemory for Hostile {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.reads.set(self.reads.get() + 1);
        self.largest.set(self.largest.get().max(buffer.len()));
        if self.seed % 3 == 1 && address > 1 << 47 {
            return Err(Fault);
        }
        for (index, byte) in buffer.iter_mut().enumerate() {
            let at = address.wrapping_add(index as u64);
            *byte = self.word_at(at).to_le_bytes()[(at % 8) as usize];
        }
        Ok(())
    }
}

#[test]
fn hostile_memory_costs_bounded_time_and_memory() {
    for seed in 0..400 {
        let memory = Hostile {
            seed,
            reads: Cell::new(0),
            largest: Cell::new(0),
        };
        let layout = &LAYOUTS[seed as usize % LAYOUTS.len()];
        let mut names = RubyNames::new(layout, Some(0x1000)).with_vm(0x1008);
        let frames: Vec<Frame> = (0..64)
            .map(|index| {
                let at = memory.word_at(index << 20) & ((1 << 56) - 1);
                let method_entry = memory.word_at(index << 21);
                let kind = 1 + index % 4;
                Frame::new(kind, at, memory.word_at(index << 22), method_entry)
            })
            .collect();
        let mut out = Vec::new();
        for _ in 0..2 {
            names.resolve(&frames, &memory, &mut out);
            names.revalidate(&frames, &memory);
        }
        assert!(out.len() <= 2 * frames.len());
        assert!(memory.reads.get() <= 2 * 4 * u64::from(MAX_READS));
        assert!(memory.largest.get() <= 1 << 16);
        for frame in &out {
            assert!(frame.function.label.len() < 1 << 16);
        }
    }
}

/// A sequence that is a block in itself, without end.
struct Mirror;

impl TargetMemory for Mirror {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        const OBJECT: u64 = 0x1000;
        for (index, byte) in buffer.iter_mut().enumerate() {
            let at = address.wrapping_add(index as u64);
            let word = match at / 8 * 8 % 0x1000 {
                0 => object_type::IMEMO | imemo::ISEQ << 12,
                16 => OBJECT + 0x800,
                0x800 => 2 | 100 << 32,
                0x808 => CODE,
                _ => OBJECT,
            };
            *byte = word.to_le_bytes()[(at % 8) as usize];
        }
        Ok(())
    }
}

#[test]
fn a_sequence_that_is_its_own_parent_ends() {
    for layout in &LAYOUTS {
        let mut names = RubyNames::new(layout, None);
        let mut out = Vec::new();
        names.resolve(&[ruby(0x1000, CODE + 8, 0)], &Mirror, &mut out);
        assert_eq!(&*out[0].function.label, UNREADABLE);
    }
}

/// Resolves [`FRAME`] of a sample, with a look at the memory at `now`.
fn resolve_taken(
    program: &Program,
    names: &mut RubyNames,
    taken: Moment,
    now: Moment,
) -> (bool, String, u32) {
    let mut out = Vec::new();
    let believed = names.resolve_taken(&[FRAME], &program.memory, taken, || now, &mut out);
    let [Resolved { function, line, .. }] = out.as_slice() else {
        panic!("{out:?}");
    };
    (believed, function.label.to_string(), *line)
}

fn at(time: u64, epoch: u64) -> Moment {
    Moment { time, epoch }
}

fn good() -> (bool, String, u32) {
    (true, "Foo#bar".to_owned(), 4)
}

fn withheld() -> (bool, String, u32) {
    (false, UNREADABLE.to_owned(), 0)
}

#[test]
fn a_name_that_may_have_been_freed_before_it_was_read_is_withheld() {
    let program = Program::new();
    let mut names = program.names();
    // The collector ran between the sample and the look.
    let found = resolve_taken(&program, &mut names, at(10, 1), at(20, 2));
    assert_eq!(found, withheld());
    // What was read then is good for samples that are taken from then on ...
    let found = resolve_taken(&program, &mut names, at(21, 3), at(30, 4));
    assert_eq!(found, good());
    // ... or since that collection, but not for older ones that come late.
    let found = resolve_taken(&program, &mut names, at(19, 2), at(30, 4));
    assert_eq!(found, good());
    let found = resolve_taken(&program, &mut names, at(11, 1), at(30, 4));
    assert_eq!(found, withheld());
}

#[test]
fn a_name_is_believed_if_nothing_was_collected_meanwhile() {
    let program = Program::new();
    let mut names = program.names();
    let found = resolve_taken(&program, &mut names, at(10, 1), at(20, 1));
    assert_eq!(found, good());
    // Where the collections are not known, there is no better guess.
    let mut names = program.names();
    let found = resolve_taken(&program, &mut names, at(10, 0), at(20, 0));
    assert_eq!(found, good());
}
