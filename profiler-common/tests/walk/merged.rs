//! The walk over both stacks of a thread, laid out by hand.

use crate::stacks::EC;
use crate::stacks::Vm;
use crate::support::Frames;
use crate::support::Words;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::frame_flags;
use rbprof_common::layout::imemo;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::Range;
use rbprof_common::roots;
use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Registers;
use rbprof_common::unwind::Row;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::saved;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::merged::MAX_NATIVE;
use rbprof_common::walk::merged::MAX_STEPS;
use rbprof_common::walk::merged::Walk;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::Page;
use rbprof_common::walk::native::Tables;
use rbprof_common::walk::native::mapping_flags;
use rbprof_common::wire::Frame;
use rbprof_common::wire::MAX_FRAMES;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::gc_phase;
use rbprof_common::wire::object;
use rbprof_common::wire::sample_flags;

const RUBY: u64 = 0x10_0000;
const EXTENSION: u64 = 0x20_0000;
const NEW_LIBRARY: u64 = 0x30_0000;
const JIT: u64 = 0x40_0000;
const NOWHERE: u64 = 0x50_0000;
/// Calls that have not returned, in functions of the interpreter.
const CALL: u64 = RUBY + 0x100;
const START: u64 = RUBY + 0x2000;
/// Where, in its file, a function begins.
const FUNCTION: u64 = 0x800;
const VM_EXEC: u64 = RUBY + 0x1000;
const NATIVE_STACK: u64 = 0x9000_0000;
const METHOD: u64 = frame_flags::METHOD | frame_flags::ENV_LOCAL;
const CFUNC: u64 = frame_flags::CFUNC | frame_flags::ENV_LOCAL;

const INTERPRETER: u32 = object::FIRST_FILE;
const OTHER: u32 = object::FIRST_FILE + 1;

/// Every function has a frame of two words, the return address in the second;
/// from `START` on there is no caller.
struct Program {
    mappings: Vec<Mapping>,
    rows: Box<Chunk>,
    rules: [Rule; 4],
}

impl Program {
    fn new(flags: u32) -> Self {
        let mapping = |start, object, pages, flags| Mapping {
            start,
            end: start + PAGE,
            bias: if object < object::FIRST_FILE {
                0
            } else {
                start
            },
            object,
            pages_at: 0,
            first_page: 0,
            pages,
            flags,
            reserved: 0,
        };
        let mut rows: Box<Chunk> = Box::new([Row::default(); 1 << 14]);
        let filled = [
            (0, 1),
            (FUNCTION as u16, 3),
            (FUNCTION as u16 + 4, 1),
            (0x2000, 2),
            (0x3000, 0),
        ];
        for (row, (pc, rule)) in rows.iter_mut().zip(filled) {
            *row = Row { pc, rule };
        }
        Self {
            mappings: vec![
                mapping(RUBY, INTERPRETER, 1, flags | mapping_flags::INTERPRETER),
                mapping(EXTENSION, OTHER, 1, 0),
                mapping(NEW_LIBRARY, OTHER + 1, 0, 0),
                mapping(JIT, object::ANONYMOUS, 0, 0),
            ],
            rows,
            rules: [
                Rule::UNKNOWN,
                Rule {
                    cfa: cfa::SP,
                    ra: saved::AT_CFA,
                    fp: saved::SAME,
                    extra: 0,
                    cfa_offset: 16,
                    ra_offset: -8,
                    fp_offset: 0,
                },
                Rule::END,
                Rule {
                    cfa: cfa::SP,
                    ..Rule::UNKNOWN
                },
            ],
        }
    }
}

impl Tables for Program {
    fn mapping(&self, at: u32) -> Option<&Mapping> {
        self.mappings.get(at as usize)
    }

    fn page(&self, _: u32) -> Option<Page> {
        Some(Page {
            chunk: 0,
            first: 0,
            count: 5,
        })
    }

    fn chunk(&self, _: u32) -> Option<&Chunk> {
        Some(&self.rows)
    }

    fn rule(&self, number: u16) -> Option<&Rule> {
        self.rules.get(usize::from(number))
    }
}

/// A thread: its VM stack, and its native one, innermost function first.
struct Thread {
    vm: Vm,
    method: u64,
    layout: WalkLayout,
    program: Program,
    sp: u64,
    pc: u64,
    next: u64,
    collecting: Option<u64>,
    code_mask: u64,
}

impl Thread {
    fn new() -> Self {
        let layout = LAYOUTS.iter().rfind(|it| it.walk.cfp_size == 56).unwrap();
        let mut vm = Vm::new(56);
        Self {
            method: vm.object(imemo::MENT, 0),
            vm,
            layout: layout.walk,
            program: Program::new(0),
            sp: NATIVE_STACK,
            pc: 0,
            next: NATIVE_STACK,
            collecting: None,
            code_mask: u64::MAX,
        }
    }

    /// Ruby frames from the outermost to the newest; those with a number below
    /// 0 end an activation, 0 is a C method.
    fn ruby(mut self, frames: &[i64]) -> Self {
        for &frame in frames {
            let iseq = frame.unsigned_abs() << 8;
            let finish = if frame < 0 { frame_flags::FINISH } else { 0 };
            match frame {
                0 => self.vm.push(0, 0, CFUNC, self.method, 0),
                _ => self
                    .vm
                    .push(iseq, iseq + 8, METHOD | finish, self.method, 0),
            };
        }
        self
    }

    /// Native frames by the address where each stands, leaf first.
    fn native(mut self, frames: &[u64]) -> Self {
        let (leaf, callers) = frames.split_first().unwrap();
        self.pc = *leaf;
        for caller in callers {
            self.vm.memory.put(self.next, 0xbad);
            self.vm.memory.put(self.next + 8, caller + 1);
            self.next += 16;
        }
        self.vm.memory.put(self.next, 0);
        self.vm.memory.put(self.next + 8, 0);
        self
    }

    fn entry(&self) -> ProcessEntry {
        ProcessEntry {
            vm_exec: [
                Range {
                    start: VM_EXEC,
                    end: VM_EXEC + 0x100,
                },
                Range::default(),
            ],
            mappings_at: 0,
            mappings: 4,
            layout: self.layout,
            ..ProcessEntry::default()
        }
    }

    fn walk(&self) -> (u32, Vec<Frame>) {
        self.walk_entry(&self.entry(), true)
    }

    fn walk_entry(&self, entry: &ProcessEntry, has_context: bool) -> (u32, Vec<Frame>) {
        let memory = self.vm.memory.memory();
        let context = roots::read_context(EC, &self.layout, &memory).unwrap();
        let registers = Registers::newest(self.pc, self.sp, 0, 0, self.code_mask);
        let mut walk = Walk::default();
        walk.start(&registers, has_context.then_some(&context), entry);
        if let Some(phase) = self.collecting {
            walk.collecting(Frame::new(frame_kind::COLLECTOR, phase, 0, 0));
        }
        let mut frames = Frames::default();
        let mut scratch = Scratch::new();
        for _ in 0..MAX_STEPS {
            if !walk.step(&memory, &self.program, &mut scratch, &mut frames) {
                break;
            }
        }
        (walk.finish(), frames.0)
    }

    fn ruby_frame(&self, number: i64) -> Frame {
        let iseq = number.unsigned_abs() << 8;
        let finish = if number < 0 { frame_attr::FINISH } else { 0 };
        match number {
            0 => Frame::new(frame_kind::CFUNC, 0, 0, self.method),
            _ => Frame::new(frame_kind::RUBY | finish, iseq, iseq + 8, self.method),
        }
    }
}

const fn interpreter(address: u64) -> Frame {
    Frame::native(INTERPRETER, address - RUBY)
}

const fn extension(address: u64) -> Frame {
    Frame::native(OTHER, address - EXTENSION)
}

const ACTIVATION: Frame = Frame::activation(INTERPRETER, VM_EXEC + 8 - RUBY);
const EXEC: u64 = VM_EXEC + 8;

#[test]
fn ruby_frames_come_where_their_activation_is() {
    // main (1), a method (2) of it, a C method that yields to a block (3), and a
    // C method that is running.
    let thread = Thread::new().ruby(&[-1, 2, 0, -3, 0]).native(&[
        EXTENSION + 5,
        CALL,
        EXEC,
        EXTENSION + 9,
        CALL + 4,
        EXEC,
        CALL + 8,
        START,
    ]);
    let ruby = |number| thread.ruby_frame(number);
    let expected = [
        extension(EXTENSION + 5),
        interpreter(CALL),
        ruby(0),
        ruby(-3),
        ACTIVATION,
        extension(EXTENSION + 9),
        interpreter(CALL + 4),
        ruby(0),
        ruby(2),
        ruby(-1),
        ACTIVATION,
        interpreter(CALL + 8),
        interpreter(START),
    ];
    assert_eq!(thread.walk(), (0, expected.to_vec()));
}

#[test]
fn hidden_frames_are_walked_but_not_sent() {
    let mut thread = Thread::new().ruby(&[-1, 0]).native(&[
        CALL,
        EXTENSION + 5,
        CALL + 4,
        EXEC,
        CALL + 8,
        START,
    ]);
    thread.program = Program::new(mapping_flags::HIDDEN);
    let expected = [
        extension(EXTENSION + 5),
        thread.ruby_frame(0),
        thread.ruby_frame(-1),
        ACTIVATION,
    ];
    assert_eq!(thread.walk(), (0, expected.to_vec()));
    // A thread that runs no Ruby has nothing else to show.
    let all = [
        interpreter(CALL),
        extension(EXTENSION + 5),
        interpreter(CALL + 4),
        ACTIVATION,
        interpreter(CALL + 8),
        interpreter(START),
    ];
    let (flags, frames) = thread.walk_entry(&thread.entry(), false);
    assert_eq!((flags, frames), (sample_flags::UNMATCHED, all.to_vec()));
}

#[test]
fn the_collector_is_on_top_of_the_ruby_frames() {
    let mut thread = Thread::new().ruby(&[-1, 0]).native(&[CALL, EXEC, START]);
    thread.collecting = Some(gc_phase::SWEEPING);
    let expected = [
        interpreter(CALL),
        Frame::new(frame_kind::COLLECTOR, gc_phase::SWEEPING, 0, 0),
        thread.ruby_frame(0),
        thread.ruby_frame(-1),
        ACTIVATION,
        interpreter(START),
    ];
    assert_eq!(thread.walk(), (0, expected.to_vec()));
}

#[test]
fn all_ruby_frames_are_there_wherever_the_native_stack_is_cut() {
    for (place, object, why) in [
        (NEW_LIBRARY + 8, OTHER + 1, sample_flags::NO_TABLE),
        (NOWHERE, object::UNKNOWN, sample_flags::UNMAPPED),
        (RUBY + 0x3008, INTERPRETER, 0),
    ] {
        let thread = Thread::new().ruby(&[-1, 2, 0, -3, 0]).native(&[
            EXTENSION + 5,
            place,
            EXEC,
            CALL,
            EXEC,
            START,
        ]);
        let (flags, frames) = thread.walk();
        assert_eq!(flags, sample_flags::NATIVE_CUT | why, "{place:x}");
        let own = match object {
            object::UNKNOWN => place,
            INTERPRETER => place - RUBY,
            _ => place - NEW_LIBRARY,
        };
        assert_eq!(
            frames[..2],
            [extension(EXTENSION + 5), Frame::native(object, own)]
        );
        let ruby: Vec<Frame> = [0, -3, 0, 2, -1].map(|it| thread.ruby_frame(it)).to_vec();
        assert_eq!(frames[2..], ruby);
    }
}

#[test]
fn a_side_that_is_used_up_first_is_told() {
    // A frame was pushed for which `rb_vm_exec` has not been called yet.
    let thread = Thread::new()
        .ruby(&[-1, 0, -2])
        .native(&[CALL, EXEC, START]);
    let (flags, frames) = thread.walk();
    assert_eq!(flags, sample_flags::UNMATCHED);
    assert_eq!(frames.len(), 6, "nothing is lost: {frames:?}");
    // The last frame was popped, and `rb_vm_exec` has not returned.
    let thread = Thread::new()
        .ruby(&[-1, 0])
        .native(&[EXEC, CALL, EXEC, START]);
    let (flags, frames) = thread.walk();
    assert_eq!(flags, sample_flags::UNMATCHED);
    assert_eq!(frames.len(), 6, "nothing is lost: {frames:?}");
}

#[test]
fn a_fiber_may_begin_with_c_functions() {
    let thread = Thread::new()
        .ruby(&[0, 0, -1, 0])
        .native(&[EXTENSION + 5, EXEC, CALL, START]);
    let expected = [
        extension(EXTENSION + 5),
        thread.ruby_frame(0),
        thread.ruby_frame(-1),
        ACTIVATION,
        interpreter(CALL),
        interpreter(START),
        thread.ruby_frame(0),
        thread.ruby_frame(0),
    ];
    assert_eq!(thread.walk(), (0, expected.to_vec()));
}

#[test]
fn a_fiber_on_arm64_begins_with_a_function_that_returns_to_itself() {
    const ENTRY: u64 = RUBY + FUNCTION;
    const NOP: u64 = 0xd503_201f;
    const CALL_BACK: u64 = 0x97ff_ff00;
    // `native` has the return address one behind.
    let native = [CALL, VM_EXEC + 8, ENTRY + 0x20, ENTRY - 1];
    let mut thread = Thread::new().ruby(&[-1, 2]).native(&native);
    let mut frames = vec![
        interpreter(CALL),
        thread.ruby_frame(2),
        thread.ruby_frame(-1),
        ACTIVATION,
        interpreter(ENTRY + 0x20),
    ];
    thread.code_mask = (1 << 48) - 1;
    // Behind the last instruction of another function, be it a call.
    for before in [NOP, CALL_BACK] {
        thread.vm.memory.put(ENTRY - 4, before);
        assert_eq!(thread.walk(), (0, frames.clone()), "{before:x}");
    }
    // Where no function begins, that is a return address like any other, and so
    // it is on another machine.
    frames.push(interpreter(ENTRY - 1));
    thread.program.rules[3] = thread.program.rules[1];
    assert_eq!(thread.walk(), (0, frames.clone()));
    thread.code_mask = u64::MAX;
    thread.vm.memory.put(ENTRY - 4, NOP);
    assert_eq!(thread.walk(), (0, frames));
}

#[test]
fn compiled_code_is_left_by_its_return_address() {
    let mut thread = Thread::new().ruby(&[-1, 2, 0]);
    // A C function called from compiled code, which has saved three registers:
    // one holds an address of the interpreter that is no return address.
    thread.pc = EXTENSION + 5;
    let code = 0xd0ff_0000_0000_0000_u64;
    thread.vm.memory.put(EXEC + 1 - 8, code);
    thread.vm.memory.put(CALL + 0x31 - 8, 0x1234_5678);
    for (place, word) in [
        (0, 0xbad),
        (8, JIT + 0x21),
        (16, CALL + 0x31),
        (24, EC),
        (32, 0x7000_0000),
        (40, EXEC + 1),
        (48, 0xbad),
        (56, START + 1),
        (64, 0),
        (72, 0),
    ] {
        thread.vm.memory.put(NATIVE_STACK + place, word);
    }
    let expected = [
        extension(EXTENSION + 5),
        Frame::native(object::ANONYMOUS, JIT + 0x20),
        thread.ruby_frame(0),
        thread.ruby_frame(2),
        thread.ruby_frame(-1),
        ACTIVATION,
        interpreter(START),
    ];
    assert_eq!(thread.walk(), (0, expected.to_vec()));
    // Where there is none, the rest is missing, and that is said.
    thread.vm.memory.put(NATIVE_STACK + 40, 0);
    thread.vm.memory.put(NATIVE_STACK + 56, 0);
    let (flags, frames) = thread.walk();
    assert_eq!(flags, sample_flags::NATIVE_CUT);
    assert_eq!(frames.len(), 5);
}

#[test]
fn without_mappings_or_registers_the_ruby_frames_stand_alone() {
    let mut thread = Thread::new().ruby(&[-1, 2]).native(&[CALL, EXEC, START]);
    let ruby: Vec<Frame> = [2, -1].map(|it| thread.ruby_frame(it)).to_vec();
    let entry = ProcessEntry {
        mappings: 0,
        ..thread.entry()
    };
    assert_eq!(thread.walk_entry(&entry, true), (0, ruby.clone()));
    assert_eq!(thread.walk_entry(&entry, false), (0, Vec::new()));
    thread.sp = 0;
    assert_eq!(thread.walk(), (sample_flags::NATIVE_CUT, ruby));
}

#[test]
fn a_thousand_activations_keep_every_frame() {
    let mut ruby = vec![-1, 2];
    let mut native = vec![EXTENSION + 5];
    for _ in 0..1000 {
        ruby.extend([0, -3]);
        native.extend([EXEC, EXTENSION + 9, CALL]);
    }
    native.extend([EXEC, CALL, START]);
    let thread = Thread::new().ruby(&ruby).native(&native);
    let (flags, frames) = thread.walk();
    assert_eq!(flags, 0);
    assert_eq!(frames.len(), ruby.len() + native.len());
    for at in 0..1000 {
        let level = &frames[1 + at * 5..][..5];
        let expected = [
            thread.ruby_frame(-3),
            ACTIVATION,
            extension(EXTENSION + 9),
            interpreter(CALL),
            thread.ruby_frame(0),
        ];
        assert_eq!(level, expected, "level {at}");
    }
}

/// A number for an address, always the same one.
fn hash(seed: u64, addr: u64) -> u64 {
    let mut x = seed ^ addr.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    x
}

#[test]
fn random_memory_is_walked_to_an_end() {
    let thread = Thread::new();
    let mut signals = Program::new(0);
    // Trampolines, which may lead anywhere, again and again.
    signals.rules[1] = Rule::SIGNAL_X86_64;
    for seed in 0..400_u64 {
        let memory = Words::new(|addr| {
            let number = hash(seed, addr);
            match number % 8 {
                0 if seed % 3 == 0 => None,
                0..=2 => Some(RUBY + number % (6 * PAGE)),
                3..=5 => Some(NATIVE_STACK + (number >> 8) % 4096 / 8 * 8),
                6 => Some(METHOD),
                _ => Some(number >> 32),
            }
        });
        let stack = 0x7000_0000;
        let context = roots::Context {
            ec: EC,
            stack,
            stack_end: stack + (1 << 16),
            cfp: stack + 8 * (hash(seed, 3) % 8000),
        };
        for program in [&thread.program, &signals] {
            let registers = Registers::newest(
                RUBY + hash(seed, 1) % (4 * PAGE),
                NATIVE_STACK,
                NATIVE_STACK + 64,
                0,
                u64::MAX,
            );
            let mut walk = Walk::default();
            walk.start(&registers, Some(&context), &thread.entry());
            let mut frames = Frames::default();
            let mut scratch = Scratch::new();
            let mut steps = 0;
            while walk.step(&memory, program, &mut scratch, &mut frames) {
                steps += 1;
                assert!(steps < MAX_STEPS);
            }
            walk.finish();
            assert!(frames.0.len() <= MAX_FRAMES);
            let native = frames.0.iter().filter(|it| it.kind() == frame_kind::NATIVE);
            assert!(native.count() <= MAX_NATIVE as usize);
        }
    }
}
