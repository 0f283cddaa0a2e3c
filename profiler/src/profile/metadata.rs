//! What a reader has to know to judge a profile.

use std::borrow::Cow;
use std::fmt;

/// What the samples count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Time on a CPU: a thread that waits is not sampled.
    #[default]
    Cpu,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("CPU"),
        }
    }
}

/// Whether a counter tells of something that went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CounterKind {
    /// Part of the account, such as the samples that were due.
    Account,
    /// Something is missing from the profile, such as lost samples. Shown
    /// wherever there is room for one line only, unless it is 0.
    Loss,
}

/// One line of the account of how complete a profile is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// What is counted, in words that follow the number: `samples lost`.
    pub name: Cow<'static, str>,
    /// How many.
    pub value: u64,
    /// Whether a number other than 0 is bad news.
    pub kind: CounterKind,
}

/// About the recording as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// What the samples count.
    pub mode: Mode,
    /// When the recording began, nanoseconds since the Unix epoch.
    pub start_unix_ns: u64,
    /// How long it took, nanoseconds.
    pub duration_ns: u64,
    /// Samples per second of the clock; 0 where it is not known.
    pub frequency_hz: u32,
    /// The command line of the (first) target; empty where it is not known.
    pub command: String,
    /// The processes the recording was asked to follow.
    pub pids: Vec<u32>,
    /// Name and version of the recorder: `rbprof 0.1.0`.
    pub tool: String,
    /// Release of the kernel: `6.1.0-18-amd64`.
    pub kernel: String,
    /// The Rubies that were found: `3.3.8`, each once.
    pub rubies: Vec<String>,
    /// Whatever the user wants to remember.
    pub comments: Vec<String>,
    /// What went wrong, in sentences.
    pub warnings: Vec<String>,
    /// How complete the profile is. Every output shows it.
    pub counters: Vec<Counter>,
}

impl Metadata {
    /// Time that one sample stands for, nanoseconds; 0 where the frequency is
    /// not known.
    #[must_use]
    pub const fn period_ns(&self) -> u64 {
        match self.frequency_hz {
            0 => 0,
            hz => 1_000_000_000 / hz as u64,
        }
    }

    /// Adds to the counter of this name, which is made on first use.
    pub fn count(&mut self, name: impl Into<Cow<'static, str>>, kind: CounterKind, value: u64) {
        let name = name.into();
        match self.counters.iter_mut().find(|known| known.name == name) {
            Some(known) => known.value = known.value.saturating_add(value),
            None => self.counters.push(Counter { name, value, kind }),
        }
    }

    /// The counters that tell of something missing.
    pub fn losses(&self) -> impl Iterator<Item = &Counter> {
        self.counters
            .iter()
            .filter(|counter| counter.kind == CounterKind::Loss && counter.value != 0)
    }

    /// Takes in what is known of another recording. The time spans are joined;
    /// what is a single value here keeps the value it has, unless it has none.
    pub fn merge(&mut self, other: &Self) {
        let Self {
            mode: _,
            start_unix_ns,
            duration_ns,
            frequency_hz,
            command,
            pids,
            tool,
            kernel,
            rubies,
            comments,
            warnings,
            counters,
        } = other;
        let end = |start: u64, duration: u64| start.saturating_add(duration);
        let last = end(self.start_unix_ns, self.duration_ns).max(end(*start_unix_ns, *duration_ns));
        self.start_unix_ns = match (self.start_unix_ns, *start_unix_ns) {
            (0, known) | (known, 0) => known,
            (a, b) => a.min(b),
        };
        self.duration_ns = if self.start_unix_ns == 0 {
            self.duration_ns.max(*duration_ns)
        } else {
            last.saturating_sub(self.start_unix_ns)
        };
        if self.frequency_hz == 0 {
            self.frequency_hz = *frequency_hz;
        }
        for (mine, theirs) in [
            (&mut self.command, command),
            (&mut self.tool, tool),
            (&mut self.kernel, kernel),
        ] {
            if mine.is_empty() {
                mine.clone_from(theirs);
            }
        }
        join(&mut self.pids, pids);
        join(&mut self.rubies, rubies);
        join(&mut self.comments, comments);
        join(&mut self.warnings, warnings);
        for counter in counters {
            self.count(counter.name.clone(), counter.kind, counter.value);
        }
    }
}

fn join<T: Clone + PartialEq>(mine: &mut Vec<T>, theirs: &[T]) {
    for value in theirs {
        if !mine.contains(value) {
            mine.push(value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_joins_times_and_adds_counters() {
        let mut first = Metadata {
            start_unix_ns: 1_000,
            duration_ns: 500,
            frequency_hz: 99,
            pids: vec![1, 2],
            rubies: vec!["3.3.8".to_owned()],
            ..Metadata::default()
        };
        first.count("samples lost", CounterKind::Loss, 2);
        let mut second = Metadata {
            start_unix_ns: 900,
            duration_ns: 200,
            frequency_hz: 99,
            command: "ruby".to_owned(),
            pids: vec![2, 3],
            ..Metadata::default()
        };
        second.count("samples lost", CounterKind::Loss, 3);
        second.count("samples due", CounterKind::Account, 10);

        first.merge(&second);
        assert_eq!((first.start_unix_ns, first.duration_ns), (900, 600));
        assert_eq!(first.pids, [1, 2, 3]);
        assert_eq!(first.command, "ruby");
        let losses: Vec<_> = first.losses().map(|c| (&*c.name, c.value)).collect();
        assert_eq!(losses, [("samples lost", 5)]);
        assert_eq!(first.counters.len(), 2);
    }

    #[test]
    fn a_period_is_the_inverse_of_the_frequency() {
        let at = |frequency_hz| Metadata {
            frequency_hz,
            ..Metadata::default()
        };
        assert_eq!(at(99).period_ns(), 10_101_010);
        assert_eq!(at(1000).period_ns(), 1_000_000);
        assert_eq!(at(0).period_ns(), 0);
    }
}
