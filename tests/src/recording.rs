//! A recording in this process, sample by sample.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use rbprof::kernel::Counters;
use rbprof::kernel::KernelError;
use rbprof::kernel::Options;
use rbprof::profile::Profile;
use rbprof::session::Session;
use rbprof::session::SessionError;
use rbprof::session::account::Account;
use rbprof::symbolize::Executed;
use rbprof::symbolize::Resolved;
use rbprof_common::wire::Frame;
use rustix::event::PollFd;
use rustix::event::PollFlags;
use rustix::event::Timespec;
use rustix::event::poll;

use crate::rig;

/// Between two looks at the ring.
const POLL_INTERVAL_NS: i64 = 5000000;

/// A sample with frames.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// [`rbprof_common::wire::sample_flags`].
    pub flags: u32,
    /// Those of the stack, after its frames were put in order.
    pub stack_flags: u32,
    /// The thread's name.
    pub comm: String,
    /// Those of Ruby, and what the collector does on their behalf; leaf first.
    /// None if there is machine code alone.
    pub frames: Vec<Resolved>,
    /// Leaf first, as they came from the kernel half.
    pub stack: Arc<[Frame]>,
}

/// The samples that came so far.
#[derive(Clone, Debug, Default)]
pub struct SeenSoFar(Arc<Mutex<Vec<Seen>>>);

impl SeenSoFar {
    /// How many of them are so.
    pub fn count(&self, is_so: impl Fn(&Seen) -> bool) -> usize {
        self.lock().iter().filter(|seen| is_so(seen)).count()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A recording in progress.
#[derive(Debug)]
pub struct Recorder {
    session: Session,
    seen: SeenSoFar,
    second: Instant,
}

/// A recording that is over.
#[derive(Debug)]
pub struct Recording {
    /// Every sample with Ruby frames, in the order of time.
    pub seen: Vec<Seen>,
    /// What the kernel half counted.
    pub counters: Counters,
    /// What user space counted.
    pub account: Account,
    /// What a user gets.
    pub profile: Profile,
}

impl Recorder {
    /// Loads the kernel half, to see every sample; `None` if this machine does
    /// not allow it.
    ///
    /// # Errors
    /// If it cannot be loaded, and nothing may be left out here.
    pub fn new(options: &Options) -> Result<Option<Self>> {
        let Some(mut recorder) = Self::unobserved(options)? else {
            return Ok(None);
        };
        let into = recorder.seen();
        recorder.session.observe(Box::new(move |observed| {
            let sample = observed.sample;
            let comm: Vec<u8> = sample
                .comm
                .iter()
                .copied()
                .take_while(|&byte| byte != 0)
                .collect();
            let is_machine =
                |code| matches!(code, Executed::Native { .. } | Executed::Kernel { .. });
            let frames: Vec<Resolved> = observed
                .frames
                .iter()
                .filter(|frame| !is_machine(frame.code))
                .cloned()
                .collect();
            into.lock().push(Seen {
                time: sample.time,
                pid: sample.tgid,
                tid: sample.tid,
                flags: sample.flags,
                stack_flags: observed.stack.flags,
                comm: String::from_utf8_lossy(&comm).into_owned(),
                frames,
                stack: Arc::clone(&observed.stack.frames),
            });
        }));
        Ok(Some(recorder))
    }

    /// Loads the kernel half for a recording like a user's, in which names are
    /// remembered and nobody looks at single samples.
    ///
    /// # Errors
    /// As [`Recorder::new`].
    pub fn unobserved(options: &Options) -> Result<Option<Self>> {
        let session = match Session::new(options) {
            Ok(session) => session,
            Err(
                error @ SessionError::Kernel(
                    KernelError::Denied { .. } | KernelError::TooOld(_) | KernelError::NoBtf(_),
                ),
            ) => {
                rig::skip(&error.to_string())?;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Some(Self {
            session,
            seen: SeenSoFar::default(),
            second: Instant::now(),
        }))
    }

    /// Records all threads and children of these processes.
    ///
    /// # Errors
    /// If one cannot be profiled, or the ticks cannot begin.
    pub fn start(&mut self, pids: &[u32]) -> Result<()> {
        for &pid in pids {
            self.session.attach(pid)?;
        }
        self.session.start()?;
        Ok(())
    }

    /// The samples so far, also while the recording goes on.
    #[must_use]
    pub fn seen(&self) -> SeenSoFar {
        self.seen.clone()
    }

    /// The session.
    pub const fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Takes what comes until `over` says so.
    ///
    /// # Errors
    /// Those of the session and of `over`.
    pub fn run_until(&mut self, mut over: impl FnMut() -> Result<bool>) -> Result<()> {
        let wakeup = self.session.wakeup()?;
        loop {
            let last = over()?;
            self.session.poll()?;
            if last {
                return Ok(());
            }
            if self.second.elapsed() >= Duration::from_secs(1) {
                self.session.every_second()?;
                self.second = Instant::now();
            }
            wait_for(&wakeup);
        }
    }

    /// Ends the recording. The targets should still be there, or the names of
    /// the last samples may not be.
    ///
    /// # Errors
    /// Those of the session.
    pub fn finish(mut self) -> Result<Recording> {
        self.session.kernel().stop()?;
        self.session.poll()?;
        let counters = self.session.counters()?;
        let account = *self.session.account();
        let profile = self.session.finish();
        Ok(Recording {
            seen: std::mem::take(&mut *self.seen.lock()),
            counters,
            account,
            profile,
        })
    }
}

/// Waits until the kernel half has something that should not wait, or for a
/// moment.
fn wait_for(wakeup: &OwnedFd) {
    let mut ready = [PollFd::new(wakeup, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: POLL_INTERVAL_NS,
    };
    // An interrupted wait is a short one.
    let _ = poll(&mut ready, Some(&timeout));
}
