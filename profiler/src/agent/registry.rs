//! The Rubies on the machine: who they are, and which are profiled.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use super::http::backend;
use super::identity::Identity;
use super::identity::ServiceRule;
use super::select;
use super::select::Selection;
use crate::memory::PinnedProcess;
use crate::session::discover::Watcher;
use crate::targets::Target;

/// When a process that appeared is looked at again: by then it has a title, and the
/// user that it runs as.
const AGAIN: Duration = Duration::from_millis(1500);
/// Most processes remembered that have ended since the last profile.
const MAX_ENDED: usize = 8192;
/// The service of a process of which nothing is known any more.
const UNKNOWN: &str = "unknown";

/// How far the profiling of a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The rules do not select it.
    NotSelected,
    /// Its Ruby is not up yet.
    Starting,
    /// It is profiled.
    Profiled,
    /// It cannot be profiled.
    GivenUp,
}

/// A process that has or had a Ruby.
#[derive(Debug)]
struct Known {
    identity: Arc<Identity>,
    stage: Stage,
    since: SystemTime,
    /// When it is to be looked at again.
    again: Option<Instant>,
    samples: u64,
    roots: Vec<(String, String)>,
    missing: Vec<String>,
    /// Why it is not selected.
    verdict: Option<String>,
}

/// What has happened to processes, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Rubies that appeared, by start, fork or `exec`.
    pub appeared: u64,
    /// Rubies whose roots were found.
    pub attached: u64,
    /// Rubies that cannot be profiled.
    pub given_up: u64,
    /// Rubies that ended before theirs were found.
    pub missed: u64,
    /// Rubies that have ended.
    pub ended: u64,
}

#[derive(Debug, Default)]
struct Processes {
    selection: Selection,
    services: Vec<ServiceRule>,
    known: HashMap<u32, Known>,
    /// Those that have ended, with when: their last samples are still to come.
    ended: HashMap<u32, (Known, Instant)>,
    /// A process has the id of one that has ended just now.
    is_reused: bool,
    events: Events,
}

/// How many processes there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Profiled.
    pub profiled: usize,
    /// Starting.
    pub starting: usize,
    /// Not selected.
    pub not_selected: usize,
    /// Given up.
    pub given_up: usize,
}

/// The Rubies on the machine. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Registry(Arc<Mutex<Processes>>);

impl Registry {
    /// One that selects and names by these rules.
    #[must_use]
    pub fn new(selection: Selection, services: Vec<ServiceRule>) -> Self {
        Self(Arc::new(Mutex::new(Processes {
            selection,
            services,
            ..Processes::default()
        })))
    }

    /// Selects and names by other rules; see [`Registry::look_at_all`].
    pub fn set_rules(&self, selection: Selection, services: Vec<ServiceRule>) {
        let mut processes = self.lock();
        processes.selection = selection;
        processes.services = services;
    }

    /// Looks again at those that appeared a moment ago. Gives which of them are
    /// selected now, or are not any more.
    #[must_use]
    pub fn look_at_new(&self, now: Instant) -> Vec<(u32, bool)> {
        self.look(|known| known.again.is_some_and(|again| again <= now))
    }

    /// Looks again at all.
    #[must_use]
    pub fn look_at_all(&self) -> Vec<(u32, bool)> {
        self.look(|_| true)
    }

    fn look(&self, is_due: impl Fn(&Known) -> bool) -> Vec<(u32, bool)> {
        let mut processes = self.lock();
        let due: Vec<u32> = (processes.known.iter())
            .filter(|(_, known)| is_due(known))
            .map(|(&pid, _)| pid)
            .collect();
        let mut changed = Vec::new();
        for pid in due {
            if let Some(is_selected) = processes.look_at(pid) {
                changed.push((pid, is_selected));
            }
        }
        changed
    }

    /// Who a process is, or was.
    #[must_use]
    pub fn identity(&self, pid: u32) -> Arc<Identity> {
        let processes = self.lock();
        processes.of(pid).map_or_else(
            || {
                Arc::new(Identity {
                    pid,
                    service: UNKNOWN.into(),
                    ..Identity::default()
                })
            },
            |known| Arc::clone(&known.identity),
        )
    }

    /// What the user should know of a process's profile.
    #[must_use]
    pub fn missing(&self, pid: u32) -> Vec<String> {
        let processes = self.lock();
        let known = processes.of(pid);
        known.map_or_else(Vec::new, |known| known.missing.clone())
    }

    /// Counts samples of a process.
    pub fn count(&self, pid: u32, samples: u64) {
        let mut processes = self.lock();
        if let Some(known) = processes.known.get_mut(&pid) {
            known.samples += samples;
        }
    }

    /// Forgets those that had ended by then.
    pub fn forget_ended(&self, by: Instant) {
        self.lock().ended.retain(|_, (_, at)| *at > by);
    }

    /// Whether a process has appeared with the id of another that has ended and may
    /// have samples in the profile: it had better begin another one. Asking resets
    /// it.
    #[must_use]
    pub fn takes_reuse(&self) -> bool {
        std::mem::take(&mut self.lock().is_reused)
    }

    /// Whether a process is profiled, or about to be.
    #[must_use]
    pub fn is_selected(&self, pid: u32) -> bool {
        let processes = self.lock();
        let known = processes.known.get(&pid);
        known.is_some_and(|known| matches!(known.stage, Stage::Starting | Stage::Profiled))
    }

    /// Whether any process of this service is profiled, or about to be.
    #[must_use]
    pub fn has_service(&self, name: &str) -> bool {
        let processes = self.lock();
        (processes.known.values()).any(|known| {
            &*known.identity.service == name
                && matches!(known.stage, Stage::Starting | Stage::Profiled)
        })
    }

    /// All processes, for a reader.
    #[must_use]
    pub fn targets(&self) -> Vec<backend::Target> {
        let processes = self.lock();
        let mut targets: Vec<_> = processes.known.values().map(Known::target).collect();
        targets.sort_by_key(|target| target.identity.pid);
        targets
    }

    /// How many there are.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let mut numbers = Numbers::default();
        for known in self.lock().known.values() {
            *match known.stage {
                Stage::NotSelected => &mut numbers.not_selected,
                Stage::Starting => &mut numbers.starting,
                Stage::Profiled => &mut numbers.profiled,
                Stage::GivenUp => &mut numbers.given_up,
            } += 1;
        }
        numbers
    }

    /// What has happened.
    #[must_use]
    pub fn events(&self) -> Events {
        self.lock().events
    }

    fn lock(&self) -> MutexGuard<'_, Processes> {
        // What a panic could leave half done is put right by the next look.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn target(&self) -> backend::Target {
        let mut missing = self.missing.clone();
        missing.extend(self.verdict.clone());
        if self.stage == Stage::Starting {
            missing.push("its Ruby is not up yet, or has not been found".to_owned());
        }
        backend::Target {
            identity: Arc::clone(&self.identity),
            is_profiled: self.stage == Stage::Profiled,
            since: self.since,
            samples: self.samples,
            roots: self.roots.clone(),
            missing,
        }
    }
}

impl Processes {
    /// A process, or one that has ended a moment ago.
    fn of(&self, pid: u32) -> Option<&Known> {
        let known = self.known.get(&pid);
        known.or_else(|| self.ended.get(&pid).map(|(known, _)| known))
    }

    /// Finds out who a process is and whether it is selected; why not, otherwise.
    /// `None` once it is gone.
    fn judge(
        &self,
        pid: u32,
        ruby: &str,
        earlier: Option<&Identity>,
    ) -> Option<(Identity, Result<(), String>)> {
        let process = PinnedProcess::open(pid).ok()?;
        let identity = Identity::of(&process, ruby, &self.services, earlier);
        let uid = select::effective_uid(&process);
        let verdict = self.selection.verdict(&identity, uid);
        let verdict = if verdict.is_selected() {
            Ok(())
        } else {
            Err(verdict.to_string())
        };
        Some((identity, verdict))
    }

    /// Looks at a known process again. Gives whether it is selected, if that has
    /// changed.
    fn look_at(&mut self, pid: u32) -> Option<bool> {
        let known = self.known.get_mut(&pid)?;
        known.again = None;
        let earlier = Arc::clone(&known.identity);
        let (identity, verdict) = self.judge(pid, &earlier.ruby, Some(&earlier))?;
        let known = self.known.get_mut(&pid)?;
        if identity.started != earlier.started {
            // It is another process; the end of this one will be told.
            return None;
        }
        if identity != *earlier {
            known.identity = Arc::new(identity);
        }
        let was_selected = known.stage != Stage::NotSelected;
        known.verdict = verdict.err();
        let is_selected = known.verdict.is_none();
        if is_selected == was_selected {
            return None;
        }
        known.stage = if is_selected {
            Stage::Starting
        } else {
            Stage::NotSelected
        };
        Some(is_selected)
    }
}

impl Watcher for Registry {
    fn appeared(&mut self, pid: u32, parent: Option<u32>) -> bool {
        let mut processes = self.lock();
        processes.events.appeared += 1;
        let parent = parent.and_then(|parent| processes.of(parent));
        let earlier = parent.map(|parent| Arc::clone(&parent.identity));
        let ruby = earlier.as_ref().map_or("", |parent| &*parent.ruby);
        // A child is a copy: what was found in its parent is found in it.
        let inherited =
            parent.map(|parent| (parent.stage, parent.roots.clone(), parent.missing.clone()));
        let found = processes.judge(pid, ruby, earlier.as_deref());
        let (identity, verdict) = found.unwrap_or_else(|| {
            // It is gone already. Its samples may be there.
            let identity = earlier.as_deref().cloned().unwrap_or_else(|| Identity {
                service: UNKNOWN.into(),
                ..Identity::default()
            });
            (Identity { pid, ..identity }, Ok(()))
        });
        let (stage, roots, missing) = match inherited {
            Some((Stage::Profiled, roots, missing)) => (Stage::Profiled, roots, missing),
            _ => (Stage::Starting, Vec::new(), Vec::new()),
        };
        let verdict = verdict.err();
        let is_selected = verdict.is_none();
        let stage = if is_selected {
            stage
        } else {
            Stage::NotSelected
        };
        if (processes.ended.get(&pid)).is_some_and(|(ended, _)| ended.samples_may_be_left()) {
            processes.is_reused = true;
        }
        let known = Known {
            identity: Arc::new(identity),
            stage,
            since: SystemTime::now(),
            again: Some(Instant::now() + AGAIN),
            samples: 0,
            roots,
            missing,
            verdict,
        };
        processes.known.insert(pid, known);
        is_selected
    }

    fn attached(&mut self, pid: u32, target: &Target) {
        let mut processes = self.lock();
        processes.events.attached += 1;
        let ruby = target.ruby.version.to_string();
        let earlier = processes.known.get(&pid).map(|it| Arc::clone(&it.identity));
        let identity = Identity::of(
            &target.process,
            &ruby,
            &processes.services,
            earlier.as_deref(),
        );
        let is_gone = identity.command.is_empty();
        if let Some(known) = processes.known.get_mut(&pid) {
            known.identity = Arc::new(match earlier {
                // It has ended meanwhile: what was known is all there is.
                Some(earlier) if is_gone => Identity {
                    ruby,
                    ..(*earlier).clone()
                },
                _ => identity,
            });
            known.stage = Stage::Profiled;
            known.roots = (target.provenance.iter())
                .map(|found| (found.what.to_owned(), found.how.clone()))
                .collect();
            known.missing.clone_from(&target.warnings);
        }
    }

    fn given_up(&mut self, pid: u32, why: &str) {
        let mut processes = self.lock();
        processes.events.given_up += 1;
        if let Some(known) = processes.known.get_mut(&pid) {
            known.stage = Stage::GivenUp;
            known.missing = vec![why.to_owned()];
            log::info!(
                "process {pid} ({}) cannot be profiled: {why}",
                known.identity.command
            );
        }
    }

    fn ended(&mut self, pid: u32) {
        let mut processes = self.lock();
        let Some(known) = processes.known.remove(&pid) else {
            return;
        };
        processes.events.ended += 1;
        processes.events.missed += u64::from(known.stage == Stage::Starting);
        if known.stage != Stage::NotSelected && processes.ended.len() < MAX_ENDED {
            processes.ended.insert(pid, (known, Instant::now()));
        }
    }
}

impl Known {
    /// Whether it has been sampled, as far as is known.
    fn samples_may_be_left(&self) -> bool {
        matches!(self.stage, Stage::Starting | Stage::Profiled)
    }
}

#[cfg(test)]
mod tests {
    use super::super::select::Rule;
    use super::*;

    fn rules(texts: &[&str]) -> Vec<Rule> {
        texts
            .iter()
            .map(|text| Rule::parse(text).unwrap())
            .collect()
    }

    fn own() -> u32 {
        std::process::id()
    }

    #[test]
    fn a_process_that_is_not_selected_is_remembered() {
        let selection = Selection {
            include: rules(&["uid=4000000000"]),
            exclude: Vec::new(),
        };
        let mut registry = Registry::new(selection, Vec::new());
        assert!(!registry.appeared(own(), None));
        assert_eq!(registry.numbers().not_selected, 1);
        let targets = registry.targets();
        assert_eq!(targets[0].missing, ["no include rule fits"]);
        assert!(!targets[0].is_profiled);
        // Nothing is due before its time.
        assert_eq!(registry.look_at_new(Instant::now()), []);
        registry.set_rules(Selection::default(), Vec::new());
        let later = Instant::now() + AGAIN;
        assert_eq!(registry.look_at_new(later), [(own(), true)]);
        assert_eq!(registry.look_at_all(), []);
        assert_eq!(registry.numbers().starting, 1);
        assert!(registry.is_selected(own()));
    }

    #[test]
    fn who_has_ended_is_known_until_its_samples_are() {
        let services = vec![ServiceRule::parse("shop=.").unwrap()];
        let mut registry = Registry::new(Selection::default(), services);
        assert!(registry.appeared(own(), None));
        assert!(registry.has_service("shop"));
        registry.ended(own());
        assert!(!registry.has_service("shop"));
        assert_eq!(&*registry.identity(own()).service, "shop");
        assert_eq!(registry.events().missed, 1);
        assert!(!registry.takes_reuse());
        assert!(registry.appeared(own(), None));
        assert!(registry.takes_reuse());
        assert!(!registry.takes_reuse());
        registry.ended(own());
        registry.forget_ended(Instant::now());
        assert_eq!(&*registry.identity(own()).service, UNKNOWN);
    }

    #[test]
    fn a_child_that_is_gone_is_its_parent_s() {
        let services = vec![ServiceRule::parse("shop=.").unwrap()];
        let mut registry = Registry::new(Selection::default(), services);
        assert!(registry.appeared(own(), None));
        // Larger than any that the kernel gives out.
        let child = 1 << 30;
        assert!(registry.appeared(child, Some(own())));
        let identity = registry.identity(child);
        assert_eq!((identity.pid, &*identity.service), (child, "shop"));
        assert_eq!(&*registry.identity(child + 1).service, UNKNOWN);
    }
}
