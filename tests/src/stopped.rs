//! Processes that a test has stopped, and their native stacks as framehop has
//! them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;

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

use crate::cfi::Caller;
use crate::cfi::Cfi;
use crate::cfi::Frame;
use crate::rig;

/// More frames than any stack here has.
pub const MAX_FRAMES: usize = 2000;

type Bytes = &'static [u8];
type Unwinder = UnwinderX86_64<Bytes>;

/// A file that some process has mapped. It stays in memory until the test ends.
pub struct Image {
    data: Bytes,
    table: Table,
    cfi: RefCell<Cfi<'static>>,
    /// Start, size and name of its functions.
    pub symbols: Vec<(u64, u64, String)>,
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
pub struct Mapped {
    /// First address.
    pub start: u64,
    /// First address past the end.
    pub end: u64,
    /// What is added to the file's own addresses.
    pub bias: u64,
    /// Where the process has it from.
    pub path: String,
    /// What is in it.
    pub image: Rc<Image>,
}

/// A stopped process.
pub struct Process {
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
#[derive(Debug)]
pub struct Walked {
    /// The addresses that were looked up.
    pub frames: Vec<u64>,
    /// How it ended.
    pub end: Stepped,
    /// Where it was given up, and why.
    pub place: String,
    /// By which kinds of rules: see `cfa`.
    pub kinds: Vec<u8>,
    /// Steps that framehop took as well.
    pub agreed: usize,
    /// Steps through signals, and others that framehop does not know.
    pub alone: usize,
}

impl Process {
    /// A process that this one may trace.
    ///
    /// # Errors
    /// If there is none.
    pub fn new(pid: u32) -> Result<Self> {
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
    ///
    /// # Errors
    /// If it has ended.
    pub fn look(&mut self) -> Result<()> {
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

    /// Its id.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// All that was mapped when it was last looked at.
    #[must_use]
    pub fn mapped(&self) -> &[Mapped] {
        &self.mapped
    }

    /// What is added to a file's own addresses where the process has it.
    #[must_use]
    pub fn bias_of(&self, path: &str) -> Option<u64> {
        let mut mapped = self.mapped.iter();
        mapped.find(|it| it.path == path).map(|it| it.bias)
    }

    /// What is mapped at an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&Mapped> {
        let mut mapped = self.mapped.iter();
        mapped.find(|it| (it.start..it.end).contains(&address))
    }

    /// The function at an address, if its file has a symbol for it.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&str> {
        let mapped = self.at(address)?;
        let inside = address.wrapping_sub(mapped.bias);
        let mut symbols = mapped.image.symbols.iter();
        let found = symbols.find(|(start, size, _)| inside.wrapping_sub(*start) < *size)?;
        Some(&found.2)
    }

    /// Walks a stack, and has framehop take each step too.
    ///
    /// # Errors
    /// If the two do not agree, or the walk gives up without a reason.
    pub fn walk(&mut self, newest: Registers) -> Result<Walked> {
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
                // Of code that nothing describes and that is known all the same,
                // framehop says whether its caller's stack is one.
                Stepped::Caller
                    if theirs.is_err() && self.oracle(&before)? == Caller::Undescribed =>
                {
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
            // The thread has just gone to another stack, and the description still
            // speaks of the one it left.
            Caller::Is { sp, .. } if sp <= registers.sp => {
                let file = mapped.path.rsplit('/').next().unwrap_or_default();
                Ok(format!("{file}: the caller is further in"))
            }
            other => bail!("{other:x?} in {:?}", self.name(lookup)),
        }
    }
}

/// What ptrace says of a thread.
///
/// # Errors
/// If it is not stopped.
pub fn registers(tid: i32) -> Result<Registers> {
    // SAFETY: plain numbers, of which 0 is one.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, tid, (&raw mut regs).addr())?;
    Ok(Registers::newest(regs.rip, regs.rsp, regs.rbp, 0, u64::MAX))
}

/// Asks the kernel to do something with a thread.
///
/// # Errors
/// What the kernel says.
pub fn trace(request: libc::c_uint, tid: i32, data: usize) -> Result<()> {
    // SAFETY: what `data` points to, where it is a pointer, outlives the call.
    let result = unsafe { libc::ptrace(request, tid, 0, data) };
    let error = std::io::Error::last_os_error();
    ensure!(result != -1, "ptrace({request}, {tid}): {error}");
    Ok(())
}

/// Waits for a thread that this thread traces. Gives its id and its status.
///
/// # Errors
/// If there is none.
pub fn wait(tid: i32) -> Result<(i32, i32)> {
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD;
    // SAFETY: `status` outlives the call.
    let tid = unsafe { libc::waitpid(tid, &raw mut status, flags) };
    let error = std::io::Error::last_os_error();
    ensure!(tid > 0, "waitpid: {error}");
    Ok((tid, status))
}
