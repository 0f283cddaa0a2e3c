//! Records from the kernel half: decoded, and stacks put together from their
//! chunks.

mod record;
mod stacks;

pub use record::Record;
pub use stacks::Stack;
pub use stacks::StackTable;
