//! The order in which a profile is written, which depends on its content only.

use std::cmp::Ordering;

use crate::profile::Function;
use crate::profile::LabelsId;
use crate::profile::Location;
use crate::profile::Profile;
use crate::profile::StackId;

/// All counts, by stack (frames compared from the root) and then by labels.
pub(super) fn counts(profile: &Profile) -> Vec<(StackId, LabelsId, u64)> {
    let functions: Vec<_> = profile.functions().map(|(_, f)| &**f).collect();
    let functions = ranks(&functions, |a, b| compare_functions(a, b));
    let locations: Vec<&Location> = profile.locations().map(|(_, l)| l).collect();
    let locations = ranks(&locations, |a, b| {
        let key = |location: &Location| {
            (
                rank(&functions, location.function.index()),
                location.line,
                location.address,
            )
        };
        key(a)
            .cmp(&key(b))
            .then_with(|| profile.mapping(a.mapping).cmp(&profile.mapping(b.mapping)))
    });
    let labels: Vec<_> = profile.label_sets().map(|(_, labels)| labels).collect();
    let labels = ranks(&labels, Ord::cmp);

    let tree = profile.stack_tree();
    let mut stacks = vec![0; tree.len()];
    let order = tree.preorder(|key| rank(&locations, key as usize));
    for (place, id) in (0_u32..).zip(order) {
        if let Some(stack) = stacks.get_mut(id as usize) {
            *stack = place;
        }
    }
    let mut counts: Vec<_> = profile.counts().collect();
    counts.sort_unstable_by_key(|(stack, set, _)| {
        (rank(&stacks, stack.index()), rank(&labels, set.index()))
    });
    counts
}

fn compare_functions(a: &Function, b: &Function) -> Ordering {
    let key = |f: &Function| {
        let Function {
            kind,
            label,
            base_label,
            file,
            first_line,
        } = f.clone();
        (label, file, first_line, base_label, kind)
    };
    key(a).cmp(&key(b))
}

/// For each item, its place among all of them in sorted order.
fn ranks<T>(items: &[T], mut compare: impl FnMut(&T, &T) -> Ordering) -> Vec<u32> {
    let mut sorted: Vec<(usize, &T)> = items.iter().enumerate().collect();
    sorted.sort_by(|(_, a), (_, b)| compare(a, b));
    let mut ranks = vec![0; items.len()];
    for (place, (index, _)) in (0_u32..).zip(sorted) {
        if let Some(rank) = ranks.get_mut(index) {
            *rank = place;
        }
    }
    ranks
}

fn rank(ranks: &[u32], index: usize) -> u32 {
    ranks.get(index).copied().unwrap_or(u32::MAX)
}
