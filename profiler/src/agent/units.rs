//! Durations and sizes as people write them: `60s`, `7d`, `1GiB`.

use std::fmt;
use std::time::Duration;

use serde::Deserialize as _;
use serde::Deserializer;
use serde::de::Error as _;

/// A text that is no duration, or no size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidQuantity(String);

impl fmt::Display for InvalidQuantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidQuantity {}

/// Reads a duration: numbers with a unit each, such as `500ms`, `60s`, `1h 30m`
/// or `7d`.
///
/// # Errors
/// If it is none.
pub fn parse_duration(text: &str) -> Result<Duration, InvalidQuantity> {
    humantime::parse_duration(text).map_err(|error| {
        InvalidQuantity(format!(
            "{text:?} is no duration ({error}): write a number and a unit, such as 500ms, 60s, 12h or 7d"
        ))
    })
}

/// The shortest text that [`parse_duration`] reads as this duration.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// What the units of sizes stand for. The first of a value is the one to show.
const UNITS: [(&str, u64); 14] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
];

/// Reads a size in bytes: a whole number with a unit, such as `512KiB`, `64MiB`,
/// `1GiB` (powers of 1024) or `1GB` (powers of 1000). A bare letter is a power of
/// 1024, as in systemd's units, and a bare number is bytes. Capitals do not matter.
///
/// # Errors
/// If it is none, or 16 EiB and more.
pub fn parse_size(text: &str) -> Result<u64, InvalidQuantity> {
    let invalid = |why: &str| {
        InvalidQuantity(format!(
            "{text:?} is no size ({why}): write a whole number and a unit, such as 512KiB, 64MiB or 1GiB"
        ))
    };
    let trimmed = text.trim();
    let digits = (trimmed.bytes()).take_while(u8::is_ascii_digit).count();
    let (number, unit) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(invalid("it does not begin with a digit"));
    }
    let unit = unit.trim_start();
    let factor = if unit.is_empty() {
        1
    } else {
        let mut known = UNITS.iter();
        let (_, factor) = known
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .ok_or_else(|| invalid("its unit is unknown"))?;
        *factor
    };
    let number: u64 = number.parse().map_err(|_| invalid("it is too large"))?;
    number
        .checked_mul(factor)
        .ok_or_else(|| invalid("it is too large"))
}

/// A text that [`parse_size`] reads as this size: whole numbers of the largest unit
/// that fits.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    let fits = |(_, factor): &&(&str, u64)| bytes >= *factor && bytes.is_multiple_of(*factor);
    let (unit, factor) = UNITS.iter().find(fits).copied().unwrap_or(("B", 1));
    format!("{}{unit}", bytes / factor)
}

/// For `#[serde(deserialize_with = "...")]`: a text for [`parse_duration`].
///
/// # Errors
/// If it is no such text.
pub fn deserialize_duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    parse_duration(&text).map_err(D::Error::custom)
}

/// For `#[serde(deserialize_with = "...")]`: a text for [`parse_size`].
///
/// # Errors
/// If it is no such text.
pub fn deserialize_size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let text = String::deserialize(from)?;
    parse_size(&text).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, expected) in [
            ("60s", Duration::from_secs(60)),
            ("500ms", Duration::from_millis(500)),
            ("1h 30m", Duration::from_secs(5400)),
            ("7d", Duration::from_secs(7 * 86_400)),
        ] {
            assert_eq!(parse_duration(text), Ok(expected), "{text}");
            assert_eq!(parse_duration(&show_duration(expected)), Ok(expected));
        }
        for text in ["", "60", "s", "60 parsecs", "-1s", "1.5.5s"] {
            let error = parse_duration(text).unwrap_err().to_string();
            assert!(error.contains("such as 500ms, 60s"), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_have_units_of_two_kinds() {
        for (text, expected) in [
            ("1GiB", 1 << 30),
            ("64 MiB", 64 << 20),
            ("512kib", 512 << 10),
            ("16M", 16 << 20),
            ("1GB", 1_000_000_000),
            ("10kB", 10_000),
            ("7", 7),
            ("7B", 7),
            ("0", 0),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
            assert_eq!(parse_size(&show_size(expected)), Ok(expected), "{text}");
        }
        assert_eq!(show_size(1 << 30), "1GiB");
        assert_eq!(show_size(1536), "1536B");
        for text in ["", "GiB", "1.5GiB", "-1", "1 XB", "16777216TiB", "1GiBs"] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains("such as 512KiB"), "{text}: {error}");
        }
    }
}
