//! Target processes are followed: found to be Rubies, forked, executed, ended.

use std::time::Duration;
use std::time::Instant;

use rbprof_common::process::ProcessEntry;
use rbprof_common::process::state;

use super::Session;
use super::SessionError;
use super::machine;
use super::process::Look;
use super::process::Process;
use super::process::Readiness;
use crate::native::spaces::Interpreter;
use crate::targets::AttachError;
use crate::targets::Target;
use crate::targets::ThreadPointer;

/// How long a process may run before it is taken for one that runs no Ruby.
const PATIENCE: Duration = Duration::from_secs(3);

impl Session {
    /// Looks for a Ruby in a process.
    pub(super) fn find_ruby(&mut self, pid: u32) -> Result<Target, SessionError> {
        let threads: Vec<ThreadPointer> = self
            .kernel
            .thread_pointers(pid)?
            .into_iter()
            .map(ThreadPointer::from)
            .collect();
        Ok(self.attacher.attach(pid, &threads)?)
    }

    pub(super) fn take_target(&mut self, pid: u32, target: Target) -> Result<(), SessionError> {
        // Where Rubies are discovered, each has a profile of its own.
        if self.discovery.is_none() {
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
        }
        let mut entry = ProcessEntry {
            state: state::READY,
            ..target.entry
        };
        // It may not have called it yet. Should it be another function, no stack
        // will have it where its Ruby frames need it, and all will say so.
        if let (0, Some(candidate)) = (entry.vm_exec[0].end, &target.vm_exec_candidate) {
            entry.vm_exec = candidate.ranges;
        }
        let interpreter = Interpreter {
            extent: target.ruby.extent,
            is_embedded: !machine::is_ruby_s_own(&target.ruby.path),
        };
        let process =
            Process::ready(target, entry).map_err(|error| SessionError::Memory { pid, error })?;
        self.kernel.set_process(pid, &entry)?;
        if let (Some(spaces), Some(memory)) = (&mut self.spaces, process.memory()) {
            spaces.attach(pid, memory, interpreter, Instant::now());
        }
        if let (Some(discovery), Some(target)) = (&mut self.discovery, process.target()) {
            discovery.watcher.attached(pid, target);
        }
        self.processes.insert(pid, process);
        Ok(())
    }

    /// Looks again at processes that were not ready and have run since.
    pub(super) fn look_again(&mut self) -> Result<(), SessionError> {
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
                    | SessionError::Thread(_)
                    | SessionError::Proc),
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
                    let hopeless = matches!(error, AttachError::TooOld { .. });
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

    pub(super) fn warn(&mut self, warning: &str) {
        let warnings = &mut self.profile.metadata.warnings;
        if !warnings.iter().any(|known| known == warning) {
            warnings.push(warning.to_owned());
        }
    }

    pub(super) fn looks_like(&mut self, pid: u32, look: Look) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.looks_like(look);
        }
    }

    /// A process that is a target by descent runs no Ruby that can be walked.
    pub(super) fn give_up_on(&mut self, pid: u32, error: &AttachError) -> Result<(), SessionError> {
        let entry = ProcessEntry {
            state: state::NOT_RUBY,
            ..ProcessEntry::default()
        };
        self.kernel.set_process(pid, &entry)?;
        if let Some(process) = self.processes.get_mut(&pid) {
            process.readiness = Readiness::NotRuby;
        }
        if let Some(discovery) = &mut self.discovery {
            discovery.watcher.given_up(pid, &error.to_string());
        } else if !matches!(error, AttachError::NotRuby { .. }) {
            self.warn(&error.to_string());
        }
        Ok(())
    }

    pub(super) fn fork_process(&mut self, parent: u32, child: u32) -> Result<(), SessionError> {
        self.account.forks += 1;
        if self.discovery.is_some() && self.is_known(child) {
            // It was found in another way already.
            return Ok(());
        }
        if self.is_ignored(parent) {
            // The child may have another title or user soon, and is asked for again.
            return Ok(self.appear(child, Some(parent))?);
        }
        if !self.is_wanted(child, Some(parent)) {
            return Ok(self.ignore(child)?);
        }
        let forked = self
            .processes
            .get(&parent)
            .and_then(|process| process.forked(child));
        match forked {
            Some(process) => {
                self.processes.insert(child, process);
                if let Some(spaces) = &mut self.spaces {
                    spaces.fork(parent, child, Instant::now());
                }
                Ok(())
            }
            // The kernel half may have taken it for a copy of a known Ruby.
            None => self.expect(child),
        }
    }

    pub(super) fn end_process(&mut self, pid: u32) {
        self.forget_process(pid);
        self.tell_of_end(pid);
        // The kernel half has removed it; but what was found out about the
        // process in its last moments may have been put there since.
        self.kernel.remove_process(pid);
    }

    /// Forgets what is known of a process, but not what it did.
    pub(super) fn forget_process(&mut self, pid: u32) {
        self.forget_stacks(pid);
        let process = self.processes.remove(&pid);
        if self.discovery.is_none()
            && let Some(warning) = process.and_then(|process| process.warning())
        {
            self.warn(warning);
        }
        if let Some(spaces) = &mut self.spaces {
            spaces.leave(pid);
        }
        self.labels.retain(|&(tgid, _, _), _| tgid != pid);
    }

    pub(super) fn forget_stacks(&mut self, pid: u32) {
        for id in self.stacks.forget_process(pid) {
            self.kernel.forget_stack(id);
        }
    }
}
