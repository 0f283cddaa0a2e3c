//! What a developer of rbprof runs: `cargo xtask setup | rubies | vm | test | dist | demo`.

use std::process::ExitCode;

use clap::Parser;
use clap::Subcommand;

use xtask::demo;
use xtask::dist;
use xtask::fuzz;
use xtask::layouts;
use xtask::rubies;
use xtask::setup;
use xtask::test;
use xtask::vm;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what building and testing need and this machine lacks.
    ///
    /// Without root, prints what to install and exits with status 1 if anything
    /// is missing.
    Setup,
    /// Fetch or build the Rubies that the integration tests profile.
    ///
    /// They are kept in $RBPROF_CACHE, by default ~/.cache/rbprof.
    Rubies {
        /// Say what there is and what is cached, and build nothing.
        #[arg(long)]
        list: bool,
        /// Which ones [default: those that the tests need].
        names: Vec<String>,
    },
    /// Compare the table of layouts with generated bindings of every Ruby
    /// release.
    Layouts,
    /// Run everything that continuous integration runs.
    Test {
        /// Profile every Ruby that there is, also those that take long to build.
        #[arg(long)]
        every_ruby: bool,
        /// Run only the tests whose name contains this, and no lints.
        filter: Option<String>,
    },
    /// Fuzz what reads files of strangers.
    Fuzz {
        /// How long each target runs.
        #[arg(long, default_value_t = 600)]
        seconds: u32,
        /// Which targets [default: all].
        names: Vec<String>,
    },
    /// Run rbprof in a virtual machine with another kernel or processor.
    ///
    /// The exit status is that of the command in it.
    Vm(vm::Arguments),
    /// Build what a release consists of: static binaries for both processors.
    Dist(dist::Arguments),
    /// Profile a bundled Ruby program for five seconds and show the result.
    Demo,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Setup => setup::run(),
        Task::Rubies { list: true, names } => rubies::list(&names),
        Task::Rubies { list: false, names } => rubies::provide(&names),
        Task::Layouts => layouts::check(),
        Task::Test { every_ruby, filter } => test::run(filter.as_deref(), every_ruby),
        Task::Fuzz { seconds, names } => fuzz::run(seconds, &names),
        Task::Demo => demo::run(),
        Task::Dist(arguments) => dist::run(&arguments),
        Task::Vm(arguments) => match vm::run(&arguments) {
            Ok(status) => return ExitCode::from(status),
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
