//! Where code is mapped, and a place in it.

use std::sync::Arc;

use super::FunctionId;
use super::MappingId;

/// A file mapped into a process, as an output refers to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mapping {
    /// First address; 0 where there is none.
    pub start: u64,
    /// The address after the last one; 0 where there is none.
    pub limit: u64,
    /// Offset of `start` in the file.
    pub offset: u64,
    /// Path of the file, or a name such as `[kernel.kallsyms]`.
    pub file: Arc<str>,
    /// Build id in hexadecimal; empty where the file has none.
    pub build_id: Arc<str>,
    /// Every location in it has a function: readers need not look for symbols.
    pub has_functions: bool,
    /// Every function in it has a file.
    pub has_filenames: bool,
    /// Every location in it has a line.
    pub has_line_numbers: bool,
}

impl Mapping {
    /// The mapping of everything that is not machine code.
    pub(super) fn ruby() -> Self {
        Self::of_ruby("ruby")
    }

    /// The mapping of Ruby code that was compiled while the program ran.
    pub(super) fn ruby_jit() -> Self {
        Self::of_ruby("ruby (JIT)")
    }

    fn of_ruby(file: &str) -> Self {
        Self {
            file: Arc::from(file),
            has_functions: true,
            has_filenames: true,
            has_line_numbers: true,
            ..Self::default()
        }
    }
}

/// A line in a function, or an instruction of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The function.
    pub function: FunctionId,
    /// Line of the call or instruction; 0 where it is not known.
    pub line: u32,
    /// Where the code is mapped.
    pub mapping: MappingId,
    /// Address of the instruction; 0 for Ruby code, which has none that means
    /// anything outside its process.
    pub address: u64,
}
