//! What can be said on the command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Arg;
use clap::ArgAction;
use clap::ArgMatches;
use clap::Args;
use clap::FromArgMatches;
use clap::Parser;
use clap::Subcommand;
use clap::ValueEnum;

use crate::agent::config::Key;
use crate::agent::config::keys::Form;
use crate::agent::config::keys::all as all_keys;
use crate::output::Format;
use crate::presentation::NativeFrames;

/// An out-of-process eBPF profiler for Ruby.
#[derive(Debug, Parser)]
#[command(name = "rbprof", version, about, long_about = None)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Record where a Ruby program spends CPU time.
    ///
    /// Samples the Ruby stacks of a running program, or of a command that is
    /// started for it, with all its threads and forked children. Nothing in the
    /// program is changed or paused. Only time on a CPU is counted: a thread
    /// that waits is not sampled.
    #[command(after_help = "Examples:\n  \
        rbprof record --pid 1234 -d 10\n  \
        rbprof record --pid 1234 -d 10 -o out.svg -o out.pb.gz\n  \
        rbprof record -o - --format folded -- bundle exec rake test > stacks.folded")]
    Record(Record),
    /// Show what rbprof knows of a Ruby, and how; or what this system lets it do.
    ///
    /// The page to look at when a profile lacks something: version and build,
    /// which symbols the build shows, how everything else was found, what would
    /// be missing in a profile, and how to get it. With --system, the page to
    /// look at when rbprof cannot record: the kernel, what rbprof may do, what
    /// forbids the rest. Exit status 0 only if recording is possible.
    #[command(after_help = "Examples:\n  \
        rbprof inspect --pid 1234\n  \
        rbprof inspect /usr/lib/x86_64-linux-gnu/libruby-3.3.so.3.3 --json\n  \
        rbprof inspect --check libruby.so.3.4\n  \
        rbprof inspect --system")]
    Inspect(Inspect),

    /// Write the layout of a Ruby's structures into a file.
    ///
    /// rbprof knows the layout of every release. For a Ruby in development, or
    /// one with patches that move fields, this makes one of the debug
    /// information (DWARF) of that Ruby, for `rbprof record --layout FILE`. With
    /// --version alone, it writes a layout that rbprof has, as a template.
    #[command(after_help = "Examples:\n  \
        rbprof layout --from /opt/ruby-dev/lib/libruby.so.4.1.0 -o ruby-dev.toml\n  \
        rbprof layout --version 3.4")]
    Layout(Layout),

    /// Profile every Ruby on this machine, for as long as it runs.
    ///
    /// Every key of the configuration file is also a flag here, and an
    /// environment variable: http.listen is --http-listen and
    /// RBPROF_HTTP_LISTEN. Flags come before variables, variables before the
    /// file, the file before defaults.
    #[command(after_help = "Examples:\n  \
        rbprof agent --check-config\n  \
        rbprof agent --print-config > /etc/rbprof/agent.toml\n  \
        rbprof agent --print-unit > /etc/systemd/system/rbprof.service")]
    Agent(Agent),
}

/// Arguments of `rbprof agent`.
#[derive(Debug, Args)]
pub struct Agent {
    /// Configuration file; by default $RBPROF_CONFIG, or /etc/rbprof/agent.toml
    /// if that exists.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check the configuration, print it and where each value is from, and end.
    /// Exit status 2 if it is wrong.
    #[arg(long, conflicts_with_all = ["print_config", "print_unit"])]
    pub check_config: bool,

    /// Print a configuration file that documents every key, and end.
    #[arg(long, conflicts_with = "print_unit")]
    pub print_config: bool,

    /// Print the unit for systemd, and end.
    #[arg(long)]
    pub print_unit: bool,

    /// What is configured.
    #[command(flatten)]
    pub settings: Settings,
}

/// The flags of the agent's configuration, made of its table of keys.
#[derive(Debug, Default)]
pub struct Settings(pub Vec<(&'static Key, Vec<String>)>);

impl Args for Settings {
    fn augment_args(command: clap::Command) -> clap::Command {
        all_keys().fold(
            command.next_help_heading("Configuration"),
            |command, key| {
                let argument = Arg::new(key.path)
                    .long(key.flag())
                    .value_name(match key.form {
                        Form::Number => "NUMBER",
                        Form::Switch => "true|false",
                        Form::Map => "NAME=TEXT",
                        Form::Text | Form::Secret | Form::List => "TEXT",
                    })
                    .help(format!("{} Allowed: {}", key.help, key.allowed));
                // Of a key with one value the last one counts.
                command.arg(argument.action(ArgAction::Append).num_args(1))
            },
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(
            all_keys()
                .filter_map(|key| {
                    let given = matches.get_many::<String>(key.path)?;
                    Some((key, given.cloned().collect()))
                })
                .collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Arguments of `rbprof inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// Process to look at; nothing is done to it.
    #[arg(short, long, value_name = "PID", required_unless_present_any = ["file", "check", "system"],
          conflicts_with_all = ["file", "check", "system"],
          value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub pid: Option<u32>,

    /// File to look at: a libruby, or a program that Ruby is linked into.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Check that a file exports the four symbols that profilers need
    /// (ruby_version, ruby_current_ec, rb_vm_exec, ruby_global_symbols), so that
    /// they survive strip: one line for each, and exit status 0 only if all are
    /// there. For tests of packages.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    pub check: Option<PathBuf>,

    /// Look at this system: whether rbprof can record here, what is missing, and
    /// what to do. Needs no privileges, and tells those who have some more.
    #[arg(long, conflicts_with_all = ["file", "check"])]
    pub system: bool,

    /// Print JSON.
    #[arg(long, conflicts_with = "check")]
    pub json: bool,
}

/// Arguments of `rbprof layout`.
#[derive(Debug, Args)]
pub struct Layout {
    /// File with the debug information: libruby.so of a shared build, ruby of a
    /// static one, or the .debug file that was split off it.
    #[arg(long, value_name = "FILE", required_unless_present = "release")]
    pub from: Option<PathBuf>,

    /// Release or series, such as 3.4.5 or 3.4. Needed with --from if the file
    /// does not say which release it is.
    #[arg(id = "release", long = "version", value_name = "VERSION")]
    pub version: Option<String>,

    /// File to write; by default standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `rbprof record`.
#[derive(Debug, Args)]
pub struct Record {
    /// Process to profile; may be given more than once.
    #[arg(short, long, value_name = "PID", required_unless_present = "program", num_args = 1..,
          value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub pid: Vec<u32>,

    /// Command to start and profile, with its arguments.
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "pid", num_args = 1..)]
    pub program: Vec<OsString>,

    /// How long to record, in seconds; by default until Ctrl-C or the end of
    /// the program.
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<f64>,

    /// Samples per second and CPU.
    #[arg(short = 'F', long, value_name = "HZ", default_value_t = 99,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub frequency: u32,

    /// File to write; `-` is standard output; may be given more than once. The
    /// ending decides the format: .pb.gz (pprof), .folded, .svg (flame graph).
    /// By default rbprof-PID.pb.gz.
    #[arg(short, long, value_name = "FILE")]
    pub output: Vec<PathBuf>,

    /// Format of all outputs, whatever their endings.
    #[arg(long, value_enum)]
    pub format: Option<FormatArgument>,

    /// File with the layout of Ruby's structures, for a Ruby that rbprof does
    /// not know; see `rbprof layout`. Used for every Ruby of the recording.
    #[arg(long, value_name = "FILE")]
    pub layout: Option<PathBuf>,

    /// Which machine code to show between, under and above Ruby methods.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "extensions")]
    pub native: NativeArgument,

    /// Show frames of the kernel. This is the default.
    #[arg(long, overrides_with = "no_kernel")]
    pub kernel: bool,

    /// Show no frames of the kernel.
    #[arg(long, overrides_with = "kernel")]
    pub no_kernel: bool,

    /// Print nothing but errors.
    #[arg(short, long)]
    pub quiet: bool,

    /// Show debug messages of the eBPF programs.
    #[arg(long)]
    pub bpf_log: bool,

    /// Walk stacks with tail calls even where the kernel has bpf_loop.
    #[arg(long, hide = true)]
    pub no_bpf_loop: bool,
}

/// The names of the output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArgument {
    /// Gzipped protocol buffers, for `go tool pprof` and many other viewers.
    Pprof,
    /// One line per stack with its count, for flame graph tools.
    Folded,
    /// A flame graph for a browser.
    Svg,
}

impl From<FormatArgument> for Format {
    fn from(argument: FormatArgument) -> Self {
        match argument {
            FormatArgument::Pprof => Self::Pprof,
            FormatArgument::Folded => Self::Folded,
            FormatArgument::Svg => Self::Svg,
        }
    }
}

/// The names of the choices of machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NativeArgument {
    /// C extensions and libraries, but not the interpreter itself; all machine
    /// code of threads that run no Ruby.
    Extensions,
    /// All, the interpreter included.
    All,
    /// None: Ruby methods only.
    None,
}

impl From<NativeArgument> for NativeFrames {
    fn from(argument: NativeArgument) -> Self {
        match argument {
            NativeArgument::Extensions => Self::Extensions,
            NativeArgument::All => Self::All,
            NativeArgument::None => Self::None,
        }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text
        .parse()
        .map_err(|_| "not a number of seconds".to_owned())?;
    if value.is_finite() && value > 0.0 && value <= 1e9 {
        Ok(value)
    } else {
        Err("must be more than 0".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    fn record(arguments: &[&str]) -> Result<Record, clap::Error> {
        let all = ["rbprof", "record"].iter().chain(arguments);
        Arguments::try_parse_from(all).map(|parsed| match parsed.command {
            Command::Record(record) => record,
            _ => panic!("another command"),
        })
    }

    #[test]
    fn a_layout_is_from_a_file_or_of_a_version() {
        let layout = |arguments: &[&str]| {
            let all = ["rbprof", "layout"].iter().chain(arguments);
            Arguments::try_parse_from(all).map(|parsed| match parsed.command {
                Command::Layout(layout) => layout,
                _ => panic!("another command"),
            })
        };
        assert!(layout(&[]).is_err());
        assert_eq!(
            layout(&["--version", "3.4"]).unwrap().version.as_deref(),
            Some("3.4")
        );
        let both = layout(&["--from", "x.debug", "--version", "3.4.5"]).unwrap();
        assert_eq!(both.from, Some(PathBuf::from("x.debug")));
        assert_eq!(both.version.as_deref(), Some("3.4.5"));
    }

    #[test]
    fn one_thing_is_inspected() {
        let inspect = |arguments: &[&str]| {
            let all = ["rbprof", "inspect"].iter().chain(arguments);
            Arguments::try_parse_from(all)
        };
        assert!(inspect(&[]).is_err());
        assert!(inspect(&["--system", "--json"]).is_ok());
        for other in [&["--pid", "7"][..], &["ruby"], &["--check", "ruby"]] {
            assert!(inspect(other).is_ok());
            let both: Vec<&str> = ["--system"].iter().chain(other).copied().collect();
            assert!(inspect(&both).is_err(), "{other:?}");
        }
    }

    #[test]
    fn every_key_of_the_agent_is_a_flag() {
        let agent = |arguments: &[&str]| {
            let all = ["rbprof", "agent"].iter().chain(arguments);
            Arguments::try_parse_from(all).map(|parsed| match parsed.command {
                Command::Agent(agent) => agent,
                _ => panic!("another command"),
            })
        };
        for key in all_keys() {
            let flag = format!("--{}", key.flag());
            let given = agent(&[&flag, "x", &flag, "-y"]);
            // What begins with a hyphen takes a `=`.
            assert!(given.is_err(), "{flag}");
            let again = format!("{flag}=-y");
            let given = agent(&[&flag, "x", &again]).unwrap().settings.0;
            assert_eq!(given.len(), 1, "{flag}");
            assert_eq!(
                (given[0].0.path, &given[0].1[..]),
                (key.path, &["x".to_owned(), "-y".to_owned()][..])
            );
        }
        assert!(agent(&["--check-config", "--print-unit"]).is_err());
        assert!(agent(&["--intervall", "1s"]).is_err());
    }

    #[test]
    fn a_process_or_a_command_is_wanted_not_both() {
        assert!(record(&[]).is_err());
        assert_eq!(record(&["--pid", "7"]).unwrap().pid, [7]);
        assert_eq!(
            record(&["--", "ruby", "-v"]).unwrap().program,
            ["ruby", "-v"]
        );
        assert!(record(&["--pid", "7", "--", "ruby"]).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            ["--pid", "0"],
            ["--pid", "x"],
            ["-d", "0"],
            ["-d", "-1"],
            ["-d", "nan"],
            ["-F", "0"],
        ] {
            let mut arguments = vec!["--pid", "7"];
            arguments.extend(bad);
            assert!(record(&arguments).is_err(), "{bad:?}");
        }
    }
}
