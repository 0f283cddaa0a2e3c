//! Rubies are found wherever they are on the machine.
//!
//! The kernel half announces every Ruby that is mapped, and asks about files of
//! code that it has never seen. What existed before is found by a look through
//! `/proc`. A [`Watcher`] decides which of them are profiled; the others are
//! remembered, since their children, or they themselves after an `exec`, may be.

use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::process::ProcessEntry;
use rbprof_common::process::state;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::Mapped;
use rbprof_common::wire::verdict;

use super::Session;
use super::SessionError;
use super::process::Process;
use crate::kernel::KernelError;
use crate::memory::PinnedProcess;
use crate::targets::Target;
use crate::targets::proc;
use crate::targets::spot;
use crate::targets::spot::Files;

/// Decides which Rubies are profiled, and hears what becomes of them.
pub trait Watcher: Send {
    /// There is a Ruby in a process: it was started, was forked by `parent`, or
    /// has executed another program. Gives whether it is to be profiled.
    fn appeared(&mut self, pid: u32, parent: Option<u32>) -> bool;

    /// It is profiled from now on.
    fn attached(&mut self, pid: u32, target: &Target);

    /// It cannot be profiled.
    fn given_up(&mut self, pid: u32, why: &str);

    /// It has ended, or is no Ruby any more.
    fn ended(&mut self, pid: u32);
}

/// What the kernel half knows of a Ruby that is not profiled.
const IGNORED: ProcessEntry = ProcessEntry {
    state: state::IGNORED,
    ..ProcessEntry::PENDING
};
/// How long after its files were judged a process may still be reported as ended
/// because the kernel half did not know the answer yet.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// How long what files have no Ruby is believed: another file may take the place
/// of one.
const BELIEVED: Duration = Duration::from_secs(600);

/// What is known of the machine's Rubies.
pub(super) struct Discovery {
    pub(super) watcher: Box<dyn Watcher>,
    /// Rubies that are not profiled.
    ignored: HashSet<u32>,
    /// What the kernel half asks.
    asked: Vec<Mapped>,
    /// Processes that turned out to be Rubies when their files were judged.
    judged: HashMap<u32, Instant>,
    /// What the looks through `/proc` have found out about files.
    files: Files,
    /// Since when all that is known of files that are no Rubies.
    fresh: Instant,
}

impl Discovery {
    pub(super) fn new(watcher: Box<dyn Watcher>) -> Self {
        Self {
            watcher,
            ignored: HashSet::new(),
            asked: Vec::new(),
            judged: HashMap::new(),
            files: Files::default(),
            fresh: Instant::now(),
        }
    }
}

impl Session {
    /// Has `watcher` decide which of all the Rubies on the machine are profiled.
    /// The kernel half must have been loaded with
    /// [`discover`](crate::kernel::Options::discover).
    pub fn discover(&mut self, watcher: Box<dyn Watcher>) {
        self.discovery = Some(Discovery::new(watcher));
    }

    /// Looks for Rubies among the processes that exist.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel half has no room for one of them.
    pub fn look_through_proc(&mut self) -> Result<(), KernelError> {
        let own = std::process::id();
        let pids: Vec<u32> = std::fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|&pid| pid != own)
            .collect();
        for pid in pids {
            let Some(discovery) = &mut self.discovery else {
                break;
            };
            if self.processes.contains_key(&pid) || discovery.ignored.contains(&pid) {
                continue;
            }
            if spot::runs_ruby(pid, &mut discovery.files) {
                self.appear(pid, None)?;
            }
        }
        Ok(())
    }

    /// The Rubies that are known and not profiled.
    #[must_use]
    pub fn is_ignored(&self, pid: u32) -> bool {
        let discovery = self.discovery.as_ref();
        discovery.is_some_and(|discovery| discovery.ignored.contains(&pid))
    }

    /// Profiles a Ruby that is known from now on, or does not any more.
    ///
    /// # Errors
    /// [`SessionError`] when the kernel half has no room for it.
    pub fn select(&mut self, pid: u32, is_selected: bool) -> Result<(), SessionError> {
        match (is_selected, self.is_ignored(pid)) {
            (true, true) => self.expect_soon(pid)?,
            (false, false) if self.processes.contains_key(&pid) => {
                // What was sampled until now is still to be named.
                self.kernel.set_process(pid, &IGNORED)?;
                self.poll()?;
                if self.processes.contains_key(&pid) {
                    self.ignore(pid)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether a Ruby has just appeared, and everything should be polled every few
    /// milliseconds for a while.
    #[must_use]
    pub fn is_in_haste(&self) -> bool {
        let now = Instant::now();
        self.discovery.is_some()
            && (self.processes.values()).any(|process| process.is_followed_closely(now))
    }

    /// The kernel half tells of a mapping.
    pub(super) fn mapped(&mut self, record: Mapped) -> Result<(), KernelError> {
        if record.verdict == verdict::RUBY {
            return self.found(record.tgid);
        }
        if let Some(discovery) = &mut self.discovery {
            discovery.asked.push(record);
        }
        Ok(())
    }

    /// Takes what is told of mappings besides the kernel half.
    pub(super) fn take_mappings(&mut self) -> Result<(), KernelError> {
        if self.discovery.is_none() {
            return Ok(());
        }
        let mut mapped = Vec::new();
        let lost = self.kernel.drain_mappings(|record| mapped.push(record));
        for record in mapped {
            self.mapped(record)?;
        }
        if lost == 0 {
            Ok(())
        } else {
            self.look_through_proc()
        }
    }

    /// A target has executed another program, which may be a Ruby or not.
    pub(super) fn executed(&mut self, pid: u32) -> Result<(), KernelError> {
        self.forget_process(pid);
        let is_known = self.kernel.knows_what_is_executed();
        if let Some(discovery) = &mut self.discovery
            && !is_known
            && !spot::runs_ruby(pid, &mut discovery.files)
        {
            // If it is one, it is going to map its library, which will be told.
            self.end_process(pid);
            return Ok(());
        }
        self.appear(pid, None)
    }

    /// Answers what the kernel half has asked.
    pub(super) fn judge(&mut self) -> Result<(), KernelError> {
        let Some(discovery) = &mut self.discovery else {
            return Ok(());
        };
        let now = Instant::now();
        if now.duration_since(discovery.fresh) > BELIEVED {
            discovery.fresh = now;
            discovery.files = Files::default();
            self.kernel.forget_verdicts();
        }
        (discovery.judged).retain(|_, at| now.duration_since(*at) < AFTERWARDS);
        let asked = std::mem::take(&mut discovery.asked);
        let mut answers: HashMap<FileKey, bool> = HashMap::new();
        for record in asked {
            let answer = match answers.get(&record.file) {
                Some(&known) => known,
                None => match spot::is_ruby(record.tgid, record.file.inode, record.name()) {
                    Some(answer) => {
                        answers.insert(record.file, answer);
                        self.kernel.set_verdict(record.file, answer)?;
                        answer
                    }
                    // It is gone; the next process that maps the file asks again.
                    None => continue,
                },
            };
            if answer {
                if let Some(discovery) = &mut self.discovery {
                    discovery.judged.insert(record.tgid, now);
                }
                self.found(record.tgid)?;
            }
        }
        Ok(())
    }

    /// There is a Ruby in a process.
    fn found(&mut self, pid: u32) -> Result<(), KernelError> {
        // A target that maps it again is about to execute it: that is told.
        if self.is_known(pid) {
            return Ok(());
        }
        self.appear(pid, None)?;
        // Forks are told from now on. If this comes late, there have been some.
        for child in proc::descendants(pid) {
            if let Some(discovery) = &mut self.discovery
                && !self.processes.contains_key(&child)
                && !discovery.ignored.contains(&child)
                && spot::runs_ruby(child, &mut discovery.files)
            {
                self.appear(child, Some(pid))?;
            }
        }
        Ok(())
    }

    /// Whether a process is one of those that the watcher was asked about.
    pub(super) fn is_known(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid) || self.is_ignored(pid)
    }

    /// Asks whether a Ruby is to be profiled, and does so.
    pub(super) fn appear(&mut self, pid: u32, parent: Option<u32>) -> Result<(), KernelError> {
        if self.is_wanted(pid, parent) {
            self.expect_soon(pid)
        } else {
            self.ignore(pid)
        }
    }

    /// Whether a Ruby is to be profiled. It is where there is nobody to ask.
    pub(super) fn is_wanted(&mut self, pid: u32, parent: Option<u32>) -> bool {
        let discovery = self.discovery.as_mut();
        discovery.is_none_or(|discovery| discovery.watcher.appeared(pid, parent))
    }

    fn expect_soon(&mut self, pid: u32) -> Result<(), KernelError> {
        if let Some(discovery) = &mut self.discovery {
            discovery.ignored.remove(&pid);
        }
        self.kernel.set_process(pid, &ProcessEntry::PENDING)?;
        let process = Process::young(Instant::now());
        self.processes.insert(pid, process);
        Ok(())
    }

    /// Takes a Ruby for one that is not profiled.
    pub(super) fn ignore(&mut self, pid: u32) -> Result<(), KernelError> {
        self.kernel.set_process(pid, &IGNORED)?;
        self.forget_process(pid);
        if let Some(discovery) = &mut self.discovery {
            discovery.ignored.insert(pid);
        }
        Ok(())
    }

    /// A process is no target any more, as the kernel half has it.
    pub(super) fn left(&mut self, pid: u32) -> Result<(), SessionError> {
        self.end_process(pid);
        let Some(discovery) = &mut self.discovery else {
            return Ok(());
        };
        // It executed a Ruby in a file that the kernel half had never seen: the
        // answer came later than the end of what it ran before.
        if discovery.judged.contains_key(&pid)
            && spot::runs_ruby(pid, &mut discovery.files)
            && !self.processes.contains_key(&pid)
        {
            self.appear(pid, None)?;
        }
        Ok(())
    }

    /// Forgets Rubies that are not profiled and whose end went unnoticed.
    pub(super) fn forget_ignored(&mut self) {
        let Some(discovery) = &self.discovery else {
            return;
        };
        let gone: Vec<u32> = (discovery.ignored.iter().copied())
            .filter(|&pid| PinnedProcess::open(pid).is_err())
            .collect();
        for pid in gone {
            self.end_process(pid);
        }
    }

    /// Tells the watcher, if there is one, of an end.
    pub(super) fn tell_of_end(&mut self, pid: u32) {
        if let Some(discovery) = &mut self.discovery {
            discovery.ignored.remove(&pid);
            discovery.watcher.ended(pid);
        }
    }
}
