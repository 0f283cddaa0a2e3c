//! One target process: its memory, its names, its stacks in the profile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::wire::Frame;

use crate::memory::OpenError;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::profile::StackId;
use crate::symbolize::Resolved;
use crate::symbolize::RubyNames;
use crate::targets::Target;

/// Shortest time between two looks at a process that is not ready.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Stacks remembered per process; beyond it all are looked up anew.
const MAX_KNOWN_STACKS: usize = 1 << 17;

/// How far rbprof is with a process.
#[derive(Debug)]
pub enum Readiness {
    /// Its Ruby has not been found yet.
    Pending {
        /// Since when rbprof waits for it.
        since: Instant,
        /// When it was last looked at.
        looked: Option<Instant>,
        /// What was seen then.
        look: Look,
    },
    /// Its Ruby is known.
    Ready(Box<Ruby>),
    /// It runs no Ruby that can be walked.
    NotRuby,
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
    layout: &'static Layout,
    version: Version,
    global_symbols: Option<u64>,
    /// Stacks of the kernel half, as stacks of the profile; valid for the
    /// current `generation`.
    stacks: HashMap<u64, (u64, StackId)>,
    /// Goes up whenever a name turns out to be out of date.
    generation: u64,
}

/// A target process.
#[derive(Debug)]
pub struct Process {
    /// How far rbprof is with it.
    pub readiness: Readiness,
    /// It has run since it was last looked at.
    pub ran: bool,
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
        }
    }

    /// A process with a known Ruby.
    ///
    /// # Errors
    /// [`OpenError`] when its memory cannot be read.
    pub fn ready(target: Target) -> Result<Self, OpenError> {
        let memory = ProcessMemory::open(target.process)?;
        Ok(Self::with_ruby(
            memory,
            target.ruby.layout,
            target.ruby.version,
            target.global_symbols,
        ))
    }

    fn with_ruby(
        memory: ProcessMemory,
        layout: &'static Layout,
        version: Version,
        global_symbols: Option<u64>,
    ) -> Self {
        let names = RubyNames::new(layout, version, global_symbols);
        Self {
            readiness: Readiness::Ready(Box::new(Ruby {
                memory,
                names,
                layout,
                version,
                global_symbols,
                stacks: HashMap::new(),
                generation: 0,
            })),
            ran: false,
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
            ruby.layout,
            ruby.version,
            ruby.global_symbols,
        ))
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
        let Readiness::Pending { looked, .. } = &mut self.readiness else {
            return false;
        };
        if !self.ran || looked.is_some_and(|at| now.duration_since(at) < LOOK_INTERVAL) {
            return false;
        }
        *looked = Some(now);
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
        let held = ruby.names.revalidate(frames, &ruby.memory);
        if !held {
            ruby.generation += 1;
        }
        !held
    }

    /// Names frames, leaf first.
    pub fn resolve(&mut self, frames: &[Frame], out: &mut Vec<Resolved>) {
        if let Readiness::Ready(ruby) = &mut self.readiness {
            ruby.names.resolve(frames, &ruby.memory, out);
        }
    }

    /// The profile's stack for a stack of the kernel half, if it is known and
    /// no name has changed since.
    #[must_use]
    pub fn stack_in_profile(&self, id: u64) -> Option<StackId> {
        let Readiness::Ready(ruby) = &self.readiness else {
            return None;
        };
        let &(generation, stack) = ruby.stacks.get(&id)?;
        (generation == ruby.generation).then_some(stack)
    }

    /// Remembers the profile's stack for a stack of the kernel half.
    pub fn remember_stack(&mut self, id: u64, stack: StackId) {
        if let Readiness::Ready(ruby) = &mut self.readiness {
            if ruby.stacks.len() >= MAX_KNOWN_STACKS {
                ruby.stacks.clear();
            }
            ruby.stacks.insert(id, (ruby.generation, stack));
        }
    }
}
