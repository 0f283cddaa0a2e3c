//! The keys of the sinks, and how they are read.
//!
//! What they mean, and their defaults, is the sinks' own matter
//! ([`SinksConfig`]); here is what a user is told of them.

use toml::Table;
use toml::Value;

use super::error::Problem;
use super::keys::Form;
use super::keys::Key;
use super::keys::Reload;
use super::settings::Settings;
use crate::agent::sinks::config::SinksConfig;

/// Their tables.
pub(super) const TABLES: [&str; 3] = ["files", "pyroscope", "otlp"];

const SIZE: &str = "64KiB or more, such as 64MiB or 1GiB";
const DURATION: &str = "a number and a unit, such as 10s or 2m";
const PER: &str = "process or service";
const PATH: &str = "an absolute path";

const fn key(
    path: &'static str,
    form: Form,
    default: &'static str,
    allowed: &'static str,
    help: &'static str,
) -> Key {
    Key {
        path,
        form,
        default,
        allowed,
        help,
        reload: Reload::Restart,
    }
}

/// The keys that every receiver has, of table `$table`.
macro_rules! receiver {
    ($table:literal) => {
        [
            key(
                concat!($table, ".headers"),
                Form::Map,
                "{}",
                "headers and their values",
                "Further headers of each request.",
            ),
            key(
                concat!($table, ".ca_file"),
                Form::Text,
                "",
                PATH,
                "Certificates (PEM) of authorities to trust besides the system's.",
            ),
            key(
                concat!($table, ".auth.user"),
                Form::Text,
                "",
                "a name without a colon",
                "The user, for HTTP's basic authentication, with password or password_file.",
            ),
            key(
                concat!($table, ".auth.password"),
                Form::Secret,
                "",
                "a text",
                "The user's password. Rather name a file: others may read this one, and flags.",
            ),
            key(
                concat!($table, ".auth.password_file"),
                Form::Text,
                "",
                "a path",
                "A file with the user's password, read for each request.",
            ),
            key(
                concat!($table, ".auth.bearer_token"),
                Form::Secret,
                "",
                "a text",
                "A bearer token, in place of a user. Rather name a file.",
            ),
            key(
                concat!($table, ".auth.bearer_token_file"),
                Form::Text,
                "",
                "a path",
                "A file with a bearer token, read for each request.",
            ),
            key(
                concat!($table, ".queue.pending"),
                Form::Text,
                "\"64MiB\"",
                SIZE,
                "How much may wait in memory to be encoded (estimated).",
            ),
            key(
                concat!($table, ".queue.memory"),
                Form::Text,
                "\"16MiB\"",
                SIZE,
                "How much may wait in memory to be sent. A larger profile is dropped.",
            ),
            key(
                concat!($table, ".queue.spill_directory"),
                Form::Text,
                "",
                PATH,
                "Where what cannot be sent is kept. Without it, what does not fit in memory is \
                 dropped, the oldest first, and a restart drops all.",
            ),
            key(
                concat!($table, ".queue.spill_size"),
                Form::Text,
                "\"256MiB\"",
                SIZE,
                "How much may be kept there; beyond it the oldest is dropped.",
            ),
            key(
                concat!($table, ".queue.timeout"),
                Form::Text,
                "\"10s\"",
                DURATION,
                "How long a request may take, connection and answer included.",
            ),
            key(
                concat!($table, ".queue.first_retry"),
                Form::Text,
                "\"1s\"",
                DURATION,
                "The longest wait after a first failure; each further one doubles it. How long \
                 it is, up to this, is random.",
            ),
            key(
                concat!($table, ".queue.max_retry"),
                Form::Text,
                "\"2m\"",
                "not shorter than first_retry",
                "The longest wait after many failures.",
            ),
        ]
    };
}

pub(super) const FILES: [Key; 6] = [
    key(
        "files.directory",
        Form::Text,
        "",
        PATH,
        "Where profiles are written, as SERVICE/TIME-PID.pb.gz; without it, none are. It belongs \
         to one agent.",
    ),
    key(
        "files.per",
        Form::Text,
        "\"process\"",
        PER,
        "What a file is of.",
    ),
    key(
        "files.fsync",
        Form::Text,
        "\"file\"",
        "none, file or file-and-directory",
        "What is forced onto the disk before a file has its name: what survives a crash of the \
         machine.",
    ),
    key(
        "files.max_age",
        Form::Text,
        "\"7d\"",
        "1s or longer, such as 12h or 7d",
        "Older files are removed.",
    ),
    key(
        "files.max_size",
        Form::Text,
        "\"1GiB\"",
        SIZE,
        "Beyond this size on the disk, the oldest files are removed.",
    ),
    key(
        "files.pending",
        Form::Text,
        "\"64MiB\"",
        SIZE,
        "How much may wait in memory for a slow or full disk (estimated).",
    ),
];

pub(super) const PYROSCOPE: [Key; 6] = [
    key(
        "pyroscope.url",
        Form::Text,
        "",
        "http:// or https://, a host, and maybe a path",
        "A Grafana Pyroscope to push profiles to; without it, none is. /ingest is added.",
    ),
    key(
        "pyroscope.per",
        Form::Text,
        "\"process\"",
        PER,
        "What a profile is of.",
    ),
    key(
        "pyroscope.tenant",
        Form::Text,
        "",
        "a text",
        "The tenant, for X-Scope-OrgID.",
    ),
    key(
        "pyroscope.labels",
        Form::Map,
        "{}",
        "labels and their values",
        "Labels for all series. hostname is there unless it is given here.",
    ),
    key(
        "pyroscope.process_labels",
        Form::List,
        "[\"ruby_version\", \"container_id\", \"pod_uid\", \"systemd_unit\"]",
        "pid, ruby_version, container_id, pod_uid, systemd_unit",
        "What of a process becomes a label. Each new value makes a new series.",
    ),
    key(
        "pyroscope.thread_labels",
        Form::Switch,
        "false",
        "true or false",
        "Whether samples keep the names of their threads, each of which makes a series.",
    ),
];

pub(super) const PYROSCOPE_RECEIVER: [Key; 14] = receiver!("pyroscope");

pub(super) const OTLP: [Key; 4] = [
    key(
        "otlp.url",
        Form::Text,
        "",
        "http:// or https://, a host, and maybe a path",
        "An OpenTelemetry collector to push profiles to; without it, none is. \
         /v1development/profiles is added.",
    ),
    key(
        "otlp.per",
        Form::Text,
        "\"process\"",
        PER,
        "What a profile is of.",
    ),
    key(
        "otlp.attributes",
        Form::Map,
        "{}",
        "attributes and their values",
        "Attributes for all resources. host.name is there unless it is given here.",
    ),
    key(
        "otlp.compression",
        Form::Text,
        "\"gzip\"",
        "gzip or none",
        "How requests are compressed.",
    ),
];

pub(super) const OTLP_RECEIVER: [Key; 14] = receiver!("otlp");

/// Reads them. All problems are said at once, as far as they can be told apart.
pub(super) fn read(settings: &Settings) -> Result<SinksConfig, Vec<Problem>> {
    let given = settings.tables(&TABLES);
    match Value::Table(given.clone()).try_into::<SinksConfig>() {
        Ok(config) => match config.validate() {
            Ok(()) => Ok(config),
            Err(invalid) => Err(vec![problem(settings, &invalid.key, invalid.why)]),
        },
        Err(error) => {
            let mut problems = wrong_alone(settings, &given);
            if problems.is_empty() {
                // Such as a table without what it cannot do without.
                problems.push(Problem {
                    origin: None,
                    key: None,
                    what: error.to_string().trim().replace('\n', " "),
                    allowed: None,
                });
            }
            Err(problems)
        }
    }
}

/// The values that are wrong in themselves.
fn wrong_alone(settings: &Settings, given: &Table) -> Vec<Problem> {
    let mut problems = Vec::new();
    for key in super::keys::all() {
        let table = key.path.split('.').next().unwrap_or_default();
        let (true, Some(value)) = (given.contains_key(table), settings.given(key.path)) else {
            continue;
        };
        // With what its table cannot do without, and nothing else.
        let mut alone = Table::new();
        let needed = if table == "files" { "directory" } else { "url" };
        super::settings::insert(&mut alone, &format!("{table}.{needed}"), Value::from("/"));
        super::settings::insert(&mut alone, key.path, value.clone());
        if let Err(error) = Value::Table(alone).try_into::<SinksConfig>() {
            let what = error.message().to_owned();
            problems.push(problem(settings, key.path, what));
        }
    }
    problems
}

/// What is wrong with a key, or with something in it.
fn problem(settings: &Settings, path: &str, what: String) -> Problem {
    let key = super::keys::all()
        .filter(|key| {
            path.strip_prefix(key.path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                // Of a whole table, such as `otlp.auth`: its first key that was given.
                || key.path.starts_with(&format!("{path}.")) && settings.given(key.path).is_some()
        })
        .max_by_key(|key| settings.given(key.path).is_some());
    Problem {
        origin: key.map(|key| settings.origin(key.path).clone()),
        key: Some(path.to_owned()),
        what,
        allowed: key.map(|key| key.allowed.to_owned()),
    }
}
