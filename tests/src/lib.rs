//! Shared parts of the integration tests.
//!
//! | module | what it does |
//! |---|---|
//! | [`rig`] | what this machine can test: Rubies, the kernel |
//! | [`target`] | a Ruby program that is profiled |
//! | [`recording`] | a recording in this process, sample by sample |
//! | [`points`] | what a program says of its own stacks |

pub mod points;
pub mod recording;
pub mod rig;
pub mod target;
