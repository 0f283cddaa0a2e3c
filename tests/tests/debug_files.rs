//! Symbols that were put into a separate file, as distributions do: found below
//! the process's own root, by build id and by name.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use serde_json::Value;
use xtask::cmd;
use xtask::rubies::Installed;

const PROGRAM: &str = "STDOUT.sync = true; puts :ready; loop { [2, 1].sort }";
/// What the debug file has and the stripped library has not.
const FOUND: [&str; 3] = ["ruby_current_ec", "rb_vm_exec", "ruby_global_symbols"];

/// The shared library of a Ruby of the rig.
fn library(ruby: &Installed) -> Result<PathBuf> {
    let prefix = ruby.ruby.parent().and_then(Path::parent);
    let lib = prefix.context("no prefix")?.join("lib");
    let files: Vec<PathBuf> = std::fs::read_dir(&lib)?
        .filter_map(|file| file.ok()?.path().canonicalize().ok())
        .filter(|path| path.to_string_lossy().contains("/libruby.so."))
        .collect();
    files.first().cloned().context("no libruby")
}

/// A root file system with just what the interpreter needs to run a line of
/// Ruby: its program, and every library that it is linked to.
fn small_root(ruby: &Installed, root: &Path) -> Result<()> {
    let linked = cmd::output(Command::new("ldd").arg(&ruby.ruby))?;
    let libraries = linked
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    for file in libraries.chain([ruby.ruby.to_str().context("its path")?]) {
        let to = root.join(file.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("no folder")?)?;
        std::fs::copy(file, to).with_context(|| file.to_owned())?;
    }
    Ok(())
}

/// What `rbprof inspect` says of the Ruby in that root.
fn inspect_in(root: &Path, ruby: &Installed) -> Result<Value> {
    let mut target = Target::start(Command::new("chroot").arg(root).arg(&ruby.ruby).args([
        "--disable-gems",
        "-e",
        PROGRAM,
    ]))?;
    target.wait_for("ready")?;
    let output = Command::new(env!("CARGO_BIN_EXE_rbprof-under-test"))
        .args(["inspect", "--json", "--pid", &target.pid().to_string()])
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Where each symbol was found.
fn sources(report: &Value) -> Vec<(String, Option<String>)> {
    let symbols = report.pointer("/file/symbols").and_then(Value::as_array);
    let text = |symbol: &Value, field: &str| {
        let field = symbol.get(field)?;
        field.as_str().map(str::to_owned)
    };
    symbols
        .into_iter()
        .flatten()
        .filter_map(|symbol| Some((text(symbol, "name")?, text(symbol, "source"))))
        .filter(|(name, _)| FOUND.contains(&name.as_str()))
        .collect()
}

#[test]
fn debug_files_are_found_below_the_process_s_root() -> Result<()> {
    let Some(ruby) = rig::ruby("source-3.3.8-stripped")? else {
        return Ok(());
    };
    let Some(whole) = rig::ruby("source-3.3.8")? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let root = dir.path();
    small_root(&ruby, root)?;

    let report = inspect_in(root, &ruby)?;
    ensure!(sources(&report).len() == 3, "{report:#}");
    ensure!(sources(&report).iter().all(|(_, source)| source.is_none()));
    let debug_file = |report: &Value| {
        let place = report.pointer("/file/debug_file");
        place.and_then(Value::as_str).map(str::to_owned)
    };
    ensure!(debug_file(&report).is_none(), "{report:#}");
    let build_id = report.pointer("/file/build_id").and_then(Value::as_str);
    let build_id = build_id.context("no build id")?.to_owned();

    // By build id, of the whole library itself.
    let (first, rest) = build_id.split_at(2);
    let by_id = format!("usr/lib/debug/.build-id/{first}/{rest}.debug");
    let place = root.join(&by_id);
    std::fs::create_dir_all(place.parent().context("no folder")?)?;
    std::fs::copy(library(&whole)?, &place)?;
    let report = inspect_in(root, &ruby)?;
    let all_there = |report: &Value| {
        sources(report)
            .iter()
            .all(|(_, source)| source.as_deref() == Some("debug file"))
    };
    ensure!(all_there(&report), "{report:#}");
    let expected = format!("/{by_id} of the process");
    ensure!(debug_file(&report) == Some(expected), "{report:#}");
    let root_of = |report: &Value, what: &str| {
        let roots = report.pointer("/process/roots")?.as_array()?;
        let root = roots
            .iter()
            .find(|root| root.get("what") == Some(&what.into()))?;
        Some(root.get("how")?.as_str()?.to_owned())
    };
    for what in ["execution context", "rb_vm_exec", "ruby_global_symbols"] {
        let how = root_of(&report, what).unwrap_or_default();
        ensure!(how.starts_with("debug file"), "{what}: {how}");
    }

    // That of another build is not taken.
    let Some(other) = rig::ruby("source-3.3.8-protected")? else {
        return Ok(());
    };
    std::fs::copy(library(&other)?, &place)?;
    let report = inspect_in(root, &ruby)?;
    ensure!(debug_file(&report).is_none(), "{report:#}");
    std::fs::remove_file(&place)?;

    // By the name that the library has, beside it.
    let stripped = library(&ruby)?;
    let inside = root.join(stripped.strip_prefix("/")?);
    let debug = inside.parent().context("no folder")?.join(".debug");
    std::fs::create_dir_all(&debug)?;
    let debug = debug.join("libruby.debug");
    cmd::run(
        Command::new("objcopy")
            .arg("--only-keep-debug")
            .arg(library(&whole)?)
            .arg(&debug),
    )?;
    // The library is in use under its own name in no process any more.
    let used: Vec<PathBuf> = std::fs::read_dir(inside.parent().context("no folder")?)?
        .filter_map(|file| Some(file.ok()?.path()))
        .filter(|path| path.to_string_lossy().contains("/libruby.so."))
        .collect();
    for library in used {
        cmd::run(
            Command::new("objcopy")
                .arg(format!("--add-gnu-debuglink={}", debug.display()))
                .arg(&library),
        )?;
    }
    let report = inspect_in(root, &ruby)?;
    ensure!(all_there(&report), "{report:#}");
    ensure!(
        debug_file(&report).is_some_and(|place| place.contains("/.debug/libruby.debug")),
        "{report:#}"
    );
    Ok(())
}
