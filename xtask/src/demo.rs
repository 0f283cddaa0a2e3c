//! `cargo xtask demo`: profiles a bundled Ruby program for five seconds.

use std::io::BufRead;
use std::io::BufReader;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

use crate::cmd;
use crate::machine;
use crate::setup;
use crate::workspace;

const PROFILE: &str = "profile.pb.gz";
const FLAME_GRAPH: &str = "flamegraph.svg";
/// What the workload prints when it has begun its real work.
const READY: &str = "ready";

/// Sets up, builds `rbprof`, records the demo workload on the system's Ruby
/// into the current folder, and says how to look at the result.
///
/// # Errors
/// If any of these fails. The workload is ended in every case.
pub fn run() -> Result<()> {
    println!("== setup");
    setup::run()?;
    machine::prepare();

    println!("== build");
    build()?;

    println!("== record");
    let mut workload = Workload::start(&workspace::root().join("tests/workloads/demo.rb"))?;
    record(&workload)?;
    workload.still_runs()?;
    drop(workload);

    let here = std::env::current_dir().context("the current folder")?;
    println!(
        "\nThe profile:     {}\n  go tool pprof -top {PROFILE}          a table\n  \
         go tool pprof -http=: {PROFILE}       in a browser: graph, flame graph, source\n\
         The flame graph: {}\n  open it in a browser; click a frame to zoom, Ctrl-F to search",
        here.join(PROFILE).display(),
        here.join(FLAME_GRAPH).display(),
    );
    Ok(())
}

fn build() -> Result<()> {
    let mut build = workspace::cargo();
    build.args(["build", "--release", "--package", "rbprof"]);
    if let Some(ebpf_cargo) = setup::rust_src::environment()? {
        build.env(setup::rust_src::EBPF_CARGO, ebpf_cargo);
    }
    cmd::run(&mut build)
}

fn record(workload: &Workload) -> Result<()> {
    let mut record = Command::new(workspace::target_dir()?.join("release/rbprof"));
    record
        .args(["record", "--pid"])
        .arg(workload.child.id().to_string())
        .args([
            "--duration",
            "5",
            "--output",
            PROFILE,
            "--output",
            FLAME_GRAPH,
        ]);
    println!("{}", cmd::describe(&record));
    cmd::run(&mut record)
}

/// The running workload, which ends with this value.
struct Workload {
    child: Child,
}

impl Workload {
    fn start(script: &Path) -> Result<Self> {
        // The kernel ends the workload also when this process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ruby"]).arg(script);
        println!("{}", cmd::describe(&command));
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", cmd::describe(&command)))?;
        let mut workload = Self { child };
        workload.await_ready()?;
        Ok(workload)
    }

    fn await_ready(&mut self) -> Result<()> {
        let stdout = self
            .child
            .stdout
            .take()
            .context("the workload's output is a pipe")?;
        for line in BufReader::new(stdout).lines() {
            let line = line.context("reading the workload's output")?;
            if line == READY {
                return Ok(());
            }
            println!("{line}");
        }
        bail!(
            "the workload ended before it was ready: {}",
            self.child.wait()?
        );
    }

    fn still_runs(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the workload ended while it was recorded: {status}"),
        }
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workload_runs_until_it_is_dropped() {
        let script = workspace::root().join("tests/workloads/demo.rb");
        let mut workload = Workload::start(&script).unwrap();
        workload.still_runs().unwrap();
        let proc = format!("/proc/{}", workload.child.id());
        assert!(Path::new(&proc).exists());
        drop(workload);
        assert!(!Path::new(&proc).exists());
    }

    #[test]
    fn a_workload_that_fails_is_an_error() {
        assert!(Workload::start(Path::new("/no/such/script.rb")).is_err());
    }
}
