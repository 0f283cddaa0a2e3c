//! Records from the kernel half: decoded, and stacks put together from their
//! chunks.
//!
//! | module | what it does |
//! |---|---|
//! | `record` | decodes records |
//! | `stacks` | the stacks so far, by id |
//! | [`activations`] | puts Ruby frames back into the right activation |

pub mod activations;
mod record;
mod stacks;

pub use record::Record;
pub use stacks::Stack;
pub use stacks::StackTable;
