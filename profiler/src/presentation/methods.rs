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
//! Libraries hold no methods: it is the interpreter that calls `sqrt`. And where
//! machine code was walked at all, a method without any is the interpreter's: its
//! own functions may have been left out of the recording.

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

impl Votes {
    /// Adds what `count` samples say, in which `frame` is what decides.
    fn add(&mut self, vote: Vote, profile: &Profile, frame: &Frame, count: u64) {
        let sum = match vote {
            Vote::None => return,
            Vote::Interpreter => &mut self.interpreter,
            Vote::File => match profile.mapping(frame.location.mapping) {
                Some(mapping) => self.files.entry(Arc::clone(&mapping.file)).or_default(),
                None => return,
            },
        };
        *sum = sum.saturating_add(count);
    }
}

/// What a frame says of the method before it.
#[derive(Clone, Copy)]
enum Vote {
    /// Nothing.
    None,
    /// It is the interpreter's.
    Interpreter,
    /// It is in the file of the frame.
    File,
}

/// What to do after a frame.
enum Step {
    /// Look at the next one.
    On(Pending),
    /// This one decides.
    Done(Vote),
}

/// What is known at a node of the tree of stacks.
#[derive(Clone, Copy, Default)]
struct State {
    pending: Option<Pending>,
    /// There is machine code on the way to it.
    walked: bool,
}

/// The files of methods in C that are in extensions, as mapped.
pub(super) fn files(profile: &Profile, frames: &[Frame]) -> HashMap<FunctionId, Arc<str>> {
    let tree = profile.stack_tree();
    let (own, totals) = samples(profile);
    let mut votes: HashMap<FunctionId, Votes> = HashMap::new();
    let mut states = vec![State::default()];
    for (id, node) in tree.nodes() {
        let mut state = states
            .get(node.parent as usize)
            .copied()
            .unwrap_or_default();
        if let Some(frame) = frames.get(node.key as usize) {
            let count = |of: &[u64]| of.get(id as usize).copied().unwrap_or(0);
            if let Some(pending) = state.pending {
                state.pending = match step(pending, frame, state.walked) {
                    Step::On(pending) => Some(pending),
                    Step::Done(vote) => {
                        let votes = votes.entry(pending.method).or_default();
                        votes.add(vote, profile, frame, count(&totals));
                        None
                    }
                };
            }
            if frame.function.kind == FunctionKind::CFunction {
                state.pending = Some(Pending {
                    method: frame.location.function,
                    nameless: 0,
                });
            }
            state.walked |= frame.function.kind == FunctionKind::Native;
            // Stacks that end here.
            if let State {
                pending: Some(pending),
                walked: true,
            } = state
            {
                let votes = votes.entry(pending.method).or_default();
                votes.add(Vote::Interpreter, profile, frame, count(&own));
            }
        }
        states.push(state);
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

/// Looks at the next frame towards the leaf; `walked` if there was machine code
/// before the method.
fn step(pending: Pending, frame: &Frame, walked: bool) -> Step {
    let name = &*frame.function.base_label;
    match frame.code {
        Code::Generated => Step::On(pending),
        Code::Interpreter if frame.is_nameless() && pending.nameless < MAX_NAMELESS => {
            Step::On(Pending {
                nameless: pending.nameless + 1,
                ..pending
            })
        }
        Code::Interpreter if calls_methods(name) => Step::On(pending),
        Code::Extension if !name.starts_with("Init_") => Step::Done(Vote::File),
        Code::Method | Code::Marker | Code::Kernel if !walked => Step::Done(Vote::None),
        _ => Step::Done(Vote::Interpreter),
    }
}

fn calls_methods(name: &str) -> bool {
    name.contains("cfunc") || CALLERS.iter().any(|caller| name.starts_with(caller))
}

/// Samples whose stack ends at each node of the tree of stacks, and those whose
/// stack passes through it or ends there.
fn samples(profile: &Profile) -> (Vec<u64>, Vec<u64>) {
    let tree = profile.stack_tree();
    let mut own = vec![0_u64; tree.len()];
    for (stack, _, count) in profile.counts() {
        if let Some(own) = own.get_mut(stack.index()) {
            *own = own.saturating_add(count);
        }
    }
    let mut totals = own.clone();
    // Children have greater numbers than their parents.
    for (id, node) in tree.nodes().rev() {
        let above = totals.get(id as usize).copied().unwrap_or(0);
        if let Some(below) = totals.get_mut(node.parent as usize) {
            *below = below.saturating_add(above);
        }
    }
    (own, totals)
}
