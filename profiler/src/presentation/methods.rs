//! In which file a method in C is.
//!
//! Ruby says of a method in C no more than `<cfunc>`. Its machine code says more:
//! between the frame of the method and the next one of Ruby's, towards the leaf,
//! lie first the functions of the interpreter that call C functions, then the
//! function that is the method. If that is in an extension, so is the method.
//!
//! Code of extensions also runs in methods of the interpreter: `require` runs
//! `Init_zlib`, `Class#new` an allocator, and whatever collects garbage the functions
//! that mark and free objects. There other functions of the interpreter come first,
//! and speak for it. They may have no names, so only few of those are passed over.
//! Libraries hold no methods: it is the interpreter that calls `sqrt`.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use super::rules::Code;
use super::rules::Frame;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::Profile;

/// What the names of the interpreter's functions that call methods begin with,
/// apart from those with `cfunc` in their name.
const CALLERS: [&str; 9] = [
    "vm_call",
    "vm_exec",
    "vm_sendish",
    "vm_send",
    "vm_invoke",
    "rb_vm_exec",
    "rb_vm_call",
    "rb_vm_invoke",
    "rb_vm_opt_send",
];

/// Most nameless functions of the interpreter between a method and the function
/// in an extension that it is: the main loop, two that call, one for the number of
/// arguments. Marking and sweeping take more.
const MAX_NAMELESS: u8 = 5;

/// A method in C whose function is still to come.
#[derive(Clone, Copy)]
struct Pending {
    method: FunctionId,
    nameless: u8,
}

/// Samples that speak for where a method is.
#[derive(Default)]
struct Votes {
    interpreter: u64,
    files: BTreeMap<Arc<str>, u64>,
}

/// The files of methods in C that are in extensions, as mapped.
pub(super) fn files(profile: &Profile, frames: &[Frame]) -> HashMap<FunctionId, Arc<str>> {
    let tree = profile.stack_tree();
    let totals = totals(profile);
    let mut votes: HashMap<FunctionId, Votes> = HashMap::new();
    let mut pending: Vec<Option<Pending>> = vec![None];
    for (id, node) in tree.nodes() {
        let before = pending.get(node.parent as usize).copied().flatten();
        let total = totals.get(id as usize).copied().unwrap_or(0);
        let after = frames.get(node.key as usize).and_then(|frame| {
            if frame.function.kind == FunctionKind::CFunction {
                return Some(Pending {
                    method: frame.location.function,
                    nameless: 0,
                });
            }
            step(profile, before?, frame, total, &mut votes)
        });
        pending.push(after);
    }
    votes
        .into_iter()
        .filter_map(|(method, votes)| {
            // The first of those with most samples.
            let (file, count) = (votes.files.into_iter().rev()).max_by_key(|(_, count)| *count)?;
            (count > votes.interpreter).then_some((method, file))
        })
        .collect()
}

/// Looks at the next frame towards the leaf; `total` samples have it.
fn step(
    profile: &Profile,
    pending: Pending,
    frame: &Frame,
    total: u64,
    votes: &mut HashMap<FunctionId, Votes>,
) -> Option<Pending> {
    let name = &*frame.function.base_label;
    match frame.code {
        Code::Generated => Some(pending),
        Code::Interpreter if frame.is_nameless() => {
            let nameless = pending.nameless + 1;
            (nameless <= MAX_NAMELESS).then_some(Pending {
                nameless,
                ..pending
            })
        }
        Code::Interpreter if calls_methods(name) => Some(pending),
        Code::Interpreter => {
            let votes = votes.entry(pending.method).or_default();
            votes.interpreter = votes.interpreter.saturating_add(total);
            None
        }
        Code::Extension if !name.starts_with("Init_") => {
            let file = &profile.mapping(frame.location.mapping)?.file;
            let votes = votes.entry(pending.method).or_default();
            let count = votes.files.entry(Arc::clone(file)).or_default();
            *count = count.saturating_add(total);
            None
        }
        _ => None,
    }
}

fn calls_methods(name: &str) -> bool {
    name.contains("cfunc") || CALLERS.iter().any(|caller| name.starts_with(caller))
}

/// Samples whose stack passes through each node of the tree of stacks.
fn totals(profile: &Profile) -> Vec<u64> {
    let tree = profile.stack_tree();
    let mut totals = vec![0_u64; tree.len()];
    for (stack, _, count) in profile.counts() {
        if let Some(total) = totals.get_mut(stack.index()) {
            *total = total.saturating_add(count);
        }
    }
    // Children have greater numbers than their parents.
    for (id, node) in tree.nodes().rev() {
        let above = totals.get(id as usize).copied().unwrap_or(0);
        if let Some(below) = totals.get_mut(node.parent as usize) {
            *below = below.saturating_add(above);
        }
    }
    totals
}
