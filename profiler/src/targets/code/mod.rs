//! What the machine code of a stripped Ruby gives away.
//!
//! `strip` removes names, not code: exported functions still read the variables
//! that they have always read and call what they have always called, and
//! `.eh_frame` still tells where each function begins and ends. Everything here
//! is learnt from the file alone, on x86-64 and arm64, and is only a candidate
//! until the live process confirms it.
//!
//! | module | what it does |
//! |---|---|
//! | [`functions`] | where functions begin and end, from `.eh_frame` |
//! | [`instructions`] | what a function branches to and which data it refers to |
//! | [`mod@thread_local`] | which thread-local variable a function uses |
//! | [`vm_exec`] | which function is `rb_vm_exec` |

pub mod functions;
pub mod instructions;
pub mod thread_local;
pub mod vm_exec;

mod aarch64;
mod x86_64;

use std::cell::Cell;

use object::read::ReadRef;

use rbprof_common::process::Range;

use self::functions::Functions;
use super::elf::Elf;
use super::elf::ElfError;

/// An exported function that returns the running thread: it reads
/// `ruby_current_ec`, `ec->thread_ptr` and `thread->self`.
const THREAD_GETTER: &[u8] = b"rb_thread_current";
/// Exported functions that look up the name of an ID in `ruby_global_symbols`.
const SYMBOL_GETTERS: [&[u8]; 3] = [b"rb_id2str", b"rb_id2name", b"rb_id2sym"];
/// An exported function that uses `ruby_current_vm_ptr`.
const VM_GETTER: &[u8] = b"ruby_vm_at_exit";

/// How many calls deep references are followed: a getter may leave the work to
/// a function that has no name any more.
const CALL_DEPTH: u32 = 2;
/// Most functions followed from one getter.
const MAX_FOLLOWED: usize = 64;
/// Most code that is decoded of one file, in bytes, whatever the file says of
/// its functions; libruby takes about 200 KB.
const MAX_DECODED: u64 = 64 << 20;
/// Most code that is looked through for calls, in bytes; libruby has 3 MB.
const MAX_SEARCHED: u64 = 1 << 30;

/// What was learnt from the code of one file. Addresses are those in the file,
/// before the bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Analysis {
    /// How many functions `.eh_frame` describes.
    pub functions: usize,
    /// Offset of `ruby_current_ec` in the thread-local block, as the code of
    /// `rb_thread_current` has it.
    pub current_ec: Option<u64>,
    /// Writable data that the code of `rb_thread_current` refers to: up to 2.7,
    /// `ruby_current_execution_context_ptr` is among it.
    pub context_references: Vec<u64>,
    /// Writable data that the code refers to which looks up names of IDs.
    pub symbol_references: Vec<u64>,
    /// Writable data that `ruby_vm_at_exit` refers to.
    pub vm_references: Vec<u64>,
    /// `rb_vm_exec`, or why it is not known.
    pub vm_exec: Result<vm_exec::Found, vm_exec::NotFound>,
}

/// Learns what there is to learn from the code of a Ruby. `vm_exec` is the
/// address of `rb_vm_exec` where a symbol told it.
///
/// # Errors
/// [`ElfError`] when the file has no usable `.eh_frame`.
pub fn analyse<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    vm_exec: Option<u64>,
) -> Result<Analysis, ElfError> {
    let functions = Functions::of(elf)?;
    let code = Code {
        elf,
        functions: &functions,
        left: Cell::new(MAX_DECODED),
    };
    let exported = |name| {
        let symbol = elf.dynamic_symbol(name).ok().flatten()?;
        functions.starting_at(symbol.value)
    };
    let mut symbol_references: Vec<u64> = SYMBOL_GETTERS
        .into_iter()
        .filter_map(exported)
        .flat_map(|getter| code.data_references(getter))
        .collect();
    symbol_references.sort_unstable();
    symbol_references.dedup();
    Ok(Analysis {
        functions: functions.len(),
        current_ec: exported(THREAD_GETTER).and_then(|getter| thread_local::used_by(&code, getter)),
        context_references: exported(THREAD_GETTER)
            .map_or_else(Vec::new, |getter| code.data_references(getter)),
        symbol_references,
        vm_references: exported(VM_GETTER)
            .map_or_else(Vec::new, |getter| code.data_references(getter)),
        vm_exec: match vm_exec {
            Some(address) => vm_exec::known(&code, address),
            None => vm_exec::find(&code),
        },
    })
}

/// The part that the compiler moved away from each of the functions at
/// `addresses`, where that can be told.
///
/// # Errors
/// As [`analyse`].
pub fn cold_parts<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    addresses: &[u64],
) -> Result<Vec<Option<Range>>, ElfError> {
    let functions = Functions::of(elf)?;
    let code = Code {
        elf,
        functions: &functions,
        left: Cell::new(MAX_DECODED),
    };
    let parts = addresses.iter().map(|&address| {
        let function = functions.starting_at(address)?;
        vm_exec::cold_part(&code, function)
    });
    Ok(parts.collect())
}

/// The code of a file, function by function.
pub(super) struct Code<'a, 'data, R: ReadRef<'data>> {
    pub(super) elf: &'a Elf<'data, R>,
    pub(super) functions: &'a Functions,
    /// Bytes that may still be decoded.
    left: Cell<u64>,
}

impl<'data, R: ReadRef<'data>> Code<'_, 'data, R> {
    /// The bytes of a function for decoding; none where the file does not have
    /// them, or too many were asked for already.
    pub(super) fn bytes(&self, function: Range) -> &'data [u8] {
        let length = function.end.saturating_sub(function.start);
        let Some(left) = self.left.get().checked_sub(length) else {
            return &[];
        };
        self.left.set(left);
        self.elf.bytes(function.start, length).unwrap_or_default()
    }

    /// All executable segments and their addresses.
    pub(super) fn segments(&self) -> Vec<(u64, &'data [u8])> {
        let mut left = MAX_SEARCHED;
        let mut segments = Vec::new();
        for load in self.elf.loads().iter().filter(|load| load.executable) {
            let Ok(bytes) = self.elf.bytes(load.address, load.file_size) else {
                continue;
            };
            match left.checked_sub(load.file_size) {
                Some(rest) => left = rest,
                None => break,
            }
            segments.push((load.address, bytes));
        }
        segments
    }

    /// Where a function branches to directly.
    pub(super) fn branches(&self, function: Range) -> Vec<instructions::Branch> {
        instructions::branches(self.elf.machine(), self.bytes(function), function.start)
    }

    /// The function and those it calls or jumps to, [`CALL_DEPTH`] deep.
    pub(super) fn followed(&self, function: Range) -> Vec<Range> {
        let mut followed = vec![function];
        let mut from = 0;
        for _ in 0..CALL_DEPTH {
            let known = followed.len();
            for index in from..known {
                let Some(&caller) = followed.get(index) else {
                    break;
                };
                for branch in self.branches(caller) {
                    let Some(callee) = self.functions.starting_at(branch.to) else {
                        continue;
                    };
                    if followed.len() < MAX_FOLLOWED && !followed.contains(&callee) {
                        followed.push(callee);
                    }
                }
            }
            from = known;
        }
        followed
    }

    /// The writable data that a function, or one that it leaves the work to,
    /// refers to.
    fn data_references(&self, function: Range) -> Vec<u64> {
        let machine = self.elf.machine();
        let mut found: Vec<u64> = self
            .followed(function)
            .into_iter()
            .flat_map(|function| {
                instructions::references(machine, self.bytes(function), function.start)
            })
            .filter(|&address| {
                self.elf
                    .loads()
                    .iter()
                    .any(|load| load.writable && load.contains(address))
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests;
