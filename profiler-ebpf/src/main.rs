//! The kernel half of rbprof; on the host it is an empty program.
fn main() {}
