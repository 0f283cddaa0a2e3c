//! What was recorded, from cuts to what sinks and readers get.
//!
//! The recording is cut whenever a profile has to begin or end: at the end of an
//! interval, and at both ends of each profile that somebody asks for. A cut, once
//! its machine code has names, becomes a [`Segment`]; each `Account` adds up
//! those segments that are in its time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use indexmap::IndexMap;
use tokio::sync::oneshot;

use super::batch::Batch;
use super::http::backend::Refusal;
use super::http::backend::Selector;
use super::registry::Registry;
use crate::profile::CounterKind;
use crate::profile::Metadata;
use crate::profile::Profile;
use crate::session::cut::Cut;

/// How long a cut waits for names of machine code.
const FOR_NAMES: Duration = Duration::from_secs(2);
/// Most profiles that are asked for at once.
const MAX_ASKED: usize = 16;
/// Most processes with a profile of their own in one interval; those of further
/// ones are added up by service.
const MAX_PROCESSES: usize = 4096;

/// What was recorded between two cuts, by process.
#[derive(Debug)]
pub struct Segment {
    parts: Vec<Batch>,
    metadata: Metadata,
}

impl Segment {
    /// Takes a profile of all processes apart.
    #[must_use]
    pub fn new(mut whole: Profile, registry: &Registry) -> Self {
        let metadata = &mut whole.metadata;
        let counters = std::mem::take(&mut metadata.counters);
        // What was lost cannot be said of one process alone.
        for counter in counters {
            if counter.kind == CounterKind::Loss && counter.value != 0 {
                metadata.comments.push(format!(
                    "on the whole machine: {} {}",
                    counter.value, counter.name
                ));
            }
        }
        let from = SystemTime::UNIX_EPOCH + Duration::from_nanos(metadata.start_unix_ns);
        let until = from + Duration::from_nanos(metadata.duration_ns);
        let parts = whole
            .by_process()
            .into_iter()
            .map(|(pid, mut profile)| {
                let process = registry.identity(pid);
                registry.count(pid, profile.total());
                let metadata = &mut profile.metadata;
                metadata.pids = vec![pid];
                metadata.command.clone_from(&process.command);
                if !process.ruby.is_empty() {
                    metadata.rubies = vec![process.ruby.clone()];
                }
                metadata.comments.push(description(&process));
                metadata.warnings.extend(registry.missing(pid));
                Batch {
                    service: Arc::clone(&process.service),
                    process: Some(process),
                    profile: Arc::new(profile),
                    from,
                    until,
                }
            })
            .collect();
        Self {
            parts,
            metadata: whole.metadata,
        }
    }
}

/// A process in a line, for a reader of a profile.
fn description(process: &super::identity::Identity) -> String {
    let mut text = format!("process {}: service {}", process.pid, process.service);
    for (name, value) in [
        ("script", &process.script),
        ("unit", &process.unit),
        ("container", &process.container),
        ("pod", &process.pod),
        ("cgroup", &process.cgroup),
    ] {
        if let Some(value) = value {
            text.push_str(&format!(", {name} {value}"));
        }
    }
    if !process.command.is_empty() {
        text.push_str(&format!(", command {}", process.command));
    }
    text
}

/// Who gets a profile.
#[derive(Debug)]
enum For {
    /// The sinks: the profile of an interval.
    Sinks,
    /// Somebody who asked.
    Reader {
        of: Selector,
        reply: oneshot::Sender<Result<Arc<Profile>, Refusal>>,
    },
}

/// A profile in the making.
#[derive(Debug)]
struct Account {
    who: For,
    /// The first cut that is part of it.
    first: u64,
    /// The last one, once it is known.
    last: Option<u64>,
    /// When that will be.
    due: Instant,
    parts: IndexMap<Key, Batch>,
    metadata: Option<Metadata>,
}

/// Whose samples are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// Those of a process, by its id and when it started.
    Process(u32, u64),
    /// Those of all further processes of a service.
    Others(Arc<str>),
}

/// A cut that waits for names.
#[derive(Debug)]
struct Waiting {
    number: u64,
    cut: Cut,
    taken: Instant,
}

/// Makes profiles of cuts.
#[derive(Debug)]
pub struct Collector {
    interval: Duration,
    waiting: VecDeque<Waiting>,
    /// The number of the next cut.
    next: u64,
    accounts: Vec<Account>,
    dropped: u64,
}

/// What comes of cuts.
#[derive(Debug, Default)]
pub struct Collected {
    /// The profiles of whole intervals.
    pub intervals: Vec<Vec<Batch>>,
    /// When the latest cut was taken that has been used.
    pub by: Option<Instant>,
}

impl Collector {
    /// Begins with an interval, now.
    #[must_use]
    pub fn new(interval: Duration, now: Instant) -> Self {
        Self {
            interval,
            waiting: VecDeque::new(),
            next: 0,
            accounts: vec![Account::new(For::Sinks, 0, now + interval)],
            dropped: 0,
        }
    }

    /// Another length for intervals; the one under way ends when it should end.
    pub fn set_interval(&mut self, interval: Duration) {
        for account in &mut self.accounts {
            if matches!(account.who, For::Sinks) && account.last.is_none() {
                let began = account.due.checked_sub(self.interval);
                account.due = began.map_or(account.due, |began| began + interval);
            }
        }
        self.interval = interval;
    }

    /// Somebody wants a profile from now on. To be called right after a cut.
    pub fn ask(
        &mut self,
        of: Selector,
        duration: Duration,
        reply: oneshot::Sender<Result<Arc<Profile>, Refusal>>,
        now: Instant,
    ) {
        self.accounts.push(Account::new(
            For::Reader { of, reply },
            self.next,
            now + duration,
        ));
    }

    /// Why nobody can ask for another profile now.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        let asked = self.accounts.len().saturating_sub(1);
        (asked >= MAX_ASKED).then(|| {
            Refusal::Busy(format!(
                "{asked} profiles are being made already, and no more than {MAX_ASKED} are at once"
            ))
        })
    }

    /// When the next cut is due.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let open = self.accounts.iter().filter(|it| it.last.is_none());
        open.map(|account| account.due).min()
    }

    /// Whether cuts wait for names.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// How many samples had no room.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Has every profile that is being made end with the next cut: ticks will mean
    /// another time from then on.
    pub fn end_all(&mut self, now: Instant) {
        for account in &mut self.accounts {
            account.due = account.due.min(now);
        }
    }

    /// The interval under way ends with the next cut.
    pub fn end_interval(&mut self, now: Instant) {
        for account in &mut self.accounts {
            if matches!(account.who, For::Sinks) {
                account.due = account.due.min(now);
            }
        }
    }

    /// Takes a cut. Profiles that are due by then end with it.
    pub fn push(&mut self, cut: Cut, now: Instant) {
        let number = self.next;
        self.next += 1;
        self.waiting.push_back(Waiting {
            number,
            cut,
            taken: now,
        });
        let mut is_over = false;
        for account in &mut self.accounts {
            let is_gone = match &account.who {
                For::Sinks => false,
                // Nobody waits for it any more.
                For::Reader { reply, .. } => reply.is_closed(),
            };
            if account.last.is_none() && (account.due <= now || is_gone) {
                account.last = Some(number);
                is_over |= matches!(account.who, For::Sinks);
            }
        }
        if is_over {
            let due = now + self.interval;
            self.accounts.push(Account::new(For::Sinks, self.next, due));
        }
    }

    /// Makes segments of cuts whose names are known, or have had their time, and
    /// gives what is complete to who it is for; for the sinks, to the caller.
    pub fn collect(
        &mut self,
        now: Instant,
        registry: &Registry,
        mut present: impl FnMut(Cut) -> Profile,
    ) -> Collected {
        let mut collected = Collected::default();
        while let Some(first) = self.waiting.front()
            && (first.cut.is_named() || now.duration_since(first.taken) >= FOR_NAMES)
            && let Some(Waiting { number, cut, taken }) = self.waiting.pop_front()
        {
            let segment = Segment::new(present(cut), registry);
            self.take(number, &segment, &mut collected);
            collected.by = Some(taken);
        }
        collected
    }

    /// The same of all cuts, now. Gives the profiles of whole intervals.
    pub fn collect_all(
        &mut self,
        registry: &Registry,
        present: impl FnMut(Cut) -> Profile,
    ) -> Vec<Vec<Batch>> {
        let later = Instant::now() + FOR_NAMES;
        self.collect(later, registry, present).intervals
    }

    /// Waits for names of what was cut, at most so long.
    pub fn wait(&self, timeout: Duration) {
        if let Some(last) = self.waiting.back() {
            last.cut.wait(timeout);
        }
    }

    fn take(&mut self, number: u64, segment: &Segment, collected: &mut Collected) {
        let mut rest = Vec::new();
        for mut account in std::mem::take(&mut self.accounts) {
            if account.first <= number && account.last.is_none_or(|last| number <= last) {
                self.dropped += account.add(segment);
            }
            if account.last.is_none_or(|last| number < last) {
                rest.push(account);
            } else if let Some(batches) = account.finish() {
                collected.intervals.push(batches);
            }
        }
        self.accounts = rest;
    }
}

impl Account {
    fn new(who: For, first: u64, due: Instant) -> Self {
        Self {
            who,
            first,
            last: None,
            due,
            parts: IndexMap::new(),
            metadata: None,
        }
    }

    /// Adds a segment. Gives how many samples there was no room for.
    fn add(&mut self, segment: &Segment) -> u64 {
        match &mut self.metadata {
            Some(metadata) => metadata.merge(&segment.metadata),
            None => self.metadata = Some(segment.metadata.clone()),
        }
        let mut dropped = 0;
        for part in &segment.parts {
            if !self.who.wants(part) {
                continue;
            }
            let own = part.process.as_ref();
            let mut key = own.map_or_else(
                || Key::Others(Arc::clone(&part.service)),
                |process| Key::Process(process.pid, process.started),
            );
            if !self.parts.contains_key(&key) && self.parts.len() >= MAX_PROCESSES {
                key = Key::Others(Arc::clone(&part.service));
            }
            if let Some(known) = self.parts.get_mut(&key) {
                Arc::make_mut(&mut known.profile).merge(&part.profile);
                known.until = known.until.max(part.until);
                // By now it may have another title.
                if matches!(key, Key::Process(..)) {
                    known.service = Arc::clone(&part.service);
                    known.process.clone_from(&part.process);
                }
            } else if self.parts.len() < 2 * MAX_PROCESSES {
                let mut part = part.clone();
                if matches!(key, Key::Others(_)) {
                    part.process = None;
                }
                self.parts.insert(key, part);
            } else {
                dropped += part.profile.total();
            }
        }
        dropped
    }

    /// Gives it to who it is for; the sinks' is the caller's to deliver.
    fn finish(self) -> Option<Vec<Batch>> {
        match self.who {
            For::Sinks => Some(self.parts.into_values().collect()),
            For::Reader { reply, .. } => {
                let mut all = Profile::new(self.metadata.unwrap_or_default());
                for part in self.parts.into_values() {
                    all.merge(&part.profile);
                }
                // Who asked may be gone.
                drop(reply.send(Ok(Arc::new(all))));
                None
            }
        }
    }
}

impl For {
    fn wants(&self, part: &Batch) -> bool {
        match self {
            Self::Sinks
            | Self::Reader {
                of: Selector::All, ..
            } => true,
            Self::Reader {
                of: Selector::Process(pid),
                ..
            } => (part.process.as_ref()).is_some_and(|process| process.pid == *pid),
            Self::Reader {
                of: Selector::Service(name),
                ..
            } => *part.service == **name,
        }
    }
}
