//! The machine code of targets: which objects they have mapped where, and the
//! unwind tables of these in the kernel half.
//!
//! | module | what it does |
//! |---|---|
//! | [`objects`] | files and other code, each known by a number |
//! | `compiler` | compiles unwind tables on a thread of its own |
//! | [`spaces`] | the executable mappings of processes |

mod compiler;
pub mod objects;
pub mod spaces;
