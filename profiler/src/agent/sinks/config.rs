//! What can be configured of the sinks.
//!
//! ```toml
//! [files]
//! directory = "/var/lib/rbprof"
//! per = "process"            # or "service"
//! fsync = "file"             # or "none", "file-and-directory"
//! max_age = "7d"
//! max_size = "1GiB"
//! pending = "64MiB"
//!
//! [pyroscope]
//! url = "http://pyroscope:4040"
//! tenant = "team-a"          # X-Scope-OrgID
//! labels = { env = "production" }
//! process_labels = ["pid", "ruby_version"]
//! [pyroscope.auth]
//! user = "1234"
//! password_file = "/run/credentials/rbprof.service/pyroscope"
//! [pyroscope.queue]
//! memory = "16MiB"
//! spill_directory = "/var/lib/rbprof/spill"
//! spill_size = "256MiB"
//!
//! [otlp]
//! url = "http://collector:4318"
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper::Uri;
use hyper::header::HeaderName;
use hyper::header::HeaderValue;
use serde::Deserialize;

use crate::agent::units::deserialize_duration;
use crate::agent::units::deserialize_size;

/// Where profiles go. Each is optional, and all work at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SinksConfig {
    /// Into files.
    pub files: Option<FilesConfig>,
    /// To Grafana Pyroscope.
    pub pyroscope: Option<PyroscopeConfig>,
    /// To an OpenTelemetry collector.
    pub otlp: Option<OtlpConfig>,
}

/// What one profile is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Per {
    /// A process.
    #[default]
    Process,
    /// All processes of a service together.
    Service,
}

/// How much is forced onto the disk before a file has its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fsync {
    /// Nothing. After a crash of the machine (not of the agent), the files of the last
    /// half a minute can be missing, or empty under their final names.
    None,
    /// The file's content. A crash of the machine can lose the names of the last
    /// seconds, but a file that is there is whole. It costs a wait for the disk for
    /// each file, on a thread that waits for nothing else, so it is the default.
    #[default]
    File,
    /// Also its directory: a file that was counted as delivered is there after a crash
    /// of the machine.
    FileAndDirectory,
}

/// Profiles in files: `DIRECTORY/SERVICE/TIME-PID.pb.gz`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilesConfig {
    /// Where they are; made at the start, and only then, if it is missing. It belongs
    /// to one agent.
    pub directory: PathBuf,
    /// What a file is of.
    #[serde(default)]
    pub per: Per,
    /// What survives a crash of the machine.
    #[serde(default)]
    pub fsync: Fsync,
    /// Older files are removed, at most a 256th part of this later.
    #[serde(
        default = "FilesConfig::default_max_age",
        deserialize_with = "deserialize_duration"
    )]
    pub max_age: Duration,
    /// Beyond this many bytes on the disk, the oldest files are removed until a
    /// twentieth is free again.
    #[serde(
        default = "FilesConfig::default_max_size",
        deserialize_with = "deserialize_size"
    )]
    pub max_size: u64,
    /// How much may wait in memory for a slow or full disk, in bytes (estimated).
    #[serde(
        default = "FilesConfig::default_pending",
        deserialize_with = "deserialize_size"
    )]
    pub pending: u64,
}

impl FilesConfig {
    /// Files in this directory, and everything else as by default.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            per: Per::default(),
            fsync: Fsync::default(),
            max_age: Self::default_max_age(),
            max_size: Self::default_max_size(),
            pending: Self::default_pending(),
        }
    }

    const fn default_max_age() -> Duration {
        Duration::from_secs(7 * 86_400)
    }

    const fn default_max_size() -> u64 {
        1 << 30
    }

    const fn default_pending() -> u64 {
        64 << 20
    }
}

/// What is known of a process that can become a label of its series. Each value that
/// is new makes a new series at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessLabel {
    /// `pid`.
    Pid,
    /// `ruby_version`.
    RubyVersion,
    /// `container_id`.
    ContainerId,
    /// `pod_uid`.
    PodUid,
    /// `systemd_unit`.
    SystemdUnit,
}

/// Profiles to the HTTP ingest of Grafana Pyroscope, as pprof.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PyroscopeConfig {
    /// The server, `http://` or `https://`; `/ingest` is added.
    pub url: String,
    /// What a profile is of.
    #[serde(default)]
    pub per: Per,
    /// The tenant, for `X-Scope-OrgID`.
    #[serde(default)]
    pub tenant: Option<String>,
    /// Labels for all series. `hostname` is there unless it is given here.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What else becomes a label, if a profile is of one process.
    #[serde(default = "PyroscopeConfig::default_process_labels")]
    pub process_labels: Vec<ProcessLabel>,
    /// Whether samples keep the names of their threads, of which Pyroscope makes
    /// a series each.
    #[serde(default)]
    pub thread_labels: bool,
    /// More headers.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Who we are.
    #[serde(default)]
    pub auth: AuthConfig,
    /// A file with certificates (PEM) of authorities to trust besides the system's.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// What happens while the receiver is slow or away.
    #[serde(default)]
    pub queue: QueueConfig,
}

impl PyroscopeConfig {
    /// Profiles to this server, and everything else as by default.
    #[must_use]
    pub fn new(url: String) -> Self {
        Self {
            url,
            per: Per::default(),
            tenant: None,
            labels: BTreeMap::new(),
            process_labels: Self::default_process_labels(),
            thread_labels: false,
            headers: BTreeMap::new(),
            auth: AuthConfig::default(),
            ca_file: None,
            queue: QueueConfig::default(),
        }
    }

    /// All but the process id: a service that restarts its workers every minute would
    /// make a new series every minute.
    fn default_process_labels() -> Vec<ProcessLabel> {
        vec![
            ProcessLabel::RubyVersion,
            ProcessLabel::ContainerId,
            ProcessLabel::PodUid,
            ProcessLabel::SystemdUnit,
        ]
    }
}

/// How a body is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Not at all.
    None,
    /// With gzip.
    #[default]
    Gzip,
}

/// Profiles to an OpenTelemetry collector, over HTTP.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtlpConfig {
    /// The collector, `http://` or `https://`; `/v1development/profiles` is added.
    pub url: String,
    /// What a profile is of.
    #[serde(default)]
    pub per: Per,
    /// Attributes for all resources. `host.name` is there unless it is given here.
    #[serde(default)]
    pub attributes: BTreeMap<String, String>,
    /// How requests are compressed.
    #[serde(default)]
    pub compression: Compression,
    /// More headers.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Who we are.
    #[serde(default)]
    pub auth: AuthConfig,
    /// A file with certificates (PEM) of authorities to trust besides the system's.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// What happens while the receiver is slow or away.
    #[serde(default)]
    pub queue: QueueConfig,
}

impl OtlpConfig {
    /// Profiles to this collector, and everything else as by default.
    #[must_use]
    pub fn new(url: String) -> Self {
        Self {
            url,
            per: Per::default(),
            attributes: BTreeMap::new(),
            compression: Compression::default(),
            headers: BTreeMap::new(),
            auth: AuthConfig::default(),
            ca_file: None,
            queue: QueueConfig::default(),
        }
    }
}

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text, to be sent and not to be shown.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Who we are: a user with a password, or a token, or nobody. Files are read for each
/// request, so a new password needs no reload; white space around it is cut off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// The user, for HTTP's basic authentication.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<Secret>,
    /// A file with the user's password.
    pub password_file: Option<PathBuf>,
    /// A bearer token.
    pub bearer_token: Option<Secret>,
    /// A file with a bearer token.
    pub bearer_token_file: Option<PathBuf>,
}

/// What happens while a receiver is slow or away.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// How much may wait in memory to be encoded, in bytes (estimated).
    #[serde(deserialize_with = "deserialize_size")]
    pub pending: u64,
    /// How much may wait in memory to be sent, in bytes, besides the profile that is
    /// being sent. A larger profile is dropped.
    #[serde(deserialize_with = "deserialize_size")]
    pub memory: u64,
    /// Where what cannot be sent is kept, in a subdirectory of the sink's name. Without
    /// it, what does not fit in memory is dropped, the oldest first, and a restart
    /// drops all.
    pub spill_directory: Option<PathBuf>,
    /// How much may be kept there, in bytes; beyond it the oldest is dropped.
    #[serde(deserialize_with = "deserialize_size")]
    pub spill_size: u64,
    /// How long a request may take, connection and answer included.
    #[serde(deserialize_with = "deserialize_duration")]
    pub timeout: Duration,
    /// The longest wait after a first failure; each further one doubles it. How long
    /// the wait is, between nothing and this, is random: a thousand agents do not come
    /// back at once.
    #[serde(deserialize_with = "deserialize_duration")]
    pub first_retry: Duration,
    /// The longest wait after many failures.
    #[serde(deserialize_with = "deserialize_duration")]
    pub max_retry: Duration,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            pending: 64 << 20,
            memory: 16 << 20,
            spill_directory: None,
            spill_size: 256 << 20,
            timeout: Duration::from_secs(10),
            first_retry: Duration::from_secs(1),
            max_retry: Duration::from_secs(120),
        }
    }
}

/// A configuration that cannot work: which key, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSinks {
    /// The key, such as `pyroscope.url`.
    pub key: String,
    /// Why it cannot work.
    pub why: String,
}

impl fmt::Display for InvalidSinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.why)
    }
}

impl std::error::Error for InvalidSinks {}

/// The least that makes sense for a bound in bytes.
const LEAST_BYTES: u64 = 64 << 10;

impl SinksConfig {
    /// Looks for what the types do not rule out.
    ///
    /// # Errors
    /// The first thing that cannot work.
    pub fn validate(&self) -> Result<(), InvalidSinks> {
        if let Some(files) = &self.files {
            let check = Check("files");
            check.that(
                "directory",
                files.directory.is_absolute(),
                "it must be an absolute path",
            )?;
            check.that(
                "max_age",
                files.max_age >= Duration::from_secs(1),
                "it must be 1s or longer",
            )?;
            check.bytes("max_size", files.max_size)?;
            check.bytes("pending", files.pending)?;
        }
        if let Some(pyroscope) = &self.pyroscope {
            let check = Check("pyroscope");
            check.url(&pyroscope.url)?;
            check.header_value("tenant", pyroscope.tenant.as_deref())?;
            check.headers(&pyroscope.headers)?;
            check.auth(&pyroscope.auth)?;
            check.queue(&pyroscope.queue)?;
            for (name, value) in &pyroscope.labels {
                let key = format!("labels.{name}");
                let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
                check.that(
                    &key,
                    !name.is_empty() && !name.starts_with("__") && name.chars().all(allowed),
                    "a label's name has letters, digits, underscores and dots, and does not begin with __",
                )?;
                check.that(
                    &key,
                    !value.contains([',', '}']) && !value.chars().any(char::is_control),
                    "the protocol has no way to write a comma or a closing brace in a label",
                )?;
            }
        }
        if let Some(otlp) = &self.otlp {
            let check = Check("otlp");
            check.url(&otlp.url)?;
            check.headers(&otlp.headers)?;
            check.auth(&otlp.auth)?;
            check.queue(&otlp.queue)?;
        }
        Ok(())
    }
}

/// Checks of a section.
struct Check(&'static str);

impl Check {
    fn fail(&self, key: &str, why: impl Into<String>) -> InvalidSinks {
        InvalidSinks {
            key: format!("{}.{key}", self.0),
            why: why.into(),
        }
    }

    fn that(&self, key: &str, holds: bool, why: &str) -> Result<(), InvalidSinks> {
        if holds {
            Ok(())
        } else {
            Err(self.fail(key, why))
        }
    }

    fn bytes(&self, key: &str, value: u64) -> Result<(), InvalidSinks> {
        self.that(key, value >= LEAST_BYTES, "it must be 64KiB or more")
    }

    fn url(&self, url: &str) -> Result<(), InvalidSinks> {
        let parsed: Uri = (url.parse()).map_err(|error| self.fail("url", format!("{error}")))?;
        self.that(
            "url",
            matches!(parsed.scheme_str(), Some("http" | "https")),
            "it must begin with http:// or https://",
        )?;
        self.that("url", parsed.host().is_some(), "it names no host")?;
        let authority = parsed.authority().map_or("", |of| of.as_str());
        self.that(
            "url",
            !authority.contains('@'),
            "a password in it would be shown: use the section auth",
        )?;
        self.that(
            "url",
            parsed.query().is_none(),
            "it must not have a query (?...)",
        )
    }

    fn header_value(&self, key: &str, value: Option<&str>) -> Result<(), InvalidSinks> {
        let valid = value.is_none_or(|value| HeaderValue::from_str(value).is_ok());
        self.that(key, valid, "it has characters that a header must not have")
    }

    fn headers(&self, headers: &BTreeMap<String, String>) -> Result<(), InvalidSinks> {
        const OURS: [&str; 6] = [
            "host",
            "content-length",
            "content-type",
            "content-encoding",
            "transfer-encoding",
            "connection",
        ];
        for (name, value) in headers {
            let key = format!("headers.{name}");
            let parsed = HeaderName::try_from(name.as_str())
                .map_err(|_| self.fail(&key, "it is no name of a header"))?;
            self.that(
                &key,
                !OURS.contains(&parsed.as_str()),
                "this header is set by rbprof itself",
            )?;
            self.header_value(&key, Some(value))?;
        }
        Ok(())
    }

    fn auth(&self, auth: &AuthConfig) -> Result<(), InvalidSinks> {
        let AuthConfig {
            user,
            password,
            password_file,
            bearer_token,
            bearer_token_file,
        } = auth;
        let passwords = usize::from(password.is_some()) + usize::from(password_file.is_some());
        let tokens = usize::from(bearer_token.is_some()) + usize::from(bearer_token_file.is_some());
        self.that(
            "auth",
            (usize::from(user.is_some()), passwords, tokens) == (1, 1, 0)
                || (user.is_none() && passwords == 0 && tokens <= 1),
            "give user and one of password and password_file, or one of bearer_token and \
             bearer_token_file, or nothing",
        )?;
        let user = user.as_deref().unwrap_or_default();
        self.that(
            "auth.user",
            !user.contains(':') && !user.chars().any(char::is_control),
            "a user's name has no colon",
        )?;
        self.header_value(
            "auth.bearer_token",
            bearer_token.as_ref().map(Secret::expose),
        )
    }

    fn queue(&self, queue: &QueueConfig) -> Result<(), InvalidSinks> {
        self.bytes("queue.pending", queue.pending)?;
        self.bytes("queue.memory", queue.memory)?;
        self.bytes("queue.spill_size", queue.spill_size)?;
        let directory = queue.spill_directory.as_ref();
        self.that(
            "queue.spill_directory",
            directory.is_none_or(|directory| directory.is_absolute()),
            "it must be an absolute path",
        )?;
        let least = Duration::from_millis(1);
        self.that(
            "queue.timeout",
            queue.timeout >= least,
            "it must be 1ms or longer",
        )?;
        self.that(
            "queue.first_retry",
            queue.first_retry >= least,
            "it must be 1ms or longer",
        )?;
        self.that(
            "queue.max_retry",
            queue.max_retry >= queue.first_retry,
            "it must not be shorter than first_retry",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SinksConfig, String> {
        let config: SinksConfig = toml::from_str(text).map_err(|error| error.to_string())?;
        (config.validate()).map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn every_key_can_be_given() {
        let config = read(
            r#"
            [files]
            directory = "/var/lib/rbprof"
            per = "service"
            fsync = "file-and-directory"
            max_age = "2d"
            max_size = "2GiB"
            pending = "1MiB"
            [pyroscope]
            url = "https://profiles.example:4040/base/"
            per = "process"
            tenant = "team-a"
            labels = { env = "production" }
            process_labels = ["pid", "pod_uid"]
            thread_labels = true
            headers = { "X-Extra" = "1" }
            auth = { user = "u", password = "hunter2" }
            ca_file = "/etc/ca.pem"
            queue = { pending = "1MiB", memory = "1MiB", spill_directory = "/var/spill", spill_size = "2MiB", timeout = "3s", first_retry = "10ms", max_retry = "1m" }
            [otlp]
            url = "http://[::1]:4318"
            per = "service"
            attributes = { "deployment.environment.name" = "production" }
            compression = "none"
            headers = {}
            auth = { bearer_token_file = "/run/token" }
            ca_file = "/etc/ca.pem"
            queue = {}
            "#,
        )
        .unwrap();
        let files = config.files.as_ref().unwrap();
        assert_eq!(files.max_age, Duration::from_secs(2 * 86_400));
        assert_eq!((files.max_size, files.per), (2 << 30, Per::Service));
        let shown = format!("{config:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        let pyroscope = config.pyroscope.unwrap();
        assert_eq!(pyroscope.queue.first_retry, Duration::from_millis(10));
        assert_eq!(config.otlp.unwrap().queue, QueueConfig::default());
    }

    #[test]
    fn defaults_are_what_new_makes() {
        let config = read(
            "[files]\ndirectory = '/d'\n[pyroscope]\nurl = 'http://p'\n[otlp]\nurl = 'http://o'",
        )
        .unwrap();
        assert_eq!(config.files, Some(FilesConfig::new("/d".into())));
        assert_eq!(
            config.pyroscope,
            Some(PyroscopeConfig::new("http://p".into()))
        );
        assert_eq!(config.otlp, Some(OtlpConfig::new("http://o".into())));
        assert_eq!(read("").unwrap(), SinksConfig::default());
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_key() {
        for (text, expected) in [
            ("[files]\ndirectory = 'd'", "files.directory: it must be an"),
            ("[files]", "missing field `directory`"),
            (
                "[files]\ndirectory = '/d'\nsize = 1",
                "unknown field `size`",
            ),
            ("[files]\ndirectory = '/d'\nmax_age = '7'", "such as 500ms"),
            ("[files]\ndirectory = '/d'\nmax_age = '0s'", "files.max_age"),
            (
                "[files]\ndirectory = '/d'\nmax_size = '1B'",
                "files.max_size: it must be 64KiB",
            ),
            (
                "[pyroscope]\nurl = 'p:4040'",
                "pyroscope.url: it must begin",
            ),
            (
                "[pyroscope]\nurl = 'http://u:p@h'",
                "pyroscope.url: a password",
            ),
            (
                "[pyroscope]\nurl = 'http://h?x=1'",
                "pyroscope.url: it must not",
            ),
            (
                "[pyroscope]\nurl = 'http://h'\nlabels = { a = 'x,y' }",
                "pyroscope.labels.a: the protocol",
            ),
            (
                "[pyroscope]\nurl = 'http://h'\nlabels = { 'a-b' = 'x' }",
                "pyroscope.labels.a-b",
            ),
            (
                "[pyroscope]\nurl = 'http://h'\nheaders = { Host = 'x' }",
                "pyroscope.headers.Host",
            ),
            (
                "[pyroscope]\nurl = 'http://h'\ntenant = \"a\\nb\"",
                "pyroscope.tenant",
            ),
            (
                "[otlp]\nurl = 'http://h'\nauth = { user = 'u' }",
                "otlp.auth: give user",
            ),
            (
                "[otlp]\nurl = 'http://h'\nauth = { user = 'u', password = 'p', bearer_token = 't' }",
                "otlp.auth",
            ),
            (
                "[otlp]\nurl = 'http://h'\nqueue = { max_retry = '1ms' }",
                "otlp.queue.max_retry",
            ),
            (
                "[otlp]\nurl = 'http://h'\nqueue = { spill_directory = 's' }",
                "otlp.queue.spill_directory",
            ),
            ("[kafka]", "unknown field `kafka`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
