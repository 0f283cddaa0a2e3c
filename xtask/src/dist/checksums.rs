//! `SHA256SUMS`, as `sha256sum --check` reads it, and what goes by it.

use std::collections::BTreeMap;

/// The text of such a file. `sums`: names, and 64 hexadecimal digits each.
pub fn text<'a>(sums: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    sums.into_iter()
        .map(|(name, sum)| format!("{sum}  {name}\n"))
        .collect()
}

/// The names of files that are not the same in both, or only in one of them, in
/// order.
pub fn different<'a>(
    one: impl IntoIterator<Item = (&'a str, &'a str)>,
    other: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Vec<&'a str> {
    let mut sums: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
    for (name, sum) in one {
        let [first, _] = sums.entry(name).or_default();
        *first = Some(sum);
    }
    for (name, sum) in other {
        let [_, second] = sums.entry(name).or_default();
        *second = Some(sum);
    }
    sums.into_iter()
        .filter(|(_, [first, second])| first != second)
        .map(|(name, _)| name)
        .collect()
}

/// A number as people read it: `12,345,678`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_differ_or_are_missing_are_named() {
        let one = [("a", "1"), ("b", "2"), ("c", "3")];
        assert!(different(one, one).is_empty());
        assert_eq!(
            different(one, [("d", "1"), ("b", "9"), ("a", "1")]),
            ["b", "c", "d"]
        );
    }

    #[test]
    fn digits_are_grouped_from_the_end() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(12_345_678), "12,345,678");
    }
}
