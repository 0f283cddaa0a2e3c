//! How complete a recording is.

use rbprof_common::wire::Counter;

use crate::kernel::Counters;
use crate::profile::CounterKind;
use crate::profile::Metadata;

/// What user space counts. The kernel half has counters of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Samples that came through the ring.
    pub received: u64,
    /// Samples counted with their frames.
    pub with_frames: u64,
    /// Samples counted without frames (not Ruby, no Ruby code, starting).
    pub without_frames: u64,
    /// Samples whose frames are not known any more, or never came.
    pub lost_frames: u64,
    /// Samples of rbprof itself, which are not in the profile.
    pub own: u64,
    /// Samples of Rubies that are not to be profiled, taken before that was decided;
    /// they are not in the profile.
    pub not_selected: u64,
    /// Records this version does not know.
    pub unknown_records: u64,
    /// Times that names had to be read again because what they were read from
    /// had changed.
    pub renamed: u64,
    /// Samples with names that could not be read.
    pub unreadable: u64,
    /// Samples with names that may have been freed before they were read.
    pub disbelieved: u64,
    /// Samples with a method that was replaced around the time of the sample.
    pub replaced: u64,
    /// Samples whose native and Ruby frames had come apart and were put together
    /// again.
    pub united: u64,
    /// Children that targets forked.
    pub forks: u64,
}

impl Account {
    /// Samples that are not in the profile, as far as user space can know.
    #[must_use]
    pub const fn lost(&self, counters_lost: u64) -> u64 {
        self.lost_frames + counters_lost
    }

    /// What was counted since.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            received: self.received - earlier.received,
            with_frames: self.with_frames - earlier.with_frames,
            without_frames: self.without_frames - earlier.without_frames,
            lost_frames: self.lost_frames - earlier.lost_frames,
            own: self.own - earlier.own,
            not_selected: self.not_selected - earlier.not_selected,
            unknown_records: self.unknown_records - earlier.unknown_records,
            renamed: self.renamed - earlier.renamed,
            unreadable: self.unreadable - earlier.unreadable,
            disbelieved: self.disbelieved - earlier.disbelieved,
            replaced: self.replaced - earlier.replaced,
            united: self.united - earlier.united,
            forks: self.forks - earlier.forks,
        }
    }

    /// Writes the account into a profile.
    pub(super) fn describe(&self, counters: &Counters, metadata: &mut Metadata) {
        use CounterKind::Account as Fact;
        use CounterKind::Loss;
        let of = |counter| counters.get(counter);
        metadata.count(
            "samples due",
            Fact,
            of(Counter::Hit).saturating_sub(self.own + self.not_selected),
        );
        metadata.count(
            "samples taken",
            Fact,
            self.with_frames + self.without_frames,
        );
        metadata.count("samples lost, ring full", Loss, of(Counter::LostSample));
        metadata.count("samples lost, frames unknown", Loss, self.lost_frames);
        metadata.count(
            "process events lost",
            Loss,
            of(Counter::LostEvent) + of(Counter::LostChild),
        );
        metadata.count("stacks cut, too deep", Loss, of(Counter::Truncated));
        metadata.count("stacks cut, memory unreadable", Loss, of(Counter::Fault));
        metadata.count(
            "stacks with an unknown frame",
            Loss,
            of(Counter::UnknownFrame),
        );
        metadata.count(
            "stacks with a method not found",
            Loss,
            of(Counter::SearchCut),
        );
        metadata.count(
            "stacks with native frames missing",
            Loss,
            of(Counter::NativeCut),
        );
        metadata.count(
            "stacks with native frames in doubt",
            Loss,
            of(Counter::Unmatched).saturating_sub(self.united),
        );
        metadata.count("unreadable Ruby stacks", Loss, of(Counter::BadContext));
        metadata.count("samples without Ruby code", Fact, of(Counter::NoContext));
        metadata.count("samples while Ruby started", Fact, of(Counter::Pending));
        metadata.count("samples outside Ruby", Fact, of(Counter::NotRuby));
        metadata.count(
            "samples with a method replaced meanwhile",
            Loss,
            self.replaced,
        );
        metadata.count(
            "samples with a name withheld, GC came first",
            Loss,
            self.disbelieved,
        );
        metadata.count(
            "samples with a name that could not be read",
            Loss,
            self.unreadable,
        );
        metadata.count("names read again", Fact, self.renamed);
        metadata.count("records not understood", Loss, self.unknown_records);
    }
}
