//! What the agent says: lines on standard error, which systemd puts into the
//! journal with their priority.

use std::io::Write as _;
use std::sync::OnceLock;

use log::Level;
use log::LevelFilter;
use log::Log;
use log::Metadata;
use log::Record;

use crate::output::plain;

/// Set by systemd where standard error is the journal's.
const JOURNAL: &str = "JOURNAL_STREAM";

struct Journal {
    /// Lines begin with their priority: `<4>`.
    has_priorities: bool,
}

impl Log for Journal {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Libraries have things to say, too.
        metadata.target().starts_with("rbprof") && metadata.level() <= Level::Info
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let text = record.args().to_string();
            let line = line(self.has_priorities, record.level(), &text);
            // Nobody may be listening.
            drop(std::io::stderr().lock().write_all(line.as_bytes()));
        }
    }

    fn flush(&self) {}
}

/// A message as one line. Names in it come from processes, and may hold anything.
fn line(has_priority: bool, level: Level, text: &str) -> String {
    // sd-daemon(3).
    let priority = match level {
        Level::Error => "<3>",
        Level::Warn => "<4>",
        Level::Info => "<6>",
        Level::Debug | Level::Trace => "<7>",
    };
    let priority = if has_priority { priority } else { "" };
    format!("{priority}rbprof: {}\n", plain(text))
}

/// Has everything that is logged said, from now on. Nothing happens if somebody
/// has done so before.
pub fn start() {
    static LOGGER: OnceLock<Journal> = OnceLock::new();
    let journal = LOGGER.get_or_init(|| Journal {
        has_priorities: std::env::var_os(JOURNAL).is_some(),
    });
    if log::set_logger(journal).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(line(false, Level::Info, "a\nb\x1b"), "rbprof: a\\nb\\x1b\n");
        assert_eq!(line(true, Level::Warn, "x"), "<4>rbprof: x\n");
    }
}
