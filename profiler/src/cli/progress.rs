//! The live line on a terminal.

use std::io::IsTerminal as _;
use std::io::Write as _;
use std::time::Duration;
use std::time::Instant;

/// Shortest time between two updates.
const INTERVAL: Duration = Duration::from_millis(200);

/// Redraws one line on standard error, if that is a terminal.
pub(super) struct Progress {
    active: bool,
    drawn: Option<Instant>,
}

/// What the line shows.
pub(super) struct State {
    pub(super) elapsed: Duration,
    pub(super) planned: Option<Duration>,
    pub(super) samples: u64,
    pub(super) lost: u64,
    pub(super) threads: usize,
}

impl Progress {
    pub(super) fn new(quiet: bool) -> Self {
        Self {
            active: !quiet && std::io::stderr().is_terminal(),
            drawn: None,
        }
    }

    pub(super) fn is_due(&self) -> bool {
        self.active && self.drawn.is_none_or(|at| at.elapsed() >= INTERVAL)
    }

    pub(super) fn draw(&mut self, state: &State) {
        if !self.active {
            return;
        }
        self.drawn = Some(Instant::now());
        let mut stderr = std::io::stderr().lock();
        // A terminal that went away is no reason to stop recording.
        drop(write!(stderr, "\r\x1b[2K{}", line(state)).and_then(|()| stderr.flush()));
    }

    pub(super) fn clear(&mut self) {
        if self.active && self.drawn.take().is_some() {
            let mut stderr = std::io::stderr().lock();
            drop(write!(stderr, "\r\x1b[2K").and_then(|()| stderr.flush()));
        }
    }
}

fn line(state: &State) -> String {
    let State {
        elapsed,
        planned,
        samples,
        lost,
        threads,
    } = state;
    let of = planned.map_or_else(String::new, |planned| {
        format!(" of {:.0}", planned.as_secs_f64())
    });
    let thread = if *threads == 1 { "thread" } else { "threads" };
    format!(
        "recording CPU: {:.1}{of} s, {samples} samples, {lost} lost, {threads} {thread}; Ctrl-C to finish",
        elapsed.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_going_on() {
        let state = State {
            elapsed: Duration::from_millis(3240),
            planned: Some(Duration::from_secs(5)),
            samples: 316,
            lost: 0,
            threads: 2,
        };
        assert_eq!(
            line(&state),
            "recording CPU: 3.2 of 5 s, 316 samples, 0 lost, 2 threads; Ctrl-C to finish"
        );
    }
}
