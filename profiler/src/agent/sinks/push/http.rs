//! One request after another to one receiver: HTTP/1.1, in clear text or over TLS.
//!
//! A connection is kept for as long as the receiver keeps it. Redirects are not
//! followed, and proxies of the environment are not used.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::io::Read as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::LengthLimitError;
use http_body_util::Limited;
use hyper::Request;
use hyper::StatusCode;
use hyper::Uri;
use hyper::client::conn::http1;
use hyper::client::conn::http1::SendRequest;
use hyper::header;
use hyper::header::HeaderMap;
use hyper::header::HeaderName;
use hyper::header::HeaderValue;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

use crate::agent::sinks::config::AuthConfig;
use crate::agent::sinks::config::Secret;

/// How much of an answer is read, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// How long a file with a password may be, in bytes.
const MAX_SECRET: u64 = 16 << 10;
/// The longest that a receiver can send us away for.
pub(super) const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// What is sent.
#[derive(Clone, Debug)]
pub(super) struct Post {
    /// Path and query, to follow the receiver's address.
    pub(super) target: String,
    pub(super) content_type: &'static str,
    pub(super) gzip: bool,
    pub(super) body: Bytes,
}

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    /// For how long not to come back, if the receiver says so.
    pub(super) retry_after: Option<Duration>,
    /// The body, cut where it is long.
    pub(super) body: Bytes,
}

/// A receiver, and how to speak to it.
#[derive(Clone)]
pub(super) struct Receiver {
    host: String,
    port: u16,
    /// Comes before targets; without a slash at its end.
    base: String,
    authority: HeaderValue,
    headers: HeaderMap,
    auth: Auth,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    timeout: Duration,
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.host, self.port, self.base)
    }
}

#[derive(Clone)]
enum Auth {
    None,
    Basic(String, Source),
    Bearer(Source),
}

#[derive(Clone)]
enum Source {
    Given(Secret),
    File(PathBuf),
}

impl Source {
    fn of(given: Option<Secret>, file: Option<PathBuf>) -> Option<Self> {
        given.map(Self::Given).or(file.map(Self::File))
    }

    fn read(&self) -> io::Result<String> {
        match self {
            Self::Given(secret) => Ok(secret.expose().to_owned()),
            Self::File(path) => {
                let mut text = String::new();
                File::open(path)
                    .and_then(|file| file.take(MAX_SECRET).read_to_string(&mut text))
                    .map_err(|error| {
                        let text = format!("cannot read {}: {error}", path.display());
                        io::Error::new(error.kind(), text)
                    })?;
                Ok(text.trim().to_owned())
            }
        }
    }
}

impl Auth {
    fn of(config: AuthConfig) -> Self {
        let AuthConfig {
            user,
            password,
            password_file,
            bearer_token,
            bearer_token_file,
        } = config;
        let password = Source::of(password, password_file);
        let token = Source::of(bearer_token, bearer_token_file);
        match (user, password, token) {
            (Some(user), Some(password), _) => Self::Basic(user, password),
            (_, _, Some(token)) => Self::Bearer(token),
            _ => Self::None,
        }
    }

    fn header(&self) -> io::Result<Option<HeaderValue>> {
        let text = match self {
            Self::None => return Ok(None),
            Self::Basic(user, password) => {
                let pair = format!("{user}:{}", password.read()?);
                format!("Basic {}", BASE64_STANDARD.encode(pair))
            }
            Self::Bearer(token) => format!("Bearer {}", token.read()?),
        };
        let mut value = HeaderValue::try_from(text).map_err(io::Error::other)?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

impl Receiver {
    /// A receiver with this address; `headers` go with every request.
    ///
    /// # Errors
    /// If the address or a header is none, or a certificate cannot be read.
    pub(super) fn new(
        url: &str,
        headers: &BTreeMap<String, String>,
        auth: AuthConfig,
        ca_file: Option<&Path>,
        timeout: Duration,
    ) -> Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("url {url:?}"))?;
        let host = uri.host().context("the url names no host")?;
        let host = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!("the url must begin with http:// or https://"),
        };
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let authority = uri.authority().context("the url names no host")?.as_str();
        let mut map = HeaderMap::new();
        let agent = concat!("rbprof/", env!("CARGO_PKG_VERSION"));
        map.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        for (name, value) in headers {
            map.insert(
                HeaderName::try_from(name.as_str())?,
                HeaderValue::from_str(value)?,
            );
        }
        let tls = if secure {
            let name = ServerName::try_from(host.clone()).context("the host of the url")?;
            Some((connector(ca_file)?, name))
        } else {
            None
        };
        Ok(Self {
            host,
            port,
            base: uri.path().trim_end_matches('/').to_owned(),
            authority: HeaderValue::from_str(authority)?,
            headers: map,
            auth: Auth::of(auth),
            tls,
            timeout,
        })
    }

    fn request(&self, post: Post) -> io::Result<Request<Full<Bytes>>> {
        let target = format!("{}{}", self.base, post.target);
        let target = Uri::try_from(target).map_err(io::Error::other)?;
        let mut request = Request::post(target)
            .body(Full::new(post.body))
            .map_err(io::Error::other)?;
        let headers = request.headers_mut();
        headers.clone_from(&self.headers);
        headers.insert(header::HOST, self.authority.clone());
        let content_type = HeaderValue::from_static(post.content_type);
        headers.insert(header::CONTENT_TYPE, content_type);
        if post.gzip {
            let gzip = HeaderValue::from_static("gzip");
            headers.insert(header::CONTENT_ENCODING, gzip);
        }
        if let Some(auth) = self.auth.header()? {
            headers.insert(header::AUTHORIZATION, auth);
        }
        Ok(request)
    }

    async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        let (sender, task) = match &self.tls {
            None => handshake(TokioIo::new(stream)).await?,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await?;
                handshake(TokioIo::new(stream)).await?
            }
        };
        Ok(Connection { sender, task })
    }
}

async fn handshake<I>(io: I) -> io::Result<(SendRequest<Full<Bytes>>, JoinHandle<()>)>
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(io).await.map_err(io::Error::other)?;
    let task = tokio::spawn(async move {
        // The sender hears of it, too.
        let _ = connection.await;
    });
    Ok((sender, task))
}

/// TLS that trusts the system's authorities, and those of a file.
fn connector(ca_file: Option<&Path>) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        log::warn!("certificates of the system: {error}");
    }
    roots.add_parsable_certificates(found.certs);
    if let Some(path) = ca_file {
        let certificates = CertificateDer::pem_file_iter(path)
            .with_context(|| format!("reading {}", path.display()))?;
        for certificate in certificates {
            let certificate = certificate.with_context(|| format!("reading {}", path.display()))?;
            roots
                .add(certificate)
                .with_context(|| format!("a certificate in {}", path.display()))?;
        }
    }
    if roots.is_empty() {
        bail!("the system trusts no authorities: install ca-certificates, or give ca_file");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Nothing is left of a request that was given up.
        self.task.abort();
    }
}

/// One that sends.
#[derive(Debug)]
pub(super) struct Client {
    receiver: Arc<Receiver>,
    connection: Option<Connection>,
}

impl Client {
    pub(super) const fn new(receiver: Arc<Receiver>) -> Self {
        Self {
            receiver,
            connection: None,
        }
    }

    /// Sends a request, and waits for the whole answer.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub(super) async fn post(&mut self, post: Post) -> io::Result<Answer> {
        let timeout = self.receiver.timeout;
        let result = tokio::time::timeout(timeout, self.try_post(post)).await;
        let result = result.unwrap_or_else(|_| {
            let shown = humantime::format_duration(timeout);
            let text = format!("no answer within {shown}");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        });
        if result.is_err() {
            self.connection = None;
        }
        result
    }

    async fn try_post(&mut self, post: Post) -> io::Result<Answer> {
        let request = self.receiver.request(post)?;
        let open = match self.connection.take() {
            // The receiver may have closed it since.
            Some(mut connection) => match connection.sender.ready().await {
                Ok(()) => Some(connection),
                Err(_) => None,
            },
            None => None,
        };
        let connection = match open {
            Some(connection) => connection,
            None => self.receiver.connect().await?,
        };
        let connection = self.connection.insert(connection);
        let response = connection.sender.send_request(request).await;
        let response = response.map_err(|error| io::Error::other(causes(&error)))?;
        let (parts, body) = response.into_parts();
        let body = match Limited::new(body, MAX_ANSWER).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                self.connection = None;
                Bytes::new()
            }
            Err(error) => return Err(io::Error::other(error)),
        };
        let retry_after = parts.headers.get(header::RETRY_AFTER);
        Ok(Answer {
            status: parts.status,
            retry_after: retry_after
                .and_then(|value| retry_after_of(value.to_str().ok()?, SystemTime::now())),
            body,
        })
    }
}

/// An error with all that it comes from.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// How long a `Retry-After` is from now: seconds, or a date. An hour at most.
fn retry_after_of(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let wait = if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are a long time.
        Duration::from_secs(value.parse().unwrap_or(u64::MAX))
    } else {
        let at = httpdate::parse_http_date(value).ok()?;
        at.duration_since(now).unwrap_or_default()
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_receiver_says_when_to_come_back() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        let of = |text| retry_after_of(text, now);
        assert_eq!(of("120"), Some(Duration::from_secs(120)));
        assert_eq!(of(" 0 "), Some(Duration::ZERO));
        assert_eq!(of("999999999999999999999999"), Some(MAX_RETRY_AFTER));
        let date = "Sun, 06 Nov 1994 08:50:37 GMT";
        assert_eq!(of(date), Some(Duration::from_secs(60)));
        assert_eq!(of("Sun, 06 Nov 1994 08:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!(of("Sat, 06 Nov 2094 08:00:00 GMT"), Some(MAX_RETRY_AFTER));
        for text in ["", "soon", "-1", "1.5"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn secrets_are_read_when_they_are_needed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let auth = Auth::of(AuthConfig {
            bearer_token_file: Some(path.clone()),
            ..AuthConfig::default()
        });
        let error = auth.header().unwrap_err().to_string();
        assert!(
            error.contains("cannot read") && error.contains("token"),
            "{error}"
        );
        for token in ["one", "two"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let value = auth.header().unwrap().unwrap();
            assert_eq!(value, format!("Bearer {token}"));
        }
        let auth = Auth::of(AuthConfig {
            user: Some("Aladdin".to_owned()),
            password: Some("open sesame".to_owned().into()),
            ..AuthConfig::default()
        });
        let value = auth.header().unwrap().unwrap();
        assert_eq!(value, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    }
}
