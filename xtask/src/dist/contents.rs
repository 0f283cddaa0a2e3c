//! What lies beside the binary: what a person who has only the archive reads.

use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;

use super::archive::Entry;
use super::archive::Mode;

/// Files of the tree's root.
const FILES: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];
/// A folder of files; the README links to them.
const DOCS: &str = "docs";

/// All of them, from the tree at `root`.
///
/// # Errors
/// If one cannot be read.
pub(super) fn of(root: &Path) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for name in FILES {
        entries.push(Entry::read(name, Mode::Text, &root.join(name))?);
    }
    let docs = root.join(DOCS);
    let files = std::fs::read_dir(&docs).with_context(|| format!("reading {}", docs.display()))?;
    for file in files {
        let file = file.with_context(|| format!("reading {}", docs.display()))?;
        let name = format!("{DOCS}/{}", file.file_name().to_string_lossy());
        entries.push(Entry::read(name, Mode::Text, &file.path())?);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn whatever_the_readme_links_to_is_there() {
        let entries = of(workspace::root()).unwrap();
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        let readme = std::fs::read_to_string(workspace::root().join("README.md")).unwrap();
        let links = readme.split("](").skip(1);
        let links = links.filter_map(|rest| rest.split_once(')').map(|(link, _)| link));
        let mut count = 0;
        for link in links.filter(|link| !link.contains("://") && !link.starts_with('#')) {
            assert!(names.contains(&link), "{link} is not among {names:?}");
            count += 1;
        }
        assert!(count > 0);
    }
}
