//! Native stacks of real processes, stopped at thousands of instructions, frame
//! by frame as framehop has them; and through signals, where framehop does not
//! get, as the program was written.
#![cfg(target_arch = "x86_64")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use framehop::ExplicitModuleSectionInfo;
use framehop::FrameAddress;
use framehop::Unwinder as _;
use framehop::x86_64::CacheX86_64;
use framehop::x86_64::UnwindRegsX86_64;
use framehop::x86_64::UnwinderX86_64;
use object::Object as _;
use object::ObjectSection as _;
use object::ObjectSymbol as _;
use rbprof::targets::elf::Elf;
use rbprof::unwind::Table;
use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::Window;
use rbprof_common::unwind::Registers;
use rbprof_common::unwind::Stepped;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::step;
use rbprof_tests::cfi::Caller;
use rbprof_tests::cfi::Cfi;
use rbprof_tests::cfi::Frame;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use xtask::cmd;

/// More frames than any stack here has.
const MAX_FRAMES: usize = 2000;

type Bytes = &'static [u8];
type Unwinder = UnwinderX86_64<Bytes>;

/// A file that some process has mapped. It stays in memory until the test ends.
struct Image {
    data: Bytes,
    table: Table,
    cfi: RefCell<Cfi<'static>>,
    /// Start, size and name of its functions.
    symbols: Vec<(u64, u64, String)>,
}

impl Image {
    fn of(data: Vec<u8>) -> Result<Self> {
        let data: Bytes = data.leak();
        let file = object::File::parse(data)?;
        let symbols = file
            .symbols()
            .filter(|symbol| symbol.kind() == object::SymbolKind::Text && symbol.size() > 0)
            .map(|symbol| {
                let name = symbol.name().unwrap_or_default().to_owned();
                (symbol.address(), symbol.size(), name)
            })
            .collect();
        Ok(Self {
            data,
            table: rbprof::unwind::compile(&Elf::parse(data)?, None)?,
            cfi: RefCell::new(Cfi::of(&file)?),
            symbols,
        })
    }

    fn sections(&self) -> Result<ExplicitModuleSectionInfo<Bytes>> {
        let file = object::File::parse(self.data)?;
        let mut info = ExplicitModuleSectionInfo::default();
        if let Some(section) = file.section_by_name(".eh_frame") {
            info.eh_frame_svma = Some(section.address()..section.address() + section.size());
            info.eh_frame = Some(section.data()?);
        }
        if let Some(section) = file.section_by_name(".eh_frame_hdr") {
            info.eh_frame_hdr_svma = Some(section.address()..section.address() + section.size());
            info.eh_frame_hdr = Some(section.data()?);
        }
        Ok(info)
    }
}

/// Executable memory of a process, and the file in it.
struct Mapped {
    start: u64,
    end: u64,
    bias: u64,
    path: String,
    image: Rc<Image>,
}

/// A stopped process.
struct Process {
    pid: u32,
    memory: File,
    images: HashMap<String, Option<Rc<Image>>>,
    mapped: Vec<Mapped>,
    peer: Unwinder,
    cache: CacheX86_64,
}

impl Memory for Process {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        let mut word = [0; 8];
        let read = self.memory.read_exact_at(&mut word, addr);
        read.map(|()| u64::from_le_bytes(word)).map_err(|_| Fault)
    }

    fn words3(&self, _: u64) -> Result<[u64; 3], Fault> {
        Err(Fault)
    }

    fn window(&self, _: u64, _: &mut Window, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }
}

/// A stack as it was walked.
struct Walked {
    /// The addresses that were looked up.
    frames: Vec<u64>,
    /// How it ended.
    end: Stepped,
    /// Where it was given up, and why.
    place: String,
    /// By which kinds of rules: see `cfa`.
    kinds: Vec<u8>,
    /// Steps that framehop took as well.
    agreed: usize,
    /// Steps through signals, and others that framehop does not know.
    alone: usize,
}

impl Process {
    fn new(pid: u32) -> Result<Self> {
        Ok(Self {
            pid,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            images: HashMap::new(),
            mapped: Vec::new(),
            peer: Unwinder::new(),
            cache: CacheX86_64::new(),
        })
    }

    /// Looks again at what is mapped.
    fn look(&mut self) -> Result<()> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))?;
        self.mapped.clear();
        self.peer = Unwinder::new();
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let range = words.next().context("a range")?;
            let mode = words.next().context("a mode")?;
            let offset = u64::from_str_radix(words.next().context("an offset")?, 16)?;
            let Some(path) = words.nth(2) else { continue };
            if !mode.contains('x') || path == "[vsyscall]" {
                continue;
            }
            let (start, end) = range.split_once('-').context("a range")?;
            let start = u64::from_str_radix(start, 16)?;
            let end = u64::from_str_radix(end, 16)?;
            let Some(image) = self.image(path, start, end) else {
                continue;
            };
            // A segment is mapped in whole pages.
            let elf = Elf::parse(image.data)?;
            let loads = elf.loads().iter();
            let load = loads
                .filter(|load| load.executable)
                .find(|load| {
                    let pages = load.offset / 4096 * 4096..load.offset + load.file_size;
                    pages.contains(&offset)
                })
                .context("no code")?;
            let bias = start
                .wrapping_sub(offset)
                .wrapping_sub(load.address.wrapping_sub(load.offset));
            self.peer.add_module(framehop::Module::new(
                path.to_owned(),
                start..end,
                bias,
                image.sections()?,
            ));
            self.mapped.push(Mapped {
                start,
                end,
                bias,
                path: path.to_owned(),
                image,
            });
        }
        Ok(())
    }

    fn image(&mut self, path: &str, start: u64, end: u64) -> Option<Rc<Image>> {
        if let Some(known) = self.images.get(path) {
            return known.clone();
        }
        let data = if path == "[vdso]" {
            let mut data = vec![0; (end - start) as usize];
            self.memory.read_exact_at(&mut data, start).ok()?;
            data
        } else {
            std::fs::read(rig::file_of(self.pid, path)).ok()?
        };
        let image = Image::of(data).ok().map(Rc::new);
        self.images.insert(path.to_owned(), image.clone());
        image
    }

    fn at(&self, address: u64) -> Option<&Mapped> {
        let mut mapped = self.mapped.iter();
        mapped.find(|it| (it.start..it.end).contains(&address))
    }

    /// The function at an address, if its file has a symbol for it.
    fn name(&self, address: u64) -> Option<&str> {
        let mapped = self.at(address)?;
        let inside = address.wrapping_sub(mapped.bias);
        let mut symbols = mapped.image.symbols.iter();
        let found = symbols.find(|(start, size, _)| inside.wrapping_sub(*start) < *size)?;
        Some(&found.2)
    }

    /// Walks a stack, and has framehop take each step too.
    fn walk(&mut self, newest: Registers) -> Result<Walked> {
        if self.at(newest.pc).is_none() {
            self.look()?;
        }
        let mut registers = newest;
        let mut peer = UnwindRegsX86_64::new(newest.pc, newest.sp, newest.fp);
        let mut walked = Walked {
            frames: Vec::new(),
            end: Stepped::Caller,
            place: String::new(),
            kinds: Vec::new(),
            agreed: 0,
            alone: 0,
        };
        while walked.frames.len() < MAX_FRAMES {
            let before = registers;
            let lookup = before.lookup();
            walked.frames.push(lookup);
            if self.at(lookup).is_none() {
                self.look()?;
            }
            let Some(mapped) = self.at(lookup) else {
                walked.end = Stepped::Unknown;
                break;
            };
            let inside = lookup.wrapping_sub(mapped.bias);
            let rule = mapped.image.table.rule(inside);
            let stepped = step(&mut registers, &rule, self);
            let address = if before.exact == 1 {
                FrameAddress::from_instruction_pointer(before.pc)
            } else {
                FrameAddress::from_return_address(before.pc).context("a return to 0")?
            };
            let Self {
                peer: unwinder,
                cache,
                memory,
                ..
            } = self;
            let mut read = |address| {
                let mut word = [0; 8];
                let read = memory.read_exact_at(&mut word, address);
                read.map(|()| u64::from_le_bytes(word)).map_err(|_| ())
            };
            let theirs = unwinder.unwind_frame(address, &mut peer, cache, &mut read);
            let is_deref = matches!(rule.cfa, cfa::SIGNAL | cfa::SP_DEREF | cfa::FP_DEREF);
            walked.kinds.push(rule.cfa);
            match stepped {
                Stepped::Caller if is_deref => {
                    let expected = Caller::Is {
                        pc: registers.pc,
                        sp: registers.sp,
                        fp: (registers.fp_known == 1).then_some(registers.fp),
                    };
                    let oracle = self.oracle(&before)?;
                    ensure!(oracle == expected, "{oracle:x?}, not {expected:x?}");
                    walked.alone += 1;
                    peer = UnwindRegsX86_64::new(registers.pc, registers.sp, registers.fp);
                }
                Stepped::Caller => {
                    let same = (theirs == Ok(Some(registers.pc)))
                        && peer.sp() == registers.sp
                        && (registers.fp_known == 0 || peer.bp() == registers.fp);
                    ensure!(
                        same,
                        "{lookup:#x} ({:?}, {inside:#x}): {registers:x?} by {rule:?}, not {theirs:x?} {peer:?}",
                        self.name(lookup)
                    );
                    walked.agreed += 1;
                    continue;
                }
                Stepped::End => {
                    // Of an entry point that nothing describes, framehop does not
                    // know that it is one.
                    let ends =
                        matches!(theirs, Ok(None) | Err(framehop::Error::ReturnAddressIsNull))
                            || self.oracle(&before)? == Caller::Undescribed;
                    ensure!(ends, "{lookup:#x}: the end, not {theirs:x?}");
                    walked.end = stepped;
                    return Ok(walked);
                }
                other => {
                    walked.place = self
                        .is_justified(&before)
                        .with_context(|| format!("{other:?} at {inside:#x} by {rule:?}"))?;
                    walked.end = other;
                    return Ok(walked);
                }
            }
        }
        Ok(walked)
    }

    /// What the file says of a frame's caller.
    fn oracle(&self, registers: &Registers) -> Result<Caller> {
        let lookup = registers.lookup();
        let mapped = self.at(lookup).context("not mapped")?;
        let frame = Frame {
            pc: registers.pc,
            sp: registers.sp,
            fp: registers.fp,
            lr: 0,
        };
        let word = |address| self.word(address).ok();
        let mut cfi = mapped.image.cfi.borrow_mut();
        cfi.caller(lookup.wrapping_sub(mapped.bias), &frame, &word)
    }

    /// Where a walk gives up, and why. It may where the file says nothing, or
    /// something that takes a register which the walk does not follow.
    fn is_justified(&self, registers: &Registers) -> Result<String> {
        let lookup = registers.lookup();
        let mapped = self.at(lookup).context("not mapped")?;
        match self.oracle(registers)? {
            why @ (Caller::Undescribed | Caller::Inexpressible) => {
                let file = mapped.path.rsplit('/').next().unwrap_or_default();
                Ok(format!("{file}: {why:?}"))
            }
            other => bail!("{other:x?} in {:?}", self.name(lookup)),
        }
    }
}

/// What ptrace says of a thread.
fn registers(tid: i32) -> Result<Registers> {
    // SAFETY: plain numbers, of which 0 is one.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, tid, (&raw mut regs).addr())?;
    Ok(Registers::newest(regs.rip, regs.rsp, regs.rbp, 0, u64::MAX))
}

fn trace(request: libc::c_uint, tid: i32, data: usize) -> Result<()> {
    // SAFETY: what `data` points to, where it is a pointer, outlives the call.
    let result = unsafe { libc::ptrace(request, tid, 0, data) };
    let error = std::io::Error::last_os_error();
    ensure!(result != -1, "ptrace({request}, {tid}): {error}");
    Ok(())
}

/// Waits for a thread that this thread traces. Gives its id and its status.
fn wait(tid: i32) -> Result<(i32, i32)> {
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD;
    // SAFETY: `status` outlives the call.
    let tid = unsafe { libc::waitpid(tid, &raw mut status, flags) };
    let error = std::io::Error::last_os_error();
    ensure!(tid > 0, "waitpid: {error}");
    Ok((tid, status))
}

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
    for name in ["debian-3.1.2", "source-3.3.8", "source-3.3.8-static"] {
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
