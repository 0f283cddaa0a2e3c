//! How a recorded profile is shown: names for machine code, and which of it.
//!
//! A recording has the frames of machine code unnamed, with all that the
//! interpreter does between two methods. [`present`] makes of it the profile that a
//! reader wants: addresses get the names that were found for them, frames that
//! were not asked for go, and methods in C get the file that they are in. Counts
//! of stacks that are then equal are added; no sample is lost.
//!
//! | module | what it does |
//! |---|---|
//! | `rules` | what code is whose, and what is shown |
//! | `methods` | in which file a method in C is |
//! | `rebuild` | the profile made anew |

mod methods;
mod rebuild;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Location;
use crate::profile::MappingId;
use crate::profile::Profile;

/// Which frames of machine code are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeFrames {
    /// What Ruby code calls: C extensions, the libraries under them and under
    /// Ruby, and the kernel; not the interpreter itself, nor what starts a
    /// program or a thread. All of it in threads that run no Ruby.
    #[default]
    Extensions,
    /// All.
    All,
    /// None, neither of the process nor of the kernel.
    None,
}

/// What is shown of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presentation {
    /// Machine code of the process.
    pub native: NativeFrames,
    /// Frames of the kernel, unless `native` is [`NativeFrames::None`].
    pub kernel: bool,
}

impl Default for Presentation {
    fn default() -> Self {
        Self {
            native: NativeFrames::default(),
            kernel: true,
        }
    }
}

/// What the machine code of a mapping is to Ruby.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// The interpreter and nothing else: libruby, and the small program that
    /// starts it.
    Interpreter,
    /// A program that has the interpreter among its own code.
    Program,
    /// The C library, the dynamic linker, and what the kernel maps.
    Libc,
    /// Code that was made while the program ran.
    Generated,
    /// A C extension: methods are in it.
    Extension,
    /// Anything else.
    #[default]
    Library,
}

/// What the names of the files of a C library begin with: glibc's with and
/// without a version in the name, and musl's.
const LIBC: [&str; 8] = [
    "libc.so",
    "libc-",
    "libc.musl-",
    "libpthread.so",
    "libpthread-",
    "ld-linux",
    "ld-musl-",
    "ld-2.",
];

impl Role {
    /// The role of a file as mapped, by its name, when it is not the
    /// interpreter's. Extensions are called `zlib.so`, libraries `libz.so.1`.
    #[must_use]
    pub fn of_file(path: &str) -> Self {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let name = path.rsplit('/').next().unwrap_or(path);
        if LIBC.iter().any(|libc| name.starts_with(libc)) || matches!(name, "[vdso]" | "[vsyscall]")
        {
            Self::Libc
        } else if name.ends_with(".so") && !name.starts_with("lib") {
            Self::Extension
        } else {
            Self::Library
        }
    }
}

/// Makes the profile that is shown of the one that was recorded. `role` tells
/// what a mapping of native code is, `name` the function at a location of native
/// or kernel code; where it gives `None`, the function that is there stays.
///
/// The time it takes grows with the frames of the profile, each beginning that
/// several stacks share counted once.
#[must_use]
pub fn present(
    profile: Profile,
    presentation: Presentation,
    role: impl Fn(MappingId) -> Role,
    name: impl Fn(&Location) -> Option<Arc<Function>>,
) -> Profile {
    let is_native = |kind| matches!(kind, FunctionKind::Native | FunctionKind::Kernel);
    if !(profile.functions()).any(|(_, function)| is_native(function.kind)) {
        return profile;
    }
    let frames = rules::frames(&profile, role, name);
    let files = methods::files(&profile, &frames);
    rebuild::rebuild(&profile, presentation, &frames, &files)
}
