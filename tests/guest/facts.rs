//! What the checks have found, for the line that sums up.

use std::env::consts::ARCH;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use libtest_mimic::Conclusion;
use rbprof_tests::checks::load::Loaded;

/// What was found so far; all copies are of the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    looping: Option<&'static str>,
    verified: Option<u32>,
    points: usize,
    samples: u64,
    depth: usize,
    mixed: u64,
    split: Option<f64>,
}

impl Facts {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel half was loaded; first in the way that the kernel is best at.
    pub(crate) fn loaded(&self, loaded: &Loaded) {
        let mut found = self.lock();
        found.looping.get_or_insert(loaded.looping);
        found.verified = found.verified.max(loaded.verified());
    }

    /// So many points were compared with so many samples.
    pub(crate) fn compared(&self, points: usize, samples: u64) {
        let mut found = self.lock();
        found.points += points;
        found.samples += samples;
    }

    /// Stacks with so many calls were whole.
    pub(crate) fn whole(&self, depth: usize) {
        let mut found = self.lock();
        found.depth = found.depth.max(depth);
    }

    /// So many samples of mixed stacks were as they should be.
    pub(crate) fn mixed(&self, samples: u64) {
        self.lock().mixed += samples;
    }

    /// A share of CPU time was measured with that error, percentage points.
    pub(crate) fn split(&self, error: f64) {
        let mut found = self.lock();
        found.split = Some(found.split.unwrap_or(0.0).max(error));
    }

    /// One line: the machine, how many checks passed, and what was found.
    pub(crate) fn summary(&self, conclusion: &Conclusion) -> String {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
        let release = release.unwrap_or_else(|_| "unknown kernel".to_owned());
        let mut line = format!(
            "guest: {} {ARCH}: {} checks passed, {} failed",
            release.trim(),
            conclusion.num_passed,
            conclusion.num_failed
        );
        let found = self.lock();
        let parts = [
            found.looping.map(|looping| format!("looping {looping}")),
            found
                .verified
                .map(|count| format!("{count} instructions verified at most")),
            (found.points > 0).then(|| {
                format!(
                    "{} points in {} samples frame by frame",
                    found.points, found.samples
                )
            }),
            (found.depth > 0).then(|| format!("{} calls deep whole", found.depth)),
            (found.mixed > 0).then(|| format!("{} samples of mixed stacks", found.mixed)),
            found
                .split
                .map(|error| format!("CPU split within {error:.2} points")),
        ];
        for part in parts.into_iter().flatten() {
            // Writing to a string cannot fail.
            let _ = write!(line, "; {part}");
        }
        line
    }
}
