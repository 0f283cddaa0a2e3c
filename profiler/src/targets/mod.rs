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
//! | [`roots`] | where a thread's execution context is, in this build |
//! | [`tls`] | where a thread-local variable is, from the thread pointer |
//! | [`global_symbols`] | Ruby's symbol table where no symbol names it |
//! | [`validate`] | whether roots hold for the live process |
//! | [`mod@attach`] | all of it together |

pub mod attach;
pub mod elf;
mod error;
pub mod global_symbols;
pub mod image;
mod loader;
pub mod mappings;
pub mod proc;
mod recover;
pub mod roots;
pub mod ruby;
mod scan;
pub mod tls;
pub mod validate;

pub use attach::Attacher;
pub use attach::Provenance;
pub use attach::RubyFacts;
pub use attach::Target;
pub use attach::attach;
pub use error::AttachError;

/// The thread pointer of one thread: `fs` base on x86-64, `tpidr_el0` on arm64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadPointer {
    /// The thread's id.
    pub tid: u32,
    /// The thread pointer; 0 in a thread that has not set it up yet.
    pub value: u64,
}

#[cfg(test)]
mod tests;
