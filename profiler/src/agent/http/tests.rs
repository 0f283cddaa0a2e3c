//! The server over real sockets, with a core that makes everything up.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::sync::watch;

use super::Bound;
use super::HttpConfig;
use super::Listen;
use super::Server;
use super::backend::Backend;
use super::backend::Health;
use super::backend::Recent;
use super::backend::Refusal;
use super::backend::Request;
use super::backend::Selector;
use super::backend::Target;
use crate::agent::batch::Batch;
use crate::agent::identity::Identity;
use crate::agent::metrics::Page;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Labels;
use crate::profile::Metadata;
use crate::profile::Profile;

fn profile(method: &str) -> Arc<Profile> {
    let mut profile = Profile::new(Metadata {
        frequency_hz: 19,
        duration_ns: 1_000_000_000,
        start_unix_ns: 1_700_000_000_000_000_000,
        ..Metadata::default()
    });
    let function = profile.intern_function(&Arc::new(Function {
        kind: FunctionKind::Ruby,
        label: method.into(),
        base_label: method.into(),
        file: "/app/a.rb".into(),
        first_line: 1,
    }));
    let location = profile.intern_location(function, 2);
    let stack = profile.intern_stack(&[location]);
    let labels = profile.intern_labels(&Labels::default());
    profile.add(stack, labels, 5);
    Arc::new(profile)
}

fn identity() -> Arc<Identity> {
    Arc::new(Identity {
        pid: 42,
        service: "sh<o>p".into(),
        command: "ruby <script>alert(1)</script>".to_owned(),
        ruby: "3.3.8".to_owned(),
        unit: Some("shop.service".to_owned()),
        ..Identity::default()
    })
}

fn recent(id: u64, service: &str, method: &str) -> Recent {
    Recent {
        id,
        batch: Batch {
            service: service.into(),
            process: (service == "shop").then(identity),
            profile: profile(method),
            from: SystemTime::UNIX_EPOCH,
            until: SystemTime::UNIX_EPOCH + Duration::from_secs(60),
        },
    }
}

/// Answers as the core would.
async fn core(mut requests: mpsc::Receiver<Request>) {
    while let Some(request) = requests.recv().await {
        // Nobody waits for an answer to a request that was given up.
        match request {
            Request::Profile {
                of,
                duration,
                reply,
            } => {
                tokio::spawn(async move {
                    tokio::time::sleep(duration).await;
                    let answer = match of {
                        Selector::All => Ok(profile("everything")),
                        Selector::Process(42) => Ok(profile("process")),
                        Selector::Process(43) => Err(Refusal::Busy("too many".to_owned())),
                        Selector::Process(44) => Err(Refusal::Failed("broken".to_owned())),
                        // Never answered.
                        Selector::Process(45) => return,
                        Selector::Process(pid) => {
                            Err(Refusal::NotFound(format!("no process {pid}")))
                        }
                        Selector::Service(name) => Ok(profile(&name)),
                    };
                    drop(reply.send(answer));
                });
            }
            Request::Recent { reply } => {
                let kept = vec![
                    recent(1, "shop", "old_method"),
                    recent(2, "web", "other_method"),
                    recent(3, "shop", "new_method"),
                ];
                drop(reply.send(kept));
            }
            Request::Targets { reply } => drop(reply.send(vec![Target {
                identity: identity(),
                is_profiled: true,
                since: SystemTime::UNIX_EPOCH,
                samples: 7,
                roots: vec![("ec".to_owned(), "symbol & more".to_owned())],
                missing: vec!["names of <C> functions".to_owned()],
            }])),
            Request::Metrics { reply } => {
                let mut page = Page::default();
                page.counter("samples", "Samples", 3);
                drop(reply.send(page));
            }
            Request::Health { reply } => drop(reply.send(Health::default())),
        }
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    port: u16,
    stop: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
}

impl Fixture {
    async fn new(change: impl FnOnce(&mut HttpConfig)) -> Self {
        let (backend, requests) = Backend::new();
        tokio::spawn(core(requests));
        Self::with(backend, change).await
    }

    async fn with(backend: Backend, change: impl FnOnce(&mut HttpConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = HttpConfig {
            listen: vec![
                Listen::Unix(folder.path().join("http.sock")),
                Listen::Tcp("127.0.0.1:0".parse().unwrap()),
            ],
            socket_mode: 0o600,
            hosts: Vec::new(),
            max_duration: Duration::from_secs(10),
            max_connections: 8,
            recent: 4,
        };
        change(&mut config);
        let mut bound = Vec::new();
        let mut port = 0;
        for listen in &config.listen {
            let listener = listen.bind(config.socket_mode).await.unwrap();
            if let Bound::Tcp(listener) = &listener {
                port = listener.local_addr().unwrap().port();
            }
            bound.push(listener);
        }
        let (stop, stopping) = watch::channel(false);
        let server = Server::new(&config, backend);
        let server = tokio::spawn(async move { server.run(bound, stopping).await });
        Self {
            folder,
            port,
            stop,
            server,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// Status, head and body of an answer to a request over TCP.
    async fn send(&self, request: &str) -> (u16, String, Vec<u8>) {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        // A connection that is closed early may be reset.
        let _ = stream.read_to_end(&mut bytes).await;
        parts(&bytes)
    }

    async fn get(&self, path: &str) -> (u16, String, Vec<u8>) {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        ))
        .await
    }

    async fn text(&self, path: &str) -> String {
        let (status, _, body) = self.get(path).await;
        assert_eq!(status, 200, "{path}");
        String::from_utf8(body).unwrap()
    }
}

fn parts(bytes: &[u8]) -> (u16, String, Vec<u8>) {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return (0, String::new(), Vec::new());
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head, bytes[end + 4..].to_vec())
}

/// The names in a gzipped pprof file.
fn strings(gzipped: &[u8]) -> String {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(gzipped), &mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn a_fresh_profile_is_served_as_go_programs_do() {
    let fixture = Fixture::new(|_| ()).await;
    let started = Instant::now();
    let (status, head, body) = fixture.get("/debug/pprof/profile?seconds=0.2").await;
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert_eq!(status, 200);
    assert!(
        head.contains("content-type: application/octet-stream"),
        "{head}"
    );
    assert!(head.contains("filename=\"profile.pb.gz\""), "{head}");
    assert!(strings(&body).contains("everything"));
    for (query, name) in [("pid=42", "process"), ("service=my+shop", "my shop")] {
        let path = format!("/debug/pprof/profile?seconds=0.01&{query}");
        let (status, _, body) = fixture.get(&path).await;
        assert_eq!(status, 200, "{query}");
        assert!(strings(&body).contains(name), "{query}");
    }
}

#[tokio::test]
async fn statuses_tell_what_is_wrong() {
    let fixture = Fixture::new(|_| ()).await;
    for (path, expected) in [
        ("/debug/pprof/profile?seconds=11", 400),
        ("/debug/pprof/profile?seconds=0", 400),
        ("/debug/pprof/profile?seconds=x", 400),
        ("/debug/pprof/profile?second=1", 400),
        ("/debug/pprof/profile?pid=x", 400),
        ("/debug/pprof/profile?pid=1&service=x", 400),
        ("/debug/pprof/profile?seconds=0.01&pid=1", 404),
        ("/debug/pprof/profile?seconds=0.01&pid=43", 503),
        ("/debug/pprof/profile?seconds=0.01&pid=44", 500),
        ("/debug/pprof/profile?seconds=0.01&pid=45", 503),
        ("/profiles?id=9", 404),
        ("/profiles?id=x", 400),
        ("/profiles?format=xml", 400),
        ("/flamegraph?id=9", 404),
        ("/flamegraph?id=1&seconds=1", 400),
        ("/flamegraph?id=1&pid=42", 400),
        ("/flamegraph?service=nobody", 404),
        ("/targets?pid=1", 400),
        ("/debug/pprof/heap", 404),
        ("/../etc/passwd", 404),
        ("/", 302),
    ] {
        let (status, head, _) = fixture.get(path).await;
        assert_eq!(status, expected, "{path}");
        assert_eq!(head.contains("retry-after"), status == 503, "{path}");
        assert_eq!(head.contains("x-go-pprof: 1"), status >= 400, "{path}");
    }
    for (request, expected) in [
        ("POST /targets HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (
            "HEAD /debug/pprof/profile HTTP/1.1\r\nHost: localhost\r\n\r\n",
            405,
        ),
        (
            "HEAD /targets HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            200,
        ),
        (
            "GET /targets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
            413,
        ),
        ("GET /targets HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        ("GET /targets HTTP/1.1\r\n\r\n", 400),
        ("nonsense\r\n\r\n", 400),
    ] {
        let (status, _, _) = fixture.send(request).await;
        assert_eq!(status, expected, "{request}");
    }
}

#[tokio::test]
async fn pages_are_for_readers_and_for_programs() {
    let fixture = Fixture::new(|_| ()).await;
    assert!(fixture.text("/debug/pprof/").await.contains("/flamegraph"));
    let json: serde_json::Value = serde_json::from_str(&fixture.text("/targets").await).unwrap();
    assert_eq!(json[0]["pid"], 42);
    assert_eq!(json[0]["service"], "sh<o>p");
    assert_eq!(json[0]["roots"][0]["found_by"], "symbol & more");
    assert_eq!(json[0]["unit"], "shop.service");
    let html = fixture.text("/targets?format=html").await;
    assert!(
        html.contains("&lt;script&gt;alert(1)&lt;/script&gt;"),
        "{html}"
    );
    assert!(!html.contains("<script>"), "{html}");
    assert!(html.contains("/flamegraph?service=sh%3Co%3Ep"), "{html}");
    assert!(html.contains("names of &lt;C&gt; functions"), "{html}");
    let (_, head, _) = fixture
        .send(
            "GET /targets HTTP/1.1\r\nHost: localhost\r\nAccept: text/html,*/*\r\n\
             Connection: close\r\n\r\n",
        )
        .await;
    assert!(head.contains("content-type: text/html"), "{head}");
    assert!(
        head.contains("content-security-policy: default-src 'none'"),
        "{head}"
    );

    let json: serde_json::Value = serde_json::from_str(&fixture.text("/profiles").await).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 3);
    assert_eq!(json[0]["until_unix"], 60.0);
    let html = fixture.text("/profiles?format=html").await;
    assert!(html.find("id=3").unwrap() < html.find("id=1").unwrap());
    let (_, _, body) = fixture.get("/profiles?id=2").await;
    assert!(strings(&body).contains("other_method"));
}

#[tokio::test]
async fn flame_graphs_are_of_recent_or_fresh_profiles() {
    let fixture = Fixture::new(|_| ()).await;
    let (status, head, body) = fixture.get("/flamegraph?service=shop").await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: image/svg+xml"), "{head}");
    assert!(head.contains("script-src 'unsafe-inline'"), "{head}");
    let svg = String::from_utf8(body).unwrap();
    assert!(svg.contains("<svg") && svg.contains("old_method") && svg.contains("new_method"));
    assert!(!svg.contains("other_method"));
    assert!(fixture.text("/flamegraph").await.contains("other_method"));
    assert!(
        fixture
            .text("/flamegraph?pid=42")
            .await
            .contains("new_method")
    );
    assert!(
        !fixture
            .text("/flamegraph?id=1")
            .await
            .contains("new_method")
    );
    let fresh = fixture.text("/flamegraph?seconds=0.01&pid=42").await;
    assert!(fresh.contains("process"));
}

#[tokio::test]
async fn metrics_are_openmetrics() {
    let fixture = Fixture::new(|_| ()).await;
    fixture.get("/nothing").await;
    let (_, head, body) = fixture.get("/metrics").await;
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    let text = String::from_utf8(body).unwrap();
    assert!(text.contains("rbprof_samples_total 3\n"), "{text}");
    assert!(
        text.contains("rbprof_http_responses_total{class=\"4xx\"} 1\n"),
        "{text}"
    );
    assert!(text.contains("rbprof_http_connections_total 2\n"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert_eq!(fixture.text("/healthz").await, "ok\n");
}

#[tokio::test]
async fn unix_sockets_need_no_host() {
    let fixture = Fixture::new(|_| ()).await;
    let path = fixture.folder.path().join("http.sock");
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: whatever\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(parts(&bytes).0, 200);
    // Told to stop, the server ends and takes its file along.
    fixture.stop.send(true).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), fixture.server).await;
    ended.unwrap().unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn heads_have_limits() {
    let fixture = Fixture::new(|_| ()).await;
    let long = "x".repeat(20_000);
    let (status, _, _) = fixture.get(&format!("/targets?{long}")).await;
    assert!(matches!(status, 0 | 414 | 431), "{status}");
    let (status, _, _) = fixture
        .send(&format!(
            "GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n"
        ))
        .await;
    assert!(matches!(status, 0 | 431), "{status}");
    let many = "X: y\r\n".repeat(100);
    let (status, _, _) = fixture
        .send(&format!("GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"))
        .await;
    assert!(matches!(status, 0 | 431), "{status}");
}

#[tokio::test]
async fn further_connections_wait_for_a_place() {
    let fixture = Fixture::new(|config| config.max_connections = 1).await;
    // It says nothing, and keeps the only place.
    let silent = fixture.connect().await;
    // Until it was accepted, another one could be.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let waiting = fixture.get("/healthz");
    tokio::pin!(waiting);
    let early = tokio::time::timeout(Duration::from_millis(300), &mut waiting).await;
    assert!(early.is_err(), "two connections at once");
    drop(silent);
    let (status, _, _) = waiting.await;
    assert_eq!(status, 200);
}

#[tokio::test(start_paused = true)]
async fn who_is_slow_is_cut_off() {
    let fixture = Fixture::new(|_| ()).await;
    let mut slow = fixture.connect().await;
    slow.write_all(b"GET /targets HTTP/1.1\r\n").await.unwrap();
    let mut bytes = Vec::new();
    // Time passes by itself here while everybody waits.
    let read = tokio::time::timeout(Duration::from_secs(30), slow.read_to_end(&mut bytes)).await;
    assert!(read.is_ok(), "still connected after 30 s");
}

#[tokio::test]
async fn a_core_that_does_not_keep_up_is_not_waited_for() {
    // Requests are taken by nobody.
    let (backend, _requests) = Backend::new();
    let fixture = Fixture::with(backend.clone(), |_| ()).await;
    for _ in 0..super::backend::QUEUE {
        let backend = backend.clone();
        tokio::spawn(async move { backend.ask(|reply| Request::Health { reply }).await });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let (status, _, body) = fixture.get("/healthz").await;
    assert_eq!(status, 503);
    assert_eq!(body, b"too many requests at once\n");
}
