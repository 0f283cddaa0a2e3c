//! A profile: interned functions, locations, stacks, counts and labels. Knows
//! nothing of BPF or of output formats.

mod function;

pub use function::Function;
pub use function::FunctionKind;
