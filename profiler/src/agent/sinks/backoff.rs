//! How long to wait after failures.

use std::time::Duration;

/// Exponential backoff with full jitter: after the nth failure in a row, a random time
/// between nothing and `first * 2^(n-1)`, at most `max`.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    max: Duration,
    failures: u32,
    random: fastrand::Rng,
}

impl Backoff {
    pub(super) fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            failures: 0,
            random: fastrand::Rng::new(),
        }
    }

    /// Counts a failure; how long to wait.
    pub(super) fn failed(&mut self) -> Duration {
        let limit = (self.first)
            .saturating_mul(2_u32.saturating_pow(self.failures))
            .min(self.max);
        self.failures = self.failures.saturating_add(1);
        limit.mul_f64(self.random.f64())
    }

    /// Whether the last attempt failed.
    pub(super) fn is_failing(&self) -> bool {
        self.failures > 0
    }

    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_are_random_below_it() {
        let (first, max) = (Duration::from_secs(1), Duration::from_secs(60));
        let mut longest = [Duration::ZERO; 40];
        let mut shortest = [Duration::MAX; 40];
        for _ in 0..2000 {
            let mut backoff = Backoff::new(first, max);
            for (longest, shortest) in longest.iter_mut().zip(&mut shortest) {
                let wait = backoff.failed();
                *longest = (*longest).max(wait);
                *shortest = (*shortest).min(wait);
            }
        }
        for (n, (longest, shortest)) in longest.iter().zip(&shortest).enumerate() {
            let limit = first.saturating_mul(1 << n.min(20)).min(max);
            assert!(*longest <= limit, "{n}: {longest:?}");
            assert!(*longest > limit.mul_f64(0.95), "{n}: {longest:?}");
            assert!(*shortest < limit.mul_f64(0.05), "{n}: {shortest:?}");
        }
    }

    #[test]
    fn success_begins_anew() {
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_secs(60));
        assert!(!backoff.is_failing());
        for _ in 0..100 {
            backoff.failed();
        }
        assert!(backoff.is_failing());
        backoff.succeeded();
        assert!(!backoff.is_failing());
        assert!(backoff.failed() <= Duration::from_millis(1));
    }
}
