//! Every key of the configuration, once: files, flags, environment variables,
//! help, the example file and the checks are all made of this table.

use super::sinks;

/// What a value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A text.
    Text,
    /// A text that is not shown to anybody.
    Secret,
    /// A number.
    Number,
    /// `true` or `false`.
    Switch,
    /// Texts.
    List,
    /// Names and a text for each: `NAME=TEXT` outside the file.
    Map,
}

/// When a changed value takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// As soon as the configuration is read again (`SIGHUP`).
    Live,
    /// When the agent starts.
    Restart,
}

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name in the file, with the table's in front: `http.listen`.
    pub path: &'static str,
    /// What its value looks like.
    pub form: Form,
    /// The value where nobody gives one, as TOML; empty where there is none.
    pub default: &'static str,
    /// Which values are allowed, in words that follow `allowed: `.
    pub allowed: &'static str,
    /// What it is for: the first sentence says it, the rest explains.
    pub help: &'static str,
    /// When a changed value takes effect.
    pub reload: Reload,
}

impl Key {
    /// The name of the flag, without the hyphens in front: `http-listen`.
    #[must_use]
    pub fn flag(&self) -> String {
        self.path.replace(['.', '_'], "-")
    }

    /// The name of the environment variable: `RBPROF_HTTP_LISTEN`.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("RBPROF_{}", self.path.replace('.', "_").to_uppercase())
    }

    /// The key of this name.
    #[must_use]
    pub fn of(path: &str) -> Option<&'static Self> {
        all().find(|key| key.path == path)
    }
}

/// All keys, those of one table together, those without a table first.
pub fn all() -> impl Iterator<Item = &'static Key> {
    KEYS.iter()
        .chain(&sinks::FILES)
        .chain(&sinks::PYROSCOPE)
        .chain(&sinks::PYROSCOPE_RECEIVER)
        .chain(&sinks::OTLP)
        .chain(&sinks::OTLP_RECEIVER)
}

const RULES: &str = "KIND=VALUE, where KIND is uid (33 or 1000-1999), command, service, unit, \
                     cgroup (regular expressions), container (beginning of an id) or pod (UID)";

const KEYS: [Key; 14] = [
    Key {
        path: "interval",
        form: Form::Text,
        default: "\"60s\"",
        allowed: "1s to 1h",
        help: "How long a profile is.",
        reload: Reload::Live,
    },
    Key {
        path: "frequency",
        form: Form::Number,
        default: "19",
        allowed: "1 to 1000",
        help: "Samples per second and CPU, unless the budget demands less.",
        reload: Reload::Restart,
    },
    Key {
        path: "cpu_budget",
        form: Form::Number,
        default: "1.0",
        allowed: "0.1 to 100",
        help: "How much of one CPU the agent may use, in percent. Beyond that the frequency \
               drops; profiles and metrics say so.",
        reload: Reload::Live,
    },
    Key {
        path: "native",
        form: Form::Text,
        default: "\"extensions\"",
        allowed: "extensions, all or none",
        help: "Which machine code is shown between, under and above Ruby methods.",
        reload: Reload::Restart,
    },
    Key {
        path: "kernel",
        form: Form::Switch,
        default: "true",
        allowed: "true or false",
        help: "Whether frames of the kernel are shown. Not with native = \"none\".",
        reload: Reload::Restart,
    },
    Key {
        path: "include",
        form: Form::List,
        default: "[]",
        allowed: RULES,
        help: "Only processes that one of these rules fits are profiled; all where there are \
               none. Expressions are looked for anywhere, unless they say ^ or $.",
        reload: Reload::Live,
    },
    Key {
        path: "exclude",
        form: Form::List,
        default: "[]",
        allowed: RULES,
        help: "Processes that one of these rules fits are not profiled, whatever include says.",
        reload: Reload::Live,
    },
    Key {
        path: "service",
        form: Form::List,
        default: "[]",
        allowed: "NAME=PATTERN, where PATTERN is a regular expression and NAME may have its \
                  groups as $1",
        help: "Names of services: processes whose command line the pattern fits belong to NAME. \
               The first rule that fits counts; OTEL_SERVICE_NAME in a process's environment \
               comes before all of them.",
        reload: Reload::Live,
    },
    Key {
        path: "http.listen",
        form: Form::List,
        default: "[\"unix:/run/rbprof/http.sock\"]",
        allowed: "unix:/PATH, or ADDRESS:PORT with a loopback address",
        help: "Where HTTP is served; nowhere where there is none. There is no password: \
               whoever may connect sees everything. On a TCP port that is every user of the \
               machine.",
        reload: Reload::Restart,
    },
    Key {
        path: "http.socket_mode",
        form: Form::Text,
        default: "\"0660\"",
        allowed: "0000 to 0777",
        help: "Permissions of Unix sockets, in octal: who may write may connect.",
        reload: Reload::Restart,
    },
    Key {
        path: "http.hosts",
        form: Form::List,
        default: "[]",
        allowed: "names of hosts, without ports",
        help: "What else than localhost and loopback addresses a request over TCP may have as \
               Host. Pages of strangers in a browser have their own there, and are refused.",
        reload: Reload::Restart,
    },
    Key {
        path: "http.max_duration",
        form: Form::Text,
        default: "\"5m\"",
        allowed: "1s to 1h",
        help: "The longest profile that a request may ask for.",
        reload: Reload::Restart,
    },
    Key {
        path: "http.max_connections",
        form: Form::Number,
        default: "32",
        allowed: "1 to 1000",
        help: "Most connections at once; further ones wait.",
        reload: Reload::Restart,
    },
    Key {
        path: "http.recent",
        form: Form::Number,
        default: "16",
        allowed: "0 to 1000",
        help: "Most profiles that are kept in memory for /profiles and /flamegraph.",
        reload: Reload::Restart,
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unambiguous() {
        let paths: BTreeSet<_> = all().map(|key| key.path).collect();
        let flags: BTreeSet<_> = all().map(Key::flag).collect();
        let variables: BTreeSet<_> = all().map(Key::variable).collect();
        let number = all().count();
        assert_eq!(
            (paths.len(), flags.len(), variables.len()),
            (number, number, number)
        );
        let key = Key::of("http.max_duration").unwrap();
        assert_eq!(key.flag(), "http-max-duration");
        assert_eq!(key.variable(), "RBPROF_HTTP_MAX_DURATION");
    }
}
