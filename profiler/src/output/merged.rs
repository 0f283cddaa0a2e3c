//! The stacks of a profile as a reader will see them: merged by what a frame
//! shows, with the samples of all threads together or apart.

use std::collections::HashMap;

use crate::profile::LabelsId;
use crate::profile::Profile;
use crate::profile::ROOT;
use crate::profile::Tree;

/// Which frames of deep stacks are left out: those between the `outer`
/// outermost ones and the `inner` innermost ones, where `mark` stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elision {
    pub(super) outer: u32,
    pub(super) inner: u32,
    /// Key of the frame that stands in the gap.
    pub(super) mark: u32,
}

/// A tree of frames, outermost at the root, by keys that the writer chose.
#[derive(Debug)]
pub(super) struct Merged {
    pub(super) tree: Tree,
    /// Samples whose stack ends here, by node.
    own: Vec<u64>,
}

impl Merged {
    /// Merges the stacks of `profile`. A frame's key is `keys` at the index of
    /// its location; `root` may give a key for a frame below a sample's stack.
    pub(super) fn new(
        profile: &Profile,
        keys: &[u32],
        elision: Option<Elision>,
        root: impl Fn(LabelsId) -> Option<u32>,
    ) -> Self {
        let stacks = profile.stack_tree();
        let depths = depths(stacks);
        let mut merged = Self {
            tree: Tree::default(),
            own: Vec::new(),
        };
        let mut known: HashMap<(u32, u32), u32> = HashMap::new();
        for (stack, labels, count) in profile.counts() {
            let bottom = root(labels).map_or(ROOT, |key| merged.tree.child(ROOT, key));
            let stack = u32::try_from(stack.index()).unwrap_or(ROOT);
            let depth = depths.get(stack as usize).copied().unwrap_or(0);
            let cut = elision.filter(|cut| depth > cut.outer.saturating_add(cut.inner));
            let mut node = match cut {
                None => merged.place(stacks, keys, &mut known, bottom, stack),
                Some(cut) => {
                    let outer = ancestor(stacks, stack, depth - cut.outer);
                    merged.place(stacks, keys, &mut known, bottom, outer)
                }
            };
            if let Some(cut) = cut {
                node = merged.tree.child(node, cut.mark);
                let inner: Vec<u32> = stacks.keys_up(stack).take(cut.inner as usize).collect();
                for location in inner.iter().rev() {
                    node = merged.tree.child(node, key_of(keys, *location));
                }
            }
            merged.own.resize(merged.tree.len(), 0);
            if let Some(own) = merged.own.get_mut(node as usize) {
                *own = own.saturating_add(count);
            }
        }
        merged.own.resize(merged.tree.len(), 0);
        merged
    }

    /// The node of a whole stack above `bottom`, made where it is new.
    fn place(
        &mut self,
        stacks: &Tree,
        keys: &[u32],
        known: &mut HashMap<(u32, u32), u32>,
        bottom: u32,
        stack: u32,
    ) -> u32 {
        let mut missing = Vec::new();
        let mut at = stack;
        let mut node = loop {
            if let Some(node) = known.get(&(bottom, at)) {
                break *node;
            }
            let Some(frame) = stacks.node(at) else {
                break bottom;
            };
            missing.push((at, frame.key));
            at = frame.parent;
        };
        for (at, location) in missing.into_iter().rev() {
            node = self.tree.child(node, key_of(keys, location));
            known.insert((bottom, at), node);
        }
        node
    }

    /// Samples whose stack ends at this node.
    pub(super) fn own(&self, node: u32) -> u64 {
        self.own.get(node as usize).copied().unwrap_or(0)
    }

    /// Samples whose stack passes through each node.
    pub(super) fn totals(&self) -> Vec<u64> {
        totals(&self.tree, self.own.clone())
    }
}

/// Adds to each node what is above it; `own` has a value for every node.
pub(super) fn totals(tree: &Tree, mut own: Vec<u64>) -> Vec<u64> {
    // Children have greater numbers than their parents.
    for (id, node) in tree.nodes().rev() {
        let above = own.get(id as usize).copied().unwrap_or(0);
        if let Some(below) = own.get_mut(node.parent as usize) {
            *below = below.saturating_add(above);
        }
    }
    own
}

/// Frames from the root, for every node.
fn depths(tree: &Tree) -> Vec<u32> {
    let mut depths = Vec::with_capacity(tree.len());
    depths.push(0);
    for (_, node) in tree.nodes() {
        let parent: u32 = depths.get(node.parent as usize).copied().unwrap_or(0);
        depths.push(parent.saturating_add(1));
    }
    depths
}

/// The node `steps` towards the root.
fn ancestor(tree: &Tree, mut id: u32, steps: u32) -> u32 {
    for _ in 0..steps {
        match tree.node(id) {
            Some(node) => id = node.parent,
            None => break,
        }
    }
    id
}

fn key_of(keys: &[u32], location: u32) -> u32 {
    keys.get(location as usize).copied().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::example::Builder;

    fn sequences(merged: &Merged) -> Vec<(Vec<u32>, u64)> {
        let mut found: Vec<(Vec<u32>, u64)> = (0..merged.tree.len() as u32)
            .filter(|node| merged.own(*node) > 0)
            .map(|node| {
                let mut keys: Vec<u32> = merged.tree.keys_up(node).collect();
                keys.reverse();
                (keys, merged.own(node))
            })
            .collect();
        found.sort();
        found
    }

    #[test]
    fn frames_with_one_key_are_one() {
        let mut builder = Builder::default();
        builder.sample(1, &["main:1", "a:1", "b:1"], 1);
        builder.sample(2, &["main:1", "a:2", "b:1"], 2);
        // In order of first use: main:1, a:1, b:1, a:2.
        let locations = builder.profile.locations().count();
        assert_eq!(locations, 4);
        let keys: Vec<u32> = (builder.profile.locations())
            .map(|(_, location)| location.function.index() as u32)
            .collect();
        let merged = Merged::new(&builder.profile, &keys, None, |_| None);
        assert_eq!(keys[3], keys[1]);
        assert_eq!(sequences(&merged), [(keys[..3].to_vec(), 3)]);
        assert_eq!(merged.totals()[ROOT as usize], 3);

        let apart = Merged::new(&builder.profile, &keys, None, |labels| {
            Some(100 + labels.index() as u32)
        });
        let sequences = sequences(&apart);
        assert_eq!(sequences.len(), 2);
        assert_eq!((sequences[0].0[0], sequences[0].1), (100, 1));
        assert_eq!((sequences[1].0[0], sequences[1].1), (101, 2));
    }

    #[test]
    fn the_middle_of_deep_stacks_goes() {
        let mut builder = Builder::default();
        let frames: Vec<String> = (0..20).map(|n| format!("f{n}:1")).collect();
        let frames: Vec<&str> = frames.iter().map(String::as_str).collect();
        builder.sample(1, &frames, 1);
        builder.sample(1, &frames[..5], 1);
        let keys: Vec<u32> = (builder.profile.locations())
            .map(|(_, location)| {
                let function = builder.profile.function(location.function).unwrap();
                function.label[1..].parse().unwrap()
            })
            .collect();
        let cut = Elision {
            outer: 3,
            inner: 2,
            mark: 99,
        };
        let merged = Merged::new(&builder.profile, &keys, Some(cut), |_| None);
        let expected = [(vec![0, 1, 2, 3, 4], 1), (vec![0, 1, 2, 99, 18, 19], 1)];
        assert_eq!(sequences(&merged), expected);
    }
}
