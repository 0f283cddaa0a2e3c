//! The profile made anew, with the frames that are shown.
//!
//! Whether a frame is shown depends on what comes after it towards the leaf, but
//! only on whether there is a method. So every node of the tree of stacks becomes
//! at most two: one for stacks with methods, one for those without.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use super::Presentation;
use super::rules::Code;
use super::rules::Frame;
use crate::profile::Function;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::LabelsId;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::MappingId;
use crate::profile::Profile;
use crate::profile::StackId;

/// A node of the tree of stacks.
#[derive(Clone, Copy, Default)]
struct Place {
    /// There is a method on the way to it.
    inside: bool,
    /// It is on a stack with methods that has samples, and on one without.
    wanted: [bool; 2],
}

const WITH_METHODS: usize = 0;
const WITHOUT: usize = 1;
/// The two stacks of the root.
const NOWHERE: [StackId; 2] = [StackId::EMPTY; 2];

/// The frame of a stack of which nothing is shown.
pub(super) fn nothing_to_show() -> Arc<Function> {
    Function::marker("(no Ruby code)")
}

/// Makes the profile anew. `files` has the files of methods in C.
pub(super) fn rebuild(
    profile: &Profile,
    presentation: Presentation,
    frames: &[Frame],
    files: &HashMap<FunctionId, Arc<str>>,
) -> Profile {
    let tree = profile.stack_tree();
    let places = places(profile, frames);
    // The locations shown at each node, in stacks with methods and without.
    let shown = |id: u32, key: u32, which: usize| {
        let place = places
            .get(id as usize)
            .filter(|place| place.wanted.get(which).copied().unwrap_or(false))?;
        let frame = frames.get(key as usize)?;
        frame
            .is_shown(presentation, which == WITH_METHODS, place.inside)
            .then_some(frame)
    };
    let mut nameless = HashSet::new();
    for (id, node) in tree.nodes() {
        for which in [WITH_METHODS, WITHOUT] {
            if let Some(frame) = shown(id, node.key, which)
                && frame.is_nameless()
            {
                nameless.insert(frame.location.mapping);
            }
        }
    }

    let mut made = Rebuilt {
        old: profile,
        new: Profile::new(profile.metadata.clone()),
        files,
        nameless,
        locations: HashMap::new(),
        mappings: HashMap::new(),
    };
    let mut stacks = vec![NOWHERE];
    for (id, node) in tree.nodes() {
        let mut here = stacks.get(node.parent as usize).copied().unwrap_or(NOWHERE);
        for (which, stack) in here.iter_mut().enumerate() {
            if let Some(frame) = shown(id, node.key, which) {
                let location = made.location(node.key, frame);
                *stack = made.new.extend_stack(*stack, location);
            }
        }
        stacks.push(here);
    }

    let labels: Vec<LabelsId> = (profile.label_sets())
        .map(|(_, labels)| made.new.intern_labels(labels))
        .collect();
    let mut nothing = None;
    for (stack, set, count) in profile.counts() {
        let inside = places.get(stack.index()).is_some_and(|place| place.inside);
        let [with, without] = stacks.get(stack.index()).copied().unwrap_or(NOWHERE);
        let mut shown = if inside { with } else { without };
        if shown == StackId::EMPTY && stack != StackId::EMPTY {
            shown = *nothing.get_or_insert_with(|| {
                let function = made.new.intern_function(&nothing_to_show());
                let location = made.new.intern_location(function, 0);
                made.new.intern_stack(&[location])
            });
        }
        if let Some(&set) = labels.get(set.index()) {
            made.new.add(shown, set, count);
        }
    }
    made.new
}

fn places(profile: &Profile, frames: &[Frame]) -> Vec<Place> {
    let tree = profile.stack_tree();
    let mut places = vec![Place::default()];
    for (_, node) in tree.nodes() {
        let below = places
            .get(node.parent as usize)
            .copied()
            .unwrap_or_default();
        let frame = frames.get(node.key as usize);
        places.push(Place {
            inside: below.inside || frame.is_some_and(|frame| frame.code == Code::Method),
            ..Place::default()
        });
    }
    for (stack, ..) in profile.counts() {
        if let Some(place) = places.get_mut(stack.index()) {
            let [with, without] = &mut place.wanted;
            *(if place.inside { with } else { without }) = true;
        }
    }
    // Children have greater numbers than their parents.
    for (id, node) in tree.nodes().rev() {
        let wanted = places.get(id as usize).copied().unwrap_or_default().wanted;
        if let Some(below) = places.get_mut(node.parent as usize) {
            for (below, wanted) in below.wanted.iter_mut().zip(wanted) {
                *below |= wanted;
            }
        }
    }
    places
}

struct Rebuilt<'a> {
    old: &'a Profile,
    new: Profile,
    files: &'a HashMap<FunctionId, Arc<str>>,
    /// Mappings, of the old profile, with locations that are shown without a name.
    nameless: HashSet<MappingId>,
    /// By what they were before.
    locations: HashMap<u32, LocationId>,
    mappings: HashMap<MappingId, MappingId>,
}

impl Rebuilt<'_> {
    fn location(&mut self, key: u32, frame: &Frame) -> LocationId {
        if let Some(&known) = self.locations.get(&key) {
            return known;
        }
        let function = match self.files.get(&frame.location.function) {
            Some(file) => &Arc::new(Function {
                file: Arc::clone(file),
                ..(*frame.function).clone()
            }),
            None => &frame.function,
        };
        let function = self.new.intern_function(function);
        let mapping = self.mapping(frame);
        let location = self.new.intern_native_location(
            function,
            frame.location.line,
            mapping,
            frame.location.address,
        );
        self.locations.insert(key, location);
        location
    }

    fn mapping(&mut self, frame: &Frame) -> MappingId {
        let old = frame.location.mapping;
        if let Some(&known) = self.mappings.get(&old) {
            return known;
        }
        let mut mapping = self.old.mapping(old).cloned().unwrap_or_default();
        if let FunctionKind::Native | FunctionKind::Kernel = frame.function.kind {
            mapping = Mapping {
                has_functions: !self.nameless.contains(&old),
                ..mapping
            };
        }
        let new = self.new.intern_mapping(&mapping);
        self.mappings.insert(old, new);
        new
    }
}
