//! A profile: interned functions, locations, stacks, counts and labels. Knows
//! nothing of BPF or of output formats.
//!
//! ```
//! use std::sync::Arc;
//! use rbprof::profile::{Function, FunctionKind, Labels, Profile};
//!
//! let mut profile = Profile::default();
//! let function = profile.intern_function(&Arc::new(Function {
//!     kind: FunctionKind::Ruby,
//!     label: Arc::from("Report#total"),
//!     base_label: Arc::from("total"),
//!     file: Arc::from("/app/report.rb"),
//!     first_line: 12,
//! }));
//! let location = profile.intern_location(function, 14);
//! let stack = profile.intern_stack(&[location]);
//! let labels = profile.intern_labels(&Labels { pid: 42, tid: 43, ..Labels::default() });
//! profile.add(stack, labels, 1);
//! assert_eq!(profile.total(), 1);
//! ```

mod function;
mod ids;
mod labels;
mod mapping;
mod metadata;
mod split;
mod tree;

use std::collections::HashSet;
use std::sync::Arc;

use indexmap::IndexMap;
use indexmap::IndexSet;

pub use function::Function;
pub use function::FunctionKind;
pub use ids::FunctionId;
pub use ids::LabelsId;
pub use ids::LocationId;
pub use ids::MappingId;
pub use ids::StackId;
pub use labels::Labels;
pub use mapping::Location;
pub use mapping::Mapping;
pub use metadata::Counter;
pub use metadata::CounterKind;
pub use metadata::Metadata;
pub use metadata::Mode;
pub(crate) use tree::ROOT;
pub(crate) use tree::Tree;

/// Samples of one or more processes, counted by stack and labels.
///
/// Everything is interned: equal things have one id. Interning or adding what
/// is known already allocates nothing. Ids are handed out in order of first
/// use, so a profile that is filled in the same order has the same ids; the
/// writers do not rely on it, and write profiles of equal content alike.
#[derive(Clone, Debug)]
pub struct Profile {
    /// About the recording as a whole.
    pub metadata: Metadata,
    functions: IndexSet<Arc<Function>>,
    mappings: IndexSet<Mapping>,
    locations: IndexSet<Location>,
    /// Outermost frame at the root; keys are location ids.
    stacks: Tree,
    labels: IndexSet<Labels>,
    counts: IndexMap<(StackId, LabelsId), u64>,
    total: u64,
}

impl Default for Profile {
    fn default() -> Self {
        Self::new(Metadata::default())
    }
}

/// How many different things a profile holds: what its memory grows with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Functions.
    pub functions: usize,
    /// Locations.
    pub locations: usize,
    /// Frames of stacks, each beginning that several stacks share counted once.
    pub frames: usize,
    /// Sets of labels.
    pub labels: usize,
    /// Pairs of stack and labels that have a count.
    pub counts: usize,
}

impl Profile {
    /// A profile without samples.
    #[must_use]
    pub fn new(metadata: Metadata) -> Self {
        Self {
            metadata,
            functions: IndexSet::new(),
            mappings: IndexSet::from([Mapping::ruby(), Mapping::ruby_jit()]),
            locations: IndexSet::new(),
            stacks: Tree::default(),
            labels: IndexSet::new(),
            counts: IndexMap::new(),
            total: 0,
        }
    }

    /// The id of a function. Functions are equal when their contents are.
    pub fn intern_function(&mut self, function: &Arc<Function>) -> FunctionId {
        let index = match self.functions.get_index_of(function) {
            Some(index) => index,
            None => self.functions.insert_full(Arc::clone(function)).0,
        };
        FunctionId::from_index(index)
    }

    /// The id of a mapping.
    pub fn intern_mapping(&mut self, mapping: &Mapping) -> MappingId {
        let index = match self.mappings.get_index_of(mapping) {
            Some(index) => index,
            None => self.mappings.insert_full(mapping.clone()).0,
        };
        MappingId::from_index(index)
    }

    /// The id of a line of a function that is not machine code. `line` is 0
    /// where there is none.
    pub fn intern_location(&mut self, function: FunctionId, line: u32) -> LocationId {
        self.intern_native_location(function, line, MappingId::RUBY, 0)
    }

    /// The id of a line of a function of Ruby code that was compiled.
    pub fn intern_compiled_location(&mut self, function: FunctionId, line: u32) -> LocationId {
        self.intern_native_location(function, line, MappingId::RUBY_JIT, 0)
    }

    /// The id of an instruction. `line` is 0 where it is not known.
    pub fn intern_native_location(
        &mut self,
        function: FunctionId,
        line: u32,
        mapping: MappingId,
        address: u64,
    ) -> LocationId {
        let location = Location {
            function,
            line,
            mapping,
            address,
        };
        LocationId::from_index(self.locations.insert_full(location).0)
    }

    /// The id of a stack, leaf (the innermost frame) first.
    pub fn intern_stack(&mut self, frames: &[LocationId]) -> StackId {
        let id = frames.iter().rev().fold(ROOT, |parent, location| {
            self.stacks.child(parent, key(location.index()))
        });
        StackId::from_index(id as usize)
    }

    /// The id of a stack with one more frame at its leaf.
    pub(crate) fn extend_stack(&mut self, stack: StackId, leaf: LocationId) -> StackId {
        let id = self.stacks.child(key(stack.index()), key(leaf.index()));
        StackId::from_index(id as usize)
    }

    /// The id of a set of labels.
    pub fn intern_labels(&mut self, labels: &Labels) -> LabelsId {
        let index = match self.labels.get_index_of(labels) {
            Some(index) => index,
            None => self.labels.insert_full(labels.clone()).0,
        };
        LabelsId::from_index(index)
    }

    /// Counts `count` more samples of a stack.
    pub fn add(&mut self, stack: StackId, labels: LabelsId, count: u64) {
        if count == 0 {
            return;
        }
        let counted = self.counts.entry((stack, labels)).or_default();
        *counted = counted.saturating_add(count);
        self.total = self.total.saturating_add(count);
    }

    /// Takes in the samples and the metadata of another profile.
    pub fn merge(&mut self, other: &Self) {
        self.metadata.merge(&other.metadata);
        let functions: Vec<FunctionId> = (other.functions.iter())
            .map(|function| self.intern_function(function))
            .collect();
        let mappings: Vec<MappingId> = (other.mappings.iter())
            .map(|mapping| self.intern_mapping(mapping))
            .collect();
        let locations: Vec<LocationId> = (other.locations.iter())
            .filter_map(|location| {
                Some(self.intern_native_location(
                    *functions.get(location.function.index())?,
                    location.line,
                    *mappings.get(location.mapping.index())?,
                    location.address,
                ))
            })
            .collect();
        let labels: Vec<LabelsId> = (other.labels.iter())
            .map(|labels| self.intern_labels(labels))
            .collect();
        let mut stacks = vec![ROOT];
        for (_, node) in other.stacks.nodes() {
            // Parents come first, so the parent's place is filled.
            let parent = stacks.get(node.parent as usize).copied().unwrap_or(ROOT);
            let location = locations.get(node.key as usize);
            stacks.push(location.map_or(parent, |location| {
                self.stacks.child(parent, key(location.index()))
            }));
        }
        for ((stack, set), count) in &other.counts {
            if let (Some(stack), Some(set)) = (stacks.get(stack.index()), labels.get(set.index())) {
                self.add(StackId::from_index(*stack as usize), *set, *count);
            }
        }
    }

    /// The function with this id.
    #[must_use]
    pub fn function(&self, id: FunctionId) -> Option<&Arc<Function>> {
        self.functions.get_index(id.index())
    }

    /// The mapping with this id.
    #[must_use]
    pub fn mapping(&self, id: MappingId) -> Option<&Mapping> {
        self.mappings.get_index(id.index())
    }

    /// The location with this id.
    #[must_use]
    pub fn location(&self, id: LocationId) -> Option<&Location> {
        self.locations.get_index(id.index())
    }

    /// The set of labels with this id.
    #[must_use]
    pub fn labels(&self, id: LabelsId) -> Option<&Labels> {
        self.labels.get_index(id.index())
    }

    /// The frames of a stack, leaf (the innermost frame) first.
    pub fn stack(&self, id: StackId) -> impl Iterator<Item = LocationId> {
        self.stacks
            .keys_up(key(id.index()))
            .map(|key| LocationId::from_index(key as usize))
    }

    /// All functions, in the order of their ids.
    pub fn functions(&self) -> impl ExactSizeIterator<Item = (FunctionId, &Arc<Function>)> {
        (self.functions.iter().enumerate())
            .map(|(index, function)| (FunctionId::from_index(index), function))
    }

    /// All mappings, in the order of their ids.
    pub fn mappings(&self) -> impl ExactSizeIterator<Item = (MappingId, &Mapping)> {
        (self.mappings.iter().enumerate())
            .map(|(index, mapping)| (MappingId::from_index(index), mapping))
    }

    /// All locations, in the order of their ids.
    pub fn locations(&self) -> impl ExactSizeIterator<Item = (LocationId, &Location)> {
        (self.locations.iter().enumerate())
            .map(|(index, location)| (LocationId::from_index(index), location))
    }

    /// All sets of labels, in the order of their ids.
    pub fn label_sets(&self) -> impl ExactSizeIterator<Item = (LabelsId, &Labels)> {
        (self.labels.iter().enumerate())
            .map(|(index, labels)| (LabelsId::from_index(index), labels))
    }

    /// The counts, each pair of stack and labels once.
    pub fn counts(&self) -> impl ExactSizeIterator<Item = (StackId, LabelsId, u64)> {
        (self.counts.iter()).map(|((stack, labels), count)| (*stack, *labels, *count))
    }

    /// All samples.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// How many different threads have samples.
    #[must_use]
    pub fn threads(&self) -> usize {
        let threads: HashSet<(u32, u32)> = (self.counts.keys())
            .filter_map(|(_, labels)| self.labels(*labels))
            .map(|labels| (labels.pid, labels.tid))
            .collect();
        threads.len()
    }

    /// What the memory of this profile grows with, for those who must bound it.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        Footprint {
            functions: self.functions.len(),
            locations: self.locations.len(),
            frames: self.stacks.len() - 1,
            labels: self.labels.len(),
            counts: self.counts.len(),
        }
    }

    /// The stacks as a tree with location ids as keys; a stack's id is the
    /// number of its node.
    pub(crate) const fn stack_tree(&self) -> &Tree {
        &self.stacks
    }
}

/// An index as a key of the stack tree; see `ids` about the largest value.
fn key(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(label: &str) -> Arc<Function> {
        Arc::new(Function {
            kind: FunctionKind::Ruby,
            label: Arc::from(label),
            base_label: Arc::from(label),
            file: Arc::from("/a.rb"),
            first_line: 1,
        })
    }

    fn thread(tid: u32) -> Labels {
        Labels {
            pid: 1,
            tid,
            ..Labels::default()
        }
    }

    #[test]
    fn equal_things_have_one_id() {
        let mut profile = Profile::default();
        let a = profile.intern_function(&function("a"));
        assert_eq!(profile.intern_function(&function("a")), a);
        let b = profile.intern_function(&function("b"));
        assert_ne!(a, b);
        let (a1, b2) = (profile.intern_location(a, 1), profile.intern_location(b, 2));
        assert_eq!(profile.intern_location(a, 1), a1);
        let stack = profile.intern_stack(&[b2, a1]);
        assert_eq!(profile.intern_stack(&[b2, a1]), stack);
        assert_ne!(profile.intern_stack(&[a1, b2]), stack);
        assert_eq!(profile.stack(stack).collect::<Vec<_>>(), [b2, a1]);
        assert_eq!(profile.intern_stack(&[]), StackId::EMPTY);
        assert_eq!(profile.stack(StackId::EMPTY).count(), 0);
        let labels = profile.intern_labels(&thread(7));
        assert_eq!(profile.intern_labels(&thread(7)), labels);
        let footprint = profile.footprint();
        assert_eq!((footprint.functions, footprint.locations), (2, 2));
        assert_eq!(footprint.frames, 4);
    }

    #[test]
    fn counts_are_by_stack_and_labels() {
        let mut profile = Profile::default();
        let a = profile.intern_function(&function("a"));
        let location = profile.intern_location(a, 1);
        let stack = profile.intern_stack(&[location]);
        let (one, two) = (
            profile.intern_labels(&thread(1)),
            profile.intern_labels(&thread(2)),
        );
        profile.add(stack, one, 1);
        profile.add(stack, two, 5);
        profile.add(stack, one, 2);
        profile.add(StackId::EMPTY, two, 0);
        let counts: Vec<_> = profile.counts().collect();
        assert_eq!(counts, [(stack, one, 3), (stack, two, 5)]);
        assert_eq!((profile.total(), profile.threads()), (8, 2));
        profile.add(stack, one, u64::MAX);
        assert_eq!(profile.total(), u64::MAX);
    }

    #[test]
    fn strangers_are_none() {
        let mut big = Profile::default();
        let a = big.intern_function(&function("a"));
        let location = big.intern_location(a, 1);
        let stack = big.intern_stack(&[location, location]);
        let labels = big.intern_labels(&thread(1));
        let small = Profile::default();
        assert!(small.function(a).is_none());
        assert!(small.location(location).is_none());
        assert!(small.labels(labels).is_none());
        assert_eq!(small.stack(stack).count(), 0);
    }

    #[test]
    fn merging_adds_what_is_equal_and_keeps_the_rest() {
        let build = |names: &[&str], tid: u32, count: u64| {
            let mut profile = Profile::default();
            let frames: Vec<LocationId> = (names.iter())
                .map(|name| {
                    let function = profile.intern_function(&function(name));
                    profile.intern_location(function, 3)
                })
                .collect();
            let stack = profile.intern_stack(&frames);
            let labels = profile.intern_labels(&thread(tid));
            profile.add(stack, labels, count);
            profile
        };
        let mut merged = build(&["leaf", "main"], 1, 10);
        merged.merge(&build(&["leaf", "main"], 1, 5));
        merged.merge(&build(&["other", "main"], 2, 7));
        assert_eq!((merged.total(), merged.threads()), (22, 2));
        let readable: Vec<(Vec<&str>, u64)> = (merged.counts())
            .map(|(stack, _, count)| {
                let names = merged.stack(stack).map(|id| {
                    let location = merged.location(id).unwrap();
                    &*merged.function(location.function).unwrap().label
                });
                (names.collect(), count)
            })
            .collect();
        let expected = [(vec!["leaf", "main"], 15), (vec!["other", "main"], 7)];
        assert_eq!(readable, expected);
        assert_eq!(merged.footprint().frames, 3, "main is shared");
    }
}
