//! Native and kernel frames.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::object;

use super::Session;
use super::process::Process;
use crate::kernel::KernelError;
use crate::native::objects::Object;
use crate::native::objects::Objects;
use crate::presentation::Role;
use crate::profile::Function;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::Location;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::MappingId;
use crate::profile::Profile;
use crate::symbolize::Executed;
use crate::symbolize::Resolved;
use crate::symbolize::native::NativeNames;
use crate::symbolize::native::ObjectFile;

/// How long the end of a recording waits for names: a slow machine may still be
/// reading the symbols of a large program.
const FOR_NAMES: Duration = Duration::from_secs(20);

/// Most names of machine code that are remembered although the last profiles did
/// not have them.
const MAX_NAMES: usize = 1 << 16;

/// Stands for the kernel among the objects.
const KERNEL: u32 = u32::MAX;

impl Session {
    /// Tells the kernel half of mappings that are new, and of unwind tables that
    /// are ready; waits for those up to `patience`.
    pub(super) fn publish_mappings(&mut self, patience: Duration) -> Result<(), KernelError> {
        let Some(spaces) = &mut self.spaces else {
            return Ok(());
        };
        let now = Instant::now();
        for pid in spaces.due(now) {
            if let Some(memory) = self.processes.get(&pid).and_then(|it| it.memory()) {
                spaces.refresh(pid, memory, now);
            }
        }
        for moved in spaces.publish(self.kernel.tables(), patience, now)? {
            if let Some(entry) = self
                .processes
                .get_mut(&moved.pid)
                .and_then(|process| process.entry())
            {
                moved.apply(entry);
                let entry = *entry;
                self.kernel.set_process(moved.pid, &entry)?;
            }
        }
        for warning in std::mem::take(&mut spaces.warnings) {
            self.warn(&warning);
        }
        Ok(())
    }
}

/// The outermost native frame: where the native stack was cut, if it was.
pub(super) fn outermost(frames: &[Frame]) -> Option<&Frame> {
    let mut frames = frames.iter().rev();
    frames.find(|frame| frame.kind() == frame_kind::NATIVE)
}

/// Machine code in the profile, and its names.
#[derive(Debug, Default)]
pub(super) struct MachineCode {
    /// Where native frames are walked.
    pub(super) names: Option<NativeNames>,
    /// By number of the object: its mapping, and the function that stands for
    /// what has no name.
    entered: HashMap<u32, (MappingId, FunctionId)>,
    /// The objects of mappings, and what they are to Ruby.
    objects: HashMap<MappingId, Owner>,
}

/// The object of a mapping, by its number, and what it is to Ruby.
pub(super) type Owner = (u32, Role);

impl MachineCode {
    /// The place of a frame in the profile. Has a name looked for, if it needs
    /// one.
    pub(super) fn locate(
        &mut self,
        resolved: &Resolved,
        profile: &mut Profile,
        objects: Option<&Objects>,
        process: &Process,
    ) -> LocationId {
        let (number, address) = match resolved.code {
            Executed::Native { object, address } => (object, address),
            Executed::Kernel { address } => (KERNEL, address),
            Executed::Compiled => {
                let function = profile.intern_function(&resolved.function);
                return profile.intern_compiled_location(function, resolved.line);
            }
            Executed::Ruby | Executed::Collector => {
                let function = profile.intern_function(&resolved.function);
                return profile.intern_location(function, resolved.line);
            }
        };
        let (mapping, function) = match self.entered.get(&number) {
            Some(&entered) => entered,
            None => self.enter(number, profile, objects, process),
        };
        if let Some(names) = &mut self.names {
            match number {
                KERNEL => names.want_kernel(address),
                object::UNKNOWN | object::ANONYMOUS => {}
                number => names.want(number, address),
            }
        }
        profile.intern_native_location(function, 0, mapping, address)
    }

    /// Enters an object into the profile.
    fn enter(
        &mut self,
        number: u32,
        profile: &mut Profile,
        objects: Option<&Objects>,
        process: &Process,
    ) -> (MappingId, FunctionId) {
        let found = objects.and_then(|objects| objects.get(number));
        let path: Arc<str> = match number {
            KERNEL => "[kernel.kallsyms]".into(),
            object::UNKNOWN => "[unknown]".into(),
            _ => found.map_or("[anonymous]", |it| &it.path).into(),
        };
        let mapping = profile.intern_mapping(&Mapping {
            file: Arc::clone(&path),
            build_id: found.map_or_else(String::new, build_id).into(),
            ..Mapping::default()
        });
        let (kind, name) = match number {
            KERNEL => (FunctionKind::Kernel, "kernel"),
            _ => (FunctionKind::Native, short_name(&path)),
        };
        let label: Arc<str> = format!("[{}]", name.trim_matches(['[', ']'])).into();
        let function = profile.intern_function(&Arc::new(Function {
            kind,
            base_label: Arc::clone(&label),
            label,
            file: "".into(),
            first_line: 0,
        }));
        self.entered.insert(number, (mapping, function));
        self.objects.insert(mapping, (number, role(number, found)));
        if let (Some(names), Some(object)) = (&mut self.names, found)
            && let Ok(file) = object.file()
        {
            let process = process.memory().map(|it| Arc::clone(it.process()));
            names.add_object(
                number,
                ObjectFile {
                    file,
                    path,
                    process,
                },
            );
        }
        (mapping, function)
    }

    /// What went wrong with names, once all that were asked for are there, or
    /// have taken too long.
    pub(super) fn notes(&self) -> Vec<String> {
        let Some(names) = &self.names else {
            return Vec::new();
        };
        let in_time = names.wait(FOR_NAMES);
        let mut notes = names.notes();
        if !in_time {
            notes
                .push("some native functions have no names: finding them took too long".to_owned());
        }
        notes
    }

    /// Another profile begins. Gives the objects of the mappings of the one that
    /// ends, and what comes once all names that it wants have been looked for.
    pub(super) fn begin_profile(&mut self) -> (HashMap<MappingId, Owner>, Option<Receiver<()>>) {
        self.entered.clear();
        let named = self.names.as_mut().map(|names| {
            let named = names.when_done();
            names.forget_unused(MAX_NAMES);
            named
        });
        (std::mem::take(&mut self.objects), named)
    }

    /// What the code of a mapping is to Ruby.
    pub(super) fn role(&self, mapping: MappingId) -> Role {
        Self::role_in(&self.objects, mapping)
    }

    /// The name of a place in machine code.
    pub(super) fn name(&self, location: &Location) -> Option<Arc<Function>> {
        self.name_in(&self.objects, location)
    }

    /// What the code of a mapping of this profile is to Ruby.
    pub(super) fn role_in(objects: &HashMap<MappingId, Owner>, mapping: MappingId) -> Role {
        let known = objects.get(&mapping);
        known.map_or_else(Role::default, |(_, role)| *role)
    }

    /// The name of a place in the machine code of this profile.
    pub(super) fn name_in(
        &self,
        objects: &HashMap<MappingId, Owner>,
        location: &Location,
    ) -> Option<Arc<Function>> {
        let names = self.names.as_ref()?;
        match objects.get(&location.mapping)?.0 {
            KERNEL => names.lookup_kernel(location.address),
            object::UNKNOWN | object::ANONYMOUS => None,
            number => names.lookup(number, location.address),
        }
    }
}

fn role(number: u32, found: Option<&Object>) -> Role {
    match found {
        Some(object) => match object.interpreter {
            Some(true) => Role::Program,
            Some(false) => Role::Interpreter,
            // What starts a shared one.
            None if is_ruby_s_own(&object.path) => Role::Interpreter,
            None => Role::of_file(&object.path),
        },
        None if number == object::ANONYMOUS => Role::Generated,
        None => Role::default(),
    }
}

/// Whether a file has, by its name, the interpreter and nothing else: `ruby`,
/// `ruby3.3`, `libruby.so.3.3.8`, `libruby-3.1.so.3.1.2`.
pub(super) fn is_ruby_s_own(path: &str) -> bool {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let name = short_name(path);
    name.starts_with("libruby")
        || name
            .strip_prefix("ruby")
            .is_some_and(|rest| rest.chars().all(|it| it.is_ascii_digit() || it == '.'))
}

fn short_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn build_id(object: &Object) -> String {
    let bytes = object.build_id.iter();
    bytes.map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::is_ruby_s_own;

    #[test]
    fn interpreters_are_known_by_their_names() {
        for path in [
            "/usr/bin/ruby",
            "/usr/bin/ruby3.3",
            "/opt/ruby/bin/ruby (deleted)",
            "/usr/lib/libruby-3.1.so.3.1.2",
            "/opt/lib/libruby.so.3.4",
        ] {
            assert!(is_ruby_s_own(path), "{path}");
        }
        for path in ["/usr/bin/rubyx", "/usr/bin/app", "/usr/lib/ruby/zlib.so"] {
            assert!(!is_ruby_s_own(path), "{path}");
        }
    }
}
