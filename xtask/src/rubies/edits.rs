//! Small edits of foreign source text that fail loudly when the text is not
//! what they were written for.

use std::path::Path;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

/// Replaces the one place where `file` has `from`.
#[derive(Debug)]
pub(super) struct Edit {
    /// Relative to the source tree.
    pub(super) file: &'static str,
    pub(super) from: &'static str,
    pub(super) to: &'static str,
}

/// Applies `edits` to the source tree `tree`, in order.
///
/// # Errors
/// If a file cannot be read or written, or has an edit's text not exactly once.
pub(super) fn apply(edits: &[Edit], tree: &Path) -> Result<()> {
    edits
        .iter()
        .try_for_each(|edit| replace(tree, edit.file, edit.from, edit.to))
}

/// Undoes [`apply`].
///
/// # Errors
/// As of [`apply`].
pub(super) fn revert(edits: &[Edit], tree: &Path) -> Result<()> {
    edits
        .iter()
        .rev()
        .try_for_each(|edit| replace(tree, edit.file, edit.to, edit.from))
}

fn replace(tree: &Path, file: &str, from: &str, to: &str) -> Result<()> {
    let path = tree.join(file);
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let text =
        replace_once(&text, from, to).with_context(|| format!("editing {}", path.display()))?;
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

fn replace_once(text: &str, from: &str, to: &str) -> Result<String> {
    match text.matches(from).count() {
        1 => Ok(text.replacen(from, to, 1)),
        count => bail!("found {count} times, not once: {from:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDIT: Edit = Edit {
        file: "vm.c",
        from: "\nint x;\n",
        to: "\nint y;\n",
    };

    fn edited(text: &str) -> Result<String> {
        replace_once(text, EDIT.from, EDIT.to)
    }

    #[test]
    fn the_only_place_is_replaced() {
        assert_eq!(edited("a\nint x;\nb").unwrap(), "a\nint y;\nb");
    }

    #[test]
    fn none_or_several_places_are_an_error() {
        let error = |text| edited(text).unwrap_err().to_string();
        assert!(error("a\nint z;\nb").contains("0 times"));
        assert!(error("\nint x;\n-\nint x;\n").contains("2 times"));
    }

    #[test]
    fn edits_can_be_undone() {
        let tree = std::env::temp_dir().join(format!("rbprof-edits-{}", std::process::id()));
        std::fs::create_dir_all(&tree).unwrap();
        let file = tree.join(EDIT.file);
        std::fs::write(&file, "a\nint x;\nb").unwrap();
        let edits = [
            EDIT,
            Edit {
                from: "int y;",
                to: "long int y;",
                ..EDIT
            },
        ];
        apply(&edits, &tree).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "a\nlong int y;\nb");
        revert(&edits, &tree).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "a\nint x;\nb");
        std::fs::remove_dir_all(&tree).unwrap();
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = apply(&[EDIT], Path::new("/no/such/tree"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such/tree/vm.c"), "{error}");
    }
}
