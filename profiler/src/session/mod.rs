//! A recording in progress: records from the kernel half in, a profile out.
//!
//! [`Session`] owns the kernel half, the target processes and the profile. Its
//! caller decides when to look: [`Session::poll`] takes everything there is.
//!
//! | module | what it does |
//! |---|---|
//! | [`mod@process`] | one target process: its memory, its names, its stacks in the profile |
//! | [`markers`] | frames that say what could not be known |
//! | [`account`] | how complete the recording is |

pub mod account;
pub mod markers;
pub mod process;

use std::collections::HashMap;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use rbprof_common::process::ProcessEntry;
use rbprof_common::process::state;
use rbprof_common::wire::Sample;
use rbprof_common::wire::sample_flags;

use self::account::Account;
use self::process::Known;
use self::process::Look;
use self::process::Process;
use self::process::Readiness;
use crate::kernel;
use crate::kernel::Counters;
use crate::kernel::Kernel;
use crate::kernel::KernelError;
use crate::memory::OpenError;
use crate::profile::Labels;
use crate::profile::LabelsId;
use crate::profile::LocationId;
use crate::profile::Metadata;
use crate::profile::Profile;
use crate::profile::StackId;
use crate::samples::Record;
use crate::samples::StackTable;
use crate::symbolize::Moment;
use crate::symbolize::Resolved;
use crate::targets::AttachError;
use crate::targets::Target;
use crate::targets::ThreadPointer;

/// Frames of stacks remembered in user space: 64 MiB.
const STACK_BUDGET: usize = (64 << 20) / 24;
/// How long a process may run before it is taken for one that runs no Ruby.
const PATIENCE: Duration = Duration::from_secs(3);

/// One sample, as an observer sees it.
#[derive(Debug)]
pub struct Observed<'a> {
    /// The sample.
    pub sample: &'a Sample,
    /// Its frames with their names, leaf first.
    pub frames: &'a [Resolved],
}

/// Looks at every sample with Ruby frames, in the order of time.
pub type Observer = Box<dyn FnMut(&Observed<'_>) + Send>;

/// A recording in progress.
pub struct Session {
    kernel: Kernel,
    processes: HashMap<u32, Process>,
    stacks: StackTable,
    profile: Profile,
    account: Account,
    labels: HashMap<(u32, u32, [u8; 16]), LabelsId>,
    started: Instant,
    observer: Option<Observer>,
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
    /// [`SessionError`] when the kernel half cannot be loaded, or knows other
    /// process ids than this process.
    pub fn new(options: &kernel::Options) -> Result<Self, SessionError> {
        if !crate::targets::proc::in_initial_pid_namespace() {
            return Err(SessionError::PidNamespace);
        }
        let kernel = Kernel::load(options)?;
        let metadata = Metadata {
            start_unix_ns: unix_ns(),
            frequency_hz: u32::try_from(options.frequency).unwrap_or(u32::MAX),
            tool: format!("rbprof {}", env!("CARGO_PKG_VERSION")),
            kernel: kernel::error::kernel_release_text(),
            ..Metadata::default()
        };
        Ok(Self {
            kernel,
            processes: HashMap::new(),
            stacks: StackTable::new(STACK_BUDGET),
            profile: Profile::new(metadata),
            account: Account::default(),
            labels: HashMap::new(),
            started: Instant::now(),
            observer: None,
            batch: Vec::new(),
            fresh: HashSet::new(),
            replaced: HashMap::new(),
            resolved: Vec::new(),
            locations: Vec::new(),
        })
    }

    /// Has every sample with Ruby frames shown to `observer`.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// Makes a running Ruby a target.
    ///
    /// # Errors
    /// [`AttachError`] when it cannot be profiled.
    pub fn attach(&mut self, pid: u32) -> Result<(), SessionError> {
        match self.find_ruby(pid) {
            Ok(target) => self.take_target(pid, target)?,
            // Still starting: it is a target from now on, and is looked at
            // again whenever it runs.
            Err(SessionError::Attach(AttachError::NotReady { .. })) => self.expect(pid)?,
            Err(error) => return Err(error),
        }
        self.profile.metadata.pids.push(pid);
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

    /// Begins to tick.
    ///
    /// # Errors
    /// [`KernelError`] when the events cannot be opened.
    pub fn start(&mut self) -> Result<(), KernelError> {
        self.profile.metadata.start_unix_ns = unix_ns();
        self.started = Instant::now();
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
                    self.fork_process(event.tgid, event.child);
                }
                Record::Exec(event) => {
                    self.flush();
                    self.forget_stacks(event.tgid);
                    // As the kernel half has done; but see `end_process`.
                    self.kernel
                        .set_process(event.tgid, &ProcessEntry::PENDING)?;
                    self.processes
                        .insert(event.tgid, Process::pending(Instant::now()));
                }
                Record::Exit(event) => {
                    self.flush();
                    self.end_process(event.tgid);
                }
            }
        }
        self.flush();
        self.fresh.clear();
        for process in self.processes.values_mut() {
            process.look_for_symbols();
        }
        self.look_again()?;
        for id in self.stacks.shrink() {
            self.kernel.forget_stack(id);
        }
        Ok(())
    }

    /// Stops ticking, takes what is left, and gives the profile.
    ///
    /// # Errors
    /// [`SessionError`] when the kernel half cannot be read any more; what was
    /// collected before is lost with it only if there is nothing.
    pub fn finish(mut self) -> Result<Profile, SessionError> {
        self.kernel.stop()?;
        let duration = self.started.elapsed();
        self.poll()?;
        let counters = self.kernel.counters()?;
        let warnings: Vec<_> = self
            .processes
            .values()
            .filter_map(Process::warning)
            .collect();
        for warning in warnings {
            self.warn(warning);
        }
        let metadata = &mut self.profile.metadata;
        metadata.duration_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.account.describe(&counters, metadata);
        Ok(self.profile)
    }

    /// Looks for a Ruby in a process.
    fn find_ruby(&mut self, pid: u32) -> Result<Target, SessionError> {
        let threads: Vec<ThreadPointer> = self
            .kernel
            .thread_pointers(pid)?
            .into_iter()
            .map(|thread| ThreadPointer {
                tid: thread.tid,
                value: thread.pointer,
            })
            .collect();
        Ok(crate::targets::attach(pid, &threads)?)
    }

    fn take_target(&mut self, pid: u32, target: Target) -> Result<(), SessionError> {
        let metadata = &mut self.profile.metadata;
        if metadata.command.is_empty() {
            metadata.command.clone_from(&target.command);
        }
        let version = target.ruby.version.to_string();
        if !metadata.rubies.contains(&version) {
            metadata.rubies.push(version);
        }
        for warning in &target.warnings {
            self.warn(warning);
        }
        let entry = ProcessEntry {
            state: state::READY,
            ..target.entry
        };
        let process =
            Process::ready(target).map_err(|error| SessionError::Memory { pid, error })?;
        self.kernel.set_process(pid, &entry)?;
        self.processes.insert(pid, process);
        Ok(())
    }

    /// Looks again at processes that were not ready and have run since.
    fn look_again(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let due: Vec<u32> = self
            .processes
            .iter_mut()
            .filter_map(|(&pid, process)| process.wants_a_look(now).then_some(pid))
            .collect();
        for pid in due {
            match self.find_ruby(pid) {
                Ok(target) => match self.take_target(pid, target) {
                    // It ended just now.
                    Err(SessionError::Memory { .. }) => self.end_process(pid),
                    other => other?,
                },
                Err(
                    error @ (SessionError::Kernel(_)
                    | SessionError::Memory { .. }
                    | SessionError::PidNamespace),
                ) => {
                    return Err(error);
                }
                Err(SessionError::Attach(AttachError::NotReady { ruby, .. })) => {
                    self.looks_like(pid, if ruby { Look::Ruby } else { Look::Not });
                }
                Err(SessionError::Attach(AttachError::Gone { .. })) => self.end_process(pid),
                Err(SessionError::Attach(error)) => {
                    let out_of_patience = self
                        .processes
                        .get(&pid)
                        .is_some_and(|process| process.waited(now) > PATIENCE);
                    // Anything else may come of an `exec` or `chroot` between
                    // two steps of the look.
                    let hopeless = matches!(
                        error,
                        AttachError::TooOld { .. } | AttachError::Unsupported { .. }
                    );
                    if out_of_patience || hopeless {
                        self.give_up_on(pid, &error)?;
                    } else {
                        self.looks_like(pid, Look::NoRuby);
                    }
                }
            }
        }
        Ok(())
    }

    fn warn(&mut self, warning: &str) {
        let warnings = &mut self.profile.metadata.warnings;
        if !warnings.iter().any(|known| known == warning) {
            warnings.push(warning.to_owned());
        }
    }

    fn looks_like(&mut self, pid: u32, look: Look) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.looks_like(look);
        }
    }

    /// A process that is a target by descent runs no Ruby that can be walked.
    fn give_up_on(&mut self, pid: u32, error: &AttachError) -> Result<(), SessionError> {
        let entry = ProcessEntry {
            state: state::NOT_RUBY,
            ..ProcessEntry::default()
        };
        self.kernel.set_process(pid, &entry)?;
        if let Some(process) = self.processes.get_mut(&pid) {
            process.readiness = Readiness::NotRuby;
        }
        if !matches!(error, AttachError::NotRuby { .. }) {
            self.warn(&error.to_string());
        }
        Ok(())
    }

    fn fork_process(&mut self, parent: u32, child: u32) {
        let process = self
            .processes
            .get(&parent)
            .and_then(|process| process.forked(child))
            .unwrap_or_else(|| Process::pending(Instant::now()));
        self.account.forks += 1;
        self.processes.insert(child, process);
    }

    fn end_process(&mut self, pid: u32) {
        // The kernel half has removed it; but what was found out about the
        // process in its last moments may have been put there since.
        self.kernel.remove_process(pid);
        self.forget_stacks(pid);
        if let Some(warning) = self
            .processes
            .remove(&pid)
            .and_then(|process| process.warning())
        {
            self.warn(warning);
        }
        self.labels.retain(|&(tgid, _, _), _| tgid != pid);
    }

    fn forget_stacks(&mut self, pid: u32) {
        for id in self.stacks.forget_process(pid) {
            self.kernel.forget_stack(id);
        }
    }

    /// Names the samples of the batch and counts them.
    fn flush(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        self.check_names(&batch);
        for sample in &batch {
            self.count(sample);
        }
        self.replaced.clear();
        self.batch = batch;
        self.batch.clear();
    }

    /// Has the names of all frames in the batch checked that are remembered
    /// from before.
    fn check_names(&mut self, batch: &[Sample]) {
        let mut frames: HashMap<u32, HashSet<_>> = HashMap::new();
        let mut seen = HashSet::new();
        for sample in batch {
            if sample.stack != 0
                && seen.insert(sample.stack)
                && let Some(stack) = self.stacks.get(sample.stack)
            {
                frames
                    .entry(sample.tgid)
                    .or_default()
                    .extend(stack.frames.iter().copied());
            }
        }
        for (pid, frames) in frames {
            let frames: Vec<_> = frames.into_iter().collect();
            if let Some(process) = self.processes.get_mut(&pid) {
                self.account.renamed += u64::from(process.check_names(&frames));
            }
        }
    }

    fn count(&mut self, sample: &Sample) {
        self.account.received += 1;
        let labels = self.labels_of(sample);
        if sample.stack == 0 {
            let look = self
                .processes
                .get(&sample.tgid)
                .map_or(Look::Not, Process::look);
            let marker = markers::for_sample(sample.flags, &sample.comm, look);
            let stack = self.intern_marker(&marker);
            if let Some(process) = self.processes.get_mut(&sample.tgid) {
                process.ran |= sample.flags & sample_flags::PENDING != 0;
            }
            self.profile.add(stack, labels, 1);
            self.account.without_frames += 1;
            return;
        }
        let Some(stack) = self.stacks.get(sample.stack) else {
            // Its frames did not fit into the ring.
            self.account.lost_frames += 1;
            return;
        };
        let Some(process) = self.processes.get_mut(&sample.tgid) else {
            self.account.lost_frames += 1;
            return;
        };
        self.account.with_frames += 1;
        let taken = Moment {
            time: sample.time,
            epoch: sample.epoch,
        };
        let known = process.stack_in_profile(sample.stack, taken);
        let id = match known {
            Known::Now(id) if self.observer.is_none() => id,
            _ => {
                self.resolved.clear();
                let believed = process.resolve(&stack.frames, taken, &mut self.resolved);
                self.locations.clear();
                // Recursion repeats a frame thousands of times.
                let mut before: Option<(&Resolved, LocationId)> = None;
                for resolved in &self.resolved {
                    let location = match before {
                        Some((same, location))
                            if same.line == resolved.line
                                && Arc::ptr_eq(&same.function, &resolved.function) =>
                        {
                            location
                        }
                        _ => {
                            let function = self.profile.intern_function(&resolved.function);
                            self.profile.intern_location(function, resolved.line)
                        }
                    };
                    self.locations.push(location);
                    before = Some((resolved, location));
                }
                if let Some(marker) = markers::for_cut_end(stack.flags) {
                    let function = self.profile.intern_function(&marker);
                    self.locations
                        .push(self.profile.intern_location(function, 0));
                }
                let id = self.profile.intern_stack(&self.locations);
                if believed {
                    process.remember_stack(sample.stack, id);
                } else {
                    // The next sample of this stack may have better luck.
                    self.account.disbelieved += 1;
                }
                if let Known::Before(before) = known
                    && sample.epoch == 0
                    && before != id
                    && !self.fresh.contains(&sample.stack)
                {
                    let id = self.between(before);
                    self.replaced.insert(sample.stack, id);
                }
                id
            }
        };
        let id = match self.replaced.get(&sample.stack) {
            Some(&id) => {
                self.account.replaced += 1;
                id
            }
            None => {
                if let Some(observer) = &mut self.observer {
                    observer(&Observed {
                        sample,
                        frames: &self.resolved,
                    });
                }
                id
            }
        };
        self.profile.add(id, labels, 1);
    }

    /// A stack that was one thing when its names were last checked and is
    /// another now: its samples in between may be of either, so what differs
    /// is shown as unknown. The new one is in `locations`.
    fn between(&mut self, before: StackId) -> StackId {
        let marker = markers::replaced();
        let function = self.profile.intern_function(&marker);
        let unknown = self.profile.intern_location(function, 0);
        let before: Vec<LocationId> = self.profile.stack(before).collect();
        // Outermost frames first: they are the ones that stay.
        let mut merged: Vec<LocationId> = before
            .iter()
            .rev()
            .zip(self.locations.iter().rev())
            .map(|(old, new)| if old == new { *new } else { unknown })
            .collect();
        if before.len() != self.locations.len() {
            merged.push(unknown);
        }
        merged.reverse();
        self.profile.intern_stack(&merged)
    }

    fn intern_marker(&mut self, marker: &Arc<crate::profile::Function>) -> StackId {
        let function = self.profile.intern_function(marker);
        let location = self.profile.intern_location(function, 0);
        self.profile.intern_stack(&[location])
    }

    fn labels_of(&mut self, sample: &Sample) -> LabelsId {
        let key = (sample.tgid, sample.tid, sample.comm);
        if let Some(&id) = self.labels.get(&key) {
            return id;
        }
        let comm: Arc<str> = comm_text(&sample.comm).into();
        let id = self.profile.intern_labels(&Labels {
            pid: sample.tgid,
            tid: sample.tid,
            // Ruby gives a thread's name to the kernel, which keeps the first
            // 15 bytes of it.
            thread_name: Some(Arc::clone(&comm)),
            comm: Some(comm),
            state: None,
        });
        self.labels.insert(key, id);
        id
    }
}

/// The kernel's name of a thread, as text.
fn comm_text(comm: &[u8; 16]) -> String {
    let len = comm
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(comm.len());
    String::from_utf8_lossy(comm.get(..len).unwrap_or(comm)).into_owned()
}

fn unix_ns() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
        })
}

/// Why a recording cannot begin or go on.
#[derive(Debug)]
pub enum SessionError {
    /// A target cannot be profiled.
    Attach(AttachError),
    /// The memory of a target cannot be read.
    Memory {
        /// The target.
        pid: u32,
        /// What the system said.
        error: OpenError,
    },
    /// The kernel half cannot be used.
    Kernel(KernelError),
    /// rbprof runs in a PID namespace of its own.
    PidNamespace,
}

impl std::fmt::Display for SessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attach(error) => error.fmt(f),
            Self::Memory { pid, error } => write!(f, "process {pid}: {error}"),
            Self::Kernel(error) => error.fmt(f),
            Self::PidNamespace => f.write_str(
                "rbprof runs in a PID namespace of its own, where process ids are not those of \
                 the kernel. Run it on the host, or in a container that shares the host's \
                 (docker run --pid=host, hostPID: true)",
            ),
        }
    }
}

impl std::error::Error for SessionError {}

impl From<AttachError> for SessionError {
    fn from(error: AttachError) -> Self {
        Self::Attach(error)
    }
}

impl From<KernelError> for SessionError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(error)
    }
}
