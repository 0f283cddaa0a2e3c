//! Which function is `rb_vm_exec`.
//!
//! Two ways that know nothing of each other, on every build seen from 2.7 to
//! 3.4, on x86-64 and arm64:
//!
//! - `rb_iseq_eval` is exported and ends with a tail call of `rb_vm_exec`.
//! - `vm_exec_core`, the interpreter's loop, is one of the few very large
//!   functions, and the only one that is called from exactly two places: a stub
//!   of two instructions (`rb_vm_get_insns_address_table`), and `rb_vm_exec`
//!   right behind it.

use std::fmt;

use object::read::ReadRef;

use rbprof_common::process::Range;

use super::Code;
use super::instructions;
use super::instructions::Kind;

/// The exported function that ends with `rb_vm_exec`.
const CALLER: &[u8] = b"rb_iseq_eval";
/// The smallest function taken for the interpreter's loop; it has about 27 KB.
const MIN_CORE: u64 = 8 << 10;
/// The largest function taken for the stub that calls it; it has 8 to 20 bytes.
const MAX_STUB: u64 = 64;
/// The smallest function taken for `rb_vm_exec`; it has 540 to 2,922 bytes.
const MIN_VM_EXEC: u64 = 400;

/// `rb_vm_exec`, addresses before the bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The function.
    pub range: Range,
    /// The part that the compiler moved away from it.
    pub cold: Option<Range>,
    /// Where the calls that it makes come back to, sorted: on the native stack
    /// of every thread that runs Ruby there is one of them.
    pub returns: Vec<u64>,
    /// How it was found.
    pub how: String,
}

/// Why it was not found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// Nothing looks like it.
    Nothing,
    /// Several functions could be it.
    Ambiguous(Vec<u64>),
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => write!(f, "no function has the shape of rb_vm_exec"),
            Self::Ambiguous(addresses) => {
                write!(f, "several functions could be rb_vm_exec:")?;
                addresses
                    .iter()
                    .try_for_each(|address| write!(f, " {address:#x}"))
            }
        }
    }
}

/// Finds it.
///
/// # Errors
/// [`NotFound`].
pub(super) fn find<'data, R: ReadRef<'data>>(code: &Code<'_, 'data, R>) -> Result<Found, NotFound> {
    let called = by_caller(code);
    let shaped = by_shape(code);
    let both: Vec<Range> = called
        .iter()
        .copied()
        .filter(|range| shaped.contains(range))
        .collect();
    let (range, how) = match (both.as_slice(), called.as_slice(), shaped.as_slice()) {
        (&[range], ..) => (
            range,
            "what rb_iseq_eval ends with, and the caller of the interpreter's loop",
        ),
        ([], &[range], []) => (range, "what rb_iseq_eval ends with"),
        ([], [], &[range]) => (range, "the caller of the interpreter's loop"),
        ([], [], []) => return Err(NotFound::Nothing),
        _ => {
            let mut all: Vec<u64> = called.iter().chain(&shaped).map(|it| it.start).collect();
            all.sort_unstable();
            all.dedup();
            return Err(NotFound::Ambiguous(all));
        }
    };
    Ok(describe(code, range, how))
}

/// What there is to know of it where a symbol told its address.
///
/// # Errors
/// [`NotFound::Nothing`] where no function begins there.
pub(super) fn known<'data, R: ReadRef<'data>>(
    code: &Code<'_, 'data, R>,
    address: u64,
) -> Result<Found, NotFound> {
    let range = code.functions.starting_at(address);
    Ok(describe(
        code,
        range.ok_or(NotFound::Nothing)?,
        "its symbol",
    ))
}

fn describe<'data, R: ReadRef<'data>>(code: &Code<'_, 'data, R>, range: Range, how: &str) -> Found {
    let cold = cold_part(code, range);
    let mut returns: Vec<u64> = [Some(range), cold]
        .into_iter()
        .flatten()
        .flat_map(|part| {
            instructions::return_addresses(code.elf.machine(), code.bytes(part), part.start)
        })
        .collect();
    returns.sort_unstable();
    Found {
        range,
        cold,
        returns,
        how: how.to_owned(),
    }
}

/// The functions that `rb_iseq_eval` leaves the rest to.
fn by_caller<'data, R: ReadRef<'data>>(code: &Code<'_, 'data, R>) -> Vec<Range> {
    let caller = code
        .elf
        .dynamic_symbol(CALLER)
        .ok()
        .flatten()
        .and_then(|symbol| code.functions.starting_at(symbol.value));
    let Some(caller) = caller else {
        return Vec::new();
    };
    let mut found: Vec<Range> = code
        .branches(caller)
        .into_iter()
        .filter(|branch| branch.kind == Kind::Jump && !caller.contains(branch.to))
        .filter_map(|branch| code.function_at(branch.to))
        .collect();
    found.dedup();
    found
}

/// The functions that stand to a large one as `rb_vm_exec` does to
/// `vm_exec_core`.
fn by_shape<'data, R: ReadRef<'data>>(code: &Code<'_, 'data, R>) -> Vec<Range> {
    let large: Vec<u64> = code
        .functions
        .iter()
        .filter(|range| range.end - range.start >= MIN_CORE)
        .map(|range| range.start)
        .collect();
    let mut calls: Vec<(u64, Range)> = code
        .callers(&large)
        .into_iter()
        .filter(|(callee, caller)| *callee != caller.start)
        .collect();
    calls.sort_unstable_by_key(|(callee, caller)| (*callee, caller.start));
    calls.dedup();
    calls
        .chunk_by(|left, right| left.0 == right.0)
        .filter_map(|callers| match callers {
            [(_, one), (_, other)] => vm_exec_of(code, *one, *other),
            _ => None,
        })
        .collect()
}

/// Which of the two callers of a large function, in the order of their
/// addresses, is `rb_vm_exec`, if they are it and the stub before it.
fn vm_exec_of<'data, R: ReadRef<'data>>(
    code: &Code<'_, 'data, R>,
    stub: Range,
    vm_exec: Range,
) -> Option<Range> {
    let fits = stub.end - stub.start <= MAX_STUB
        && vm_exec.end - vm_exec.start >= MIN_VM_EXEC
        && code.functions.before(vm_exec.start) == Some(stub);
    fits.then_some(vm_exec)
}

/// The part that the compiler moved away from a function. It is described as a
/// function of its own, but what leads there is a conditional jump, as a tail
/// call never is; or it comes back into the middle of the function, as no
/// function does.
pub(super) fn cold_part<'data, R: ReadRef<'data>>(
    code: &Code<'_, 'data, R>,
    function: Range,
) -> Option<Range> {
    let comes_back = |part: Range| {
        code.branches(part).iter().any(|branch| {
            branch.kind != Kind::Call && function.contains(branch.to) && branch.to != function.start
        })
    };
    let mut parts: Vec<Range> = code
        .branches(function)
        .into_iter()
        .filter(|branch| branch.kind != Kind::Call && !function.contains(branch.to))
        .filter_map(|branch| Some((branch.kind, code.functions.containing(branch.to)?)))
        .filter(|&(kind, part)| kind == Kind::Conditional || comes_back(part))
        .map(|(_, part)| part)
        .collect();
    parts.sort_unstable_by_key(|part| part.start);
    parts.dedup();
    match parts.as_slice() {
        [part] => Some(*part),
        _ => None,
    }
}

impl<'data, R: ReadRef<'data>> Code<'_, 'data, R> {
    /// The function at an address, or the one that a stub there leads to.
    fn function_at(&self, address: u64) -> Option<Range> {
        self.functions.starting_at(address).or_else(|| {
            let stub = self.elf.bytes_to_end(address).ok()?;
            let slot = instructions::stub_slot(self.elf.machine(), stub.get(..32)?, address)?;
            let symbol = self.elf.imported_at(slot).ok().flatten()?;
            self.functions.starting_at(symbol.value)
        })
    }

    /// Which functions call, or jump to, one of `callees`, which are sorted.
    fn callers(&self, callees: &[u64]) -> Vec<(u64, Range)> {
        let machine = self.elf.machine();
        let mut containing: Vec<Range> = self
            .segments()
            .into_iter()
            .flat_map(|(address, code)| {
                instructions::possible_branches(machine, code, address, callees)
            })
            .filter_map(|place| self.functions.containing(place))
            .collect();
        containing.sort_unstable_by_key(|range| range.start);
        containing.dedup();
        containing
            .into_iter()
            .flat_map(|caller| {
                self.branches(caller)
                    .into_iter()
                    .filter(|branch| branch.kind != Kind::Conditional)
                    .filter(|branch| callees.binary_search(&branch.to).is_ok())
                    .map(move |branch| (branch.to, caller))
            })
            .collect()
    }
}
