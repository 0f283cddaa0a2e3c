//! A profile of many processes as profiles of one each.

use std::collections::BTreeMap;
use std::collections::HashMap;

use super::LabelsId;
use super::LocationId;
use super::Profile;

/// The profile of one process in the making.
struct Part {
    profile: Profile,
    locations: HashMap<LocationId, LocationId>,
    labels: HashMap<LabelsId, LabelsId>,
}

impl Profile {
    /// The samples of each process, by the process id in their labels. Each part has
    /// the metadata of the whole.
    #[must_use]
    pub fn by_process(&self) -> BTreeMap<u32, Self> {
        let mut parts: BTreeMap<u32, Part> = BTreeMap::new();
        let mut frames = Vec::new();
        for (stack, set, count) in self.counts() {
            let Some(labels) = self.labels(set) else {
                continue;
            };
            let part = parts.entry(labels.pid).or_insert_with(|| Part {
                profile: Self::new(self.metadata.clone()),
                locations: HashMap::new(),
                labels: HashMap::new(),
            });
            frames.clear();
            for location in self.stack(stack) {
                frames.extend(part.location(self, location));
            }
            let stack = part.profile.intern_stack(&frames);
            let set = match part.labels.get(&set) {
                Some(&known) => known,
                None => {
                    let new = part.profile.intern_labels(labels);
                    part.labels.insert(set, new);
                    new
                }
            };
            part.profile.add(stack, set, count);
        }
        parts
            .into_iter()
            .map(|(pid, part)| (pid, part.profile))
            .collect()
    }
}

impl Part {
    /// The same location in the part.
    fn location(&mut self, whole: &Profile, id: LocationId) -> Option<LocationId> {
        if let Some(&known) = self.locations.get(&id) {
            return Some(known);
        }
        let location = whole.location(id)?;
        let function = self
            .profile
            .intern_function(whole.function(location.function)?);
        let mapping = self
            .profile
            .intern_mapping(whole.mapping(location.mapping)?);
        let new =
            self.profile
                .intern_native_location(function, location.line, mapping, location.address);
        self.locations.insert(id, new);
        Some(new)
    }
}

#[cfg(test)]
mod tests {
    use crate::profile::Function;
    use crate::profile::Labels;
    use crate::profile::Mapping;

    use super::*;

    #[test]
    fn each_process_has_its_own_samples() {
        let mut whole = Profile::default();
        let names = ["a", "b", "c"];
        let [a, b, c] = names.map(|name| whole.intern_function(&Function::marker(name)));
        let library = whole.intern_mapping(&Mapping {
            file: "/lib/x.so".into(),
            ..Mapping::default()
        });
        let frames = [
            whole.intern_location(a, 1),
            whole.intern_location(b, 2),
            whole.intern_native_location(c, 0, library, 0x40),
        ];
        let [one, two] = [(1, 10), (2, 20)].map(|(pid, tid)| {
            whole.intern_labels(&Labels {
                pid,
                tid,
                ..Labels::default()
            })
        });
        let [short, long] = [&frames[..1], &frames[..]].map(|frames| whole.intern_stack(frames));
        whole.add(short, one, 3);
        whole.add(long, two, 4);
        whole.add(short, two, 5);

        let parts = whole.by_process();
        let totals: Vec<_> = parts
            .iter()
            .map(|(pid, part)| (*pid, part.total()))
            .collect();
        assert_eq!(totals, [(1, 3), (2, 9)]);
        let second = &parts[&2];
        let (stack, labels, count) = second.counts().next().unwrap();
        assert_eq!(count, 4);
        assert_eq!(second.labels(labels).unwrap().tid, 20);
        let names: Vec<_> = (second.stack(stack))
            .map(|id| second.location(id).unwrap())
            .map(|location| {
                let function = second.function(location.function).unwrap();
                (&*function.label, location.line, location.address)
            })
            .collect();
        assert_eq!(names, [("a", 1, 0), ("b", 2, 0), ("c", 0, 0x40)]);

        // Together they are the whole again.
        let mut merged = parts[&1].clone();
        merged.merge(second);
        assert_eq!(merged.total(), whole.total());
        assert_eq!(merged.footprint(), whole.footprint());
    }
}
