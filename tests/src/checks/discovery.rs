//! Rubies are told of from the moment they exist, however they come to be.

#![expect(
    clippy::indexing_slicing,
    reason = "a check that looks past the end has failed"
)]

use std::collections::HashSet;
use std::process::Child;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Discover;
use rbprof::kernel::Options;
use rbprof::session::discover::Watcher;
use rbprof::targets::Target;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::recording::Seen;
use crate::rig;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time of a program's work, seconds.
    pub seconds: &'static str,
}

impl Pace {
    /// Of real machines: 50 samples are due.
    pub const HOST: Self = Self {
        frequency: 499,
        seconds: "0.1",
    };
    /// Of emulated machines: the work must last longer than rbprof takes to find
    /// the Ruby, which it has never seen before.
    pub const EMULATED: Self = Self {
        frequency: 97,
        seconds: "3",
    };
}

/// What a watcher hears of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Heard {
    Appeared { parent: Option<u32> },
    Attached,
    GivenUp(String),
    Ended,
}

/// Writes down what it hears.
#[derive(Clone, Debug, Default)]
struct Listener(Arc<Mutex<Notes>>);

#[derive(Debug, Default)]
struct Notes {
    heard: Vec<(u32, Heard)>,
    /// Those that are not to be profiled.
    refused: HashSet<u32>,
    /// Nobody else is to be.
    refuses: bool,
}

impl Listener {
    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, pid: u32, heard: Heard) {
        self.lock().heard.push((pid, heard));
    }

    /// What was heard of a process so far.
    fn of(&self, pid: u32) -> Vec<Heard> {
        let notes = self.lock();
        let of_it = notes.heard.iter().filter(|(of, _)| *of == pid);
        of_it.map(|(_, heard)| heard.clone()).collect()
    }
}

impl Watcher for Listener {
    fn appeared(&mut self, pid: u32, parent: Option<u32>) -> bool {
        self.note(pid, Heard::Appeared { parent });
        let mut notes = self.lock();
        if notes.refuses {
            notes.refused.insert(pid);
        }
        !notes.refuses
    }

    fn attached(&mut self, pid: u32, _: &Target) {
        self.note(pid, Heard::Attached);
    }

    fn given_up(&mut self, pid: u32, why: &str) {
        self.note(pid, Heard::GivenUp(why.to_owned()));
    }

    fn ended(&mut self, pid: u32) {
        self.note(pid, Heard::Ended);
    }
}

/// A recording of all Rubies.
struct Bench<'a> {
    ruby: &'a Installed,
    pace: Pace,
    listener: Listener,
    recorder: Recorder,
}

impl Bench<'_> {
    /// Starts a short program, which executes `then` in the end.
    fn script(&self, then: Option<&str>) -> Result<Child> {
        let mut command = self.ruby.script(&rig::workload("agent.rb"))?;
        command.arg("script").env("SECONDS", self.pace.seconds);
        if let Some(then) = then {
            command.env("THEN", then);
        }
        Ok(command.spawn()?)
    }

    /// Records until a process has ended.
    fn wait(&mut self, child: &mut Child) -> Result<()> {
        let mut status = None;
        self.recorder.run_until(|| {
            status = child.try_wait()?;
            Ok(status.is_some())
        })?;
        ensure!(
            status.is_some_and(|it| it.success()),
            "it ended with {status:?}"
        );
        self.until("told to have ended", child.id(), |heard| {
            heard.last() == Some(&Heard::Ended)
        })
    }

    /// Records until something holds of what was heard of a process.
    fn until(&mut self, what: &str, pid: u32, holds: impl Fn(&[Heard]) -> bool) -> Result<()> {
        let begin = Instant::now();
        let listener = self.listener.clone();
        self.recorder.run_until(|| {
            let heard = listener.of(pid);
            ensure!(
                begin.elapsed() < rig::patience(),
                "process {pid} is not {what}: {heard:?}"
            );
            Ok(holds(&heard))
        })
    }

    /// Whether an `exec` may be told of after what it mapped: the program itself is
    /// mapped before the `exec` is over. The process is taken for another one then.
    fn is_told_of_late_execs(&mut self) -> bool {
        !self.recorder.session().kernel().knows_what_is_executed()
    }

    /// How many samples of a process have a method.
    fn samples(&self, pid: u32, method: &str) -> usize {
        self.recorder
            .seen()
            .count(|seen| seen.pid == pid && runs(seen, method))
    }
}

fn runs(seen: &Seen, method: &str) -> bool {
    (seen.frames.iter()).any(|frame| &*frame.function.label == method)
}

/// A short program, one that forks, one that executes itself, one that executes what
/// is no Ruby, and one that is not wanted: each is told of, and each that is wanted
/// has samples. What told of them.
///
/// # Errors
/// If one is not told of, or has none.
pub fn rubies_are_announced(
    ruby: &Installed,
    discover: Discover,
    pace: Pace,
) -> Result<Option<&'static str>> {
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: pace.frequency,
        ring_bytes: rig::ring_bytes(),
        discover,
        ..Options::default()
    })?
    else {
        return Ok(None);
    };
    let listener = Listener::default();
    recorder.session().discover(Box::new(listener.clone()));
    recorder.start(&[])?;
    let mut bench = Bench {
        ruby,
        pace,
        listener,
        recorder,
    };

    // The first one of its file, and one whose file is known.
    let started = [
        Heard::Appeared { parent: None },
        Heard::Attached,
        Heard::Ended,
    ];
    for _ in 0..2 {
        let mut child = bench.script(None)?;
        bench.wait(&mut child)?;
        let mut heard = bench.listener.of(child.id());
        if bench.is_told_of_late_execs()
            && let Some(last) = heard.iter().rposition(|it| *it == started[0])
            && !heard[..last].contains(&Heard::Ended)
        {
            heard.drain(..last);
        }
        ensure!(heard == started, "a program: {heard:?}");
        ensure!(
            bench.samples(child.id(), "Object#in_script") > 0,
            "no samples"
        );
    }

    // It executes itself, and what is no Ruby: that is told before its end.
    let file = ruby.ruby.display().to_string();
    let script = ruby.script(&rig::workload("agent.rb"))?;
    let script = script.get_args().last().context("no script")?;
    let again = format!("{file} {} script", script.display());
    let mut child = bench.script(Some(&again))?;
    bench.wait(&mut child)?;
    let heard = bench.listener.of(child.id());
    let appeared = (heard.iter())
        .filter(|it| matches!(it, Heard::Appeared { .. }))
        .count();
    ensure!(
        appeared == 2 || appeared > 2 && bench.is_told_of_late_execs(),
        "one that executes itself: {heard:?}"
    );
    let mut child = bench.script(Some("sleep 600"))?;
    bench.until("told to be no Ruby", child.id(), |heard| {
        heard.last() == Some(&Heard::Ended)
    })?;
    ensure!(child.try_wait()?.is_none(), "it has really ended");
    child.kill()?;
    child.wait()?;
    ensure!(
        bench.samples(child.id(), "Object#in_script") > 0,
        "no samples"
    );

    // Its children are told of with it, and end when it is killed.
    let mut server = crate::target::Target::start(&mut ruby.script(&rig::workload("agent.rb"))?)?;
    let said = server.wait_for("ready")?;
    let workers: Vec<u32> = said
        .iter()
        .filter_map(|line| line.strip_prefix("worker\t")?.parse().ok())
        .collect();
    ensure!(workers.len() == 2, "{said:?}");
    let begin = Instant::now();
    for &worker in &workers {
        bench.until("told of", worker, |heard| !heard.is_empty())?;
        let seen = bench.recorder.seen();
        bench.recorder.run_until(|| {
            ensure!(
                begin.elapsed() < rig::patience(),
                "worker {worker} has no samples"
            );
            Ok(seen.count(|seen| seen.pid == worker && runs(seen, "Object#in_worker")) > 0)
        })?;
        let heard = bench.listener.of(worker);
        let parent = Some(server.pid());
        ensure!(
            heard.first() == Some(&Heard::Appeared { parent }),
            "a worker: {heard:?}"
        );
    }
    let pid = server.pid();
    drop(server);
    for pid in workers.into_iter().chain([pid]) {
        bench.until("told to have ended", pid, |heard| {
            heard.last() == Some(&Heard::Ended)
        })?;
    }

    // Nobody wants it.
    bench.listener.lock().refuses = true;
    let mut child = bench.script(None)?;
    bench.wait(&mut child)?;
    let mut heard = bench.listener.of(child.id());
    if bench.is_told_of_late_execs() {
        heard.dedup();
    }
    ensure!(
        heard == [Heard::Appeared { parent: None }, Heard::Ended],
        "one that is not wanted: {heard:?}"
    );
    if let Some(why) = bench.recorder.session().kernel().without_probe() {
        eprintln!("no probe: {why}");
    }
    let announcer = bench.recorder.session().kernel().announcer();
    let announcer = announcer.map_err(|why| anyhow::anyhow!("{why}"))?;
    let refused = bench.listener.lock().refused.clone();
    let recording = bench.recorder.finish()?;
    let of_refused = (recording.seen.iter()).filter(|seen| refused.contains(&seen.pid));
    let count = of_refused.count();
    ensure!(count == 0, "{count} samples of what is not wanted");
    Ok(Some(announcer))
}
