//! Sequences that share their beginnings.
//!
//! The stacks of one program mostly differ in their innermost frames, and the
//! stacks of a deep recursion differ in nothing else. Stored as a tree, a new
//! stack costs its new frames only: 6,000 different stacks of a recursion
//! 8,000 deep are some ten thousand nodes, where lists would be 190 MB.

use std::hash::BuildHasher;
use std::iter::successors;

use hashbrown::DefaultHashBuilder;
use hashbrown::HashTable;

/// A node: one more key after the sequence that ends in `parent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    /// The sequence without its last key; less than the node's own id.
    pub(crate) parent: u32,
    /// The last key.
    pub(crate) key: u32,
}

/// A prefix tree over sequences of `u32` keys. Nodes are numbered from 1 in the
/// order they were added, so that a parent's number is less than its
/// children's; number 0 is the root, the empty sequence.
///
/// A node takes about 15 bytes: eight of its own, and a place in the table that
/// finds it by its content.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    /// Indexes into `nodes`.
    places: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

/// The empty sequence.
pub(crate) const ROOT: u32 = 0;

impl Tree {
    /// The sequence of `parent` with `key` after it. Allocates only when it is
    /// new. Should the numbers ever run out, new sequences end at `parent`.
    pub(crate) fn child(&mut self, parent: u32, key: u32) -> u32 {
        if let Some(known) = self.find(parent, key) {
            return known;
        }
        let index = match u32::try_from(self.nodes.len()) {
            Ok(index) if index < u32::MAX => index,
            _ => return parent,
        };
        let node = Node { parent, key };
        let (nodes, hasher) = (&self.nodes, &self.hasher);
        let hash = |place: &u32| {
            nodes
                .get(*place as usize)
                .map_or(0, |node| hasher.hash_one(node))
        };
        self.places
            .insert_unique(hasher.hash_one(node), index, hash);
        self.nodes.push(node);
        index + 1
    }

    /// The sequence of `parent` with `key` after it, when it is known.
    pub(crate) fn find(&self, parent: u32, key: u32) -> Option<u32> {
        let node = Node { parent, key };
        self.places
            .find(self.hasher.hash_one(node), |place| {
                self.nodes.get(*place as usize) == Some(&node)
            })
            .map(|place| place + 1)
    }

    /// The node with this number; `None` for the root and for strangers.
    pub(crate) fn node(&self, id: u32) -> Option<Node> {
        let index = (id as usize).checked_sub(1)?;
        self.nodes.get(index).copied()
    }

    /// The keys of a sequence, last one first.
    pub(crate) fn keys_up(&self, id: u32) -> impl Iterator<Item = u32> {
        successors(self.node(id), |node| self.node(node.parent)).map(|node| node.key)
    }

    /// How many numbers are in use, the root's included.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() + 1
    }

    /// All nodes with their numbers, parents before children.
    pub(crate) fn nodes(&self) -> impl DoubleEndedIterator<Item = (u32, Node)> {
        (self.nodes.iter().enumerate())
            .map(|(index, node)| (u32::try_from(index + 1).unwrap_or(u32::MAX), *node))
    }

    /// All numbers, each node before its children and children in the order of
    /// `rank` of their keys: the order depends on the sequences only, not on
    /// when they were added, as long as ranks of different keys differ.
    pub(crate) fn preorder<R: Ord>(&self, rank: impl Fn(u32) -> R) -> Vec<u32> {
        let mut by_parent: Vec<(u32, Node)> = self.nodes().collect();
        by_parent.sort_unstable_by(|(_, a), (_, b)| {
            (a.parent, rank(a.key)).cmp(&(b.parent, rank(b.key)))
        });
        let mut order = Vec::with_capacity(self.len());
        let mut pending = vec![ROOT];
        while let Some(id) = pending.pop() {
            order.push(id);
            let first = by_parent.partition_point(|(_, node)| node.parent < id);
            let children = by_parent.iter().skip(first);
            let from = pending.len();
            pending.extend(
                children
                    .take_while(|(_, node)| node.parent == id)
                    .map(|(child, _)| *child),
            );
            if let Some(added) = pending.get_mut(from..) {
                added.reverse();
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(tree: &mut Tree, keys: &[u32]) -> u32 {
        keys.iter().fold(ROOT, |id, key| tree.child(id, *key))
    }

    #[test]
    fn beginnings_are_shared() {
        let mut tree = Tree::default();
        let long = sequence(&mut tree, &[1, 2, 3]);
        let other = sequence(&mut tree, &[1, 2, 4]);
        assert_ne!(long, other);
        assert_eq!(sequence(&mut tree, &[1, 2, 3]), long);
        assert_eq!(tree.len(), 5, "the root and 1, 1-2, 1-2-3, 1-2-4");
        assert_eq!(tree.keys_up(other).collect::<Vec<_>>(), [4, 2, 1]);
        assert_eq!(tree.keys_up(ROOT).count(), 0);
        assert_eq!(tree.keys_up(99).count(), 0);
    }

    #[test]
    fn preorder_depends_on_the_sequences_only() {
        let sequences: [&[u32]; 4] = [&[2, 1], &[1, 9, 3], &[1, 2], &[1]];
        let paths = |tree: &Tree| -> Vec<Vec<u32>> {
            let order = tree.preorder(|key| key);
            order.iter().map(|id| tree.keys_up(*id).collect()).collect()
        };
        let mut forwards = Tree::default();
        let mut backwards = Tree::default();
        for keys in sequences {
            sequence(&mut forwards, keys);
        }
        for keys in sequences.iter().rev() {
            sequence(&mut backwards, keys);
        }
        let expected: [&[u32]; 7] = [&[], &[1], &[2, 1], &[9, 1], &[3, 9, 1], &[2], &[1, 2]];
        assert_eq!(paths(&forwards), expected);
        assert_eq!(paths(&backwards), expected);
    }

    #[test]
    fn a_deep_sequence_needs_no_recursion() {
        let mut tree = Tree::default();
        let deep = (0..200_000).fold(ROOT, |id, _| tree.child(id, 7));
        assert_eq!(tree.keys_up(deep).count(), 200_000);
        assert_eq!(tree.preorder(|key| key).len(), 200_001);
    }
}
