//! One target process: its memory, its names, its stacks in the profile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::layout::Layout;
use rbprof_common::process::Collector;
use rbprof_common::process::ProcessEntry;
use rbprof_common::wire::Frame;

use crate::memory::OpenError;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::memory::TargetMemory as _;
use crate::profile::StackId;
use crate::symbolize::Moment;
use crate::symbolize::Resolved;
use crate::symbolize::RubyNames;
use crate::targets::Target;

/// Shortest and longest time between two looks at a process that is not ready.
/// Most are ready soon; one whose Ruby never starts must not be looked at for
/// ever at full speed.
const LOOK_INTERVALS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// How long a Ruby that has just appeared is looked at although no tick meets it:
/// as long as the slowest takes to start.
const YOUTH: Duration = Duration::from_secs(3);

/// How long after its Ruby was found a process is followed closely: it may be a short
/// one, and its names are gone when it is.
const CLOSELY: Duration = Duration::from_millis(500);

/// How often a symbol table that was not there at first is looked for.
const MAX_SYMBOL_LOOKS: u32 = 50;
/// Stacks remembered per process; beyond it all are looked up anew.
const MAX_KNOWN_STACKS: usize = 1 << 17;

/// How far rbprof is with a process.
#[derive(Debug)]
pub enum Readiness {
    /// Its Ruby has not been found yet.
    Pending {
        /// Since when rbprof waits for it.
        since: Instant,
        /// When it was last looked at, and how long to wait from then.
        looked: Option<(Instant, Duration)>,
        /// What was seen then.
        look: Look,
    },
    /// Its Ruby is known.
    Ready(Box<Ruby>),
    /// It runs no Ruby that can be walked.
    NotRuby,
}

/// What names are read with; the same in a forked child.
#[derive(Clone, Copy, Debug)]
struct Facts {
    layout: &'static Layout,
    global_symbols: Option<u64>,
    /// The process's `rb_vm_t`, or 0.
    vm: u64,
    collector: Collector,
}

impl Facts {
    fn now(&self, memory: &ProcessMemory) -> Moment {
        let epoch = self.collector.epoch(memory);
        // The clock after the epoch: what is read now holds from then on.
        Moment {
            time: monotonic_ns(),
            epoch,
        }
    }

    fn names(&self) -> RubyNames {
        let names = RubyNames::new(self.layout, self.global_symbols);
        if self.vm == 0 {
            names
        } else {
            names.with_vm(self.vm)
        }
    }
}

impl Ruby {
    /// Whether the memory is gone: it goes before the process does.
    fn is_gone(&self) -> bool {
        let vm = self.facts.vm;
        (vm != 0 && self.memory.word(vm).is_err()) || !self.memory.process().is_alive()
    }
}

/// What a process looks like whose Ruby has not been found yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Look {
    /// It has not been looked at.
    #[default]
    Not,
    /// There is a Ruby, but it is not ready.
    Ruby,
    /// There is no Ruby; one may still come (an `exec`, a library that is
    /// loaded late).
    NoRuby,
}

/// The Ruby in a process.
#[derive(Debug)]
pub struct Ruby {
    memory: ProcessMemory,
    names: RubyNames,
    facts: Facts,
    /// What the kernel half knows of it.
    entry: ProcessEntry,
    /// What it was attached to as; a forked child's parent's.
    target: Arc<Target>,
    /// How often the symbol table was looked for since.
    looked_for_symbols: u32,
    /// Stacks of the kernel half, as stacks of the profile; valid for the
    /// current `generation`.
    stacks: HashMap<u64, KnownStack>,
    /// Goes up whenever a name turns out to be out of date.
    generation: u64,
}

/// A stack of the kernel half that is in the profile.
#[derive(Clone, Copy, Debug)]
struct KnownStack {
    generation: u64,
    stack: StackId,
    /// When its names were known to be right.
    established: Moment,
}

/// What is known of a stack of the kernel half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Nothing.
    No,
    /// Its stack in the profile; all names were checked in this batch.
    Now(StackId),
    /// Its stack in the profile, before some name of the process changed.
    Before(StackId),
}

/// A target process.
#[derive(Debug)]
pub struct Process {
    /// How far rbprof is with it.
    pub readiness: Readiness,
    /// It has run since it was last looked at.
    pub ran: bool,
    /// Until when it is looked at even if no tick has met it; or, once its Ruby is
    /// known, followed closely.
    young_until: Option<Instant>,
}

impl Process {
    /// A process whose Ruby has not been found yet.
    #[must_use]
    pub const fn pending(now: Instant) -> Self {
        Self {
            readiness: Readiness::Pending {
                since: now,
                looked: None,
                look: Look::Not,
            },
            ran: false,
            young_until: None,
        }
    }

    /// A process that has just mapped a Ruby: it is soon to be up, and may not
    /// last long.
    #[must_use]
    pub fn young(now: Instant) -> Self {
        Self {
            young_until: Some(now + YOUTH),
            ..Self::pending(now)
        }
    }

    /// Whether it was started just now, and its Ruby has not been found yet.
    #[must_use]
    pub fn is_young(&self, now: Instant) -> bool {
        matches!(self.readiness, Readiness::Pending { .. })
            && self.young_until.is_some_and(|until| now < until)
    }

    /// Whether it should be polled often: it was started or forked just now.
    #[must_use]
    pub fn is_followed_closely(&self, now: Instant) -> bool {
        self.young_until.is_some_and(|until| now < until)
    }

    /// A process with a known Ruby.
    ///
    /// # Errors
    /// [`OpenError`] when its memory cannot be read.
    pub fn ready(target: Target, entry: ProcessEntry) -> Result<Self, OpenError> {
        let facts = Facts {
            layout: target.ruby.layout,
            global_symbols: target.global_symbols,
            vm: target.entry.vm,
            collector: target.entry.collector,
        };
        let memory = ProcessMemory::open(Arc::clone(&target.process))?;
        Ok(Self::with_ruby(memory, Arc::new(target), facts, entry))
    }

    fn with_ruby(
        memory: ProcessMemory,
        target: Arc<Target>,
        facts: Facts,
        entry: ProcessEntry,
    ) -> Self {
        Self {
            readiness: Readiness::Ready(Box::new(Ruby {
                memory,
                names: facts.names(),
                entry,
                target,
                looked_for_symbols: 0,
                facts,
                stacks: HashMap::new(),
                generation: 0,
            })),
            ran: false,
            young_until: Some(Instant::now() + CLOSELY),
        }
    }

    /// The child this process just forked: a copy of its memory, so the same
    /// Ruby at the same addresses. `None` when it is gone already.
    #[must_use]
    pub fn forked(&self, child: u32) -> Option<Self> {
        let Readiness::Ready(ruby) = &self.readiness else {
            return None;
        };
        let memory = ProcessMemory::open(Arc::new(PinnedProcess::open(child).ok()?)).ok()?;
        Some(Self::with_ruby(
            memory,
            Arc::clone(&ruby.target),
            ruby.facts,
            ruby.entry,
        ))
    }

    /// What the kernel half knows of it, once its Ruby is known.
    pub const fn entry(&mut self) -> Option<&mut ProcessEntry> {
        match &mut self.readiness {
            Readiness::Ready(ruby) => Some(&mut ruby.entry),
            Readiness::Pending { .. } | Readiness::NotRuby => None,
        }
    }

    /// What was found out about it, once its Ruby is known.
    #[must_use]
    pub fn target(&self) -> Option<&Target> {
        match &self.readiness {
            Readiness::Ready(ruby) => Some(&ruby.target),
            Readiness::Pending { .. } | Readiness::NotRuby => None,
        }
    }

    /// Its memory, once its Ruby is known.
    #[must_use]
    pub const fn memory(&self) -> Option<&ProcessMemory> {
        match &self.readiness {
            Readiness::Ready(ruby) => Some(&ruby.memory),
            Readiness::Pending { .. } | Readiness::NotRuby => None,
        }
    }

    /// Looks for the symbol table again if there was none: a Ruby that was
    /// attached to while it started may not have had one yet.
    pub fn look_for_symbols(&mut self) {
        let Readiness::Ready(ruby) = &mut self.readiness else {
            return;
        };
        if ruby.facts.global_symbols.is_some() || ruby.looked_for_symbols >= MAX_SYMBOL_LOOKS {
            return;
        }
        ruby.looked_for_symbols += 1;
        if let Some(address) = ruby.target.find_global_symbols(&ruby.memory) {
            ruby.facts.global_symbols = Some(address);
            // C methods that had no name have one now.
            ruby.names = ruby.facts.names();
            ruby.stacks.clear();
        }
    }

    /// What the user should know of this process's names.
    #[must_use]
    pub fn warning(&self) -> Option<&'static str> {
        match &self.readiness {
            Readiness::Ready(ruby) if ruby.facts.global_symbols.is_none() => Some(
                "Ruby's symbol table (ruby_global_symbols) was not found: the names of C methods \
                 are unknown",
            ),
            Readiness::Pending {
                look: Look::Ruby, ..
            } => Some("a Ruby was not up before the end: its samples have no frames"),
            _ => None,
        }
    }

    /// Whether the process still exists.
    #[must_use]
    pub fn is_alive(&self, pid: u32) -> bool {
        match &self.readiness {
            Readiness::Ready(ruby) => ruby.memory.process().is_alive(),
            Readiness::Pending { .. } | Readiness::NotRuby => PinnedProcess::open(pid).is_ok(),
        }
    }

    /// Whether it is time to look for a Ruby in it: it is not ready, and has
    /// run since the last look.
    pub fn wants_a_look(&mut self, now: Instant) -> bool {
        let is_young = self.is_young(now);
        let Readiness::Pending { looked, .. } = &mut self.readiness else {
            return false;
        };
        let interval = match *looked {
            Some((at, interval)) if now.duration_since(at) < interval => return false,
            Some((_, interval)) => (interval * 5 / 4).min(LOOK_INTERVALS.1),
            None => LOOK_INTERVALS.0,
        };
        if !self.ran && !is_young {
            return false;
        }
        *looked = Some((now, interval));
        self.ran = false;
        true
    }

    /// Remembers what it looks like, if its Ruby has not been found yet.
    pub const fn looks_like(&mut self, now: Look) {
        if let Readiness::Pending { look, .. } = &mut self.readiness {
            *look = now;
        }
    }

    /// What it looked like when it was last looked at.
    #[must_use]
    pub const fn look(&self) -> Look {
        match self.readiness {
            Readiness::Pending { look, .. } => look,
            Readiness::Ready(_) => Look::Ruby,
            Readiness::NotRuby => Look::NoRuby,
        }
    }

    /// How long rbprof has waited for a Ruby in it.
    #[must_use]
    pub fn waited(&self, now: Instant) -> Duration {
        match self.readiness {
            Readiness::Pending { since, .. } => now.duration_since(since),
            Readiness::Ready(_) | Readiness::NotRuby => Duration::ZERO,
        }
    }

    /// Checks the remembered names of `frames` against the process. `true`
    /// when some were out of date.
    pub fn check_names(&mut self, frames: &[Frame]) -> bool {
        let Readiness::Ready(ruby) = &mut self.readiness else {
            return false;
        };
        if ruby.is_gone() {
            // Nothing can be read again: what held a moment ago has to do.
            return false;
        }
        let held = ruby.names.revalidate(frames, &ruby.memory);
        if !held {
            ruby.generation += 1;
        }
        !held
    }

    /// Names frames that were `taken` a while ago, leaf first. `false` when
    /// some names cannot be believed.
    pub fn resolve(&mut self, frames: &[Frame], taken: Moment, out: &mut Vec<Resolved>) -> bool {
        let Readiness::Ready(ruby) = &mut self.readiness else {
            return true;
        };
        let Ruby {
            memory,
            names,
            facts,
            ..
        } = &mut **ruby;
        names.resolve_taken(frames, memory, taken, || facts.now(memory), out)
    }

    /// Forgets which stacks are in the profile: it is another one from now on.
    pub fn begin_profile(&mut self) {
        if let Readiness::Ready(ruby) = &mut self.readiness {
            ruby.stacks.clear();
        }
    }

    /// What is known of a stack of the kernel half.
    #[must_use]
    pub fn stack_in_profile(&self, id: u64, taken: Moment) -> Known {
        let Readiness::Ready(ruby) = &self.readiness else {
            return Known::No;
        };
        match ruby.stacks.get(&id) {
            None => Known::No,
            Some(known) if known.generation == ruby.generation => {
                if known.established.covers(taken) {
                    Known::Now(known.stack)
                } else {
                    Known::No
                }
            }
            Some(known) => Known::Before(known.stack),
        }
    }

    /// Remembers the profile's stack for a stack of the kernel half.
    pub fn remember_stack(&mut self, id: u64, stack: StackId) {
        if let Readiness::Ready(ruby) = &mut self.readiness {
            if ruby.stacks.len() >= MAX_KNOWN_STACKS {
                ruby.stacks.clear();
            }
            let now = ruby.facts.now(&ruby.memory);
            let known = KnownStack {
                generation: ruby.generation,
                stack,
                established: now,
            };
            ruby.stacks.insert(id, known);
        }
    }
}

/// `CLOCK_MONOTONIC`, nanoseconds: the clock of the kernel half.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
