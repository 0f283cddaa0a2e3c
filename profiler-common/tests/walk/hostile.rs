//! The walk over hostile memory: it ends, within its bounds, without a panic.

use crate::support::Frames;
use crate::support::Words;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::WalkLayout;
use rbprof_common::layout::frame_flags;
use rbprof_common::process::DtvLayout;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::root;
use rbprof_common::roots;
use rbprof_common::roots::Context;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::ruby::MAX_READS;
use rbprof_common::walk::ruby::MAX_STEPS;
use rbprof_common::walk::ruby::RubyWalk;
use rbprof_common::walk::ruby::Step;
use rbprof_common::wire::MAX_FRAMES;

/// A number for an address, always the same one.
fn hash(seed: u64, addr: u64) -> u64 {
    let mut x = seed ^ addr.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    x
}

fn layout(cfp_size: u32, zjit: u32) -> WalkLayout {
    WalkLayout {
        cfp_size,
        jit_return: 48,
        zjit,
        ..WalkLayout::default()
    }
}

/// Walks and returns how many steps and frames it took.
fn walk(
    context: &Context,
    layout: &WalkLayout,
    memory: &Words<impl Fn(u64) -> Option<u64>>,
) -> (u32, usize) {
    let mut scratch = Scratch::new();
    let mut frames = Frames::default();
    let mut walk = RubyWalk::start(context, layout);
    let mut steps = 0;
    while steps < MAX_STEPS {
        steps += 1;
        if walk.step(memory, &mut scratch, &mut frames) == Step::Done {
            assert!(walk.is_done());
            break;
        }
    }
    assert!(frames.0.len() <= MAX_FRAMES);
    let reads = memory.reads.get();
    assert!(reads <= u64::from(MAX_READS) + 8, "{reads} reads");
    (steps, frames.0.len())
}

/// Flags that keep a walk busy: frames of every type, with and without parents.
const TYPES: [u64; 12] = [
    frame_flags::METHOD,
    frame_flags::METHOD | frame_flags::ENV_LOCAL,
    frame_flags::BLOCK,
    frame_flags::BLOCK | frame_flags::FINISH,
    frame_flags::CFUNC | frame_flags::ENV_LOCAL,
    frame_flags::IFUNC,
    frame_flags::RESCUE,
    frame_flags::DUMMY,
    frame_flags::EVAL,
    frame_flags::TOP | frame_flags::ENV_LOCAL,
    0x6 << 12 | 0x1a,
    0x2 << 12 | 0x1a,
];

#[test]
fn random_memory() {
    for seed in 0..1_000_u64 {
        let words = 16 + hash(seed, 1) % 4096;
        let stack = hash(seed, 2) & 0x7fff_ffff_fff8;
        let layout = &LAYOUTS[seed as usize % LAYOUTS.len()].walk;
        let stack_end = stack + 8 * words;
        let room = u64::from(layout.cfp_size);
        let cfp = stack + (hash(seed, 3) % (8 * words - room)) / 8 * 8;
        let context = Context {
            ec: 0,
            stack,
            stack_end,
            cfp,
        };
        // Small numbers, big numbers, addresses inside and around the stack,
        // flags that mean something; some of it unmapped.
        let memory = Words::new(|addr| {
            let number = hash(seed, addr);
            match number % 16 {
                0 if seed % 3 == 0 => None,
                0..=5 => Some(stack + (number >> 8) % (8 * words) / 8 * 8),
                6 => Some(stack.wrapping_sub(number >> 50)),
                7 => Some(stack_end + (number >> 50)),
                8..=11 => Some(TYPES[(number >> 8) as usize % TYPES.len()]),
                12 => Some(0),
                13 => Some(u64::MAX - (number >> 60)),
                14 => Some(number >> 56),
                _ => Some(number),
            }
        });
        // With ZJIT on and off.
        for zjit in [0, 1] {
            walk(&context, &WalkLayout { zjit, ..*layout }, &memory);
            memory.reads.set(0);
        }
    }
}

#[test]
fn environments_in_a_circle() {
    let (stack, words) = (0x7000_0000_u64, 131_072);
    let stack_end = stack + 8 * words;
    for (name, inside) in [("on the stack", true), ("in the heap", false)] {
        let base = if inside { stack } else { 0x1000_0000 };
        // Every frame's environment is the first of eight that lead to each
        // other and back; none is a method's own.
        let memory = Words::new(|addr| {
            if addr >= stack_end - 8 * words / 2 && addr < stack_end {
                return Some(match (stack_end - addr) % 56 / 8 {
                    // ep
                    3 => base + 0x100,
                    _ => 0x40,
                });
            }
            let at = addr.wrapping_sub(base) % 64;
            Some(match at {
                // flags: a block, never local
                0 => frame_flags::BLOCK,
                // specval: the next environment, far away
                56 => base + 0x100 + (addr.wrapping_mul(31) % 8) * 64,
                _ => 0,
            })
        });
        let context = Context {
            ec: 0,
            stack,
            stack_end,
            cfp: stack_end - 56 * 4096,
        };
        let (steps, frames) = walk(&context, &layout(56, 0), &memory);
        assert!(frames > 0, "{name}: {steps} steps");
    }
}

#[test]
fn the_ends_of_the_address_space() {
    let memory = Words::new(|_| Some(u64::MAX));
    for stack_end in [u64::MAX - 7, 0x100, 0xffff_ffff_ffff_f000] {
        let stack = stack_end - 0x100 + 0x40;
        let context = Context {
            ec: 0,
            stack,
            stack_end,
            cfp: stack,
        };
        walk(&context, &layout(56, 0), &memory);
    }
    for value in [0, 1, 7, 8, 16, 24, u64::MAX, u64::MAX - 7, 1 << 63] {
        let memory = Words::new(|_| Some(value));
        let context = Context {
            ec: 0,
            stack: 0x1000,
            stack_end: 0x9000,
            cfp: 0x1000,
        };
        walk(&context, &layout(56, 0), &memory);
        for layout in &LAYOUTS {
            for kind in [root::TLS_STATIC, root::TLS_DTV, root::GLOBAL, 9] {
                let entry = ProcessEntry {
                    root: kind,
                    ec: value.cast_signed(),
                    module: value,
                    dtv: DtvLayout::GLIBC_X86_64,
                    vm: value,
                    layout: layout.walk,
                    ..ProcessEntry::default()
                };
                let _ = roots::context_of(&entry, value, &memory);
            }
        }
    }
}
