//! `rbprof record`.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitCode;
use std::process::ExitStatus;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;
use tokio::time::MissedTickBehavior;

use super::plan::Output;
use super::plan::Plan;
use super::plan::Subject;
use super::progress::Progress;
use super::progress::State;
use crate::layouts;
use crate::output;
use crate::output::Destination;
use crate::output::SaveError;
use crate::output::top::TopOptions;
use crate::presentation::NativeFrames;
use crate::privileges;
use crate::profile::Profile;
use crate::session::Session;

/// How often the ring is looked at without being woken up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Width of the table where the terminal does not say its own.
const DEFAULT_WIDTH: usize = 100;
/// Longer than any recording.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// What log messages of the eBPF programs are marked with: their crate.
const EBPF_TARGET: &str = "rbprof_ebpf";
/// Exit status of a program that Ctrl-C ended, as shells have it.
const INTERRUPTED: i32 = 130;
/// Methods in the table.
const TABLE_ROWS: usize = 20;

/// Records, writes, and says where.
pub(super) fn run(plan: Plan) -> anyhow::Result<ExitCode> {
    if plan.kernel.log {
        log_to_stderr();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the asynchronous runtime")?;
    runtime.block_on(record(plan))
}

/// What is being recorded, once it runs.
struct Running {
    /// The processes whose end ends the recording.
    pids: Vec<u32>,
    child: Option<Child>,
}

async fn record(plan: Plan) -> anyhow::Result<ExitCode> {
    // Files are tried before anything is recorded for them.
    let pid = match &plan.subject {
        Subject::Processes(pids) => pids.first().copied().unwrap_or_default(),
        Subject::Command(_) => 0,
    };
    for output in plan.outputs_for(pid) {
        output.destination.check()?;
    }

    let layout = plan.layout.as_deref().map(layouts::read).transpose()?;

    let mut stop = Stop::new()?;
    let mut session = Session::new(&plan.kernel)?;
    session.present(plan.presentation);
    // Before any thread is started, and after what takes more than the rest:
    // raising the limit of locked memory.
    give_up_privileges(&plan);
    if let (Some(layout), Some(path)) = (layout, &plan.layout) {
        session.use_layout(layout, &path.display().to_string());
    }
    match plan.presentation.native {
        NativeFrames::None => {}
        NativeFrames::Extensions => session.walk_native(true)?,
        NativeFrames::All => session.walk_native(false)?,
    }
    let mut running = begin(&plan, &mut session)?;
    let watched = watch(&plan, &mut session, &mut running, &mut stop).await;
    Stop::second_ends_at_once();

    // Whatever ended the recording: what was collected is written first.
    let left: Vec<u32> = session
        .targets()
        .filter(|pid| !running.pids.contains(pid))
        .collect();
    let profile = session.finish();
    let pid = running.pids.first().copied().unwrap_or_default();
    let outputs = plan.outputs_for(pid);
    let (written, failed) = write_all(&profile, &outputs);
    if !plan.quiet {
        report(&profile, &written);
        if plan.duration.is_none() && !left.is_empty() {
            let left: Vec<String> = left.iter().map(u32::to_string).collect();
            say(&format!(
                "not recorded any more, but still running: {}; with -d, children are recorded \
                 after the end of their parent\n",
                left.join(", ")
            ));
        }
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    let status = watched?;
    if let Some(child) = &mut running.child {
        // The recording may be over before the command is.
        let status = match status {
            Some(status) => status,
            None => {
                let ended = child.try_wait().context("waiting for the command")?;
                if ended.is_none() && !plan.quiet {
                    say("waiting for the command to end; Ctrl-C stops waiting\n");
                }
                child.wait().await.context("waiting for the command")?
            }
        };
        return Ok(exit_code(status));
    }
    Ok(ExitCode::SUCCESS)
}

/// Goes on with what the rest of the recording takes.
fn give_up_privileges(plan: &Plan) {
    let outputs = plan.outputs_for(0);
    let files = outputs
        .iter()
        .filter_map(|output| match &output.destination {
            Destination::Stdout => None,
            Destination::File(path) => Some(path.as_path()),
        });
    let starts_command = matches!(plan.subject, Subject::Command(_));
    if let Err(error) = privileges::give_up_the_rest(files, starts_command)
        && !plan.quiet
    {
        say(&format!(
            "recording with more privileges than it takes: giving them up: {error}\n"
        ));
    }
}

/// Takes samples until the time is over, somebody asks to finish, or the
/// targets have ended. Gives the status of the command, if that has ended.
async fn watch(
    plan: &Plan,
    session: &mut Session,
    running: &mut Running,
    stop: &mut Stop,
) -> anyhow::Result<Option<ExitStatus>> {
    let started = Instant::now();
    let mut progress = Progress::new(plan.quiet);
    let mut status = None;
    let wakeup = session.wakeup()?;
    // SAFETY: the descriptor is owned by what is registered, so it stays open
    // and the same until it is deregistered.
    let ring = unsafe { AsyncFd::register_with_interest(wakeup, Interest::READABLE) }
        .context("watching the ring buffer")?;
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    let mut second = tokio::time::interval(Duration::from_secs(1));
    for timer in [&mut poll, &mut second] {
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    let deadline = tokio::time::sleep(plan.duration.unwrap_or(FOREVER));
    tokio::pin!(deadline);
    loop {
        tokio::select! {
            guard = ring.readable() => {
                // Cleared first: what comes during the poll wakes again.
                guard.context("watching the ring buffer")?.clear_ready();
                session.poll()?;
            }
            _ = poll.tick() => session.poll()?,
            _ = second.tick() => session.every_second()?,
            () = &mut deadline => break,
            () = stop.asked() => break,
            ended = wait(&mut running.child), if status.is_none() => {
                status = Some(ended.context("waiting for the command")?);
                session.poll()?;
                if plan.duration.is_none() {
                    break;
                }
            }
        }
        // With a duration, children go on to be recorded after their parent.
        let over = match plan.duration {
            Some(_) => !session.has_targets(),
            None => !running.pids.iter().any(|&pid| session.is_target(pid)),
        };
        if over {
            break;
        }
        if progress.is_due() {
            progress.draw(&state_of(session, started, plan.duration));
        }
    }
    progress.clear();
    Ok(status)
}

/// Attaches to the processes, or starts the command.
fn begin(plan: &Plan, session: &mut Session) -> anyhow::Result<Running> {
    match &plan.subject {
        Subject::Processes(pids) => {
            for &pid in pids {
                session.attach(pid)?;
            }
            session.start()?;
            Ok(Running {
                pids: pids.clone(),
                child: None,
            })
        }
        Subject::Command(program) => {
            session.start()?;
            let child = session.spawning(|| start(program))??;
            let pid = child
                .id()
                .context("the command ended before it could be profiled")?;
            let words: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
            session.name_started(pid, &words.join(" "));
            Ok(Running {
                pids: vec![pid],
                child: Some(child),
            })
        }
    }
}

fn start(program: &[OsString]) -> anyhow::Result<Child> {
    let (name, arguments) = program.split_first().context("no command given")?;
    tokio::process::Command::new(name)
        .args(arguments)
        .spawn()
        .with_context(|| format!("cannot start {}", name.display()))
}

async fn wait(child: &mut Option<Child>) -> std::io::Result<ExitStatus> {
    match child {
        Some(child) => child.wait().await,
        None => std::future::pending().await,
    }
}

/// The command's status as this process's own, as a shell would give it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}

fn state_of(session: &Session, started: Instant, planned: Option<Duration>) -> State {
    let account = session.account();
    State {
        elapsed: started.elapsed(),
        planned,
        samples: account.with_frames + account.without_frames,
        lost: account.lost_frames,
        threads: session.profile().threads(),
    }
}

/// Writes everything that can be written, and gives that, and the first error.
fn write_all<'a>(
    profile: &Profile,
    outputs: &'a [Output],
) -> (Vec<&'a Destination>, Option<SaveError>) {
    let mut written = Vec::new();
    let mut failed = None;
    for Output {
        destination,
        format,
    } in outputs
    {
        match destination.save(|out| output::write(profile, *format, out)) {
            // The reader has seen enough.
            Err(error) if error.is_broken_pipe() => {}
            Err(error) => {
                failed.get_or_insert(error);
            }
            Ok(()) => written.push(destination),
        }
    }
    (written, failed)
}

/// The table of the top methods, and where the files are.
fn report(profile: &Profile, written: &[&Destination]) {
    let options = TopOptions {
        rows: TABLE_ROWS,
        width: terminal_width().unwrap_or(DEFAULT_WIDTH),
    };
    let mut text = output::top::render(profile, options);
    for destination in written {
        if **destination != Destination::Stdout {
            text.push_str(&format!("wrote {destination}\n"));
        }
    }
    say(&text);
}

/// Writes to standard error: standard output may be the profile's, or belong to
/// the command.
fn say(text: &str) {
    // Nobody may be listening; the files are what counts.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}

/// Columns of the terminal on standard error.
fn terminal_width() -> Option<usize> {
    terminal_size::terminal_size_of(std::io::stderr())
        .map(|(terminal_size::Width(columns), _)| usize::from(columns))
        .filter(|&columns| columns >= 40)
}

/// Signals that ask to finish.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }

    /// From now on another Ctrl-C ends the program, even while a file is being
    /// written.
    fn second_ends_at_once() {
        std::thread::spawn(|| -> anyhow::Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                Self::new()?.asked().await;
                std::process::exit(INTERRUPTED);
            })
        });
    }
}

/// Sends what the eBPF programs log to standard error.
fn log_to_stderr() {
    struct Stderr;
    impl log::Log for Stderr {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            // Libraries in user space have things to say, too.
            metadata.target().starts_with(EBPF_TARGET)
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                say(&format!("[bpf {}] {}\n", record.level(), record.args()));
            }
        }
        fn flush(&self) {}
    }
    static LOGGER: Stderr = Stderr;
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
}
