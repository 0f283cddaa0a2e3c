//! `rbprof layout` makes of a real Ruby's debug information what the table has,
//! and `rbprof record --layout` reads frames by it, or refuses.
//!
//! Needs Rubies with their debug information: built here and not stripped.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::layouts;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;
use rbprof_common::layout::Machine;
use rbprof_common::layout::Version;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use tempfile::TempDir;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");

/// Methods of known names, a block and a C method, for as long as nobody ends
/// it.
const WORKLOAD: &str = r#"
class Shop
  class Invoice
    def self.all = [1, 2, 3].each { |number| new.total(number) }
    def total(number)
      20_000.times { number.to_s }
    end
  end
end
def work = Shop::Invoice.all
$stdout.sync = true
puts "ready"
work while true
"#;

/// Every name that a frame of it has.
const RIGHT: [&str; 11] = [
    "<main>",
    "Object#work",
    "Shop::Invoice.all",
    "Array#each",
    "block in Shop::Invoice.all",
    "Shop::Invoice#total",
    "Integer#times",
    "block in Shop::Invoice#total",
    "Integer#to_s",
    // `new`, for as long as it takes.
    "Class#new",
    "BasicObject#initialize",
];

/// A Ruby that runs, and its layout by debug information.
struct Subject {
    target: Target,
    folder: TempDir,
}

impl Subject {
    fn start(name: &str) -> Result<Option<Self>> {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(None);
        };
        let mut target = Target::start(ruby.command().args(["-e", WORKLOAD]))?;
        target.wait_for("ready")?;
        let subject = Self {
            target,
            folder: tempfile::tempdir()?,
        };
        let library = subject.library()?;
        let made = Command::new(RBPROF)
            .args(["layout", "--from"])
            .arg(&library)
            .arg("-o")
            .arg(subject.layout_file())
            .stdin(Stdio::null())
            .output()?;
        ensure!(made.status.success(), "{made:?}");
        Ok(Some(subject))
    }

    fn layout_file(&self) -> PathBuf {
        self.folder.path().join("layout.toml")
    }

    /// The file with the interpreter: `libruby.so`, or the program itself.
    fn library(&self) -> Result<PathBuf> {
        let pid = self.target.pid();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let library = maps.lines().find_map(|line| {
            let path = line.split_whitespace().nth(5)?;
            path.contains("/libruby").then(|| PathBuf::from(path))
        });
        match library {
            Some(library) => Ok(library),
            None => std::fs::read_link(format!("/proc/{pid}/exe")).context("its program"),
        }
    }

    /// Records it for a second by the layout in the file.
    fn record(&self) -> Result<Output> {
        let output = Command::new(RBPROF)
            .args([
                "record", "-d", "1", "-F", "199", "-o", "-", "--format", "folded",
            ])
            .arg("--native=none")
            .args(["--pid", &self.target.pid().to_string(), "--layout"])
            .arg(self.layout_file())
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!said.contains("panicked"), "{said}");
        Ok(output)
    }
}

/// What of a layout is a fact of one machine or the name of releases is made
/// the same.
fn comparable(layout: &Layout) -> Layout {
    let mut same = *layout;
    same.from = Version::new(0, 0, 0);
    same.to = same.from;
    let here = layout.collector.vm_objspace.on(Machine::HOST);
    same.collector.vm_objspace.x86_64 = here;
    same.collector.vm_objspace.aarch64 = here;
    if let Some(ractors) = &mut same.collector.ractors {
        for offset in [&mut ractors.running_ec, &mut ractors.vm_lock_owner] {
            let here = offset.on(Machine::HOST);
            offset.x86_64 = here;
            offset.aarch64 = here;
        }
    }
    same
}

fn debug_information_says_what_the_table_says(name: &str) -> Result<()> {
    let Some(subject) = Subject::start(name)? else {
        return Ok(());
    };
    let made = layouts::read(&subject.layout_file())?;
    let row = LAYOUTS
        .iter()
        .find(|row| row.from <= made.from && made.to <= row.to)
        .context("no row of that release")?;
    assert_eq!(comparable(made), comparable(row));
    // Nothing of it was taken from the table.
    let text = std::fs::read_to_string(subject.layout_file())?;
    let assumed: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("not in the debug information"))
        .collect();
    let other = match Machine::HOST {
        Machine::X86_64 => ".arm64 = ",
        Machine::Aarch64 => ".x86_64 = ",
    };
    // What differs from machine to machine is that of the other one.
    let fields = ["objspace", "ractor.sync.lock_owner", "threads.running_ec"];
    assert_eq!(assumed.len(), fields.len(), "{assumed:?}");
    for (line, field) in assumed.iter().zip(fields) {
        assert!(line.starts_with(&format!("{field}{other}")), "{assumed:?}");
    }
    Ok(())
}

#[test]
fn debug_information_of_3_3_says_what_the_table_says() -> Result<()> {
    debug_information_says_what_the_table_says("source-3.3.8")
}

#[test]
fn debug_information_of_3_4_says_what_the_table_says() -> Result<()> {
    debug_information_says_what_the_table_says("source-3.4.5-static")
}

#[test]
fn frames_are_read_by_a_layout_from_a_file_and_the_profile_says_so() -> Result<()> {
    let Some(subject) = Subject::start("source-3.3.8")? else {
        return Ok(());
    };
    let output = subject.record()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    let from = format!("layout from {}", subject.layout_file().display());
    assert!(said.contains(&from), "{said}");
    let stacks = String::from_utf8(output.stdout)?;
    let whole = "<main>;Object#work;Shop::Invoice.all;Array#each;block in Shop::Invoice.all;\
                 Shop::Invoice#total;Integer#times";
    // Each name as it stands in the folded stacks, with its file behind.
    let names = |stack: &str| {
        stack
            .split(';')
            .map(|frame| frame.split(" (").next().unwrap_or(frame).trim().to_owned())
            .collect::<Vec<_>>()
            .join(";")
    };
    let samples: Vec<(String, u64)> = stacks
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (stack, count) = line.rsplit_once(' ')?;
            Some((names(stack), count.parse().ok()?))
        })
        .collect();
    let total: u64 = samples.iter().map(|(_, count)| count).sum();
    let right: u64 = samples
        .iter()
        .filter(|(stack, _)| stack.contains(whole))
        .map(|(_, count)| count)
        .sum();
    assert!(total > 20, "{stacks}");
    assert!(right * 10 >= total * 9, "{right} of {total}: {stacks}");
    Ok(())
}

/// A layout in which one thing is wrong is refused, or what cannot be read by it
/// is shown as such: never a wrong name.
#[test]
fn a_wrong_layout_is_refused_or_flagged() -> Result<()> {
    let Some(subject) = Subject::start("source-3.3.8")? else {
        return Ok(());
    };
    // A younger one may still be starting, for all that rbprof knows.
    std::thread::sleep(Duration::from_secs(6));
    let right = std::fs::read_to_string(subject.layout_file())?;
    let wrong = |from: &str, to: &str| -> Result<Output> {
        ensure!(right.contains(from), "{right}");
        std::fs::write(subject.layout_file(), right.replacen(from, to, 1))?;
        subject.record()
    };
    for (from, to) in [
        ("sizeof = 56", "sizeof = 64"),
        ("thread_ptr = 48", "thread_ptr = 56"),
        ("\nvm = 32", "\nvm = 40"),
        ("\nec = 48", "\nec = 40"),
    ] {
        let output = wrong(from, to)?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{to}: {said}");
        assert!(output.stdout.is_empty(), "{to}");
        assert!(said.contains("cannot be profiled"), "{to}: {said}");
    }
    for (from, to) in [
        ("[rb_iseq_t]\nbody = 16", "[rb_iseq_t]\nbody = 24"),
        ("location.label = 80", "location.label = 64"),
        ("local_iseq = 168", "local_iseq = 160"),
    ] {
        let output = wrong(from, to)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{to}: {said}");
        let stacks = String::from_utf8_lossy(&output.stdout);
        let frames: BTreeSet<&str> = stacks
            .lines()
            .filter_map(|line| Some(line.rsplit_once(' ')?.0))
            .flat_map(|stack| stack.split(';'))
            .collect();
        assert!(frames.contains("<unreadable>"), "{to}: {stacks}");
        for frame in frames {
            let right = RIGHT.iter().any(|right| {
                // Its class may be lost.
                *right == frame || right.rsplit(['#', '.']).next() == Some(frame)
            });
            let of_collector = frame.starts_with('(') && frame.ends_with(')');
            assert!(
                right || of_collector || frame.starts_with('<'),
                "{to}: {frame}: {stacks}"
            );
        }
    }
    // And one that is none.
    let output = wrong("\nvm = 32", "\nvm = 33")?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("33 is not a multiple of 8: vm = 33"),
        "{said}"
    );
    Ok(())
}
