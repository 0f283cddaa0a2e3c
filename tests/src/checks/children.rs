//! Children are recorded from the moment they exist, and what is not Ruby is told
//! from it.

#![expect(
    clippy::indexing_slicing,
    reason = "a check that looks past the end has failed"
)]

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::recording::Seen;
use crate::rig;
use crate::target::Target;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time of each process, milliseconds.
    pub busy_ms: u64,
    /// Rounds of a loop of the shell's.
    pub shell_rounds: u64,
    /// How long the last process stays when it is done, seconds: an emulated
    /// machine takes long to read the names of what it has not seen before.
    pub linger: &'static str,
    /// Whether Ruby collects its garbage; see [`frames`](super::frames::Pace).
    pub collector: bool,
    /// Whether ticks may fall between the moment in which the kernel replaces a
    /// program and the one in which it says so (`sched_process_exec`): there is
    /// no Ruby any more, or the kernel alone. That is long on an emulated machine.
    pub between: bool,
    /// Samples that each must have at least. On a shared machine, time that the
    /// hypervisor gave to others counts as CPU time of the process and has no
    /// ticks; how many of the ticks that there were arrive is the matter of another
    /// check.
    pub enough: usize,
}

impl Pace {
    /// Of real machines: 80 samples are due.
    pub const HOST: Self = Self {
        frequency: 199,
        busy_ms: 400,
        shell_rounds: 300_000,
        linger: "0",
        collector: true,
        between: false,
        enough: 10,
    };
    /// Of emulated machines: 30 samples are due.
    pub const EMULATED: Self = Self {
        frequency: 97,
        busy_ms: 300,
        shell_rounds: 40_000,
        linger: "3",
        collector: false,
        between: true,
        enough: 10,
    };
}

/// A program, its child, that one's child and a thread of that have each their own
/// samples; what they ran besides Ruby has none of Ruby: how many samples of Ruby
/// there were.
///
/// # Errors
/// If a sample is of another process or thread than its stack, or one of them has
/// hardly any.
pub fn children_are_recorded(ruby: &Installed, pace: Pace) -> Result<Option<usize>> {
    let name = ruby.name;
    let mut command = ruby.script(&rig::workload("processes.rb"))?;
    command
        .arg("wait")
        .env("BUSY_MS", pace.busy_ms.to_string())
        .env("SHELL_ROUNDS", pace.shell_rounds.to_string())
        .env("LINGER", pace.linger);
    if !pace.collector {
        command.env("NO_COLLECTOR", "1");
    }
    let mut target = Target::start(&mut command)?;
    target.wait_for("ready")?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: pace.frequency,
        ring_bytes: rig::ring_bytes(),
        ..Options::default()
    })?
    else {
        return Ok(None);
    };
    recorder.start(&[target.pid()])?;
    target.go_on()?;
    let mut said = Vec::new();
    recorder.run_until(|| target.listen("finished", &mut said))?;
    let recording = recorder.finish()?;

    let processes: HashMap<&str, u32> = said
        .iter()
        .filter_map(|line| line.strip_prefix("process\t")?.split_once('\t'))
        .map(|(name, pid)| Ok((name, pid.parse()?)))
        .collect::<Result<_>>()?;
    ensure!(processes.len() == 3, "{said:?}");
    ensure!(processes["parent"] == target.pid(), "{processes:?}");

    let mut counts: HashMap<&str, usize> = HashMap::new();
    for seen in &recording.seen {
        // Children have their parents' frames below their own.
        let Some(place) = innermost(seen, "Object#in_") else {
            continue;
        };
        let (process, thread) = match place {
            "Object#in_parent" => ("parent", false),
            "Object#in_child" => ("child", false),
            "Object#in_grandchild" => ("grandchild", false),
            "Object#in_thread_of_grandchild" => ("grandchild", true),
            other => anyhow::bail!("a frame {other}"),
        };
        // A child comes to life where its parent forked it.
        let forking = innermost(seen, "Kernel#fork").or(innermost(seen, "Process.fork"));
        if forking.is_some() && seen.pid != processes[process] {
            continue;
        }
        ensure!(seen.pid == processes[process], "{place} in {}", seen.pid);
        ensure!(
            (seen.tid != seen.pid) == thread,
            "{place} in thread {}",
            seen.tid
        );
        let root = if thread {
            "block in Object#in_grandchild"
        } else {
            "<main>"
        };
        ensure!(
            seen.frames
                .last()
                .is_some_and(|frame| &*frame.function.label == root),
            "{place} below {:?}",
            seen.frames.last()
        );
        *counts.entry(place).or_default() += 1;
    }
    eprintln!("{name}: {counts:?}");
    for place in ["parent", "child", "grandchild", "thread_of_grandchild"] {
        let count = counts.get(&*format!("Object#in_{place}")).copied();
        ensure!(count >= Some(pace.enough), "{place}: {count:?} samples");
    }

    // The shell's own work is in the profile, and nobody's Ruby code.
    let profile = &recording.profile;
    let mut of_shell = HashMap::<String, u64>::new();
    let mut of_kernel_alone = 0;
    for (stack, labels, count) in profile.counts() {
        let comm = profile
            .labels(labels)
            .and_then(|labels| labels.comm.clone());
        if comm.as_deref() != Some("sh") {
            continue;
        }
        let functions = || {
            let locations = profile.stack(stack);
            locations.map(|id| profile.function(profile.location(id)?.function))
        };
        let is_kernel = |function: &Option<&Arc<Function>>| {
            function.is_some_and(|function| function.kind == FunctionKind::Kernel)
        };
        // The kernel has given the process its new name, and has not told yet that it
        // runs another program: such a sample is what it says, whoever's it is.
        if !pace.between && functions().all(|function| is_kernel(&function)) {
            of_kernel_alone += count;
            continue;
        }
        for function in functions() {
            if pace.between && is_kernel(&function) {
                continue;
            }
            let label = function.map_or("", |function| &function.label);
            *of_shell.entry(label.to_owned()).or_default() += count;
        }
    }
    eprintln!("{name}: the shell: {of_shell:?}");
    // It can be told for what it is only after the first look at it.
    let not_ruby = of_shell.remove("(not Ruby: sh)").unwrap_or(0);
    let starting = of_shell.remove("(starting: sh)").unwrap_or(0);
    if pace.between {
        // Between the old program's end and the word of it.
        let on_the_way = ["(unreadable Ruby stack)", "(Ruby starting)"]
            .into_iter()
            .filter_map(|marker| of_shell.remove(marker))
            .sum::<u64>();
        ensure!(
            on_the_way <= 1,
            "{on_the_way} samples while it was replaced"
        );
    }
    ensure!(
        of_kernel_alone <= 1,
        "{of_kernel_alone} samples of the kernel alone"
    );
    ensure!(of_shell.is_empty(), "the shell: {of_shell:?}");
    ensure!(not_ruby > starting, "{not_ruby} after {starting}");
    Ok(Some(counts.values().sum()))
}

/// The innermost frame whose label begins so.
#[must_use]
pub fn innermost<'a>(seen: &'a Seen, prefix: &str) -> Option<&'a str> {
    seen.frames
        .iter()
        .map(|frame| &*frame.function.label)
        .find(|label| label.starts_with(prefix))
}
