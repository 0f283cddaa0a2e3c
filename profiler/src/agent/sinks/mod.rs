//! Where the agent's profiles go: files, Pyroscope, an OpenTelemetry collector.
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | what can be configured |
//! | `files` | profiles in files, and which of them are kept (`retention`) |
//! | `push` | profiles to receivers over HTTP: queue, retries, spill |
//! | [`counters`] | what each sink has done |
//!
//! Each sink has a thread of its own, so a slow disk or receiver delays neither
//! sampling nor another sink. Delivering never waits. What may wait in memory is
//! bounded in bytes for each sink; beyond that profiles are dropped and counted.

mod backoff;
pub mod config;
pub mod counters;
#[cfg(test)]
mod example;
mod files;
mod grouping;
mod inbox;
mod names;
mod push;
mod retention;

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use self::config::SinksConfig;
use self::counters::Counters;
use self::counters::SinkStatus;
use self::files::Files;
use self::inbox::Inbox;
use self::inbox::Receiver;
use self::push::Push;
use super::batch::Batch;

/// All sinks that are configured.
///
/// Dropping it ends them without waiting: what is in memory goes where it belongs, or
/// into the spill, if the process lives long enough. See [`Sinks::shutdown`].
#[derive(Debug)]
pub struct Sinks {
    sinks: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    counters: Arc<Counters>,
    inbox: Inbox,
    /// Never sent to: its other end goes when the thread ends.
    ended: oneshot::Receiver<()>,
}

impl Sinks {
    /// Starts the sinks. Directories of sinks that were started before must have been
    /// released, by [`Sinks::shutdown`].
    ///
    /// # Errors
    /// If the configuration cannot work, or a directory or a file that it names cannot
    /// be used. A receiver that does not answer is no error.
    pub fn start(config: SinksConfig) -> Result<Self> {
        config.validate()?;
        let SinksConfig {
            files,
            pyroscope,
            otlp,
        } = config;
        let mut sinks = Vec::new();
        if let Some(config) = files {
            let pending = config.pending;
            let counters = Arc::new(Counters::new("files"));
            let sink = Files::new(config, Arc::clone(&counters)).context("files")?;
            sinks.push(running(counters, pending, |inbox| sink.run(inbox))?);
        }
        if let Some(config) = pyroscope {
            let pending = config.queue.pending;
            let counters = Arc::new(Counters::new("pyroscope"));
            let sink = Push::to_pyroscope(config, Arc::clone(&counters)).context("pyroscope")?;
            sinks.push(running(counters, pending, |inbox| sink.run(inbox))?);
        }
        if let Some(config) = otlp {
            let pending = config.queue.pending;
            let counters = Arc::new(Counters::new("otlp"));
            let sink = Push::to_otlp(config, Arc::clone(&counters)).context("otlp")?;
            sinks.push(running(counters, pending, |inbox| sink.run(inbox))?);
        }
        Ok(Self { sinks })
    }

    /// Hands the profiles of an interval to all sinks, and does not wait. What a sink
    /// has no room for is dropped there and counted.
    pub fn deliver(&self, cut: &[Batch]) {
        for sink in &self.sinks {
            sink.inbox.deliver(cut);
        }
    }

    /// Waits until everything delivered so far is where it belongs or in the spill,
    /// and at most until the deadline. A receiver that has not answered a while before
    /// it is given up for now. Must be called within a runtime that has timers.
    ///
    /// Returns how many profiles are in neither place.
    pub async fn flush(&self, deadline: Instant) -> u64 {
        let asked: Vec<_> = (self.sinks.iter())
            .map(|sink| (sink, sink.inbox.flush(deadline)))
            .collect();
        let mut left = 0;
        for (sink, answer) in asked {
            left += match timeout_at(deadline.into(), answer).await {
                Ok(Ok(left)) => left,
                // It hangs in a disk, or has ended.
                _ => sink.counters.get().queued,
            };
        }
        left
    }

    /// Flushes, ends all sinks and releases their directories, and does not wait for
    /// longer than until the deadline.
    ///
    /// Returns how many profiles are lost.
    pub async fn shutdown(self, deadline: Instant) -> u64 {
        let left = self.flush(deadline).await;
        for Running { inbox, ended, .. } in self.sinks {
            drop(inbox);
            let _ = timeout_at(deadline.into(), ended).await;
        }
        left
    }

    /// What each sink has done.
    #[must_use]
    pub fn status(&self) -> Vec<SinkStatus> {
        (self.sinks.iter())
            .map(|sink| sink.counters.get())
            .collect()
    }
}

/// Starts a sink's thread.
fn running<F: Future<Output = ()>>(
    counters: Arc<Counters>,
    pending: u64,
    sink: impl FnOnce(Receiver) -> F + Send + 'static,
) -> Result<Running> {
    let (inbox, receiver) = inbox::channel(pending, &counters);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Only names are looked up there.
        .max_blocking_threads(2)
        .build()
        .context("starting a sink")?;
    let (ending, ended) = oneshot::channel::<()>();
    let name = counters.get().name;
    thread::Builder::new()
        .name(format!("rbprof-{name}"))
        .spawn(move || {
            runtime.block_on(sink(receiver));
            // A look-up of a name that hangs is left behind.
            runtime.shutdown_background();
            drop(ending);
        })
        .context("starting a sink")?;
    Ok(Running {
        counters,
        inbox,
        ended,
    })
}
