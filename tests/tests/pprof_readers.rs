//! What others make of our pprof files: `go tool pprof` and pprof-format.
//!
//! Needs Go, or Node.js with npm. Where one is missing its test says so and
//! passes, unless `RBPROF_REQUIRE_ALL=1` is set, as in CI.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use rbprof::output::Destination;
use rbprof::output::Format;
use rbprof::output::write;
use rbprof::profile::CounterKind;
use rbprof::profile::Function;
use rbprof::profile::FunctionKind;
use rbprof::profile::Labels;
use rbprof::profile::LocationId;
use rbprof::profile::Metadata;
use rbprof::profile::Profile;
use rbprof_tests::pprof_format;
use rbprof_tests::pprof_format::available;

fn location(
    profile: &mut Profile,
    kind: FunctionKind,
    label: &str,
    file: &str,
    first_line: u32,
    line: u32,
) -> LocationId {
    let base_label = label.rsplit(['#', '.', ' ']).next().unwrap();
    let function = profile.intern_function(&Arc::new(Function {
        kind,
        label: label.into(),
        base_label: base_label.into(),
        file: file.into(),
        first_line,
    }));
    profile.intern_location(function, line)
}

/// Names of every shape Ruby has, in three samples of two threads.
fn profile() -> Profile {
    let mut profile = Profile::new(Metadata {
        start_unix_ns: 1_700_000_000_000_000_000,
        duration_ns: 2_000_000_000,
        frequency_hz: 100,
        command: "ruby app.rb".to_owned(),
        pids: vec![4242],
        tool: "rbprof 0.1.0".to_owned(),
        kernel: "6.1.0".to_owned(),
        rubies: vec!["3.3.8".to_owned()],
        ..Metadata::default()
    });
    profile.metadata.count("samples lost", CounterKind::Loss, 3);
    let ruby = FunctionKind::Ruby;
    let p = &mut profile;
    let main = location(p, ruby, "<main>", "/app/app.rb", 1, 40);
    let class = location(p, ruby, "<class:Shop>", "/app/shop.rb", 3, 4);
    let top = location(p, ruby, "<top (required)>", "/app/shop.rb", 1, 3);
    let block = location(
        p,
        ruby,
        "block (2 levels) in Shop::Order#total",
        "/app/order.rb",
        31,
        32,
    );
    let total = location(p, ruby, "Shop::Order#total", "/app/order.rb", 30, 31);
    let total_later = location(p, ruby, "Shop::Order#total", "/app/order.rb", 30, 35);
    let each = location(p, FunctionKind::CFunction, "Array#each", "<cfunc>", 0, 0);
    let single = location(p, ruby, "Shop.größe", "(eval at /app/app.rb:7)", 7, 8);

    let labels = |tid, name: &str| Labels {
        pid: 4242,
        tid,
        thread_name: Some(name.into()),
        comm: Some("ruby".into()),
        state: None,
    };
    let first = p.intern_labels(&labels(4242, "main thread"));
    let second = p.intern_labels(&labels(4243, "worker"));
    let stack = p.intern_stack(&[block, each, total, main]);
    p.add(stack, first, 70);
    let stack = p.intern_stack(&[total_later, main]);
    p.add(stack, first, 20);
    let stack = p.intern_stack(&[single, class, top, main]);
    p.add(stack, second, 10);
    profile
}

/// The profile in a file; the directory goes with the value.
fn file() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("profile.pb.gz");
    Destination::from(path.clone())
        .save(|out| write(&profile(), Format::Pprof, out))
        .unwrap();
    (directory, path)
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn go_tool_pprof(arguments: &[&str], file: &Path) -> String {
    let mut command = Command::new("go");
    command.args(["tool", "pprof"]).args(arguments).arg(file);
    // It keeps profiles it has fetched there, and may look for settings.
    command.env("PPROF_TMPDIR", file.parent().unwrap());
    output(&mut command)
}

/// A line as its words, so that padding does not matter.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn go_tool_pprof_reads_functions_files_lines_and_labels() {
    if !available("go", "version").unwrap() {
        return;
    }
    let (_directory, file) = file();

    let top = go_tool_pprof(&["-top"], &file);
    for expected in [
        "File: ruby",
        "Type: cpu",
        "700ms 70.00% 70.00% 700ms 70.00% block (2 levels) in Shop::Order#total",
        "200ms 20.00% 90.00% 900ms 90.00% Shop::Order#total",
        "100ms 10.00% 100% 100ms 10.00% Shop.größe",
        "0 0% 100% 1000ms 100% <main>",
        "0 0% 100% 700ms 70.00% Array#each",
        "0 0% 100% 100ms 10.00% <class:Shop>",
        "0 0% 100% 100ms 10.00% <top (required)>",
    ] {
        let found = top.lines().any(|line| words(line) == words(expected));
        assert!(found, "no line {expected:?} in\n{top}");
    }

    let counts = go_tool_pprof(&["-top", "-sample_index=samples"], &file);
    assert!(counts.contains("Type: samples"), "{counts}");

    let lines = go_tool_pprof(&["-top", "-lines"], &file);
    for expected in [
        "block (2 levels) in Shop::Order#total /app/order.rb:32",
        "Shop::Order#total /app/order.rb:35",
        "Shop.größe (eval at /app/app.rb:7):8",
        "<main> /app/app.rb:40",
    ] {
        assert!(lines.contains(expected), "no {expected:?} in\n{lines}");
    }

    let tags = go_tool_pprof(&["-tags"], &file);
    for expected in [
        "pid:",
        "tid:",
        "thread_name:",
        "comm:",
        "main thread",
        "worker",
    ] {
        assert!(tags.contains(expected), "no {expected:?} in\n{tags}");
    }
    let focused = go_tool_pprof(&["-top", "-tagfocus=thread_name=worker"], &file);
    assert!(focused.contains("Shop.größe"), "{focused}");
    assert!(!focused.contains("Array#each"), "{focused}");

    let comments = go_tool_pprof(&["-comments"], &file);
    for expected in [
        "tool: rbprof 0.1.0",
        "mode: CPU",
        "ruby: 3.3.8",
        "samples lost: 3",
    ] {
        assert!(
            comments.contains(expected),
            "no {expected:?} in\n{comments}"
        );
    }

    let raw = go_tool_pprof(&["-raw"], &file);
    for expected in [
        "PeriodType: cpu nanoseconds",
        "Period: 10000000",
        "Duration: 2",
        "samples/count cpu/nanoseconds[dflt]",
        "s=30(total)",
    ] {
        assert!(raw.contains(expected), "no {expected:?} in\n{raw}");
    }
}

#[test]
fn go_tool_pprof_merges_two_files_without_doubling() {
    if !available("go", "version").unwrap() {
        return;
    }
    let (directory, file) = file();
    let copy = directory.path().join("copy.pb.gz");
    fs::copy(&file, &copy).unwrap();
    let merged = go_tool_pprof(
        &["-top", "-sample_index=samples", file.to_str().unwrap()],
        &copy,
    );
    let expected = "140 70.00% 70.00% 140 70.00% block (2 levels) in Shop::Order#total";
    let found = merged.lines().any(|line| words(line) == words(expected));
    assert!(found, "no line {expected:?} in\n{merged}");
}

#[test]
fn pprof_format_reads_functions_files_lines_and_labels() {
    let Some(reader) = pprof_format::reader().unwrap() else {
        return;
    };
    let (_directory, file) = file();
    let text = output(Command::new("node").arg(reader.join("read.js")).arg(&file));
    let lines: Vec<&str> = text.lines().collect();
    for expected in [
        "types samples/count cpu/nanoseconds period 10000000",
        "comment mode: CPU",
        "comment samples lost: 3",
        "70 700000000 | pid=4242 tid=4242 thread_name=main thread comm=ruby | \
         block (2 levels) in Shop::Order#total /app/order.rb:31:32 in ruby < \
         Array#each <cfunc>:0:0 in ruby < \
         Shop::Order#total /app/order.rb:30:31 in ruby < \
         <main> /app/app.rb:1:40 in ruby",
        "10 100000000 | pid=4242 tid=4243 thread_name=worker comm=ruby | \
         Shop.größe (eval at /app/app.rb:7):7:8 in ruby < \
         <class:Shop> /app/shop.rb:3:4 in ruby < \
         <top (required)> /app/shop.rb:1:3 in ruby < \
         <main> /app/app.rb:1:40 in ruby",
    ] {
        assert!(lines.contains(&expected), "no line {expected:?} in\n{text}");
    }
}
