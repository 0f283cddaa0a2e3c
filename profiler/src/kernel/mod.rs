//! The kernel half, as user space sees it: loaded, attached, fed and read.
//! Types of aya stay behind this module.
//!
//! | module | what it does |
//! |---|---|
//! | [`btf`] | offsets into the running kernel's structures |
//! | [`error`] | what can go wrong, with what to do about it |
//! | [`features`] | what the running kernel has, and what follows |
//! | [`restrictions`] | what forbids this process to use it |
//! | `discovery` | Rubies are announced when they are mapped |
//! | `sideband` | the same by what perf tells of mappings |
//! | `tables` | the maps with unwind tables |
//! | `ticks` | one timer event per online CPU, through hotplug |
//! | `threads` | iterators over tasks, and thread pointers of a process |

pub mod btf;
mod discovery;
pub mod error;
pub mod features;
pub mod restrictions;
mod sideband;
mod tables;
mod threads;
mod ticks;

use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use aya::Ebpf;
use aya::EbpfLoader;
use aya::maps::Array;
use aya::maps::HashMap;
use aya::maps::MapData;
use aya::maps::PerCpuArray;
use aya::maps::ProgramArray;
use aya::maps::RingBuf;
use aya::programs::Iter;
use aya::programs::PerfEvent;
use aya::programs::RawTracePoint;
use aya::programs::UProbe;
use aya::programs::uprobe::UProbeAttachLocation;
use aya::programs::uprobe::UProbeScope;
use aya_log::EbpfLogger;
use rbprof_common::process::ProcessEntry;
use rbprof_common::wire::Counter;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::Mapped;
use rbprof_common::wire::ThreadPointer;

use self::btf::KernelOffsets;
use self::discovery::Verdicts;
pub use self::error::KernelError;
use self::features::Feature;
use self::features::Features;
use self::features::Without;
use self::sideband::SideBand;
use self::tables::UnwindMaps;
use self::ticks::Ticks;
use crate::unwind::store::Maps;

/// The compiled kernel half.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/rbprof-ebpf"));

/// How the kernel half is to be set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ticks per second and CPU.
    pub frequency: u64,
    /// Bytes of the ring that carries records to user space; a power of two.
    pub ring_bytes: u32,
    /// Let the programs write debug messages to the `log` crate's logger.
    pub log: bool,
    /// How the walk loops.
    pub looping: Looping,
    /// How the user's registers are found while a thread is in the kernel.
    pub registers: UserRegisters,
    /// Deal in the process ids of this process's own PID namespace. Must be set
    /// where that is not the initial one; elsewhere it costs time for nothing.
    pub translate_ids: bool,
    /// Take the kernel's frames of samples that hit the kernel.
    pub kernel_frames: bool,
    /// Whether every Ruby on the machine is announced, or only the targets that are
    /// named are followed.
    pub discover: Discover,
}

/// How Rubies are found that nobody has named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discover {
    /// Not at all.
    #[default]
    Off,
    /// By a probe in the kernel's function for mappings, if the kernel has kprobes,
    /// else as [`Discover::SideBand`].
    Probe,
    /// By what perf tells of mappings.
    SideBand,
}

/// How the walk loops in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looping {
    /// `bpf_loop` where the kernel has it (5.17), tail calls elsewhere.
    Probe,
    /// Tail calls, whatever the kernel has.
    TailCalls,
}

/// How the user's registers are found while a thread is in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserRegisters {
    /// By `bpf_task_pt_regs` where the kernel has it (5.15), at the top of the
    /// kernel's stack elsewhere.
    Probe,
    /// At the top of the kernel's stack, whatever the kernel has.
    FromStack,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            frequency: 99,
            ring_bytes: 8 << 20,
            log: false,
            looping: Looping::Probe,
            registers: UserRegisters::Probe,
            translate_ids: false,
            kernel_frames: true,
            discover: Discover::Off,
        }
    }
}

/// [`ProcessEntry`] as aya wants it.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Entry(ProcessEntry);

// SAFETY: `ProcessEntry` is `bytemuck::Pod`: no padding, every bit pattern valid.
unsafe impl aya::Pod for Entry {}

/// Totals of the kernel half's counters over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters([u64; Counter::COUNT]);

impl Counters {
    /// The total of one counter.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.0.get(counter as usize).copied().unwrap_or(0)
    }

    /// What was counted since.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        for (now, before) in difference.0.iter_mut().zip(earlier.0) {
            *now = now.saturating_sub(before);
        }
        difference
    }
}

/// Something that the running kernel does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// Whether the recording loses something by it.
    pub loses: bool,
    /// What is missing, and what follows.
    pub sentence: String,
}

/// What the kernel says of a loaded program.
#[derive(Clone, Debug)]
pub struct ProgramFacts {
    /// Its name.
    pub name: String,
    /// Instructions the verifier went through (5.16+).
    pub verified_instructions: Option<u32>,
    /// Nanoseconds it ran, if the kernel keeps such statistics.
    pub run_time: u64,
    /// How often it ran, if the kernel keeps such statistics.
    pub runs: u64,
}

/// The kernel half: loaded and, after [`Kernel::start`], ticking.
pub struct Kernel {
    // Dropping the events first stops the ticks before anything they use goes.
    ticks: Ticks,
    ebpf: Ebpf,
    processes: HashMap<MapData, u32, Entry>,
    sent_stacks: HashMap<MapData, u64, u8>,
    counters: PerCpuArray<MapData, u64>,
    tables: UnwindMaps,
    records: RingBuf<MapData>,
    iterated: Array<MapData, u32>,
    sampler: &'static str,
    looping: &'static str,
    features: Features,
    finds_registers: bool,
    announcer: Announcer,
    // Kept: without it the map of log records closes and nothing loads.
    logger: Option<EbpfLogger<&'static dyn log::Log>>,
    // Kept: the chain of tail calls lives in it.
    _next: ProgramArray<MapData>,
}

/// What tells of Rubies.
enum Announcer {
    /// Nothing: it was not asked for.
    Nothing,
    /// A probe in the kernel.
    Probe(Verdicts),
    /// What perf tells of mappings; and why it is not a probe, if that was tried.
    SideBand(Box<SideBand>, Option<String>),
    /// Nothing, although it was asked for, and why.
    Silent(String),
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel")
            .field("sampler", &self.sampler)
            .finish_non_exhaustive()
    }
}

impl Kernel {
    /// Loads the programs and attaches those that follow processes. Ticks begin
    /// with [`Kernel::start`].
    ///
    /// # Errors
    /// [`KernelError`] names the step, and what is missing.
    pub fn load(options: &Options) -> Result<Self, KernelError> {
        error::check_kernel()?;
        let mut reasons = Vec::new();
        if options.discover == Discover::Probe {
            let (mut kernel, attached) = Self::load_programs(options, true)?;
            match attached {
                Ok(verdicts) => {
                    kernel.announcer = Announcer::Probe(verdicts);
                    return Ok(kernel);
                }
                // What it does at an `exec` would be wrong without the probe.
                Err(error) => reasons.push(error.to_string()),
            }
        }
        let (mut kernel, _) = Self::load_programs(options, false)?;
        if options.discover != Discover::Off {
            kernel.announcer = match SideBand::open(kernel.records.as_fd()) {
                Ok(side_band) => Announcer::SideBand(Box::new(side_band), reasons.pop()),
                Err(error) => {
                    reasons.push(error.to_string());
                    Announcer::Silent(reasons.join("; "))
                }
            };
        }
        Ok(kernel)
    }

    /// Loads the programs, with the probe that announces Rubies if `announce`.
    fn load_programs(
        options: &Options,
        announce: bool,
    ) -> Result<(Self, Result<Verdicts, KernelError>), KernelError> {
        let offsets = KernelOffsets::of_running_kernel()?;
        let btf = aya::Btf::from_sys_fs().map_err(|error| KernelError::NoBtf(error.to_string()))?;
        let cpus = aya::util::nr_cpus()
            .map_err(|(file, error)| KernelError::step(format!("reading {file}"), error))?;
        let cpus = u32::try_from(cpus).unwrap_or(u32::MAX);
        let log_level: u8 = if options.log { 5 } else { 0 };
        let translate_ids = u32::from(options.translate_ids);
        let features = Features::probe();
        for finding in features.findings() {
            if matches!(finding.feature.without(), Without::Nothing(_)) && !finding.is_there {
                return Err(KernelError::lacks(finding.feature));
            }
        }
        let has_task_registers = u32::from(
            options.registers == UserRegisters::Probe && features.has(Feature::TaskRegisters),
        );
        let saved_registers = offsets.saved_registers.unwrap_or_default();
        let by_loop = options.looping == Looping::Probe && features.has(Feature::Loop);
        let ids = match offsets.ids {
            None if options.translate_ids => return Err(error::unknown_ids()),
            ids => ids.unwrap_or_default(),
        };

        let mappings = offsets.mappings.unwrap_or_default();
        let discover = u32::from(announce && offsets.mappings.is_some());

        let mut ebpf = EbpfLoader::new()
            .btf(Some(&btf))
            .override_global("DISCOVER", &discover, true)
            .override_global("VMA_FLAGS", &mappings.vma_flags, true)
            .override_global("VMA_FILE", &mappings.vma_file, true)
            .override_global("VMA_MM", &mappings.vma_mm, true)
            .override_global("TASK_MM", &mappings.task_mm, true)
            .override_global("FILE_INODE", &mappings.file_inode, true)
            .override_global("FILE_DENTRY", &mappings.file_dentry, true)
            .override_global("DENTRY_NAME", &mappings.dentry_name, true)
            .override_global("INODE_NUMBER", &mappings.inode_number, true)
            .override_global("INODE_SIZE", &mappings.inode_size, true)
            .override_global("INODE_GENERATION", &mappings.inode_generation, true)
            .override_global("INODE_SUPER", &mappings.inode_super, true)
            .override_global("SUPER_DEVICE", &mappings.super_device, true)
            .override_global("TASK_PID", &offsets.task_pid, true)
            .override_global("TASK_TGID", &offsets.task_tgid, true)
            .override_global("TRANSLATE_IDS", &translate_ids, true)
            .override_global("TASK_LEADER", &ids.task_leader, true)
            .override_global("TASK_THREAD_PID", &ids.task_thread_pid, true)
            .override_global("PID_LEVEL", &ids.pid_level, true)
            .override_global("PID_NUMBERS", &ids.pid_numbers, true)
            .override_global("TASK_SIGNAL", &offsets.task_signal, true)
            .override_global("SIGNAL_LIVE", &offsets.signal_live, true)
            .override_global("TASK_THREAD_POINTER", &offsets.task_thread_pointer, true)
            .override_global("KERNEL_FRAMES", &u32::from(options.kernel_frames), true)
            .override_global("HAS_TASK_REGISTERS", &has_task_registers, true)
            .override_global("TASK_STACK", &saved_registers.task_stack, true)
            .override_global("STACK_REGISTERS", &saved_registers.in_stack, true)
            .override_global(aya_log::LEVEL, &log_level, true)
            .map_max_entries("RECORDS", options.ring_bytes)
            .map_max_entries("STACKS", cpus)
            .map_max_entries("MAPPINGS", tables::LIMITS.mappings)
            .map_max_entries("PAGES", tables::LIMITS.pages)
            .map_max_entries("RULES", tables::LIMITS.rules)
            .load(OBJECT)
            .map_err(|error| KernelError::load("the maps", error))?;

        let logger = if options.log {
            Some(EbpfLogger::init(&mut ebpf).map_err(|error| KernelError::step("bpf log", error))?)
        } else {
            None
        };

        let (sampler, looping, next) = load_sampler(&mut ebpf, by_loop)?;
        for name in ["on_fork", "on_exec", "on_exit"] {
            let program: &mut RawTracePoint = program(&mut ebpf, name)?;
            program
                .load()
                .map_err(|error| KernelError::load(name, error))?;
        }
        load_iterator(&mut ebpf, "thread_pointers", &btf)?;
        // Before anything asks for ids.
        if options.translate_ids {
            threads::run(load_iterator(&mut ebpf, "own_namespace", &btf)?)?;
        }
        for (name, tracepoint) in [
            ("on_fork", "sched_process_fork"),
            ("on_exec", "sched_process_exec"),
            ("on_exit", "sched_process_exit"),
        ] {
            let program: &mut RawTracePoint = program(&mut ebpf, name)?;
            program
                .attach(tracepoint)
                .map_err(|error| KernelError::attach(tracepoint, error))?;
        }

        let verdicts = if announce {
            discovery::attach(&mut ebpf, offsets.mappings.is_some())
        } else {
            Verdicts::take(&mut ebpf)
        };
        let kernel = Self {
            announcer: Announcer::Nothing,
            ticks: Ticks::new(options.frequency),
            processes: HashMap::try_from(take(&mut ebpf, "PROCESSES")?)
                .map_err(KernelError::map)?,
            sent_stacks: HashMap::try_from(take(&mut ebpf, "SENT_STACKS")?)
                .map_err(KernelError::map)?,
            tables: UnwindMaps::take(&mut ebpf)?,
            counters: PerCpuArray::try_from(take(&mut ebpf, "COUNTERS")?)
                .map_err(KernelError::map)?,
            records: RingBuf::try_from(take(&mut ebpf, "RECORDS")?).map_err(KernelError::map)?,
            iterated: Array::try_from(take(&mut ebpf, "ITERATED")?).map_err(KernelError::map)?,
            sampler,
            looping,
            finds_registers: has_task_registers != 0 || offsets.saved_registers.is_some(),
            features,
            logger,
            _next: next,
            ebpf,
        };
        Ok((kernel, verdicts))
    }

    /// Samples whenever a process comes to a place in its code, given by the
    /// file and the offset in it, instead of ticking; stops the thread there
    /// with `SIGSTOP`. For tests that want to know the stack beforehand. Linux
    /// 5.17.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel refuses.
    pub fn sample_at(
        &mut self,
        pid: NonZeroU32,
        file: &Path,
        offset: u64,
    ) -> Result<(), KernelError> {
        self.load_probe()?;
        let program: &mut UProbe = program(&mut self.ebpf, "sample_here")?;
        program
            .attach(
                UProbeAttachLocation::AbsoluteOffset(offset),
                file,
                UProbeScope::OneProcess(pid),
            )
            .map_err(|error| KernelError::attach("a probe in user space", error))?;
        Ok(())
    }

    /// Loads the program of [`Kernel::sample_at`], which nothing else needs.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel refuses.
    pub fn load_probe(&mut self) -> Result<(), KernelError> {
        let program: &mut UProbe = program(&mut self.ebpf, "sample_here")?;
        if program.fd().is_err() {
            program
                .load()
                .map_err(|error| KernelError::load("sample_here", error))?;
        }
        Ok(())
    }

    /// Begins to tick on every online CPU.
    ///
    /// # Errors
    /// [`KernelError`] when an event cannot be opened.
    pub fn start(&mut self) -> Result<(), KernelError> {
        let program: &mut PerfEvent = program(&mut self.ebpf, self.sampler)?;
        self.ticks.follow_cpus(program)
    }

    /// Opens events on CPUs that have come online since, closes those of CPUs
    /// that have gone. To be called about once a second.
    ///
    /// # Errors
    /// [`KernelError`] when an event cannot be opened.
    pub fn follow_cpus(&mut self) -> Result<(), KernelError> {
        if let Announcer::SideBand(side_band, _) = &mut self.announcer {
            side_band.follow_cpus()?;
        }
        self.start()
    }

    /// Stops ticking; what is in the ring can still be read.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel refuses.
    pub fn stop(&mut self) -> Result<(), KernelError> {
        let program: &mut PerfEvent = program(&mut self.ebpf, self.sampler)?;
        self.ticks.stop(program)
    }

    /// Makes a process a target, or changes what is known of it.
    ///
    /// # Errors
    /// [`KernelError`] when the map is full.
    pub fn set_process(&mut self, tgid: u32, entry: &ProcessEntry) -> Result<(), KernelError> {
        self.processes
            .insert(tgid, Entry(*entry), 0)
            .map_err(KernelError::map)
    }

    /// What tells of Rubies that nobody has named, in a few words.
    ///
    /// # Errors
    /// Why nothing does although [`Options::discover`] asks for it.
    pub fn announcer(&self) -> Result<&'static str, &str> {
        match &self.announcer {
            Announcer::Nothing => Ok("nothing"),
            Announcer::Probe(_) => Ok("a probe in the kernel"),
            Announcer::SideBand(..) => Ok("perf's events for mappings"),
            Announcer::Silent(why) => Err(why),
        }
    }

    /// Why no probe tells of Rubies, if one was to.
    #[must_use]
    pub fn without_probe(&self) -> Option<&str> {
        match &self.announcer {
            Announcer::SideBand(_, why) => why.as_deref(),
            _ => None,
        }
    }

    /// Whether an `exec` that is told is one of a Ruby.
    #[must_use]
    pub const fn knows_what_is_executed(&self) -> bool {
        matches!(self.announcer, Announcer::Probe(_))
    }

    /// Hands on mappings that did not come with [`Kernel::drain`]. Gives how many
    /// were lost.
    pub fn drain_mappings(&mut self, each: impl FnMut(Mapped)) -> u64 {
        match &mut self.announcer {
            Announcer::SideBand(side_band, _) => side_band.drain(each),
            _ => 0,
        }
    }

    /// Says whether there is a Ruby in a file.
    ///
    /// # Errors
    /// [`KernelError`] when the map cannot be written.
    pub fn set_verdict(&mut self, file: FileKey, is_ruby: bool) -> Result<(), KernelError> {
        match &mut self.announcer {
            Announcer::Probe(verdicts) => verdicts.set(file, is_ruby)?,
            Announcer::SideBand(side_band, _) => side_band.set(file, is_ruby),
            Announcer::Nothing | Announcer::Silent(_) => {}
        }
        Ok(())
    }

    /// Forgets which files have no Ruby in them: another file may have come to the
    /// place of one of them.
    pub fn forget_verdicts(&mut self) {
        match &mut self.announcer {
            Announcer::Probe(verdicts) => verdicts.forget_others(),
            Announcer::SideBand(side_band, _) => side_band.forget_others(),
            Announcer::Nothing | Announcer::Silent(_) => {}
        }
    }

    /// Ticks per second and CPU.
    #[must_use]
    pub const fn frequency(&self) -> u64 {
        self.ticks.frequency()
    }

    /// Ticks so often from now on.
    ///
    /// # Errors
    /// [`KernelError`] when the events cannot be opened.
    pub fn set_frequency(&mut self, frequency: u64) -> Result<(), KernelError> {
        let ticked = self.ticks.is_ticking();
        self.stop()?;
        self.ticks.set_frequency(frequency);
        if ticked { self.start() } else { Ok(()) }
    }

    /// Makes a process no target any more. Nothing happens if it was none.
    pub fn remove_process(&mut self, tgid: u32) {
        // It may be gone already: the kernel half removes what has ended.
        drop(self.processes.remove(&tgid));
    }

    /// The maps with unwind tables.
    pub const fn tables(&mut self) -> &mut impl Maps<Error = KernelError> {
        &mut self.tables
    }

    /// Lets the kernel half forget that it has sent a stack, so that the next
    /// sample brings its frames again.
    pub fn forget_stack(&mut self, id: u64) {
        // It may be gone already: the kernel half forgets the oldest.
        drop(self.sent_stacks.remove(&id));
    }

    /// Thread pointers of all threads of a process, without stopping it.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot be asked.
    pub fn thread_pointers(&mut self, tgid: u32) -> Result<Vec<ThreadPointer>, KernelError> {
        self.iterated.set(0, tgid, 0).map_err(KernelError::map)?;
        threads::read(program(&mut self.ebpf, "thread_pointers")?)
    }

    /// Hands every record in the ring to `each`, oldest first.
    pub fn drain(&mut self, mut each: impl FnMut(&[u8])) {
        while let Some(record) = self.records.next() {
            each(&record);
        }
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }

    /// A descriptor that becomes readable when the ring has something that
    /// should not wait.
    ///
    /// # Errors
    /// [`KernelError`] when this process has no descriptor left.
    pub fn wakeup(&self) -> Result<OwnedFd, KernelError> {
        let descriptor = match &self.announcer {
            Announcer::SideBand(side_band, _) => side_band.wakeup(),
            _ => self.records.as_fd(),
        };
        descriptor
            .try_clone_to_owned()
            .map_err(|error| KernelError::step("watching the ring buffer", error))
    }

    /// The counters now.
    ///
    /// # Errors
    /// [`KernelError`] when the map cannot be read.
    pub fn counters(&self) -> Result<Counters, KernelError> {
        let mut totals = Counters::default();
        for (index, total) in (0u32..).zip(totals.0.iter_mut()) {
            let values = self.counters.get(&index, 0).map_err(KernelError::map)?;
            *total = values.iter().sum();
        }
        Ok(totals)
    }

    /// How the walk loops on this kernel, for people.
    #[must_use]
    pub const fn looping(&self) -> &'static str {
        self.looping
    }

    /// What this kernel lacks, and what follows for a recording, in sentences.
    #[must_use]
    pub fn lacks(&self) -> Vec<Lack> {
        let missing = self.features.findings().iter().filter(|it| !it.is_there);
        missing
            .map(|finding| {
                let feature = finding.feature;
                let (loses, so) = match feature.without() {
                    _ if feature == Feature::TaskRegisters && !self.finds_registers => {
                        (true, "samples that hit the kernel have no native frames")
                    }
                    Without::Nothing(so) | Without::Less(so) => (true, so),
                    Without::Same(so) => (false, so),
                };
                let (major, minor) = feature.since();
                let name = feature.name();
                Lack {
                    loses,
                    sentence: format!("no {name} before Linux {major}.{minor}: {so}"),
                }
            })
            .collect()
    }

    /// What the kernel says of the loaded programs.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramFacts> {
        self.ebpf
            .programs()
            .filter_map(|(name, program)| {
                let info = program.info().ok()?;
                Some(ProgramFacts {
                    name: name.to_owned(),
                    verified_instructions: info.verified_instruction_count(),
                    run_time: u64::try_from(info.run_time().as_nanos()).unwrap_or(u64::MAX),
                    runs: info.run_count(),
                })
            })
            .collect()
    }
}

/// Loads the probe that announces Rubies, and all programs with it, and gives what
/// the kernel says of them; also where the probe cannot be attached. For tests.
///
/// # Errors
/// [`KernelError`] when the kernel refuses to load one.
pub fn load_with_announcer(options: &Options) -> Result<Vec<ProgramFacts>, KernelError> {
    let (kernel, _) = Kernel::load_programs(options, true)?;
    Ok(kernel.programs())
}

/// Finds out whether rbprof could record: loads and attaches everything, lets
/// it tick for a moment, and takes it away again.
///
/// # Errors
/// [`KernelError`] as from [`Kernel::load`] and [`Kernel::start`].
pub fn try_out(translate_ids: bool) -> Result<(), KernelError> {
    let mut kernel = Kernel::load(&Options {
        translate_ids,
        ..Options::default()
    })?;
    kernel.start()?;
    kernel.stop()
}

/// Loads the tick program that this kernel takes.
fn load_sampler(
    ebpf: &mut Ebpf,
    by_loop: bool,
) -> Result<(&'static str, &'static str, ProgramArray<MapData>), KernelError> {
    let mut next: ProgramArray<MapData> =
        ProgramArray::try_from(take(ebpf, "NEXT")?).map_err(KernelError::map)?;
    if by_loop {
        let sampler: &mut PerfEvent = program(ebpf, "sample")?;
        sampler
            .load()
            .map_err(|error| KernelError::load("sample", error))?;
        return Ok(("sample", "bpf_loop", next));
    }
    for name in ["sample_chain_link", "sample_chained"] {
        let program: &mut PerfEvent = program(ebpf, name)?;
        program
            .load()
            .map_err(|error| KernelError::load(name, error))?;
    }
    let link: &mut PerfEvent = program(ebpf, "sample_chain_link")?;
    let fd = link
        .fd()
        .map_err(|error| KernelError::load("sample_chain_link", error))?;
    next.set(0, fd, 0).map_err(KernelError::map)?;
    Ok(("sample_chained", "tail calls", next))
}

fn load_iterator<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
    btf: &aya::Btf,
) -> Result<&'a mut Iter, KernelError> {
    let iterator: &mut Iter = program(ebpf, name)?;
    iterator
        .load("task", btf)
        .map_err(|error| KernelError::load(name, error))?;
    Ok(iterator)
}

fn take(ebpf: &mut Ebpf, name: &str) -> Result<aya::maps::Map, KernelError> {
    ebpf.take_map(name)
        .ok_or_else(|| KernelError::Object(format!("map {name} is missing")))
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, KernelError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program>,
{
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| KernelError::Object(format!("program {name} is missing")))
}

#[cfg(test)]
mod tests {
    use object::Object as _;
    use object::ObjectSymbol as _;

    use super::*;

    /// A path that panics leaves code behind that the verifier refuses with a
    /// message that helps nobody.
    #[test]
    fn nothing_in_the_kernel_half_panics() {
        let object = object::File::parse(OBJECT).unwrap();
        let names: Vec<&str> = object
            .symbols()
            .filter_map(|symbol| symbol.name().ok())
            .collect();
        assert!(names.contains(&"sample"), "{names:?}");
        let panicking: Vec<&&str> = names
            .iter()
            .filter(|name| name.contains("panicking"))
            .collect();
        assert!(panicking.is_empty(), "{panicking:?}");
    }
}
