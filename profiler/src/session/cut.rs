//! Profiles of one while after another, without a gap and without ending.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::TryRecvError;
use std::time::Duration;
use std::time::Instant;

use super::Session;
use super::account::Account;
use super::machine::MachineCode;
use super::machine::Owner;
use super::unix_ns;
use crate::kernel::Counters;
use crate::kernel::KernelError;
use crate::presentation;
use crate::presentation::Presentation;
use crate::profile::Function;
use crate::profile::Location;
use crate::profile::MappingId;
use crate::profile::Metadata;
use crate::profile::Profile;

/// The counts where a profile begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Since {
    at: Instant,
    account: Account,
    counters: Counters,
}

impl Default for Since {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            account: Account::default(),
            counters: Counters::default(),
        }
    }
}

/// What was recorded in a while. Machine code has no names yet: they are looked
/// for until [`Cut::is_named`].
#[derive(Debug)]
pub struct Cut {
    profile: Profile,
    objects: HashMap<MappingId, Owner>,
    named: Option<Receiver<()>>,
}

impl Cut {
    /// How many samples there are.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.profile.total()
    }

    /// Whether all names of machine code that can be found are.
    #[must_use]
    pub fn is_named(&self) -> bool {
        let state = self.named.as_ref().map(Receiver::try_recv);
        !matches!(state, Some(Err(TryRecvError::Empty)))
    }

    /// Waits for names of machine code, at most so long.
    pub fn wait(&self, timeout: Duration) {
        if let Some(named) = &self.named {
            // Whatever comes of it, it was time.
            let _ = named.recv_timeout(timeout);
        }
    }
}

impl Session {
    /// What was recorded since the last time, or since the start. Recording goes
    /// on, into another profile.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel half's counters cannot be read; then
    /// nothing is taken away.
    pub fn cut(&mut self) -> Result<Cut, KernelError> {
        let counters = self.kernel.counters()?;
        let now = Since {
            at: Instant::now(),
            account: self.account,
            counters,
        };
        let before = std::mem::replace(&mut self.since, now);
        let metadata = Metadata {
            start_unix_ns: unix_ns(),
            frequency_hz: u32::try_from(self.kernel.frequency()).unwrap_or(u32::MAX),
            ..self.base.clone()
        };
        let mut profile = std::mem::replace(&mut self.profile, Profile::new(metadata));
        let duration = now.at.duration_since(before.at);
        profile.metadata.duration_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let account = now.account.since(&before.account);
        account.describe(&counters.since(&before.counters), &mut profile.metadata);
        for process in self.processes.values_mut() {
            process.begin_profile();
        }
        self.labels.clear();
        let (objects, named) = self.machine.begin_profile();
        Ok(Cut {
            profile,
            objects,
            named,
        })
    }

    /// The profile of a cut, with the names that are known by now.
    #[must_use]
    pub fn present_cut(&self, cut: Cut, presentation: Presentation) -> Profile {
        let objects = cut.objects;
        presentation::present(
            cut.profile,
            presentation,
            |mapping| MachineCode::role_in(&objects, mapping),
            |location| self.name_in(&objects, location),
        )
    }

    fn name_in(
        &self,
        objects: &HashMap<MappingId, Owner>,
        location: &Location,
    ) -> Option<Arc<Function>> {
        self.machine.name_in(objects, location)
    }
}
