//! OTLP profiles over HTTP: `POST /v1development/profiles` with protocol buffers.
//!
//! The signal is in development, and its format changes. All that depends on it is in
//! this module: it speaks opentelemetry-proto 1.10.0, and an
//! `ExportProfilesServiceRequest` for each profile.
//!
//! What is where:
//! - Samples count samples (`samples`/`count`); the period is CPU time in nanoseconds.
//!   That is how OpenTelemetry's own eBPF profiler reports them.
//! - The resource is the process, or the service if the profile is of all its
//!   processes: `service.name`, `process.pid`, `process.command_line`,
//!   `process.runtime.name` and `.version`, `process.linux.cgroup`, `container.id`,
//!   `k8s.pod.uid`, `rbprof.systemd.unit`.
//! - Samples have `thread.id` and `thread.name` (Ruby's name for it, else the
//!   kernel's), `process.pid` if the resource has none, and `rbprof.state`.
//! - Frames have `profile.frame.type`: `ruby`, also for methods written in C, `native`
//!   or `kernel`. Frames that say what could not be known have none, for no
//!   well-known value applies.
//! - Ruby code has no mapping, except compiled code, which is in `ruby (JIT)`.
//! - The profile's attributes `rbprof.*` are its counters: how complete it is.

mod message;

use std::collections::BTreeMap;
use std::io;
use std::io::Write as _;
use std::sync::Arc;

use flate2::Compression as Level;
use flate2::write::GzEncoder;
use hyper::StatusCode;
use indexmap::IndexMap;
use indexmap::IndexSet;
use prost::Message as _;

use self::message::AnyValue;
use self::message::KeyValueAndUnit;
use super::Protocol;
use super::Verdict;
use super::http::Answer;
use super::item::Head;
use super::item::Item;
use crate::agent::batch::Batch;
use crate::agent::sinks::config::Compression;
use crate::profile::FunctionId;
use crate::profile::FunctionKind;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::MappingId;
use crate::profile::Profile;
use crate::profile::StackId;

/// The protocol.
#[derive(Debug)]
pub(super) struct Otlp {
    /// For all resources.
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) compression: Compression,
}

impl Protocol for Otlp {
    fn format(&self) -> &'static str {
        "otlp v1development 1.10.0"
    }

    fn content_type(&self) -> &'static str {
        "application/x-protobuf"
    }

    fn encode(&self, batch: &Batch) -> io::Result<Item> {
        let request = self.request(batch).encode_to_vec();
        let gzip = self.compression == Compression::Gzip;
        let body = if gzip {
            let mut encoder = GzEncoder::new(Vec::new(), Level::default());
            encoder.write_all(&request)?;
            encoder.finish()?
        } else {
            request
        };
        Ok(Item {
            head: Head {
                format: self.format().to_owned(),
                target: "/v1development/profiles".to_owned(),
                gzip,
            },
            body: body.into(),
        })
    }

    /// By the rules of OTLP: all other failures must not be retried. What says how to
    /// reach the receiver rather than what it thinks of the profile is no answer of it.
    fn verdict(&self, answer: &Answer) -> Verdict {
        match answer.status {
            status if status.is_success() => success(answer),
            StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => Verdict::Later,
            status if status.is_redirection() => Verdict::Later,
            _ => Verdict::Never,
        }
    }
}

/// A success can be one in part.
fn success(answer: &Answer) -> Verdict {
    let response = message::ExportProfilesServiceResponse::decode(answer.body.clone());
    // The status is what counts.
    let partial = response.ok().and_then(|response| response.partial_success);
    match partial {
        Some(partial) if partial.rejected_profiles > 0 || !partial.error_message.is_empty() => {
            let mut why = partial.error_message;
            why.retain(|c| !c.is_control());
            Verdict::Partly {
                refused: partial.rejected_profiles > 0,
                why,
            }
        }
        _ => Verdict::Delivered,
    }
}

impl Otlp {
    fn request(&self, batch: &Batch) -> message::ExportProfilesServiceRequest {
        let mut dictionary = Dictionary::new(&batch.profile);
        let profile = dictionary.profile(batch);
        message::ExportProfilesServiceRequest {
            resource_profiles: vec![message::ResourceProfiles {
                resource: Some(self.resource(batch)),
                scope_profiles: vec![message::ScopeProfiles {
                    scope: Some(message::InstrumentationScope {
                        name: "rbprof".to_owned(),
                        version: env!("CARGO_PKG_VERSION").to_owned(),
                    }),
                    profiles: vec![profile],
                }],
            }],
            dictionary: Some(dictionary.finish()),
        }
    }

    fn resource(&self, batch: &Batch) -> message::Resource {
        // A key is there once; ours count.
        let mut attributes: IndexMap<&str, AnyValue> = IndexMap::new();
        for (key, value) in &self.attributes {
            attributes.insert(key, value.as_str().into());
        }
        attributes.insert("service.name", (&*batch.service).into());
        attributes.insert("process.runtime.name", "ruby".into());
        if let Some(process) = &batch.process {
            attributes.insert("process.pid", i64::from(process.pid).into());
            let texts = [
                ("process.command_line", Some(&process.command)),
                ("process.runtime.version", Some(&process.ruby)),
                ("process.linux.cgroup", process.cgroup.as_ref()),
                ("container.id", process.container.as_ref()),
                ("k8s.pod.uid", process.pod.as_ref()),
                ("rbprof.systemd.unit", process.unit.as_ref()),
            ];
            for (key, text) in texts {
                if let Some(text) = text.filter(|text| !text.is_empty()) {
                    attributes.insert(key, text.as_str().into());
                }
            }
        } else if let [version] = &*batch.profile.metadata.rubies {
            attributes.insert("process.runtime.version", version.as_str().into());
        }
        message::Resource {
            attributes: attributes
                .into_iter()
                .map(|(key, value)| message::KeyValue {
                    key: key.to_owned(),
                    value: Some(value),
                })
                .collect(),
        }
    }
}

/// The tables that samples refer to, filled in order of first use.
struct Dictionary<'a> {
    of: &'a Profile,
    strings: IndexSet<Arc<str>>,
    attributes: IndexSet<KeyValueAndUnit>,
    mappings: IndexMap<MappingId, message::Mapping>,
    functions: IndexMap<FunctionId, message::Function>,
    locations: IndexMap<LocationId, message::Location>,
    stacks: IndexMap<StackId, message::Stack>,
}

/// Where the thing with that index in one of our tables is in one of the message.
fn behind_the_empty_one(index: usize) -> i32 {
    number(index).saturating_add(1)
}

fn number(index: usize) -> i32 {
    i32::try_from(index).unwrap_or(i32::MAX)
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl<'a> Dictionary<'a> {
    fn new(of: &'a Profile) -> Self {
        Self {
            of,
            strings: IndexSet::from(["".into()]),
            attributes: IndexSet::from([KeyValueAndUnit::default()]),
            mappings: IndexMap::new(),
            functions: IndexMap::new(),
            locations: IndexMap::new(),
            stacks: IndexMap::new(),
        }
    }

    fn finish(self) -> message::ProfilesDictionary {
        fn table<K, T: Default>(found: IndexMap<K, T>) -> Vec<T> {
            std::iter::once(T::default())
                .chain(found.into_values())
                .collect()
        }
        message::ProfilesDictionary {
            mapping_table: table(self.mappings),
            location_table: table(self.locations),
            function_table: table(self.functions),
            link_table: vec![message::Link::default()],
            string_table: (self.strings.iter())
                .map(|text| text.as_ref().to_owned())
                .collect(),
            attribute_table: self.attributes.into_iter().collect(),
            stack_table: table(self.stacks),
        }
    }

    fn string(&mut self, text: &str) -> i32 {
        number(match self.strings.get_index_of(text) {
            Some(index) => index,
            None => self.strings.insert_full(text.into()).0,
        })
    }

    fn attribute(&mut self, key: &str, value: AnyValue) -> i32 {
        let attribute = KeyValueAndUnit {
            key_strindex: self.string(key),
            value: Some(value),
        };
        number(self.attributes.insert_full(attribute).0)
    }

    fn value_type(&mut self, of: &str, unit: &str) -> message::ValueType {
        message::ValueType {
            type_strindex: self.string(of),
            unit_strindex: self.string(unit),
        }
    }

    fn profile(&mut self, batch: &Batch) -> message::Profile {
        let of = self.of;
        let about = &of.metadata;
        let per_process = batch.process.is_some();
        let samples = (of.counts())
            .map(|(stack, labels, count)| message::Sample {
                stack_index: self.stack(stack),
                attribute_indices: (of.labels(labels))
                    .map(|labels| self.labels(labels, per_process))
                    .unwrap_or_default(),
                values: vec![signed(count)],
            })
            .collect();
        let counters = (about.counters.iter())
            .map(|counter| {
                let key = format!("rbprof.{}", counter.name.replace(' ', "_"));
                self.attribute(&key, signed(counter.value).into())
            })
            .collect();
        let since = |time: std::time::SystemTime| {
            let since = time.duration_since(std::time::UNIX_EPOCH);
            u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
        };
        let (from, until) = (since(batch.from), since(batch.until));
        message::Profile {
            sample_type: Some(self.value_type("samples", "count")),
            samples,
            time_unix_nano: from,
            duration_nano: until.saturating_sub(from),
            period_type: Some(self.value_type("cpu", "nanoseconds")),
            period: signed(about.period_ns()),
            // Of a profile that comes twice, the receiver can drop one.
            profile_id: fastrand::u128(1..).to_be_bytes().to_vec(),
            attribute_indices: counters,
        }
    }

    fn labels(&mut self, labels: &Labels, per_process: bool) -> Vec<i32> {
        let Labels {
            pid,
            tid,
            thread_name,
            comm,
            state,
        } = labels;
        let mut indices = Vec::new();
        if *pid != 0 && !per_process {
            indices.push(self.attribute("process.pid", i64::from(*pid).into()));
        }
        if *tid != 0 {
            indices.push(self.attribute("thread.id", i64::from(*tid).into()));
        }
        let name = thread_name.as_ref().or(comm.as_ref());
        for (key, text) in [("thread.name", name), ("rbprof.state", state.as_ref())] {
            if let Some(text) = text {
                indices.push(self.attribute(key, (&**text).into()));
            }
        }
        indices
    }

    fn stack(&mut self, id: StackId) -> i32 {
        if id == StackId::EMPTY {
            return 0;
        }
        if let Some(index) = self.stacks.get_index_of(&id) {
            return behind_the_empty_one(index);
        }
        let of = self.of;
        let stack = message::Stack {
            location_indices: (of.stack(id))
                .map(|location| self.location(location))
                .filter(|index| *index != 0)
                .collect(),
        };
        behind_the_empty_one(self.stacks.insert_full(id, stack).0)
    }

    fn location(&mut self, id: LocationId) -> i32 {
        if let Some(index) = self.locations.get_index_of(&id) {
            return behind_the_empty_one(index);
        }
        let Some(location) = self.of.location(id) else {
            return 0;
        };
        let kind = self.of.function(location.function).map(|of| of.kind);
        let frame_type = match kind {
            Some(FunctionKind::Ruby | FunctionKind::CFunction) => Some("ruby"),
            Some(FunctionKind::Native) => Some("native"),
            Some(FunctionKind::Kernel) => Some("kernel"),
            Some(FunctionKind::Marker) | None => None,
        };
        let attribute_indices = (frame_type.into_iter())
            .map(|frame_type| self.attribute("profile.frame.type", frame_type.into()))
            .collect();
        let location = message::Location {
            mapping_index: self.mapping(location.mapping),
            address: location.address,
            lines: vec![message::Line {
                function_index: self.function(location.function),
                line: i64::from(location.line),
            }],
            attribute_indices,
        };
        behind_the_empty_one(self.locations.insert_full(id, location).0)
    }

    fn function(&mut self, id: FunctionId) -> i32 {
        if let Some(index) = self.functions.get_index_of(&id) {
            return behind_the_empty_one(index);
        }
        let Some(function) = self.of.function(id) else {
            return 0;
        };
        let function = message::Function {
            name_strindex: self.string(&function.label),
            system_name_strindex: if function.label == function.base_label {
                0
            } else {
                self.string(&function.base_label)
            },
            filename_strindex: self.string(&function.file),
            start_line: i64::from(function.first_line),
        };
        behind_the_empty_one(self.functions.insert_full(id, function).0)
    }

    fn mapping(&mut self, id: MappingId) -> i32 {
        if id == MappingId::RUBY {
            return 0;
        }
        if let Some(index) = self.mappings.get_index_of(&id) {
            return behind_the_empty_one(index);
        }
        let Some(mapping) = self.of.mapping(id) else {
            return 0;
        };
        let mut attribute_indices = Vec::new();
        if !mapping.build_id.is_empty() {
            let build_id = AnyValue::from(&*mapping.build_id);
            attribute_indices.push(self.attribute("process.executable.build_id.gnu", build_id));
        }
        let mapping = message::Mapping {
            memory_start: mapping.start,
            memory_limit: mapping.limit,
            file_offset: mapping.offset,
            filename_strindex: self.string(&mapping.file),
            attribute_indices,
        };
        behind_the_empty_one(self.mappings.insert_full(id, mapping).0)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::agent::sinks::example;

    fn protocol(compression: Compression) -> Otlp {
        Otlp {
            attributes: BTreeMap::new(),
            compression,
        }
    }

    fn verdict(status: u16, body: Vec<u8>) -> Verdict {
        protocol(Compression::None).verdict(&Answer {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after: None,
            body: Bytes::from(body),
        })
    }

    #[test]
    fn tables_begin_with_the_empty_one() {
        let request = protocol(Compression::None).request(&example::batch("web", 7, 5));
        let dictionary = request.dictionary.unwrap();
        assert_eq!(dictionary.string_table[0], "");
        assert_eq!(dictionary.attribute_table[0], KeyValueAndUnit::default());
        assert_eq!(dictionary.mapping_table[0], message::Mapping::default());
        assert_eq!(dictionary.location_table[0], message::Location::default());
        assert_eq!(dictionary.function_table[0], message::Function::default());
        assert_eq!(dictionary.stack_table[0], message::Stack::default());
        assert_eq!(dictionary.link_table, [message::Link::default()]);
        assert_eq!(dictionary.location_table.len(), 6);
        assert_eq!(dictionary.stack_table[1].location_indices, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn what_fails_is_retried_only_where_the_protocol_says_so() {
        assert_eq!(verdict(200, Vec::new()), Verdict::Delivered);
        assert_eq!(verdict(200, b"{}".to_vec()), Verdict::Delivered);
        for status in [408, 429, 502, 503, 504] {
            assert_eq!(verdict(status, Vec::new()), Verdict::Later, "{status}");
        }
        for status in [400, 401, 404, 413, 500, 501] {
            assert_eq!(verdict(status, Vec::new()), Verdict::Never, "{status}");
        }
    }

    #[test]
    fn a_success_can_be_one_in_part() {
        let answer = |rejected_profiles, why: &str| {
            let partial_success = Some(message::ExportProfilesPartialSuccess {
                rejected_profiles,
                error_message: why.to_owned(),
            });
            let body = message::ExportProfilesServiceResponse { partial_success };
            verdict(200, body.encode_to_vec())
        };
        assert_eq!(answer(0, ""), Verdict::Delivered);
        let why = "no room".to_owned();
        let refused = true;
        assert_eq!(answer(1, "no room"), Verdict::Partly { refused, why });
        let (why, refused) = ("old version".to_owned(), false);
        assert_eq!(answer(0, "old version"), Verdict::Partly { refused, why });
    }
}
