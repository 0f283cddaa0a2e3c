//! The `rbprof` command.
fn main() {}
