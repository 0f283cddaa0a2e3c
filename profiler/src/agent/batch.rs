//! What the agent hands to its sinks.

use std::sync::Arc;
use std::time::SystemTime;

use super::identity::Identity;
use crate::profile::Profile;

/// What processes of one service did in a while.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The service; see [`Identity::service`].
    pub service: Arc<str>,
    /// The process, if the profile is of one alone.
    pub process: Option<Arc<Identity>>,
    /// Its samples. Times, frequency and counters are in the metadata.
    pub profile: Arc<Profile>,
    /// When it begins.
    pub from: SystemTime,
    /// When it ends.
    pub until: SystemTime,
}
