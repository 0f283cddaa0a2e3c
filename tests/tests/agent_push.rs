//! What the agent's sinks send, as independent decoders understand it: pprof-format for
//! Pyroscope, the crate opentelemetry-proto for OTLP.
//!
//! The receiver is our own and speaks HTTP by hand, so that nothing of what sends is
//! in what receives. Pyroscope's part needs Node.js with npm; see
//! `rbprof_tests::pprof_format`.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail as tests do"
)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::io::Write as _;
use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use flate2::read::GzDecoder;
use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::common::v1::AnyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::profiles::v1development::ProfilesDictionary;
use prost::Message as _;
use rbprof::agent::batch::Batch;
use rbprof::agent::identity::Identity;
use rbprof::agent::sinks::Sinks;
use rbprof::agent::sinks::config::AuthConfig;
use rbprof::agent::sinks::config::OtlpConfig;
use rbprof::agent::sinks::config::Per;
use rbprof::agent::sinks::config::ProcessLabel;
use rbprof::agent::sinks::config::PyroscopeConfig;
use rbprof::agent::sinks::config::SinksConfig;
use rbprof::profile::CounterKind;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::profile::Labels;
use rbprof::profile::LocationId;
use rbprof::profile::Mapping;
use rbprof::profile::MappingId;
use rbprof::profile::Metadata;
use rbprof::profile::Profile;
use rbprof_tests::pprof_format;

/// 2023-11-14, 22:13:20.25.
const FROM_NS: u64 = 1_700_000_000_250_000_000;

fn frame(
    profile: &mut Profile,
    kind: FunctionKind,
    label: &str,
    file: &str,
    mapping: MappingId,
    (line, address): (u32, u64),
) -> LocationId {
    let base_label = label.rsplit('#').next().unwrap();
    let function = profile.intern_function(&Arc::new(Function {
        kind,
        label: label.into(),
        base_label: base_label.into(),
        file: file.into(),
        first_line: line.saturating_sub(1),
    }));
    profile.intern_native_location(function, line, mapping, address)
}

/// Frames of every kind, in two samples of two threads.
fn batch(service: &str, pid: u32) -> Batch {
    let mut profile = Profile::new(Metadata {
        start_unix_ns: FROM_NS,
        duration_ns: 2_000_000_000,
        frequency_hz: 19,
        rubies: vec!["3.3.8".to_owned()],
        ..Metadata::default()
    });
    profile.metadata.count("samples lost", CounterKind::Loss, 3);
    let p = &mut profile;
    let library = p.intern_mapping(&Mapping {
        start: 0x7000,
        limit: 0x9000,
        offset: 0x1000,
        file: "/usr/lib/libruby.so".into(),
        build_id: "c0ffee01".into(),
        ..Mapping::default()
    });
    let kernel = p.intern_mapping(&Mapping {
        file: "[kernel.kallsyms]".into(),
        ..Mapping::default()
    });
    let (ruby, jit) = (MappingId::RUBY, MappingId::RUBY_JIT);
    let main = frame(p, FunctionKind::Ruby, "<main>", "/app/a.rb", ruby, (9, 0));
    let total = frame(
        p,
        FunctionKind::Ruby,
        "Shop#größe",
        "/app/s.rb",
        jit,
        (5, 0),
    );
    let read = frame(
        p,
        FunctionKind::CFunction,
        "IO#read",
        "<cfunc>",
        ruby,
        (0, 0),
    );
    let native = frame(
        p,
        FunctionKind::Native,
        "rb_io_read",
        "",
        library,
        (0, 0x7123),
    );
    let vfs = frame(
        p,
        FunctionKind::Kernel,
        "vfs_read",
        "",
        kernel,
        (0, 0xffff_1234),
    );
    let cut = p.intern_function(&Function::marker("(cut)"));
    let cut = p.intern_location(cut, 0);
    let labels = |tid, name: Option<&str>| Labels {
        pid,
        tid,
        thread_name: name.map(Into::into),
        comm: Some("ruby".into()),
        state: name.is_none().then(|| "gc".into()),
    };
    let first = p.intern_labels(&labels(pid, Some("worker 1")));
    let second = p.intern_labels(&labels(pid + 1, None));
    let stack = p.intern_stack(&[vfs, native, read, total, main]);
    p.add(stack, first, 7);
    let stack = p.intern_stack(&[total, cut]);
    p.add(stack, second, 2);
    Batch {
        service: service.into(),
        process: Some(Arc::new(Identity {
            pid,
            service: service.into(),
            command: "ruby app.rb --port 80".to_owned(),
            cgroup: Some("/kubepods/pod11-22/c1".to_owned()),
            container: Some("c1".to_owned()),
            unit: Some("shop.service".to_owned()),
            pod: Some("11-22".to_owned()),
            ruby: "3.3.8".to_owned(),
            ..Identity::default()
        })),
        profile: Arc::new(profile),
        from: at(FROM_NS),
        until: at(FROM_NS + 2_000_000_000),
    }
}

fn at(ns: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(ns)
}

/// A request as it came.
#[derive(Debug)]
struct Request {
    path: String,
    query: BTreeMap<String, String>,
    /// Names in lower case.
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// `+` does not stand for a space here: what we send has none.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next().unwrap(), rest.next().unwrap()];
            let digits = std::str::from_utf8(&digits).unwrap();
            bytes.push(u8::from_str_radix(digits, 16).unwrap());
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn read_request(stream: &mut impl Read) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.trim_end().split("\r\n");
    let words: Vec<&str> = lines.next()?.split(' ').collect();
    assert_eq!((words[0], words[2]), ("POST", "HTTP/1.1"));
    let (path, query) = words[1].split_once('?').unwrap_or((words[1], ""));
    let headers: BTreeMap<String, String> = lines
        .map(|line| line.split_once(':').unwrap())
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut body = vec![0; headers["content-length"].parse().unwrap()];
    stream.read_exact(&mut body).ok()?;
    Some(Request {
        path: path.to_owned(),
        query: (query.split('&').filter(|pair| !pair.is_empty()))
            .map(|pair| pair.split_once('=').unwrap())
            .map(|(name, value)| (decoded(name), decoded(value)))
            .collect(),
        headers,
        body,
    })
}

/// A receiver that takes everything: its address, and what it got.
fn receiver() -> (String, mpsc::Receiver<Request>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, requests) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, sender) = (stream.unwrap(), sender.clone());
            thread::spawn(move || {
                while let Some(request) = read_request(&mut stream) {
                    let _ = sender.send(request);
                    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                    if stream.write_all(answer).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (url, requests)
}

/// Delivers, and waits until all is sent.
fn deliver(config: SinksConfig, cut: &[Batch]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let sinks = Sinks::start(config).unwrap();
        sinks.deliver(cut);
        let left = sinks.flush(Instant::now() + Duration::from_secs(20)).await;
        assert_eq!(left, 0, "{:#?}", sinks.status());
        for status in sinks.status() {
            assert_eq!(
                (status.errors, status.dropped.total()),
                (0, 0),
                "{status:#?}"
            );
        }
        assert_eq!(
            sinks
                .shutdown(Instant::now() + Duration::from_secs(5))
                .await,
            0
        );
    });
}

fn pyroscope(config: PyroscopeConfig) -> SinksConfig {
    SinksConfig {
        pyroscope: Some(config),
        ..SinksConfig::default()
    }
}

fn otlp(config: OtlpConfig) -> SinksConfig {
    SinksConfig {
        otlp: Some(config),
        ..SinksConfig::default()
    }
}

/// The profile in a request's body, as pprof-format understands it: a line for each
/// sample and so on. `None` if that cannot be run here.
fn pprof_lines(request: &Request) -> Option<Vec<String>> {
    let reader = pprof_format::reader().unwrap()?;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("profile.pb.gz");
    fs::write(&file, &request.body).unwrap();
    let mut node = Command::new("node");
    let output = node
        .arg(reader.join("read.js"))
        .arg(&file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.lines().map(str::to_owned).collect())
}

#[test]
fn pyroscope_gets_a_series_and_a_profile() {
    let (url, requests) = receiver();
    let mut config = PyroscopeConfig::new(format!("{url}/base"));
    config.tenant = Some("team-a".to_owned());
    config.labels = BTreeMap::from([
        ("env".to_owned(), "production".to_owned()),
        ("hostname".to_owned(), "host-1".to_owned()),
    ]);
    config.process_labels.push(ProcessLabel::Pid);
    config.headers = BTreeMap::from([("X-Extra".to_owned(), "yes".to_owned())]);
    config.auth = AuthConfig {
        user: Some("Aladdin".to_owned()),
        password: Some("open sesame".to_owned().into()),
        ..AuthConfig::default()
    };
    deliver(pyroscope(config), &[batch("web", 41)]);
    let request = requests.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(request.path, "/base/ingest");
    let query = |name: &str| request.query.get(name).map(String::as_str);
    assert_eq!(
        query("name"),
        Some(
            "web{container_id=c1,env=production,hostname=host-1,pid=41,pod_uid=11-22,\
             ruby_version=3.3.8,systemd_unit=shop.service}"
        )
    );
    assert_eq!(
        (query("from"), query("until")),
        (Some("1700000000"), Some("1700000003"))
    );
    assert_eq!(
        (query("format"), query("sampleRate")),
        (Some("pprof"), Some("19"))
    );
    assert_eq!(query("spyName"), Some("rbprof"));
    let header = |name: &str| request.headers.get(name).map(String::as_str);
    assert_eq!(header("x-scope-orgid"), Some("team-a"));
    assert_eq!(header("x-extra"), Some("yes"));
    assert_eq!(
        header("authorization"),
        Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")
    );
    assert_eq!(
        header("content-encoding"),
        None,
        "the server would unpack twice"
    );
    assert!(header("host").is_some_and(|host| url.ends_with(host)));

    let Some(lines) = pprof_lines(&request) else {
        return;
    };
    for expected in [
        "types samples/count cpu/nanoseconds period 52631578",
        "comment samples lost: 3",
        "7 368421046 | pid=41 tid=41 | vfs_read :0:0 in [kernel.kallsyms] < \
         rb_io_read :0:0 in /usr/lib/libruby.so < IO#read <cfunc>:0:0 in ruby < \
         Shop#größe /app/s.rb:4:5 in ruby (JIT) < <main> /app/a.rb:8:9 in ruby",
        "2 105263156 | pid=41 tid=42 | Shop#größe /app/s.rb:4:5 in ruby (JIT) < \
         (cut) :0:0 in ruby",
    ] {
        let found = lines.iter().any(|line| line == expected);
        assert!(found, "no line {expected:?} in\n{lines:#?}");
    }
}

#[test]
fn pyroscope_gets_threads_and_services_if_asked_to() {
    let (url, requests) = receiver();
    let mut config = PyroscopeConfig::new(url);
    config.per = Per::Service;
    config.thread_labels = true;
    config.labels = BTreeMap::from([("hostname".to_owned(), "host-1".to_owned())]);
    config.auth.bearer_token = Some("sesame".to_owned().into());
    let cut = [batch("web", 41), batch("web", 51), batch("a b", 61)];
    deliver(pyroscope(config), &cut);
    let both = requests.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(both.query["name"], "web{hostname=host-1}");
    assert_eq!(both.headers["authorization"], "Bearer sesame");
    let other = requests.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(other.query["name"], "a_b{hostname=host-1,service=a b}");
    assert!(requests.try_recv().is_err());
    let Some(lines) = pprof_lines(&both) else {
        return;
    };
    for expected in [
        "7 368421046 | pid=41 tid=41 thread_name=worker 1 comm=ruby | ",
        "7 368421046 | pid=51 tid=51 thread_name=worker 1 comm=ruby | ",
        "2 105263156 | pid=51 tid=52 comm=ruby state=gc | ",
    ] {
        let found = lines.iter().any(|line| line.starts_with(expected));
        assert!(found, "no line {expected:?} in\n{lines:#?}");
    }
}

/// A value as text.
fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{other:?}"),
    }
}

/// What attributes say, in order of their names.
fn attributes(of: &ProfilesDictionary, indices: &[i32]) -> String {
    let mut found: Vec<String> = (indices.iter())
        .map(|index| {
            let attribute = &of.attribute_table[usize::try_from(*index).unwrap()];
            let key = string(of, attribute.key_strindex);
            format!("{key}={}", text(attribute.value.as_ref()))
        })
        .collect();
    found.sort();
    found.join(" ")
}

fn string(of: &ProfilesDictionary, index: i32) -> &str {
    &of.string_table[usize::try_from(index).unwrap()]
}

/// A frame for people: what it is called, where, in which mapping, of which type.
fn frame_text(of: &ProfilesDictionary, index: i32) -> String {
    let location = &of.location_table[usize::try_from(index).unwrap()];
    let line = &location.lines[0];
    let function = &of.function_table[usize::try_from(line.function_index).unwrap()];
    let mapping = &of.mapping_table[usize::try_from(location.mapping_index).unwrap()];
    format!(
        "{} ({}) {}:{}:{} at {:x} in {} [{}] [{}]",
        string(of, function.name_strindex),
        string(of, function.system_name_strindex),
        string(of, function.filename_strindex),
        function.start_line,
        line.line,
        location.address,
        string(of, mapping.filename_strindex),
        attributes(of, &mapping.attribute_indices),
        attributes(of, &location.attribute_indices),
    )
}

fn otlp_request(request: &Request) -> ExportProfilesServiceRequest {
    assert_eq!(request.path, "/v1development/profiles");
    assert_eq!(request.headers["content-type"], "application/x-protobuf");
    let mut content = Vec::new();
    match request.headers.get("content-encoding") {
        Some(encoding) => {
            assert_eq!(encoding, "gzip");
            GzDecoder::new(&*request.body)
                .read_to_end(&mut content)
                .unwrap();
        }
        None => content.clone_from(&request.body),
    }
    ExportProfilesServiceRequest::decode(&*content).unwrap()
}

fn resource(request: &ExportProfilesServiceRequest) -> BTreeMap<&str, String> {
    let resource = request.resource_profiles[0].resource.as_ref().unwrap();
    (resource.attributes.iter())
        .map(|attribute| (&*attribute.key, text(attribute.value.as_ref())))
        .collect()
}

#[test]
fn a_collector_gets_a_resource_and_a_profile() {
    let (url, requests) = receiver();
    let mut config = OtlpConfig::new(url);
    config.attributes = BTreeMap::from([
        (
            "deployment.environment.name".to_owned(),
            "production".to_owned(),
        ),
        ("host.name".to_owned(), "host-1".to_owned()),
    ]);
    deliver(otlp(config), &[batch("web", 41)]);
    let request = requests.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(request.headers["content-encoding"], "gzip");
    let request = otlp_request(&request);
    assert_eq!(
        resource(&request),
        BTreeMap::from([
            ("deployment.environment.name", "production".to_owned()),
            ("host.name", "host-1".to_owned()),
            ("service.name", "web".to_owned()),
            ("process.pid", "41".to_owned()),
            ("process.command_line", "ruby app.rb --port 80".to_owned()),
            ("process.runtime.name", "ruby".to_owned()),
            ("process.runtime.version", "3.3.8".to_owned()),
            ("process.linux.cgroup", "/kubepods/pod11-22/c1".to_owned()),
            ("container.id", "c1".to_owned()),
            ("k8s.pod.uid", "11-22".to_owned()),
            ("rbprof.systemd.unit", "shop.service".to_owned()),
        ])
    );
    let scope = &request.resource_profiles[0].scope_profiles[0];
    assert_eq!(scope.scope.as_ref().unwrap().name, "rbprof");
    let profile = &scope.profiles[0];
    let of = request.dictionary.as_ref().unwrap();
    let (count, cpu) = (
        profile.sample_type.as_ref().unwrap(),
        profile.period_type.as_ref().unwrap(),
    );
    assert_eq!(string(of, count.type_strindex), "samples");
    assert_eq!(string(of, count.unit_strindex), "count");
    assert_eq!(string(of, cpu.type_strindex), "cpu");
    assert_eq!(string(of, cpu.unit_strindex), "nanoseconds");
    assert_eq!(profile.period, 52_631_578);
    assert_eq!(
        (profile.time_unix_nano, profile.duration_nano),
        (FROM_NS, 2_000_000_000)
    );
    assert_eq!(profile.profile_id.len(), 16);
    assert_eq!(
        attributes(of, &profile.attribute_indices),
        "rbprof.samples_lost=3"
    );

    let samples: Vec<(i64, String, Vec<String>)> = (profile.samples.iter())
        .map(|sample| {
            let stack = &of.stack_table[usize::try_from(sample.stack_index).unwrap()];
            let frames = stack.location_indices.iter();
            (
                sample.values[0],
                attributes(of, &sample.attribute_indices),
                frames.map(|index| frame_text(of, *index)).collect(),
            )
        })
        .collect();
    let ruby = "[] [profile.frame.type=ruby]";
    let total = format!("Shop#größe (größe) /app/s.rb:4:5 at 0 in ruby (JIT) {ruby}");
    assert_eq!(
        samples,
        [
            (
                7,
                "thread.id=41 thread.name=worker 1".to_owned(),
                vec![
                    "vfs_read () :0:0 at ffff1234 in [kernel.kallsyms] [] \
                     [profile.frame.type=kernel]"
                        .to_owned(),
                    "rb_io_read () :0:0 at 7123 in /usr/lib/libruby.so \
                     [process.executable.build_id.gnu=c0ffee01] [profile.frame.type=native]"
                        .to_owned(),
                    format!("IO#read (read) <cfunc>:0:0 at 0 in  {ruby}"),
                    total.clone(),
                    format!("<main> () /app/a.rb:8:9 at 0 in  {ruby}"),
                ]
            ),
            (
                2,
                "rbprof.state=gc thread.id=42 thread.name=ruby".to_owned(),
                vec![total, "(cut) () :0:0 at 0 in  [] []".to_owned()]
            ),
        ]
    );
    let library = of.mapping_table.iter().find(|of| of.memory_start == 0x7000);
    let library = library.unwrap();
    assert_eq!(
        (library.memory_limit, library.file_offset),
        (0x9000, 0x1000)
    );
}

#[test]
fn a_collector_gets_a_service_if_asked_to() {
    let (url, requests) = receiver();
    let mut config = OtlpConfig::new(url);
    config.per = Per::Service;
    config.compression = rbprof::agent::sinks::config::Compression::None;
    deliver(otlp(config), &[batch("web", 41), batch("web", 51)]);
    let request = requests.recv_timeout(Duration::from_secs(5)).unwrap();
    let request = otlp_request(&request);
    let resource = resource(&request);
    assert_eq!(resource["service.name"], "web");
    assert_eq!(resource["process.runtime.version"], "3.3.8");
    assert!(!resource.contains_key("process.pid"));
    assert!(resource.contains_key("host.name"));
    let of = request.dictionary.as_ref().unwrap();
    let profile = &request.resource_profiles[0].scope_profiles[0].profiles[0];
    let mut threads: Vec<String> = (profile.samples.iter())
        .map(|sample| attributes(of, &sample.attribute_indices))
        .collect();
    threads.sort();
    assert_eq!(
        threads,
        [
            "process.pid=41 rbprof.state=gc thread.id=42 thread.name=ruby",
            "process.pid=41 thread.id=41 thread.name=worker 1",
            "process.pid=51 rbprof.state=gc thread.id=52 thread.name=ruby",
            "process.pid=51 thread.id=51 thread.name=worker 1",
        ]
    );
    assert_eq!(of.stack_table.len(), 3, "equal stacks are there once");
}
