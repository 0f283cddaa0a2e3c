//! Native and Ruby frames as one stack, at stopping points of which everything
//! is known: the program is stopped where the kernel half samples it; framehop
//! walks the native stack from there; and the program itself says what Ruby
//! frames it has.
#![cfg(target_arch = "x86_64")]

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use object::Object as _;
use object::ObjectSection as _;
use object::ObjectSymbol as _;
use rbprof::kernel::Options;
use rbprof_common::Fault;
use rbprof_common::Memory as _;
use rbprof_common::unwind::Stepped;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::object as objects;
use rbprof_common::wire::sample_flags;
use rbprof_tests::frames;
use rbprof_tests::frames::Jit;
use rbprof_tests::points;
use rbprof_tests::recording::Recorder;
use rbprof_tests::recording::Seen;
use rbprof_tests::rig;
use rbprof_tests::stopped::Process;
use rbprof_tests::stopped::registers;
use rbprof_tests::stopped::trace;
use rbprof_tests::target::Target;

/// Rounds at each point; one more stop than that.
const ROUNDS: &str = "5";
/// What each round calls, and what that calls in the C library.
const METHOD: &str = "Integer#<";
const FUNCTION: &str = "modf";

/// A stop: the thread, and its native stack as framehop has it.
struct Stop {
    tid: u32,
    /// The addresses that were looked up, leaf first; empty under a JIT, which
    /// framehop does not know.
    native: Vec<u64>,
}

/// Where the interpreter's calls of the function end up: the file, and the place
/// in it. The C library may have several and choose one for the machine, so it
/// is looked up where the loader has written it down.
fn place(process: &mut Process) -> Result<(PathBuf, u64)> {
    process.look()?;
    let pid = process.pid();
    for mapped in process.mapped() {
        let name = mapped.path.rsplit('/').next().unwrap_or_default();
        if !name.contains("ruby") {
            continue;
        }
        let data = std::fs::read(rig::file_of(pid, &mapped.path))?;
        let file = object::File::parse(&*data)?;
        let Some(symbol) = file
            .dynamic_symbols()
            .find(|symbol| symbol.name() == Ok(FUNCTION))
        else {
            continue;
        };
        let of_function = object::RelocationTarget::Symbol(symbol.index());
        let mut relocations = file.dynamic_relocations().into_iter().flatten();
        let (slot, _) = relocations
            .find(|(_, relocation)| relocation.target() == of_function)
            .context("the function is not called")?;
        let address = process
            .word(mapped.bias.wrapping_add(slot))
            .map_err(|Fault| anyhow::anyhow!("no relocation"))?;
        let found = process.at(address).context("the function is nowhere")?;
        let library = rig::file_of(pid, &found.path);
        let data = std::fs::read(&library)?;
        let own = address.wrapping_sub(found.bias);
        for section in object::File::parse(&*data)?.sections() {
            let inside = own.wrapping_sub(section.address());
            if let (true, Some((offset, _))) = (inside < section.size(), section.file_range()) {
                return Ok((library, offset + inside));
            }
        }
    }
    bail!("nothing calls {FUNCTION}")
}

/// Looks for a traced thread that has stopped.
fn stopped() -> Option<(i32, i32)> {
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    // SAFETY: `status` outlives the call.
    let tid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
    (tid > 0).then_some((tid, status))
}

/// Traces all threads of a process.
fn seize(pid: u32) -> Result<()> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let tid: i32 = task?.file_name().to_string_lossy().parse()?;
        trace(libc::PTRACE_SEIZE, tid, libc::PTRACE_O_TRACECLONE as usize)?;
    }
    Ok(())
}

/// What a program's stops were like, and what it said.
struct Run {
    stops: Vec<Stop>,
    said: Vec<String>,
    recording: rbprof_tests::recording::Recording,
    /// The objects of native frames: what is added to their addresses.
    biases: HashMap<u32, u64>,
    /// Their names.
    paths: HashMap<u32, String>,
}

fn run(name: &str, workload: &str, jit: Jit) -> Result<Option<Run>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(None);
    };
    let Some(mut recorder) = Recorder::new(&Options::default())? else {
        return Ok(None);
    };
    let mut command = ruby.script(&rig::workload(workload))?;
    command
        .env("RUBYOPT", jit.rubyopt())
        .env("SPIN_ROUNDS", ROUNDS);
    let mut target = Target::start(&mut command)?;
    target.wait_for("ready")?;
    let pid = NonZeroU32::new(target.pid()).context("a process")?;
    recorder.session().walk_native(false)?;
    recorder.session().attach(pid.get())?;
    let mut process = Process::new(pid.get())?;
    let (file, offset) = place(&mut process)?;
    recorder.session().start_at(pid, &file, offset)?;
    seize(pid.get())?;
    target.go_on()?;
    let mut stops = Vec::new();
    let mut said = Vec::new();
    while !target.listen("finished", &mut said)? {
        let Some((tid, status)) = stopped() else {
            std::thread::sleep(Duration::from_micros(100));
            recorder.session().poll()?;
            continue;
        };
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let (event, signal) = (status >> 16, libc::WSTOPSIG(status));
        let is_ours = event == 0 && signal == libc::SIGSTOP;
        if is_ours {
            recorder.session().poll()?;
            let native = if jit == Jit::Off {
                process.look()?;
                let walked = process.walk(registers(tid)?).context("framehop")?;
                ensure!(walked.end == Stepped::End, "{}", walked.place);
                walked.frames
            } else {
                Vec::new()
            };
            stops.push(Stop {
                tid: u32::try_from(tid)?,
                native,
            });
        }
        let pass_on = if event != 0 || is_ours { 0 } else { signal };
        trace(libc::PTRACE_CONT, tid, usize::try_from(pass_on)?)?;
    }
    process.look()?;
    let mut biases = HashMap::new();
    let mut paths = HashMap::new();
    for (number, object) in recorder.session().objects().context("no objects")?.all() {
        paths.insert(number, object.path.clone());
        if let Some(bias) = process.bias_of(&object.path) {
            biases.insert(number, bias);
        }
    }
    let recording = recorder.finish()?;
    target.go_on()?;
    // Its threads are traced, and would wait for this one at their end.
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| target.end());
        while !ended.is_finished() {
            if let Some((tid, status)) = stopped()
                && libc::WIFSTOPPED(status)
            {
                let signal = libc::WSTOPSIG(status);
                let pass_on = if status >> 16 != 0 || signal == libc::SIGSTOP {
                    0
                } else {
                    signal
                };
                // It may have gone by now.
                drop(trace(libc::PTRACE_CONT, tid, usize::try_from(pass_on)?));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok::<_, anyhow::Error>(())
    })?;
    Ok(Some(Run {
        stops,
        said,
        recording,
        biases,
        paths,
    }))
}

/// Whether a frame is one that Ruby has on its own stack.
fn is_of_ruby(frame: &Frame) -> bool {
    !matches!(
        frame.kind(),
        frame_kind::NATIVE | frame_kind::KERNEL | frame_kind::COLLECTOR
    )
}

/// As many activations of the interpreter as there are frames that end one.
fn interleaves(seen: &Seen) -> Result<()> {
    let finished = |is_ruby: bool| {
        let of_kind = seen.stack.iter().filter(|it| is_of_ruby(it) == is_ruby);
        of_kind.filter(|it| it.has(frame_attr::FINISH)).count()
    };
    let (ruby, native) = (finished(true), finished(false));
    ensure!(ruby == native, "{native} activations, {ruby} of them end");
    // Each one's Ruby frames are right above it, and end with one that says so.
    for (inner, outer) in seen.stack.iter().zip(seen.stack.iter().skip(1)) {
        let is_activation = !is_of_ruby(outer) && outer.has(frame_attr::FINISH);
        let ends_one = is_of_ruby(inner) && inner.has(frame_attr::FINISH);
        ensure!(
            is_activation == ends_one,
            "{inner:x?} is followed by {outer:x?}"
        );
    }
    // The thread is in a C function, not on its way into or out of an activation:
    // the walk itself has to get it right, not what mends such stacks afterwards.
    let incomplete = sample_flags::INCOMPLETE
        | sample_flags::UNMATCHED
        | sample_flags::NATIVE_CUT
        | sample_flags::UNMAPPED
        | sample_flags::NO_TABLE;
    ensure!(seen.flags & incomplete == 0, "flags {:#x}", seen.flags);
    Ok(())
}

/// The native frames are framehop's.
fn same_native(seen: &Seen, stop: &Stop, biases: &HashMap<u32, u64>) -> Result<()> {
    ensure!(seen.tid == stop.tid, "{} and {}", seen.tid, stop.tid);
    let mut native = Vec::new();
    for frame in seen
        .stack
        .iter()
        .filter(|it| it.kind() == frame_kind::NATIVE)
    {
        let bias = match frame.object() {
            objects::UNKNOWN | objects::ANONYMOUS => 0,
            number => *biases.get(&number).context("an object that is nowhere")?,
        };
        native.push(frame.pc.wrapping_add(bias));
    }
    // The stop is one instruction after the sample.
    let leaf = (native.first(), stop.native.first());
    let (Some(sampled), Some(stopped)) = leaf else {
        bail!("no frames: {leaf:?}");
    };
    ensure!(
        stopped.wrapping_sub(*sampled) < 16,
        "{sampled:#x}, {stopped:#x}"
    );
    ensure!(
        native.get(1..) == stop.native.get(1..),
        "{native:x?}, not {:x?}",
        stop.native
    );
    Ok(())
}

/// Every stop is as framehop has it, and native and Ruby frames fit together.
fn compare(name: &str, jit: Jit, run: &Run, enough: usize, depth: usize) -> Result<()> {
    let Run {
        stops,
        recording,
        biases,
        paths,
        ..
    } = run;
    let sampled = recording.seen.len();
    ensure!(
        sampled == stops.len(),
        "{sampled} samples, {} stops",
        stops.len()
    );
    ensure!(sampled >= enough, "only {sampled} stops");
    let mut compiled = 0;
    let mut deepest = 0;
    // The kernel half tells in order, the stops were seen in order.
    for (seen, stop) in recording.seen.iter().zip(stops) {
        let place = || {
            let native = seen
                .stack
                .iter()
                .filter(|it| it.kind() == frame_kind::NATIVE);
            let native: Vec<String> = native
                .map(|it| {
                    let path = paths.get(&it.object()).map_or("anonymous", String::as_str);
                    let name = path.rsplit('/').next().unwrap_or_default();
                    format!("{} {name}+{:#x}", it.object(), it.pc)
                })
                .collect();
            format!(
                "flags {:#x}, {:?}\n{}",
                seen.flags,
                seen.frames.first(),
                native.join("\n")
            )
        };
        interleaves(seen).with_context(place)?;
        if jit == Jit::Off {
            same_native(seen, stop, biases).with_context(place)?;
        }
        compiled += usize::from(
            seen.stack
                .iter()
                .any(|it| it.kind() == frame_kind::NATIVE && it.object() == objects::ANONYMOUS),
        );
        let activations = seen
            .stack
            .iter()
            .filter(|it| it.kind() == frame_kind::NATIVE && it.has(frame_attr::FINISH));
        deepest = deepest.max(activations.count());
    }
    println!(
        "{name}: {sampled} stops, up to {deepest} activations, {compiled} through compiled code"
    );
    ensure!(deepest >= depth, "never more than {deepest} activations");
    ensure!(
        (jit == Jit::Yjit) == (compiled > 0),
        "{compiled} stacks go through compiled code"
    );
    Ok(())
}

/// Methods of `callbacks.rb` that are stopped in.
const CALLBACKS: [&str; 14] = [
    "in_callback",
    "in_coerce",
    "in_comparison",
    "in_ensure",
    "in_exit",
    "in_fiber",
    "in_finalizer",
    "in_nested_fiber",
    "in_rescue",
    "in_thread",
    "in_throw",
    "in_tracer",
    "in_trap",
    "here",
];

fn check_callbacks(name: &str, jit: Jit) -> Result<()> {
    let Some(run) = run(name, "callbacks.rb", jit)? else {
        return Ok(());
    };
    compare(name, jit, &run, 60, 4)?;
    // There are none before 3.0.
    let ractor = (!name.contains("2.7")).then_some("in_ractor");
    for method in CALLBACKS.into_iter().chain(ractor) {
        let is_in = |seen: &Seen| {
            let mut frames = seen.frames.iter();
            frames.any(|frame| &*frame.function.base_label == method)
        };
        ensure!(run.recording.seen.iter().any(is_in), "never in {method}");
    }
    Ok(())
}

#[test]
fn callbacks_on_debian_2_7_4() -> Result<()> {
    check_callbacks("debian-2.7.4", Jit::Off)
}

#[test]
fn callbacks_on_debian_3_1_2() -> Result<()> {
    check_callbacks("debian-3.1.2", Jit::Off)
}

#[test]
fn callbacks_on_3_3_8() -> Result<()> {
    check_callbacks("source-3.3.8-stripped", Jit::Off)
}

#[test]
fn callbacks_on_debian_3_4_11() -> Result<()> {
    check_callbacks("debian-3.4.11", Jit::Off)
}

#[test]
fn callbacks_on_3_3_8_with_yjit() -> Result<()> {
    check_callbacks("source-3.3.8", Jit::Yjit)
}

fn check(name: &str, jit: Jit) -> Result<()> {
    let Some(mut run) = run(name, "frames.rb", jit)? else {
        return Ok(());
    };
    compare(name, jit, &run, 500, 5)?;
    let Run {
        said, recording, ..
    } = &mut run;
    // What each round calls is not part of the points.
    for seen in &mut recording.seen {
        if seen
            .frames
            .first()
            .is_some_and(|leaf| &*leaf.function.label == METHOD)
        {
            seen.frames.remove(0);
        }
    }
    let mut points = points::parse(said)?;
    points::relabel(&mut points, frames::LABELS)?;
    frames::compare(&points, recording, jit)
}

#[test]
fn on_debian_2_7_4() -> Result<()> {
    check("debian-2.7.4", Jit::Off)
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    check("debian-3.1.2", Jit::Off)
}

#[test]
fn on_3_3_8() -> Result<()> {
    check("source-3.3.8-stripped", Jit::Off)
}

#[test]
fn on_debian_3_4_11() -> Result<()> {
    check("debian-3.4.11", Jit::Off)
}

#[test]
fn on_3_4_5_static() -> Result<()> {
    check("source-3.4.5-static", Jit::Off)
}

#[test]
fn on_3_3_8_with_yjit() -> Result<()> {
    check("source-3.3.8", Jit::Yjit)
}
