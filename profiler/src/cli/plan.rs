//! What is to be done, checked before anything starts.

use std::ffi::OsString;
use std::fmt;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use super::args::Record;
use crate::kernel;
use crate::kernel::Looping;
use crate::output::Destination;
use crate::output::Format;
use crate::presentation::NativeFrames;
use crate::presentation::Presentation;

/// The arguments do not make sense: exit status 2.
#[derive(Debug)]
pub struct UsageError {
    command: &'static str,
    what: String,
}

impl UsageError {
    /// What is wrong with the arguments of that command.
    pub(super) const fn of(command: &'static str, what: String) -> Self {
        Self { command, what }
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { command, what } = self;
        write!(f, "{what} (see `rbprof {command} --help`)")
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

/// Something to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Where to.
    pub destination: Destination,
    /// The format.
    pub format: Format,
}

/// A recording, as it is to be done.
#[derive(Debug)]
pub struct Plan {
    /// What is recorded.
    pub subject: Subject,
    /// For how long; `None` until it ends or is told to stop.
    pub duration: Option<Duration>,
    /// What to write. Empty: one file named after the process.
    pub outputs: Vec<Output>,
    /// Format of the file that is named after the process.
    pub default_format: Format,
    /// File with the layout of every Ruby.
    pub layout: Option<PathBuf>,
    /// Which machine code is shown.
    pub presentation: Presentation,
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
        let Record {
            mut pid,
            program,
            duration,
            frequency,
            output,
            format,
            layout,
            native,
            kernel,
            no_kernel,
            quiet,
            bpf_log,
            no_bpf_loop,
        } = arguments;
        let format = format.map(Format::from);
        let outputs = output
            .into_iter()
            .map(|path| output_of(path, format))
            .collect::<Result<Vec<_>, _>>()?;
        if outputs
            .iter()
            .filter(|output| output.destination == Destination::Stdout)
            .count()
            > 1
        {
            return Err(UsageError::of(
                "record",
                "standard output can take one profile only".into(),
            ));
        }
        let native = NativeFrames::from(native);
        if kernel && native == NativeFrames::None {
            return Err(UsageError::of(
                "record",
                "--kernel asks for frames that --native=none leaves out".into(),
            ));
        }
        pid.sort_unstable();
        pid.dedup();
        let subject = if program.is_empty() {
            Subject::Processes(pid)
        } else {
            Subject::Command(program)
        };
        Ok(Self {
            subject,
            duration: duration.map(Duration::from_secs_f64),
            outputs,
            default_format: format.unwrap_or(Format::Pprof),
            layout,
            presentation: Presentation {
                native,
                kernel: !no_kernel,
            },
            quiet,
            kernel: kernel::Options {
                frequency: u64::from(frequency),
                log: bpf_log,
                looping: if no_bpf_loop {
                    Looping::TailCalls
                } else {
                    Looping::Probe
                },
                ..kernel::Options::default()
            },
        })
    }

    /// What to write for a recording of process `pid`.
    #[must_use]
    pub fn outputs_for(&self, pid: u32) -> Vec<Output> {
        if !self.outputs.is_empty() {
            return self.outputs.clone();
        }
        let format = self.default_format;
        let path = format!("rbprof-{pid}.{}", format.extension());
        vec![Output {
            destination: Destination::File(path.into()),
            format,
        }]
    }
}

fn output_of(path: PathBuf, format: Option<Format>) -> Result<Output, UsageError> {
    let format = format.or_else(|| Format::of_path(&path));
    match Destination::from(path) {
        destination @ Destination::Stdout => {
            let format = format.unwrap_or(Format::Pprof);
            if format == Format::Pprof && std::io::stdout().is_terminal() {
                return Err(UsageError::of(
                    "record",
                    "a pprof profile is not for a terminal: redirect standard output, name a \
                     file with -o, or choose --format folded"
                        .into(),
                ));
            }
            Ok(Output {
                destination,
                format,
            })
        }
        destination @ Destination::File(_) => match format {
            Some(format) => Ok(Output {
                destination,
                format,
            }),
            None => Err(UsageError::of(
                "record",
                format!(
                    "the ending of {destination} tells no format: use .pb.gz, .folded or .svg, or \
                 give --format"
                ),
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::args::Arguments;
    use crate::cli::args::Command;

    fn presentation(arguments: &[&str]) -> Result<Presentation, String> {
        let all = ["rbprof", "record", "--pid", "7"].iter().chain(arguments);
        let parsed = Arguments::try_parse_from(all).map_err(|error| error.to_string())?;
        let Command::Record(record) = parsed.command else {
            panic!("another command");
        };
        let plan = Plan::new(record).map_err(|error| error.to_string())?;
        Ok(plan.presentation)
    }

    #[test]
    fn machine_code_is_shown_as_asked() {
        let shown = |native, kernel| Ok(Presentation { native, kernel });
        assert_eq!(presentation(&[]), Ok(Presentation::default()));
        assert_eq!(
            presentation(&["--native", "all"]),
            shown(NativeFrames::All, true)
        );
        assert_eq!(
            presentation(&["--native=extensions", "--no-kernel"]),
            shown(NativeFrames::Extensions, false)
        );
        // The last word counts.
        assert_eq!(
            presentation(&["--no-kernel", "--kernel"]),
            shown(NativeFrames::Extensions, true)
        );
        assert_eq!(
            presentation(&["--kernel", "--no-kernel", "--native=none"]),
            shown(NativeFrames::None, false)
        );
        assert!(presentation(&["--native=some"]).is_err());
        let error = presentation(&["--native=none", "--kernel"]).unwrap_err();
        assert!(error.starts_with("--kernel asks"), "{error}");
    }
}
