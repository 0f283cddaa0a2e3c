//! Who a process is.
//!
//! | module | what it does |
//! |---|---|
//! | `words` | the command line: words or title, the main script |
//! | `cgroup` | the control group: container, unit, pod |
//! | `service` | which service a process belongs to |
//!
//! All of it is what the process, its user or its engine say: names for a
//! reader, and nothing to rely on for security. Bytes that are not UTF-8 are
//! replaced, characters that are not plain text are escaped, and each value is
//! cut at a length that is stated here.

mod cgroup;
mod service;
mod words;

use std::borrow::Cow;
use std::io;
use std::io::Read as _;
use std::sync::Arc;

use crate::memory::PinnedProcess;
use crate::output::plain;

use self::cgroup::Groups;
pub(in crate::agent) use self::service::MAX_PATTERN;
pub use self::service::ServiceRule;
pub use self::service::ServiceRuleError;
pub(in crate::agent) use self::service::percent_decoded;
use self::words::CommandLine;

/// Most characters of [`Identity::command`].
pub const MAX_COMMAND: usize = 1024;
/// Most characters of [`Identity::script`], [`Identity::unit`] and
/// [`Identity::container`].
pub const MAX_NAME: usize = 256;
/// Most characters of [`Identity::service`].
pub const MAX_SERVICE: usize = 128;
/// Most characters of [`Identity::cgroup`].
pub const MAX_CGROUP: usize = 1024;
/// Most bytes read of `/proc/PID/cmdline`: options come first.
const MAX_COMMAND_LINE: u64 = 64 << 10;
/// Most bytes read of `/proc/PID/cgroup`: 13 lines of the longest path.
const MAX_CGROUPS: u64 = 64 << 10;

/// Who a process is, as far as can be told from outside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its process id in rbprof's own namespace.
    pub pid: u32,
    /// When it started, in clock ticks after the machine's boot
    /// (`/proc/PID/stat`, field 22): tells processes with the same id apart.
    pub started: u64,
    /// What its profiles are filed under.
    pub service: Arc<str>,
    /// The service that its environment names, as far as that could be read: a title
    /// may have taken its place since.
    pub named: Option<String>,
    /// Its command line, with single spaces, cut where it is long.
    pub command: String,
    /// The main script, or the title that a server such as Puma or Sidekiq gave
    /// the process.
    pub script: Option<String>,
    /// Its control group, as `/proc/PID/cgroup` has it.
    pub cgroup: Option<String>,
    /// The id of its container.
    pub container: Option<String>,
    /// Its systemd unit.
    pub unit: Option<String>,
    /// The UID of its Kubernetes pod.
    pub pod: Option<String>,
    /// The version of its Ruby, such as `3.3.8`.
    pub ruby: String,
}

impl Identity {
    /// Finds out who a process is, from `/proc` alone. What cannot be read
    /// (any more) is left out.
    ///
    /// `earlier` is what was known of the same process before, or of the one
    /// that it was forked from: a title may have taken the place of the
    /// environment since.
    #[must_use]
    pub fn of(
        process: &PinnedProcess,
        ruby: &str,
        rules: &[ServiceRule],
        earlier: Option<&Self>,
    ) -> Self {
        let line = CommandLine::of(process);
        let groups = Groups::of(process);
        let mut identity = Self {
            pid: process.identity().pid,
            started: process.identity().start_time,
            service: Arc::from(""),
            named: service::named(process, groups.path.as_deref(), earlier),
            command: safe(&line.text(), MAX_COMMAND),
            script: line.script().map(|script| safe(script, MAX_NAME)),
            cgroup: groups.path.map(|path| safe(&path, MAX_CGROUP)),
            container: groups.container.map(|id| safe(&id, MAX_NAME)),
            unit: groups.unit.map(|unit| safe(&unit, MAX_NAME)),
            pod: groups.pod,
            ruby: safe(ruby, MAX_NAME),
        };
        identity.service = service::of(&identity, &line, rules);
        identity
    }
}

/// The beginning of a file in `/proc/PID`.
fn read_start(process: &PinnedProcess, name: &str, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    process.file(name)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Text that can be shown anywhere, of at most `limit` characters; an ellipsis
/// takes the place of what is cut.
fn safe(text: &str, limit: usize) -> String {
    let text = match plain(text) {
        Cow::Borrowed(text) => Cow::Borrowed(text.trim()),
        Cow::Owned(text) => Cow::Owned(text.trim().to_owned()),
    };
    match text.char_indices().nth(limit) {
        None => text.into_owned(),
        Some(_) => text
            .chars()
            .take(limit.saturating_sub(1))
            .chain(['…'])
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_shown_is_plain_and_short() {
        assert_eq!(safe(" a\x1b[31m\nb ", 80), "a\\x1b[31m\\nb");
        assert_eq!(safe("abcdef", 6), "abcdef");
        assert_eq!(safe("abcdefg", 6), "abcde…");
        assert_eq!(safe("日本語日本語", 3), "日本…");
    }

    #[test]
    fn a_process_is_described() {
        let mut child = Command::new("sh")
            .args(["-c", "echo started; read nothing", "x\x1b"])
            .env("OTEL_SERVICE_NAME", "shop")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Until then the child may still be this program.
        let mut word = [0; 7];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut word)
            .unwrap();
        let process = PinnedProcess::open(child.id()).unwrap();
        let identity = Identity::of(&process, "3.3.8", &[], None);
        assert_eq!(identity.pid, child.id());
        assert_eq!(identity.started, process.identity().start_time);
        assert_eq!(&*identity.service, "shop");
        assert_eq!(identity.command, "sh -c echo started; read nothing x\\x1b");
        assert_eq!(identity.script, None);
        assert_eq!(identity.ruby, "3.3.8");
        assert!(identity.cgroup.is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        // Of a process that is gone nothing is known; nothing panics.
        let gone = Identity::of(&process, "3.3.8", &[], Some(&identity));
        assert_eq!((&*gone.service, gone.cgroup), ("shop", None));
    }
}
