//! What a stack has to look like: the files in `tests/truth`.
//!
//! Each is named after a dump and says what the main thread was doing, leaf
//! first. The frames were worked out by hand-checked reading of the dump, not
//! by any profiler; the README there has the form.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use serde::Deserialize;

/// The stack of one thread of one dump.
#[derive(Clone, Debug, Deserialize)]
pub struct Truth {
    /// Which dump.
    pub dump: String,
    /// Leaf first.
    pub frames: Vec<TrueFrame>,
}

/// One frame.
#[derive(Clone, Debug, Deserialize)]
pub struct TrueFrame {
    /// As Ruby 3.4 writes it.
    pub label: String,
    /// Last component of the path.
    pub file: Option<String>,
    /// The line under execution.
    pub line: Option<u32>,
    /// What Ruby 3.4 prints, where `label` is something else.
    pub ruby34_label: Option<String>,
    /// Owner and name of a C method.
    pub c_name: Option<String>,
    /// The path Ruby has, in full; it may be relative.
    pub path: Option<String>,
    /// The line of a frame whose label cannot be read.
    pub path_line: Option<u32>,
}

/// Every stack that is known.
///
/// # Errors
/// When a file cannot be read or is not of this form.
pub fn all() -> Result<Vec<Truth>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("truth");
    let mut paths: Vec<_> = fs::read_dir(&folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path)?;
            serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
        })
        .collect()
}
