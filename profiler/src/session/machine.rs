//! Native and kernel frames.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use rbprof_common::wire::object;

use super::Session;
use crate::kernel::KernelError;
use crate::native::objects::Objects;
use crate::profile::Function;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::MappingId;
use crate::profile::Profile;
use crate::symbolize::Executed;
use crate::symbolize::Resolved;

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

/// The place of a frame in the profile.
pub(super) fn locate(
    resolved: &Resolved,
    profile: &mut Profile,
    known: &mut HashMap<u32, (MappingId, FunctionId)>,
    objects: Option<&Objects>,
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
    let (mapping, function) = *known
        .entry(number)
        .or_insert_with(|| enter(number, profile, objects));
    profile.intern_native_location(function, 0, mapping, address)
}

/// Enters an object into the profile.
fn enter(number: u32, profile: &mut Profile, objects: Option<&Objects>) -> (MappingId, FunctionId) {
    let (path, build_id, kind, name) = match number {
        KERNEL => (
            Cow::Borrowed("[kernel.kallsyms]"),
            String::new(),
            FunctionKind::Kernel,
            "kernel".to_owned(),
        ),
        object::UNKNOWN => (
            Cow::Borrowed("[unknown]"),
            String::new(),
            FunctionKind::Native,
            "unknown".to_owned(),
        ),
        number => match objects.and_then(|objects| objects.get(number)) {
            Some(object) => (
                Cow::Borrowed(object.path.as_str()),
                hexadecimal(&object.build_id),
                FunctionKind::Native,
                short_name(&object.path).to_owned(),
            ),
            None => (
                Cow::Borrowed("[anonymous]"),
                String::new(),
                FunctionKind::Native,
                "anonymous".to_owned(),
            ),
        },
    };
    let mapping = profile.intern_mapping(&Mapping {
        file: path.as_ref().into(),
        build_id: build_id.into(),
        ..Mapping::default()
    });
    let label: Arc<str> = format!("[{}]", name.trim_matches(['[', ']'])).into();
    let function = profile.intern_function(&Arc::new(Function {
        kind,
        base_label: Arc::clone(&label),
        label,
        file: "".into(),
        first_line: 0,
    }));
    (mapping, function)
}

fn short_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
