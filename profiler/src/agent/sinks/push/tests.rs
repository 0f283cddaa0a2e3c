//! A receiver that answers as told, and what the sink makes of it.

use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;

use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;

use crate::agent::sinks::Sinks;
use crate::agent::sinks::config::PyroscopeConfig;
use crate::agent::sinks::config::QueueConfig;
use crate::agent::sinks::config::SinksConfig;
use crate::agent::sinks::counters::SinkStatus;
use crate::agent::sinks::example;

/// A request as it came: the head, and the length of the body.
#[derive(Clone, Debug)]
struct Seen {
    head: String,
    body: Vec<u8>,
    at: Instant,
}

impl Seen {
    /// The service in the request's target.
    fn service(&self) -> &str {
        let (_, rest) = self.head.split_once("name=").unwrap();
        rest.split(['%', '&']).next().unwrap()
    }
}

/// A receiver on this machine; dropped, it is away.
struct Receiver {
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Receiver {
    /// Answers what `answer` says to the request with that number and content; `None`:
    /// nothing, ever.
    async fn new(
        port: u16,
        answer: impl Fn(usize, &Seen) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (all, answer) = (Arc::clone(&seen), Arc::new(answer));
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (all, answer) = (Arc::clone(&all), Arc::clone(&answer));
                connections.spawn(async move {
                    let _ = serve(stream, &all, &*answer).await;
                });
            }
        });
        Self { port, seen, task }
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn services(&self) -> Vec<String> {
        (self.seen().iter())
            .map(|seen| seen.service().to_owned())
            .collect()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    all: &Mutex<Vec<Seen>>,
    answer: &(dyn Fn(usize, &Seen) -> Option<String> + Send + Sync),
) -> std::io::Result<()> {
    let mut input = Vec::new();
    loop {
        let end = loop {
            let found = input.windows(4).position(|part| part == b"\r\n\r\n");
            if let Some(at) = found {
                break at + 4;
            }
            if stream.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8(input[..end].to_vec()).unwrap();
        let lower = head.to_ascii_lowercase();
        let (_, length) = lower.split_once("content-length: ").unwrap();
        let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
        while input.len() < end + length {
            if stream.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
        }
        let rest = input.split_off(end + length);
        let seen = Seen {
            head,
            body: input.split_off(end),
            at: Instant::now(),
        };
        input = rest;
        let number = {
            let mut all = all.lock().unwrap();
            all.push(seen.clone());
            all.len()
        };
        match answer(number, &seen) {
            Some(answer) => stream.write_all(answer.as_bytes()).await?,
            None => std::future::pending().await,
        }
    }
}

fn answer(status: &str) -> Option<String> {
    Some(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"))
}

fn start(port: u16, spill: Option<&Path>, change: impl FnOnce(&mut QueueConfig)) -> Sinks {
    let mut config = PyroscopeConfig::new(format!("http://127.0.0.1:{port}/base/"));
    config.queue.first_retry = Duration::from_millis(5);
    config.queue.max_retry = Duration::from_millis(50);
    config.queue.spill_directory = spill.map(Path::to_path_buf);
    change(&mut config.queue);
    Sinks::start(SinksConfig {
        pyroscope: Some(config),
        ..SinksConfig::default()
    })
    .unwrap()
}

fn send(sinks: &Sinks, services: &[&str]) {
    for service in services {
        sinks.deliver(&[example::batch(service, 1, 5)]);
    }
}

fn status(sinks: &Sinks) -> SinkStatus {
    sinks.status().remove(0)
}

fn soon(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Waits until that is so, for at most 10 s.
async fn wait(sinks: &Sinks, what: impl Fn(&SinkStatus) -> bool) -> SinkStatus {
    let patience = soon(10_000);
    loop {
        let status = status(sinks);
        if what(&status) {
            return status;
        }
        assert!(Instant::now() < patience, "{status:#?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn profiles_are_sent_on_one_connection() {
    let receiver = Receiver::new(0, |_, _| answer("200 OK")).await;
    let sinks = start(receiver.port, None, |_| {});
    send(&sinks, &["a", "b", "c"]);
    assert_eq!(sinks.flush(soon(5000)).await, 0);
    assert_eq!(receiver.services(), ["a", "b", "c"]);
    let status = status(&sinks);
    assert_eq!((status.delivered, status.queued, status.errors), (3, 0, 0));
    let seen = receiver.seen();
    let bodies: usize = seen.iter().map(|seen| seen.body.len()).sum();
    assert_eq!(status.delivered_bytes, bodies as u64);
    assert!(seen[0].head.starts_with("POST /base/ingest?name=a%7B"));
}

#[tokio::test]
async fn a_failure_is_tried_again() {
    let receiver = Receiver::new(0, |number, _| match number {
        1 | 2 => answer("500 Internal Server Error"),
        _ => answer("200 OK"),
    })
    .await;
    let sinks = start(receiver.port, None, |_| {});
    send(&sinks, &["a"]);
    let status = wait(&sinks, |status| status.delivered == 1).await;
    assert_eq!((status.retried, status.errors), (2, 2));
    assert_eq!(status.dropped.total(), 0);
    assert!(status.last_error.unwrap().text.contains("500"));
    assert_eq!(receiver.services(), ["a", "a", "a"]);
}

#[tokio::test]
async fn one_that_always_fails_holds_up_no_other() {
    let receiver = Receiver::new(0, |_, seen| match seen.service() {
        "bad" => answer("500 Internal Server Error"),
        _ => answer("200 OK"),
    })
    .await;
    let spill = tempfile::tempdir().unwrap();
    for spill in [None, Some(spill.path())] {
        let sinks = start(receiver.port, spill, |_| {});
        send(&sinks, &["bad", "a", "b"]);
        let status = wait(&sinks, |status| status.delivered == 2).await;
        assert_eq!(status.queued + status.spill_queued, 1);
        assert_eq!(status.dropped.total(), 0);
    }
}

#[tokio::test]
async fn what_is_refused_is_dropped() {
    let receiver = Receiver::new(0, |_, seen| match seen.service() {
        "bad" => Some("HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno!".to_owned()),
        _ => answer("200 OK"),
    })
    .await;
    let sinks = start(receiver.port, None, |_| {});
    send(&sinks, &["bad", "a"]);
    assert_eq!(sinks.flush(soon(5000)).await, 0);
    let status = status(&sinks);
    assert_eq!((status.delivered, status.dropped.rejected), (1, 1));
    assert_eq!((status.retried, status.queued), (0, 0));
    let error = status.last_error.unwrap().text;
    assert_eq!(error, "the receiver answers 400 Bad Request: no!");
    assert_eq!(receiver.services(), ["bad", "a"]);
}

#[tokio::test]
async fn a_receiver_is_left_alone_for_as_long_as_it_says() {
    let receiver = Receiver::new(0, |number, _| match number {
        1 => Some(
            "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
                .to_owned(),
        ),
        _ => answer("200 OK"),
    })
    .await;
    let sinks = start(receiver.port, None, |_| {});
    send(&sinks, &["a"]);
    wait(&sinks, |status| status.delivered == 1).await;
    let seen = receiver.seen();
    let pause = seen[1].at - seen[0].at;
    assert!(pause >= Duration::from_millis(990), "{pause:?}");
    assert!(pause < Duration::from_secs(3), "{pause:?}");
}

#[tokio::test]
async fn a_receiver_that_hangs_delays_nobody() {
    let receiver = Receiver::new(0, |_, _| None).await;
    let spill = tempfile::tempdir().unwrap();
    let sinks = start(receiver.port, Some(spill.path()), |queue| {
        queue.timeout = Duration::from_secs(60);
    });
    let before = Instant::now();
    send(&sinks, &["a", "b"]);
    assert!(before.elapsed() < Duration::from_millis(500));
    wait(&sinks, |_| !receiver.seen().is_empty()).await;
    // It ends in time, and what was not answered is kept.
    let before = Instant::now();
    assert_eq!(sinks.shutdown(soon(1000)).await, 0);
    let took = before.elapsed();
    assert!(took < Duration::from_millis(1300), "{took:?}");
    assert!(
        took > Duration::from_millis(700),
        "it had its chance: {took:?}"
    );
    let sinks = start(receiver.port, Some(spill.path()), |queue| {
        queue.timeout = Duration::from_millis(50);
    });
    let status = wait(&sinks, |status| status.errors > 0).await;
    assert_eq!(status.spill_queued, 2);
    let error = status.last_error.unwrap().text;
    assert!(error.ends_with("no answer within 50ms"), "{error}");
}

#[tokio::test]
async fn what_cannot_be_sent_outlives_the_agent() {
    // A port where nobody listens.
    let port = Receiver::new(0, |_, _| None).await.port;
    let spill = tempfile::tempdir().unwrap();
    let sinks = start(port, Some(spill.path()), |_| {});
    send(&sinks, &["a", "b", "c"]);
    // Without being asked, once the receiver is known to be away.
    let status = wait(&sinks, |status| status.spill_queued == 3).await;
    assert_eq!((status.queued, status.dropped.total()), (0, 0));
    assert!(status.spill_bytes > 0);
    // As when it is killed: nothing is flushed.
    drop(sinks);
    let sinks = loop {
        // The thread of the first one may still be about to end.
        let config = PyroscopeConfig::new(format!("http://127.0.0.1:{port}"));
        let again = SinksConfig {
            pyroscope: Some(PyroscopeConfig {
                queue: QueueConfig {
                    spill_directory: Some(spill.path().to_path_buf()),
                    first_retry: Duration::from_millis(5),
                    ..QueueConfig::default()
                },
                ..config
            }),
            ..SinksConfig::default()
        };
        match Sinks::start(again) {
            Ok(sinks) => break sinks,
            Err(error) => assert!(format!("{error:#}").contains("another rbprof"), "{error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let file = std::fs::read_dir(spill.path().join("pyroscope"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "spill"))
        .max()
        .unwrap();
    std::fs::write(file, "rubbish").unwrap();
    send(&sinks, &["d"]);
    let receiver = Receiver::new(port, |_, _| answer("200 OK")).await;
    let status = wait(&sinks, |status| status.delivered == 3).await;
    assert_eq!(status.dropped.corrupt, 1);
    assert_eq!((status.spill_queued, status.spill_bytes), (0, 0));
    assert_eq!(receiver.services(), ["a", "b", "d"]);
}

#[tokio::test]
async fn the_spill_is_bounded_and_the_oldest_goes() {
    let port = Receiver::new(0, |_, _| None).await.port;
    let spill = tempfile::tempdir().unwrap();
    let sinks = start(port, Some(spill.path()), |queue| {
        queue.spill_size = 64 << 10;
    });
    let names: Vec<String> = (0..200).map(|n| format!("s{n}")).collect();
    for name in &names {
        send(&sinks, &[name]);
    }
    let status = wait(&sinks, |status| {
        status.queued == 0 && status.spilled == 200 && status.dropped.total() > 0
    })
    .await;
    assert!(status.spill_bytes <= 64 << 10);
    assert_eq!(status.spill_queued + status.dropped.spill_full, 200);
    let receiver = Receiver::new(port, |_, _| answer("200 OK")).await;
    wait(&sinks, |status| status.spill_queued == 0).await;
    let services = receiver.services();
    // The first one may be one that was being sent when others went.
    let rest = &services[1..];
    assert_eq!(*rest, names[200 - rest.len()..]);
}

#[tokio::test]
async fn without_a_spill_memory_is_bounded() {
    let port = Receiver::new(0, |_, _| None).await.port;
    let sinks = start(port, None, |queue| queue.memory = 64 << 10);
    for n in 0..200 {
        send(&sinks, &[&format!("s{n}")]);
        assert!(status(&sinks).queued_bytes <= (64 << 10) + (64 << 20));
    }
    let status = wait(&sinks, |status| {
        status.queued_bytes <= 64 << 10 && status.queued + status.dropped.overflow == 200
    })
    .await;
    assert!(status.dropped.overflow > 0);
    assert_eq!(sinks.flush(soon(1000)).await, status.queued);
}

#[tokio::test]
async fn a_receiver_is_trusted_if_its_authority_is() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key.unwrap())
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = serve(stream, &all, &|_, _| answer("200 OK")).await;
            }
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let authority = directory.path().join("ca.pem");
    std::fs::write(&authority, own.cert.pem()).unwrap();
    for trusted in [false, true] {
        let mut config = PyroscopeConfig::new(format!("https://localhost:{port}"));
        config.ca_file = Some(authority.clone()).filter(|_| trusted);
        let sinks = Sinks::start(SinksConfig {
            pyroscope: Some(config),
            ..SinksConfig::default()
        });
        let sinks = match sinks {
            Ok(sinks) => sinks,
            // A machine without certificates.
            Err(error) => {
                assert!(!trusted, "{error:#}");
                assert!(format!("{error:#}").contains("ca_file"), "{error:#}");
                continue;
            }
        };
        send(&sinks, &["a"]);
        let status = wait(&sinks, |status| status.delivered + status.errors > 0).await;
        assert_eq!(status.delivered, u64::from(trusted), "{status:?}");
        if let Some(error) = status.last_error {
            assert!(error.text.contains("certificate"), "{}", error.text);
        }
    }
    assert_eq!(seen.lock().unwrap().len(), 1);
}
