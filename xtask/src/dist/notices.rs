//! The licences of what is in the binary besides rbprof: most ask that their text
//! goes with it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;

use super::archive::Entry;
use super::archive::Mode;
use super::build;
use super::metadata::Crate;
use super::metadata::Metadata;
use super::source::Source;
use crate::vm::Architecture;

/// The file's name.
const NAME: &str = "LICENSES-OTHERS";
/// The kernel half, which is in the binary too.
const KERNEL_HALF: &str = "rbprof-ebpf";
/// How the names of such files begin, whatever the case.
const BEGINNINGS: [&str; 5] = ["license", "licence", "copying", "copyright", "notice"];
/// What comes with the toolchain, without a crate's manifest.
const TOOLCHAIN: &str = "\
The standard library of Rust: MIT OR Apache-2.0, https://www.rust-lang.org
musl: MIT, https://musl.libc.org
libunwind of LLVM: Apache-2.0 WITH LLVM-exception, https://llvm.org
";

/// The file with the names and licences of all crates in the binary.
///
/// # Errors
/// If cargo cannot tell what is in it, or a crate's files cannot be read.
pub(super) fn of(source: &Source, architecture: Architecture) -> Result<Entry> {
    let metadata = Metadata::read(source, &[architecture])?;
    let mut crates = Vec::new();
    for own in metadata.linked_into(&[build::PACKAGE, KERNEL_HALF]) {
        let texts = texts(&own.folder)?;
        crates.push((own, texts));
    }
    Ok(Entry {
        name: NAME.to_owned(),
        mode: Mode::Text,
        content: text(&crates).into_bytes(),
    })
}

/// The texts of licences in a crate's folder, in the order of the files' names.
fn texts(folder: &Path) -> Result<Vec<String>> {
    let reading = || format!("reading {}", folder.display());
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder).with_context(reading)? {
        let file = file.with_context(reading)?;
        let name = file.file_name().to_string_lossy().to_lowercase();
        if file.path().is_file() && BEGINNINGS.iter().any(|begin| name.starts_with(begin)) {
            files.push(file.path());
        }
    }
    files.sort();
    files
        .iter()
        .map(|file| {
            let text =
                std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
            Ok(String::from_utf8_lossy(&text).trim().replace("\r\n", "\n"))
        })
        .collect()
}

/// Each text once, after the crates that have it.
fn text(crates: &[(Crate, Vec<String>)]) -> String {
    let mut list = String::new();
    let mut users: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (own, texts) in crates {
        // Writing to a string does not fail.
        let _ = writeln!(list, "{} {}: {}", own.name, own.version, own.license);
        for text in texts {
            users.entry(text).or_default().push(&own.name);
        }
    }
    let mut texts: Vec<(Vec<&str>, &str)> = users
        .into_iter()
        .map(|(text, names)| (names, text))
        .collect();
    texts.sort();
    let mut all = format!("What is in rbprof's binary:\n\n{TOOLCHAIN}{list}");
    for (names, text) in texts {
        let _ = write!(all, "\n==== {}\n\n{text}\n", names.join(", "));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_there_once_with_all_that_have_it() {
        let named = |name: &str| Crate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: "MIT".to_owned(),
            folder: "/".into(),
            is_own: false,
        };
        let same = "Permission is hereby granted".to_owned();
        let crates = [
            (named("a"), vec![same.clone()]),
            (named("b"), vec!["Apache".to_owned(), same]),
        ];
        let text = text(&crates);
        assert!(text.contains("a 1.0.0: MIT\nb 1.0.0: MIT\n"), "{text}");
        assert!(text.contains("==== a, b\n\nPermission"), "{text}");
        assert_eq!(text.matches("Permission").count(), 1, "{text}");
        assert!(text.contains("==== b\n\nApache\n"), "{text}");
    }

    #[test]
    fn files_of_licences_are_known_by_their_names() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("LICENSE-MIT", "one\r\n"),
            ("COPYING", "two"),
            ("lib.rs", "code"),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        assert_eq!(texts(folder.path()).unwrap(), ["two", "one"]);
    }
}
