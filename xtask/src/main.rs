//! What a developer of rbprof runs.
fn main() {}
