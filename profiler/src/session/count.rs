//! Samples are named and counted.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use rbprof_common::wire::Sample;
use rbprof_common::wire::sample_flags;

use super::Observed;
use super::Session;
use super::machine;
use super::markers;
use super::process::Known;
use super::process::Look;
use super::process::Process;
use crate::presentation::NativeFrames;
use crate::profile::Function;
use crate::profile::Labels;
use crate::profile::LabelsId;
use crate::profile::LocationId;
use crate::profile::StackId;
use crate::symbolize::Executed;
use crate::symbolize::Moment;
use crate::symbolize::Resolved;

impl Session {
    /// Names the samples of the batch and counts them.
    pub(super) fn flush(&mut self) {
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
        if self.is_ignored(sample.tgid) {
            self.account.not_selected += 1;
            return;
        }
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
        let Some(stack) = self.stacks.get(sample.stack).cloned() else {
            // Its frames did not fit into the ring.
            self.account.lost_frames += 1;
            return;
        };
        let Some(process) = self.processes.get_mut(&sample.tgid) else {
            self.account.lost_frames += 1;
            return;
        };
        self.account.with_frames += 1;
        if sample.flags & (sample_flags::UNMAPPED | sample_flags::NO_TABLE) != 0
            && let Some(spaces) = &mut self.spaces
            && let Some(cut) = machine::outermost(&stack.frames)
        {
            spaces.met(sample.tgid, cut.object(), cut.pc);
        }
        self.account.united +=
            u64::from(sample.flags & !stack.flags & sample_flags::UNMATCHED != 0);
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
                let mut native_end = 0;
                for resolved in &self.resolved {
                    let location = match before {
                        Some((same, location))
                            if same.line == resolved.line
                                && same.code == resolved.code
                                && Arc::ptr_eq(&same.function, &resolved.function) =>
                        {
                            location
                        }
                        _ => self.machine.locate(
                            resolved,
                            &mut self.profile,
                            self.spaces.as_ref().map(|spaces| &spaces.objects),
                            process,
                        ),
                    };
                    self.locations.push(location);
                    before = Some((resolved, location));
                    if matches!(resolved.code, Executed::Native { .. }) {
                        native_end = self.locations.len();
                    }
                }
                if stack.flags & sample_flags::NATIVE_CUT != 0
                    && self.presentation.native == NativeFrames::All
                {
                    let function = self.profile.intern_function(&markers::native_cut());
                    let location = self.profile.intern_location(function, 0);
                    self.locations.insert(native_end, location);
                }
                if let Some(marker) = markers::for_cut_end(stack.flags) {
                    let function = self.profile.intern_function(&marker);
                    self.locations
                        .push(self.profile.intern_location(function, 0));
                }
                if self.locations.is_empty() {
                    let marker = markers::nothing_to_show();
                    let function = self.profile.intern_function(&marker);
                    self.locations
                        .push(self.profile.intern_location(function, 0));
                }
                let id = self.profile.intern_stack(&self.locations);
                // The next sample of a stack that is not whole may have better
                // luck.
                if !believed {
                    self.account.disbelieved += 1;
                } else if self.resolved.iter().any(Resolved::is_unreadable) {
                    self.account.unreadable += 1;
                } else {
                    process.remember_stack(sample.stack, id);
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
                        stack: &stack,
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

    fn intern_marker(&mut self, marker: &Arc<Function>) -> StackId {
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
pub(super) fn comm_text(comm: &[u8; 16]) -> String {
    let len = comm
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(comm.len());
    String::from_utf8_lossy(comm.get(..len).unwrap_or(comm)).into_owned()
}
