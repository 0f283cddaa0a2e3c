//! The C extension of the test rig does what tests on stacks of C and Ruby code
//! take for granted, in every Ruby.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use object::Object as _;
use object::ObjectSymbol;
use rbprof_tests::rig;
use xtask::cmd;
use xtask::rubies;
use xtask::rubies::Extension;
use xtask::rubies::Installed;

/// The functions that stand in stacks, by the names that the symbol table has.
const FUNCTIONS: &[&str] = &[
    "burn_leaf",
    "burn_middle",
    "burn_outer",
    "burn_cpu",
    "burn_without_gvl",
    "without_gvl",
    "burn_with_block",
    "block_outer",
    "block_middle",
    "block_leaf",
    "burn_funcall",
    "burn_protect",
    "protected_block",
    "handler",
    "burn_rescue",
    "rescued",
    "burn_nest",
    "nest_level",
    "burn_at",
    "burn_c_thread",
    "thread_main",
    "join",
];

/// The functions that are known without a symbol table.
const EXPORTED: &[&str] = &["Init_burn", "burn_here"];

#[test]
fn every_method_works_in_every_ruby() -> Result<()> {
    in_each_ruby(|ruby, extension| {
        works(ruby, &extension.folder).context("with symbols")?;
        works(ruby, &extension.stripped).context("stripped")
    })
}

#[test]
fn every_function_is_there_under_its_own_name() -> Result<()> {
    in_each_ruby(|_, extension| {
        let files = [(&extension.file, true), (&extension.stripped_file, false)];
        for (path, with_symbols) in files {
            let bytes = std::fs::read(path)?;
            let file = object::File::parse(bytes.as_slice())?;
            // As written: neither inlined everywhere nor cloned.
            let symbols: Vec<&str> = file.symbols().filter_map(|it| it.name().ok()).collect();
            for name in FUNCTIONS {
                ensure!(
                    symbols.contains(name) == with_symbols,
                    "{name} in {}",
                    path.display()
                );
            }
            let mut exported: Vec<&str> = file
                .dynamic_symbols()
                .filter(ObjectSymbol::is_definition)
                .filter_map(|symbol| symbol.name().ok())
                .collect();
            exported.sort_unstable();
            ensure!(
                exported == EXPORTED,
                "{} exports {exported:?}",
                path.display()
            );
            let debug = file.section_by_name(".debug_info").is_some();
            ensure!(debug == with_symbols, "debug information: {debug}");
            ensure!(file.section_by_name(".eh_frame").is_some(), "no .eh_frame");
        }
        Ok(())
    })
}

/// Does it for each needed Ruby of this machine.
fn in_each_ruby(check: impl Fn(&Installed, &Extension) -> Result<()>) -> Result<()> {
    for recipe in rubies::needed() {
        let Some(ruby) = rig::ruby(recipe.name)? else {
            continue;
        };
        let Some(extension) = rig::extension(&ruby)? else {
            continue;
        };
        check(&ruby, &extension).with_context(|| format!("on {}", ruby.name))?;
    }
    Ok(())
}

/// Runs the workload with the extension in that folder, and checks what it says.
fn works(ruby: &Installed, folder: &Path) -> Result<()> {
    let mut command = ruby.script(&rig::workload("burn.rb"))?;
    let said = cmd::output(command.env("RUBYLIB", folder))?;
    let said: HashMap<&str, &str> = said
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .collect();
    let of = |name: &str| {
        let found = said.get(name).copied();
        found.with_context(|| format!("no word of {name}: {said:?}"))
    };
    // What it spent, and the rest: it burns at least as long as it is told to.
    let after = |name: &str, ms: u64| -> Result<&str> {
        let (spent, rest) = of(name)?.split_once('\t').unwrap_or((of(name)?, ""));
        ensure!(
            spent.parse::<u64>()? >= ms * 1000,
            "{name}({ms}) spent {spent} us"
        );
        Ok(rest)
    };
    let expected = [
        (
            "loaded",
            of("loaded")?,
            folder.join("burn.so").display().to_string(),
        ),
        ("cpu", after("cpu", 10)?, String::new()),
        ("without_gvl", after("without_gvl", 100)?, "true".to_owned()),
        (
            "with_block",
            after("with_block", 5)?,
            "0,1,2,3,4\t1".to_owned(),
        ),
        ("funcall", after("funcall", 10)?, "1".to_owned()),
        (
            "protect",
            after("protect", 10)?,
            "protected\tnil".to_owned(),
        ),
        (
            "protect without exception",
            of("protect without exception")?,
            "fine".to_owned(),
        ),
        (
            "protect left by break",
            of("protect left by break")?,
            "left".to_owned(),
        ),
        ("rescue", after("rescue", 10)?, "rescued\tnil".to_owned()),
        ("nest", of("nest")?, "10\t4".to_owned()),
        ("here", of("here")?, "nil".to_owned()),
        ("c_thread", after("c_thread", 50)?, "true".to_owned()),
        ("without block", of("without block")?, "refused".to_owned()),
    ];
    for (name, found, expected) in expected {
        ensure!(
            found == expected,
            "{name} gave {found:?} instead of {expected:?}"
        );
    }
    Ok(())
}
