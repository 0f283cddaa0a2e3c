//! pprof: gzip-compressed protocol buffers, read by `go tool pprof`,
//! pprof-format, Grafana Pyroscope, Polar Signals, speedscope and many others.
//!
//! What is where:
//! - Sample types are `samples/count` and `cpu/nanoseconds`; the latter is the
//!   count times the period, and the default.
//! - `Function.name` is the full label, `system_name` the method's own name,
//!   `start_line` the first line of the definition, `Line.line` the line that
//!   was running. `system_name` is left empty where it would equal the name:
//!   `go tool pprof` takes such names for mangled C++ and deletes what is in
//!   angle brackets, so that `<main>` would become nothing.
//! - Ruby code is in the mapping `ruby`, the first one, which says that it
//!   needs no symbols. Addresses of its locations are 0, which means "not
//!   known" to all readers; they tell locations apart by function and line.
//! - Labels are `pid` and `tid` (numbers), `thread_name`, `comm` and `state`.
//! - Comments hold what a reader needs to judge the profile, above all the
//!   counters of what is missing. `go tool pprof -comments` prints them.
//!
//! Equal profiles give equal bytes, in whatever order they were filled.

mod message;
mod order;

use std::io;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use indexmap::IndexSet;
use prost::Message as _;

use super::summary;
use crate::profile::Function;
use crate::profile::FunctionId;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::MappingId;
use crate::profile::Profile;

/// Writes a gzip-compressed pprof profile.
///
/// The parts of the profile are written as they are made, so that the memory
/// needed does not grow with the number of samples times their depth.
///
/// # Errors
/// Those of `out`.
pub fn write(profile: &Profile, out: impl Write) -> io::Result<()> {
    let mut encoder = Encoder::new(profile, GzEncoder::new(out, Compression::default()));
    encoder.head()?;
    encoder.samples()?;
    encoder.strings()?;
    encoder.out.finish()?.flush()
}

/// Names that are in every profile.
const CPU: &str = "cpu";
const NANOSECONDS: &str = "nanoseconds";

/// Which things of a kind have been written, and under which ids: the format
/// wants them from 1, and they are given in order of first use.
struct Written {
    /// By index in the profile; 0 is not written.
    ids: Vec<u64>,
    last: u64,
}

impl Written {
    fn new(length: usize) -> Self {
        Self {
            ids: vec![0; length],
            last: 0,
        }
    }

    /// The id of the thing at `index`, and whether it is a new one; 0 when
    /// there is no such thing.
    fn id(&mut self, index: usize) -> (u64, bool) {
        match self.ids.get_mut(index) {
            Some(id) if *id == 0 => {
                self.last += 1;
                *id = self.last;
                (*id, true)
            }
            Some(id) => (*id, false),
            None => (0, false),
        }
    }
}

struct Encoder<'a, W: Write> {
    profile: &'a Profile,
    out: W,
    /// Bytes of the part being written.
    part: Vec<u8>,
    strings: IndexSet<Box<str>>,
    mappings: Written,
    functions: Written,
    locations: Written,
}

impl<'a, W: Write> Encoder<'a, W> {
    fn new(profile: &'a Profile, out: W) -> Self {
        Self {
            profile,
            out,
            part: Vec::new(),
            strings: IndexSet::from([Box::from("")]),
            mappings: Written::new(profile.mappings().len()),
            functions: Written::new(profile.functions().len()),
            locations: Written::new(profile.locations().len()),
        }
    }

    /// Writes part of the profile. By the rules of protocol buffers, messages
    /// written one after the other are one message with the fields of all.
    fn put(&mut self, part: &message::Profile) -> io::Result<()> {
        self.part.clear();
        part.encode(&mut self.part).map_err(io::Error::other)?;
        self.out.write_all(&self.part)
    }

    /// The index of a string in the table, in which it is from now on.
    fn string(&mut self, text: &str) -> i64 {
        let index = match self.strings.get_index_of(text) {
            Some(index) => index,
            None => self.strings.insert_full(Box::from(text)).0,
        };
        number(index as u64)
    }

    fn value_type(&mut self, name: &str, unit: &str) -> message::ValueType {
        message::ValueType {
            r#type: self.string(name),
            unit: self.string(unit),
        }
    }

    /// Everything that is there once.
    fn head(&mut self) -> io::Result<()> {
        let about = &self.profile.metadata;
        let head = message::Profile {
            sample_type: vec![
                self.value_type("samples", "count"),
                self.value_type(CPU, NANOSECONDS),
            ],
            time_nanos: number(about.start_unix_ns),
            duration_nanos: number(about.duration_ns),
            period_type: Some(self.value_type(CPU, NANOSECONDS)),
            period: number(about.period_ns()),
            comment: (summary::account(self.profile).iter())
                .map(|comment| self.string(comment))
                .collect(),
            default_sample_type: self.string(CPU),
            ..message::Profile::default()
        };
        self.put(&head)?;
        // Readers show the first mapping as the program.
        self.mapping(MappingId::RUBY).map(drop)
    }

    /// The samples, each preceded by those of its locations and so on that
    /// are new.
    fn samples(&mut self) -> io::Result<()> {
        let period = self.profile.metadata.period_ns();
        let mut part = message::Profile {
            sample: vec![message::Sample::default()],
            ..message::Profile::default()
        };
        for (stack, labels, count) in order::counts(self.profile) {
            let profile = self.profile;
            let Some(sample) = part.sample.first_mut() else {
                break;
            };
            sample.location_id.clear();
            for id in profile.stack(stack) {
                match self.location(id)? {
                    // An id of another profile. Readers refuse files with 0.
                    0 => {}
                    id => sample.location_id.push(id),
                }
            }
            sample.value.clear();
            sample.value.push(number(count));
            sample.value.push(number(count.saturating_mul(period)));
            sample.label.clear();
            if let Some(labels) = profile.labels(labels) {
                self.labels(labels, &mut sample.label);
            }
            self.put(&part)?;
        }
        Ok(())
    }

    /// The string table, complete only when all else is written.
    fn strings(&mut self) -> io::Result<()> {
        let strings = std::mem::take(&mut self.strings);
        for text in strings {
            self.put(&message::Profile {
                string_table: vec![text.into_string()],
                ..message::Profile::default()
            })?;
        }
        Ok(())
    }

    fn labels(&mut self, labels: &Labels, into: &mut Vec<message::Label>) {
        let Labels {
            pid,
            tid,
            thread_name,
            comm,
            state,
        } = labels;
        for (key, num) in [("pid", *pid), ("tid", *tid)] {
            if num != 0 {
                into.push(message::Label {
                    key: self.string(key),
                    num: i64::from(num),
                    ..message::Label::default()
                });
            }
        }
        let texts = [
            ("thread_name", thread_name),
            ("comm", comm),
            ("state", state),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                into.push(message::Label {
                    key: self.string(key),
                    str: self.string(text),
                    ..message::Label::default()
                });
            }
        }
    }

    fn location(&mut self, id: LocationId) -> io::Result<u64> {
        let (written, new) = self.locations.id(id.index());
        if let (true, Some(location)) = (new, self.profile.location(id)) {
            let location = message::Location {
                id: written,
                mapping_id: self.mapping(location.mapping)?,
                address: location.address,
                line: vec![message::Line {
                    function_id: self.function(location.function)?,
                    line: i64::from(location.line),
                }],
            };
            self.put(&message::Profile {
                location: vec![location],
                ..message::Profile::default()
            })?;
        }
        Ok(written)
    }

    fn function(&mut self, id: FunctionId) -> io::Result<u64> {
        let (written, new) = self.functions.id(id.index());
        if let (true, Some(function)) = (new, self.profile.function(id)) {
            let Function {
                kind: _,
                label,
                base_label,
                file,
                first_line,
            } = &**function;
            let function = message::Function {
                id: written,
                name: self.string(label),
                system_name: if label == base_label {
                    0
                } else {
                    self.string(base_label)
                },
                filename: self.string(file),
                start_line: i64::from(*first_line),
            };
            self.put(&message::Profile {
                function: vec![function],
                ..message::Profile::default()
            })?;
        }
        Ok(written)
    }

    fn mapping(&mut self, id: MappingId) -> io::Result<u64> {
        let (written, new) = self.mappings.id(id.index());
        if let (true, Some(mapping)) = (new, self.profile.mapping(id)) {
            let Mapping {
                start,
                limit,
                offset,
                file,
                build_id,
                has_functions,
                has_filenames,
                has_line_numbers,
            } = mapping;
            let mapping = message::Mapping {
                id: written,
                memory_start: *start,
                memory_limit: *limit,
                file_offset: *offset,
                filename: self.string(file),
                build_id: self.string(build_id),
                has_functions: *has_functions,
                has_filenames: *has_filenames,
                has_line_numbers: *has_line_numbers,
            };
            self.put(&message::Profile {
                mapping: vec![mapping],
                ..message::Profile::default()
            })?;
        }
        Ok(written)
    }
}

/// The format has signed numbers only.
fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::Arc;

    use flate2::read::GzDecoder;

    use super::*;
    use crate::output::example;
    use crate::profile::FunctionKind;
    use crate::profile::LabelsId;
    use crate::profile::StackId;

    fn written(profile: &Profile) -> Vec<u8> {
        let mut out = Vec::new();
        write(profile, &mut out).unwrap();
        out
    }

    fn decoded(bytes: &[u8]) -> message::Profile {
        let mut raw = Vec::new();
        GzDecoder::new(bytes).read_to_end(&mut raw).unwrap();
        message::Profile::decode(raw.as_slice()).unwrap()
    }

    fn text(of: &message::Profile, index: i64) -> &str {
        &of.string_table[usize::try_from(index).unwrap()]
    }

    /// Stack (leaf first, `label system_name file:start:line`), values, labels.
    type Readable = (Vec<String>, Vec<i64>, Vec<String>);

    fn readable(of: &message::Profile) -> Vec<Readable> {
        let frame = |id: &u64| {
            let location = of.location.iter().find(|l| l.id == *id).unwrap();
            assert_eq!(location.line.len(), 1);
            let line = location.line[0];
            let function = (of.function.iter())
                .find(|f| f.id == line.function_id)
                .unwrap();
            format!(
                "{} {} {}:{}:{}",
                text(of, function.name),
                text(of, function.system_name),
                text(of, function.filename),
                function.start_line,
                line.line
            )
        };
        let label = |label: &message::Label| match label.str {
            0 => format!("{}={}", text(of, label.key), label.num),
            str => format!("{}={}", text(of, label.key), text(of, str)),
        };
        (of.sample.iter())
            .map(|sample| {
                (
                    sample.location_id.iter().map(frame).collect(),
                    sample.value.clone(),
                    sample.label.iter().map(label).collect(),
                )
            })
            .collect()
    }

    #[test]
    fn stacks_values_and_labels_come_back() {
        let back = decoded(&written(&example::profile()));
        let samples = readable(&back);
        assert_eq!(samples.len(), 5);
        let (stack, values, labels) = &samples[1];
        let expected = [
            "Array#map map <cfunc>:0:0",
            "Shop::Order#total total /app/lib/shop/order.rb:30:31",
            "block in Shop::Server#run run /app/lib/shop/server.rb:14:15",
            "Kernel#loop loop <cfunc>:0:0",
            "Shop::Server#run run /app/lib/shop/server.rb:10:14",
            "<main>  /app/bin/shop:1:40",
        ];
        assert_eq!(*stack, expected);
        assert_eq!(*values, [40, 40 * 10_101_010]);
        assert_eq!(*labels, ["pid=4242", "tid=4242", "comm=ruby"]);
        let total: i64 = back.sample.iter().map(|sample| sample.value[0]).sum();
        assert_eq!(total, 100);
        let thread: Vec<_> = samples.iter().filter(|s| s.2.len() == 4).collect();
        assert_eq!(thread.len(), 3);
        assert_eq!(thread[0].2[2], "thread_name=worker 4243");
    }

    #[test]
    fn the_head_says_what_was_measured() {
        let back = decoded(&written(&example::profile()));
        let name = |of: message::ValueType| (text(&back, of.r#type), text(&back, of.unit));
        let types: Vec<_> = back.sample_type.iter().copied().map(name).collect();
        assert_eq!(types, [("samples", "count"), ("cpu", "nanoseconds")]);
        assert_eq!(name(back.period_type.unwrap()), ("cpu", "nanoseconds"));
        assert_eq!(text(&back, back.default_sample_type), "cpu");
        assert_eq!(back.period, 10_101_010);
        assert_eq!(back.time_nanos, 1_700_000_000_000_000_000);
        assert_eq!(back.duration_nanos, 10_000_000_000);
        let comments: Vec<_> = back.comment.iter().map(|c| text(&back, *c)).collect();
        let expected = [
            "tool: rbprof 0.1.0",
            "mode: CPU",
            "kernel: 6.1.0-18-amd64",
            "ruby: 3.3.8",
            "command: puma 6.4 [shop]",
            "pid: 4242",
            "frequency: 99 Hz",
            "samples due: 102",
            "samples lost: 2",
            "stacks truncated: 7",
            "names not read: 0",
            "warning: libfoo.so has no symbols",
            "release 42",
        ];
        assert_eq!(comments, expected);
        assert_eq!(back.string_table[0], "");
        let distinct: IndexSet<&String> = back.string_table.iter().collect();
        assert_eq!(distinct.len(), back.string_table.len());
    }

    #[test]
    fn native_code_has_its_own_mapping() {
        let mut profile = Profile::default();
        let native = profile.intern_function(&Arc::new(Function {
            kind: FunctionKind::Native,
            label: Arc::from("inflate"),
            base_label: Arc::from("inflate"),
            file: Arc::from(""),
            first_line: 0,
        }));
        let mapping = profile.intern_mapping(&Mapping {
            start: 0x1000,
            limit: 0x9000,
            offset: 0x200,
            file: Arc::from("/usr/lib/libz.so.1"),
            build_id: Arc::from("abcd"),
            has_functions: true,
            ..Mapping::default()
        });
        let location = profile.intern_native_location(native, 0, mapping, 0x1234);
        let stack = profile.intern_stack(&[location]);
        let labels = profile.intern_labels(&Labels::default());
        profile.add(stack, labels, 1);

        let back = decoded(&written(&profile));
        assert_eq!(back.mapping.len(), 2);
        let (ruby, libz) = (back.mapping[0], back.mapping[1]);
        assert_eq!(text(&back, ruby.filename), "ruby");
        assert!(ruby.has_functions && ruby.has_filenames && ruby.has_line_numbers);
        assert_eq!(text(&back, libz.filename), "/usr/lib/libz.so.1");
        assert_eq!(text(&back, libz.build_id), "abcd");
        let span = (libz.memory_start, libz.memory_limit, libz.file_offset);
        assert_eq!(span, (0x1000, 0x9000, 0x200));
        assert!(libz.has_functions && !libz.has_filenames);
        assert_eq!(back.location[0].mapping_id, libz.id);
        assert_eq!(back.location[0].address, 0x1234);
        assert_eq!(back.sample[0].label.len(), 0);
    }

    /// The same content, filled in the other order.
    fn reversed(profile: &Profile) -> Profile {
        let mut other = Profile::new(profile.metadata.clone());
        let counts: Vec<(StackId, LabelsId, u64)> = profile.counts().collect();
        for (stack, labels, count) in counts.into_iter().rev() {
            let frames: Vec<LocationId> = (profile.stack(stack))
                .map(|id| {
                    let location = profile.location(id).unwrap();
                    let function = profile.function(location.function).unwrap();
                    let function = other.intern_function(function);
                    other.intern_location(function, location.line)
                })
                .collect();
            let stack = other.intern_stack(&frames);
            let labels = other.intern_labels(profile.labels(labels).unwrap());
            other.add(stack, labels, count);
        }
        other
    }

    #[test]
    fn equal_profiles_give_equal_bytes() {
        let profile = example::profile();
        let other = reversed(&profile);
        let first = |p: &Profile| p.functions().next().map(|(_, f)| f.label.clone());
        assert_ne!(first(&profile), first(&other), "the order must differ");
        assert_eq!(written(&profile), written(&other));
        assert_eq!(written(&profile), written(&profile));
    }

    #[test]
    fn an_empty_profile_is_a_profile() {
        let back = decoded(&written(&Profile::default()));
        assert_eq!((back.sample.len(), back.sample_type.len()), (0, 2));
    }
}
