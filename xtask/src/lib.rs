//! What a developer of rbprof runs, as a library: the integration tests use
//! [`rubies`] to find the interpreters of the test rig.

pub mod cache;
pub mod cmd;
pub mod demo;
pub mod dist;
pub mod fuzz;
pub mod layouts;
pub mod machine;
pub mod rubies;
pub mod setup;
pub mod test;
pub mod vm;
pub mod workspace;
