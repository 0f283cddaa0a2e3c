//! What stands behind the `?`.

use std::collections::BTreeMap;
use std::time::Duration;

use super::backend::Selector;
use crate::agent::identity::percent_decoded;

/// Names and values, each name once.
#[derive(Debug)]
pub(super) struct Parameters(BTreeMap<String, String>);

impl Parameters {
    /// Reads `a=1&b=2`. A name that is not `allowed` is an error: what somebody
    /// mistyped must not be answered with something else.
    pub(super) fn parse(query: &str, allowed: &[&str]) -> Result<Self, String> {
        let mut found = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded = |text: &str| percent_decoded(&text.replace('+', " "));
            let (name, value) = (decoded(name), decoded(value));
            if !allowed.contains(&name.as_str()) {
                return Err(match allowed {
                    [] => format!("there is no parameter {name:?} here"),
                    _ => format!("no parameter {name:?}: there are {}", allowed.join(", ")),
                });
            }
            if found.contains_key(&name) {
                return Err(format!("{name} is given twice"));
            }
            found.insert(name, value);
        }
        Ok(Self(found))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// `id`.
    pub(super) fn id(&self) -> Result<Option<u64>, String> {
        self.get("id")
            .map(|text| {
                text.parse()
                    .map_err(|_| format!("id: {text:?} is no number"))
            })
            .transpose()
    }

    /// `pid` or `service`.
    pub(super) fn selector(&self) -> Result<Selector, String> {
        match (self.get("pid"), self.get("service")) {
            (None, None) => Ok(Selector::All),
            (Some(_), Some(_)) => Err("pid and service exclude each other".to_owned()),
            (None, Some("")) => Err("service: a name is missing".to_owned()),
            (None, Some(name)) => Ok(Selector::Service(name.to_owned())),
            (Some(text), None) => text
                .parse()
                .ok()
                .filter(|&pid| (1..=4_194_304).contains(&pid))
                .map(Selector::Process)
                .ok_or_else(|| format!("pid: {text:?} is no process id")),
        }
    }

    /// `seconds`, which may be a fraction.
    pub(super) fn seconds(&self, most: Duration) -> Result<Option<Duration>, String> {
        let Some(text) = self.get("seconds") else {
            return Ok(None);
        };
        text.parse()
            .ok()
            .filter(|&seconds: &f64| seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .filter(|&duration| Duration::ZERO < duration && duration <= most)
            .map(Some)
            .ok_or_else(|| {
                format!(
                    "seconds: {text:?} is not a number above 0 and up to {}",
                    most.as_secs_f64()
                )
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 4] = ["seconds", "pid", "service", "id"];

    #[test]
    fn values_are_decoded() {
        let parameters = Parameters::parse("service=my+shop%2F1&&seconds=0.5", &ALL).unwrap();
        assert_eq!(
            parameters.selector(),
            Ok(Selector::Service("my shop/1".to_owned()))
        );
        let most = Duration::from_secs(1);
        assert_eq!(
            parameters.seconds(most),
            Ok(Some(Duration::from_millis(500)))
        );
        assert_eq!(parameters.id(), Ok(None));
        let parameters = Parameters::parse("pid=7&id=3", &ALL).unwrap();
        assert_eq!(parameters.selector(), Ok(Selector::Process(7)));
        assert_eq!(parameters.id(), Ok(Some(3)));
        let none = Parameters::parse("", &ALL).unwrap();
        assert_eq!(
            (none.selector(), none.seconds(most)),
            (Ok(Selector::All), Ok(None))
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for query in ["services=x", "pid=1&pid=2", "%ff=1"] {
            assert!(Parameters::parse(query, &ALL).is_err(), "{query}");
        }
        for query in [
            "pid=0",
            "pid=-1",
            "pid=x",
            "pid=99999999",
            "pid=1&service=a",
            "service=",
        ] {
            let parameters = Parameters::parse(query, &ALL).unwrap();
            assert!(parameters.selector().is_err(), "{query}");
        }
        let most = Duration::from_secs(60);
        for text in ["0", "-1", "61", "nan", "inf", "1e300", "", "x", "1e-30"] {
            let parameters = Parameters::parse(&format!("seconds={text}"), &ALL).unwrap();
            assert!(parameters.seconds(most).is_err(), "{text}");
        }
    }
}
