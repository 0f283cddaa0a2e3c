//! What one profile is of, and what it takes in memory.

use std::sync::Arc;

use indexmap::IndexMap;

use super::config::Per;
use crate::agent::batch::Batch;
use crate::profile::Profile;

/// The batches of one interval, merged as configured.
pub(super) fn grouped(cut: Vec<Batch>, per: Per) -> Vec<Batch> {
    match per {
        Per::Process => cut,
        Per::Service => {
            let mut services: IndexMap<Arc<str>, Vec<Batch>> = IndexMap::new();
            for batch in cut {
                let service = Arc::clone(&batch.service);
                services.entry(service).or_default().push(batch);
            }
            services.into_values().filter_map(merged).collect()
        }
    }
}

fn merged(batches: Vec<Batch>) -> Option<Batch> {
    let mut batches = batches.into_iter();
    let mut all = batches.next()?;
    all.process = None;
    for batch in batches {
        Arc::make_mut(&mut all.profile).merge(&batch.profile);
        all.from = all.from.min(batch.from);
        all.until = all.until.max(batch.until);
    }
    Some(all)
}

/// About what a profile takes in memory, in bytes: texts are shared with others, and
/// not counted.
pub(super) fn weight(profile: &Profile) -> u64 {
    let of = profile.footprint();
    let parts = [
        (of.functions, 128),
        (of.locations, 56),
        (of.frames, 40),
        (of.labels, 128),
        (of.counts, 48),
    ];
    let bytes: usize = parts.iter().map(|(count, bytes)| count * bytes).sum();
    4096 + bytes as u64
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn processes_of_a_service_become_one_profile() {
        let cut = vec![
            example::batch("web", 1, 10),
            example::batch("jobs", 2, 5),
            example::batch("web", 3, 7),
        ];
        let own = grouped(cut.clone(), Per::Process);
        assert_eq!(own.len(), 3);
        assert!(own.iter().all(|batch| batch.process.is_some()));
        let all = grouped(cut.clone(), Per::Service);
        let found: Vec<_> = (all.iter())
            .map(|batch| {
                (
                    &*batch.service,
                    batch.profile.total(),
                    batch.process.is_some(),
                )
            })
            .collect();
        assert_eq!(found, [("web", 17, false), ("jobs", 5, false)]);
        assert_eq!(cut[0].profile.total(), 10, "other sinks have it, too");
    }
}
