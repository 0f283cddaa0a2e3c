//! Every sample is of its own thread.

#![expect(
    clippy::indexing_slicing,
    reason = "a check that looks past the end has failed"
)]

use std::collections::HashMap;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::recording::Recording;
use crate::rig;
use crate::target::Target;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// Samples of each of the two busy threads that are enough.
    pub enough: usize,
    /// Samples of the thread without the lock that are enough.
    pub enough_without_lock: usize,
}

impl Pace {
    /// Of real machines.
    pub const HOST: Self = Self {
        frequency: 199,
        enough: 150,
        enough_without_lock: 20,
    };
    /// Of emulated machines.
    pub const EMULATED: Self = Self {
        frequency: 97,
        enough: 60,
        enough_without_lock: 20,
    };
}

/// When a thread's Ruby stack can be found.
#[derive(Clone, Copy, PartialEq)]
enum OwnContext {
    Always,
    /// Before Ruby 3.0 there is one pointer, to the context of the thread that
    /// has Ruby's lock.
    OnlyWithTheLock,
}

impl OwnContext {
    fn of(ruby: &Installed) -> Self {
        if ruby.version.starts_with("2.") {
            Self::OnlyWithTheLock
        } else {
            Self::Always
        }
    }
}

/// Each sample of a program with four threads has the stack of the thread that it
/// is of: how many samples there were.
///
/// # Errors
/// If one has another stack, or the idle thread has many.
pub fn threads_are_told_apart(ruby: &Installed, pace: Pace) -> Result<Option<u64>> {
    let own_context = OwnContext::of(ruby);
    let mut target = Target::start(&mut ruby.script(&rig::workload("threads.rb"))?)?;
    let tids = thread_ids(&target.wait_for("ready")?)?;
    let Some(mut recorder) = Recorder::new(&Options {
        frequency: pace.frequency,
        ..Options::default()
    })?
    else {
        return Ok(None);
    };
    recorder.start(&[target.pid()])?;
    target.go_on()?;
    target.wait_for("finished")?;
    let seen = recorder.seen();
    recorder.run_until(|| {
        let of = |name: &str| seen.count(|seen| seen.tid == tids[name]);
        let of_gamma = match own_context {
            OwnContext::Always => of("gamma") >= pace.enough_without_lock,
            // They have no frames to be seen by.
            OwnContext::OnlyWithTheLock => true,
        };
        Ok(of("alpha") >= pace.enough && of("beta") >= pace.enough && of_gamma)
    })?;
    let recording = recorder.finish()?;
    target.go_on()?;
    ensure!(target.end()?.success(), "the target failed");

    let mut frames_of_gamma = 0;
    for seen in &recording.seen {
        // Machine code alone: of a thread that has no context at that moment.
        if seen.frames.is_empty() {
            continue;
        }
        let (name, _) = tids
            .iter()
            .find(|&(_, &tid)| tid == seen.tid)
            .with_context(|| format!("a sample of thread {}", seen.tid))?;
        let labels: Vec<&str> = seen
            .frames
            .iter()
            .rev()
            .map(|frame| &*frame.function.label)
            .collect();
        let (root, own) = match name.as_str() {
            "alpha" => ("block in Object#start", Some("Alpha#work")),
            "beta" => ("block in Object#start", Some("Beta#work")),
            "gamma" => ("block in Object#start", Some("Gamma#work")),
            _ => ("<main>", None),
        };
        frames_of_gamma += usize::from(name == "gamma");
        ensure!(
            labels.first() == Some(&root) && own.is_none_or(|own| labels.get(1) == Some(&own)),
            "a sample of {name}, outermost first: {labels:?}"
        );
        if name != "main" {
            ensure!(seen.comm == *name, "{name} is called {}", seen.comm);
        }
    }

    let by_thread = samples_by_thread(&recording);
    let of = |name: &str| by_thread.get(&tids[name]).copied().unwrap_or_default();
    eprintln!(
        "{}: (with frames, without) alpha {:?}, beta {:?}, gamma {:?}, main {:?}",
        ruby.name,
        of("alpha"),
        of("beta"),
        of("gamma"),
        of("main")
    );
    let all = recording.profile.total();
    ensure!(of("main").0 * 20 < all, "main was idle: {:?}", of("main"));
    match own_context {
        OwnContext::Always => {
            // Without the lock too, gamma has its own stack.
            ensure!(
                frames_of_gamma >= pace.enough_without_lock,
                "gamma: {frames_of_gamma}"
            );
        }
        OwnContext::OnlyWithTheLock => {
            // Without the lock, nothing is known of gamma's stack.
            ensure!(of("gamma").1 > 0, "gamma: {:?}", of("gamma"));
        }
    }
    Ok(Some(all))
}

fn thread_ids(lines: &[String]) -> Result<HashMap<String, u32>> {
    let ids: HashMap<String, u32> = lines
        .iter()
        .filter_map(|line| {
            let mut fields = line.split('\t');
            let is_thread = fields.next() == Some("thread");
            let name = fields.next()?.to_owned();
            let tid = fields.next()?.parse().ok()?;
            is_thread.then_some((name, tid))
        })
        .collect();
    ensure!(ids.len() == 4, "{lines:?}");
    Ok(ids)
}

/// Samples with Ruby frames and without, as the profile has them.
fn samples_by_thread(recording: &Recording) -> HashMap<u32, (u64, u64)> {
    let mut samples: HashMap<u32, (u64, u64)> = HashMap::new();
    let mut with_frames: HashMap<u32, u64> = HashMap::new();
    // Frames of Ruby: those of the kernel are there in any case.
    for seen in recording.seen.iter().filter(|it| !it.frames.is_empty()) {
        *with_frames.entry(seen.tid).or_default() += 1;
    }
    let profile = &recording.profile;
    for (_, labels, count) in profile.counts() {
        let tid = profile.labels(labels).map_or(0, |labels| labels.tid);
        samples.entry(tid).or_default().1 += count;
    }
    for (tid, (with, without)) in &mut samples {
        *with = with_frames.get(tid).copied().unwrap_or(0);
        *without -= *with;
    }
    samples
}
