//! Native stacks of real processes, stopped at thousands of instructions, frame
//! by frame as framehop has them; and through signals, where framehop does not
//! get, as the program was written.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof_common::unwind::Stepped;
use rbprof_common::unwind::cfa;
use rbprof_tests::rig;
use rbprof_tests::stopped::MAX_FRAMES;
use rbprof_tests::stopped::Process;
use rbprof_tests::stopped::Walked;
use rbprof_tests::stopped::registers;
use rbprof_tests::stopped::trace;
use rbprof_tests::stopped::wait;
use rbprof_tests::target::Target;
use xtask::cmd;

#[derive(Default, Debug)]
struct Totals {
    stacks: usize,
    frames: usize,
    agreed: usize,
    alone: usize,
    given_up: usize,
    /// Where, in which file.
    places: BTreeMap<String, usize>,
    /// How often each kind of rule was followed.
    kinds: BTreeMap<u8, usize>,
}

impl Totals {
    fn count(&mut self, walked: &Walked) -> Result<()> {
        ensure!(walked.frames.len() < MAX_FRAMES, "an endless stack");
        self.stacks += 1;
        self.frames += walked.frames.len();
        self.agreed += walked.agreed;
        self.alone += walked.alone;
        for kind in &walked.kinds {
            *self.kinds.entry(*kind).or_default() += 1;
        }
        if walked.end != Stepped::End {
            self.given_up += 1;
            *self.places.entry(walked.place.clone()).or_default() += 1;
        }
        Ok(())
    }
}

#[test]
fn every_stack_of_a_c_program_from_its_first_instruction_to_its_last() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("unwind");
    cmd::output(
        Command::new("cc")
            .args(["-O2", "-g0", "-fomit-frame-pointer", "-pthread"])
            .args(["-fno-optimize-sibling-calls", "-Wl,-z,lazy", "-o"])
            .arg(&program)
            .arg(rig::workload("unwind.c")),
    )?;
    let mut command = Command::new(&program);
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = command.spawn()?;
    let pid = child.id() as i32;
    wait(pid)?;
    let options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
    trace(libc::PTRACE_SETOPTIONS, pid, options as usize)?;
    let mut process = Process::new(child.id())?;
    let mut totals = Totals::default();
    // Functions of the program from the leaf, and how often.
    let mut chains: BTreeMap<Vec<String>, usize> = BTreeMap::new();
    trace(libc::PTRACE_SINGLESTEP, pid, 0)?;
    let mut stops = 0_u64;
    loop {
        let (tid, status) = wait(-1)?;
        if !libc::WIFSTOPPED(status) {
            if tid == pid {
                ensure!(status == 0, "the program ended with {status:#x}");
                break;
            }
            continue;
        }
        stops += 1;
        let registers = registers(tid)?;
        let is_own = process
            .at(registers.pc)
            .is_some_and(|mapped| !mapped.image.symbols.is_empty());
        // All of its own instructions, some of the libraries'.
        if is_own || stops.is_multiple_of(11) {
            let walked = process.walk(registers)?;
            totals.count(&walked)?;
            let frames = walked.frames.iter();
            let names = frames.filter_map(|frame| process.name(*frame));
            let chain: Vec<String> = names.map(str::to_owned).collect();
            if walked.end == Stepped::End {
                *chains.entry(chain).or_default() += 1;
            }
        }
        let signal = match libc::WSTOPSIG(status) {
            libc::SIGTRAP | libc::SIGSTOP => 0,
            signal => signal as usize,
        };
        trace(libc::PTRACE_SINGLESTEP, tid, signal)?;
    }
    println!("{stops} instructions: {totals:?}");
    ensure!(totals.stacks > 10_000, "{totals:?}");
    // What takes a register that is not followed is the loader's resolver of
    // lazily bound functions, which finds its frame by `rbx`.
    ensure!(totals.given_up * 10 < totals.stacks, "{totals:?}");
    for kind in [cfa::SP, cfa::FP, cfa::FP_DEREF, cfa::PLT, cfa::SIGNAL] {
        let count = totals.kinds.get(&kind).copied().unwrap_or(0);
        ensure!(count >= 20, "rule {kind}: {totals:?}");
    }
    let mut few = 0;
    for (place, count) in &totals.places {
        if !place.starts_with("ld-linux") {
            // What the C compiler and libc add to the beginning and the end is
            // not described, and in its first and last instructions a function
            // that aligns its stack has its frame in `r10`.
            few += count;
        }
    }
    ensure!(few * 100 < totals.stacks, "{totals:?}");
    for (leaf, expected) in [
        ("in_handler", "handler interrupted main _start"),
        ("in_thread", "thread"),
        ("realigned", "main _start"),
        ("allocated", "main _start"),
        ("compare", "sorted main _start"),
    ] {
        let of_leaf = chains
            .iter()
            .filter(|(chain, _)| chain.first().is_some_and(|name| name == leaf));
        let mut seen = 0;
        for (chain, count) in of_leaf {
            seen += count;
            let rest = chain.get(1..).unwrap_or_default().join(" ");
            ensure!(rest == expected, "{leaf} was called by {rest}");
        }
        ensure!(seen > 10, "{leaf} was seen {seen} times");
        println!("  {leaf} < {expected}: {seen}");
    }
    Ok(())
}

/// A program that uses much of the interpreter, libc and libm.
const PROGRAM: &str = r#"
    STDOUT.sync = true
    puts :ready
    loop do
      words = (1..40).map { |n| (n * 7919 % 101).to_s }
      words.sort_by { |word| word.sum }.each_slice(3) { |some| some.join("-").gsub(/\d-/) { |it| it * 2 } }
      words.to_h { |word| [word.to_sym, Math.sqrt(word.to_i)] }.inspect.unpack("C*").pack("U*")
      format("%.3f %s", words.size / 3.0, 2**200)
      catch(:out) { [3, 1, 2].sort { |a, b| throw :out if a == b; a <=> b } }
      Fiber.new { Fiber.yield [1].each { |x| x.to_s } }.resume
      begin; Integer("x"); rescue ArgumentError => error; error.message; end
      GC.start if rand < 0.01
    end
"#;

#[test]
fn native_stacks_of_running_rubies() -> Result<()> {
    for name in ["debian-3.1.2", "source-3.3.8", "source-3.4.5-static"] {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(());
        };
        let mut target = Target::start(ruby.command().args(["-e", PROGRAM]))?;
        target.wait_for("ready")?;
        let pid = target.pid() as i32;
        trace(libc::PTRACE_SEIZE, pid, 0)?;
        let mut process = Process::new(target.pid())?;
        let mut totals = Totals::default();
        for round in 0..40 {
            std::thread::sleep(Duration::from_millis(3 + round % 5));
            trace(libc::PTRACE_INTERRUPT, pid, 0)?;
            wait(pid)?;
            // What was loaded meanwhile, maybe where something else was.
            process.look()?;
            for _ in 0..50 {
                let walked = process.walk(registers(pid)?).context(name)?;
                totals.count(&walked)?;
                let mut signal = 0;
                for _ in 0..5 {
                    trace(libc::PTRACE_SINGLESTEP, pid, signal)?;
                    let (_, status) = wait(pid)?;
                    ensure!(libc::WIFSTOPPED(status), "Ruby ended: {status:#x}");
                    signal = match libc::WSTOPSIG(status) {
                        libc::SIGTRAP => 0,
                        other => other as usize,
                    };
                }
                if signal != 0 {
                    trace(libc::PTRACE_SINGLESTEP, pid, signal)?;
                    wait(pid)?;
                }
            }
            trace(libc::PTRACE_CONT, pid, 0)?;
        }
        println!("{name}: {totals:?}");
        ensure!(totals.given_up * 100 < totals.stacks, "{name}: {totals:?}");
        ensure!(totals.agreed > 5 * totals.stacks, "{name}: {totals:?}");
    }
    Ok(())
}
