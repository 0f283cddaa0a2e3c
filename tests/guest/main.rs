//! `rbprof-guest`: the checks that need a kernel and a Ruby, in one program that
//! needs nothing else. It is what an emulated machine runs, whose kernel, Rubies
//! and architecture are not the developer's.
//!
//! | variable | what it names | if it is not set |
//! |---|---|---|
//! | `RBPROF_GUEST_RUBIES` | a folder with root file systems, each named as the recipe of its Ruby | `/rubies` |
//! | `RBPROF_COMMAND` | the command `rbprof` | `/bin/rbprof` |
//! | `RBPROF_WORKLOADS` | the folder of the Ruby programs | the source tree's |
//! | `RBPROF_GUEST_TURN` | a number: each check but `frames` is made with one of the Rubies, in turn by this number; what an architecture makes no difference to is left out from 5 on, and what a kernel makes none to unless it is 0 or 4 | each is made with every Ruby |
//!
//! Each root has the C extension at `xtask::rubies::extension::IN_A_MACHINE`. On
//! `PATH` it needs `sh`, `unshare`, `mount`, `chroot` and `kill`, of which
//! busybox's will do. It takes the arguments of Rust's test programs; the last line
//! that it prints sums up.

mod facts;
mod privileges;
mod user;

use std::env;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use libtest_mimic::Arguments;
use libtest_mimic::Trial;
use rbprof::kernel::Discover;
use rbprof::kernel::Looping;
use rbprof_tests::checks::children;
use rbprof_tests::checks::children::children_are_recorded;
use rbprof_tests::checks::collector::collections_are_seen;
use rbprof_tests::checks::depth;
use rbprof_tests::checks::depth::arrives_whole;
use rbprof_tests::checks::depth::is_cut;
use rbprof_tests::checks::discovery;
use rbprof_tests::checks::discovery::rubies_are_announced;
use rbprof_tests::checks::extension;
use rbprof_tests::checks::extension::shares_are_right;
use rbprof_tests::checks::frames;
use rbprof_tests::checks::frames::frames_are_true;
use rbprof_tests::checks::load;
use rbprof_tests::checks::load::loads_and_attaches;
use rbprof_tests::checks::roots;
use rbprof_tests::checks::roots::every_stack_has_its_own;
use rbprof_tests::checks::split;
use rbprof_tests::checks::split::shares_are_true;
use rbprof_tests::checks::threads;
use rbprof_tests::checks::threads::threads_are_told_apart;
use rbprof_tests::frames::Jit;
use rbprof_tests::rig;
use rbprof_tests::task::Bench;
use xtask::rubies;
use xtask::rubies::Extension;
use xtask::rubies::Installed;

use crate::facts::Facts;

/// What a check of one Ruby is given.
struct Subject {
    ruby: Installed,
    command: PathBuf,
    facts: Facts,
}

impl Subject {
    /// For a recording by the command.
    fn bench(&self) -> Result<Bench<'_>> {
        let root = self.ruby.root.as_deref().unwrap_or(Path::new("/"));
        Ok(Bench {
            rbprof: &self.command,
            ruby: self.ruby.clone(),
            extension: Extension::of_root(root)?,
        })
    }
}

/// A check of one Ruby.
type Check = fn(&Subject) -> Result<()>;

/// The checks of each Ruby, by their names.
const CHECKS: [(&str, Check); 8] = [
    ("frames", of_frames),
    ("depth", of_depth),
    ("extension", of_extension),
    ("threads", of_threads),
    ("children", of_children),
    ("split", of_split),
    ("collector", of_collector),
    ("roots", of_roots),
];

fn main() -> ExitCode {
    if let Err(error) = user::become_other() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    rig::set_emulated();
    let mut arguments = Arguments::from_args();
    // Each measures, and the machine is small.
    arguments.test_threads.get_or_insert(1);
    let facts = Facts::default();
    let conclusion = libtest_mimic::run(&arguments, trials(&facts));
    println!("{}", facts.summary(&conclusion));
    conclusion.exit_code()
}

fn trials(facts: &Facts) -> Vec<Trial> {
    let command = path("RBPROF_COMMAND", "/bin/rbprof");
    let found = rubies::below(&path("RBPROF_GUEST_RUBIES", "/rubies"));
    let subjects: Vec<Arc<Subject>> = found
        .into_iter()
        .map(|ruby| {
            Arc::new(Subject {
                ruby,
                command: command.clone(),
                facts: facts.clone(),
            })
        })
        .collect();
    let with_first = |name: &str, check: Check| {
        let first = subjects.first().map(Arc::clone);
        trial(name.to_owned(), move || {
            check(first.as_deref().context("no Ruby is there")?)
        })
    };
    let turn: Option<usize> = env::var("RBPROF_GUEST_TURN")
        .ok()
        .and_then(|turn| turn.parse().ok());
    let mut trials = vec![
        with_first("load_and_attach", load_and_attach),
        with_first("system", of_system),
        with_first("discovery", of_discovery),
    ];
    if turn.is_none_or(|turn| turn < 5) {
        trials.push(with_first("privileges", |subject| {
            privileges::few_are_enough(&subject.command, &subject.ruby)
        }));
    }
    for (at, subject) in subjects.iter().enumerate() {
        let of_this_ruby = |name: &str, check: Check| {
            let subject = Arc::clone(subject);
            trial(format!("{}: {name}", subject.ruby.name), move || {
                check(&subject)
            })
        };
        for (number, (name, check)) in CHECKS.into_iter().enumerate() {
            // The first one is what differs most from Ruby to Ruby.
            let is_due =
                number == 0 || turn.is_none_or(|turn| (turn + number) % subjects.len() == at);
            if is_due {
                trials.push(of_this_ruby(name, check));
            }
        }
        // Once: what differs from Ruby to Ruby is not the loop.
        if at == 0 && turn.is_none_or(|turn| turn % 4 == 0) {
            trials.push(of_this_ruby(
                "depth_with_tail_calls",
                of_depth_with_tail_calls,
            ));
        }
    }
    // The last one: nothing can be recorded afterwards.
    trials.push(with_first("lockdown", |subject| {
        privileges::lockdown_is_named(&subject.command)
    }));
    trials
}

fn trial(name: String, test: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name.clone(), move || {
        let begin = Instant::now();
        let result = test();
        eprintln!("{name} took {:.1} s", begin.elapsed().as_secs_f64());
        result.map_err(|error| format!("{error:#}").into())
    })
}

fn path(variable: &str, default: &str) -> PathBuf {
    env::var_os(variable).map_or_else(|| PathBuf::from(default), PathBuf::from)
}

/// What a check gives that did run: on such a machine, each must.
fn ran<T>(found: Option<T>) -> Result<T> {
    found.context("this machine does not allow it")
}

fn load_and_attach(subject: &Subject) -> Result<()> {
    for looping in [Looping::Probe, Looping::TailCalls] {
        let loaded = ran(loads_and_attaches(&subject.ruby, looping)?)?;
        for program in &loaded.programs {
            match program.verified_instructions {
                Some(verified) => eprintln!(
                    "{}: {:18} {verified:7} instructions verified",
                    loaded.looping, program.name
                ),
                None => eprintln!("{}: {} loaded", loaded.looping, program.name),
            }
        }
        eprintln!("{}: {} samples", loaded.looping, loaded.samples);
        subject.facts.loaded(&loaded);
    }
    Ok(())
}

/// The command finds that it can record here.
fn of_system(subject: &Subject) -> Result<()> {
    let mut command = Command::new(&subject.command);
    let output = command.args(["inspect", "--system"]).output()?;
    let page = String::from_utf8_lossy(&output.stdout);
    eprintln!("{page}");
    ensure!(
        output.status.success() && page.contains("rbprof can record here"),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Rubies are told of in both ways. Where ftrace may not trace the function for
/// mappings, as in 5.10, no probe may be put there.
fn of_discovery(subject: &Subject) -> Result<()> {
    const PROBE: &str = "a probe in the kernel";
    const SIDE_BAND: &str = "perf's events for mappings";
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let can_probe = !release.starts_with("5.10.");
    for (discover, expected) in [
        (Discover::Probe, if can_probe { PROBE } else { SIDE_BAND }),
        (Discover::SideBand, SIDE_BAND),
    ] {
        let pace = discovery::Pace::EMULATED;
        let announcer = ran(rubies_are_announced(&subject.ruby, discover, pace)?)?;
        eprintln!("{discover:?}: told of by {announcer}");
        ensure!(
            announcer == expected,
            "told of by {announcer}, not {expected}"
        );
    }
    Ok(())
}

fn of_frames(subject: &Subject) -> Result<()> {
    let pace = frames::Pace::EMULATED;
    let (points, samples) = ran(frames_are_true(&subject.ruby, Jit::Off, pace)?)?;
    subject.facts.compared(points, samples);
    Ok(())
}

/// With the loops that the kernel has.
fn of_depth(subject: &Subject) -> Result<()> {
    if ran(load::looping()?)? == "bpf_loop" {
        for depth in [20, 2_000, 8_000] {
            whole(subject, depth, Looping::Probe)?;
        }
        Ok(())
    } else {
        whole(subject, 20, Looping::Probe)?;
        of_depth_with_tail_calls(subject)
    }
}

/// Without any loops of the kernel.
fn of_depth_with_tail_calls(subject: &Subject) -> Result<()> {
    // Two frames above and one below the recursion.
    whole(subject, 2_000, Looping::TailCalls)?;
    let depth = 8_000;
    let pace = depth::Pace::emulated(depth);
    ran(is_cut(&subject.ruby, depth, Looping::TailCalls, pace)?)?;
    Ok(())
}

fn whole(subject: &Subject, depth: usize, looping: Looping) -> Result<()> {
    let pace = depth::Pace::emulated(depth);
    let count = ran(arrives_whole(&subject.ruby, depth, looping, pace)?)?;
    ensure!(count > 0, "no sample of depth {depth}");
    subject.facts.whole(depth);
    Ok(())
}

fn of_extension(subject: &Subject) -> Result<()> {
    let pace = extension::Pace::EMULATED;
    let samples = shares_are_right(&subject.bench()?, Jit::Off, pace)?;
    subject.facts.mixed(samples);
    Ok(())
}

fn of_roots(subject: &Subject) -> Result<()> {
    every_stack_has_its_own(&subject.bench()?, roots::Pace::EMULATED)?;
    Ok(())
}

fn of_threads(subject: &Subject) -> Result<()> {
    ran(threads_are_told_apart(
        &subject.ruby,
        threads::Pace::EMULATED,
    )?)?;
    Ok(())
}

fn of_children(subject: &Subject) -> Result<()> {
    ran(children_are_recorded(
        &subject.ruby,
        children::Pace::EMULATED,
    )?)?;
    Ok(())
}

fn of_collector(subject: &Subject) -> Result<()> {
    ran(collections_are_seen(&subject.ruby)?)?;
    Ok(())
}

fn of_split(subject: &Subject) -> Result<()> {
    let error = ran(shares_are_true(&subject.ruby, split::Pace::EMULATED)?)?;
    subject.facts.split(error);
    Ok(())
}
