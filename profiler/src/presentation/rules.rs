//! What code is whose, and what is shown.

use std::sync::Arc;

use super::NativeFrames;
use super::Presentation;
use super::Role;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Location;
use crate::profile::MappingId;
use crate::profile::Profile;

/// What the names of functions of the interpreter begin with.
const INTERPRETER: [&str; 3] = ["rb_", "ruby_", "vm_"];

/// Functions that start a program or a thread, in glibc and in musl.
const START_UP: [&str; 10] = [
    "_start",
    "_start_c",
    "main",
    "start",
    "start_thread",
    "clone",
    "__clone",
    "clone3",
    "__clone3",
    "libc_start_main_stage2",
];
/// One of them has a different end in every other release.
const LIBC_START: &str = "__libc_start_";

/// A location, and what the rules need to know of it.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) location: Location,
    /// With the name that was found for it.
    pub(super) function: Arc<Function>,
    pub(super) code: Code,
}

/// Whose code a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// A method, in Ruby or in C.
    Method,
    /// Not code.
    Marker,
    /// Machinery of the interpreter.
    Interpreter,
    /// Code that was made while the program ran.
    Generated,
    /// The C library.
    Libc,
    /// What else is in the program that has the interpreter in it.
    Program,
    /// A C extension.
    Extension,
    /// Another library.
    Library,
    Kernel,
}

impl Frame {
    /// Whether it is machine code without a name: its label is that of its file,
    /// in brackets.
    pub(super) fn is_nameless(&self) -> bool {
        is_nameless(&self.function)
    }

    fn starts_up(&self) -> bool {
        let name = &*self.function.base_label;
        START_UP.contains(&name) || name.starts_with(LIBC_START)
    }

    /// Whether it is shown in a stack with methods (`in_ruby`) or without; in one
    /// with methods, on a method (`inside`) or below all of them.
    pub(super) fn is_shown(&self, presentation: Presentation, in_ruby: bool, inside: bool) -> bool {
        let Presentation { native, kernel } = presentation;
        match (self.code, native) {
            (Code::Method | Code::Marker, _) => true,
            (_, NativeFrames::None) => false,
            (Code::Kernel, _) => kernel,
            (_, NativeFrames::All) => true,
            (_, NativeFrames::Extensions) if !in_ruby => true,
            (Code::Interpreter | Code::Generated, _) => false,
            (Code::Libc, _) => inside,
            (Code::Program | Code::Extension | Code::Library, _) => inside || !self.starts_up(),
        }
    }
}

fn is_nameless(function: &Function) -> bool {
    function.label.starts_with('[') && function.label.ends_with(']')
}

/// What there is to know of every location, by its index.
pub(super) fn frames(
    profile: &Profile,
    role: impl Fn(MappingId) -> Role,
    name: impl Fn(&Location) -> Option<Arc<Function>>,
) -> Vec<Frame> {
    profile
        .locations()
        .map(|(_, &location)| {
            let recorded = profile.function(location.function).cloned();
            let recorded = recorded.unwrap_or_else(super::rebuild::nothing_to_show);
            let kind = recorded.kind;
            let function = match kind {
                FunctionKind::Native | FunctionKind::Kernel => name(&location).unwrap_or(recorded),
                _ => recorded,
            };
            let code = match kind {
                FunctionKind::Ruby | FunctionKind::CFunction => Code::Method,
                FunctionKind::Marker => Code::Marker,
                FunctionKind::Kernel => Code::Kernel,
                FunctionKind::Native => match role(location.mapping) {
                    Role::Interpreter => Code::Interpreter,
                    Role::Program if is_nameless(&function) => Code::Interpreter,
                    Role::Program if is_of_interpreter(&function.base_label) => Code::Interpreter,
                    Role::Program => Code::Program,
                    Role::Libc => Code::Libc,
                    Role::Generated => Code::Generated,
                    Role::Extension => Code::Extension,
                    Role::Library => Code::Library,
                },
            };
            Frame {
                location,
                function,
                code,
            }
        })
        .collect()
}

fn is_of_interpreter(name: &str) -> bool {
    INTERPRETER.iter().any(|prefix| name.starts_with(prefix))
}
