//! The agent as it is used: Rubies come and go, and it finds, names and profiles
//! them, serves what it has over HTTP, and writes files.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Discover;
use rbprof_tests::agent::Agent;
use rbprof_tests::agent::FREQUENCY;
use rbprof_tests::agent::runs;
use rbprof_tests::checks::discovery;
use rbprof_tests::checks::discovery::rubies_are_announced;
use rbprof_tests::pprof;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// How long the agent may take to end.
const END: Duration = Duration::from_secs(5);
/// How long something runs so that there is no doubt that it did.
const A_WHILE: Duration = Duration::from_secs(1);
/// CPU time of a short program's work, seconds.
const SHORT: &str = "0.1";

/// A server as Puma is one, with its workers.
struct Server {
    target: Target,
    workers: Vec<u32>,
}

impl Server {
    fn start(ruby: &xtask::rubies::Installed) -> Result<Self> {
        let mut target = Target::start(&mut ruby.script(&rig::workload("agent.rb"))?)?;
        let said = target.wait_for("ready")?;
        let workers = said.iter().map(|line| {
            let pid = line.strip_prefix("worker\t").context("not a worker")?;
            Ok(pid.parse()?)
        });
        Ok(Self {
            workers: workers.collect::<Result<_>>()?,
            target,
        })
    }

    fn pids(&self) -> Vec<u32> {
        let mut pids = vec![self.target.pid()];
        pids.extend(&self.workers);
        pids
    }

    /// Has it end with its workers.
    fn end(mut self) -> Result<()> {
        self.target.go_on()?;
        self.target.end()?;
        Ok(())
    }
}

/// Runs the short program once. Gives its process id.
fn run_script(ruby: &xtask::rubies::Installed) -> Result<u32> {
    let mut child = ruby
        .script(&rig::workload("agent.rb"))?
        .arg("script")
        .env("SECONDS", SHORT)
        .spawn()?;
    let pid = child.id();
    ensure!(child.wait()?.success(), "the script failed");
    Ok(pid)
}

#[test]
fn rubies_are_announced_in_each_way() -> Result<()> {
    for name in ["debian-3.1.2", "source-3.4.5-static-stripped"] {
        let Some(ruby) = rig::ruby(name)? else {
            return Ok(());
        };
        // By a probe only where the kernel has any: virtual machines see to that.
        for discover in [Discover::Probe, Discover::SideBand] {
            let announcer = rubies_are_announced(&ruby, discover, discovery::Pace::HOST)?;
            eprintln!("{name}, {discover:?}: told of by {announcer:?}");
        }
    }
    Ok(())
}

#[test]
fn rubies_are_found_whenever_and_however_they_start() -> Result<()> {
    let (Some(first), Some(second)) = (
        rig::ruby("debian-3.1.2")?,
        rig::ruby("source-3.3.8-stripped")?,
    ) else {
        return Ok(());
    };
    let before = Server::start(&first)?;
    let agent = Agent::start(Path::new(RBPROF), "")?;
    let after = Server::start(&second)?;
    for pid in before.pids().into_iter().chain(after.pids()) {
        agent.wait_until(pid, true)?;
    }
    let scripts = [&first, &second, &first, &second, &second].map(run_script);
    // It becomes a Ruby late, and something else afterwards, as a shim does.
    let ruby = second.command().get_program().display().to_string();
    let mut shim = Command::new("sh")
        .arg("-c")
        .arg(format!("sleep 0.3; exec {ruby} \"$@\""))
        .arg("sh")
        .arg(rig::workload("agent.rb"))
        .arg("script")
        .envs([("SECONDS", SHORT), ("THEN", "sleep 5")])
        .spawn()?;
    std::thread::sleep(Duration::from_secs(3));
    // By now it is no Ruby any more.
    agent.wait_until(shim.id(), false)?;
    let target = agent.target(shim.id())?;
    ensure!(target.is_none(), "a process that sleeps: {target:?}");
    shim.wait()?;
    let (pids, workers) = (before.pids(), after.workers.clone());
    let server = after.target.pid();
    before.end()?;
    after.end()?;
    let ended = agent.end()?;
    ensure!(ended.status.success(), "{}", ended.status);
    ensure!(ended.took < END, "{:?}", ended.took);
    for pid in scripts {
        let pid = pid?;
        let samples = ended.count(pid, "Object#in_script");
        eprintln!("script {pid}: {samples} samples");
        ensure!(samples > 0, "nothing of the script {pid}");
        ensure!(
            ended.services(pid) == ["agent"],
            "{:?}",
            ended.services(pid)
        );
    }
    let [parent, children @ ..] = &*pids else {
        anyhow::bail!("no processes");
    };
    for (pid, method) in [(*parent, "Object#in_server"), (server, "Object#in_server")]
        .into_iter()
        .chain(
            children
                .iter()
                .chain(&workers)
                .map(|&pid| (pid, "Object#in_worker")),
        )
    {
        let samples = ended.count(pid, method);
        eprintln!("process {pid}: {samples} samples in {method}");
        ensure!(
            samples > 50,
            "{samples} samples of {method} in process {pid}"
        );
        let services = ended.services(pid);
        ensure!(
            services.iter().any(|service| service == "puma-shop"),
            "{pid}: {services:?}"
        );
    }
    ensure!(
        ended.count(shim.id(), "Object#in_script") > 0,
        "nothing of what the shim ran"
    );
    Ok(())
}

#[test]
fn none_is_missed_in_a_storm() -> Result<()> {
    const PROGRAMS: usize = 100;
    let Some(ruby) = rig::ruby("source-3.3.8-stripped")? else {
        return Ok(());
    };
    let agent = Agent::start(Path::new(RBPROF), "")?;
    // The first one takes a while: nobody knows its file.
    run_script(&ruby)?;
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let ruby = ruby.clone();
            std::thread::spawn(move || {
                let each = (0..PROGRAMS / 2).map(|_| run_script(&ruby));
                each.collect::<Result<Vec<u32>>>()
            })
        })
        .collect();
    let mut pids = Vec::new();
    for thread in threads {
        pids.extend(
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a thread failed"))??,
        );
    }
    let missed = agent.metric("rbprof_target_events_total{event=\"ended_before_attached\"}")?;
    let ended = agent.end()?;
    let without: Vec<u32> = (pids.iter().copied())
        .filter(|&pid| ended.count(pid, "Object#in_script") == 0)
        .collect();
    eprintln!("{missed} ended before they were known");
    for pid in &without {
        for sample in ended.samples().filter(|sample| sample.pid == *pid) {
            let labels = sample.frames.iter().map(|frame| &*frame.function.label);
            eprintln!("{pid}: {} x {:?}", sample.count, labels.collect::<Vec<_>>());
        }
    }
    ensure!(
        without.is_empty(),
        "{} of {PROGRAMS} programs have no samples: {without:?}",
        without.len()
    );
    Ok(())
}

#[test]
fn profiles_are_served_while_it_runs() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.4.11")? else {
        return Ok(());
    };
    let agent = Agent::start(Path::new(RBPROF), "")?;
    let server = Server::start(&ruby)?;
    let [worker, other] = *server.workers else {
        anyhow::bail!("{:?}", server.workers);
    };
    // It is looked at again when it has had time to give itself a title.
    for pid in server.pids() {
        agent.wait_for(pid, "of its service", |it| it["service"] == "puma-shop")?;
    }
    let profile =
        pprof::read(&agent.page(&format!("/debug/pprof/profile?seconds=1&pid={worker}"))?)?;
    let pids = |profile: &pprof::Read| {
        let mut pids: Vec<u32> = profile.samples.iter().map(|sample| sample.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    };
    ensure!(pids(&profile) == [worker], "{:?}", pids(&profile));
    ensure!(
        profile
            .samples
            .iter()
            .any(|sample| runs(sample, "Object#in_worker")),
        "the method is missing"
    );
    let all = pprof::read(&agent.page("/debug/pprof/profile?seconds=1&service=puma-shop")?)?;
    let mut expected = server.pids();
    expected.sort_unstable();
    ensure!(pids(&all) == expected, "{:?}, not {expected:?}", pids(&all));
    let (status, body) = agent.get("/debug/pprof/profile?seconds=1&pid=1")?;
    ensure!(
        status == 404,
        "process 1: {status} {}",
        String::from_utf8_lossy(&body)
    );
    let target = agent.target(other)?.context("the other worker")?;
    ensure!(target["service"] == "puma-shop", "{target}");
    ensure!(target["ruby"] == "3.4.11", "{target}");
    ensure!(
        target["command"] == format!("puma: cluster worker 1: {} [shop]", server.target.pid()),
        "{target}"
    );
    ensure!(agent.page("/healthz")? == b"ok\n", "not well");
    ensure!(
        agent.metric("rbprof_discovery_works")? == 1.0,
        "not told of Rubies"
    );
    let svg = String::from_utf8(agent.page(&format!("/flamegraph?pid={worker}"))?)?;
    ensure!(
        svg.contains("Object#in_worker"),
        "the flame graph: {svg:.300}"
    );
    server.end()?;
    let ended = agent.end()?;
    ensure!(ended.status.success(), "{}", ended.status);
    Ok(())
}

#[test]
fn rules_change_while_it_runs_and_nothing_is_lost() -> Result<()> {
    // A tick may come between two profiles' reading of the clock.
    const MISSING: f64 = 0.02;
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let mut agent = Agent::start(
        Path::new(RBPROF),
        "exclude = [\"command=cluster worker 1\"]",
    )?;
    let server = Server::start(&ruby)?;
    let [first, second] = *server.workers else {
        anyhow::bail!("{:?}", server.workers);
    };
    agent.wait_until(first, true)?;
    // It is looked at again when it has had time to give itself a title.
    agent.wait_for(second, "known as excluded", |it| {
        it["profiled"] == false && it["missing"].to_string().contains("exclude")
    })?;
    std::thread::sleep(A_WHILE);
    agent.reload("exclude = [\"command=(\"]")?;
    agent.wait_for_line("nothing is changed")?;
    agent.wait_until(first, true)?;
    agent.reload("exclude = [\"command=cluster worker 0\"]")?;
    agent.wait_until(second, true)?;
    agent.wait_until(first, false)?;
    std::thread::sleep(A_WHILE);
    let due = agent.metric("rbprof_samples_due_total")?
        - agent.metric("rbprof_samples_not_selected_total")?;
    let ended = agent.end()?;
    server.end()?;
    ensure!(ended.status.success(), "{}", ended.status);
    ensure!(ended.took < END, "{:?}", ended.took);
    let written: u64 = ended.samples().map(|sample| sample.count).sum();
    eprintln!("{written} samples written, {due} due a moment before the end, at {FREQUENCY} Hz");
    ensure!(
        written as f64 >= due * (1.0 - MISSING),
        "{written} samples written of {due}"
    );
    for pid in [first, second] {
        ensure!(
            ended.count(pid, "Object#in_worker") > 50,
            "nothing of {pid}"
        );
    }
    Ok(())
}
