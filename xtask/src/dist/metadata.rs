//! What cargo knows of the crates that a tree is built of.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use serde_json::Value;

use super::build;
use super::source::Source;
use crate::cmd;
use crate::vm::Architecture;

/// A crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Crate {
    pub(super) name: String,
    pub(super) version: String,
    /// As its manifest has it, such as `MIT OR Apache-2.0`; empty if it has none.
    pub(super) license: String,
    /// Where its manifest is.
    pub(super) folder: PathBuf,
    /// Whether it is of the tree itself.
    pub(super) is_own: bool,
}

/// All crates of a tree, and which needs which.
#[derive(Debug)]
pub(super) struct Metadata {
    /// By cargo's own name for each.
    crates: BTreeMap<String, Crate>,
    /// Which are linked into which.
    parts: BTreeMap<String, Vec<String>>,
}

impl Metadata {
    /// Asks cargo for the crates of these processors.
    ///
    /// # Errors
    /// If cargo cannot tell, such as when the lock file is out of date.
    pub(super) fn read(source: &Source, architectures: &[Architecture]) -> Result<Self> {
        let mut cargo = build::cargo(source);
        cargo.args(["metadata", "--format-version=1", "--locked"]);
        for &architecture in architectures {
            cargo.args(["--filter-platform", build::target(architecture)]);
        }
        let text = cmd::output(&mut cargo)?;
        let value: Value = serde_json::from_str(&text).context("reading what cargo prints")?;
        Self::of(&value).context("cargo describes its crates in a way that is not known")
    }

    fn of(value: &Value) -> Option<Self> {
        let mut crates = BTreeMap::new();
        for package in value.get("packages")?.as_array()? {
            let text = |field: &str| package.get(field)?.as_str();
            let own = Crate {
                name: text("name")?.to_owned(),
                version: text("version")?.to_owned(),
                license: text("license").unwrap_or_default().to_owned(),
                folder: Path::new(text("manifest_path")?).parent()?.to_path_buf(),
                // Cargo says `null` for what is not from elsewhere.
                is_own: text("source").is_none(),
            };
            crates.insert(text("id")?.to_owned(), own);
        }
        let mut parts = BTreeMap::new();
        for node in value.pointer("/resolve/nodes")?.as_array()? {
            let mut needed = Vec::new();
            for part in node.get("deps")?.as_array()? {
                // `null` is the kind of what is neither for tests nor for building.
                let mut kinds = part.get("dep_kinds")?.as_array()?.iter();
                if kinds.any(|kind| kind.get("kind").is_some_and(Value::is_null)) {
                    needed.push(part.get("pkg")?.as_str()?.to_owned());
                }
            }
            parts.insert(node.get("id")?.as_str()?.to_owned(), needed);
        }
        Some(Self { crates, parts })
    }

    /// The folders that crates from elsewhere lie in.
    pub(super) fn folders_of_crates(&self) -> BTreeSet<PathBuf> {
        self.crates
            .values()
            .filter(|own| !own.is_own)
            .filter_map(|own| own.folder.parent().map(Path::to_path_buf))
            .collect()
    }

    /// The crates from elsewhere that are in crates of the tree, by name.
    pub(super) fn linked_into(&self, names: &[&str]) -> BTreeSet<Crate> {
        let is_asked_for = |own: &Crate| own.is_own && names.contains(&own.name.as_str());
        let mut waiting: Vec<&String> = self
            .crates
            .iter()
            .filter(|(_, own)| is_asked_for(own))
            .map(|(id, _)| id)
            .collect();
        let mut seen: BTreeSet<&String> = waiting.iter().copied().collect();
        while let Some(id) = waiting.pop() {
            for part in self.parts.get(id).into_iter().flatten() {
                if seen.insert(part) {
                    waiting.push(part);
                }
            }
        }
        let crates = seen.into_iter().filter_map(|id| self.crates.get(id));
        crates.filter(|own| !own.is_own).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata() -> Metadata {
        let package = |name: &str, source: Option<&str>| {
            json!({
                "id": name, "name": name, "version": "1.0.0", "license": "MIT",
                "source": source, "manifest_path": format!("/home/registry/{name}-1/Cargo.toml"),
            })
        };
        let needs = |name: &str, kind: Option<&str>| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let value = json!({
            "packages": [
                package("own", None), package("other", None),
                package("a", Some("registry")), package("b", Some("registry")),
                package("builder", Some("registry")), package("unused", Some("registry")),
            ],
            "resolve": { "nodes": [
                { "id": "own", "deps": [needs("a", None), needs("builder", Some("build"))] },
                { "id": "a", "deps": [needs("b", None)] },
                { "id": "b", "deps": [needs("a", None)] },
                { "id": "other", "deps": [needs("unused", None)] },
            ]},
        });
        Metadata::of(&value).unwrap()
    }

    #[test]
    fn what_only_builds_or_is_in_another_crate_is_not_linked() {
        let linked = metadata().linked_into(&["own"]);
        let names: Vec<&str> = linked.iter().map(|own| own.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn crates_from_elsewhere_share_a_folder() {
        let folders = metadata().folders_of_crates();
        assert_eq!(folders, [PathBuf::from("/home/registry")].into());
    }

    #[test]
    fn what_is_not_of_cargo_is_refused() {
        assert!(Metadata::of(&json!({ "packages": [{ "id": 1 }] })).is_none());
        assert!(Metadata::of(&json!({})).is_none());
    }
}
