//! Profiles to receivers over HTTP.
//!
//! A profile is encoded when it comes, and waits in memory to be sent, one request
//! after the other. When the receiver does not answer, or says that it cannot take
//! anything now, everything that waits goes into the spill at once (so that not even a
//! crash of the agent loses it), and so does what comes until the receiver is back.
//! Between attempts is a pause that grows, or the one that the receiver asks for.
//! What a receiver will never take is dropped and counted.
//!
//! Receivers can get a profile twice, when an answer was lost on its way.

mod http;
mod item;
mod otlp;
mod pyroscope;
mod spill;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::time::Instant;
use tokio::time::sleep_until;
use tokio::time::timeout_at;

use self::http::Answer;
use self::http::Client;
use self::http::Post;
use self::item::Item;
use self::otlp::Otlp;
use self::pyroscope::Pyroscope;
use self::spill::Spill;
use self::store::Store;
use super::backoff::Backoff;
use super::config::OtlpConfig;
use super::config::Per;
use super::config::PyroscopeConfig;
use super::config::QueueConfig;
use super::counters::Counters;
use super::grouping::grouped;
use super::inbox::Message;
use super::inbox::Receiver;
use crate::agent::batch::Batch;

/// What a receiver speaks.
trait Protocol: Send {
    /// Its name and version: what waits in the spill is sent in no other.
    fn format(&self) -> &'static str;

    /// The type of its requests.
    fn content_type(&self) -> &'static str;

    /// A request with a profile.
    ///
    /// # Errors
    /// If the profile cannot be written in this format.
    fn encode(&self, batch: &Batch) -> io::Result<Item>;

    /// What an answer means for the profile.
    fn verdict(&self, answer: &Answer) -> Verdict;
}

/// What is to become of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is where it belongs.
    Delivered,
    /// It is where it belongs, in part or with a remark.
    Partly {
        /// Whether all of it was refused.
        refused: bool,
        why: String,
    },
    /// The receiver cannot take anything now.
    Later,
    /// The receiver cannot take this one now, and perhaps others.
    LaterThanOthers,
    /// The receiver will not take it.
    Never,
}

/// A request under way; the client comes back with its outcome.
type Sending = Pin<Box<dyn Future<Output = (Client, io::Result<Answer>)> + Send>>;

/// A sink that sends.
pub(super) struct Push {
    protocol: Box<dyn Protocol>,
    per: Per,
    store: Store,
    backoff: Backoff,
    /// No attempt before.
    not_before: Option<Instant>,
    receiver: Arc<http::Receiver>,
    /// Between requests.
    client: Option<Client>,
    sending: Option<Sending>,
    counters: Arc<Counters>,
}

impl Push {
    /// One for Pyroscope.
    ///
    /// # Errors
    /// If a file or directory that is configured cannot be used.
    pub(super) fn to_pyroscope(config: PyroscopeConfig, counters: Arc<Counters>) -> Result<Self> {
        let mut headers = config.headers;
        if let Some(tenant) = config.tenant {
            headers.insert("X-Scope-OrgID".to_owned(), tenant);
        }
        let receiver = http::Receiver::new(
            &config.url,
            &headers,
            config.auth,
            config.ca_file.as_deref(),
            config.queue.timeout,
        )?;
        let mut labels = config.labels;
        if let Some(host) = hostname() {
            let known = labels.entry("hostname".to_owned());
            known.or_insert_with(|| pyroscope::value(&host));
        }
        let protocol = Box::new(Pyroscope {
            labels,
            process_labels: config.process_labels,
            thread_labels: config.thread_labels,
        });
        Self::new(protocol, config.per, receiver, &config.queue, counters)
    }

    /// One for an OpenTelemetry collector.
    ///
    /// # Errors
    /// If a file or directory that is configured cannot be used.
    pub(super) fn to_otlp(config: OtlpConfig, counters: Arc<Counters>) -> Result<Self> {
        let receiver = http::Receiver::new(
            &config.url,
            &config.headers,
            config.auth,
            config.ca_file.as_deref(),
            config.queue.timeout,
        )?;
        let mut attributes: BTreeMap<String, String> = config.attributes;
        if let Some(host) = hostname() {
            attributes.entry("host.name".to_owned()).or_insert(host);
        }
        let protocol = Box::new(Otlp {
            attributes,
            compression: config.compression,
        });
        Self::new(protocol, config.per, receiver, &config.queue, counters)
    }

    fn new(
        protocol: Box<dyn Protocol>,
        per: Per,
        receiver: http::Receiver,
        queue: &QueueConfig,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let name = counters.get().name;
        let spill = match &queue.spill_directory {
            Some(directory) => {
                let directory = directory.join(name);
                Some(Spill::open(directory, queue.spill_size, queue.memory)?)
            }
            None => None,
        };
        Ok(Self {
            protocol,
            per,
            store: Store::new(queue.memory, spill, Arc::clone(&counters)),
            backoff: Backoff::new(queue.first_retry, queue.max_retry),
            not_before: None,
            receiver: Arc::new(receiver),
            client: None,
            sending: None,
            counters,
        })
    }

    /// Sends what comes until nothing more can come; what is not sent by then goes into
    /// the spill. The thread waits for the spill's disk.
    pub(super) async fn run(mut self, mut inbox: Receiver) {
        loop {
            if self.sending.is_none() && !self.waits() {
                self.begin();
            }
            let pause = match (&self.sending, self.not_before) {
                (None, Some(until)) if !self.store.is_empty() => Some(until),
                _ => None,
            };
            tokio::select! {
                message = inbox.next() => match message {
                    Some(Message::Cut(cut)) => self.take(cut),
                    Some(Message::Flush { deadline, done }) => {
                        let left = self.flush(deadline.into()).await;
                        // Who asked may have gone.
                        let _ = done.send(left);
                    }
                    None => break,
                },
                (client, outcome) = under_way(&mut self.sending) => self.end(client, outcome),
                () = until(pause) => {}
            }
        }
        self.sending = None;
        self.store.spill_all();
    }

    /// Whether it is too early for an attempt.
    fn waits(&self) -> bool {
        self.not_before.is_some_and(|until| Instant::now() < until)
    }

    fn take(&mut self, cut: Vec<Batch>) {
        for batch in grouped(cut, self.per) {
            match self.protocol.encode(&batch) {
                Ok(item) => self.store.push(item, self.backoff.is_failing()),
                Err(error) => {
                    self.counters.update(|status| status.dropped.invalid += 1);
                    let service = &batch.service;
                    self.counters
                        .error(&format!("cannot encode a profile of {service:?}: {error}"));
                }
            }
        }
    }

    /// Begins to send the oldest profile, if there is one.
    fn begin(&mut self) {
        self.not_before = None;
        let Some(Item { head, body }) = self.store.take(self.protocol.format()) else {
            return;
        };
        let post = Post {
            target: head.target,
            content_type: self.protocol.content_type(),
            gzip: head.gzip,
            body,
        };
        let mut client =
            (self.client.take()).unwrap_or_else(|| Client::new(Arc::clone(&self.receiver)));
        self.sending = Some(Box::pin(async move {
            let outcome = client.post(post).await;
            (client, outcome)
        }));
    }

    /// Draws the conclusions from an attempt.
    fn end(&mut self, client: Client, outcome: io::Result<Answer>) {
        self.sending = None;
        self.client = Some(client);
        let answer = match outcome {
            Ok(answer) => answer,
            Err(error) => {
                let receiver = &self.receiver;
                self.retry(&format!("{receiver:?}: {error}"), None, false);
                return;
            }
        };
        let verdict = self.protocol.verdict(&answer);
        match verdict {
            Verdict::Delivered => self.deliver(),
            Verdict::Partly { refused, why } => {
                if refused {
                    self.counters.update(|status| status.dropped.rejected += 1);
                    self.finish();
                } else {
                    self.deliver();
                }
                self.counters.error(&format!("the receiver says: {why}"));
            }
            Verdict::Never => {
                self.counters.update(|status| status.dropped.rejected += 1);
                self.counters.error(&describe(&answer));
                self.finish();
            }
            Verdict::Later => self.retry(&describe(&answer), answer.retry_after, false),
            Verdict::LaterThanOthers => self.retry(&describe(&answer), answer.retry_after, true),
        }
    }

    fn deliver(&mut self) {
        let bytes = self.store.current_bytes();
        self.counters.delivered(bytes);
        self.finish();
    }

    /// The receiver is there, and the profile needs not be sent again.
    fn finish(&mut self) {
        self.store.done();
        if self.backoff.is_failing() {
            log::info!(
                "{}: {:?} answers again",
                self.counters.get().name,
                self.receiver
            );
        }
        self.backoff.succeeded();
    }

    fn retry(&mut self, why: &str, after: Option<Duration>, others_first: bool) {
        self.counters.update(|status| status.retried += 1);
        self.counters.error(why);
        let pause = self.backoff.failed().max(after.unwrap_or_default());
        self.not_before = Some(Instant::now() + pause);
        self.store.give_back(others_first);
        self.store.spill_all();
    }

    /// Sends what waits, and puts what cannot be sent in time into the spill. Returns
    /// how many profiles are in neither place.
    async fn flush(&mut self, deadline: Instant) -> u64 {
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        // What is left when the receiver hangs must be written as well.
        let margin = (left / 5).min(Duration::from_secs(1));
        let give_up = deadline.checked_sub(margin).unwrap_or(now);
        // While the receiver is away, the spill has it all. Without one, what waits has
        // one more chance.
        let mut chance = !(self.backoff.is_failing() && self.store.has_spill());
        while chance || self.sending.is_some() {
            if self.sending.is_none() {
                self.begin();
            }
            if self.sending.is_none() {
                break;
            }
            let Ok((client, outcome)) = timeout_at(give_up, under_way(&mut self.sending)).await
            else {
                break;
            };
            self.end(client, outcome);
            chance = !self.backoff.is_failing();
        }
        // Whatever was under way is in the spill, or sent again.
        self.sending = None;
        self.store.spill_all();
        self.store.only_in_memory()
    }
}

/// The end of a request; never, if there is none.
async fn under_way(sending: &mut Option<Sending>) -> (Client, io::Result<Answer>) {
    match sending {
        Some(sending) => sending.await,
        None => std::future::pending().await,
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// An answer as an error.
fn describe(answer: &Answer) -> String {
    let body = String::from_utf8_lossy(&answer.body);
    let body: String = (body.trim().chars())
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(300)
        .collect();
    format!("the receiver answers {}: {body}", answer.status)
}

/// The machine's name.
fn hostname() -> Option<String> {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).ok()?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.to_owned())
}
