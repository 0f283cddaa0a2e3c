//! One timer event per online CPU, through hotplug.
//!
//! The events are software CPU clocks: they need no hardware counters, so they
//! work in virtual machines and containers, and they tick only while the CPU
//! runs something. The kernel turns a frequency into a fixed period for them.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use aya::programs::PerfEvent;
use aya::programs::perf_event::PerfEventConfig;
use aya::programs::perf_event::PerfEventLinkId;
use aya::programs::perf_event::PerfEventScope;
use aya::programs::perf_event::SamplePolicy;
use aya::programs::perf_event::SoftwareEvent;

use super::KernelError;

/// The open events.
pub(super) struct Ticks {
    frequency: u64,
    events: BTreeMap<u32, PerfEventLinkId>,
}

impl Ticks {
    pub(super) const fn new(frequency: u64) -> Self {
        Self {
            frequency,
            events: BTreeMap::new(),
        }
    }

    pub(super) const fn frequency(&self) -> u64 {
        self.frequency
    }

    /// Ticks so often once it is started again.
    pub(super) const fn set_frequency(&mut self, frequency: u64) {
        self.frequency = frequency;
    }

    /// Whether it ticks.
    pub(super) fn is_ticking(&self) -> bool {
        !self.events.is_empty()
    }

    /// Opens events on CPUs that have none, closes those of CPUs that are
    /// offline.
    pub(super) fn follow_cpus(&mut self, program: &mut PerfEvent) -> Result<(), KernelError> {
        let online: BTreeSet<u32> = aya::util::online_cpus()
            .map_err(|(file, error)| KernelError::step(format!("reading {file}"), error))?
            .into_iter()
            .collect();
        let gone: Vec<u32> = self
            .events
            .keys()
            .copied()
            .filter(|cpu| !online.contains(cpu))
            .collect();
        for cpu in gone {
            if let Some(event) = self.events.remove(&cpu) {
                program.detach(event).map_err(KernelError::perf_event)?;
            }
        }
        for cpu in online {
            if self.events.contains_key(&cpu) {
                continue;
            }
            let attached = program.attach(
                PerfEventConfig::Software(SoftwareEvent::CpuClock),
                PerfEventScope::AllProcessesOneCpu { cpu },
                SamplePolicy::Frequency(self.frequency),
                false,
            );
            match attached {
                Ok(event) => {
                    self.events.insert(cpu, event);
                }
                // The CPU may have gone offline in this very moment.
                Err(_) if !still_online(cpu) => {}
                Err(error) => return Err(KernelError::perf_event(error)),
            }
        }
        Ok(())
    }

    /// Closes all events.
    pub(super) fn stop(&mut self, program: &mut PerfEvent) -> Result<(), KernelError> {
        for (_, event) in std::mem::take(&mut self.events) {
            program.detach(event).map_err(KernelError::perf_event)?;
        }
        Ok(())
    }
}

fn still_online(cpu: u32) -> bool {
    aya::util::online_cpus().is_ok_and(|cpus| cpus.contains(&cpu))
}
