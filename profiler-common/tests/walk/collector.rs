//! Who collects, in memory laid out by hand.

use rbprof_common::collector::Collector;
use rbprof_common::collector::collects;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::roots::Context;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::gc_phase;

use crate::support::Sparse;

const COUNT: u64 = 0x1000;
const FLAGS: u64 = 0x2000;
const RACTORS: u64 = 0x3000;
const LOCK_OWNER: u64 = 0x3100;
const EC: u64 = 0x4000;
const OTHER_EC: u64 = 0x4800;
const THREAD: u64 = 0x5000;
const RACTOR: u64 = 0x6000;
const OTHER_RACTOR: u64 = 0x7000;
const DURING_GC: u64 = 1 << 5;
/// `dont_gc` and `measure_gc`, which are of no matter.
const NOISE: u64 = 1 << 3 | 1 << 12;

const COLLECTOR: Collector = Collector {
    count: COUNT,
    flags: FLAGS,
    ractors: RACTORS,
    lock_owner: LOCK_OWNER,
    thread_ractor: 24,
    running_ec: 384,
    collects: collects::RACTOR,
    reserved: 0,
};

/// A process in which the thread is the running one of its only Ractor.
fn process(flags: u64) -> Sparse {
    let mut memory = Sparse::default();
    let ec_thread = u64::from(LAYOUTS.last().unwrap().walk.ec_thread);
    for (addr, value) in [
        (COUNT, 7),
        (FLAGS, flags | NOISE),
        // The word is shared with the number of those that wait.
        (RACTORS, 5 << 32 | 1),
        (LOCK_OWNER, 0),
        (EC + ec_thread, THREAD),
        (THREAD + 24, RACTOR),
        (RACTOR + 384, EC),
        (OTHER_RACTOR + 384, OTHER_EC),
    ] {
        memory.put(addr, value);
    }
    memory
}

fn frame(collector: &Collector, memory: &Sparse) -> Option<Frame> {
    let memory = memory.memory();
    let context = Context {
        ec: EC,
        stack: 0,
        stack_end: 0,
        cfp: 0,
    };
    let activity = collector.activity(&memory);
    assert_eq!(activity.epoch, collector.epoch(&memory));
    collector.frame(activity, &context, &LAYOUTS.last().unwrap().walk, &memory)
}

fn phase(phase: u64) -> Option<Frame> {
    Some(Frame::new(frame_kind::COLLECTOR, phase, 0, 0))
}

#[test]
fn the_thread_that_collects_is_told_what_it_does() {
    for (mode, expected) in [
        (0, gc_phase::OTHER),
        (1, gc_phase::MARKING),
        (2, gc_phase::SWEEPING),
        (3, gc_phase::COMPACTING),
    ] {
        let memory = process(DURING_GC | mode);
        assert_eq!(frame(&COLLECTOR, &memory), phase(expected));
    }
}

#[test]
fn between_two_slices_nobody_collects_and_little_is_read() {
    for mode in 0..=3 {
        let process = process(mode);
        let memory = process.memory();
        let activity = COLLECTOR.activity(&memory);
        assert_eq!(activity.phase(), None);
        assert_eq!(memory.reads.get(), 2);
        assert_eq!(frame(&COLLECTOR, &process), None);
        assert_eq!(memory.reads.get(), 2);
    }
}

#[test]
fn the_epoch_tells_marking_from_the_rest_and_counts() {
    let epoch = |flags, count| {
        let mut process = process(flags);
        process.put(COUNT, count);
        COLLECTOR.epoch(&process.memory())
    };
    let known = 1 << 63;
    assert_eq!(epoch(0, 7), known | 14);
    assert_eq!(epoch(1, 7), known | 15);
    assert_eq!(epoch(DURING_GC | 1, 7), known | 15);
    assert_eq!(epoch(DURING_GC | 2, 7), known | 14);
    assert_eq!(epoch(0, 8), known | 16);
    assert_eq!(epoch(0, 1 << 41), 0);
    assert_eq!(Collector::UNKNOWN.epoch(&process(0).memory()), 0);
}

#[test]
fn flags_beside_what_is_no_count_are_not_believed() {
    let mut process = process(DURING_GC | 1);
    process.put(COUNT, 1 << 41);
    assert_eq!(frame(&COLLECTOR, &process), None);
}

#[test]
fn without_a_count_there_are_frames_but_no_epoch() {
    let uncounted = Collector {
        count: 0,
        ..COLLECTOR
    };
    let process = process(DURING_GC | 2);
    assert_eq!(uncounted.epoch(&process.memory()), 0);
    assert_eq!(frame(&uncounted, &process), phase(gc_phase::SWEEPING));
}

#[test]
fn a_thread_without_its_ractor_s_lock_does_not_collect() {
    let mut process = process(DURING_GC | 1);
    process.put(RACTOR + 384, OTHER_EC);
    assert_eq!(frame(&COLLECTOR, &process), None);
}

#[test]
fn with_several_ractors_the_one_with_the_lock_of_the_vm_collects() {
    let mut process = process(DURING_GC | 2);
    process.put(RACTORS, 2);
    process.put(LOCK_OWNER, OTHER_RACTOR);
    assert_eq!(frame(&COLLECTOR, &process), None);
    process.put(LOCK_OWNER, RACTOR);
    assert_eq!(frame(&COLLECTOR, &process), phase(gc_phase::SWEEPING));
    // The other gave it back at this very moment.
    process.put(LOCK_OWNER, 0);
    assert_eq!(frame(&COLLECTOR, &process), None);
}

#[test]
fn before_there_were_ractors_who_has_a_context_collects() {
    let old = Collector {
        collects: collects::CONTEXT,
        ractors: 0,
        lock_owner: 0,
        ..COLLECTOR
    };
    let marking = process(DURING_GC | 1);
    assert_eq!(frame(&old, &marking), phase(gc_phase::MARKING));
    assert_eq!(frame(&old, &process(1)), None);
}

#[test]
fn what_is_not_known_or_not_readable_makes_no_frame() {
    let unknown = Collector {
        collects: collects::UNKNOWN,
        ..COLLECTOR
    };
    assert_eq!(frame(&unknown, &process(DURING_GC | 1)), None);
    assert_eq!(frame(&Collector::UNKNOWN, &process(DURING_GC | 1)), None);
    let whole = process(DURING_GC | 1);
    for addr in whole.0.keys() {
        let mut holed = process(DURING_GC | 1);
        holed.0.remove(addr);
        // One Ractor is counted, and the other's are not looked at.
        if *addr != OTHER_RACTOR + 384 {
            assert_eq!(frame(&COLLECTOR, &holed), None, "{addr:#x}");
        }
    }
}
