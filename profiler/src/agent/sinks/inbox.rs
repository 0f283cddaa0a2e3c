//! The way to a sink: never blocks, and never holds more than it may.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::sync::oneshot;

use super::counters::Counters;
use super::grouping::weight;
use crate::agent::batch::Batch;

/// What a sink is told.
#[derive(Debug)]
pub(super) enum Message {
    /// The profiles of an interval.
    Cut(Vec<Batch>),
    /// All that came before shall be where it belongs at that time. The answer is
    /// how many profiles are not.
    Flush {
        deadline: Instant,
        done: oneshot::Sender<u64>,
    },
}

/// The end of who delivers.
#[derive(Debug)]
pub(super) struct Inbox {
    sender: mpsc::UnboundedSender<(Message, u64)>,
    waiting: Arc<AtomicU64>,
    /// In bytes.
    limit: u64,
    counters: Arc<Counters>,
}

/// The end of the sink.
#[derive(Debug)]
pub(super) struct Receiver {
    receiver: mpsc::UnboundedReceiver<(Message, u64)>,
    waiting: Arc<AtomicU64>,
    counters: Arc<Counters>,
}

pub(super) fn channel(limit: u64, counters: &Arc<Counters>) -> (Inbox, Receiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting = Arc::new(AtomicU64::new(0));
    let inbox = Inbox {
        sender,
        waiting: Arc::clone(&waiting),
        limit,
        counters: Arc::clone(counters),
    };
    let receiver = Receiver {
        receiver,
        waiting,
        counters: Arc::clone(counters),
    };
    (inbox, receiver)
}

impl Inbox {
    /// Hands over what there is room for, and counts the rest as dropped.
    pub(super) fn deliver(&self, cut: &[Batch]) {
        let mut room = self
            .limit
            .saturating_sub(self.waiting.load(Ordering::Relaxed));
        let mut weights = 0;
        let fitting: Vec<Batch> = (cut.iter())
            .filter(|batch| {
                let weight = weight(&batch.profile);
                let fits = weight <= room;
                if fits {
                    room -= weight;
                    weights += weight;
                }
                fits
            })
            .cloned()
            .collect();
        let (count, dropped) = (fitting.len(), cut.len() - fitting.len());
        self.counters.update(|status| {
            status.handed(count as u64, weights);
            status.dropped.overflow += dropped as u64;
        });
        if dropped > 0 {
            self.counters.error("no room in memory: profiles dropped");
        }
        if !fitting.is_empty() {
            self.waiting.fetch_add(weights, Ordering::Relaxed);
            // A sink that is gone counts no more.
            let _ = self.sender.send((Message::Cut(fitting), weights));
        }
    }

    /// Asks for a flush; who hears of its end.
    pub(super) fn flush(&self, deadline: Instant) -> oneshot::Receiver<u64> {
        let (done, answer) = oneshot::channel();
        let _ = self.sender.send((Message::Flush { deadline, done }, 0));
        answer
    }
}

impl Receiver {
    /// The next message; `None` when there will be no more. The profiles of a cut no
    /// longer count as queued.
    pub(super) async fn next(&mut self) -> Option<Message> {
        let (message, weight) = self.receiver.recv().await?;
        if let Message::Cut(cut) = &message {
            self.waiting.fetch_sub(weight, Ordering::Relaxed);
            self.counters
                .update(|status| status.taken(cut.len() as u64, weight));
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[tokio::test]
    async fn what_does_not_fit_is_dropped_and_counted() {
        let batch = example::batch("web", 1, 1);
        let weight = weight(&batch.profile);
        let counters = Arc::new(Counters::new("files"));
        let (inbox, mut receiver) = channel(2 * weight, &counters);
        inbox.deliver(&[batch.clone(), batch.clone(), batch.clone()]);
        inbox.deliver(std::slice::from_ref(&batch));
        let status = counters.get();
        assert_eq!((status.queued, status.queued_bytes), (2, 2 * weight));
        assert_eq!(status.dropped.overflow, 2);
        assert!(matches!(receiver.next().await, Some(Message::Cut(cut)) if cut.len() == 2));
        assert_eq!(counters.get().queued_bytes, 0);
        inbox.deliver(&[batch]);
        assert!(matches!(receiver.next().await, Some(Message::Cut(cut)) if cut.len() == 1));
        drop(inbox);
        assert!(receiver.next().await.is_none());
    }
}
