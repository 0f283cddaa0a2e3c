//! Shared parts of the integration tests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`rig`] | what this machine can test: Rubies, the kernel |
//! | [`target`] | a Ruby program that is profiled |
//! | [`recording`] | a recording in this process, sample by sample |
//! | [`frames`] | the program with stacks of every shape, and what must be recorded of it |
//! | [`pprof`] | a reader of the profiles that rbprof writes |
//! | [`pprof_format`] | another reader of them, which is not ours |
//! | [`chains`] | what stacks of Ruby and native frames must be |
//! | [`checks`] | what is checked on this machine, and on emulated ones |
//! | [`task`] | a program with the C extension, recorded by the command |
//! | [`docker`] | a container engine of the tests' own |
//! | [`rails`] | a Rails application under load |
//! | `native` | whether native frames can be what they are said to be |
//! | [`http`] | a client of web pages |
//! | [`agent`] | a running agent |
//! | [`points`] | what a program says of its own stacks |
//! | [`coredump`] | memory of a Ruby process, from a core dump |
//! | [`live`] | memory of a running Ruby program |
//! | [`roots`] | where Ruby's roots are in such memory |
//! | `stopped` | processes that a test has stopped, and their native stacks |
//! | [`cfi`] | what a file's call frame information says, the long way |
//! | [`share`] | shares of samples, and what coincidence makes of them |
//! | [`truth`] | what a stack has to look like |

pub mod agent;
pub mod cfi;
pub mod chains;
pub mod checks;
pub mod coredump;
pub mod docker;
pub mod frames;
pub mod http;
pub mod live;
#[cfg(target_arch = "x86_64")]
pub mod native;
pub mod points;
pub mod pprof;
pub mod pprof_format;
pub mod rails;
pub mod recording;
pub mod rig;
pub mod roots;
pub mod share;
#[cfg(target_arch = "x86_64")]
pub mod stopped;
pub mod target;
pub mod task;
pub mod truth;
