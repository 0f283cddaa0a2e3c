//! Grafana Pyroscope's HTTP ingest.
//!
//! `POST /ingest?name=SERVICE{LABEL=VALUE,...}&from=&until=&format=pprof&...` with a
//! gzip-compressed pprof as the body, as the server's `pkg/ingester/pyroscope` reads
//! it:
//!
//! - With `format=pprof` the body is the profile itself, and no form. No
//!   `sample_type_config` is needed: the server takes a profile with a sample type
//!   `cpu` for `process_cpu`.
//! - Values of labels are not quoted, and end at a comma or a closing brace. Names of
//!   services have ASCII letters, digits, `_`, `.`, `-` and `/`. Where a name had to
//!   be changed, the label `service` has what was there.
//! - Times are seconds since the epoch; the exact ones are in the profile.
//! - `spyName` is `rbprof`. With that of rbspy the server would rewrite the names of
//!   functions.
//! - The server makes a series of each combination of labels that samples have as
//!   text, so names and states of threads are taken out unless wanted.

use std::collections::BTreeMap;
use std::io;
use std::time::UNIX_EPOCH;

use hyper::StatusCode;
use percent_encoding::AsciiSet;
use percent_encoding::NON_ALPHANUMERIC;
use percent_encoding::utf8_percent_encode;

use super::Protocol;
use super::Verdict;
use super::http::Answer;
use super::item::Head;
use super::item::Item;
use crate::agent::batch::Batch;
use crate::agent::sinks::config::ProcessLabel;
use crate::output::pprof;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::Profile;

/// What a query must not have as it is.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The protocol.
#[derive(Debug)]
pub(super) struct Pyroscope {
    /// For all series.
    pub(super) labels: BTreeMap<String, String>,
    pub(super) process_labels: Vec<ProcessLabel>,
    pub(super) thread_labels: bool,
}

impl Protocol for Pyroscope {
    fn format(&self) -> &'static str {
        "pyroscope ingest pprof"
    }

    fn content_type(&self) -> &'static str {
        "application/octet-stream"
    }

    fn encode(&self, batch: &Batch) -> io::Result<Item> {
        let mut body = Vec::new();
        if self.thread_labels {
            pprof::write(&batch.profile, &mut body)?;
        } else {
            pprof::write(&without_threads(&batch.profile), &mut body)?;
        }
        Ok(Item {
            head: Head {
                format: self.format().to_owned(),
                target: self.target(batch),
                // The server looks for itself.
                gzip: false,
            },
            body: body.into(),
        })
    }

    fn verdict(&self, answer: &Answer) -> Verdict {
        match answer.status {
            status if status.is_success() => Verdict::Delivered,
            // A redirection is a mistake in the configuration, which can be mended.
            StatusCode::REQUEST_TIMEOUT => Verdict::Later,
            status if status.is_redirection() => Verdict::Later,
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => Verdict::Later,
            // It can be this profile alone.
            status if status.is_server_error() => Verdict::LaterThanOthers,
            _ => Verdict::Never,
        }
    }
}

impl Pyroscope {
    fn target(&self, batch: &Batch) -> String {
        let seconds = |time: std::time::SystemTime| time.duration_since(UNIX_EPOCH);
        let from = seconds(batch.from).unwrap_or_default().as_secs();
        let until = seconds(batch.until).unwrap_or_default();
        let until = until.as_secs() + u64::from(until.subsec_nanos() > 0);
        let name = self.series(batch);
        let rate = batch.profile.metadata.frequency_hz;
        format!(
            "/ingest?name={}&from={from}&until={until}&sampleRate={rate}&spyName=rbprof&\
             units=samples&aggregationType=sum&format=pprof",
            utf8_percent_encode(&name, QUERY)
        )
    }

    /// Service and labels.
    fn series(&self, batch: &Batch) -> String {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_.-/".contains(c);
        let service: String = (batch.service.chars())
            .map(|c| if allowed(c) { c } else { '_' })
            .collect();
        let mut labels = self.labels.clone();
        if *service != *batch.service {
            labels.insert("service".to_owned(), value(&batch.service));
        }
        if let Some(process) = &batch.process {
            for label in &self.process_labels {
                let (name, found) = match label {
                    ProcessLabel::Pid => ("pid", Some(process.pid.to_string())),
                    ProcessLabel::RubyVersion => ("ruby_version", Some(process.ruby.clone())),
                    ProcessLabel::ContainerId => ("container_id", process.container.clone()),
                    ProcessLabel::PodUid => ("pod_uid", process.pod.clone()),
                    ProcessLabel::SystemdUnit => ("systemd_unit", process.unit.clone()),
                };
                if let Some(found) = found.filter(|found| !found.is_empty()) {
                    labels.insert(name.to_owned(), value(&found));
                }
            }
        }
        let labels: Vec<String> = (labels.into_iter())
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let service = if service.is_empty() { "_" } else { &service };
        format!("{service}{{{}}}", labels.join(","))
    }
}

/// A label's value without what would end it.
pub(super) fn value(text: &str) -> String {
    text.replace(|c: char| matches!(c, ',' | '}') || c.is_control(), "_")
}

/// The profile with the labels that are numbers only.
fn without_threads(profile: &Profile) -> Profile {
    let mut plain = Profile::new(profile.metadata.clone());
    let functions: Vec<_> = (profile.functions())
        .map(|(_, function)| plain.intern_function(function))
        .collect();
    let mappings: Vec<_> = (profile.mappings())
        .map(|(_, mapping)| plain.intern_mapping(mapping))
        .collect();
    let locations: Vec<Option<LocationId>> = (profile.locations())
        .map(|(_, of)| {
            Some(plain.intern_native_location(
                *functions.get(of.function.index())?,
                of.line,
                *mappings.get(of.mapping.index())?,
                of.address,
            ))
        })
        .collect();
    let mut frames = Vec::new();
    for (stack, labels, count) in profile.counts() {
        frames.clear();
        let known = profile.stack(stack);
        frames.extend(known.filter_map(|id| *locations.get(id.index())?));
        let numbers = profile.labels(labels).map(|of| Labels {
            pid: of.pid,
            tid: of.tid,
            ..Labels::default()
        });
        let stack = plain.intern_stack(&frames);
        let labels = plain.intern_labels(&numbers.unwrap_or_default());
        plain.add(stack, labels, count);
    }
    plain
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::agent::sinks::example;

    fn protocol() -> Pyroscope {
        Pyroscope {
            labels: BTreeMap::from([("env".to_owned(), "prod".to_owned())]),
            process_labels: vec![ProcessLabel::Pid, ProcessLabel::ContainerId],
            thread_labels: false,
        }
    }

    fn name(service: &str) -> String {
        protocol().series(&example::batch(service, 7, 1))
    }

    #[test]
    fn a_series_has_only_what_the_server_can_read() {
        assert_eq!(name("web"), "web{container_id=c0ffee,env=prod,pid=7}");
        assert_eq!(
            name("größe {x},y=1"),
            "gr__e__x__y_1{container_id=c0ffee,env=prod,pid=7,service=größe {x__y=1}"
        );
        assert_eq!(name(""), "_{container_id=c0ffee,env=prod,pid=7}");
        let mut all = example::batch("web", 7, 1);
        all.process = None;
        assert_eq!(protocol().series(&all), "web{env=prod}");
    }

    #[test]
    fn a_target_has_times_and_rate() {
        let item = protocol().encode(&example::batch("web", 7, 1)).unwrap();
        assert_eq!(
            item.head.target,
            "/ingest?name=web%7Bcontainer_id%3Dc0ffee%2Cenv%3Dprod%2Cpid%3D7%7D&\
             from=1700000000&until=1700000002&sampleRate=19&spyName=rbprof&\
             units=samples&aggregationType=sum&format=pprof"
        );
    }

    #[test]
    fn names_of_threads_are_taken_out_and_nothing_else() {
        let batch = example::batch("web", 7, 5);
        let plain = without_threads(&batch.profile);
        assert_eq!(plain.total(), 5);
        assert_eq!(plain.metadata, batch.profile.metadata);
        let mut labels = plain.label_sets();
        let (_, only) = labels.next().unwrap();
        assert_eq!((only.pid, only.tid), (7, 7));
        assert_eq!((&only.thread_name, &only.comm), (&None, &None));
        let frames = |profile: &Profile| -> Vec<String> {
            let (stack, ..) = profile.counts().next().unwrap();
            (profile.stack(stack))
                .map(|id| {
                    let of = profile.location(id).unwrap();
                    let function = profile.function(of.function).unwrap();
                    format!("{} {} {:x}", function.label, of.line, of.address)
                })
                .collect()
        };
        assert_eq!(frames(&plain), frames(&batch.profile));
        assert_eq!(frames(&plain).len(), 5);
    }

    #[test]
    fn some_answers_are_final() {
        let verdict = |status: u16| {
            protocol().verdict(&Answer {
                status: StatusCode::from_u16(status).unwrap(),
                retry_after: None,
                body: Bytes::new(),
            })
        };
        assert_eq!(verdict(200), Verdict::Delivered);
        assert_eq!(verdict(204), Verdict::Delivered);
        for status in [400, 401, 404, 413, 422] {
            assert_eq!(verdict(status), Verdict::Never, "{status}");
        }
        for status in [301, 408, 429, 502, 503, 504] {
            assert_eq!(verdict(status), Verdict::Later, "{status}");
        }
        assert_eq!(verdict(500), Verdict::LaterThanOthers);
    }
}
