//! What is to be done, checked before anything starts.

use std::ffi::OsString;
use std::fmt;
use std::io::IsTerminal as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use super::args::Record;
use crate::kernel;
use crate::kernel::Looping;
use crate::output::Format;

/// The arguments do not make sense: exit status 2.
#[derive(Debug)]
pub struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (see `rbprof record --help`)", self.0)
    }
}

impl std::error::Error for UsageError {}

/// What is recorded.
#[derive(Debug)]
pub enum Subject {
    /// Running processes.
    Processes(Vec<u32>),
    /// A command that is started.
    Command(Vec<OsString>),
}

/// A file to write, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The file; `-` is standard output.
    pub path: PathBuf,
    /// The format.
    pub format: Format,
}

impl Destination {
    /// Whether it is standard output.
    #[must_use]
    pub fn is_stdout(&self) -> bool {
        self.path == Path::new("-")
    }
}

/// A recording, as it is to be done.
#[derive(Debug)]
pub struct Plan {
    /// What is recorded.
    pub subject: Subject,
    /// For how long; `None` until it ends or is told to stop.
    pub duration: Option<Duration>,
    /// Files to write. Empty: one named after the process.
    pub destinations: Vec<Destination>,
    /// Format of the file that is named after the process.
    pub default_format: Format,
    /// Print nothing but errors.
    pub quiet: bool,
    /// Settings of the kernel half.
    pub kernel: kernel::Options,
}

impl Plan {
    /// Checks the arguments.
    ///
    /// # Errors
    /// [`UsageError`] says which of them do not fit.
    pub fn new(arguments: Record) -> Result<Self, UsageError> {
        let Record { mut pid, program, duration, frequency, output, format, quiet, bpf_log, no_bpf_loop } =
            arguments;
        let format = format.map(Format::from);
        let destinations = output
            .into_iter()
            .map(|path| destination(path, format))
            .collect::<Result<Vec<_>, _>>()?;
        if destinations.iter().filter(|destination| destination.is_stdout()).count() > 1 {
            return Err(UsageError("standard output can take one profile only".into()));
        }
        pid.sort_unstable();
        pid.dedup();
        let subject = if program.is_empty() { Subject::Processes(pid) } else { Subject::Command(program) };
        Ok(Self {
            subject,
            duration: duration.map(Duration::from_secs_f64),
            destinations,
            default_format: format.unwrap_or(Format::Pprof),
            quiet,
            kernel: kernel::Options {
                frequency: u64::from(frequency),
                log: bpf_log,
                looping: if no_bpf_loop { Looping::TailCalls } else { Looping::Probe },
                ..kernel::Options::default()
            },
        })
    }

    /// The files to write for a recording of process `pid`.
    #[must_use]
    pub fn destinations_for(&self, pid: u32) -> Vec<Destination> {
        if !self.destinations.is_empty() {
            return self.destinations.clone();
        }
        let ending = match self.default_format {
            Format::Pprof => "pb.gz",
            Format::Folded => "folded",
            Format::Svg => "svg",
        };
        vec![Destination { path: format!("rbprof-{pid}.{ending}").into(), format: self.default_format }]
    }
}

fn destination(path: PathBuf, format: Option<Format>) -> Result<Destination, UsageError> {
    if path == Path::new("-") {
        let format = format.unwrap_or(Format::Pprof);
        if format == Format::Pprof && std::io::stdout().is_terminal() {
            return Err(UsageError(
                "a pprof profile is not for a terminal: redirect standard output, name a file \
                 with -o, or choose --format folded"
                    .into(),
            ));
        }
        return Ok(Destination { path, format });
    }
    match format.or_else(|| Format::of_path(&path)) {
        Some(format) => Ok(Destination { path, format }),
        None => Err(UsageError(format!(
            "the ending of {} tells no format: use .pb.gz, .folded or .svg, or give --format",
            path.display()
        ))),
    }
}
