//! The walk over a VM stack that was laid out by hand.

use crate::support::Frames;
use crate::support::Sparse;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::frame_flags;
use rbprof_common::layout::imemo;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::root;
use rbprof_common::roots;
use rbprof_common::roots::Context;
use rbprof_common::roots::NoContext;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::walk_all;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::sample_flags;

pub(crate) const EC: u64 = 0x5000_0000;
const STACK: u64 = 0x7000_0000;
const STACK_WORDS: u64 = 131_072;
const STACK_END: u64 = STACK + 8 * STACK_WORDS;
/// Method entries, crefs and other internal objects.
const HEAP: u64 = 0x6000_0000;

/// A VM stack that grows as Ruby's does: control frames down from the end,
/// environments up from the start.
pub(crate) struct Vm {
    pub(crate) memory: Sparse,
    cfp: u64,
    cfp_size: u64,
    sp: u64,
    objects: u64,
}

impl Vm {
    pub(crate) fn new(cfp_size: u32) -> Self {
        let cfp_size = u64::from(cfp_size);
        let mut memory = Sparse::default();
        memory.put(EC, STACK);
        memory.put(EC + 8, STACK_WORDS);
        let mut vm = Self {
            memory,
            cfp: STACK_END,
            cfp_size,
            sp: STACK,
            objects: HEAP,
        };
        vm.push(0, 0, frame_flags::DUMMY | frame_flags::FINISH | LOCAL, 0, 0);
        vm
    }

    pub(crate) fn object(&mut self, imemo_type: u64, second: u64) -> u64 {
        let address = self.objects;
        self.objects += 40;
        self.memory
            .put(address, imemo_type << imemo::TYPE_SHIFT | 0x1a);
        self.memory.put(address + 8, second);
        address
    }

    /// Writes an environment and returns its pointer.
    fn environment(&mut self, me_cref: u64, specval: u64, flags: u64) -> u64 {
        // Three locals below it.
        for _ in 0..3 {
            self.memory.put(self.sp, 0x8);
            self.sp += 8;
        }
        let ep = self.sp + 16;
        for (at, value) in [(ep - 16, me_cref), (ep - 8, specval), (ep, flags)] {
            self.memory.put(at, value);
        }
        self.sp = ep + 8;
        ep
    }

    pub(crate) fn push(
        &mut self,
        iseq: u64,
        pc: u64,
        flags: u64,
        me_cref: u64,
        specval: u64,
    ) -> u64 {
        let ep = self.environment(me_cref, specval, flags);
        self.push_with_ep(iseq, pc, ep);
        ep
    }

    fn push_with_ep(&mut self, iseq: u64, pc: u64, ep: u64) {
        self.cfp -= self.cfp_size;
        for word in 0..self.cfp_size / 8 {
            self.memory.put(self.cfp + 8 * word, 0xdead_0000 + word);
        }
        self.memory.put(self.cfp, pc);
        self.memory.put(self.jit_return(), 0);
        self.memory.put(self.cfp + 16, iseq);
        self.memory.put(self.cfp + 32, ep);
        self.memory.put(EC + 16, self.cfp);
    }

    /// Where the newest frame has its last word, `jit_return`.
    pub(crate) fn jit_return(&self) -> u64 {
        self.cfp + self.cfp_size - 8
    }

    fn walk(&self, cfp_size: u32) -> (u32, Vec<Frame>) {
        let layout = LAYOUTS
            .iter()
            .rfind(|l| l.walk.cfp_size == cfp_size)
            .unwrap();
        self.walk_with(&layout.walk)
    }

    fn walk_with(&self, layout: &WalkLayout) -> (u32, Vec<Frame>) {
        let memory = self.memory.memory();
        let context = roots::read_context(EC, layout, &memory).unwrap();
        let mut frames = Frames::default();
        let flags = walk_all(&context, layout, &memory, &mut Scratch::new(), &mut frames);
        (flags, frames.0)
    }
}

const LOCAL: u64 = frame_flags::ENV_LOCAL;
const METHOD: u64 = frame_flags::METHOD | LOCAL;
const BLOCK: u64 = frame_flags::BLOCK;

#[test]
fn every_kind_of_frame_comes_out_leaf_first() {
    for cfp_size in [56, 64] {
        let mut vm = Vm::new(cfp_size);
        let main_cref = vm.object(1, 0);
        let entry = vm.object(imemo::MENT, 0);
        let svar = vm.object(imemo::SVAR, entry);
        let each = vm.object(imemo::MENT, 0);
        let bmethod = vm.object(imemo::MENT, 0);

        let main = vm.push(
            0x100,
            0x108,
            frame_flags::EVAL | frame_flags::FINISH | LOCAL,
            main_cref,
            0,
        );
        let method = vm.push(0x200, 0x208, METHOD, entry, 0);
        vm.push(0, 0, frame_flags::CFUNC | LOCAL, each, 0);
        let block = vm.push(
            0x300,
            0x308,
            BLOCK | frame_flags::FINISH,
            main_cref,
            method | 1,
        );
        vm.push(0x400, 0x408, BLOCK, 0, block | 1);
        vm.push(0x500, 0x508, METHOD, svar, 0);
        vm.push(
            0x600,
            0x608,
            BLOCK | frame_flags::BMETHOD,
            bmethod,
            main | 1,
        );
        vm.push(0, 0, frame_flags::IFUNC | LOCAL, 0, 0);
        vm.push(0x700, 0x708, frame_flags::RESCUE, 0, method | 1);

        let (flags, frames) = vm.walk(cfp_size);
        assert_eq!(flags, 0);
        let ruby = frame_kind::RUBY;
        let finish = frame_attr::FINISH;
        assert_eq!(
            frames,
            [
                Frame::new(ruby, 0x700, 0x708, entry),
                Frame::new(frame_kind::IFUNC, 0, 0, 0),
                Frame::new(ruby | frame_attr::BMETHOD, 0x600, 0x608, bmethod),
                Frame::new(ruby, 0x500, 0x508, entry),
                Frame::new(ruby, 0x400, 0x408, entry),
                Frame::new(ruby | finish, 0x300, 0x308, entry),
                Frame::new(frame_kind::CFUNC, 0, 0, each),
                Frame::new(ruby, 0x200, 0x208, entry),
                Frame::new(ruby | finish, 0x100, 0x108, 0),
            ]
        );
    }
}

#[test]
fn only_of_the_newest_frame_machine_code_hides_the_pc() {
    for cfp_size in [56, 64] {
        let mut vm = Vm::new(cfp_size);
        let entry = vm.object(imemo::MENT, 0);
        for iseq in [0x100, 0x200, 0x300] {
            vm.push(iseq, iseq + 8, METHOD, entry, 0);
            vm.memory.put(vm.jit_return(), 0x7fff_0000);
        }
        let ruby = frame_kind::RUBY_JIT;
        let callers = [
            Frame::new(ruby, 0x200, 0x208, entry),
            Frame::new(ruby, 0x100, 0x108, entry),
        ];
        let newest = Frame::new(ruby | frame_attr::NO_PC, 0x300, 0, entry);
        assert_eq!(vm.walk(cfp_size), (0, [&[newest], &callers[..]].concat()));

        vm.memory.put(vm.jit_return(), 0);
        let newest = Frame::new(frame_kind::RUBY, 0x300, 0x308, entry);
        assert_eq!(vm.walk(cfp_size), (0, [&[newest], &callers[..]].concat()));

        // A C method's caller had to say where it is.
        vm.push(0, 0, frame_flags::CFUNC | LOCAL, entry, 0);
        vm.memory.put(vm.jit_return(), 0x7fff_0000);
        let (_, frames) = vm.walk(cfp_size);
        assert_eq!(frames[0], Frame::new(frame_kind::CFUNC, 0, 0, entry));
        assert_eq!(frames[1], newest);
    }
}

#[test]
fn blocks_nest_as_deep_as_they_like() {
    let mut vm = Vm::new(56);
    let entry = vm.object(imemo::MENT, 0);
    let mut parent = vm.push(0x200, 0x208, METHOD, entry, 0);
    for level in 1..=500 {
        parent = vm.push(0x1000 * level, 0x1000 * level + 8, BLOCK, 0, parent | 1);
    }
    let (flags, frames) = vm.walk(56);
    assert_eq!(flags, 0);
    assert_eq!(frames.len(), 501);
    assert!(frames.iter().all(|frame| frame.method_entry == entry));
    assert_eq!(frames[0].iseq(), 0x1000 * 500);
}

#[test]
fn an_environment_that_escaped_to_the_heap_is_followed() {
    let mut vm = Vm::new(56);
    let entry = vm.object(imemo::MENT, 0);
    let escaped = HEAP + 0x10_0000;
    for (at, value) in [
        (escaped - 16, entry),
        (escaped - 8, 0),
        (escaped, METHOD | 4),
    ] {
        vm.memory.put(at, value);
    }
    vm.push_with_ep(0x200, 0x208, escaped);
    vm.push(0x300, 0x308, BLOCK, 0, escaped | 1);
    let (flags, frames) = vm.walk(56);
    assert_eq!(flags, 0);
    assert_eq!(
        frames,
        [
            Frame::new(frame_kind::RUBY, 0x300, 0x308, entry),
            Frame::new(frame_kind::RUBY, 0x200, 0x208, entry),
        ]
    );
}

#[test]
fn a_deep_stack_is_complete_and_read_in_few_pieces() {
    let mut vm = Vm::new(56);
    let entry = vm.object(imemo::MENT, 0);
    for level in 0..9_000 {
        vm.push(0x200, 0x208 + level, METHOD, entry, 0);
    }
    let memory = vm.memory.memory();
    let context = roots::read_context(EC, &LAYOUTS[0].walk, &memory).unwrap();
    let mut frames = Frames::default();
    let flags = walk_all(
        &context,
        &LAYOUTS[0].walk,
        &memory,
        &mut Scratch::new(),
        &mut frames,
    );
    assert_eq!(flags, 0);
    assert_eq!(frames.0.len(), 9_000);
    assert_eq!(frames.0[0].pc, 0x208 + 8_999);
    assert_eq!(frames.0[8_999].pc, 0x208);
    // 9,001 control frames of 56 bytes and as many environments of 48, in
    // pieces of 4 KiB, and the context and one method entry.
    let pieces = memory.reads.get();
    assert!(pieces < 250, "{pieces} reads");
}

#[test]
fn a_frame_whose_environment_is_gone_is_shown_and_the_walk_goes_on() {
    let mut vm = Vm::new(56);
    let entry = vm.object(imemo::MENT, 0);
    vm.push(0x200, 0x208, METHOD, entry, 0);
    vm.push_with_ep(0x300, 0x308, 0xdead_beef_0000);
    let (flags, frames) = vm.walk(56);
    assert_eq!(flags, sample_flags::UNKNOWN_FRAME);
    assert_eq!(
        frames,
        [
            Frame::new(frame_kind::UNKNOWN, 0x300, 0x308, 0),
            Frame::new(frame_kind::RUBY, 0x200, 0x208, entry),
        ]
    );
}

/// Ruby 4.1, the first with the rule.
fn with_jit_frames() -> &'static Layout {
    LAYOUTS.iter().find(|l| l.zjit).unwrap()
}

/// Frames under a JIT, outermost first: of a method that is interpreted, of one
/// that is compiled, of a C method that this calls. `jit_return` of each.
fn jit_program(compiled: u64, c_method: u64) -> (Vm, [u64; 2]) {
    let mut vm = Vm::new(56);
    let method = vm.object(imemo::MENT, 0);
    let c_entry = vm.object(imemo::MENT, 0);
    for (iseq, flags, entry, jit_return) in [
        (0x200, METHOD, method, 0),
        (0x300, METHOD, method, compiled),
        (0, frame_flags::CFUNC | LOCAL, c_entry, c_method),
    ] {
        vm.push(iseq, iseq, flags, entry, 0);
        vm.memory.put(vm.cfp + 48, jit_return);
    }
    (vm, [method, c_entry])
}

/// Where native stacks and ZJIT's own memory are.
const NATIVE: u64 = 0x7fff_0000_0000;
const JIT_FRAME: u64 = 0x4000_0000;

#[test]
fn under_zjit_pc_and_iseq_come_from_its_frames() {
    let (mut vm, [method, c_entry]) = jit_program(NATIVE, 1);
    vm.memory.put(NATIVE - 8, JIT_FRAME);
    for (at, word) in [(0, 0x408), (8, 0x400), (16, 0)] {
        vm.memory.put(JIT_FRAME + at, word);
    }
    let interpreted = Frame::new(frame_kind::RUBY, 0x200, 0x200, method);
    let c_frame = Frame::new(frame_kind::CFUNC, 0, 0, c_entry);
    let layout = with_jit_frames();
    assert_eq!(
        vm.walk_with(&layout.walk_with_zjit(true)),
        (
            0,
            vec![
                c_frame,
                Frame::new(frame_kind::RUBY_JIT, 0x400, 0x408, method),
                interpreted
            ]
        )
    );
    // Off: what other JITs keep there is no business of the walk.
    assert_eq!(layout.walk_with_zjit(false), layout.walk);
    assert_eq!(
        vm.walk_with(&layout.walk),
        (
            0,
            vec![
                c_frame,
                Frame::new(frame_kind::RUBY_JIT, 0x300, 0x300, method),
                interpreted
            ]
        )
    );
}

#[test]
fn releases_without_the_rule_do_not_follow_it() {
    for layout in LAYOUTS
        .iter()
        .filter(|l| l.from.major < 4 || l.from.minor < 1)
    {
        assert_eq!(layout.walk_with_zjit(true), layout.walk);
        assert_eq!(layout.walk.zjit, 0);
    }
}

#[test]
fn a_frame_of_zjit_that_cannot_be_read_is_unknown_rather_than_another() {
    // Nothing at all; no frame behind the place; half a frame.
    let layout = with_jit_frames().walk_with_zjit(true);
    for words in [
        &[][..],
        &[(NATIVE - 8, 0)],
        &[(NATIVE - 8, JIT_FRAME), (JIT_FRAME, 0x408)],
    ] {
        let (mut vm, [method, c_entry]) = jit_program(NATIVE, 1);
        for &(at, word) in words {
            vm.memory.put(at, word);
        }
        assert_eq!(
            vm.walk_with(&layout),
            (
                sample_flags::UNKNOWN_FRAME,
                vec![
                    Frame::new(frame_kind::CFUNC, 0, 0, c_entry),
                    Frame::new(frame_kind::UNKNOWN, 0, 0, 0),
                    Frame::new(frame_kind::RUBY, 0x200, 0x200, method),
                ]
            )
        );
    }
}

#[test]
fn a_context_without_a_stack_is_none() {
    let layout = &LAYOUTS[0].walk;
    let mut memory = Sparse::default();
    // A thread that ends gives its stack back first, then forgets its frame.
    for cfp in [STACK, 0] {
        memory.put(EC, 0);
        memory.put(EC + 8, 0);
        memory.put(EC + 16, cfp);
        let context = roots::read_context(EC, layout, &memory.memory());
        assert_eq!(context, Err(NoContext::None), "{cfp:x}");
    }
    memory.put(EC, STACK);
    let context = roots::read_context(EC, layout, &memory.memory());
    assert_eq!(context, Err(NoContext::Invalid));
}

#[test]
fn a_thread_without_memory_of_its_own_has_no_context() {
    let mut entry = ProcessEntry {
        root: root::TLS_STATIC,
        ec: -16,
        layout: LAYOUTS[0].walk,
        ..ProcessEntry::default()
    };
    let mut memory = Sparse::default();
    let context = roots::context_of(&entry, 0x4000, &memory.memory());
    assert_eq!(context, Err(NoContext::None));
    // What every thread of an old Ruby looks at is there.
    entry.root = root::GLOBAL;
    let context = roots::context_of(&entry, 0x4000, &memory.memory());
    assert_eq!(context, Err(NoContext::Fault));
    // So is a context that a thread has.
    entry.root = root::TLS_STATIC;
    memory.put(0x3ff0, EC);
    let context = roots::context_of(&entry, 0x4000, &memory.memory());
    assert_eq!(context, Err(NoContext::Fault));
}

#[test]
fn a_context_outside_its_own_stack_is_refused() {
    let layout = &LAYOUTS[0].walk;
    let mut memory = Sparse::default();
    memory.put(EC, STACK);
    memory.put(EC + 8, STACK_WORDS);
    for cfp in [0, STACK - 8, STACK_END, STACK_END - 48, STACK + 4, u64::MAX] {
        memory.put(EC + 16, cfp);
        assert_eq!(
            roots::read_context(EC, layout, &memory.memory()),
            Err(NoContext::Invalid),
            "{cfp:x}"
        );
    }
    memory.put(EC + 16, STACK_END - 56);
    let context = roots::read_context(EC, layout, &memory.memory()).unwrap();
    assert_eq!(
        context,
        Context {
            ec: EC,
            stack: STACK,
            stack_end: STACK_END,
            cfp: STACK_END - 56
        }
    );
}
