//! How much of a CPU the agent may use.
//!
//! Once in a while its CPU time is compared with the budget. Beyond it, ticks come
//! less often; when there is room again, they come more often, up to what is
//! configured. The kernel half's time is the targets' and not counted here.

use std::time::Duration;
use std::time::Instant;

/// How often it is compared.
pub const WINDOW: Duration = Duration::from_secs(30);
/// How much room there must be before ticks come more often.
const ROOM: f64 = 0.5;

/// Compares CPU time with a budget.
#[derive(Clone, Debug)]
pub struct Budget {
    /// What is allowed, 1 for all of one CPU.
    share: f64,
    /// The frequency that is configured.
    configured: u64,
    /// The frequency now.
    frequency: u64,
    since: Instant,
    used: Duration,
    /// The share that was used in the last window.
    last: f64,
}

impl Budget {
    /// A budget of so much of a CPU, from `now` on, when `used` was used already.
    #[must_use]
    pub const fn new(share: f64, frequency: u64, now: Instant, used: Duration) -> Self {
        Self {
            share,
            configured: frequency,
            frequency,
            since: now,
            used,
            last: 0.0,
        }
    }

    /// Allows another share from now on.
    pub const fn set_share(&mut self, share: f64) {
        self.share = share;
    }

    /// The share of a CPU that was used in the last whole window.
    #[must_use]
    pub const fn last(&self) -> f64 {
        self.last
    }

    /// The frequency now, and the one that is configured.
    #[must_use]
    pub const fn frequencies(&self) -> (u64, u64) {
        (self.frequency, self.configured)
    }

    /// Compares, if it is time. `used`: CPU time of the process. Gives another
    /// frequency, if there should be one.
    pub fn check(&mut self, now: Instant, used: Duration) -> Option<u64> {
        let elapsed = now.duration_since(self.since);
        if elapsed < WINDOW {
            return None;
        }
        self.last = used.saturating_sub(self.used).as_secs_f64() / elapsed.as_secs_f64();
        self.since = now;
        self.used = used;
        let wanted = if self.last > self.share {
            scaled(self.frequency, self.share / self.last)
        } else if self.last < self.share * ROOM {
            // Twice as many ticks take at most twice as much time.
            self.frequency.saturating_mul(2)
        } else {
            self.frequency
        };
        let wanted = wanted.clamp(1, self.configured);
        let changed = wanted != self.frequency;
        self.frequency = wanted;
        changed.then_some(wanted)
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "frequencies are small, and the factor is less than 1"
)]
fn scaled(frequency: u64, factor: f64) -> u64 {
    (frequency as f64 * factor) as u64
}

/// The CPU time of this process so far, that of all its threads.
#[must_use]
pub fn own_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_follow_the_budget() {
        let start = Instant::now();
        let mut budget = Budget::new(0.01, 19, start, Duration::ZERO);
        let mut used = Duration::ZERO;
        let mut now = start;
        let mut window = |budget: &mut Budget, share: f64| {
            now += WINDOW;
            used += WINDOW.mul_f64(share);
            budget.check(now, used)
        };
        // Within the budget.
        assert_eq!(window(&mut budget, 0.009), None);
        // Twice as much as allowed, then far too much.
        assert_eq!(window(&mut budget, 0.02), Some(9));
        assert_eq!(window(&mut budget, 0.5), Some(1));
        assert_eq!(window(&mut budget, 0.5), None);
        assert_eq!(budget.frequencies(), (1, 19));
        // Not more often before there is room for twice as much.
        assert_eq!(window(&mut budget, 0.006), None);
        for frequency in [2, 4, 8, 16, 19] {
            assert_eq!(window(&mut budget, 0.001), Some(frequency));
        }
        assert_eq!(window(&mut budget, 0.001), None);
        budget.set_share(1.0);
        assert_eq!(window(&mut budget, 0.9), None);
        assert!((budget.last() - 0.9).abs() < 1e-6);
    }

    #[test]
    fn nothing_is_compared_before_its_time() {
        let start = Instant::now();
        let mut budget = Budget::new(0.01, 19, start, Duration::ZERO);
        assert_eq!(
            budget.check(start + WINDOW / 2, Duration::from_secs(9)),
            None
        );
    }

    #[test]
    fn time_passes() {
        let before = own_cpu_time();
        let mut sum = 0_u64;
        while own_cpu_time() == before {
            sum = sum.wrapping_add(1);
        }
        assert!(own_cpu_time() > before);
    }
}
