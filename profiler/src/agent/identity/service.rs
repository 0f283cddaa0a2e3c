//! Which service a process belongs to.
//!
//! In this order: `OTEL_SERVICE_NAME` of its environment, or `service.name` in
//! `OTEL_RESOURCE_ATTRIBUTES`; the first rule that fits; its systemd service;
//! its command.
//!
//! A title that is longer than the command line was overwrites the environment
//! in `/proc`: of most Puma workers nothing is left there. Then the environment
//! is looked for in what was known earlier, and in the processes that it was
//! started by, as far as these are in the same control group.

use std::fmt;
use std::sync::Arc;

use regex_lite::Regex;
use regex_lite::RegexBuilder;

use super::Identity;
use super::MAX_SERVICE;
use super::read_start;
use super::safe;
use super::words::CommandLine;
use crate::memory::PinnedProcess;

/// Most bytes read of `/proc/PID/environ`.
const MAX_ENVIRONMENT: u64 = 1 << 20;
/// Most ancestors whose environment is read in place of an overwritten one.
const MAX_ANCESTORS: usize = 4;
/// Most bytes that a compiled pattern may take.
pub(in crate::agent) const MAX_PATTERN: usize = 1 << 20;
/// The name of a service that has no other.
const UNKNOWN: &str = "unknown";

/// A rule that names services: processes whose command line the pattern fits
/// belong to the service.
#[derive(Clone, Debug)]
pub struct ServiceRule {
    pattern: Regex,
    /// The name, in which `$1` and `${name}` stand for the pattern's groups.
    name: String,
}

/// Why a rule makes no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRuleError(String);

impl fmt::Display for ServiceRuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServiceRuleError {}

impl ServiceRule {
    /// Reads `NAME=PATTERN`: a regular expression that is looked for in command
    /// lines, and the service's name, in which `$1` stands for the first group.
    ///
    /// # Errors
    /// When there is no name, or the pattern is not a regular expression.
    pub fn parse(text: &str) -> Result<Self, ServiceRuleError> {
        let (name, pattern) = text
            .split_once('=')
            .ok_or_else(|| ServiceRuleError("no `=` between name and pattern".to_owned()))?;
        let name = name.trim();
        if name.is_empty() {
            return Err(ServiceRuleError("no name before `=`".to_owned()));
        }
        let pattern = RegexBuilder::new(pattern)
            .size_limit(MAX_PATTERN)
            .build()
            .map_err(|error| ServiceRuleError(error.to_string()))?;
        Ok(Self {
            pattern,
            name: name.to_owned(),
        })
    }

    /// The service of a command line, if the rule is for it.
    fn name_of(&self, command: &str) -> Option<String> {
        let found = self.pattern.captures(command)?;
        let mut name = String::new();
        found.expand(&self.name, &mut name);
        Some(name)
    }
}

/// The service that the environment of a process names.
pub(super) fn named(
    process: &PinnedProcess,
    cgroup: Option<&str>,
    earlier: Option<&Identity>,
) -> Option<String> {
    match (Environment::of(process), earlier) {
        (Environment::Read { service }, _) => service,
        // What was known before the title came is better than a guess.
        (Environment::Overwritten, Some(earlier)) => earlier.named.clone(),
        (Environment::Overwritten, None) => ancestor_s(process, cgroup),
    }
}

/// The service of a process of which everything else is known.
pub(super) fn of(identity: &Identity, line: &CommandLine, rules: &[ServiceRule]) -> Arc<str> {
    let unit = || {
        let name = identity.unit.as_deref()?.strip_suffix(".service")?;
        (!name.starts_with("user@")).then(|| name.to_owned())
    };
    let ruled = || {
        rules
            .iter()
            .find_map(|rule| rule.name_of(&identity.command))
    };
    let candidates: [&dyn Fn() -> Option<String>; 4] =
        [&|| identity.named.clone(), &ruled, &unit, &|| {
            Some(line.short_name())
        }];
    candidates
        .iter()
        .filter_map(|candidate| candidate())
        .map(|name| safe(&name, MAX_SERVICE))
        .find(|name| !name.is_empty())
        .map_or_else(|| UNKNOWN.into(), Arc::from)
}

/// What the environment of a process says.
#[derive(Debug, PartialEq, Eq)]
enum Environment {
    /// It is there.
    Read {
        /// The service it names.
        service: Option<String>,
    },
    /// It is not there (any more), or may not be read.
    Overwritten,
}

impl Environment {
    fn of(process: &PinnedProcess) -> Self {
        match read_start(process, "environ", MAX_ENVIRONMENT) {
            Ok(bytes) => Self::parse(&bytes),
            Err(_) => Self::Overwritten,
        }
    }

    /// Reads `/proc/PID/environ`: entries with a NUL after each.
    fn parse(bytes: &[u8]) -> Self {
        let mut attribute = None;
        if bytes.is_empty() {
            return Self::Read { service: None };
        }
        let entries = bytes
            .strip_suffix(b"\0")
            .unwrap_or(bytes)
            .split(|&byte| byte == 0);
        for (at, entry) in entries.enumerate() {
            // The end of a title, and what the rest was filled with.
            if entry.is_empty() || at == 0 && !entry.contains(&b'=') {
                return Self::Overwritten;
            }
            let text = String::from_utf8_lossy(entry);
            if let Some(name) = text.strip_prefix("OTEL_SERVICE_NAME=") {
                let name = name.trim();
                if !name.is_empty() {
                    return Self::Read {
                        service: Some(name.to_owned()),
                    };
                }
            } else if let Some(list) = text.strip_prefix("OTEL_RESOURCE_ATTRIBUTES=") {
                attribute = service_name(list);
            }
        }
        Self::Read { service: attribute }
    }
}

/// `service.name` in a list `key=value,key=value`, whose values are
/// percent-encoded.
fn service_name(list: &str) -> Option<String> {
    let value = list.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key.trim() == "service.name").then(|| value.trim())
    })?;
    Some(percent_decoded(value)).filter(|name| !name.is_empty())
}

/// Text without its percent-encoding; what is not valid encoding stays.
pub(in crate::agent) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.first_chunk::<2>().filter(|_| byte == b'%');
        let code = code.and_then(|code| {
            let [high, low] = code.map(|digit| char::from(digit).to_digit(16));
            u8::try_from(high? * 16 + low?).ok()
        });
        match code {
            Some(code) => {
                bytes.push(code);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The service that the environment of the nearest ancestor names whose own is
/// still there. In another control group there is another service.
fn ancestor_s(process: &PinnedProcess, cgroup: Option<&str>) -> Option<String> {
    let mut pid = parent(process)?;
    for _ in 0..MAX_ANCESTORS {
        let ancestor = PinnedProcess::open(pid).ok()?;
        let group = super::Groups::of(&ancestor).path;
        let group = group.map(|path| safe(&path, super::MAX_CGROUP));
        let is_older = ancestor.identity().start_time <= process.identity().start_time;
        if !is_older || group.as_deref() != cgroup {
            return None;
        }
        if let Environment::Read { service } = Environment::of(&ancestor) {
            return service;
        }
        pid = parent(&ancestor)?;
    }
    None
}

/// The id of the process's parent.
fn parent(process: &PinnedProcess) -> Option<u32> {
    let line = process.read("stat").ok()?;
    // After the name in parentheses: the state, and the parent's id.
    let end = line.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(line.get(end + 1..)?).ok()?;
    let pid = rest.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (pid != 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::Child;
    use std::process::Command;
    use std::process::Stdio;

    use super::*;

    fn read(service: Option<&str>) -> Environment {
        Environment::Read {
            service: service.map(str::to_owned),
        }
    }

    #[test]
    fn the_environment_names_the_service() {
        for (environment, service) in [
            ("A=1\0OTEL_SERVICE_NAME=shop\0B=2\0", Some("shop")),
            (
                "OTEL_RESOURCE_ATTRIBUTES=a=b,service.name=my%20shop , c=d\0",
                Some("my shop"),
            ),
            (
                "OTEL_RESOURCE_ATTRIBUTES=service.name=other\0OTEL_SERVICE_NAME=shop\0",
                Some("shop"),
            ),
            (
                "OTEL_SERVICE_NAME= \0OTEL_RESOURCE_ATTRIBUTES=service.name=other\0",
                Some("other"),
            ),
            ("OTEL_RESOURCE_ATTRIBUTES=service.name=\0", None),
            ("OTEL_RESOURCE_ATTRIBUTES=service.namespace=x,=,,\0", None),
            ("XOTEL_SERVICE_NAME=shop\0", None),
            ("", None),
        ] {
            assert_eq!(Environment::parse(environment.as_bytes()), read(service));
        }
        for title in [
            "tail of a title\0\0\0\0",
            "tail\0     ",
            "a=b\0\0\0",
            "\0\0",
        ] {
            let parsed = Environment::parse(title.as_bytes());
            assert_eq!(parsed, Environment::Overwritten, "{title:?}");
        }
    }

    #[test]
    fn percent_encoding_is_undone() {
        assert_eq!(percent_decoded("a%2fb%C3%A9%"), "a/b\u{e9}%");
        assert_eq!(percent_decoded("%zz%2"), "%zz%2");
        assert_eq!(percent_decoded("%ff"), "\u{fffd}");
        assert_eq!(percent_decoded("%+1"), "%+1");
    }

    #[test]
    fn rules_name_services() {
        let rule = ServiceRule::parse("shop-$1=puma .*\\[(\\w+)\\]").unwrap();
        assert_eq!(rule.name_of("puma 6 [web]").as_deref(), Some("shop-web"));
        assert_eq!(rule.name_of("sidekiq"), None);
        for bad in ["shop", "=x", " =x", "shop=("] {
            assert!(ServiceRule::parse(bad).is_err(), "{bad}");
        }
    }

    /// A shell that has begun, with a variable in its environment.
    fn shell(script: &str, name: &str) -> (Child, PinnedProcess) {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("OTEL_SERVICE_NAME", name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut word = [0; 1];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut word)
            .unwrap();
        let process = PinnedProcess::open(child.id()).unwrap();
        (child, process)
    }

    #[test]
    fn the_order_is_environment_rule_unit_command() {
        let (mut child, process) = shell("echo; read x", "");
        let line = CommandLine::of(&process);
        let identity = |unit: &str| Identity {
            unit: Some(unit.to_owned()),
            command: "ruby app.rb".to_owned(),
            ..Identity::default()
        };
        let rules = [
            ServiceRule::parse("none=python").unwrap(),
            ServiceRule::parse("ruled=app").unwrap(),
            ServiceRule::parse("late=app").unwrap(),
        ];
        let unit = identity("shop.service");
        let of = |identity: &Identity, rules: &[ServiceRule]| of(identity, &line, rules);
        let from_environment = Identity {
            named: Some("named".to_owned()),
            ..unit.clone()
        };
        assert_eq!(&*of(&from_environment, &rules), "named");
        assert_eq!(&*of(&unit, &rules), "ruled");
        assert_eq!(&*of(&unit, &[]), "shop");
        for none in ["user@1000.service", "session-3.scope"] {
            assert_eq!(&*of(&identity(none), &[]), "sh");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn an_overwritten_environment_is_replaced_by_what_else_is_known() {
        // Perl overwrites it as Ruby does, and Debian is never without Perl.
        let title = format!("puma: cluster worker 0: 12 [{}]", "shop".repeat(20));
        let script =
            format!("perl -e '$0 = \"{title}\"; $| = 1; print 1; sleep 60' || echo; read x");
        let (mut child, shell) = shell(&script, "shop");
        let pid = shell.identity().pid;
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let inner = children.unwrap().trim().parse();
        if let Ok(inner) = inner {
            let inner = PinnedProcess::open(inner).unwrap();
            assert_eq!(parent(&inner), Some(pid));
            assert_eq!(Environment::of(&inner), Environment::Overwritten);
            let identity = Identity::of(&inner, "", &[], None);
            assert_eq!(identity.script.as_deref(), Some(&*title));
            assert_eq!(&*identity.service, "shop");
            let mut earlier = Identity {
                service: "perl".into(),
                named: Some("known".to_owned()),
                ..Identity::default()
            };
            let identity = Identity::of(&inner, "", &[], Some(&earlier));
            assert_eq!(&*identity.service, "known");
            // The environment had no name in it: then the title has.
            earlier.named = None;
            let identity = Identity::of(&inner, "", &[], Some(&earlier));
            assert!(identity.service.starts_with("puma-shop"));
            assert_eq!(ancestor_s(&inner, Some("/elsewhere")), None);
            rustix::process::kill_process(
                rustix::process::Pid::from_raw(inner.identity().pid.cast_signed()).unwrap(),
                rustix::process::Signal::KILL,
            )
            .unwrap();
        } else {
            let is_required = std::env::var_os("RBPROF_REQUIRE_ALL").is_some();
            assert!(!is_required, "perl is missing");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
