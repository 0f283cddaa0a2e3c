//! A recording in progress: records from the kernel half in, a profile out.
//!
//! [`Session`] owns the kernel half, the target processes and the profile. Its
//! caller decides when to look: [`Session::poll`] takes everything there is.
//!
//! | module | what it does |
//! |---|---|
//! | [`mod@process`] | one target process: its memory, its names, its stacks in the profile |
//! | [`markers`] | frames that say what could not be known |
//! | [`cut`] | profiles of one while after another |
//! | [`discover`] | finding Rubies wherever they are |
//! | `follow` | finding the Ruby in a process, and what becomes of processes |
//! | `machine` | native and kernel frames |
//! | `count` | naming samples and counting them |
//! | [`account`] | how complete the recording is |

pub mod account;
mod count;
pub mod cut;
pub mod discover;
mod error;
mod follow;
mod machine;
pub mod markers;
pub mod process;

use std::collections::HashMap;
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use rbprof_common::layout::Layout;
use rbprof_common::process::ProcessEntry;
use rbprof_common::wire::Sample;

use self::account::Account;
use self::cut::Cut;
use self::cut::Since;
use self::discover::Discovery;
pub use self::error::SessionError;
use self::machine::MachineCode;
use self::process::Look;
use self::process::Process;
use crate::kernel;
use crate::kernel::Counters;
use crate::kernel::Kernel;
use crate::kernel::KernelError;
use crate::native::objects::Objects;
use crate::native::spaces::Spaces;
use crate::presentation;
use crate::presentation::Presentation;
use crate::profile::LabelsId;
use crate::profile::LocationId;
use crate::profile::Metadata;
use crate::profile::Profile;
use crate::profile::StackId;
use crate::samples::Record;
use crate::samples::Stack;
use crate::samples::StackTable;
use crate::symbolize::Resolved;
use crate::symbolize::native::DEFAULT_BUDGET;
use crate::symbolize::native::NativeNames;
use crate::targets::AttachError;
use crate::targets::Attacher;

/// Frames of stacks remembered in user space: 64 MiB.
const STACK_BUDGET: usize = (64 << 20) / 24;

/// How often a process that looks as if it could not be profiled is looked at
/// when it is asked for.
const ATTEMPTS: u32 = 5;
/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(60);

/// How long the start of a recording waits for unwind tables.
const PATIENCE: Duration = Duration::from_secs(5);

/// One sample, as an observer sees it.
#[derive(Debug)]
pub struct Observed<'a> {
    /// The sample.
    pub sample: &'a Sample,
    /// Its frames with their names, leaf first.
    pub frames: &'a [Resolved],
    /// Its stack as it came from the kernel half.
    pub stack: &'a Stack,
}

/// Looks at every sample with Ruby frames, in the order of time.
pub type Observer = Box<dyn FnMut(&Observed<'_>) + Send>;

/// A recording in progress.
pub struct Session {
    kernel: Kernel,
    attacher: Attacher,
    processes: HashMap<u32, Process>,
    /// Where native frames are walked: what code the processes have.
    spaces: Option<Spaces>,
    /// Machine code in the profile.
    machine: MachineCode,
    stacks: StackTable,
    profile: Profile,
    account: Account,
    /// Where the profile begins.
    since: Since,
    /// What the profile of every while begins with.
    base: Metadata,
    discovery: Option<Discovery>,
    labels: HashMap<(u32, u32, [u8; 16]), LabelsId>,
    started: Instant,
    observer: Option<Observer>,
    presentation: Presentation,
    /// Samples that wait for the end of their batch.
    batch: Vec<Sample>,
    /// Stacks whose frames came since the last poll.
    fresh: HashSet<u64>,
    /// Stacks whose samples in this batch are of one of two things; see
    /// [`Session::between`].
    replaced: HashMap<u64, StackId>,
    resolved: Vec<Resolved>,
    locations: Vec<LocationId>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("kernel", &self.kernel)
            .field("processes", &self.processes.keys())
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Loads the kernel half. Ticks begin with [`Session::start`].
    ///
    /// # Errors
    /// [`SessionError`] when the kernel half cannot be loaded, or `/proc` has
    /// other process ids than this process.
    pub fn new(options: &kernel::Options) -> Result<Self, SessionError> {
        if !crate::targets::proc::is_of_own_pid_namespace() {
            return Err(SessionError::Proc);
        }
        let translate_ids =
            options.translate_ids || !crate::targets::proc::in_initial_pid_namespace();
        let kernel = Kernel::load(&kernel::Options {
            translate_ids,
            ..options.clone()
        })?;
        let metadata = Metadata {
            start_unix_ns: unix_ns(),
            frequency_hz: u32::try_from(options.frequency).unwrap_or(u32::MAX),
            tool: format!("rbprof {}", env!("CARGO_PKG_VERSION")),
            kernel: kernel::error::kernel_release_text(),
            ..Metadata::default()
        };
        let mut session = Self {
            kernel,
            attacher: Attacher::default(),
            processes: HashMap::new(),
            spaces: None,
            machine: MachineCode::default(),
            stacks: StackTable::new(STACK_BUDGET),
            profile: Profile::new(metadata),
            account: Account::default(),
            since: Since::default(),
            base: Metadata::default(),
            discovery: None,
            labels: HashMap::new(),
            started: Instant::now(),
            observer: None,
            presentation: Presentation::default(),
            batch: Vec::new(),
            fresh: HashSet::new(),
            replaced: HashMap::new(),
            resolved: Vec::new(),
            locations: Vec::new(),
        };
        session.tell_of_kernel();
        session.base.clone_from(&session.profile.metadata);
        Ok(session)
    }

    /// Has the profile say what this kernel lacks.
    fn tell_of_kernel(&mut self) {
        for lack in self.kernel.lacks() {
            if lack.loses {
                self.warn(&lack.sentence);
            } else {
                self.profile.metadata.comments.push(lack.sentence);
            }
        }
    }

    /// What processes are attached to with.
    pub const fn attacher(&mut self) -> &mut Attacher {
        &mut self.attacher
    }

    /// Reads every Ruby by this layout instead of the table's; the profile says
    /// so, with `from` as where it is from.
    pub fn use_layout(&mut self, layout: &'static Layout, from: &str) {
        self.attacher.layout = Some(layout);
        self.warn(&format!(
            "layout from {from}, made for Ruby {}{}",
            layout.from,
            if layout.from == layout.to {
                String::new()
            } else {
                format!(" to {}", layout.to)
            }
        ));
    }

    /// Has native frames walked as well, of every process that is attached to
    /// from now on. Frames of the interpreter's own functions are left out if
    /// `hide_interpreter`; those that run Ruby code are there in any case.
    ///
    /// # Errors
    /// [`SessionError::Thread`].
    pub fn walk_native(&mut self, hide_interpreter: bool) -> Result<(), SessionError> {
        let spaces = Spaces::new(self.kernel.tables(), hide_interpreter);
        self.spaces = Some(spaces.map_err(SessionError::Thread)?);
        let names = NativeNames::start(DEFAULT_BUDGET);
        self.machine.names = Some(names.map_err(SessionError::Thread)?);
        Ok(())
    }

    /// What code the targets have mapped.
    #[must_use]
    pub fn objects(&self) -> Option<&Objects> {
        self.spaces.as_ref().map(|spaces| &spaces.objects)
    }

    /// Sets what of the recording [`Session::finish`] gives.
    pub const fn present(&mut self, presentation: Presentation) {
        self.presentation = presentation;
    }

    /// Has every sample with Ruby frames shown to `observer`.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// Makes a running Ruby a target, and its descendants with it.
    ///
    /// # Errors
    /// [`AttachError`] when it cannot be profiled.
    pub fn attach(&mut self, pid: u32) -> Result<(), SessionError> {
        let mut attempt = 1;
        let found = loop {
            match self.find_ruby(pid) {
                // It may have just started.
                Err(SessionError::Attach(
                    error @ (AttachError::NotRuby { .. } | AttachError::Unsupported { .. }),
                )) if attempt < ATTEMPTS => {
                    drop(error);
                    attempt += 1;
                    std::thread::sleep(PAUSE);
                }
                found => break found,
            }
        };
        match found {
            Ok(target) => self.take_target(pid, target)?,
            // Still starting: it is a target from now on, and is looked at
            // again whenever it runs.
            Err(SessionError::Attach(AttachError::NotReady { ruby, .. })) => {
                self.expect(pid)?;
                if ruby {
                    self.looks_like(pid, Look::Ruby);
                }
            }
            Err(error) => return Err(error),
        }
        self.profile.metadata.pids.push(pid);
        // Those that exist already; the kernel half sees to those to come.
        for child in crate::targets::proc::descendants(pid) {
            if self.processes.contains_key(&child) {
                continue;
            }
            match self.find_ruby(child) {
                Ok(target) => match self.take_target(child, target) {
                    Err(SessionError::Memory { .. }) => {}
                    other => other?,
                },
                Err(SessionError::Attach(AttachError::Gone { .. })) => {}
                Err(SessionError::Attach(_)) => self.expect(child)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes whatever `spawn` starts a target from its first instruction: this
    /// process is a target while `spawn` runs, and children of targets are
    /// targets from the moment they exist.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel half has no room for it. What `spawn`
    /// returns is handed through.
    pub fn spawning<T>(&mut self, spawn: impl FnOnce() -> T) -> Result<T, KernelError> {
        let own = std::process::id();
        self.kernel.set_process(own, &ProcessEntry::PENDING)?;
        let spawned = spawn();
        self.kernel.remove_process(own);
        Ok(spawned)
    }

    /// Names a process that [`Session::spawning`] started as what the
    /// recording is about.
    pub fn name_started(&mut self, pid: u32, command: &str) {
        self.processes
            .entry(pid)
            .or_insert_with(|| Process::pending(Instant::now()));
        self.profile.metadata.pids.push(pid);
        command.clone_into(&mut self.profile.metadata.command);
    }

    fn expect(&mut self, pid: u32) -> Result<(), SessionError> {
        self.kernel.set_process(pid, &ProcessEntry::PENDING)?;
        self.processes.insert(pid, Process::pending(Instant::now()));
        Ok(())
    }

    /// Samples at a place in the code of a process that is a target, instead of
    /// ticking; see [`Kernel::sample_at`].
    ///
    /// # Errors
    /// [`KernelError`] when the kernel refuses.
    pub fn start_at(
        &mut self,
        pid: NonZeroU32,
        file: &Path,
        offset: u64,
    ) -> Result<(), KernelError> {
        self.publish_mappings(PATIENCE)?;
        self.kernel.sample_at(pid, file, offset)
    }

    /// Begins to tick.
    ///
    /// # Errors
    /// [`KernelError`] when the events cannot be opened.
    pub fn start(&mut self) -> Result<(), KernelError> {
        // The first samples had better find their tables.
        self.publish_mappings(PATIENCE)?;
        self.profile.metadata.start_unix_ns = unix_ns();
        self.started = Instant::now();
        self.since = Since::default();
        self.kernel.start()
    }

    /// Follows CPUs that come and go, and targets whose end went unnoticed. To
    /// be called about once a second.
    ///
    /// # Errors
    /// [`KernelError`] when an event cannot be opened.
    pub fn every_second(&mut self) -> Result<(), KernelError> {
        self.kernel.follow_cpus()?;
        let gone: Vec<u32> = self
            .processes
            .iter()
            .filter(|(pid, process)| !process.is_alive(**pid))
            .map(|(&pid, _)| pid)
            .collect();
        for pid in gone {
            self.kernel.remove_process(pid);
            self.end_process(pid);
        }
        self.forget_ignored();
        Ok(())
    }

    /// A descriptor that becomes readable when there is something that should
    /// not wait.
    ///
    /// # Errors
    /// [`KernelError`] when this process has no descriptor left.
    pub fn wakeup(&self) -> Result<OwnedFd, KernelError> {
        self.kernel.wakeup()
    }

    /// Whether any target is left.
    #[must_use]
    pub fn has_targets(&self) -> bool {
        !self.processes.is_empty()
    }

    /// The processes that are targets now.
    pub fn targets(&self) -> impl Iterator<Item = u32> {
        self.processes.keys().copied()
    }

    /// Whether this process is still a target.
    #[must_use]
    pub fn is_target(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }

    /// The profile so far.
    #[must_use]
    pub const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// How complete the recording is so far.
    #[must_use]
    pub const fn account(&self) -> &Account {
        &self.account
    }

    /// The kernel half's counters.
    ///
    /// # Errors
    /// [`KernelError`] when they cannot be read.
    pub fn counters(&self) -> Result<Counters, KernelError> {
        self.kernel.counters()
    }

    /// The kernel half.
    pub const fn kernel(&mut self) -> &mut Kernel {
        &mut self.kernel
    }

    /// Takes everything the kernel half has sent.
    ///
    /// # Errors
    /// [`SessionError`] when the kernel half cannot be told what it must know.
    pub fn poll(&mut self) -> Result<(), SessionError> {
        let mut records = Vec::new();
        let mut unknown = 0;
        self.kernel.drain(|bytes| match Record::decode(bytes) {
            Some(record) => records.push(record),
            None => unknown += 1,
        });
        self.account.unknown_records += unknown;
        for record in records {
            match record {
                Record::Stack(chunk, frames) => {
                    if self.stacks.add(&chunk, &frames) {
                        self.fresh.insert(chunk.stack);
                    }
                }
                // Ticks in rbprof itself while it started the target.
                Record::Sample(sample) if sample.tgid == std::process::id() => {
                    self.account.own += 1;
                }
                Record::Sample(sample) => self.batch.push(sample),
                Record::Fork(event) => {
                    self.flush();
                    self.fork_process(event.tgid, event.child)?;
                }
                Record::Exec(event) if self.discovery.is_some() => {
                    self.flush();
                    self.executed(event.tgid)?;
                }
                Record::Exec(event) => {
                    self.flush();
                    self.forget_stacks(event.tgid);
                    if let Some(spaces) = &mut self.spaces {
                        spaces.leave(event.tgid);
                    }
                    // As the kernel half has done; but see `end_process`.
                    self.kernel
                        .set_process(event.tgid, &ProcessEntry::PENDING)?;
                    self.processes
                        .insert(event.tgid, Process::pending(Instant::now()));
                }
                Record::Exit(event) => {
                    self.flush();
                    self.left(event.tgid)?;
                }
                Record::Mapped(record) => self.mapped(record)?,
            }
        }
        self.flush();
        // After what is in the ring: who executes a Ruby maps it afterwards.
        self.take_mappings()?;
        self.judge()?;
        self.fresh.clear();
        for process in self.processes.values_mut() {
            process.look_for_symbols();
        }
        self.look_again()?;
        self.publish_mappings(Duration::ZERO)?;
        for id in self.stacks.shrink() {
            self.kernel.forget_stack(id);
        }
        Ok(())
    }

    /// Ticks so often from now on. Gives what was recorded until then: samples
    /// stand for another time afterwards.
    ///
    /// # Errors
    /// [`SessionError`] when the kernel refuses.
    pub fn set_frequency(&mut self, frequency: u64) -> Result<Cut, SessionError> {
        self.kernel.stop()?;
        self.poll()?;
        let cut = self.cut()?;
        self.kernel.set_frequency(frequency)?;
        self.profile.metadata.frequency_hz = u32::try_from(frequency).unwrap_or(u32::MAX);
        self.kernel.start()?;
        Ok(cut)
    }

    /// Stops ticking, takes what is left, and gives the profile. What goes wrong
    /// meanwhile costs nothing that was collected before; it becomes a warning.
    #[must_use]
    pub fn finish(mut self) -> Profile {
        let duration = self.started.elapsed();
        if let Err(error) = self.kernel.stop() {
            self.warn(&format!("ending the recording: {error}"));
        }
        if let Err(error) = self.poll() {
            self.warn(&format!("taking the last samples: {error}"));
        }
        let warnings: Vec<_> = self
            .processes
            .values()
            .filter_map(Process::warning)
            .collect();
        for warning in warnings {
            self.warn(warning);
        }
        self.profile.metadata.duration_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        match self.kernel.counters() {
            Ok(counters) => self.account.describe(&counters, &mut self.profile.metadata),
            Err(error) => self.warn(&format!("reading the kernel's counters: {error}")),
        }
        for note in self.machine.notes() {
            self.warn(&note);
        }
        presentation::present(
            self.profile,
            self.presentation,
            |mapping| self.machine.role(mapping),
            |location| self.machine.name(location),
        )
    }
}

fn unix_ns() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
        })
}
