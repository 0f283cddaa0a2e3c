//! What a sink has done, for metrics and status lines.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::SystemTime;

/// What was dropped, in profiles, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// No room in memory (and none in the spill).
    pub overflow: u64,
    /// No room in the spill: the oldest there went.
    pub spill_full: u64,
    /// The receiver will not have it, now or later.
    pub rejected: u64,
    /// What was read from the spill is not what was written, or is of another
    /// version of the format.
    pub corrupt: u64,
    /// It could not be written in the sink's format.
    pub invalid: u64,
}

impl Dropped {
    /// All of them.
    #[must_use]
    pub const fn total(&self) -> u64 {
        let Self {
            overflow,
            spill_full,
            rejected,
            corrupt,
            invalid,
        } = *self;
        overflow + spill_full + rejected + corrupt + invalid
    }
}

/// What went wrong last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    /// What.
    pub text: String,
    /// When.
    pub at: SystemTime,
}

/// What a sink has done since it was started, and what it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SinkStatus {
    /// The sink: `files`, `pyroscope` or `otlp`.
    pub name: &'static str,
    /// Profiles that are where they belong.
    pub delivered: u64,
    /// Their size as written or sent, in bytes.
    pub delivered_bytes: u64,
    /// Attempts that failed and were, or will be, made again.
    pub retried: u64,
    /// Everything that went wrong, once each.
    pub errors: u64,
    /// Profiles that were given up.
    pub dropped: Dropped,
    /// Profiles in memory, an attempt under way included.
    pub queued: u64,
    /// Their size in bytes (estimated, where they are not encoded yet).
    pub queued_bytes: u64,
    /// Profiles that were put into the spill.
    pub spilled: u64,
    /// Profiles that are in the spill.
    pub spill_queued: u64,
    /// Their size in bytes.
    pub spill_bytes: u64,
    /// Files that retention removed.
    pub expired: u64,
    /// What went wrong last.
    pub last_error: Option<LastError>,
    /// When something was delivered last.
    pub last_success: Option<SystemTime>,
    /// What waits to be taken by the sink.
    incoming: Load,
    /// What the sink has in memory.
    held: Load,
}

/// Profiles in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    count: u64,
    bytes: u64,
}

impl SinkStatus {
    /// Profiles were handed to the sink.
    pub(super) fn handed(&mut self, count: u64, bytes: u64) {
        self.incoming.count += count;
        self.incoming.bytes += bytes;
    }

    /// The sink has taken profiles.
    pub(super) fn taken(&mut self, count: u64, bytes: u64) {
        self.incoming.count = self.incoming.count.saturating_sub(count);
        self.incoming.bytes = self.incoming.bytes.saturating_sub(bytes);
    }

    /// What the sink has in memory now.
    pub(super) fn held(&mut self, count: u64, bytes: u64) {
        self.held = Load { count, bytes };
    }
}

/// Longest text of an error that is kept, in bytes: receivers answer with pages.
const MAX_ERROR: usize = 500;

/// A sink's status, shared by the sink and who asks for it.
#[derive(Debug)]
pub(super) struct Counters(Mutex<SinkStatus>);

impl Counters {
    pub(super) fn new(name: &'static str) -> Self {
        Self(Mutex::new(SinkStatus {
            name,
            ..SinkStatus::default()
        }))
    }

    /// Changes the status. `change` must be quick: others wait for it.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut SinkStatus) -> T) -> T {
        // Numbers are numbers, wherever a thread has died.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn get(&self) -> SinkStatus {
        let mut status = self.update(|status| status.clone());
        let (incoming, held) = (status.incoming, status.held);
        status.queued = incoming.count + held.count;
        status.queued_bytes = incoming.bytes + held.bytes;
        status
    }

    /// Counts an error, and logs it unless it is the same as the last one.
    pub(super) fn error(&self, text: &str) {
        let mut text = text.to_owned();
        text.truncate(text.floor_char_boundary(MAX_ERROR));
        let (name, new) = self.update(|status| {
            status.errors += 1;
            let last = status.last_error.as_ref();
            let new = last.is_none_or(|last| last.text != text);
            status.last_error = Some(LastError {
                text: text.clone(),
                at: SystemTime::now(),
            });
            (status.name, new)
        });
        if new {
            log::warn!("{name}: {text}");
        } else {
            log::debug!("{name}: again: {text}");
        }
    }

    pub(super) fn delivered(&self, bytes: u64) {
        self.update(|status| {
            status.delivered += 1;
            status.delivered_bytes += bytes;
            status.last_success = Some(SystemTime::now());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_error_is_cut_between_letters() {
        let counters = Counters::new("files");
        counters.error(&"ä".repeat(MAX_ERROR));
        let status = counters.get();
        assert_eq!(status.errors, 1);
        assert_eq!(status.last_error.unwrap().text.len(), MAX_ERROR);
    }
}
