//! Which processes, which Ruby in them, and where its roots are.
//!
//! [`attach()`] looks at one live process and says where the kernel half finds
//! each thread's execution context, and what the symbolizer must know. Nothing
//! in the process is stopped or changed, and nothing is believed that does not
//! validate against its live memory.
//!
//! | module | what it does |
//! |---|---|
//! | [`proc`] | what `/proc` says of a process |
//! | [`mappings`] | what it has mapped |
//! | [`elf`] | facts from an ELF image |
//! | [`image`] | opens mapped files through the process itself |
//! | [`ruby`] | which mapped file is a Ruby, and its symbols |
//! | [`debug_file`] | symbols that are kept in another file |
//! | [`mod@code`] | what the code of a stripped Ruby gives away |
//! | [`roots`] | where a thread's execution context is, in this build |
//! | [`tls`] | where a thread-local variable is, from the thread pointer |
//! | [`analyses`] | the same file is analysed once a run |
//! | [`recover`] | the VM where no symbol names it |
//! | [`global_symbols`] | Ruby's symbol table where no symbol names it |
//! | [`validate`] | whether roots hold for the live process |
//! | `zjit` | whether ZJIT is on, and frames are read in another way |
//! | `examine` | all of it together, for a Ruby that was found |
//! | [`mod@attach`] | the way in |
//! | [`target`] | what comes of it |

pub mod analyses;
pub mod attach;
pub mod code;
pub mod debug_file;
pub mod elf;
mod error;
mod examine;
pub mod global_symbols;
pub mod image;
mod loader;
pub mod mappings;
mod native_stack;
pub mod proc;
pub mod recover;
pub mod roots;
pub mod ruby;
mod scan;
pub mod spot;
pub mod target;
pub mod tls;
pub mod validate;
mod zjit;

pub use attach::Attacher;
pub use attach::attach;
pub use error::AttachError;
pub use target::Provenance;
pub use target::RubyFacts;
pub use target::Target;

/// The thread pointer of one thread: `fs` base on x86-64, `tpidr_el0` on arm64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadPointer {
    /// The thread's id.
    pub tid: u32,
    /// The thread pointer; 0 in a thread that has not set it up yet.
    pub value: u64,
}

impl From<rbprof_common::wire::ThreadPointer> for ThreadPointer {
    fn from(told: rbprof_common::wire::ThreadPointer) -> Self {
        Self {
            tid: told.tid,
            value: told.pointer,
        }
    }
}

#[cfg(test)]
mod tests;
