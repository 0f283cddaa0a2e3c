//! The `rbprof` command.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let arguments = rbprof::cli::Arguments::parse();
    match rbprof::cli::run(arguments) {
        Ok(code) => code,
        Err(error) => {
            // Nobody may be listening.
            drop(writeln!(
                std::io::stderr(),
                "rbprof: {}",
                rbprof::cli::explain(&error)
            ));
            if error.is::<rbprof::cli::UsageError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
