//! `cargo xtask vm`: virtual machines with other kernels and other processors, in
//! which rbprof is tested.
//!
//! A machine boots in seconds: its kernel is Debian's, its file system an
//! initramfs with everything that is needed, made for it. There is no disk and no
//! network.
//!
//! | module | what it does |
//! |---|---|
//! | `machines` | which there are |
//! | `kernel` | fetches their kernels |
//! | `programs` | builds what runs in them |
//! | `image` | their file system |
//! | `archive` | the format of that |
//! | `qemu` | runs one |

mod archive;
mod image;
mod kernel;
mod machines;
mod programs;
mod qemu;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use clap::Args;

pub use machines::Architecture;
pub use machines::MACHINES;
pub use machines::Machine;

use image::Content;
use image::Removed;
use programs::Programs;
use qemu::Start;

/// What runs where nothing else is asked for.
const CHECKS: &str = "rbprof-guest";
/// How many machines run at the same time: each is busy with one of its two
/// processors most of the time.
const AT_ONCE: usize = 2;
/// The variable by whose number the checks are divided among the Rubies.
const TURN: &str = "RBPROF_GUEST_TURN";
/// What the checks say in the end, which the line of a machine quotes.
const SUMMARY: &str = "guest: ";
const NONE_FAILED: &str = " 0 failed";

/// What a person asks for.
#[derive(Debug, Args)]
pub struct Arguments {
    /// List the machines, and run none.
    #[arg(long)]
    list: bool,
    /// Run the checks in all of them, two at a time.
    #[arg(long, conflicts_with_all = ["arch", "kernel", "command"])]
    all: bool,
    /// The processor.
    #[arg(long, default_value = "amd64")]
    arch: Architecture,
    /// The kernel, as `--list` shows it.
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// The rbprof that is in it [default: built as the tests build it].
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    rbprof: Option<PathBuf>,
    /// More for the kernel's command line, such as `lockdown=confidentiality`.
    #[arg(long, default_value = "")]
    append: String,
    /// When to give up, seconds.
    #[arg(long, default_value_t = 1200)]
    deadline: u64,
    /// What to run in it [default: the checks]; `sh` for a shell.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Does what a person asks for; the exit status of the machine's command.
///
/// # Errors
/// If there is no such machine, it cannot be started, or is not done in time.
pub fn run(arguments: &Arguments) -> Result<u8> {
    if arguments.list {
        list();
        return Ok(0);
    }
    if arguments.all {
        check_all()?;
        return Ok(0);
    }
    let machine = find(arguments.arch, &arguments.kernel)?;
    let default = [CHECKS.to_owned()];
    let command = match arguments.command.as_slice() {
        [] => default.as_slice(),
        words => words,
    };
    let with_checks = command.iter().any(|word| word.contains(CHECKS));
    let programs = match &arguments.rbprof {
        Some(rbprof) => programs::with(rbprof, machine.architecture, with_checks)?,
        None => programs::build(machine.architecture)?,
    };
    let session = Session {
        machine,
        programs: &programs,
        command,
        append: &arguments.append,
        deadline: Duration::from_secs(arguments.deadline),
        interactive: command.first().is_some_and(|program| program == "sh") && command.len() == 1,
    };
    let status = session.run(|line| println!("{line}"))?;
    // What does not fit is a failure in any case.
    Ok(u8::try_from(status).unwrap_or(u8::MAX))
}

/// Runs the checks in every machine, two at a time, and prints a line for each.
///
/// # Errors
/// If the checks failed in one, after what that one said.
pub fn check_all() -> Result<()> {
    let mut built = Vec::new();
    for architecture in [Architecture::Amd64, Architecture::Arm64] {
        image::provide(architecture)?;
        built.push((architecture, programs::build(architecture)?));
    }
    let programs = |architecture| {
        let mut built = built.iter();
        built
            .find(|(of, _)| *of == architecture)
            .map(|(_, programs)| programs)
            .context("built for every architecture")
    };
    // The slow ones first. Each makes some checks with another Ruby.
    let slow_first = MACHINES.iter().enumerate().rev().collect::<VecDeque<_>>();
    let waiting = Mutex::new(slow_first);
    let failed = Mutex::new(Vec::new());
    let next = || waiting.lock().ok()?.pop_front();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((turn, machine)) = next() {
                    let done = programs(machine.architecture)
                        .and_then(|programs| check(machine, turn, programs));
                    if let Err(error) = done {
                        println!("  {}: FAILED: {error:#}", machine.name());
                        if let Ok(mut failed) = failed.lock() {
                            failed.push(machine.name());
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        bail!("the checks failed in: {}", failed.join(", "));
    }
    Ok(())
}

/// When the checks of one machine are given up.
const DEADLINE: Duration = Duration::from_secs(1200);

fn check(machine: &Machine, turn: usize, programs: &Programs) -> Result<()> {
    let begun = Instant::now();
    let turn = format!("{TURN}={turn}");
    let mut words = match machine.only {
        Some(ruby) => vec![CHECKS, ruby],
        None => vec!["env", &turn, CHECKS],
    };
    words.push("--color=never");
    let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    let session = Session {
        machine,
        programs,
        command: &words,
        append: "",
        deadline: DEADLINE,
        interactive: false,
    };
    let mut console = Vec::new();
    let status = session.run(|line| console.push(line.to_owned()));
    let summary = console.iter().find_map(|line| line.strip_prefix(SUMMARY));
    match (&status, summary) {
        (Ok(0), Some(summary)) if summary.contains(NONE_FAILED) => {
            println!(
                "  {}: {summary} ({:.0} s)",
                machine.name(),
                begun.elapsed().as_secs_f64()
            );
            Ok(())
        }
        _ => {
            for line in &console {
                println!("  {} | {line}", machine.name());
            }
            let status = status?;
            bail!("exit status {status}")
        }
    }
}

fn find(architecture: Architecture, kernel: &str) -> Result<&'static Machine> {
    let mut machines = MACHINES.iter();
    machines
        .find(|machine| machine.architecture == architecture && machine.kernel == kernel)
        .with_context(|| {
            let names: Vec<String> = MACHINES.iter().map(Machine::name).collect();
            format!(
                "there is no machine {} {kernel}; there are {}",
                architecture.debian(),
                names.join(", ")
            )
        })
}

fn list() {
    for machine in MACHINES {
        let state = kernel::release(machine).map_or_else(
            || "not fetched".to_owned(),
            |release| format!("Linux {release}"),
        );
        println!(
            "{:16} {state}\n{:16} {} of Debian {}, processor {}",
            machine.name(),
            "",
            machine.package,
            machine.suite,
            machine.processor
        );
    }
}

/// One run of a machine.
struct Session<'a> {
    machine: &'a Machine,
    programs: &'a Programs,
    command: &'a [String],
    append: &'a str,
    deadline: Duration,
    interactive: bool,
}

impl Session<'_> {
    fn run(&self, line: impl FnMut(&str)) -> Result<i32> {
        let kernel = kernel::provide(self.machine)?;
        let mark = format!("rbprof-vm-{}", unique());
        let (file, place) = image::temporary()?;
        let _removed = Removed(&place);
        let content = Content {
            architecture: self.machine.architecture,
            programs: self.programs,
            command: self.command,
            mark: &mark,
        };
        drop(image::write(&content, file)?);
        qemu::run(
            &Start {
                machine: self.machine,
                kernel: &kernel,
                file_system: &place,
                append: self.append,
                mark: &mark,
                deadline: self.deadline,
                interactive: self.interactive,
            },
            line,
        )
    }
}

/// What nothing on a console says by itself.
fn unique() -> u128 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_has_a_name_of_its_own() {
        let mut names: Vec<String> = MACHINES.iter().map(Machine::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MACHINES.len());
        let error = find(Architecture::Arm64, "2.4").unwrap_err().to_string();
        assert!(error.contains("arm64 6.12"), "{error}");
    }
}
