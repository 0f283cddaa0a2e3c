//! `rbprof agent`.

use std::io::Write as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use super::args::Agent;
use super::plan::UsageError;
use crate::agent;
use crate::agent::config;
use crate::agent::config::Config;
use crate::agent::config::Given;
use crate::agent::systemd;

/// The variable that names the file, where no flag does.
const FILE_VARIABLE: &str = "RBPROF_CONFIG";

/// Does what the arguments ask for.
pub(super) fn run(arguments: Agent) -> anyhow::Result<ExitCode> {
    let Agent {
        config,
        check_config,
        print_config,
        print_unit,
        settings,
    } = arguments;
    if print_unit {
        let program = std::env::current_exe().context("finding the own program")?;
        return print(&systemd::unit(&program));
    }
    if print_config {
        return print(&config::example());
    }
    let file = file(config);
    let given = Given::with_environment(settings.0);
    let config = match Config::read(file.as_deref(), &given) {
        Ok(config) => config,
        Err(error) if check_config => {
            for problem in &error.problems {
                let text = problem.to_string();
                say(&format!("{}\n", crate::output::plain(&text)));
            }
            return Ok(ExitCode::from(2));
        }
        // The unit does not start it again after this status.
        Err(error) => return Err(UsageError::of("agent", error.to_string()).into()),
    };
    for warning in &config.settings.warnings {
        say(&format!("rbprof: {}\n", crate::output::plain(warning)));
    }
    if check_config {
        return print(&config.settings.to_string());
    }
    let reread = Box::new(move || Config::read(file.as_deref(), &given));
    agent::run::run(config, reread)
}

/// The file to read: the one that is named, or the usual one if it exists.
fn file(named: Option<PathBuf>) -> Option<PathBuf> {
    let by_variable = || {
        std::env::var_os(FILE_VARIABLE)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    };
    named.or_else(by_variable).or_else(|| {
        let usual = Path::new(config::DEFAULT_FILE);
        // One that may not be read is an error, and not nothing.
        usual.symlink_metadata().is_ok().then(|| usual.to_owned())
    })
}

fn print(text: &str) -> anyhow::Result<ExitCode> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        written => written
            .context("writing to standard output")
            .map(|()| ExitCode::SUCCESS),
    }
}

fn say(text: &str) {
    // Nobody may be listening.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}
