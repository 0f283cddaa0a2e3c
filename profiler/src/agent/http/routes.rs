//! Which path is answered how.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::HeaderMap;
use hyper::Method;
use hyper::Response;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::ACCEPT;
use hyper::header::ALLOW;
use hyper::header::CACHE_CONTROL;
use hyper::header::CONTENT_DISPOSITION;
use hyper::header::CONTENT_SECURITY_POLICY;
use hyper::header::CONTENT_TYPE;
use hyper::header::HeaderName;
use hyper::header::HeaderValue;
use hyper::header::RETRY_AFTER;
use hyper::header::X_CONTENT_TYPE_OPTIONS;

use super::backend::Backend;
use super::backend::NoAnswer;
use super::backend::Recent;
use super::backend::Refusal;
use super::backend::Request;
use super::backend::Selector;
use super::pages;
use super::parameters::Parameters;
use super::server::Counters;
use crate::agent::metrics;
use crate::output;
use crate::output::Format;
use crate::profile::Profile;

/// How long a profile takes if nobody says, as for Go programs.
const DEFAULT_DURATION: Duration = Duration::from_secs(30);
/// How long the core may take beyond that, and for everything else.
const PATIENCE: Duration = Duration::from_secs(20);

const HTML: &str = "text/html; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const SVG: &str = "image/svg+xml";
const PPROF: &str = "application/octet-stream";

pub(super) type Answer = Response<Full<Bytes>>;

/// What an answer takes.
#[derive(Debug)]
pub(super) struct Routes {
    pub(super) backend: Backend,
    pub(super) max_duration: Duration,
    pub(super) counters: Arc<Counters>,
}

/// Why there is none.
struct Failure {
    status: StatusCode,
    why: String,
}

impl Failure {
    fn new(status: StatusCode, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { status, why }
    }

    fn parameter(why: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }
}

impl From<NoAnswer> for Failure {
    fn from(none: NoAnswer) -> Self {
        let why = match none {
            NoAnswer::Full => "too many requests at once",
            NoAnswer::Gone => "the agent does not answer this (any more)",
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NotFound(why) => Self::new(StatusCode::NOT_FOUND, why),
            Refusal::Busy(why) => Self::new(StatusCode::SERVICE_UNAVAILABLE, why),
            Refusal::Failed(why) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, why),
        }
    }
}

impl Routes {
    /// Answers a request.
    pub(super) async fn answer(
        &self,
        method: &Method,
        path: &str,
        query: &str,
        headers: &HeaderMap,
    ) -> Answer {
        // What makes the core work is only done for those who want the result.
        let is_work = matches!(path, "/debug/pprof/profile" | "/flamegraph");
        let allowed = if is_work { "GET" } else { "GET, HEAD" };
        if !(method == Method::GET || method == Method::HEAD && !is_work) {
            let failure = Failure::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("here is only {allowed}"),
            );
            return with(refused(&failure), ALLOW, allowed);
        }
        let answer = match path {
            "/" | "/debug/pprof" => return redirect("/debug/pprof/"),
            "/debug/pprof/" => self.index(query),
            "/debug/pprof/profile" => self.profile(query).await,
            "/profiles" => self.profiles(query, headers).await,
            "/flamegraph" => self.flamegraph(query).await,
            "/targets" => self.targets(query, headers).await,
            "/metrics" => self.metrics().await,
            "/healthz" => self.health().await,
            _ => Err(Failure::new(
                StatusCode::NOT_FOUND,
                "there is nothing here; /debug/pprof/ lists what there is",
            )),
        };
        answer.unwrap_or_else(|failure| refused(&failure))
    }

    fn index(&self, query: &str) -> Result<Answer, Failure> {
        Parameters::parse(query, &[]).map_err(Failure::parameter)?;
        let seconds = DEFAULT_DURATION.min(self.max_duration).as_secs();
        Ok(ok(HTML, pages::index(seconds, self.max_duration)))
    }

    async fn profile(&self, query: &str) -> Result<Answer, Failure> {
        let parameters =
            Parameters::parse(query, &["seconds", "pid", "service"]).map_err(Failure::parameter)?;
        let of = parameters.selector().map_err(Failure::parameter)?;
        let duration = parameters
            .seconds(self.max_duration)
            .map_err(Failure::parameter)?
            .unwrap_or_else(|| DEFAULT_DURATION.min(self.max_duration));
        let profile = self.fresh(of, duration).await?;
        download(written(profile, Format::Pprof).await?, "profile.pb.gz")
    }

    async fn fresh(&self, of: Selector, duration: Duration) -> Result<Arc<Profile>, Failure> {
        let asked = self.backend.ask(|reply| Request::Profile {
            of,
            duration,
            reply,
        });
        Ok(patiently(duration, asked).await??)
    }

    async fn recent(&self) -> Result<Vec<Recent>, Failure> {
        let asked = self.backend.ask(|reply| Request::Recent { reply });
        patiently(Duration::ZERO, asked).await
    }

    /// One of the recent profiles.
    async fn kept(&self, id: u64) -> Result<Arc<Profile>, Failure> {
        self.recent()
            .await?
            .into_iter()
            .find(|recent| recent.id == id)
            .map(|recent| recent.batch.profile)
            .ok_or_else(|| {
                Failure::new(
                    StatusCode::NOT_FOUND,
                    format!("there is no profile {id} (any more)"),
                )
            })
    }

    async fn profiles(&self, query: &str, headers: &HeaderMap) -> Result<Answer, Failure> {
        let parameters = Parameters::parse(query, &["id", "format"]).map_err(Failure::parameter)?;
        if let Some(id) = parameters.id().map_err(Failure::parameter)? {
            let profile = self.kept(id).await?;
            let name = format!("profile-{id}.pb.gz");
            return download(written(profile, Format::Pprof).await?, &name);
        }
        let is_for_reader = is_for_reader(&parameters, headers)?;
        let recent = self.recent().await?;
        Ok(if is_for_reader {
            ok(HTML, pages::profiles(&recent))
        } else {
            ok(JSON, pages::profiles_json(&recent))
        })
    }

    async fn flamegraph(&self, query: &str) -> Result<Answer, Failure> {
        let parameters = Parameters::parse(query, &["seconds", "pid", "service", "id"])
            .map_err(Failure::parameter)?;
        let of = parameters.selector().map_err(Failure::parameter)?;
        let duration = parameters
            .seconds(self.max_duration)
            .map_err(Failure::parameter)?;
        let id = parameters.id().map_err(Failure::parameter)?;
        let profile = match (id, duration) {
            (Some(_), Some(_)) => {
                return Err(Failure::parameter(
                    "id and seconds exclude each other".to_owned(),
                ));
            }
            (Some(_), None) if of != Selector::All => {
                return Err(Failure::parameter("id excludes pid and service".to_owned()));
            }
            (Some(id), None) => self.kept(id).await?,
            (None, Some(duration)) => self.fresh(of, duration).await?,
            (None, None) => self.merged(of).await?,
        };
        let svg = written(profile, Format::Svg).await?;
        let mut answer = ok(SVG, svg);
        // The graph's own script and style, and nothing from anywhere.
        answer.headers_mut().insert(
            CONTENT_SECURITY_POLICY,
            HeaderValue::from_static(
                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                 frame-ancestors 'none'",
            ),
        );
        Ok(answer)
    }

    /// All recent profiles of these processes, as one.
    async fn merged(&self, of: Selector) -> Result<Arc<Profile>, Failure> {
        let mut wanted: Vec<_> = self
            .recent()
            .await?
            .into_iter()
            .filter(|Recent { batch, .. }| match &of {
                Selector::All => true,
                Selector::Process(pid) => batch
                    .process
                    .as_ref()
                    .is_some_and(|process| process.pid == *pid),
                Selector::Service(name) => *batch.service == **name,
            })
            .map(|recent| recent.batch.profile)
            .collect();
        match wanted.len() {
            0 => Err(Failure::new(
                StatusCode::NOT_FOUND,
                "there is no recent profile of that; with seconds=10, a fresh one is made",
            )),
            1 => Ok(wanted.swap_remove(0)),
            _ => {
                apart(move || {
                    let mut wanted = wanted.iter();
                    let mut all = wanted.next().map_or_else(
                        || Profile::new(crate::profile::Metadata::default()),
                        |first| Profile::clone(first),
                    );
                    for profile in wanted {
                        all.merge(profile);
                    }
                    Arc::new(all)
                })
                .await
            }
        }
    }

    async fn targets(&self, query: &str, headers: &HeaderMap) -> Result<Answer, Failure> {
        let parameters = Parameters::parse(query, &["format"]).map_err(Failure::parameter)?;
        let is_for_reader = is_for_reader(&parameters, headers)?;
        let asked = self.backend.ask(|reply| Request::Targets { reply });
        let targets = patiently(Duration::ZERO, asked).await?;
        Ok(if is_for_reader {
            ok(HTML, pages::targets(&targets))
        } else {
            ok(JSON, pages::targets_json(&targets))
        })
    }

    async fn metrics(&self) -> Result<Answer, Failure> {
        let asked = self.backend.ask(|reply| Request::Metrics { reply });
        let mut page = patiently(Duration::ZERO, asked).await?;
        self.counters.show(&mut page);
        Ok(ok(metrics::CONTENT_TYPE, page.render()))
    }

    async fn health(&self) -> Result<Answer, Failure> {
        let asked = self.backend.ask(|reply| Request::Health { reply });
        let health = patiently(Duration::ZERO, asked).await?;
        if health.problems.is_empty() {
            return Ok(ok(TEXT, "ok\n".to_owned()));
        }
        Err(Failure::new(
            StatusCode::SERVICE_UNAVAILABLE,
            health.problems.join("\n"),
        ))
    }
}

/// The core's answer, which should be there soon after `duration`.
async fn patiently<T>(
    duration: Duration,
    answer: impl Future<Output = Result<T, NoAnswer>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(duration + PATIENCE, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::new(
            StatusCode::GATEWAY_TIMEOUT,
            "the agent is too busy",
        )),
    }
}

/// Does what takes a while on another thread: samples go on being taken in.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

async fn written(profile: Arc<Profile>, format: Format) -> Result<Vec<u8>, Failure> {
    let written = apart(move || {
        let mut bytes = Vec::new();
        output::write(&profile, format, &mut bytes)?;
        Ok::<_, io::Error>(bytes)
    });
    written
        .await?
        .map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// Whether HTML is wanted, rather than JSON.
fn is_for_reader(parameters: &Parameters, headers: &HeaderMap) -> Result<bool, Failure> {
    match parameters.get("format") {
        Some("html") => Ok(true),
        Some("json") => Ok(false),
        Some(other) => Err(Failure::parameter(format!(
            "format: {other:?} is neither html nor json"
        ))),
        None => Ok(headers
            .get_all(ACCEPT)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.contains("text/html"))),
    }
}

fn ok(kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        ),
    );
    answer
}

fn with(mut answer: Answer, name: HeaderName, value: &str) -> Answer {
    if let Ok(value) = HeaderValue::from_str(value) {
        answer.headers_mut().insert(name, value);
    }
    answer
}

fn download(body: Vec<u8>, name: &str) -> Result<Answer, Failure> {
    let disposition = format!("attachment; filename=\"{name}\"");
    Ok(with(ok(PPROF, body), CONTENT_DISPOSITION, &disposition))
}

fn redirect(to: &str) -> Answer {
    let mut answer = with(ok(TEXT, String::new()), hyper::header::LOCATION, to);
    *answer.status_mut() = StatusCode::FOUND;
    answer
}

/// An answer in words, for requests that have no better one.
pub(super) fn plainly(status: StatusCode, why: &str) -> Answer {
    let mut answer = ok(
        TEXT,
        format!("{}\n", output::plain(why).replace("\\n", "\n")),
    );
    *answer.status_mut() = status;
    // With this, `go tool pprof` shows the text and not just the status.
    let go = HeaderName::from_static("x-go-pprof");
    answer
        .headers_mut()
        .insert(go, HeaderValue::from_static("1"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        return with(answer, RETRY_AFTER, "5");
    }
    answer
}

fn refused(failure: &Failure) -> Answer {
    plainly(failure.status, &failure.why)
}
