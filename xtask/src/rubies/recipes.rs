//! Which Rubies there are and how each is made.

use super::edits::Edit;

/// How one interpreter is made.
///
/// Everything that decides the result stands here, so that its text can key
/// the cache.
#[derive(Debug)]
pub struct Recipe {
    /// Its name: origin, version, variant.
    pub name: &'static str,
    /// What the interpreter calls `RUBY_VERSION`.
    pub version: &'static str,
    /// Whether the tests need it; the others are made when asked for by name.
    pub needed: bool,
    pub(super) origin: Origin,
}

#[derive(Debug)]
pub(super) enum Origin {
    /// Debian's binary packages, in a root file system of their own.
    Packages(Packages),
    /// Built here from a Debian source package's upstream tarball, stripped.
    Source(Source),
}

#[derive(Debug)]
pub(super) struct Packages {
    /// The Debian suites, the one that the others build on first.
    pub(super) suites: &'static [&'static str],
    /// What to install besides what these depend on, in apt's notation.
    pub(super) include: &'static [&'static str],
    /// The interpreter's file in the root file system.
    pub(super) ruby: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// The source package's name.
    pub(super) package: &'static str,
    /// The Debian suite that has it.
    pub(super) suite: &'static str,
    /// SHA-256 of the upstream tarball.
    pub(super) sha256: &'static str,
    /// What is changed before the build.
    pub(super) edits: &'static [Edit],
    /// Arguments of `configure`.
    pub(super) configure: &'static [&'static str],
    /// How the stripped result must export the symbols of the export proposal.
    pub(super) exports: Exports,
}

/// How `ruby_current_ec`, `rb_vm_exec` and `ruby_global_symbols` stand in
/// `.dynsym`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exports {
    /// Not all of them are there: a stock build.
    Stock,
    /// All global with default visibility.
    Default,
    /// All global with protected visibility.
    Protected,
}

impl Recipe {
    /// The whole recipe as text: the key of its result.
    pub(super) fn text(&self) -> String {
        // Raise this when the code that follows a recipe changes its result.
        const REVISION: u32 = 1;
        format!("revision {REVISION}\n{self:#?}\n")
    }

    /// One line for a person.
    pub(super) fn about(&self) -> String {
        match &self.origin {
            Origin::Packages(packages) => {
                format!(
                    "root file system of Debian {} with {}",
                    packages.suites.join(" and "),
                    packages.ruby
                )
            }
            Origin::Source(source) => {
                let exports = match source.exports {
                    Exports::Stock => "unmodified",
                    Exports::Default => "export proposal, default visibility",
                    Exports::Protected => "export proposal, protected visibility",
                };
                let package = source.package;
                format!(
                    "built from {package} of Debian {}, {exports}, {}",
                    source.suite,
                    source.configure.join(" ")
                )
            }
        }
    }
}

/// A shell and the usual small programs, for Ruby programs that start others.
macro_rules! packages {
    ($ruby:literal) => {
        &[$ruby, "coreutils", "dash"]
    };
}

const SHARED: &[&str] = &["--enable-shared", "--enable-yjit", "--disable-install-doc"];
const STATIC: &[&str] = &["--disable-shared", "--enable-yjit", "--disable-install-doc"];

/// The proposal to export three existing symbols (Ruby feature #21539) as edits
/// of the 3.3 series' source, with `$attribute` on each declaration.
macro_rules! export_edits {
    ($attribute:literal) => {
        &[
            Edit {
                file: "vm.c",
                from: "\nVALUE vm_exec(rb_execution_context_t *);\n",
                to: concat!(
                    "\nRUBY_SYMBOL_EXPORT_BEGIN\nVALUE vm_exec(rb_execution_context_t *)",
                    $attribute,
                    ";\nRUBY_SYMBOL_EXPORT_END\n"
                ),
            },
            Edit {
                file: "vm.c",
                from: "\nRB_THREAD_LOCAL_SPECIFIER rb_execution_context_t *ruby_current_ec;\n",
                to: concat!(
                    "\nRUBY_SYMBOL_EXPORT_BEGIN\nRB_THREAD_LOCAL_SPECIFIER rb_execution_context_t *ruby_current_ec",
                    $attribute,
                    ";\nRUBY_SYMBOL_EXPORT_END\n"
                ),
            },
            Edit {
                file: "thread_pthread.h",
                from: "\n    RUBY_EXTERN RB_THREAD_LOCAL_SPECIFIER struct rb_execution_context_struct *ruby_current_ec;\n",
                to: concat!(
                    "\nRUBY_SYMBOL_EXPORT_BEGIN\n    ",
                    "RUBY_EXTERN RB_THREAD_LOCAL_SPECIFIER struct rb_execution_context_struct *ruby_current_ec",
                    $attribute,
                    ";\nRUBY_SYMBOL_EXPORT_END\n"
                ),
            },
            Edit {
                file: "symbol.c",
                from: "\nrb_symbols_t ruby_global_symbols = {tNEXT_ID-1};\n",
                to: concat!(
                    "\nRUBY_SYMBOL_EXPORT_BEGIN\nrb_symbols_t ruby_global_symbols",
                    $attribute,
                    " = {tNEXT_ID-1};\nRUBY_SYMBOL_EXPORT_END\n"
                ),
            },
        ]
    };
}

const EXPORT_DEFAULT: &[Edit] = export_edits!("");
const EXPORT_PROTECTED: &[Edit] = export_edits!(" __attribute__((visibility(\"protected\")))");

const RUBY_3_3_8: Source = Source {
    package: "ruby3.3",
    suite: "trixie",
    sha256: "e2e1233ad275b7623a05edf23a01192626d1da454bdfe353a28a87acd8ef015c",
    edits: &[],
    configure: SHARED,
    exports: Exports::Stock,
};

/// All there are.
pub(super) const RECIPES: &[Recipe] = &[
    Recipe {
        name: "debian-2.7.4",
        version: "2.7.4",
        needed: true,
        origin: Origin::Packages(Packages {
            suites: &["bullseye"],
            include: packages!("ruby2.7"),
            ruby: "/usr/bin/ruby2.7",
        }),
    },
    Recipe {
        name: "debian-3.1.2",
        version: "3.1.2",
        needed: true,
        origin: Origin::Packages(Packages {
            suites: &["bookworm"],
            include: packages!("ruby3.1"),
            ruby: "/usr/bin/ruby3.1",
        }),
    },
    Recipe {
        name: "debian-3.3.8",
        version: "3.3.8",
        needed: true,
        origin: Origin::Packages(Packages {
            suites: &["trixie"],
            include: packages!("ruby3.3"),
            ruby: "/usr/bin/ruby3.3",
        }),
    },
    Recipe {
        // Its backtraces name classes, and so tell what the labels of every
        // other version should be.
        name: "debian-3.4.11",
        version: "3.4.11",
        needed: true,
        origin: Origin::Packages(Packages {
            suites: &["sid", "experimental"],
            include: packages!("ruby3.4/experimental"),
            ruby: "/usr/bin/ruby3.4",
        }),
    },
    Recipe {
        name: "source-3.3.8-protected",
        version: "3.3.8",
        needed: true,
        origin: Origin::Source(Source {
            edits: EXPORT_PROTECTED,
            exports: Exports::Protected,
            ..RUBY_3_3_8
        }),
    },
    Recipe {
        name: "source-3.3.8-default",
        version: "3.3.8",
        needed: false,
        origin: Origin::Source(Source {
            edits: EXPORT_DEFAULT,
            exports: Exports::Default,
            ..RUBY_3_3_8
        }),
    },
    Recipe {
        name: "source-3.3.8-static",
        version: "3.3.8",
        needed: false,
        origin: Origin::Source(Source {
            edits: EXPORT_PROTECTED,
            configure: STATIC,
            exports: Exports::Protected,
            ..RUBY_3_3_8
        }),
    },
    Recipe {
        name: "source-3.3.8",
        version: "3.3.8",
        needed: false,
        origin: Origin::Source(RUBY_3_3_8),
    },
    Recipe {
        name: "source-3.4.5",
        version: "3.4.5",
        needed: false,
        origin: Origin::Source(Source {
            package: "ruby3.4",
            suite: "experimental",
            sha256: "141fb3b0192b8196361b3b4d6c29fc9b10c0798dbe54ada1539d9f1c311bfcbf",
            edits: &[],
            configure: SHARED,
            exports: Exports::Stock,
        }),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_with_origin_and_version_and_are_unique() {
        let mut names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
        for recipe in RECIPES {
            let origin = match recipe.origin {
                Origin::Packages(_) => "debian",
                Origin::Source(_) => "source",
            };
            assert!(
                recipe
                    .name
                    .starts_with(&format!("{origin}-{}", recipe.version)),
                "{}",
                recipe.name
            );
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), RECIPES.len());
    }

    #[test]
    fn a_recipe_text_holds_the_edits() {
        let protected = RECIPES
            .iter()
            .find(|recipe| recipe.name == "source-3.3.8-protected")
            .unwrap();
        assert_eq!(protected.text().matches("visibility").count(), 4);
    }
}
