//! Shares of samples, and what coincidence makes of them.

/// A recording in which more is so than a share allows is believed to be a
/// coincidence if it is at least this likely.
const COINCIDENCE: f64 = 0.01;

/// Whether no larger share is so than that: `found` of `count` may be more only
/// as far as coincidence explains it, which is little in long recordings.
#[must_use]
pub fn is_within(found: u64, count: u64, share: f64) -> bool {
    // The chance of as many or more, if each is so with that probability.
    let mut exactly = (count as f64 * (-share).ln_1p()).exp();
    let mut fewer = 0.0;
    for number in 0..found.min(count) {
        fewer += exactly;
        exactly *= (count - number) as f64 / (number + 1) as f64 * share / (1.0 - share);
    }
    1.0 - fewer >= COINCIDENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coincidence_explains_little() {
        assert!(is_within(0, 1000, 0.001) && is_within(4, 1000, 0.001));
        assert!(!is_within(5, 1000, 0.001));
        assert!(is_within(24, 24000, 0.001) && !is_within(37, 24000, 0.001));
        assert!(is_within(120, 24000, 0.005) && !is_within(150, 24000, 0.005));
    }
}
