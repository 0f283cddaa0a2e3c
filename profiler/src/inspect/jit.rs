//! Which JIT compiler a process uses, and where its code is.
//!
//! A JIT compiler's code is in anonymous executable memory, whose name, where
//! the kernel keeps one, says whose it is (Linux 5.17 with
//! `CONFIG_ANON_VMA_NAME`). Other things use such memory too, libffi's closures
//! for example. What proves the compiler at work is an instruction sequence on
//! a stack whose entry is there.

use serde::Serialize;

use rbprof_common::Memory;
use rbprof_common::layout::Layout;
use rbprof_common::roots::read_context;
use rbprof_common::walk::FrameSink;
use rbprof_common::walk::Scratch;
use rbprof_common::walk::walk_all;
use rbprof_common::wire::Frame;

use crate::targets::mappings::Mapping;
use crate::targets::validate::Validated;

/// Names that Ruby gives to memory for JIT code contain this.
const RESERVED: &[u8] = b"jit_reserve_addr_space";

/// What is known of a JIT compiler in a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JitReport {
    /// Whether one is at work.
    pub state: JitState,
    /// Anonymous executable memory: first address, and the first behind it.
    pub ranges: Vec<[u64; 2]>,
    /// Methods on the stacks that have machine code, of all that were looked at.
    pub compiled: [usize; 2],
}

/// Whether a JIT compiler is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum JitState {
    /// A method on a stack has machine code.
    On,
    /// Memory is reserved for it, but nothing on the stacks has been compiled.
    Reserved,
    /// There is anonymous executable memory, and nothing says whose it is.
    Unknown,
    /// There is no memory where its code could be.
    Off,
}

/// The instruction sequences of a stack.
#[derive(Default)]
struct Sequences(Vec<u64>);

impl FrameSink for Sequences {
    fn push(&mut self, frame: Frame) -> bool {
        self.0.push(frame.iseq());
        true
    }
}

/// Looks at the mappings of a process and the stacks of its Ruby threads.
#[must_use]
pub fn look<M: Memory>(
    mappings: &[Mapping],
    threads: &[Validated],
    layout: &Layout,
    memory: &M,
) -> JitReport {
    let is_reserved = |mapping: &Mapping| {
        mapping
            .path
            .windows(RESERVED.len())
            .any(|part| part == RESERVED)
    };
    let executable: Vec<&Mapping> = mappings
        .iter()
        .filter(|mapping| mapping.executable && mapping.file.is_none())
        // [vdso], [vsyscall]
        .filter(|mapping| is_reserved(mapping) || !mapping.path.starts_with(b"["))
        .collect();
    let mut sequences = Sequences::default();
    for thread in threads {
        let Ok(context) = read_context(thread.ec, &layout.walk, memory) else {
            continue;
        };
        // What is compiled does not depend on the stack being whole.
        walk_all(
            &context,
            &layout.walk,
            memory,
            &mut Scratch::new(),
            &mut sequences,
        );
    }
    sequences.0.sort_unstable();
    sequences.0.dedup();
    let entry_of = |iseq: u64| {
        let body = memory
            .word(iseq.wrapping_add(layout.names.iseq_body.into()))
            .ok()?;
        memory
            .word(body.wrapping_add(layout.names.jit_entry.into()))
            .ok()
    };
    let compiled = sequences
        .0
        .iter()
        .filter_map(|&iseq| entry_of(iseq))
        .filter(|&entry| executable.iter().any(|it| it.range.contains(entry)))
        .count();
    let state = if compiled > 0 {
        JitState::On
    } else if mappings.iter().any(is_reserved) {
        JitState::Reserved
    } else if executable.is_empty() {
        JitState::Off
    } else {
        JitState::Unknown
    };
    JitReport {
        state,
        ranges: executable
            .iter()
            .map(|mapping| [mapping.range.start, mapping.range.end])
            .collect(),
        compiled: [compiled, sequences.0.len()],
    }
}
