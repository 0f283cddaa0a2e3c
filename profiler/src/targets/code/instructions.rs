//! What a function branches to, and which data it refers to.

use crate::targets::elf::Machine;
use crate::targets::elf::TlsRelocation;

use super::aarch64;
use super::x86_64;

/// How a branch is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A call: it comes back to the instruction behind it.
    Call,
    /// A jump that is always taken; a tail call if it leaves the function.
    Jump,
    /// A jump that depends on a condition.
    Conditional,
}

/// A direct branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// The address of the instruction behind it: where a call comes back to.
    pub next: u64,
    /// Its target.
    pub to: u64,
    /// How it is taken.
    pub kind: Kind,
}

/// How a function gets at a thread-local variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadLocal {
    /// Through what the loader writes for this relocation, plus an offset.
    Relocation {
        /// Index of the relocation.
        index: usize,
        /// What the code adds.
        displacement: i64,
    },
    /// At this distance from the thread pointer, fixed by the linker.
    ThreadPointer(i64),
}

/// The direct branches of the code at `address`, in order. None for machines
/// that are not known.
#[must_use]
pub fn branches(machine: Machine, code: &[u8], address: u64) -> Vec<Branch> {
    match machine {
        Machine::X86_64 => x86_64::branches(code, address),
        Machine::Aarch64 => aarch64::branches(code, address),
        Machine::Other(_) => Vec::new(),
    }
}

/// The addresses that calls of the code at `address` come back to, also those
/// of indirect calls.
#[must_use]
pub fn return_addresses(machine: Machine, code: &[u8], address: u64) -> Vec<u64> {
    match machine {
        Machine::X86_64 => x86_64::return_addresses(code, address),
        Machine::Aarch64 => aarch64::return_addresses(code, address),
        Machine::Other(_) => Vec::new(),
    }
}

/// The addresses that the code at `address` computes or uses relative to
/// itself, in order.
#[must_use]
pub fn references(machine: Machine, code: &[u8], address: u64) -> Vec<u64> {
    match machine {
        Machine::X86_64 => x86_64::references(code, address),
        Machine::Aarch64 => aarch64::references(code, address),
        Machine::Other(_) => Vec::new(),
    }
}

/// The thread-local variables that the code at `address` uses, in order.
#[must_use]
pub fn thread_locals(
    machine: Machine,
    code: &[u8],
    address: u64,
    relocations: &[TlsRelocation],
) -> Vec<ThreadLocal> {
    match machine {
        Machine::X86_64 => x86_64::thread_locals(code, address, relocations),
        Machine::Aarch64 => aarch64::thread_locals(code, address, relocations),
        Machine::Other(_) => Vec::new(),
    }
}

/// Places in all of `code` at `address` that may be direct branches to one of
/// `targets`, which are sorted: found without knowing where instructions begin,
/// so each must be confirmed.
#[must_use]
pub fn possible_branches(machine: Machine, code: &[u8], address: u64, targets: &[u64]) -> Vec<u64> {
    match machine {
        Machine::X86_64 => x86_64::possible_branches(code, address, targets),
        Machine::Aarch64 => aarch64::possible_branches(code, address, targets),
        Machine::Other(_) => Vec::new(),
    }
}

/// Where an import's stub in the procedure linkage table takes its target from.
#[must_use]
pub fn stub_slot(machine: Machine, code: &[u8], address: u64) -> Option<u64> {
    match machine {
        Machine::X86_64 => x86_64::stub_slot(code, address),
        Machine::Aarch64 => aarch64::stub_slot(code, address),
        Machine::Other(_) => None,
    }
}
