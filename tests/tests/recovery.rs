//! What is recovered from a build that shows nothing is what its symbols say.
//!
//! On every Ruby of the rig: once with what the build shows, once blind. The
//! truth for a stripped build is the symbol table of the same build before it
//! was stripped. How each root was found goes into a table of the docs.

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use anyhow::ensure;
use rbprof::kernel::Kernel;
use rbprof::kernel::KernelError;
use rbprof::kernel::Options;
use rbprof::targets::Attacher;
use rbprof::targets::Target as Attached;
use rbprof::targets::ThreadPointer;
use rbprof::targets::code;
use rbprof::targets::elf::Elf;
use rbprof::targets::elf::Machine;
use rbprof::targets::elf::file_cache;
use rbprof::targets::roots::Symbols;
use rbprof::targets::ruby::Located;
use rbprof_common::layout::Version;
use rbprof_common::process::Range;
use rbprof_common::process::root;
use rbprof_tests::frames;
use rbprof_tests::points;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use xtask::rubies;

/// Two threads that run Ruby, one that sleeps.
const PROGRAM: &str = "Thread.new { sleep }; Thread.new { loop { [2, 1].sort } }; \
                       STDOUT.sync = true; puts :ready; gets";
/// The table in the docs.
const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/rubies.md");
const TABLE_BEGINS: &str =
    "<!-- table: written by `RBPROF_BLESS=1 cargo xtask test recovery` -->\n";
const TABLE_HEAD: &str = "\
    | Ruby | execution context in | found by | VM | `rb_vm_exec` | `ruby_global_symbols` |\n\
    |---|---|---|---|---|---|\n";
const TABLE_ENDS: &str = "<!-- end of the table -->\n";

/// What the symbols of a file say, before the bias.
#[derive(Debug, PartialEq, Eq)]
struct Truth {
    context: Option<u64>,
    vm_exec: Option<Range>,
    cold: Option<Range>,
    global_symbols: Option<u64>,
}

impl Truth {
    fn of(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let file = file_cache(file);
        let elf = Elf::parse(&file)?;
        let symbols = Symbols::of(&elf);
        let value = |located: Located| located.symbol.value;
        let range = |located: Located| Range {
            start: located.symbol.value,
            end: located.symbol.value + located.symbol.size,
        };
        Ok(Self {
            context: symbols.current_ec.or(symbols.current_ec_global).map(value),
            vm_exec: symbols.vm_exec.map(range),
            cold: symbols.vm_exec_cold.map(range),
            global_symbols: symbols.global_symbols.map(value),
        })
    }
}

/// A running Ruby, attached to twice.
struct Both {
    seen: Attached,
    blind: Attached,
    /// Its file, as this process can open it.
    file: PathBuf,
    _program: Target,
}

fn attach(kernel: &mut Kernel, command: &mut Command) -> Result<Both> {
    let mut program = Target::start(command)?;
    program.wait_for("ready")?;
    let pid = program.pid();
    let threads: Vec<ThreadPointer> = kernel
        .thread_pointers(pid)?
        .into_iter()
        .map(ThreadPointer::from)
        .collect();
    let seen = Attacher::default().attach(pid, &threads)?;
    let mut blind = Attacher {
        ignore_symbols: true,
        ..Attacher::default()
    };
    let blind = blind.attach(pid, &threads)?;
    let file = rig::file_of(pid, &seen.ruby.path);
    Ok(Both {
        seen,
        blind,
        file,
        _program: program,
    })
}

fn kernel() -> Result<Option<Kernel>> {
    match Kernel::load(&Options::default()) {
        Ok(kernel) => Ok(Some(kernel)),
        Err(
            error @ (KernelError::Denied { .. } | KernelError::TooOld(_) | KernelError::NoBtf(_)),
        ) => {
            rig::skip(&error.to_string())?;
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether what was found blind is the truth, as far as that is known.
fn is_true(truth: &Truth, both: &Both) -> Result<()> {
    let Both { seen, blind, .. } = both;
    ensure!(
        blind.entry == seen.entry,
        "blind: {:?}\n  with symbols: {:?}",
        blind.entry,
        seen.entry
    );
    ensure!(blind.global_symbols == seen.global_symbols, "symbol table");
    ensure!(
        blind.vm_exec_candidate.is_none(),
        "rb_vm_exec not confirmed"
    );
    let bias = blind.ruby.bias;
    let live = |range: Range| Range {
        start: bias + range.start,
        end: bias + range.end,
    };
    let [hot, cold] = blind.entry.vm_exec;
    if let Some(vm_exec) = truth.vm_exec {
        ensure!(
            hot == live(vm_exec),
            "rb_vm_exec: {hot:x?}, not {vm_exec:x?}"
        );
    }
    if let Some(part) = truth.cold {
        ensure!(
            cold == live(part),
            "its cold part: {cold:x?}, not {part:x?}"
        );
    }
    if let Some(symbols) = truth.global_symbols {
        let found = blind.global_symbols.map(|address| address - bias);
        ensure!(found == Some(symbols), "{found:x?}, not {symbols:#x}");
    }
    // Which variable of the thread-local block: the code must know it as well.
    if let Some(context) = truth.context {
        if blind.entry.root == root::GLOBAL {
            let found = blind.entry.ec.cast_unsigned() - bias;
            ensure!(found == context, "{found:#x}, not {context:#x}");
        } else {
            let file = file_cache(std::fs::File::open(&both.file)?);
            let in_code = code::analyse(&Elf::parse(&file)?, None)?.current_ec;
            ensure!(in_code == Some(context), "{in_code:x?}, not {context:#x}");
        }
    }
    Ok(())
}

/// How something was found, in a word or two.
fn way(attached: &Attached, what: &str) -> &'static str {
    let mut notes = attached.provenance.iter().filter(|it| it.what == what);
    let Some(how) = notes.next().map(|note| &note.how) else {
        return "not found";
    };
    [
        ("not found", "not found"),
        (".dynsym, protected", "`.dynsym`, protected"),
        (".dynsym", "`.dynsym`"),
        (".symtab", "`.symtab`"),
        ("debug file", "debug file"),
        ("contexts, which agree", "contexts agree"),
    ]
    .into_iter()
    .find(|(part, _)| how.contains(part))
    .map_or("recovered", |(_, way)| way)
}

fn row(name: &str, attached: &Attached) -> String {
    let place = match attached.entry.root {
        root::GLOBAL => "one global",
        root::TLS_DTV => "thread vector",
        root::TLS_STATIC if attached.ruby.is_program => "the program's block",
        _ => "static block",
    };
    format!(
        "| {name} | {place} | {} | {} | {} | {} |\n",
        way(attached, "execution context"),
        way(attached, "VM"),
        way(attached, "rb_vm_exec"),
        way(attached, "ruby_global_symbols"),
    )
}

#[test]
fn recovery_gives_what_the_symbols_say() -> Result<()> {
    let Some(mut kernel) = kernel()? else {
        return Ok(());
    };
    let mut rows = Vec::new();
    let mut wrong = Vec::new();
    for recipe in rubies::needed() {
        let Some(ruby) = rig::ruby(recipe.name)? else {
            // What was wrong with the others is told all the same.
            continue;
        };
        let both = attach(&mut kernel, ruby.command().args(["-e", PROGRAM]))
            .with_context(|| recipe.name)?;
        // The same build before it was stripped.
        let truth = match recipe.name.strip_suffix("-stripped") {
            Some(whole) if rubies::all().any(|other| other.name == whole) => {
                let Some(whole) = rig::ruby(whole)? else {
                    continue;
                };
                let whole = attach(&mut kernel, whole.command().args(["-e", PROGRAM]))?;
                Truth::of(&whole.file)?
            }
            _ => Truth::of(&both.file)?,
        };
        if recipe.name.starts_with("source-") && !recipe.name.contains("musl") {
            ensure!(
                truth.context.is_some() && truth.vm_exec.is_some(),
                "{}: the truth is not known: {truth:?}",
                recipe.name
            );
        }
        if let Err(error) = is_true(&truth, &both) {
            wrong.push(format!("{}: {error:#}", recipe.name));
        }
        ensure!(
            both.seen.ruby.version == Version::parse(ruby.version).context("the version")?,
            "its version"
        );
        rows.push((recipe.name, row(recipe.name, &both.seen)));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    same_table(&rows)
}

/// Whether the docs have these rows in their table.
fn same_table(rows: &[(&str, String)]) -> Result<()> {
    let docs = std::fs::read_to_string(TABLE).context(TABLE)?;
    let (before, rest) = docs.split_once(TABLE_BEGINS).context("no table")?;
    let (old, after) = rest.split_once(TABLE_ENDS).context("no end of the table")?;
    let old_row = |name: &str| {
        let start = format!("| {name} |");
        old.lines().find(|line| line.starts_with(&start))
    };
    if std::env::var_os("RBPROF_BLESS").is_some() {
        // Those that were not tried now keep their rows.
        let mut table = TABLE_HEAD.to_owned();
        for recipe in rubies::all() {
            let new = rows.iter().find(|(name, _)| *name == recipe.name);
            match (new, old_row(recipe.name)) {
                (Some((_, row)), _) => table.push_str(row),
                (None, Some(row)) => table.extend([row, "\n"]),
                (None, None) => {}
            }
        }
        let new = format!("{before}{TABLE_BEGINS}{table}{TABLE_ENDS}{after}");
        return Ok(std::fs::write(TABLE, new)?);
    }
    for (name, row) in rows {
        ensure!(
            old_row(name) == Some(row.trim_end()),
            "docs/rubies.md has another row; RBPROF_BLESS=1 rewrites it:\n{row}{:?}",
            old_row(name)
        );
    }
    Ok(())
}

/// The code of arm64 files gives the same facts, where symbols tell the truth,
/// and all facts where they do not.
#[test]
fn arm64_files_give_away_as_much() -> Result<()> {
    for foreign in rubies::FOREIGN {
        let path = match foreign.library() {
            Ok(path) => path,
            Err(error) => {
                rig::skip(&error.to_string())?;
                continue;
            }
        };
        let truth = Truth::of(&path)?;
        let file = file_cache(std::fs::File::open(&path)?);
        let elf = Elf::parse(&file)?;
        ensure!(elf.machine() == Machine::Aarch64, "{}", foreign.name);
        let found = code::analyse(&elf, None).with_context(|| foreign.name)?;
        let vm_exec = found.vm_exec.map_err(|error| anyhow!("{error}"))?;
        ensure!(
            vm_exec
                .how
                .contains("rb_iseq_eval ends with, and the caller"),
            "{}: {}",
            foreign.name,
            vm_exec.how
        );
        if let Some(range) = truth.vm_exec {
            ensure!(vm_exec.range == range, "{}: {vm_exec:x?}", foreign.name);
        }
        let version = Version::parse(foreign.version).context("the version")?;
        if version >= Version::new(3, 0, 0) {
            let segment = elf.tls().context("no thread-local block")?;
            let context = found.current_ec.context("no execution context")?;
            ensure!(context < segment.memory_size, "{}", foreign.name);
            ensure!(truth.context.is_none_or(|truth| truth == context));
        } else {
            // Through the global offset table, which only a loader fills in.
            ensure!(!found.context_references.is_empty(), "{}", foreign.name);
        }
        ensure!(!found.symbol_references.is_empty(), "{}", foreign.name);
        ensure!(!found.vm_references.is_empty(), "{}", foreign.name);
    }
    Ok(())
}

/// The builds of the rig with Ruby in the program, symbols and all.
fn static_builds() -> impl Iterator<Item = &'static str> {
    rubies::needed()
        .map(|recipe| recipe.name)
        .filter(|name| name.ends_with("-static"))
}

/// The parts that GCC moved away from functions are found again: the symbols of
/// a build that was not stripped tell which there are.
#[test]
fn cold_parts_of_functions_are_found() -> Result<()> {
    use object::Object as _;
    use object::ObjectSymbol as _;
    for name in static_builds() {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(());
        };
        let bytes = std::fs::read(&ruby.ruby)?;
        let file = object::File::parse(&*bytes)?;
        // By name, those that only one function has; Rust's compiler makes no
        // cold parts, and jumps to functions conditionally.
        let mut named: HashMap<&str, Vec<Range>> = HashMap::new();
        for symbol in file.symbols() {
            let name = symbol.name()?;
            if symbol.kind() == object::SymbolKind::Text && !name.starts_with("_ZN") {
                named.entry(name).or_default().push(Range {
                    start: symbol.address(),
                    end: symbol.address() + symbol.size(),
                });
            }
        }
        let functions: Vec<(&str, Range, Option<Range>)> = named
            .iter()
            .filter(|(name, _)| !name.contains(".cold"))
            .filter_map(|(name, ranges)| match ranges.as_slice() {
                [range] if range.start < range.end => {
                    let cold = named.get(format!("{name}.cold").as_str());
                    Some((*name, *range, cold.and_then(|it| it.first().copied())))
                }
                _ => None,
            })
            .collect();
        let addresses: Vec<u64> = functions.iter().map(|(_, range, _)| range.start).collect();
        let found = code::cold_parts(&Elf::parse(&*bytes)?, &addresses)?;
        let (mut right, mut missed, mut wrong) = (0, 0, Vec::new());
        for ((name, _, truth), found) in functions.iter().zip(found) {
            match (truth, found) {
                (None, None) => {}
                (Some(truth), Some(found)) if *truth == found => right += 1,
                (Some(_), None) => missed += 1,
                (truth, found) => wrong.push(format!("{name}: {found:x?}, not {truth:x?}")),
            }
        }
        println!(
            "{name}: {right} right, {missed} missed, {} wrong",
            wrong.len()
        );
        ensure!(
            right > 300 && missed * 10 < right,
            "{right}, {missed} missed"
        );
        // An alias of a function has its part, under the function's name.
        ensure!(wrong.len() < 5, "{wrong:#?}");
    }
    Ok(())
}

/// A program of one's own that Ruby is linked into: Ruby's own `main`.
const HOST: &str = r"
    #include <ruby/ruby.h>
    int main(int argc, char **argv) {
        ruby_sysinit(&argc, &argv);
        RUBY_INIT_STACK;
        ruby_init();
        return ruby_run_node(ruby_options(argc, argv));
    }";

/// All that the program exports: what the tables of encodings need, which are
/// loaded like extensions.
const EXPORTS: &str = "{ rb_enc*; rb_declare_transcoder; rb_register_transcoder; onig*; Onig*; };";

/// Builds [`HOST`] with the static library of a Ruby of the rig; nothing that a
/// profiler could use is exported, and nothing is left of the symbols.
fn host_of(ruby: &rubies::Installed, dir: &Path) -> Result<PathBuf> {
    const CONFIG: &str = "c = RbConfig::CONFIG; puts c['rubyhdrdir'], c['rubyarchhdrdir'], \
                          c['libdir'], c['LIBRUBY_A'], c['MAINLIBS']";
    let config = xtask::cmd::output(ruby.command().args(["-rrbconfig", "-e", CONFIG]))?;
    let lines: Vec<&str> = config.lines().collect();
    let &[headers, arch_headers, lib, archive, libs] = lines.as_slice() else {
        anyhow::bail!("its configuration: {config}");
    };
    let (source, program) = (dir.join("host.c"), dir.join("host"));
    let exports = dir.join("exports");
    std::fs::write(&source, HOST)?;
    std::fs::write(&exports, EXPORTS)?;
    xtask::cmd::run(
        Command::new("cc")
            .args(["-s", "-O2"])
            .arg(format!("-Wl,--dynamic-list={}", exports.display()))
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .arg(format!("-I{headers}"))
            .arg(format!("-I{arch_headers}"))
            .arg(Path::new(lib).join(archive))
            .args(libs.split_whitespace()),
    )?;
    Ok(program)
}

#[test]
fn embedded_without_a_single_symbol() -> Result<()> {
    for name in static_builds() {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(());
        };
        let dir = tempfile::tempdir()?;
        let program = host_of(&ruby, dir.path())?;
        {
            let file = file_cache(std::fs::File::open(&program)?);
            let elf = Elf::parse(&file)?;
            ensure!(elf.is_stripped()?, "it is stripped");
            for name in [
                "ruby_version",
                "rb_thread_current",
                "rb_iseq_eval",
                "rb_id2str",
            ] {
                let exported = elf.dynamic_symbol(name.as_bytes())?;
                ensure!(exported.is_none(), "{name} is exported");
            }
        }
        let lib = xtask::cmd::output(ruby.command().args([
            "-rrbconfig",
            "-e",
            "c = RbConfig::CONFIG; print c['rubylibdir'], ':', c['rubyarchdir']",
        ]))?;
        let target = frames::start_with(
            Command::new(&program)
                .arg(rig::workload("frames.rb"))
                .env("RUBYLIB", lib),
            frames::SPIN_MS,
        )?;
        let Some((said, recording)) = frames::record(target)? else {
            return Ok(());
        };
        frames::c_methods_have_names(&recording)?;
        let mut points = points::parse(&said)?;
        points::relabel(&mut points, frames::LABELS)?;
        frames::compare(&points, &recording, frames::Jit::Off)
            .with_context(|| format!("in a program with {name}"))?;
    }
    Ok(())
}
