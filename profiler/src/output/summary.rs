//! The one-line account of a profile that the outputs for people share.

use super::text;
use crate::profile::Profile;

/// `CPU profile of ruby app.rb (pid 4242)`.
pub(super) fn headline(profile: &Profile) -> String {
    let about = &profile.metadata;
    let pids = match about.pids.as_slice() {
        [] => None,
        [pid] => Some(format!("pid {pid}")),
        pids if pids.len() <= 4 => {
            let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
            Some(format!("pids {}", pids.join(", ")))
        }
        pids => Some(format!("{} processes", pids.len())),
    };
    let command = text::plain(about.command.trim());
    let of = match (command.is_empty(), pids) {
        (true, None) => return format!("{} profile", about.mode),
        (true, Some(pids)) => pids,
        (false, None) => text::shorten(&command, 100).into_owned(),
        (false, Some(pids)) => format!("{} ({pids})", text::shorten(&command, 100)),
    };
    format!("{} profile of {of}", about.mode)
}

/// `990 samples`, `10.0 s at 99 Hz`, `2 threads`, `Ruby 3.3.8`.
pub(super) fn facts(profile: &Profile) -> Vec<String> {
    let about = &profile.metadata;
    let mut facts = vec![plural(profile.total(), "sample")];
    let seconds = seconds(about.duration_ns);
    facts.push(match about.frequency_hz {
        0 => seconds,
        hz => format!("{seconds} at {hz} Hz"),
    });
    facts.push(plural(profile.threads() as u64, "thread"));
    if !about.rubies.is_empty() {
        facts.push(format!("Ruby {}", text::plain(&about.rubies.join(", "))));
    }
    facts
}

/// `3 samples lost`: what is missing from the profile.
pub(super) fn losses(profile: &Profile) -> Vec<String> {
    (profile.metadata.losses())
        .map(|counter| format!("{} {}", counter.value, counter.name))
        .collect()
}

/// Everything a reader needs to judge the profile, a line each, as the target
/// and the user gave it: not escaped.
pub(super) fn account(profile: &Profile) -> Vec<String> {
    let about = &profile.metadata;
    let mut lines = Vec::new();
    let mut add = |name: &str, value: &str| {
        if !value.is_empty() {
            lines.push(format!("{name}: {value}"));
        }
    };
    add("tool", &about.tool);
    add("mode", &about.mode.to_string());
    add("kernel", &about.kernel);
    for ruby in &about.rubies {
        add("ruby", ruby);
    }
    add("command", &about.command);
    for pid in &about.pids {
        add("pid", &pid.to_string());
    }
    if about.frequency_hz != 0 {
        add("frequency", &format!("{} Hz", about.frequency_hz));
    }
    for counter in &about.counters {
        add(&counter.name, &counter.value.to_string());
    }
    for warning in &about.warnings {
        add("warning", warning);
    }
    lines.extend(about.comments.iter().cloned());
    lines
}

/// `1 sample`, `2 samples`.
fn plural(count: u64, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// Seconds with one digit behind the point, two where it is less than one.
pub(super) fn seconds(ns: u64) -> String {
    let unit = 1_000_000_000;
    let digits = if ns < unit { 2 } else { 1 };
    format!("{:.digits$} s", ns as f64 / unit as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::example;

    #[test]
    fn a_headline_names_the_target() {
        let mut profile = example::profile();
        assert_eq!(
            headline(&profile),
            "CPU profile of puma 6.4 [shop] (pid 4242)"
        );
        profile.metadata.pids = vec![1, 2];
        assert_eq!(
            headline(&profile),
            "CPU profile of puma 6.4 [shop] (pids 1, 2)"
        );
        profile.metadata.pids = vec![1, 2, 3, 4, 5];
        profile.metadata.command.clear();
        assert_eq!(headline(&profile), "CPU profile of 5 processes");
        profile.metadata.pids.clear();
        assert_eq!(headline(&profile), "CPU profile");
        profile.metadata.command = "ruby -e 'a\nb'".to_owned();
        assert_eq!(headline(&profile), "CPU profile of ruby -e 'a\\nb'");
    }

    #[test]
    fn facts_and_losses() {
        let profile = example::profile();
        let facts = facts(&profile);
        assert_eq!(facts[1..], ["10.0 s at 99 Hz", "2 threads", "Ruby 3.3.8"]);
        assert_eq!(losses(&profile), ["2 samples lost", "7 stacks truncated"]);
        assert_eq!(seconds(40_000_000), "0.04 s");
        assert_eq!(plural(1, "sample"), "1 sample");
    }
}
