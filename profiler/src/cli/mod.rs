//! The command line: arguments, a validated plan, the run.
//!
//! | module | what it does |
//! |---|---|
//! | [`args`] | what can be said on the command line |
//! | [`plan`] | the same, checked, as what is to be done |
//! | `record` | does it |
//! | `inspect` | tells what is known of a Ruby |
//! | `layout` | `rbprof layout` |
//! | `progress` | the live line on a terminal |

pub mod args;
mod inspect;
mod layout;
pub mod plan;
mod progress;
mod record;

use std::process::ExitCode;

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
    text
}
