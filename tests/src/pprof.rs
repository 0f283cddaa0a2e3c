//! A reader of the profiles that rbprof writes, for tests that know what must
//! be in them. Fields are those of pprof's `profile.proto`.

use std::collections::HashMap;
use std::io::Read as _;
use std::sync::Arc;

use anyhow::Context as _;
use anyhow::Result;
use prost::Message;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::symbolize::Executed;
use rbprof::symbolize::Resolved;

/// A sample of a profile.
#[derive(Clone, Debug)]
pub struct Counted {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// How often it was taken.
    pub count: u64,
    /// Leaf first. Machine code, C methods and markers are told from Ruby code;
    /// the object of machine code is its mapping's number in the profile.
    pub frames: Vec<Resolved>,
}

/// A profile.
#[derive(Clone, Debug)]
pub struct Read {
    /// What was sampled.
    pub samples: Vec<Counted>,
    /// What else is said.
    pub comments: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "2")]
    sample: Vec<RawSample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<RawMapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<RawLocation>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<RawFunction>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct RawSample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<RawLabel>,
}

#[derive(Clone, PartialEq, Message)]
struct RawLabel {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "3")]
    num: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RawMapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RawLocation {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<RawLine>,
}

#[derive(Clone, PartialEq, Message)]
struct RawLine {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RawFunction {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
    #[prost(int64, tag = "5")]
    start_line: i64,
}

/// Reads a compressed profile.
///
/// # Errors
/// If it is none, or refers to what is not there.
pub fn read(bytes: &[u8]) -> Result<Read> {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(bytes)
        .read_to_end(&mut plain)
        .context("a profile that is not compressed")?;
    let profile = Profile::decode(plain.as_slice())?;
    let text = |index: i64| -> Result<&str> {
        let text = profile.string_table.get(usize::try_from(index)?);
        Ok(text.context("a text that is not there")?)
    };

    let mut functions = HashMap::new();
    for function in &profile.function {
        let label: Arc<str> = text(function.name)?.into();
        let base_label = match text(function.system_name)? {
            "" => Arc::clone(&label),
            own => own.into(),
        };
        let file = text(function.filename)?;
        let read = Function {
            kind: match file {
                "<cfunc>" => FunctionKind::CFunction,
                "" => FunctionKind::Marker,
                _ => FunctionKind::Ruby,
            },
            label,
            base_label,
            file: file.into(),
            first_line: u32::try_from(function.start_line)?,
        };
        functions.insert(function.id, Arc::new(read));
    }
    let mut mappings = HashMap::new();
    for mapping in &profile.mapping {
        mappings.insert(mapping.id, text(mapping.filename)?);
    }
    let mut locations = HashMap::new();
    for location in &profile.location {
        let [line] = location.line.as_slice() else {
            anyhow::bail!("a place with {} lines", location.line.len());
        };
        let function = functions.get(&line.function_id).context("no function")?;
        let address = location.address;
        // Only machine code has one.
        let (kind, code) = match mappings.get(&location.mapping_id) {
            _ if address == 0 => (function.kind, Executed::Ruby),
            Some(&"[kernel.kallsyms]") => (FunctionKind::Kernel, Executed::Kernel { address }),
            _ => {
                let object = u32::try_from(location.mapping_id)?;
                (FunctionKind::Native, Executed::Native { object, address })
            }
        };
        let mut function = Arc::clone(function);
        if function.kind != kind {
            Arc::make_mut(&mut function).kind = kind;
        }
        let read = Resolved {
            function,
            line: u32::try_from(line.line)?,
            code,
        };
        locations.insert(location.id, read);
    }
    let mut samples = Vec::new();
    for sample in &profile.sample {
        let mut numbers = HashMap::new();
        for label in &sample.label {
            numbers.insert(text(label.key)?, label.num);
        }
        let number = |name: &str| -> Result<u32> {
            Ok(u32::try_from(*numbers.get(name).context("no label")?)?)
        };
        let frames = sample
            .location_id
            .iter()
            .map(|id| locations.get(id).cloned());
        samples.push(Counted {
            pid: number("pid")?,
            tid: number("tid")?,
            count: u64::try_from(*sample.value.first().context("no value")?)?,
            frames: frames.collect::<Option<_>>().context("no place")?,
        });
    }
    let comments = profile.comment.iter();
    Ok(Read {
        samples,
        comments: comments
            .map(|&index| Ok(text(index)?.to_owned()))
            .collect::<Result<_>>()?,
    })
}
