//! A Rails application under load, on Debian's Ruby and on one with YJIT: code
//! that nobody here wrote is seen from its thread's start to its leaf.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::Result;
use anyhow::ensure;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Resolved;
use rbprof_tests::pprof;
use rbprof_tests::pprof::Read;
use rbprof_tests::rails;
use rbprof_tests::rails::Server;
use rbprof_tests::rails::ThreadStarts;
use rbprof_tests::share::is_within;
use xtask::rubies::Rails;
use xtask::rubies::rails::Interpreter;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// Puma's threads.
const THREADS: u32 = 4;
/// Those that use the application, each of which waits for one answer at a time.
const CLIENTS: usize = 6;
/// Requests before the recording: everything is loaded, and YJIT has compiled
/// what is called often.
const WARM_UP: u64 = 200;
/// Samples that are enough to speak of shares.
const ENOUGH: u64 = 200;
/// Least share of samples with Ruby frames whose stack reaches its root, percent,
/// where the root's name is known.
const FROM_ROOT: u64 = 99;
/// Least share of samples with Ruby frames that are in Rails, percent: what else
/// there is, is Puma's own work.
const IN_RAILS: u64 = 60;
/// Largest share of samples with a frame without its name, percent. A name that is
/// needed for the first time is not believed if Ruby's collector has run since the
/// sample, and under such a load it runs often.
const NAMELESS: u64 = 10;
/// What stands for a name that was not read or not believed.
const NO_NAMES: [&str; 2] = ["<unreadable>", "<unknown cfunc>"];

/// Functions with which a program or a thread starts, and the files that they are
/// in where their names were stripped.
const STARTS: [&str; 4] = ["_start", "clone3", "__clone3", "clone"];
const NAMELESS_STARTS: [&str; 2] = ["[libc.so", "[ruby"];
/// Largest share of samples whose native stack does not reach one of them.
const WITHOUT_START: f64 = 0.005;

#[test]
fn on_debians_ruby() -> Result<()> {
    requests_are_seen(Interpreter::Debian)
}

#[test]
fn with_yjit() -> Result<()> {
    requests_are_seen(Interpreter::Yjit)
}

fn requests_are_seen(interpreter: Interpreter) -> Result<()> {
    let Some(rails) = rails::find()? else {
        return Ok(());
    };
    let server = Server::start(&rails, interpreter, THREADS)?;
    let load = server.load(CLIENTS);
    load.wait_for(WARM_UP)?;
    let before = load.answers();
    let profile = record(server.pid(), &[])?;
    let during = load.answers() - before;
    let with_all = record(server.pid(), &["--native=all"])?;
    load.finish()?;
    ensure!(during > 0, "no request was answered during the recording");

    let shares = Shares::of(&profile, &rails)?;
    eprintln!("{interpreter:?}: {during} requests, {shares:#?}");
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    let (mut all, mut whole) = (0, 0);
    for sample in &with_all.samples {
        all += sample.count;
        let Some(outermost) = sample.frames.last() else {
            continue;
        };
        if starts_thread(outermost) {
            whole += sample.count;
        } else {
            let end = outermost.function.label.to_string();
            *ends.entry(end).or_default() += sample.count;
        }
    }
    eprintln!("{whole} of {all} native stacks are whole");
    ensure!(all >= ENOUGH, "{all} samples");
    ensure!(
        is_within(all - whole, all, WITHOUT_START),
        "{whole} of {all} native stacks are whole; others end in {ends:?}"
    );
    let Shares {
        samples,
        ruby,
        from_root,
        in_rails,
        in_application,
        nameless,
        nameless_root,
        ref other_roots,
    } = shares;
    ensure!(ruby >= ENOUGH, "{ruby} of {samples} samples have frames");
    ensure!(
        from_root * 100 >= (ruby - nameless_root) * FROM_ROOT,
        "{from_root} of {ruby} samples reach their root; others end in {other_roots:?}"
    );
    ensure!(
        in_rails * 100 >= ruby * IN_RAILS,
        "{in_rails} of {ruby} samples are in Rails"
    );
    ensure!(
        nameless * 100 <= ruby * NAMELESS,
        "{nameless} of {ruby} samples have frames without a name"
    );
    ensure!(in_application > 0, "no sample is in the application");
    Ok(())
}

/// Whether a frame is machine code with which the program or a thread starts.
fn starts_thread(frame: &Resolved) -> bool {
    let Function { kind, label, .. } = &*frame.function;
    *kind == FunctionKind::Native
        && (STARTS.contains(&&**label) || NAMELESS_STARTS.iter().any(|it| label.starts_with(it)))
}

/// Records that process for a few seconds, as a user would, with `more`
/// arguments.
fn record(pid: u32, more: &[&str]) -> Result<Read> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("profile.pb.gz");
    let output = Command::new(RBPROF)
        .args(["record", "-q", "-F", "199", "-d", "5"])
        .args(more)
        .args(["--pid", &pid.to_string(), "-o"])
        .arg(&file)
        .output()?;
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    pprof::read(&std::fs::read(&file)?)
}

/// How many samples of a profile are so.
#[derive(Debug, Default)]
struct Shares {
    /// All.
    samples: u64,
    /// With a Ruby frame.
    ruby: u64,
    /// Of those: whose outermost Ruby frame is where a thread starts.
    from_root: u64,
    /// Of those with a Ruby frame: with a method of Rails among their frames.
    in_rails: u64,
    /// Of those with a Ruby frame: with code of the application itself.
    in_application: u64,
    /// Of those with a Ruby frame: with a frame without its name.
    nameless: u64,
    /// Of those: whose outermost Ruby frame is such a one.
    nameless_root: u64,
    /// The outermost frames of those that do not start where a thread does.
    other_roots: BTreeMap<String, u64>,
}

impl Shares {
    fn of(profile: &Read, rails: &Rails) -> Result<Self> {
        let mut shares = Self::default();
        let mut starts = ThreadStarts::new(rails);
        for sample in &profile.samples {
            shares.samples += sample.count;
            let has = |part: &str| {
                let mut frames = sample.frames.iter();
                frames.any(|frame| frame.function.file.contains(part))
            };
            // Without its name, a frame is read as a marker.
            let without_name = |frame: &Resolved| NO_NAMES.contains(&&*frame.function.label);
            let is_ruby = |frame: &&Resolved| {
                let kind = frame.function.kind;
                matches!(kind, FunctionKind::Ruby | FunctionKind::CFunction) || without_name(frame)
            };
            let Some(outermost) = sample.frames.iter().rfind(is_ruby) else {
                continue;
            };
            shares.ruby += sample.count;
            // Any other marker at the end says that there is more.
            let last = sample.frames.last();
            let whole = last.is_some_and(|last| {
                last.function.kind != FunctionKind::Marker || without_name(last)
            });
            if whole && starts.include(outermost) {
                shares.from_root += sample.count;
            } else if whole && without_name(outermost) {
                shares.nameless_root += sample.count;
            } else {
                let label = outermost.function.label.to_string();
                *shares.other_roots.entry(label).or_default() += sample.count;
            }
            // Every request passes through Action Dispatch.
            if has("/gems/actionpack-") {
                shares.in_rails += sample.count;
            }
            if has("/srv/blog/app/") {
                shares.in_application += sample.count;
            }
            if sample.frames.iter().any(without_name) {
                shares.nameless += sample.count;
            }
        }
        Ok(shares)
    }
}
