//! Connections, and their limits.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::Request;
use hyper::StatusCode;
use hyper::body::Body as _;
use hyper::body::Incoming;
use hyper::header::CONNECTION;
use hyper::header::HeaderValue;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::rt::TokioTimer;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::sync::Semaphore;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::HttpConfig;
use super::backend::Backend;
use super::guard;
use super::listen::Bound;
use super::routes;
use super::routes::Answer;
use super::routes::Routes;
use crate::agent::metrics::Page;

/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Most headers.
const MAX_HEADERS: usize = 64;
/// How long a head may take, and how long a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a connection may last beyond the longest profile.
const EXTRA_TIME: Duration = Duration::from_secs(60);
/// How long open connections have left once the server is told to stop.
const LAST_TIME: Duration = Duration::from_secs(1);
/// How long nothing is accepted after an error, such as too many open files.
const PAUSE: Duration = Duration::from_millis(200);

/// What the server has done.
#[derive(Debug, Default)]
pub struct Counters {
    /// Answers by the first digit of their status, from 2 on.
    answers: [AtomicU64; 4],
    connections: AtomicU64,
}

impl Counters {
    fn count(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).saturating_sub(2);
        if let Some(answers) = self.answers.get(class) {
            answers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Puts them on a page.
    pub(super) fn show(&self, page: &mut Page) {
        page.counter(
            "http_connections",
            "Connections accepted",
            self.connections.load(Ordering::Relaxed),
        );
        page.counters(
            "http_responses",
            "Answers to HTTP requests, by class of status",
            None,
            ["2xx", "3xx", "4xx", "5xx"]
                .into_iter()
                .zip(&self.answers)
                .map(|(class, number)| {
                    (
                        vec![("class", class.to_owned())],
                        number.load(Ordering::Relaxed),
                    )
                }),
        );
    }
}

/// Serves HTTP.
#[derive(Debug)]
pub struct Server {
    routes: Arc<Routes>,
    hosts: Arc<[String]>,
    places: Arc<Semaphore>,
    longest: Duration,
}

impl Server {
    /// A server that asks `backend`.
    #[must_use]
    pub fn new(config: &HttpConfig, backend: Backend) -> Self {
        Self {
            routes: Arc::new(Routes {
                backend,
                max_duration: config.max_duration,
                counters: Arc::new(Counters::default()),
            }),
            hosts: config.hosts.clone().into(),
            places: Arc::new(Semaphore::new(config.max_connections)),
            longest: config.max_duration + EXTRA_TIME,
        }
    }

    /// Serves until `stop` is true or its sender is gone; then open connections
    /// have a second to end. Must be called in a runtime of tokio with timers
    /// and network. Dropping the future ends everything at once.
    pub async fn run(&self, listeners: Vec<Bound>, stop: watch::Receiver<bool>) {
        let mut accepting = JoinSet::new();
        for listener in listeners {
            accepting.spawn(accept(
                listener,
                Arc::clone(&self.routes),
                Arc::clone(&self.hosts),
                Arc::clone(&self.places),
                self.longest,
                stop.clone(),
            ));
        }
        while accepting.join_next().await.is_some() {}
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone.
    drop(stop.wait_for(|stop| *stop).await);
}

async fn accept(
    listener: Bound,
    routes: Arc<Routes>,
    hosts: Arc<[String]>,
    places: Arc<Semaphore>,
    longest: Duration,
    stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let mut stopping = pin!(stopped(stop.clone()));
    loop {
        // What has ended needs no memory.
        while connections.try_join_next().is_some() {}
        let accepted = async {
            let accepted = match &listener {
                Bound::Unix(socket) => socket
                    .listener
                    .accept()
                    .await
                    .map(|(stream, _)| Stream::Unix(stream)),
                Bound::Tcp(port) => port.accept().await.map(|(stream, _)| Stream::Tcp(stream)),
            };
            // Whoever finds no place waits here, those behind in the kernel's
            // queue. Listeners share the places.
            let place = Arc::clone(&places).acquire_owned().await.ok()?;
            Some((place, accepted))
        };
        let (place, stream) = tokio::select! {
            accepted = accepted => match accepted {
                Some((place, Ok(stream))) => (place, stream),
                Some((_, Err(_))) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                None => break,
            },
            () = &mut stopping => break,
        };
        routes.counters.connections.fetch_add(1, Ordering::Relaxed);
        let routes = Arc::clone(&routes);
        let hosts = Arc::clone(&hosts);
        let stopping = stopped(stop.clone());
        connections.spawn(async move {
            let served = async {
                match stream {
                    Stream::Unix(stream) => serve(stream, routes, None, stopping).await,
                    Stream::Tcp(stream) => serve(stream, routes, Some(hosts), stopping).await,
                }
            };
            // Somebody who does not read keeps an answer in memory.
            drop(tokio::time::timeout(longest, served).await);
            drop(place);
        });
    }
    // The socket's file goes now, the connections soon.
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    drop(tokio::time::timeout(LAST_TIME, ended).await);
}

enum Stream {
    Unix(tokio::net::UnixStream),
    Tcp(tokio::net::TcpStream),
}

/// Serves a connection. `hosts`: further names of this machine, where requests
/// have to say whom they are for.
async fn serve<S>(
    stream: S,
    routes: Arc<Routes>,
    hosts: Option<Arc<[String]>>,
    stopping: impl Future<Output = ()>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let routes = Arc::clone(&routes);
        let hosts = hosts.clone();
        async move { Ok::<_, Infallible>(answer(&routes, hosts.as_deref(), &request).await) }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service)
    );
    // Errors are those of the other side: nobody is left to tell.
    tokio::select! {
        ended = connection.as_mut() => return drop(ended),
        () = stopping => connection.as_mut().graceful_shutdown(),
    }
    drop(connection.await);
}

async fn answer(routes: &Routes, hosts: Option<&[String]>, request: &Request<Incoming>) -> Answer {
    let mut answer = if let Some(hosts) = hosts
        && let Err(refused) = guard::check(request.headers(), request.uri(), hosts)
    {
        routes::plainly(refused.status, refused.why)
    } else if !request.body().is_end_stream() {
        routes::plainly(
            StatusCode::PAYLOAD_TOO_LARGE,
            "requests with a body are not answered",
        )
    } else {
        let uri = request.uri();
        let query = uri.query().unwrap_or_default();
        routes
            .answer(request.method(), uri.path(), query, request.headers())
            .await
    };
    if answer.status().is_client_error() {
        // Whatever is left of the request is not read.
        let close = HeaderValue::from_static("close");
        answer.headers_mut().insert(CONNECTION, close);
    }
    routes.counters.count(answer.status());
    answer
}
