//! What can be configured, and from where.
//!
//! | module | what it does |
//! |---|---|
//! | [`keys`] | the table of all keys |
//! | [`settings`] | their values, and where each is from: flag, environment, file, default |
//! | `sinks` | the keys of the sinks |
//! | [`error`] | what is wrong, and where |
//! | [`example()`] | the example file |
//!
//! [`Config`] is the same as types, checked.
//!
//! On `SIGHUP` the file is read again, with the flags and the environment that
//! the agent was started with. A configuration with an error changes nothing.
//! [`Settings::changes`] tells what is different: keys with [`Reload::Live`] take
//! effect at once, of the others the agent says that they wait for a restart.

pub mod error;
mod example;
pub mod keys;
pub mod settings;
mod sinks;

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use toml::Value;

pub use self::error::ConfigError;
pub use self::error::Origin;
pub use self::error::Problem;
pub use self::example::example;
pub use self::keys::Key;
pub use self::keys::Reload;
pub use self::settings::Given;
pub use self::settings::Settings;
use super::http::HttpConfig;
use super::http::Listen;
use super::identity::ServiceRule;
use super::select::Rule;
use super::select::Selection;
use super::sinks::config::SinksConfig;
use crate::presentation::NativeFrames;
use crate::presentation::Presentation;

/// The file that is read where none is named, if there is one.
pub const DEFAULT_FILE: &str = "/etc/rbprof/agent.toml";
/// Most rules in a list, and most of any other list.
const MAX_ITEMS: usize = 256;

/// What the agent is to do.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long a profile is.
    pub interval: Duration,
    /// Samples per second and CPU.
    pub frequency: u32,
    /// How much of one CPU the agent may use, 1 for all of it.
    pub cpu_budget: f64,
    /// Which machine code is shown.
    pub presentation: Presentation,
    /// Which processes are profiled.
    pub selection: Selection,
    /// How services are named.
    pub services: Vec<ServiceRule>,
    /// What is served.
    pub http: HttpConfig,
    /// Where profiles go.
    pub sinks: SinksConfig,
    /// The values that all of this was read from.
    pub settings: Settings,
}

impl Config {
    /// Reads and checks a configuration: [`Settings::read`] and [`Config::new`].
    ///
    /// # Errors
    /// [`ConfigError`] says everything that is wrong.
    pub fn read(file: Option<&Path>, given: &Given) -> Result<Self, ConfigError> {
        Self::new(Settings::read(file, given)?)
    }

    /// Checks a configuration.
    ///
    /// # Errors
    /// [`ConfigError`] says everything that is wrong.
    pub fn new(settings: Settings) -> Result<Self, ConfigError> {
        let mut reader = Reader {
            settings: &settings,
            problems: Vec::new(),
            #[cfg(test)]
            read: Vec::new(),
        };
        let config = reader.config();
        let problems = reader.problems;
        match config {
            Some(config) if problems.is_empty() => Ok(config.into_config(settings)),
            _ => Err(ConfigError { problems }),
        }
    }
}

/// A [`Config`] in the making.
struct Parts {
    interval: Duration,
    frequency: u32,
    cpu_budget: f64,
    presentation: Presentation,
    selection: Selection,
    services: Vec<ServiceRule>,
    http: HttpConfig,
    sinks: SinksConfig,
}

impl Parts {
    fn into_config(self, settings: Settings) -> Config {
        let Self {
            interval,
            frequency,
            cpu_budget,
            presentation,
            selection,
            services,
            http,
            sinks,
        } = self;
        Config {
            interval,
            frequency,
            cpu_budget,
            presentation,
            selection,
            services,
            http,
            sinks,
            settings,
        }
    }
}

/// Makes types of values, and collects what is wrong with them.
struct Reader<'a> {
    settings: &'a Settings,
    problems: Vec<Problem>,
    #[cfg(test)]
    read: Vec<&'static str>,
}

impl Reader<'_> {
    fn config(&mut self) -> Option<Parts> {
        // Each is read before any is missed, so that all problems are found.
        let interval = self.get("interval", |value| duration(value, 1..=3600));
        let frequency = self.get("frequency", |value| whole(value, 1..=1000));
        let cpu_budget = self.get("cpu_budget", percent);
        let native = self.get("native", native);
        let kernel = self.get("kernel", |value| {
            value.as_bool().ok_or_else(|| wrong_type(value))
        });
        let include = self.list("include", |text| {
            Rule::parse(text).map_err(|error| error.to_string())
        });
        let exclude = self.list("exclude", |text| {
            Rule::parse(text).map_err(|error| error.to_string())
        });
        let services = self.list("service", |text| {
            ServiceRule::parse(text).map_err(|error| error.to_string())
        });
        let http = self.http();
        let sinks = match sinks::read(self.settings) {
            Ok(sinks) => Some(sinks),
            Err(problems) => {
                self.problems.extend(problems);
                None
            }
        };
        let presentation = Presentation {
            native: native?,
            kernel: kernel?,
        };
        if presentation.native == NativeFrames::None
            && presentation.kernel
            && *self.settings.origin("kernel") != Origin::Default
        {
            self.fail(
                "kernel",
                "true does not go with native = \"none\"".to_owned(),
            );
        }
        Some(Parts {
            interval: interval?,
            frequency: frequency?,
            cpu_budget: cpu_budget?,
            presentation,
            selection: Selection {
                include: include?,
                exclude: exclude?,
            },
            services: services?,
            http: http?,
            sinks: sinks?,
        })
    }

    fn http(&mut self) -> Option<HttpConfig> {
        let listen = self.list("http.listen", Listen::parse);
        let socket_mode = self.get("http.socket_mode", |value| {
            let text = value.as_str().ok_or_else(|| wrong_type(value))?;
            let mode = u32::from_str_radix(text, 8).ok();
            mode.filter(|&mode| mode <= 0o777)
                .ok_or_else(|| "these are no permissions in octal".to_owned())
        });
        let hosts = self.list("http.hosts", |text| {
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            if text.chars().all(is_name) {
                Ok(text.to_ascii_lowercase())
            } else {
                Err("this is no name of a host".to_owned())
            }
        });
        let max_duration = self.get("http.max_duration", |value| duration(value, 1..=3600));
        let max_connections = self.get("http.max_connections", |value| whole(value, 1..=1000));
        let recent = self.get("http.recent", |value| whole(value, 0..=1000));
        Some(HttpConfig {
            listen: listen?,
            socket_mode: socket_mode?,
            hosts: hosts?,
            max_duration: max_duration?,
            max_connections: usize::try_from(max_connections?).ok()?,
            recent: usize::try_from(recent?).ok()?,
        })
    }

    fn get<T>(
        &mut self,
        path: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Option<T> {
        #[cfg(test)]
        self.read.push(path);
        let read = match self.settings.value(path) {
            Some(value) => {
                read(value).map_err(|what| format!("{}: {what}", settings::shown(value)))
            }
            None => Err("it has no value".to_owned()),
        };
        read.map_err(|what| self.fail(path, what)).ok()
    }

    fn list<T>(
        &mut self,
        path: &'static str,
        mut read: impl FnMut(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        #[cfg(test)]
        self.read.push(path);
        let items = self.settings.value(path).and_then(Value::as_array)?;
        if items.len() > MAX_ITEMS {
            self.fail(path, format!("more than {MAX_ITEMS} items"));
            return None;
        }
        let mut list = Vec::new();
        for item in items {
            let found = item
                .as_str()
                .ok_or_else(|| wrong_type(item))
                .and_then(&mut read);
            match found {
                Ok(found) => list.push(found),
                Err(what) => self.fail(path, format!("{}: {what}", settings::shown(item))),
            }
        }
        Some(list)
    }

    fn fail(&mut self, path: &str, what: String) {
        self.problems.push(Problem {
            origin: Some(self.settings.origin(path).clone()),
            key: Some(path.to_owned()),
            what,
            allowed: Key::of(path).map(|key| key.allowed.to_owned()),
        });
    }
}

fn wrong_type(value: &Value) -> String {
    format!("{} is not what is expected here", value.type_str())
}

/// A duration of so many seconds.
fn duration(value: &Value, seconds: RangeInclusive<u64>) -> Result<Duration, String> {
    let text = value.as_str().ok_or_else(|| wrong_type(value))?;
    let duration = humantime::parse_duration(text).map_err(|_| {
        "this is no duration: write a number and a unit, such as 500ms, 60s or 5m".to_owned()
    })?;
    let (least, most) = seconds.into_inner();
    if duration < Duration::from_secs(least) || duration > Duration::from_secs(most) {
        return Err("too short or too long".to_owned());
    }
    Ok(duration)
}

fn whole(value: &Value, range: RangeInclusive<u32>) -> Result<u32, String> {
    let number = value
        .as_integer()
        .ok_or_else(|| "not a whole number".to_owned())?;
    u32::try_from(number)
        .ok()
        .filter(|number| range.contains(number))
        .ok_or_else(|| "too small or too large".to_owned())
}

/// A share of one, from percent.
fn percent(value: &Value) -> Result<f64, String> {
    let number = match value {
        Value::Float(number) => *number,
        #[expect(clippy::cast_precision_loss, reason = "it is at most 100")]
        Value::Integer(number) => *number as f64,
        _ => return Err("not a number".to_owned()),
    };
    if (0.1..=100.0).contains(&number) {
        Ok(number / 100.0)
    } else {
        Err("too small or too large".to_owned())
    }
}

fn native(value: &Value) -> Result<NativeFrames, String> {
    match value.as_str() {
        Some("extensions") => Ok(NativeFrames::Extensions),
        Some("all") => Ok(NativeFrames::All),
        Some("none") => Ok(NativeFrames::None),
        _ => Err("there is no such choice".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::agent::sinks::config::FilesConfig;
    use crate::agent::sinks::config::OtlpConfig;
    use crate::agent::sinks::config::PyroscopeConfig;

    fn given(flags: &[(&str, &[&str])], variables: &[(&str, &str)]) -> Given {
        let text = |text: &&str| (*text).to_owned();
        Given {
            flags: flags
                .iter()
                .map(|(path, texts)| (Key::of(path).unwrap(), texts.iter().map(text).collect()))
                .collect(),
            variables: variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    /// A file for as long as the folder is there.
    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    fn read(text: &str) -> Result<Config, ConfigError> {
        let (_folder, path) = file(text);
        Config::read(Some(&path), &Given::default())
    }

    #[test]
    fn defaults_are_valid_and_every_key_is_read() {
        let settings = Settings::read(None, &Given::default()).unwrap();
        let mut reader = Reader {
            settings: &settings,
            problems: Vec::new(),
            read: Vec::new(),
        };
        assert!(reader.config().is_some());
        assert_eq!(reader.problems, []);
        for key in keys::all() {
            let is_read = reader.read.contains(&key.path)
                || sinks::TABLES.contains(&key.path.split('.').next().unwrap());
            assert!(is_read, "{} is not used", key.path);
        }
        let config = Config::new(settings).unwrap();
        assert_eq!(config.interval, Duration::from_secs(60));
        assert_eq!(config.frequency, 19);
        assert!((config.cpu_budget - 0.01).abs() < 1e-9);
        assert_eq!(
            config.http.listen,
            [Listen::Unix("/run/rbprof/http.sock".into())]
        );
    }

    #[test]
    fn the_example_has_every_key_and_the_defaults() {
        let example = example();
        // As it is, it says nothing.
        let config = read(&example).unwrap();
        for key in keys::all() {
            assert_eq!(*config.settings.origin(key.path), Origin::Default);
        }
        // Without the `#` before each key that has one, it says the defaults; and
        // of the sinks what they cannot do without.
        let needed = ["files.directory", "pyroscope.url", "otlp.url"];
        let mut table = "";
        let mut found = 0;
        let set: String = example
            .lines()
            .map(|line| {
                if let Some(name) = line.strip_prefix('[') {
                    table = name.strip_suffix(']').unwrap();
                }
                match line.strip_prefix('#') {
                    Some(rest) if !rest.starts_with(' ') && !rest.is_empty() => {
                        let name = rest.split(" =").next().unwrap();
                        let path = format!("{table}.{name}");
                        let key = Key::of(path.trim_start_matches('.')).unwrap();
                        found += 1;
                        if key.default.is_empty() && !needed.contains(&key.path) {
                            format!("{line}\n")
                        } else {
                            format!("{rest}\n")
                        }
                    }
                    _ => format!("{line}\n"),
                }
            })
            .collect();
        assert_eq!(found, keys::all().count());
        let config = read(&set).unwrap();
        let defaults = Settings::read(None, &Given::default()).unwrap();
        // What is said here of the sinks' defaults is what they are.
        let sinks = SinksConfig {
            files: Some(FilesConfig::new("/var/lib/rbprof/profiles".into())),
            pyroscope: Some(PyroscopeConfig::new("http://localhost:4040".to_owned())),
            otlp: Some(OtlpConfig::new("http://localhost:4318".to_owned())),
        };
        assert_eq!(config.sinks, sinks);
        for key in keys::all().filter(|key| !key.default.is_empty()) {
            let origin = config.settings.origin(key.path);
            assert!(matches!(origin, Origin::File { .. }), "{}", key.path);
            assert_eq!(config.settings.value(key.path), defaults.value(key.path));
        }
    }

    #[test]
    fn the_file_in_the_documentation_is_the_example() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/agent.toml");
        assert_eq!(
            std::fs::read_to_string(path).unwrap(),
            example(),
            "write it with `rbprof agent --print-config > docs/agent.toml`"
        );
    }

    #[test]
    fn flags_come_first_then_variables_then_the_file() {
        let (_folder, path) = file(
            "interval = \"10s\"\nfrequency = 20\ncpu_budget = 2\n[http]\nlisten = [\"127.0.0.1:1\"]\n",
        );
        let given = given(
            &[
                ("interval", &["30s", "40s"]),
                ("include", &["uid=1", "uid=2"]),
            ],
            &[
                ("RBPROF_INTERVAL", "20s"),
                ("RBPROF_FREQUENCY", "21"),
                ("RBPROF_CPU_BUDGET", ""),
                ("RBPROF_EXCLUDE", "[\"uid=3\", 'command=a,b']"),
                ("RBPROF_SERVICE", "shop=x[1],y"),
                ("RBPROF_CONFIG", "/x"),
                ("RBPROF_INTERVALL", "1s"),
            ],
        );
        let config = Config::read(Some(&path), &given).unwrap();
        assert_eq!(config.interval, Duration::from_secs(40));
        assert_eq!(config.frequency, 21);
        assert!((config.cpu_budget - 0.02).abs() < 1e-9);
        assert_eq!(config.selection.include.len(), 2);
        assert_eq!(config.selection.exclude.len(), 2);
        assert_eq!(config.services.len(), 1);
        let origin = |path| config.settings.origin(path).to_string();
        assert_eq!(origin("interval"), "--interval");
        assert_eq!(origin("frequency"), "RBPROF_FREQUENCY");
        assert_eq!(origin("http.listen"), format!("{}:5", path.display()));
        assert_eq!(origin("native"), "default");
        assert_eq!(
            config.settings.warnings,
            ["the environment has RBPROF_INTERVALL, which means nothing"]
        );
        let shown = config.settings.to_string();
        for line in [
            "interval = \"40s\"                                 # --interval",
            "include = [\"uid=1\", \"uid=2\"]                     # --include",
            "cpu_budget = 2 ",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        // What is shown is a file with the same meaning.
        let again = read(&shown).unwrap();
        assert!(config.settings.changes(&again.settings).is_empty());
    }

    #[test]
    fn tables_are_handed_on_for_serde() {
        let (_folder, path) = file("interval = \"10s\"\n[http]\nrecent = 3\n");
        let given = given(&[("http.hosts", &["a"])], &[]);
        let settings = Settings::read(Some(&path), &given).unwrap();
        assert!(settings.tables(&["files"]).is_empty());
        let expected: toml::Table = toml::from_str("[http]\nrecent = 3\nhosts = [\"a\"]").unwrap();
        assert_eq!(settings.tables(&["http"]), expected);
    }

    #[test]
    fn an_empty_flag_empties_a_list() {
        let (_folder, path) = file("include = [\"uid=1\"]");
        let given = given(&[("include", &[""])], &[]);
        let config = Config::read(Some(&path), &given).unwrap();
        assert!(config.selection.include.is_empty());
    }

    #[test]
    fn errors_say_where_what_and_what_is_allowed() {
        let (_folder, path) = file(
            "interval = \"x\"\n\nintervall = 1\nfrequency = \"19\"\n\
             native = \"some\"\n[http]\nlisten = [\"0.0.0.0:80\"]\nport = 1\n[htt]\n",
        );
        let error = Settings::read(Some(&path), &Given::default()).unwrap_err();
        let lines: Vec<_> = error.problems.iter().map(Problem::to_string).collect();
        let at = |line| format!("{}:{line}: ", path.display());
        for start in [
            format!(
                "{}intervall: there is no such key; allowed: interval, frequency,",
                at(3)
            ),
            format!(
                "{}frequency: this must be a number; allowed: 1 to 1000",
                at(4)
            ),
            format!("{}http.port: there is no such key; allowed: listen,", at(8)),
            format!("{}htt: there is no such key", at(9)),
        ] {
            assert!(
                lines.iter().any(|line| line.starts_with(&start)),
                "{start}: {lines:?}"
            );
        }
        assert_eq!(lines.len(), 4, "{lines:?}");

        let error = read("interval = \"x\"\nnative = \"some\"\nhttp.listen = [\"0.0.0.0:80\"]\n");
        let error = error.unwrap_err();
        let keys: Vec<_> = error
            .problems
            .iter()
            .filter_map(|it| it.key.as_deref())
            .collect();
        assert_eq!(keys, ["interval", "native", "http.listen"]);
        let text = error.problems[2].to_string();
        assert!(text.contains(":3: http.listen: \"0.0.0.0:80\": "), "{text}");

        let error = read("interval = \n").unwrap_err().to_string();
        assert!(error.contains("agent.toml:1: "), "{error}");
        let error = Config::read(Some(Path::new("/nonexistent")), &Given::default());
        assert!(error.unwrap_err().to_string().starts_with("/nonexistent: "));
    }

    #[test]
    fn errors_of_the_sinks_say_where_too() {
        let lines = |text: &str| -> Vec<String> {
            let error = read(text).unwrap_err();
            error.problems.iter().map(Problem::to_string).collect()
        };
        let found = lines(
            "[files]\ndirectory = \"/d\"\nmax_age = \"x\"\nfsync = \"no\"\n\
             [otlp]\nurl = \"http://x\"\nqueue.memory = \"1\"\n",
        );
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found
                .iter()
                .any(|line| line.contains("agent.toml:3: files.max_age: "))
        );
        assert!(
            found
                .iter()
                .any(|line| line.contains("agent.toml:4: files.fsync: "))
        );
        let found = lines("[otlp]\nurl = \"http://x\"\nqueue.memory = \"1\"\n");
        assert!(
            found[0].contains("agent.toml:3: otlp.queue.memory: it must be 64KiB"),
            "{found:?}"
        );
        let found = lines("[otlp]\nurl = \"http://x\"\nauth.user = \"u\"\n");
        assert!(
            found[0].contains("agent.toml:3: otlp.auth: give user"),
            "{found:?}"
        );
        let found = lines("[otlp]\ncompression = \"none\"\n");
        assert!(found[0].contains("missing field `url`"), "{found:?}");
        // A password is not shown.
        let secret =
            read("[otlp]\nurl = \"http://x\"\nauth = { user = \"u\", password = \"hunter2\" }\n");
        let shown = format!(
            "{:?}",
            secret.as_ref().map(|config| config.settings.to_string())
        );
        assert!(!shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for text in [
            "interval = \"0s\"",
            "interval = \"2h\"",
            "interval = \"60\"",
            "frequency = 0",
            "frequency = 1001",
            "frequency = 1.5",
            "frequency = -1",
            "cpu_budget = 0.01",
            "cpu_budget = nan",
            "cpu_budget = 101",
            "native = \"none\"\nkernel = true",
            "include = [\"x=1\"]",
            "service = [\"shop\"]",
            "http.socket_mode = \"888\"",
            "http.socket_mode = \"7777\"",
            "http.hosts = [\"a:1\"]",
            "http.max_duration = \"1d\"",
            "http.max_connections = 0",
            "http.listen = [\"unix:relative\"]",
            "http.listen = [\"10.0.0.1:80\"]",
            "http.listen = [\"localhost\"]",
            "http.listen = \"127.0.0.1:80\"",
            "http = 1",
            "interval.x = 1",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(read("native = \"none\"").is_ok());
        let bad = given(&[("kernel", &["maybe"])], &[("RBPROF_FREQUENCY", "fast")]);
        assert_eq!(Config::read(None, &bad).unwrap_err().problems.len(), 2);
    }

    #[test]
    fn a_reload_tells_what_waits_for_a_restart() {
        let old = read("interval = \"10s\"\nfrequency = 20").unwrap();
        let new = read("interval = \"20s\"\nfrequency = 21").unwrap();
        assert_eq!(
            old.settings.changes(&new.settings),
            [("interval", Reload::Live), ("frequency", Reload::Restart)]
        );
    }
}
