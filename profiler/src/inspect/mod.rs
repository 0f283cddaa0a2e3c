//! `rbprof inspect`: what rbprof knows of a Ruby, or of the system, how it knows
//! it, what is missing, and what to do about that.
//!
//! | module | what it does |
//! |---|---|
//! | [`mod@file`] | what a file says: version, symbols, thread-local storage, code |
//! | [`process`] | what a running process says: roots, JIT compiler |
//! | [`jit`] | which JIT compiler a process uses, and where its code is |
//! | [`mod@check`] | the four symbols, for a distribution's tests |
//! | [`system`] | what this system lets rbprof do |
//! | [`text`] | all of it as a page for a person |

pub mod check;
pub mod file;
pub mod jit;
pub mod process;
pub mod system;
pub mod text;

use serde::Serialize;

pub use self::check::check;
pub use self::file::FileError;
pub use self::file::FileReport;
pub use self::process::ProcessReport;
pub use self::system::SystemReport;
pub use self::system::Verdict;

/// Everything; as JSON it is stable, and fields are only added.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The process, where one was asked about.
    pub process: Option<ProcessReport>,
    /// The file that Ruby is in.
    pub file: FileReport,
    /// What a profile would lack.
    pub missing: Vec<Missing>,
}

/// Something that a profile would lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// What, and what follows.
    pub what: String,
    /// How to get it.
    pub remedy: String,
}

impl Report {
    /// A file on its own.
    ///
    /// # Errors
    /// [`FileError`] when it cannot be read or is no Ruby.
    pub fn of_file(path: &std::path::Path) -> Result<Self, FileError> {
        let file = FileReport::of_path(path)?;
        Ok(Self {
            process: None,
            missing: file.missing(),
            file,
        })
    }
}
