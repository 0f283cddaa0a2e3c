//! `rbprof inspect` on the Rubies of the rig, and on files that are none.
#![expect(
    clippy::indexing_slicing,
    reason = "what is not in the JSON is null, which the tests do not expect"
)]

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Output;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use serde_json::Value;
use xtask::rubies;
use xtask::rubies::Installed;

const PROGRAM: &str = "STDOUT.sync = true; puts :ready; loop { [2, 1].sort }";
/// With YJIT, something that it has compiled is on the stack.
const COMPILED: &str = "STDOUT.sync = true; def f(n) = n.zero? ? run : f(n - 1); \
                        def run; puts :ready; loop { [2, 1].sort }; end; \
                        def g(n) = n.zero? ? 1 : g(n - 1); \
                        9.times { g(9) }; f(9)";

fn rbprof(arguments: &[&str]) -> Result<Output> {
    Ok(Command::new(env!("CARGO_BIN_EXE_rbprof-under-test"))
        .arg("inspect")
        .args(arguments)
        .output()?)
}

/// A running Ruby, and the file of its Ruby.
struct Running {
    target: Target,
    file: PathBuf,
}

fn start(ruby: &Installed, options: &[&str], program: &str) -> Result<Running> {
    let mut target = Target::start(ruby.command().args(options).args(["-e", program]))?;
    target.wait_for("ready")?;
    let report = json(&["--pid", &target.pid().to_string()])?;
    let path = report["file"]["path"].as_str().context("no path")?;
    let file = rig::file_of(target.pid(), path);
    Ok(Running { target, file })
}

fn json(arguments: &[&str]) -> Result<Value> {
    let mut all = vec!["--json"];
    all.extend(arguments);
    let output = rbprof(&all)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What `--check` says of a file: whether all is there, and its lines.
fn check(file: &Path) -> Result<(bool, Vec<String>)> {
    let output = rbprof(&["--check", &file.display().to_string()])?;
    let lines = String::from_utf8(output.stdout)?;
    Ok((
        output.status.success(),
        lines.lines().map(str::to_owned).collect(),
    ))
}

#[test]
fn the_check_passes_where_the_symbols_survive_strip() -> Result<()> {
    for recipe in rubies::needed() {
        let Some(ruby) = rig::ruby(recipe.name)? else {
            return Ok(());
        };
        let running = start(&ruby, &[], PROGRAM)?;
        let (all, lines) = check(&running.file)?;
        let exported = ["-default", "-protected"]
            .iter()
            .any(|variant| recipe.name.contains(variant));
        ensure!(all == exported, "{}: {lines:#?}", recipe.name);
        ensure!(lines.len() == 4, "{}: {lines:#?}", recipe.name);
        let visibility = if recipe.name.contains("-protected") {
            "protected"
        } else {
            "default"
        };
        for line in lines.iter().skip(1) {
            let ok = line.starts_with("ok ") && line.contains(visibility);
            ensure!(ok == exported || !exported, "{}: {line}", recipe.name);
        }
        // Before stripping they are there, but would not be afterwards.
        if recipe.name.starts_with("source-") && !exported && !recipe.name.contains("stripped") {
            let doomed = lines
                .iter()
                .filter(|line| line.contains("only in .symtab, which strip removes"));
            ensure!(
                recipe.name.contains("musl") || doomed.count() == 3,
                "{lines:#?}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_process_and_its_file_are_reported_on() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.3.8")? else {
        return Ok(());
    };
    let running = start(&ruby, &[], PROGRAM)?;
    let pid = running.target.pid().to_string();
    let report = json(&["--pid", &pid])?;
    ensure!(report["process"]["problem"].is_null(), "{report:#}");
    ensure!(report["process"]["threads"][1] == 1, "{report:#}");
    ensure!(report["missing"] == serde_json::json!([]), "{report:#}");
    ensure!(report["process"]["jit"]["state"] == "off", "{report:#}");
    let roots = report["process"]["roots"].as_array().context("no roots")?;
    for what in [
        "version",
        "VM",
        "execution context",
        "rb_vm_exec",
        "ruby_global_symbols",
    ] {
        let root = roots.iter().find(|root| root["what"] == what);
        let how = root.and_then(|root| root["how"].as_str());
        ensure!(how.is_some_and(|how| !how.is_empty()), "{what}: {report:#}");
    }

    let of_file = json(&[&running.file.display().to_string()])?;
    for same in ["version", "build_id", "symbols", "tls", "code", "plt"] {
        ensure!(of_file["file"][same] == report["file"][same], "{same}");
    }
    let file = &of_file["file"];
    ensure!(file["version"] == "3.3.8", "{file:#}");
    ensure!(file["stripped"] == true, "{file:#}");
    ensure!(file["machine"] == "x86-64", "{file:#}");
    ensure!(file["kind"] == "shared library", "{file:#}");
    ensure!(file["tls"]["offset_from"] == "the code of rb_thread_current");
    ensure!(
        file["code"]["vm_exec"]["range"][0].as_u64() > Some(0),
        "{file:#}"
    );
    ensure!(file["plt"]["jump_slots"].as_u64() > Some(1000), "{file:#}");
    ensure!(file["plt"]["vm_exec"] == false, "{file:#}");

    // The page for a person says the same.
    let page = String::from_utf8(rbprof(&["--pid", &pid])?.stdout)?;
    for part in [
        "Ruby                   3.3.8",
        "A profile would lack nothing.",
        "where rb_id2str looks for it",
        "not in any symbol table",
    ] {
        ensure!(page.contains(part), "{part:?} is not in\n{page}");
    }
    // The program that loads the library has no Ruby, and says which has.
    let program = format!("/proc/{pid}/exe");
    let error = String::from_utf8(rbprof(&[&program])?.stderr)?;
    ensure!(
        error.contains("it needs libruby-3.3.so.3.3: inspect that file"),
        "{error}"
    );
    Ok(())
}

#[test]
fn calls_through_the_linkage_table_are_seen() -> Result<()> {
    for (name, expected) in [
        ("source-3.3.8-default-stripped", true),
        ("source-3.3.8-protected-stripped", false),
    ] {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(());
        };
        let running = start(&ruby, &[], PROGRAM)?;
        let report = json(&[&running.file.display().to_string()])?;
        ensure!(report["file"]["plt"]["vm_exec"] == expected, "{report:#}");
        let compilers = &report["file"]["jit_compilers"];
        ensure!(*compilers == serde_json::json!(["YJIT"]), "{compilers}");
    }
    Ok(())
}

#[test]
fn yjit_is_seen_at_work() -> Result<()> {
    let Some(ruby) = rig::ruby("source-3.4.5-static-stripped")? else {
        return Ok(());
    };
    for (options, states) in [
        (&["--disable-yjit"][..], &["off"][..]),
        (&["--yjit", "--yjit-call-threshold=2"], &["on"]),
    ] {
        let running = start(&ruby, options, COMPILED)?;
        let report = json(&["--pid", &running.target.pid().to_string()])?;
        let jit = &report["process"]["jit"];
        let state = jit["state"].as_str().context("no state")?;
        ensure!(states.contains(&state), "{options:?}: {jit:#}");
        let ranges = jit["ranges"].as_array().context("no ranges")?;
        ensure!(
            ranges.is_empty() == (state == "off"),
            "{options:?}: {jit:#}"
        );
    }
    Ok(())
}

#[test]
fn what_is_no_ruby_is_refused_in_words() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let own = std::fs::read(std::env::current_exe()?)?;
    let text = dir.path().join("text");
    let cut = dir.path().join("cut");
    let empty = dir.path().join("empty");
    std::fs::write(&text, "#!/bin/sh\n")?;
    std::fs::write(&cut, own.get(..1000).context("so short")?)?;
    std::fs::write(&empty, "")?;
    let missing = dir.path().join("missing");
    // Whoever opens it waits for a writer.
    let pipe = dir.path().join("pipe");
    xtask::cmd::run(Command::new("mkfifo").arg(&pipe))?;
    for (file, words) in [
        (text.as_path(), "not an ELF file"),
        (&cut, "truncated or corrupted"),
        (&empty, "not an ELF file"),
        (&missing, "No such file or directory"),
        (dir.path(), "not a regular file"),
        (&pipe, "not a regular file"),
        (Path::new("/dev/null"), "not a regular file"),
        (Path::new("/bin/true"), "has no Ruby in it"),
    ] {
        for option in [None, Some("--check")] {
            let name = file.display().to_string();
            let arguments: Vec<&str> = option.into_iter().chain([name.as_str()]).collect();
            let output = rbprof(&arguments)?;
            let error = String::from_utf8(output.stderr)?;
            ensure!(!output.status.success(), "{name}");
            ensure!(
                error.contains(words) && error.contains(&name),
                "{name}: {error}"
            );
            ensure!(output.stdout.is_empty(), "{name}");
        }
    }
    ensure!(rbprof(&["--json"])?.status.code() == Some(2), "usage");
    let output = rbprof(&["--pid", &std::process::id().to_string()])?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(error.contains("runs no Ruby"), "{error}");
    ensure!(!output.status.success(), "not Ruby");
    Ok(())
}

/// A program that is always just starting is at most not ready.
#[test]
fn a_program_that_has_just_begun_is_not_given_up() -> Result<()> {
    let Some(ruby) = rig::ruby("source-3.3.8-stripped")? else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let script = dir.path().join("again.rb");
    let program = ruby.ruby.display().to_string();
    let again = script.display().to_string();
    std::fs::write(
        &script,
        format!("STDOUT.sync = true; puts :ready\nexec({program:?}, '--disable-gems', {again:?})"),
    )?;
    let mut target = Target::start(ruby.command().args(["--disable-gems", &again]))?;
    target.wait_for("ready")?;
    for _ in 0..8 {
        let output = rbprof(&["--pid", &target.pid().to_string()])?;
        let said = String::from_utf8(output.stdout)? + &String::from_utf8(output.stderr)?;
        ensure!(
            output.status.success() || said.contains("try again"),
            "{said}"
        );
    }
    Ok(())
}
