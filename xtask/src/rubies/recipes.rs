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
    /// Whether every run of the tests needs it. The others are there for
    /// `cargo xtask test --every-ruby`, and are made when asked for by name: a
    /// new machine would spend an hour on all of them.
    pub needed: bool,
    pub(super) origin: Origin,
}

#[derive(Debug)]
pub(super) enum Origin {
    /// Debian's binary packages, in a root file system of their own.
    Packages(Packages),
    /// Built here from a Debian source package's upstream tarball.
    Built(Built),
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

/// One of the interpreters that a tree gives.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) tree: &'static Tree,
    /// One of the tree's.
    pub(super) variant: &'static Variant,
    pub(super) stripped: bool,
}

/// A source tree that is configured once and gives several interpreters.
#[derive(Debug)]
pub(super) struct Tree {
    /// Its name in the cache: version and what sets it apart.
    pub(super) name: &'static str,
    /// What the interpreters call `RUBY_VERSION`.
    pub(super) version: &'static str,
    /// The source package's name.
    pub(super) package: &'static str,
    /// The Debian suite that has it.
    pub(super) suite: &'static str,
    /// SHA-256 of the upstream tarball.
    pub(super) sha256: &'static str,
    /// The C compiler and C library, if not the machine's own.
    pub(super) libc: Libc,
    /// Arguments of `configure`.
    pub(super) configure: &'static [&'static str],
    /// Whether every run of the tests needs what it gives.
    pub(super) needed: bool,
    /// In the order in which they are made; the first is made and installed
    /// completely, of the others only what holds the interpreter.
    pub(super) variants: &'static [&'static Variant],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Libc {
    /// The machine's own.
    Glibc,
    /// musl, with Debian's `musl-gcc`.
    Musl,
}

/// How a tree's source is changed, and what comes of it.
#[derive(Debug)]
pub(super) struct Variant {
    /// Its folder in the tree's cache entry.
    pub(super) name: &'static str,
    pub(super) edits: &'static [Edit],
    /// How the result must export the symbols of the export proposal.
    pub(super) exports: Exports,
}

/// How `ruby_current_ec`, `rb_vm_exec` and `ruby_global_symbols` stand in
/// `.dynsym`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exports {
    /// None of them is there: a stock build of 3.3 or newer.
    Stock,
    /// All global with default visibility.
    Default,
    /// All global with protected visibility.
    Protected,
}

impl Recipe {
    /// All that decides the content of its cache entry, as text: the entry's
    /// key.
    pub(super) fn text(&self) -> String {
        // Raise these when the code that follows a recipe changes its result.
        const OF_PACKAGES: u32 = 1;
        const OF_TREES: u32 = 1;
        match &self.origin {
            Origin::Packages(_) => format!("revision {OF_PACKAGES}\n{self:#?}\n"),
            Origin::Built(built) => format!("revision {OF_TREES}\n{}\n", built.tree.text()),
        }
    }

    /// The name of its cache entry; several recipes share a built tree.
    pub(super) fn entry_name(&self) -> &'static str {
        match &self.origin {
            Origin::Packages(_) => self.name,
            Origin::Built(built) => built.tree.name,
        }
    }

    /// Whether the interpreter has YJIT, to be switched on with `--yjit`.
    #[must_use]
    pub fn has_yjit(&self) -> bool {
        match &self.origin {
            // Debian builds without.
            Origin::Packages(_) => false,
            Origin::Built(built) => built.tree.configure.contains(&"--enable-yjit"),
        }
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
            Origin::Built(Built {
                tree,
                variant,
                stripped,
            }) => {
                let exports = match variant.exports {
                    Exports::Stock => "unmodified",
                    Exports::Default => "export proposal, default visibility",
                    Exports::Protected => "export proposal, protected visibility",
                };
                let linked = if tree.is_shared() { "shared" } else { "static" };
                let yjit = if self.has_yjit() { ", YJIT" } else { "" };
                let stripped = if *stripped { ", stripped" } else { "" };
                let libc = match tree.libc {
                    Libc::Glibc => "",
                    Libc::Musl => ", musl",
                };
                let (package, suite) = (tree.package, tree.suite);
                format!(
                    "built from {package} of Debian {suite}: {linked}, {exports}{yjit}{libc}{stripped}"
                )
            }
        }
    }
}

impl Built {
    /// Its folder in the tree's cache entry.
    pub(super) fn folder(&self) -> String {
        folder(self.variant, self.stripped)
    }
}

/// The folder of an interpreter in its tree's cache entry.
pub(super) fn folder(variant: &Variant, stripped: bool) -> String {
    let stripped = if stripped { "-stripped" } else { "" };
    format!("{}{stripped}", variant.name)
}

impl Tree {
    /// All that decides what comes of it.
    fn text(&self) -> String {
        let text = format!("{self:#?}");
        // Whether the tests need it is another matter.
        let lines = text.lines().filter(|line| !line.contains("needed: "));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Whether the interpreter is in `libruby.so`, not in `ruby` itself.
    pub(super) fn is_shared(&self) -> bool {
        self.configure.contains(&"--enable-shared")
    }
}

/// A shell and the usual small programs, for Ruby programs that start others.
macro_rules! packages {
    ($ruby:literal) => {
        &[$ruby, "coreutils", "dash"]
    };
}

/// Arguments of `configure`: these, and what it is about.
///
/// Each interpreter finds its library beside itself, so that many can share an
/// installation. The extensions are those that tests and workloads use; the
/// others take longer to build than the interpreter.
macro_rules! configure {
    ($($argument:literal),+) => {
        &[
            $($argument,)+
            "--enable-load-relative",
            "--disable-install-doc",
            "--with-ext=continuation,coverage,date,digest,digest/sha2,etc,fcntl,io/console,io/wait,json,\
             json/generator,json/parser,monitor,objspace,pathname,rbconfig/sizeof,socket,stringio,strscan",
        ]
    };
}

const SHARED: &[&str] = configure!("--enable-shared", "--enable-yjit");
const STATIC: &[&str] = configure!("--disable-shared", "--enable-yjit");

/// The proposal to export three existing symbols (Ruby feature #21539) as edits
/// of the source of the 3.3 and 3.4 series, with `$attribute` on each declaration.
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

const STOCK: Variant = Variant {
    name: "stock",
    edits: &[],
    exports: Exports::Stock,
};
const DEFAULT: Variant = Variant {
    name: "default",
    edits: export_edits!(""),
    exports: Exports::Default,
};
const PROTECTED: Variant = Variant {
    name: "protected",
    edits: export_edits!(" __attribute__((visibility(\"protected\")))"),
    exports: Exports::Protected,
};

const SHARED_3_3_8: Tree = Tree {
    name: "source-3.3.8-shared",
    version: "3.3.8",
    package: "ruby3.3",
    suite: "trixie",
    sha256: "e2e1233ad275b7623a05edf23a01192626d1da454bdfe353a28a87acd8ef015c",
    libc: Libc::Glibc,
    configure: SHARED,
    needed: true,
    variants: &[&STOCK, &DEFAULT, &PROTECTED],
};
const STATIC_3_3_8: Tree = Tree {
    name: "source-3.3.8-static",
    needed: false,
    configure: STATIC,
    variants: &[&STOCK, &PROTECTED],
    ..SHARED_3_3_8
};
const MUSL_3_3_8: Tree = Tree {
    name: "source-3.3.8-musl",
    needed: true,
    libc: Libc::Musl,
    configure: configure!("--enable-shared", "--disable-yjit", "--without-gmp"),
    variants: &[&STOCK],
    ..SHARED_3_3_8
};
const SHARED_3_4_5: Tree = Tree {
    name: "source-3.4.5-shared",
    version: "3.4.5",
    package: "ruby3.4",
    suite: "experimental",
    sha256: "141fb3b0192b8196361b3b4d6c29fc9b10c0798dbe54ada1539d9f1c311bfcbf",
    needed: false,
    ..SHARED_3_3_8
};
const STATIC_3_4_5: Tree = Tree {
    name: "source-3.4.5-static",
    needed: true,
    configure: STATIC,
    variants: &[&STOCK, &PROTECTED],
    ..SHARED_3_4_5
};

/// Whether symbols and debug information are taken away, as distributions do.
const STRIPPED: bool = true;
const WHOLE: bool = false;

const fn built(
    name: &'static str,
    tree: &'static Tree,
    variant: &'static Variant,
    stripped: bool,
) -> Recipe {
    Recipe {
        name,
        version: tree.version,
        needed: tree.needed,
        origin: Origin::Built(Built {
            tree,
            variant,
            stripped,
        }),
    }
}

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
    built("source-3.3.8", &SHARED_3_3_8, &STOCK, WHOLE),
    built("source-3.3.8-stripped", &SHARED_3_3_8, &STOCK, STRIPPED),
    built("source-3.3.8-default", &SHARED_3_3_8, &DEFAULT, WHOLE),
    built(
        "source-3.3.8-default-stripped",
        &SHARED_3_3_8,
        &DEFAULT,
        STRIPPED,
    ),
    built("source-3.3.8-protected", &SHARED_3_3_8, &PROTECTED, WHOLE),
    built(
        "source-3.3.8-protected-stripped",
        &SHARED_3_3_8,
        &PROTECTED,
        STRIPPED,
    ),
    built("source-3.3.8-static", &STATIC_3_3_8, &STOCK, WHOLE),
    built(
        "source-3.3.8-static-stripped",
        &STATIC_3_3_8,
        &STOCK,
        STRIPPED,
    ),
    built(
        "source-3.3.8-static-protected",
        &STATIC_3_3_8,
        &PROTECTED,
        WHOLE,
    ),
    built(
        "source-3.3.8-static-protected-stripped",
        &STATIC_3_3_8,
        &PROTECTED,
        STRIPPED,
    ),
    built("source-3.4.5", &SHARED_3_4_5, &STOCK, WHOLE),
    built("source-3.4.5-stripped", &SHARED_3_4_5, &STOCK, STRIPPED),
    built("source-3.4.5-default", &SHARED_3_4_5, &DEFAULT, WHOLE),
    built(
        "source-3.4.5-default-stripped",
        &SHARED_3_4_5,
        &DEFAULT,
        STRIPPED,
    ),
    built("source-3.4.5-protected", &SHARED_3_4_5, &PROTECTED, WHOLE),
    built(
        "source-3.4.5-protected-stripped",
        &SHARED_3_4_5,
        &PROTECTED,
        STRIPPED,
    ),
    built("source-3.4.5-static", &STATIC_3_4_5, &STOCK, WHOLE),
    built(
        "source-3.4.5-static-stripped",
        &STATIC_3_4_5,
        &STOCK,
        STRIPPED,
    ),
    built(
        "source-3.4.5-static-protected",
        &STATIC_3_4_5,
        &PROTECTED,
        WHOLE,
    ),
    built(
        "source-3.4.5-static-protected-stripped",
        &STATIC_3_4_5,
        &PROTECTED,
        STRIPPED,
    ),
    built("source-3.3.8-musl", &MUSL_3_3_8, &STOCK, STRIPPED),
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
                Origin::Built(_) => "source",
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
    fn every_built_version_is_there_in_every_variant() {
        let mut missing = Vec::new();
        for version in ["3.3.8", "3.4.5"] {
            for variant in ["", "-default", "-protected", "-static", "-static-protected"] {
                for stripped in ["", "-stripped"] {
                    let name = format!("source-{version}{variant}{stripped}");
                    let mut all = RECIPES.iter();
                    if !all.any(|recipe| recipe.name == name && recipe.has_yjit()) {
                        missing.push(name);
                    }
                }
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn each_run_of_the_tests_has_both_versions_both_ways_to_link_and_all_exports() {
        let needed = || {
            RECIPES.iter().filter_map(|recipe| match &recipe.origin {
                Origin::Built(built) if recipe.needed => Some(built),
                _ => None,
            })
        };
        for version in ["3.3.8", "3.4.5"] {
            assert!(needed().any(|built| built.tree.version == version));
        }
        for stripped in [STRIPPED, WHOLE] {
            let of = || needed().filter(|built| built.stripped == stripped);
            for shared in [true, false] {
                assert!(of().any(|built| built.tree.is_shared() == shared));
            }
            for exports in [Exports::Stock, Exports::Default, Exports::Protected] {
                assert!(of().any(|built| built.variant.exports == exports));
            }
        }
    }

    #[test]
    fn a_recipe_text_holds_the_edits() {
        let protected = RECIPES
            .iter()
            .find(|recipe| recipe.name == "source-3.3.8-protected")
            .unwrap();
        assert_eq!(protected.text().matches("visibility(").count(), 4);
    }

    #[test]
    fn every_built_interpreter_is_one_that_its_tree_gives() {
        for recipe in RECIPES {
            let Origin::Built(built) = &recipe.origin else {
                continue;
            };
            let given = built.tree.variants.iter().map(|variant| variant.name);
            assert!(
                given.into_iter().any(|name| name == built.variant.name),
                "{}",
                recipe.name
            );
            assert_eq!(recipe.version, built.tree.version, "{}", recipe.name);
        }
    }

    #[test]
    fn the_first_variant_of_a_tree_is_its_unmodified_source() {
        for recipe in RECIPES {
            if let Origin::Built(built) = &recipe.origin {
                assert!(built.tree.variants[0].edits.is_empty(), "{}", recipe.name);
            }
        }
    }

    #[test]
    fn the_names_of_built_interpreters_say_what_they_are() {
        for recipe in RECIPES {
            let Origin::Built(built) = &recipe.origin else {
                continue;
            };
            let says = |word: &str| recipe.name.split('-').any(|part| part == word);
            let name = recipe.name;
            assert_eq!(says("static"), !built.tree.is_shared(), "{name}");
            assert_eq!(
                says("default"),
                built.variant.exports == Exports::Default,
                "{name}"
            );
            assert_eq!(
                says("protected"),
                built.variant.exports == Exports::Protected,
                "{name}"
            );
            assert_eq!(says("musl"), built.tree.libc == Libc::Musl, "{name}");
            // There is no other musl than the stripped one.
            assert_eq!(says("stripped") || says("musl"), built.stripped, "{name}");
        }
    }
}
