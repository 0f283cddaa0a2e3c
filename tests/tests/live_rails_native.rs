//! Native stacks of a program that nobody here wrote: Rails under load, on
//! Debian's Ruby and on one with YJIT. Every sample counts, from the first on;
//! `RBPROF_RAILS_SECONDS` says for how long it is recorded.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::symbolize::Resolved;
use rbprof_common::wire::Counter;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::object as objects;
use rbprof_common::wire::sample_flags;
use rbprof_tests::native;
use rbprof_tests::native::Code;
use rbprof_tests::native::Defect;
use rbprof_tests::native::End;
use rbprof_tests::rails;
use rbprof_tests::rails::Server;
use rbprof_tests::rails::ThreadStarts;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Recording;
use rbprof_tests::recording::Seen;
use rbprof_tests::share::is_within;
use xtask::rubies::rails::Interpreter;

/// Puma's threads.
const THREADS: u32 = 4;
/// Those that use the application, each of which waits for one answer at a time.
const CLIENTS: usize = 6;
/// Requests before the recording: everything is loaded, and YJIT has compiled
/// what is called often.
const WARM_UP: u64 = 200;
/// Says for how many seconds it is recorded.
const SECONDS: &str = "RBPROF_RAILS_SECONDS";
const DEFAULT_SECONDS: u64 = 10;
const FREQUENCY: u64 = 199;
/// Samples that are enough to speak of shares.
const ENOUGH: u64 = 1000;
/// What comes first is told apart.
const EARLY_NS: u64 = 1000000000;
/// Largest share of samples that do not reach their root.
const WITHOUT_ROOT: f64 = 0.005;
/// Largest share of samples with a stack that cannot be.
const INVALID: f64 = 0.001;
/// What stands for a name that was not read or not believed.
const NO_NAMES: [&str; 2] = ["<unreadable>", "<unknown cfunc>"];

/// One of them at a time, or they would share the processor.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn on_debians_ruby() -> Result<()> {
    stacks_are_whole_and_valid(Interpreter::Debian)
}

#[test]
fn with_yjit() -> Result<()> {
    stacks_are_whole_and_valid(Interpreter::Yjit)
}

fn stacks_are_whole_and_valid(interpreter: Interpreter) -> Result<()> {
    let Some(rails) = rails::find()? else {
        return Ok(());
    };
    let options = Options {
        frequency: FREQUENCY,
        ..Options::default()
    };
    let Some(mut recorder) = Recorder::new(&options)? else {
        return Ok(());
    };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seconds = match std::env::var(SECONDS) {
        Ok(seconds) => seconds.parse().context(SECONDS)?,
        Err(_) => DEFAULT_SECONDS,
    };
    let server = Server::start(&rails, interpreter, THREADS)?;
    let load = server.load(CLIENTS);
    load.wait_for(WARM_UP)?;
    let before = load.answers();
    recorder.session().walk_native(false)?;
    recorder.start(&[server.pid()])?;
    let start = Instant::now();
    recorder.run_until(|| Ok(start.elapsed() >= Duration::from_secs(seconds)))?;
    let during = load.answers() - before;
    recorder.session().kernel().stop()?;
    let objects = recorder.session().objects().context("no objects")?;
    let mut code = Code::of(server.pid(), objects)?;
    let recording = recorder.finish()?;
    load.finish()?;
    ensure!(during > 0, "no request was answered during the recording");

    let figures = Figures::of(&recording, &mut code, &mut ThreadStarts::new(&rails))?;
    eprintln!("{interpreter:?}: {seconds} s, {during} requests, {figures:#?}");
    let Figures {
        samples,
        from_root,
        invalid,
        ..
    } = figures;
    eprintln!(
        "{:.2} % reach their root, {:.3} % are invalid",
        100.0 * from_root as f64 / samples as f64,
        100.0 * invalid as f64 / samples as f64
    );
    ensure!(samples >= ENOUGH, "only {samples} samples");
    ensure!(
        is_within(samples - from_root, samples, WITHOUT_ROOT),
        "{from_root} of {samples} samples reach their root"
    );
    ensure!(
        is_within(invalid, samples, INVALID),
        "{invalid} of {samples} samples have an invalid stack"
    );
    ensure!(
        (interpreter == Interpreter::Yjit) == (figures.compiled > 0),
        "{} samples go through compiled code",
        figures.compiled
    );
    Ok(())
}

/// How many samples are so.
#[derive(Debug, Default)]
struct Figures {
    /// All that were due.
    samples: u64,
    /// Of those: lost, or of a thread whose context cannot be.
    without_stack: u64,
    bad_context: u64,
    /// With a Ruby frame.
    ruby: u64,
    /// With a frame of code that a compiler of Ruby's made.
    compiled: u64,
    /// Whose native stack reaches the start of the thread or the program, or a
    /// fiber's.
    native_root: u64,
    /// Whose Ruby frames, if they have any, go on to where the thread starts.
    ruby_root: u64,
    /// Both.
    from_root: u64,
    /// In the first second, and of those: not from their root.
    early: u64,
    early_without_root: u64,
    /// With a stack that cannot be.
    invalid: u64,
    /// Of a thread that enters or leaves an activation: put in order.
    united: u64,
    /// Frames of machine code, and all frames, of all stacks.
    native_frames: u64,
    frames: u64,
    /// Where native stacks end that are whole.
    roots: BTreeMap<End, u64>,
    /// Where the others end, and why.
    cuts: BTreeMap<End, u64>,
    /// What the outermost Ruby frame is called where it is no thread's first.
    other_roots: BTreeMap<String, u64>,
    /// How often each defect was met, and the places.
    defects: BTreeMap<(Defect, String), u64>,
}

impl Figures {
    fn of(recording: &Recording, code: &mut Code, starts: &mut ThreadStarts<'_>) -> Result<Self> {
        let mut figures = Self {
            samples: recording.counters.get(Counter::Hit) - recording.account.own,
            bad_context: recording.counters.get(Counter::BadContext),
            ..Self::default()
        };
        // A name may be withheld; the same frame has it elsewhere.
        let mut first_frames: HashMap<u64, bool> = HashMap::new();
        for seen in &recording.seen {
            if let Some((iseq, name)) = outermost(seen)
                && !NO_NAMES.contains(&&*name.function.label)
            {
                let is_start = starts.include(name);
                first_frames.insert(iseq, is_start);
            }
        }
        let seen = u64::try_from(recording.seen.len())?;
        figures.without_stack = figures.samples.saturating_sub(seen);
        figures.invalid = figures.bad_context;
        let begin = recording.seen.first().map_or(0, |seen| seen.time);
        for seen in &recording.seen {
            figures.frames += u64::try_from(seen.stack.len())?;
            let natives = seen.stack.iter().filter(|it| !native::is_of_ruby(it));
            figures.native_frames += u64::try_from(natives.count())?;
            let end = code.end(seen)?;
            let native = !matches!(end, End::Cut(_));
            let ends = if native {
                &mut figures.roots
            } else {
                &mut figures.cuts
            };
            *ends.entry(end).or_default() += 1;
            let ruby = match outermost(seen) {
                None => !seen.stack.iter().any(native::is_of_ruby),
                Some((iseq, name)) => {
                    figures.ruby += 1;
                    let is_first = first_frames.get(&iseq).copied().unwrap_or(false);
                    if !is_first {
                        let label = name.function.label.to_string();
                        *figures.other_roots.entry(label).or_default() += 1;
                    }
                    is_first && seen.flags & sample_flags::INCOMPLETE == 0
                }
            };
            figures.native_root += u64::from(native);
            figures.ruby_root += u64::from(ruby);
            figures.from_root += u64::from(native && ruby);
            if seen.time - begin < EARLY_NS {
                figures.early += 1;
                figures.early_without_root += u64::from(!(native && ruby));
            }
            let is_compiled =
                |it: &Frame| it.kind() == frame_kind::NATIVE && it.object() == objects::ANONYMOUS;
            figures.compiled += u64::from(seen.stack.iter().any(is_compiled));
            figures.united +=
                u64::from(seen.flags & !seen.stack_flags & sample_flags::UNMATCHED != 0);
            let defects = code.defects(seen);
            figures.invalid += u64::from(!defects.is_empty());
            for defect in defects {
                *figures.defects.entry(defect).or_default() += 1;
            }
        }
        Ok(figures)
    }
}

/// The outermost Ruby frame, if it ends the stack: its code, and its name.
fn outermost(seen: &Seen) -> Option<(u64, &Resolved)> {
    let frame = seen.stack.iter().rfind(|it| native::is_of_ruby(it))?;
    let name = seen.frames.last()?;
    frame
        .has(frame_attr::FINISH)
        .then_some((frame.iseq(), name))
}
