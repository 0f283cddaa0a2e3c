//! Rubies in containers, in a `chroot`, of other users, and with files that are
//! no longer there: recorded from the host and from another container. What was
//! recorded is compared with what the program says of its own stacks.

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use rbprof_tests::docker;
use rbprof_tests::docker::Docker;
use rbprof_tests::frames;
use rbprof_tests::frames::FREQUENCY;
use rbprof_tests::frames::Jit;
use rbprof_tests::frames::LABELS;
use rbprof_tests::frames::SPIN_MS;
use rbprof_tests::points;
use rbprof_tests::pprof;
use rbprof_tests::pprof::Counted;
use rbprof_tests::rig;
use rbprof_tests::target::Target;
use tempfile::TempDir;
use xtask::rubies::Installed;

const RBPROF: &str = env!("CARGO_BIN_EXE_rbprof-under-test");
/// An rbprof that was asked to end must have done so after so long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Samples that a forked child must have at least, of 400 ms at 997 Hz.
const ENOUGH: u64 = 50;

#[test]
fn a_container_from_the_host_debian_3_3_8() -> Result<()> {
    a_container_from_the_host("debian-3.3.8")
}

#[test]
fn a_container_from_the_host_debian_3_4_11() -> Result<()> {
    a_container_from_the_host("debian-3.4.11")
}

fn a_container_from_the_host(name: &str) -> Result<()> {
    let Some((docker, ruby)) = docker_with(name)? else {
        return Ok(());
    };
    let target = frames::start_with(
        &mut in_container(&docker, &ruby, "target", "frames.rb", &[]),
        SPIN_MS,
    )?;
    let pid = docker.pid_of("target")?;
    shares_nothing_with_us(pid)?;
    // The program knows its threads by the container's numbers.
    let mut threads = HashMap::new();
    let Some((said, recording)) = frames::record_as(target, pid, || {
        remember_threads(pid, &mut threads);
        Ok(())
    })?
    else {
        return Ok(());
    };
    let mut points = points::parse(&said)?;
    for point in &mut points {
        let here = threads.get(&point.tid);
        point.tid = *here.with_context(|| format!("{}: which thread?", point.name))?;
    }
    points::relabel(&mut points, LABELS)?;
    frames::compare(&points, &recording, Jit::Off)
}

/// The process has its own namespaces, and its Ruby is a file that has no path
/// here.
fn shares_nothing_with_us(pid: u32) -> Result<()> {
    for kind in ["pid", "mnt", "uts", "ipc", "net"] {
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/{kind}"));
        ensure!(of(&pid.to_string())? != of("self")?, "the {kind} namespace");
    }
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let libruby = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("libruby"))
        .context("no libruby")?;
    ensure!(!Path::new(libruby).exists(), "{libruby} is here, too");
    Ok(())
}

/// Adds the process's threads, by their ids in its own PID namespace.
fn remember_threads(pid: u32, threads: &mut HashMap<u32, u32>) {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        // It may have ended by now.
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let ids: Vec<u32> = ids
            .into_iter()
            .flat_map(str::split_whitespace)
            .filter_map(|id| id.parse().ok())
            .collect();
        if let [here, .., inside] = ids.as_slice() {
            threads.insert(*inside, *here);
        }
    }
}

#[test]
fn a_container_from_another_that_joins_its_pid_namespace() -> Result<()> {
    let Some((docker, ruby)) = docker_with("debian-3.3.8")? else {
        return Ok(());
    };
    docker.import_program("rbprof", Path::new(RBPROF))?;
    let capabilities = capabilities(&docker)?;

    let target = frames::start_with(
        &mut in_container(&docker, &ruby, "target", "frames.rb", &[]),
        SPIN_MS,
    )?;
    let mut rbprof = docker.client();
    rbprof
        .args(["run", "--rm", "--name=rbprof", "--network=none"])
        .args(["--pid=container:target"])
        .args(&capabilities)
        .args(["rbprof", "/program"]);
    let pid = |_: &Child| docker.pid_of("rbprof");
    frames_are_true(target, record(&mut rbprof, 1), pid)?;

    // Its children, from their first instruction.
    let container = in_container(&docker, &ruby, "parent", "processes.rb", &["wait"]);
    let mut target = Target::start(&mut { container })?;
    target.wait_for("ready")?;
    let mut rbprof = docker.client();
    rbprof
        .args(["run", "--rm", "--name=rbprof2", "--network=none"])
        .args(["--pid=container:parent"])
        .args(&capabilities)
        .args(["rbprof", "/program"]);
    let pid = |_: &Child| docker.pid_of("rbprof2");
    let (said, profile) = recorded(target, record(&mut rbprof, 1), pid)?;
    children_have_the_ids_that_they_know(&said, &profile.samples)
}

/// Every process's samples carry the id that the process itself knows.
fn children_have_the_ids_that_they_know(said: &[String], samples: &[Counted]) -> Result<()> {
    let processes: HashMap<&str, u32> = said
        .iter()
        .filter_map(|line| line.strip_prefix("process\t")?.split_once('\t'))
        .map(|(name, pid)| Ok((name, pid.parse()?)))
        .collect::<Result<_>>()?;
    for name in ["parent", "child", "grandchild"] {
        let pid = *processes.get(name).with_context(|| format!("{said:?}"))?;
        let own = format!("Object#in_{name}");
        let mut count = 0;
        for sample in samples {
            let labels = sample.frames.iter().map(|frame| &*frame.function.label);
            let mut places = labels
                .clone()
                .filter(|label| label.starts_with("Object#in_"));
            let forking = labels.clone().any(|label| label.ends_with("fork"));
            if places.next() != Some(&own) || forking && sample.pid != pid {
                continue;
            }
            ensure!(sample.pid == pid, "{own} in {}, not {pid}", sample.pid);
            count += sample.count;
        }
        println!("{name} ({pid}): {count} samples");
        ensure!(count >= ENOUGH, "{name}: {count} samples");
    }
    Ok(())
}

/// What goes wrong with an engine ends soon, and leaves nothing behind.
#[test]
fn a_stuck_engine_is_given_up_with_all_that_it_has() -> Result<()> {
    let Some((mut docker, ruby)) = docker_with("debian-3.3.8")? else {
        return Ok(());
    };
    let mut target = Target::start(&mut in_container(&docker, &ruby, "target", "forks.rb", &[]))?;
    target.wait_for("ready")?;
    let inside = docker.pid_of("target")?;
    let (engine, directory) = docker.engine();
    let directory = directory.to_owned();
    let stopped = Command::new("kill")
        .args(["-STOP", &engine.to_string()])
        .status()?;
    ensure!(stopped.success(), "kill: {stopped}");

    let begin = Instant::now();
    docker.set_patience(Duration::from_secs(2));
    ensure!(docker.run(&["version"]).is_err(), "it is not stuck");
    drop(docker);
    let took = begin.elapsed();
    println!("given up after {:.1} s", took.as_secs_f64());
    ensure!(took < Duration::from_secs(60), "{took:?}");
    ensure!(!directory.exists(), "{} is left", directory.display());
    let text = directory.display().to_string();
    ensure!(
        !std::fs::read_to_string("/proc/self/mounts")?.contains(&text),
        "mounts"
    );
    for pid in [engine, inside] {
        let process = format!("/proc/{pid}/cmdline");
        // It may be a zombie yet, whose parent has died.
        let left = std::fs::read(&process).is_ok_and(|line| !line.is_empty());
        ensure!(!left, "{process}");
    }
    Ok(())
}

#[test]
fn what_is_missing_in_a_container_is_named() -> Result<()> {
    let Some((docker, ruby)) = docker_with("debian-3.3.8")? else {
        return Ok(());
    };
    docker.import_program("rbprof", Path::new(RBPROF))?;
    let mut target = Target::start(&mut in_container(&docker, &ruby, "target", "forks.rb", &[]))?;
    target.wait_for("ready")?;
    let mut others = docker.client();
    others
        .args(["run", "--rm", "--interactive", "--name=others"])
        .args(["--network=none", "--user=65534:65534", "ruby"])
        .arg(&ruby.ruby)
        .arg("/workload/forks.rb");
    let mut others = Target::start(&mut others)?;
    others.wait_for("ready")?;

    let all = capabilities(&docker)?;
    let mut no_ptrace = all.clone();
    no_ptrace.retain(|option| !option.contains("SYS_PTRACE"));
    let none = Vec::new();
    let own = Vec::from(["--pid=private".to_owned()]);
    let join = |container: &str| Vec::from([format!("--pid=container:{container}")]);
    for (pid_option, capabilities, words) in [
        (join("target"), &none, &["CAP_BPF", "CAP_PERFMON"][..]),
        (join("others"), &no_ptrace, &["CAP_SYS_PTRACE"]),
        // Process 1 is rbprof itself there.
        (own, &all, &["/program", "runs no Ruby"]),
    ] {
        let pid_option: Vec<String> = pid_option
            .into_iter()
            .filter(|option| option != "--pid=private")
            .collect();
        let options = [
            &["run", "--rm", "--network=none"].map(str::to_owned)[..],
            &pid_option,
            capabilities,
        ]
        .concat();
        let program = ["rbprof", "/program", "record", "--pid=1", "-d1", "-o-"].map(str::to_owned);
        let output = docker.try_run(&[&options[..], &program].concat())?;
        fails(&output, words).with_context(|| options.join(" "))?;
    }
    // With everything, both can be recorded.
    for container in ["target", "others"] {
        let options = [
            &["run", "--rm", "--network=none"].map(str::to_owned)[..],
            &join(container),
            &all,
        ]
        .concat();
        let program = ["rbprof", "/program", "record", "--pid=1", "-d1", "-o-"].map(str::to_owned);
        let output = docker.try_run(&[&options[..], &program].concat())?;
        ensure!(output.status.success(), "{output:?}");
        ensure!(
            has(&pprof::read(&output.stdout)?, "Forks#busy"),
            "{container}"
        );
    }

    // On the host, a process id from inside a container is nobody's: with the
    // right one, it is said whose.
    let (inside, here) = known_only_inside(&mut target, docker.pid_of("target")?)?;
    let output = Command::new(RBPROF)
        .args(["record", "--pid", &inside.to_string(), "-d1", "-o-"])
        .output()?;
    let right = format!("{here} (ruby");
    fails(&output, &["PID namespace", "does not exist here", &right])
}

/// Has a program in a container fork until a child has a process id in there
/// that no process has here; gives that, and the id that the child has here.
fn known_only_inside(target: &mut Target, pid: u32) -> Result<(u32, u32)> {
    for _ in 0..200 {
        target.go_on()?;
        let inside: u32 = target
            .next_line()?
            .strip_prefix("child\t")
            .context("no child")?
            .parse()?;
        if Path::new(&format!("/proc/{inside}")).exists() {
            continue;
        }
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let here = children.split_whitespace().last().context("no child")?;
        return Ok((inside, here.parse()?));
    }
    bail!("every process id of the container is taken here, too")
}

/// A process knows itself by other numbers than rbprof does, two levels deep.
#[test]
fn namespaces_in_namespaces() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("out.pb.gz");
    let script = ruby.script(&rig::workload("processes.rb"))?;
    let output = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", RBPROF, "record"])
        .args(["-F", &FREQUENCY.to_string(), "-o"])
        .arg(&file)
        .args(["--", "unshare", "--pid", "--fork", "--"])
        .arg(script.get_program())
        .args(script.get_args())
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "{output:?}");
    let profile = pprof::read(&std::fs::read(&file)?)?;
    let mut pids = HashMap::<&str, Vec<u32>>::new();
    for sample in &profile.samples {
        let labels = sample.frames.iter().map(|frame| &*frame.function.label);
        if let Some(place) = labels.clone().find(|label| label.starts_with("Object#in_"))
            && !labels.clone().any(|label| label.ends_with("fork"))
        {
            pids.entry(place).or_default().push(sample.pid);
        }
    }
    println!("{pids:?}");
    // The outer namespace had a handful of processes at most.
    ensure!(pids.values().flatten().all(|&pid| pid < 100), "{pids:?}");
    let pid = |place: &str| pids.get(place).and_then(|pids| pids.first());
    let parent = pid("Object#in_parent").context("no parent")?;
    let grandchild = pid("Object#in_thread_of_grandchild").context("no grandchild")?;
    // rbprof is 1 there, `unshare` 2 or more, and the Rubies behind it. They
    // know themselves as 1 and so on.
    ensure!(*parent > 2 && *grandchild > parent + 1, "{pids:?}");
    Ok(())
}

#[test]
fn a_proc_of_another_pid_namespace_is_refused() -> Result<()> {
    if rig::ruby("debian-3.1.2")?.is_none() {
        return Ok(());
    }
    let output = Command::new("unshare")
        .args(["--pid", "--fork", "--", RBPROF, "record"])
        .args(["--pid", "1", "-d1", "-o-"])
        .output()?;
    fails(
        &output,
        &[
            "/proc is not that of rbprof's own PID namespace",
            "--mount-proc",
        ],
    )
}

/// Whatever rbprof would find under the paths that it reads, it is another
/// Ruby's.
#[test]
fn a_chroot_with_the_paths_of_other_files_here() -> Result<()> {
    for capabilities in [WITHOUT_MAP_FILES, WITH_MAP_FILES] {
        under_decoys(capabilities).with_context(|| capabilities.to_owned())?;
    }
    Ok(())
}

/// All that a recording needs.
const WITHOUT_MAP_FILES: &str = "--bounding-set=-all,+bpf,+perfmon,+sys_ptrace";
/// With it, files can be had by their mappings, too.
const WITH_MAP_FILES: &str = "--bounding-set=-all,+bpf,+perfmon,+sys_ptrace,+checkpoint_restore";

fn under_decoys(capabilities: &str) -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.3.8")? else {
        return Ok(());
    };
    let Some(decoy) = rig::ruby("debian-3.4.11")? else {
        return Ok(());
    };
    let target = frames::start(&ruby, SPIN_MS, Jit::Off)?;
    let (root, libruby) = libruby_of(&ruby)?;
    let (decoy_root, decoy) = libruby_of(&decoy)?;
    let decoy = decoy_root.join(decoy);
    let inside = Path::new("/").join(&libruby);
    let whole = root.join(&libruby);
    let directory = tempfile::tempdir()?;
    let (libraries, own) = (directory.path().join("lib"), directory.path().join("own"));
    std::fs::create_dir(&own)?;
    let setpriv = xtask::cmd::find("setpriv").context("no setpriv")?;
    for program in [Path::new(RBPROF), &setpriv] {
        docker::copy_with_libraries(program, &libraries)?;
    }
    // A mount namespace for rbprof: the decoy lies under the path that the
    // target knows, and under the whole path of the target's file as well.
    // What is started after that finds its libraries beside the decoy.
    const SCRIPT: &str = r#"
        own=$1 libraries=$2 decoy=$3 inside=$4 whole=$5; shift 5
        mount -t tmpfs tmpfs "$own" &&
        find "$libraries" -type f -exec cp {} "$own" ';' &&
        cp "$decoy" "$own/${inside##*/}" &&
        mount --bind "$own/${inside##*/}" "$whole" &&
        mount --bind "$own" "${inside%/*}" &&
        exec "$@""#;
    let mut rbprof = Command::new("unshare");
    rbprof
        .args(["--mount", "--", "sh", "-c", SCRIPT, "sh"])
        .args([&own, &libraries, &decoy, &inside, &whole])
        .arg(setpriv)
        .args([capabilities, "--inh-caps=-all", "--", RBPROF]);
    let pid = target.pid();
    let profile = frames_are_true(target, record(&mut rbprof, pid), |rbprof| {
        rig::wait_until_recording(rbprof.id())?;
        // It would have been fooled if it believed paths.
        let seen = PathBuf::from(format!("/proc/{}/root", rbprof.id()));
        for place in [&inside, &whole] {
            let there = std::fs::read(seen.join(place.strip_prefix("/")?))?;
            ensure!(there == std::fs::read(&decoy)?, "no decoy");
        }
        Ok(rbprof.id())
    })?;
    ensure!(!inside.exists(), "{} is left", inside.display());
    is_ruby(&profile, "3.3.8")
}

#[test]
fn a_libruby_that_was_deleted() -> Result<()> {
    with_its_libruby("deleted", |libruby| Ok(std::fs::remove_file(libruby)?))
}

#[test]
fn a_libruby_that_was_replaced() -> Result<()> {
    let Some(other) = rig::ruby("debian-3.4.11")? else {
        return Ok(());
    };
    let (root, other) = libruby_of(&other)?;
    with_its_libruby("replaced", |libruby| {
        // As a package manager does it.
        let new = libruby.with_extension("new");
        std::fs::copy(root.join(&other), &new)?;
        Ok(std::fs::rename(new, libruby)?)
    })
}

fn with_its_libruby(what: &str, change: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.3.8")? else {
        return Ok(());
    };
    let (_directory, ruby) = copy_of(&ruby)?;
    let target = frames::start(&ruby, SPIN_MS, Jit::Off)?;
    let (root, libruby) = libruby_of(&ruby)?;
    change(&root.join(libruby))?;
    let pid = target.pid();

    // Its file is to be had by its mapping only, which takes a capability.
    let output = Command::new("setpriv")
        .args([WITHOUT_MAP_FILES, "--inh-caps=-all"])
        .args([RBPROF, "record", "--pid", &pid.to_string(), "-d1", "-o-"])
        .output()?;
    fails(&output, &["CAP_CHECKPOINT_RESTORE", "libruby"])?;

    let mut rbprof = Command::new("setpriv");
    rbprof.args([WITH_MAP_FILES, "--inh-caps=-all", RBPROF]);
    let profile = frames_are_true(target, record(&mut rbprof, pid), |rbprof| Ok(rbprof.id()))?;
    is_ruby(&profile, "3.3.8").context(what.to_owned())
}

#[test]
fn a_target_of_another_user() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.3.8")? else {
        return Ok(());
    };
    let mut command = ruby.script(&rig::workload("frames.rb"))?;
    command.env("RUBYOPT", "--disable-gems -r/workload/nobody");
    let target = frames::start_with(&mut command, SPIN_MS)?;
    let pid = target.pid();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    ensure!(
        status.contains("\nUid:\t65534\t65534\t65534\t65534\n"),
        "{status}"
    );

    // That user may not record it, and neither may root without this
    // capability.
    let directory = tempfile::tempdir()?;
    let own = readable_by_all(&directory)?;
    let arguments = ["record", "--pid", &pid.to_string(), "-d1", "-o-"];
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&own)
        .args(arguments)
        .output()?;
    fails(&output, &["CAP_BPF", "CAP_PERFMON", "root"])?;
    let output = Command::new("setpriv")
        .args([
            "--bounding-set=-all,+bpf,+perfmon",
            "--inh-caps=-all",
            RBPROF,
        ])
        .args(arguments)
        .output()?;
    fails(&output, &["CAP_SYS_PTRACE"])?;

    let mut rbprof = Command::new("setpriv");
    rbprof.args([
        "--bounding-set=-all,+bpf,+perfmon,+sys_ptrace",
        "--inh-caps=-all",
        RBPROF,
    ]);
    frames_are_true(target, record(&mut rbprof, pid), |rbprof| Ok(rbprof.id())).map(drop)
}

fn readable_by_all(directory: &TempDir) -> Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), all.clone())?;
    let own = directory.path().join("rbprof");
    std::fs::copy(RBPROF, &own)?;
    std::fs::set_permissions(&own, all)?;
    Ok(own)
}

/// A copy of a Ruby's root file system, to be changed.
fn copy_of(ruby: &Installed) -> Result<(TempDir, Installed)> {
    let directory = tempfile::tempdir()?;
    let root = directory.path().join("root");
    let copied = Command::new("cp")
        .args(["--archive", "--reflink=auto"])
        .arg(ruby.root.as_ref().context("no root file system")?)
        .arg(&root)
        .status()?;
    ensure!(copied.success(), "cp: {copied}");
    let root = Some(root);
    Ok((
        directory,
        Installed {
            root,
            ..ruby.clone()
        },
    ))
}

/// A Ruby's root file system, and the path of its library in there, without
/// the slash that it begins with.
fn libruby_of(ruby: &Installed) -> Result<(PathBuf, PathBuf)> {
    let root = ruby.root.clone().context("no root file system")?;
    let folder = root
        .join("usr/lib")
        .join(format!("{}-linux-gnu", std::env::consts::ARCH));
    for entry in std::fs::read_dir(&folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_file = entry.file_type()?.is_file();
        if is_file && name.to_string_lossy().starts_with("libruby-") {
            let path = entry.path().strip_prefix(&root)?.to_owned();
            return Ok((root, path));
        }
    }
    bail!("no libruby in {}", folder.display())
}

fn is_ruby(profile: &pprof::Read, version: &str) -> Result<()> {
    let wanted = format!("ruby: {version}");
    ensure!(profile.comments.contains(&wanted), "{:?}", profile.comments);
    Ok(())
}

fn has(profile: &pprof::Read, label: &str) -> bool {
    let mut frames = profile.samples.iter().flat_map(|sample| &sample.frames);
    frames.any(|frame| *frame.function.label == *label)
}

fn fails(output: &Output, words: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{output:?}");
    for word in words {
        ensure!(said.contains(word), "no {word:?} in: {said}");
    }
    Ok(())
}

/// An engine with the image `ruby`.
fn docker_with(name: &str) -> Result<Option<(Docker, Installed)>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(None);
    };
    let Some(docker) = Docker::start()? else {
        return Ok(None);
    };
    docker.import_ruby("ruby", &ruby)?;
    Ok(Some((docker, ruby)))
}

/// A container that runs one of the tests' Ruby programs.
fn in_container(
    docker: &Docker,
    ruby: &Installed,
    container: &str,
    workload: &str,
    arguments: &[&str],
) -> Command {
    let mut run = docker.client();
    run.args(["run", "--rm", "--interactive", "--network=none"])
        .args(["--env", "SPIN_MS", "--env", "RUBYOPT"])
        .arg(format!("--name={container}"))
        .arg("ruby")
        .arg(&ruby.ruby)
        .arg(format!("/workload/{workload}"))
        .args(arguments)
        .env_remove("RUBYOPT");
    run
}

/// The options that let a container record another; see docs/containers.md.
fn capabilities(docker: &Docker) -> Result<Vec<String>> {
    let names: &[&str] = if docker.knows_capability("rbprof", "BPF")? {
        &["BPF", "PERFMON", "SYS_PTRACE"]
    } else {
        println!("this Docker does not know CAP_BPF: CAP_SYS_ADMIN has to do");
        &["SYS_ADMIN", "SYS_PTRACE"]
    };
    Ok(names
        .iter()
        .map(|name| format!("--cap-add={name}"))
        .collect())
}

/// Has an rbprof record `pid` until it is told to stop.
fn record(rbprof: &mut Command, pid: u32) -> &mut Command {
    rbprof.args(["record", "--pid", &pid.to_string()]).args([
        "-F",
        &FREQUENCY.to_string(),
        "-o",
        "-",
        "--format",
        "pprof",
    ])
}

/// Has `frames.rb` recorded, and compares. `pid` tells which process here is
/// rbprof.
fn frames_are_true(
    target: Target,
    rbprof: &mut Command,
    pid: impl FnOnce(&Child) -> Result<u32>,
) -> Result<pprof::Read> {
    let (said, profile) = recorded(target, rbprof, pid)?;
    let mut points = points::parse(&said)?;
    points::relabel(&mut points, LABELS)?;
    frames::compare_profile(&points, &profile.samples)?;
    Ok(profile)
}

/// Has a program recorded that waits to begin, up to its end; what it said,
/// and the profile.
fn recorded(
    mut target: Target,
    rbprof: &mut Command,
    pid: impl FnOnce(&Child) -> Result<u32>,
) -> Result<(Vec<String>, pprof::Read)> {
    let mut rbprof = rbprof
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let begun = pid(&rbprof).and_then(|pid| {
        rig::wait_until_recording(pid)?;
        Ok(pid)
    });
    let pid = match begun {
        Ok(pid) => pid,
        Err(error) => {
            rbprof.kill()?;
            let output = rbprof.wait_with_output()?;
            bail!("{error:#}: {}", String::from_utf8_lossy(&output.stderr));
        }
    };
    target.go_on()?;
    let said = target.wait_for("finished");
    let interrupted = Command::new("kill")
        .args(["-INT", &pid.to_string()])
        .status()?;
    let output = output_of(rbprof)?;
    let said = said?;
    ensure!(
        interrupted.success() && output.status.success(),
        "{output:?}"
    );
    target.go_on()?;
    let status = target.end()?;
    ensure!(status.success(), "the target: {status}");
    Ok((said, pprof::read(&output.stdout)?))
}

/// What a program prints until it ends, which it must do soon.
fn output_of(child: Child) -> Result<Output> {
    let pid = child.id().to_string();
    let (sender, ended) = channel();
    let waiting = std::thread::spawn(move || {
        let output = child.wait_with_output();
        drop(sender);
        output
    });
    if ended.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        let _ = Command::new("kill").args(["-KILL", &pid]).status();
        bail!("rbprof does not end");
    }
    let _: &std::sync::mpsc::Receiver<()> = &ended;
    match waiting.join() {
        Ok(output) => Ok(output?),
        Err(_) => bail!("waiting for rbprof"),
    }
}
