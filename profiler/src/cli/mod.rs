//! The command line: arguments, a validated plan, the run.
//!
//! | module | what it does |
//! |---|---|
//! | `agent` | `rbprof agent` |
//! | [`args`] | what can be said on the command line |
//! | [`plan`] | the same, checked, as what is to be done |
//! | `record` | does it |
//! | `inspect` | tells what is known of a Ruby |
//! | `layout` | `rbprof layout` |
//! | `progress` | the live line on a terminal |

mod agent;
pub mod args;
mod inspect;
mod layout;
pub mod plan;
mod progress;
mod record;

use std::process::ExitCode;

use crate::output::plain;

pub use self::args::Arguments;
use self::args::Command;
pub use self::plan::UsageError;

/// Runs the command that the arguments ask for.
///
/// # Errors
/// Whatever went wrong, in words for the user; a [`UsageError`] when it was
/// the arguments.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Record(record) => record::run(plan::Plan::new(record)?),
        Command::Layout(arguments) => layout::run(&arguments),
        Command::Agent(arguments) => agent::run(arguments),
    }
}

/// An error with its causes in one line, none of them said twice.
#[must_use]
pub fn explain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    // Names come from processes and files, and may hold anything.
    plain(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_errors_do_not_reach_the_terminal_as_they_are() {
        let error = anyhow::anyhow!("no file \x1b[31mx\n").context("opening");
        assert_eq!(explain(&error), "opening: no file \\x1b[31mx\\n");
    }
}
