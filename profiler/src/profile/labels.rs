//! What is known of a sample besides its stack.

use std::sync::Arc;

/// Which thread a sample is of, and what the thread was doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Labels {
    /// Process id in the initial PID namespace; 0 where it is not known.
    pub pid: u32,
    /// Thread id in the initial PID namespace; 0 where it is not known.
    pub tid: u32,
    /// The name Ruby has for the thread, if it has one.
    pub thread_name: Option<Arc<str>>,
    /// The name the kernel has for the thread.
    pub comm: Option<Arc<str>>,
    /// What the thread was doing, such as `gc`; `None` for running code.
    pub state: Option<Arc<str>>,
}
