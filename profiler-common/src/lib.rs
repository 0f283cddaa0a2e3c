//! What the two halves of rbprof share: the wire types, the layout of Ruby's
//! structures, and the stack walk itself.
//!
//! The walk is written once, over the [`Memory`] trait, without allocation and
//! without a path that panics. The same source is compiled for BPF, where the
//! kernel's verifier proves that it ends; run over core dumps in tests; and
//! fuzzed with hostile memory.
//!
//! | module | what it holds |
//! |---|---|
//! | [`collector`] | what the garbage collector is doing, and which thread does it |
//! | [`layout`] | where Ruby keeps what the walk and the symbolizer read, per release |
//! | [`memory`] | how target memory is read |
//! | [`process`] | what the kernel half knows about one target process |
//! | [`roots`] | from a native thread to its execution context |
//! | [`unwind`] | native frames: the rows of unwind tables, and one step by them |
//! | [`walk`] | from an execution context to frames |
//! | [`wire`] | the records that cross from the kernel half to the user half |
#![no_std]
// The search in unwind tables hides a shift from LLVM.
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod collector;
pub mod layout;
pub mod memory;
pub mod process;
pub mod roots;
pub mod unwind;
pub mod walk;
pub mod wire;

pub use memory::Fault;
pub use memory::Memory;
