//! Running a machine: qemu in software emulation, so that it needs no other
//! privilege and no support by the processor.

use std::io::BufRead as _;
use std::io::BufReader;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use super::machines::Architecture;
use super::machines::Machine;
use crate::cmd;

/// Processors and memory of a machine. Two, so that threads run at once; the
/// file system is in memory twice while the machine boots.
const PROCESSORS: &str = "2";
const MEMORY: &str = "3072";

/// Opens the file system's file as descriptor 3 and removes its name, so that
/// nothing is left behind whatever happens.
const WITH_FILE: &str = r#"exec 3<"$1" && rm "$1" && shift && exec "$@""#;

/// How a machine is started.
pub(super) struct Start<'a> {
    pub(super) machine: &'a Machine,
    pub(super) kernel: &'a Path,
    /// The file system; the file is removed.
    pub(super) file_system: &'a Path,
    /// More for the kernel's command line.
    pub(super) append: &'a str,
    /// What stands on the console before the exit status.
    pub(super) mark: &'a str,
    /// When it is given up.
    pub(super) deadline: Duration,
    /// The console is the terminal: for a person.
    pub(super) interactive: bool,
}

/// Runs a machine until it is switched off, hands each line of its console to
/// `line`, and gives the exit status of its command.
///
/// # Errors
/// If it cannot be started, ends without a status, or is not done in time.
pub(super) fn run(start: &Start<'_>, mut line: impl FnMut(&str)) -> Result<i32> {
    let mut command = command(start);
    command
        .stdin(if start.interactive {
            Stdio::inherit()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped());
    let child = command
        .spawn()
        .with_context(|| format!("starting {}", cmd::describe(&command)))?;
    let mut child = Killed(child);
    let console = child.0.stdout.take().context("qemu has no output")?;
    if start.interactive {
        return interact(start.mark, console, &mut child);
    }
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for bytes in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&bytes);
            if sender.send(text.trim_end_matches('\r').to_owned()).is_err() {
                return;
            }
        }
    });
    let begun = Instant::now();
    let mut status = None;
    loop {
        let rest = start.deadline.saturating_sub(begun.elapsed());
        match lines.recv_timeout(rest) {
            Ok(text) => match status_in(&text, start.mark) {
                Some(number) => status = Some(number),
                None => line(&text),
            },
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => bail!(
                "{} was not done within {} s",
                start.machine.name(),
                start.deadline.as_secs()
            ),
        }
    }
    let end = child.0.wait().context("waiting for qemu")?;
    status
        .with_context(|| format!("the machine ended without a status of its command; qemu: {end}"))
}

/// Passes the console on byte by byte: a prompt is not a line.
fn interact(mark: &str, console: impl std::io::Read, child: &mut Killed) -> Result<i32> {
    use std::io::Write as _;
    let (mut console, mut all) = (console, Vec::new());
    let mut bytes = [0; 4096];
    let mut out = std::io::stdout();
    loop {
        let count = console.read(&mut bytes).context("reading the console")?;
        let Some(new) = bytes.get(..count).filter(|new| !new.is_empty()) else {
            break;
        };
        out.write_all(new).and_then(|()| out.flush())?;
        all.extend_from_slice(new);
    }
    child.0.wait().context("waiting for qemu")?;
    let text = String::from_utf8_lossy(&all);
    text.lines()
        .find_map(|line| status_in(line, mark))
        .context("the machine ended without a status of its command")
}

/// The status in a line of the console.
fn status_in(line: &str, mark: &str) -> Option<i32> {
    // What the kernel says may stand before it.
    let (_, after) = line.split_once(mark)?;
    after.trim().parse().ok()
}

fn command(start: &Start<'_>) -> Command {
    let machine = start.machine;
    let (emulator, kind, console) = match machine.architecture {
        Architecture::Amd64 => ("qemu-system-x86_64", "q35", "ttyS0"),
        Architecture::Arm64 => ("qemu-system-aarch64", "virt", "ttyAMA0"),
    };
    let mut command = Command::new("setpriv");
    // The machine does not outlive whoever wanted it.
    command.args(["--pdeathsig", "KILL", "sh", "-c", WITH_FILE, "sh"]);
    command.arg(start.file_system).arg(emulator);
    command.args(["-machine", kind, "-accel", "tcg,thread=multi"]);
    command.args(["-cpu", machine.processor]);
    command.args(["-smp", PROCESSORS, "-m", MEMORY]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.args(if start.interactive {
        ["-serial", "mon:stdio"]
    } else {
        ["-serial", "stdio"]
    });
    command.arg("-kernel").arg(start.kernel);
    command.args(["-initrd", "/proc/self/fd/3"]);
    command.arg("-append").arg(format!(
        "console={console} quiet loglevel=3 panic=-1 mitigations=off {}",
        start.append
    ));
    command
}

/// A process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_follows_the_mark() {
        assert_eq!(status_in("rbprof-vm-7 3", "rbprof-vm-7"), Some(3));
        assert_eq!(
            status_in("[ 1.0] some rbprof-vm-7 0", "rbprof-vm-7"),
            Some(0)
        );
        assert_eq!(status_in("3", "rbprof-vm-7"), None);
        assert_eq!(status_in("rbprof-vm-7 x", "rbprof-vm-7"), None);
    }
}
