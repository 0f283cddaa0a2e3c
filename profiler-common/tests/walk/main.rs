//! The walk over stacks laid out by hand, and over hostile memory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod collector;
mod hostile;
mod merged;
mod stacks;
mod support;
