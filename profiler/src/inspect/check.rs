//! `rbprof inspect --check`: for the tests of those who package Ruby.

use std::fmt::Write as _;
use std::path::Path;

use super::file::FileError;
use super::file::FileReport;
use super::file::SymbolReport;

/// Whether a file exports the four symbols that a profiler needs, so that they
/// survive `strip`; and one line for each.
///
/// # Errors
/// [`FileError`] when the file cannot be read or is no Ruby.
pub fn check(path: &Path) -> Result<(bool, String), FileError> {
    let report = FileReport::of_path(path)?;
    let mut lines = String::new();
    for symbol in &report.symbols {
        // Writing to a String cannot fail.
        let _ = match (symbol.visibility, &symbol.source) {
            (Some(visibility), _) => writeln!(
                lines,
                "ok       {:34} .dynsym, {visibility} visibility{}",
                symbol.name,
                if symbol.thread_local {
                    ", thread-local"
                } else {
                    ""
                },
            ),
            (None, Some(source)) => writeln!(
                lines,
                "missing  {:34} only in {source}, which strip removes",
                symbol.name
            ),
            (None, None) => writeln!(lines, "missing  {:34} not in .dynsym", symbol.name),
        };
    }
    let all = report.symbols.iter().all(SymbolReport::is_exported);
    Ok((all, lines))
}
