//! The service manager: what it is told while the agent runs, and the unit that
//! it starts the agent with.

mod unit;

use std::io;
use std::time::Duration;

use sd_notify::NotifyState;

pub use self::unit::unit;
use crate::output::plain;

/// Most characters of a status line.
const MAX_STATUS: usize = 200;

/// Says something to the service manager. Without one (`NOTIFY_SOCKET` is not
/// set), nothing happens.
///
/// Who calls this goes on whatever comes of it: an error is for a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice<'a> {
    /// The agent works (again): it has started, or has read its configuration
    /// anew.
    Ready,
    /// It is about to read its configuration. [`Notice::Ready`] must follow, also
    /// if nothing came of it.
    Reloading,
    /// It is about to end.
    Stopping,
    /// It is alive: due at least every half of [`watchdog_interval`].
    Alive,
    /// What it does, in a line.
    Status(&'a str),
}

impl Notice<'_> {
    /// Tells the service manager.
    ///
    /// # Errors
    /// When its socket does not take the message.
    pub fn send(self) -> io::Result<()> {
        match self {
            Self::Ready => sd_notify::notify(&[NotifyState::Ready]),
            Self::Reloading => {
                // From systemd 253 on one message must have both, or the reload
                // counts as failed where the unit's type is notify-reload.
                sd_notify::notify(&[NotifyState::Reloading, NotifyState::monotonic_usec_now()?])
            }
            Self::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
            Self::Alive => sd_notify::notify(&[NotifyState::Watchdog]),
            Self::Status(text) => sd_notify::notify(&[NotifyState::Status(&line(text))]),
        }
    }
}

/// How long the service manager waits for [`Notice::Alive`] before it takes the
/// agent for dead; `None` if it does not.
#[must_use]
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())
}

/// One line: what follows would be taken for another assignment.
fn line(text: &str) -> String {
    plain(text).chars().take(MAX_STATUS).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_status_is_one_line() {
        assert_eq!(line("12 Rubies\nREADY=0"), "12 Rubies\\nREADY=0");
        assert_eq!(line(&"é".repeat(500)).chars().count(), MAX_STATUS);
    }

    /// Runs this test alone with the service manager's variables, for they are
    /// those of the whole process.
    fn again(test: &str, variables: &[(&str, &str)]) -> bool {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(variables.iter().copied())
            .status()
            .unwrap()
            .success()
    }

    #[test]
    fn the_manager_is_told() {
        let name = "agent::systemd::tests::the_manager_is_told";
        if std::env::var_os("NOTIFY_SOCKET").is_some() {
            for notice in [
                Notice::Ready,
                Notice::Status("12 Rubies\nX=1"),
                Notice::Reloading,
                Notice::Alive,
                Notice::Stopping,
            ] {
                notice.send().unwrap();
            }
            assert_eq!(watchdog_interval(), Some(Duration::from_secs(30)));
            return;
        }
        Notice::Ready.send().unwrap();
        assert_eq!(watchdog_interval(), None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let path = path.to_str().unwrap();
        assert!(again(
            name,
            &[("NOTIFY_SOCKET", path), ("WATCHDOG_USEC", "30000000")]
        ));
        let mut messages = Vec::new();
        socket.set_nonblocking(true).unwrap();
        let mut buffer = [0; 4096];
        while let Ok(length) = socket.recv(&mut buffer) {
            messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        }
        assert_eq!(messages.len(), 5);
        assert_eq!(messages[0], "READY=1\n");
        assert_eq!(messages[1], "STATUS=12 Rubies\\nX=1\n");
        let time = messages[2]
            .strip_prefix("RELOADING=1\nMONOTONIC_USEC=")
            .unwrap();
        assert!(time.trim().parse::<u64>().unwrap() > 0);
        assert_eq!(messages[3..], ["WATCHDOG=1\n", "STOPPING=1\n"]);
    }
}
