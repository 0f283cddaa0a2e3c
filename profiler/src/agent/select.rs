//! Which processes are profiled.
//!
//! Two lists of rules. A process that a rule of the exclude list fits is never
//! profiled. Of the others those are that a rule of the include list fits, or
//! all where that list is empty. The order of rules does not matter.
//!
//! A rule is `KIND=VALUE`:
//!
//! | kind | value | fits |
//! |---|---|---|
//! | `uid` | `33` or `1000-1999` | effective user ids, as the namespace of rbprof has them |
//! | `command` | regular expression | command lines, see [`Identity::command`] |
//! | `service` | regular expression | services, see [`Identity::service`] |
//! | `unit` | regular expression | systemd units |
//! | `cgroup` | regular expression | paths of control groups |
//! | `container` | beginning of an id | containers |
//! | `pod` | UID | Kubernetes pods |
//!
//! Expressions are looked for anywhere in the text, unless they say `^` or `$`.

use std::fmt;
use std::ops::RangeInclusive;

use regex_lite::Regex;
use regex_lite::RegexBuilder;

use super::identity::Identity;
use super::identity::MAX_PATTERN;
use crate::memory::PinnedProcess;

/// The kinds of rules.
const KINDS: &str = "uid, command, service, unit, cgroup, container, pod";

/// Why a text is no rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError(String);

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RuleError {}

/// One condition on a process.
#[derive(Clone, Debug)]
pub struct Rule {
    text: String,
    condition: Condition,
}

#[derive(Clone, Debug)]
enum Condition {
    Uid(RangeInclusive<u32>),
    Command(Regex),
    Service(Regex),
    Unit(Regex),
    Cgroup(Regex),
    Container(String),
    Pod(String),
}

impl Rule {
    /// Reads `KIND=VALUE`.
    ///
    /// # Errors
    /// When the kind is none, or the value does not fit it.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let (kind, value) = text
            .split_once('=')
            .ok_or_else(|| RuleError(format!("no `=`: write KIND=VALUE, KIND one of {KINDS}")))?;
        let value = value.trim();
        if value.is_empty() {
            return Err(RuleError("nothing after `=`".to_owned()));
        }
        let condition =
            match kind.trim() {
                "uid" => Condition::Uid(uids(value).ok_or_else(|| {
                    RuleError(format!("{value} is neither a user id nor a range"))
                })?),
                "command" => Condition::Command(pattern(value)?),
                "service" => Condition::Service(pattern(value)?),
                "unit" => Condition::Unit(pattern(value)?),
                "cgroup" => Condition::Cgroup(pattern(value)?),
                "container" => Condition::Container(value.to_owned()),
                "pod" => Condition::Pod(value.to_owned()),
                other => {
                    return Err(RuleError(format!("no kind {other}: choose one of {KINDS}")));
                }
            };
        Ok(Self {
            text: text.to_owned(),
            condition,
        })
    }

    fn fits(&self, identity: &Identity, uid: Option<u32>) -> bool {
        let in_text = |pattern: &Regex, text: &Option<String>| {
            text.as_deref().is_some_and(|text| pattern.is_match(text))
        };
        match &self.condition {
            Condition::Uid(range) => uid.is_some_and(|uid| range.contains(&uid)),
            Condition::Command(pattern) => pattern.is_match(&identity.command),
            Condition::Service(pattern) => pattern.is_match(&identity.service),
            Condition::Unit(pattern) => in_text(pattern, &identity.unit),
            Condition::Cgroup(pattern) => in_text(pattern, &identity.cgroup),
            Condition::Container(start) => {
                (identity.container.as_deref()).is_some_and(|id| id.starts_with(start))
            }
            Condition::Pod(uid) => identity.pod.as_deref() == Some(uid),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Reads `33` or `1000-1999`.
fn uids(text: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.trim().parse().ok()?..=last.trim().parse().ok()?;
    (!range.is_empty()).then_some(range)
}

fn pattern(text: &str) -> Result<Regex, RuleError> {
    RegexBuilder::new(text)
        .size_limit(MAX_PATTERN)
        .build()
        .map_err(|error| RuleError(error.to_string()))
}

/// What the rules say of a process.
#[derive(Clone, Copy, Debug)]
pub enum Verdict<'a> {
    /// It is profiled.
    Selected,
    /// There is an include list, and nothing in it fits.
    NotIncluded,
    /// A rule of the exclude list fits.
    Excluded(&'a Rule),
}

impl Verdict<'_> {
    /// Whether the process is profiled.
    #[must_use]
    pub const fn is_selected(self) -> bool {
        matches!(self, Self::Selected)
    }
}

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Selected => f.write_str("selected"),
            Self::NotIncluded => f.write_str("no include rule fits"),
            Self::Excluded(rule) => write!(f, "excluded by {rule}"),
        }
    }
}

/// The rules. Without any, every process is profiled.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// One of these has to fit, if there are any.
    pub include: Vec<Rule>,
    /// None of these may fit.
    pub exclude: Vec<Rule>,
}

impl Selection {
    /// Whether a process is profiled. `uid`: its effective user id, see
    /// [`effective_uid`]; a rule on ids does not fit where it is not known.
    #[must_use]
    pub fn verdict(&self, identity: &Identity, uid: Option<u32>) -> Verdict<'_> {
        if let Some(rule) = self.exclude.iter().find(|rule| rule.fits(identity, uid)) {
            return Verdict::Excluded(rule);
        }
        if self.include.is_empty() || self.include.iter().any(|rule| rule.fits(identity, uid)) {
            Verdict::Selected
        } else {
            Verdict::NotIncluded
        }
    }
}

/// The effective user id of a process; `None` once it is gone.
#[must_use]
pub fn effective_uid(process: &PinnedProcess) -> Option<u32> {
    let status = process.read("status").ok()?;
    let line = status
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(b"Uid:"))?;
    // Real, effective, saved, that of the file system.
    let line = std::str::from_utf8(line).ok()?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shop() -> Identity {
        Identity {
            service: "shop".into(),
            command: "ruby bin/shop --port 1".to_owned(),
            cgroup: Some("/system.slice/shop.service".to_owned()),
            unit: Some("shop.service".to_owned()),
            container: Some("9ec39b91f3d7".to_owned()),
            pod: Some("f81d4fae-7dec-11d0-a765-00a0c91e6bf6".to_owned()),
            ..Identity::default()
        }
    }

    fn rules(texts: &[&str]) -> Vec<Rule> {
        let rules = texts.iter().map(|text| Rule::parse(text));
        rules.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn each_kind_fits_what_it_says() {
        for (rule, fits) in [
            ("uid=33", true),
            ("uid=30-40", true),
            ("uid=34", false),
            ("command=^ruby bin/", true),
            ("command=port=1", false),
            ("command=port 1$", true),
            ("service=^shop$", true),
            ("service=^sho$", false),
            ("unit=^shop\\.service$", true),
            ("unit=nginx", false),
            ("cgroup=^/system\\.slice/", true),
            ("container=9ec3", true),
            ("container=ec3", false),
            ("pod=f81d4fae-7dec-11d0-a765-00a0c91e6bf6", true),
            ("pod=f81d4fae", false),
        ] {
            let rule = Rule::parse(rule).unwrap();
            assert_eq!(rule.fits(&shop(), Some(33)), fits, "{rule}");
        }
        // What is not known fits nothing.
        for rule in ["uid=0-4294967295", "unit=.*", "cgroup=", "pod=x"] {
            if let Ok(rule) = Rule::parse(rule) {
                assert!(!rule.fits(&Identity::default(), None), "{rule}");
            }
        }
    }

    #[test]
    fn exclusion_wins() {
        let all = Selection::default();
        assert!(all.verdict(&shop(), Some(33)).is_selected());
        let mut selection = Selection {
            include: rules(&["uid=1", "service=shop"]),
            exclude: Vec::new(),
        };
        assert!(selection.verdict(&shop(), Some(33)).is_selected());
        selection.exclude = rules(&["command=irb", "uid=33"]);
        assert_eq!(
            selection.verdict(&shop(), Some(33)).to_string(),
            "excluded by uid=33"
        );
        selection.exclude = Vec::new();
        selection.include = rules(&["uid=1"]);
        assert_eq!(
            selection.verdict(&shop(), Some(33)).to_string(),
            "no include rule fits"
        );
    }

    #[test]
    fn nonsense_is_refused_in_words() {
        for (text, word) in [
            ("shop", "no `=`"),
            ("name=shop", "no kind name"),
            ("uid=www-data", "neither a user id"),
            ("uid=9-3", "nor a range"),
            ("command=(", "open group"),
            ("command=", "nothing after"),
        ] {
            let error = Rule::parse(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn the_own_user_is_known() {
        let own = PinnedProcess::open(std::process::id()).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(effective_uid(&own), Some(uid));
    }
}
