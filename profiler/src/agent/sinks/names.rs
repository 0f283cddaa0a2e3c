//! Names of files and directories.

use std::fmt::Write as _;
use std::time::Duration;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use sha2::Digest as _;
use sha2::Sha256;

/// Longest name of a directory, in bytes; file systems allow 255.
const MAX_COMPONENT: usize = 120;
/// How much of a longer name is kept for people to read.
const KEPT: usize = 80;

/// A name as one component of a path. Different names give different components.
///
/// ASCII letters and digits, `-`, `_`, `.`, `+` and `@` stand for themselves, a dot
/// not at the beginning; every other byte of the name becomes `%XX`, and the empty
/// name `%`. A long one is cut, and `~` and 128 bits of its SHA-256 follow.
pub(super) fn component(name: &str) -> String {
    let mut written = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || b"-_+@".contains(&byte) || (byte == b'.' && at > 0) {
            written.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(written, "%{byte:02X}");
        }
    }
    if written.is_empty() {
        return "%".to_owned();
    }
    if written.len() > MAX_COMPONENT {
        written.truncate(KEPT);
        written.push('~');
        for byte in Sha256::digest(name).iter().take(16) {
            let _ = write!(written, "{byte:02x}");
        }
    }
    written
}

/// The ending of all files.
const ENDING: &str = ".pb.gz";

/// The name of a profile's file: when it begins, in UTC, and the process or `all`,
/// such as `20261130T231500.123Z-4242.pb.gz`. `number` tells profiles apart that
/// would have the same name, and is shown from 2 on.
pub(super) fn file(from: SystemTime, pid: Option<u32>, number: u32) -> String {
    let mut name = compact(from);
    name.push('-');
    let _ = match pid {
        Some(pid) => write!(name, "{pid}"),
        None => write!(name, "all"),
    };
    if number > 1 {
        let _ = write!(name, ".{number}");
    }
    name + ENDING
}

/// When the profile in a file begins; `None` if [`file`] gives no such name.
pub(super) fn time(name: &str) -> Option<SystemTime> {
    let (time, rest) = name.strip_suffix(ENDING)?.split_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (process, number) = rest.split_once('.').unwrap_or((rest, "2"));
    if !(process == "all" || digits(process)) || !digits(number) {
        return None;
    }
    // 20261130T231500.123Z
    let part = |from: usize, to: usize| time.get(from..to);
    let standard = format!(
        "{}-{}-{}T{}:{}:{}",
        part(0, 4)?,
        part(4, 6)?,
        part(6, 8)?,
        part(9, 11)?,
        part(11, 13)?,
        part(13, 20)?
    );
    let time_of = humantime::parse_rfc3339(&standard).ok()?;
    (compact(time_of) == time).then_some(time_of)
}

/// `20261130T231500.123Z`. Times that have no such form are at its limits.
fn compact(time: SystemTime) -> String {
    /// The last second of the year 9999.
    const LAST: u64 = 253_402_300_799;
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let shown = UNIX_EPOCH + since.min(Duration::from_secs(LAST));
    let mut text = humantime::format_rfc3339_millis(shown).to_string();
    text.retain(|c| c != '-' && c != ':');
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_service_is_one_component() {
        for (name, expected) in [
            ("shop-web_2.1", "shop-web_2.1"),
            ("postgres@14", "postgres@14"),
            ("", "%"),
            (".", "%2E"),
            ("..", "%2E."),
            (".hidden", "%2Ehidden"),
            ("../../etc", "%2E.%2F..%2Fetc"),
            ("a/b", "a%2Fb"),
            ("a%2Fb", "a%252Fb"),
            ("a~b", "a%7Eb"),
            ("a\0b\n", "a%00b%0A"),
            ("größe", "gr%C3%B6%C3%9Fe"),
        ] {
            assert_eq!(component(name), expected, "{name:?}");
        }
    }

    #[test]
    fn different_services_have_different_components() {
        let long = "x".repeat(300);
        let mut names = vec![
            String::new(),
            "%".to_owned(),
            "a/b".to_owned(),
            "a%2Fb".to_owned(),
            "a_b".to_owned(),
            long.clone(),
            format!("{long}y"),
            component(&long),
            component(&component(&long)),
        ];
        names.extend((1..200).map(|length| "/".repeat(length)));
        let components: HashSet<String> = names.iter().map(|name| component(name)).collect();
        assert_eq!(components.len(), names.len());
        for component in components {
            assert!(component.len() <= MAX_COMPONENT, "{component}");
            assert!(!component.contains('/') && !component.starts_with('.'));
        }
    }

    #[test]
    fn a_file_tells_its_time() {
        let time_of = |ms: u64| UNIX_EPOCH + Duration::from_millis(ms);
        let at = time_of(1_796_080_500_123);
        let name = file(at, Some(4242), 1);
        assert_eq!(name, "20261130T231500.123Z-4242.pb.gz");
        assert_eq!(time(&name), Some(at));
        let again = file(at + Duration::from_nanos(1), None, 3);
        assert_eq!(again, "20261130T231500.123Z-all.3.pb.gz");
        assert_eq!(time(&again), Some(at));
        for at in [UNIX_EPOCH, time_of(253_402_300_799_000)] {
            assert_eq!(time(&file(at, None, 1)), Some(at));
        }
        file(UNIX_EPOCH - Duration::from_secs(1), None, 1);
        file(time_of(u64::MAX / 1000), None, 1);
    }

    #[test]
    fn other_files_have_no_time() {
        for name in [
            "20261130T231500.123Z-4242.pb",
            "20261130T231500.123Z.pb.gz",
            "20261130T231500.123Z-.pb.gz",
            "20261130T231500.123Z-x.pb.gz",
            "20261130T231500.123Z-1.x.pb.gz",
            "20261130T231500.123Z-1.2.3.pb.gz",
            "20261130T231500.123-1.pb.gz",
            "20261130T231500Z-1.pb.gz",
            "20261330T231500.123Z-1.pb.gz",
            "20261130X231500.123Z-1.pb.gz",
            "2026113öT231500.123Z-1.pb.gz",
            "profile.pb.gz",
            "-all.pb.gz",
            "",
        ] {
            assert_eq!(time(name), None, "{name}");
        }
    }
}
