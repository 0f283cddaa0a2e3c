//! What the server asks the core for.
//!
//! The core receives [`Request`]s and answers each through its `reply`. One that
//! it drops is answered with status 503. Who asked may be gone before the answer
//! is there: `reply.is_closed()` tells, and then a profile need not be finished.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::mpsc;
use tokio::sync::oneshot;

use crate::agent::batch::Batch;
use crate::agent::identity::Identity;
use crate::agent::metrics::Page;
use crate::profile::Profile;

/// Most requests that wait for the core.
pub const QUEUE: usize = 64;

/// Which processes a profile is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// All that are profiled.
    All,
    /// One.
    Process(u32),
    /// Those of a service.
    Service(String),
}

/// What the core is asked for.
#[derive(Debug)]
pub enum Request {
    /// A fresh profile.
    Profile {
        /// Of which processes.
        of: Selector,
        /// How long it takes, from now on.
        duration: Duration,
        /// Where it goes.
        reply: oneshot::Sender<Result<Arc<Profile>, Refusal>>,
    },
    /// The profiles that are kept, oldest first.
    Recent {
        /// Where they go.
        reply: oneshot::Sender<Vec<Recent>>,
    },
    /// The processes that are known.
    Targets {
        /// Where they go.
        reply: oneshot::Sender<Vec<Target>>,
    },
    /// What is counted.
    Metrics {
        /// Where it goes; the server adds its own numbers.
        reply: oneshot::Sender<Page>,
    },
    /// Whether all is well.
    Health {
        /// Where it goes.
        reply: oneshot::Sender<Health>,
    },
}

/// Why there is no profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such process or service among those that are profiled.
    /// Status 404.
    NotFound(String),
    /// There are too many requests for profiles. Status 503.
    Busy(String),
    /// Something went wrong. Status 500.
    Failed(String),
}

/// A profile that is kept.
#[derive(Clone, Debug)]
pub struct Recent {
    /// Tells it apart for as long as the agent runs.
    pub id: u64,
    /// The profile.
    pub batch: Batch,
}

/// A process that is profiled, or why it is not.
#[derive(Clone, Debug)]
pub struct Target {
    /// Who it is.
    pub identity: Arc<Identity>,
    /// Whether it is profiled.
    pub is_profiled: bool,
    /// Since when it is known.
    pub since: SystemTime,
    /// How many samples were taken of it.
    pub samples: u64,
    /// What was looked for in it, and how it was found: `("execution context",
    /// "symbol ruby_current_ec, .dynsym")`.
    pub roots: Vec<(String, String)>,
    /// What is missing, in sentences; why it is not profiled.
    pub missing: Vec<String>,
}

/// Whether all is well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// What is not, in sentences. Status 503 if there is anything.
    pub problems: Vec<String>,
}

/// The way to the core. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct Backend {
    requests: mpsc::Sender<Request>,
}

/// Why the core gives no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// Too many requests wait.
    Full,
    /// It has stopped, or dropped the request.
    Gone,
}

impl Backend {
    /// A way to the core, and its end there. At most [`QUEUE`] requests are on
    /// the way.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Request>) {
        let (requests, receiver) = mpsc::channel(QUEUE);
        (Self { requests }, receiver)
    }

    /// Asks, and waits for the answer.
    pub(super) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, NoAnswer> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .try_send(request(reply))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => NoAnswer::Full,
                mpsc::error::TrySendError::Closed(_) => NoAnswer::Gone,
            })?;
        answer.await.map_err(|_| NoAnswer::Gone)
    }
}
