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
    for edit in edits {
        let path = tree.join(edit.file);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("reading {}", path.display()))?;
        let text =
            replace_once(&text, edit).with_context(|| format!("editing {}", path.display()))?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn replace_once(text: &str, edit: &Edit) -> Result<String> {
    match text.matches(edit.from).count() {
        1 => Ok(text.replacen(edit.from, edit.to, 1)),
        count => bail!("found {count} times, not once: {:?}", edit.from),
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

    #[test]
    fn the_only_place_is_replaced() {
        assert_eq!(replace_once("a\nint x;\nb", &EDIT).unwrap(), "a\nint y;\nb");
    }

    #[test]
    fn none_or_several_places_are_an_error() {
        assert!(
            replace_once("a\nint z;\nb", &EDIT)
                .unwrap_err()
                .to_string()
                .contains("0 times")
        );
        assert!(
            replace_once("\nint x;\n-\nint x;\n", &EDIT)
                .unwrap_err()
                .to_string()
                .contains("2 times")
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = apply(&[EDIT], Path::new("/no/such/tree"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such/tree/vm.c"), "{error}");
    }
}
