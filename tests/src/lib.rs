//! Shared parts of the integration tests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`coredump`] | memory of a Ruby process, from a core dump |
//! | [`live`] | memory of a running Ruby program |
//! | [`roots`] | where Ruby's roots are in such memory |
//! | [`truth`] | what a stack has to look like |

pub mod coredump;
pub mod live;
pub mod roots;
pub mod truth;
