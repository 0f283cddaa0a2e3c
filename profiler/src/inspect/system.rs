//! What this system lets rbprof do: the kernel, the settings that forbid
//! things, and what this process may do. Whether a recording is possible is not
//! concluded from that, but tried.

use std::fmt;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;

use serde::Serialize;

use super::Missing;
use super::text::show_missing;
use crate::kernel;
use crate::kernel::error::kernel_release_text;
use crate::kernel::features::Feature;
use crate::kernel::features::Features;
use crate::kernel::features::Finding;
use crate::kernel::features::How;
use crate::kernel::features::Without;
use crate::kernel::restrictions::Restrictions;
use crate::output::plain;
use crate::privileges;
use crate::privileges::PURPOSES;
use crate::targets::proc;

/// Whether rbprof can record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It can, and profiles lack nothing.
    Full,
    /// It can, but profiles lack something.
    Degraded,
    /// It cannot.
    Impossible,
}

/// Everything about the system; as JSON it is stable, and fields are only added.
#[derive(Clone, Debug, Serialize)]
pub struct SystemReport {
    /// The kernel's release.
    pub kernel: String,
    /// The architecture rbprof was built for, as `uname -m` has it.
    pub machine: String,
    /// Bytes.
    pub page_size: usize,
    /// What is wrong with the kernel's type information; `None`: nothing.
    pub type_information: Option<String>,
    /// Whether rbprof is in the initial PID namespace.
    pub initial_pid_namespace: bool,
    /// Whether `/proc` is that of rbprof's own PID namespace.
    pub own_proc: bool,
    /// What rbprof may do.
    pub capabilities: Vec<CapabilityReport>,
    /// What forbids things.
    pub settings: Vec<SettingReport>,
    /// What the kernel has.
    pub features: Vec<FeatureReport>,
    /// Whether rbprof can record.
    pub verdict: Verdict,
    /// Why it cannot, with what to do.
    pub problem: Option<String>,
    /// What a profile would lack.
    pub missing: Vec<Missing>,
}

/// A capability.
#[derive(Clone, Debug, Serialize)]
pub struct CapabilityReport {
    /// Its name.
    pub name: String,
    /// Whether rbprof has it, or one that includes it.
    pub held: bool,
    /// Whether nothing can be recorded without it.
    pub required: bool,
    /// What it is needed for.
    pub purpose: String,
    /// What follows when it is missing.
    pub without: String,
}

/// A setting of the system or of this process.
#[derive(Clone, Debug, Serialize)]
pub struct SettingReport {
    /// Its name.
    pub name: String,
    /// Its value; `None`: there is none, or it cannot be read.
    pub value: Option<String>,
}

/// Something that a kernel may lack.
#[derive(Clone, Debug, Serialize)]
pub struct FeatureReport {
    /// Its name.
    pub name: String,
    /// The first release of Linux with it.
    pub since: String,
    /// Whether this kernel has it.
    pub available: bool,
    /// How that is known.
    pub how: String,
    /// What follows where it is missing.
    pub without: String,
}

impl SystemReport {
    /// Looks at the system, and tries to record: for some milliseconds, and no
    /// process.
    #[must_use]
    pub fn now() -> Self {
        let features = Features::probe();
        let restrictions = Restrictions::now(!features.has(Feature::UnlimitedMaps));
        let own_proc = proc::is_of_own_pid_namespace();
        let initial = proc::in_initial_pid_namespace();
        let tried = if own_proc {
            kernel::try_out(!initial).map_err(|error| error.to_string())
        } else {
            Err(crate::session::SessionError::Proc.to_string())
        };
        let missing = match tried {
            Ok(()) => lacking(&features, &restrictions, kernel_shows_addresses()),
            Err(_) => Vec::new(),
        };
        Self {
            kernel: kernel_release_text(),
            machine: std::env::consts::ARCH.to_owned(),
            page_size: rustix::param::page_size(),
            type_information: kernel::btf::KernelOffsets::of_running_kernel()
                .err()
                .map(|error| error.to_string()),
            initial_pid_namespace: initial,
            own_proc,
            capabilities: capabilities(&restrictions),
            settings: settings(&restrictions),
            features: features.findings().iter().map(FeatureReport::of).collect(),
            verdict: match (&tried, missing.is_empty()) {
                (Err(_), _) => Verdict::Impossible,
                (Ok(()), true) => Verdict::Full,
                (Ok(()), false) => Verdict::Degraded,
            },
            problem: tried.err(),
            missing,
        }
    }
}

impl FeatureReport {
    fn of(finding: &Finding) -> Self {
        let (major, minor) = finding.feature.since();
        let (Without::Nothing(without) | Without::Less(without) | Without::Same(without)) =
            finding.feature.without();
        Self {
            name: finding.feature.name().to_owned(),
            since: format!("{major}.{minor}"),
            available: finding.is_there,
            how: match finding.how {
                How::Tried => "tried",
                How::TypeInformation => "by the kernel's type information",
                How::Release => "by the kernel's release",
            }
            .to_owned(),
            without: without.to_owned(),
        }
    }
}

fn capabilities(restrictions: &Restrictions) -> Vec<CapabilityReport> {
    PURPOSES
        .iter()
        .map(|it| CapabilityReport {
            name: it.name.to_owned(),
            held: restrictions.initial_user_namespace
                && privileges::allows(restrictions.capabilities, it.capability),
            required: it.is_required,
            purpose: it.purpose.to_owned(),
            without: it.without.to_owned(),
        })
        .collect()
}

fn settings(restrictions: &Restrictions) -> Vec<SettingReport> {
    let Restrictions {
        capabilities: _,
        initial_user_namespace,
        lockdown,
        perf_event_paranoid,
        unprivileged_bpf_disabled,
        kptr_restrict,
        ptrace_scope,
        seccomp,
        no_new_privs,
        memlock,
        memlock_counts,
    } = restrictions;
    let number = |value: &Option<i64>| value.map(|value| value.to_string());
    let user_namespace = if *initial_user_namespace {
        "the initial one"
    } else {
        "another one: capabilities there do not count for BPF"
    };
    let memlock = match (memlock, memlock_counts) {
        (None, _) => "none".to_owned(),
        (Some(limit), true) => format!("{} KiB, and BPF memory counts", limit >> 10),
        (Some(limit), false) => format!("{} KiB, but BPF memory does not count", limit >> 10),
    };
    [
        ("user namespace", Some(user_namespace.to_owned())),
        ("lockdown", lockdown.map(|lockdown| lockdown.to_string())),
        ("perf_event_paranoid", number(perf_event_paranoid)),
        (
            "unprivileged_bpf_disabled",
            number(unprivileged_bpf_disabled),
        ),
        ("kptr_restrict", number(kptr_restrict)),
        ("yama.ptrace_scope", number(ptrace_scope)),
        ("Seccomp", number(seccomp)),
        ("NoNewPrivs", number(no_new_privs)),
        ("limit of locked memory", Some(memlock)),
    ]
    .into_iter()
    .map(|(name, value)| SettingReport {
        name: name.to_owned(),
        value,
    })
    .collect()
}

/// What profiles lack on a system that rbprof can record on.
fn lacking(
    features: &Features,
    restrictions: &Restrictions,
    shows_addresses: bool,
) -> Vec<Missing> {
    let of_kernel = features.findings().iter().filter_map(|finding| {
        let (Without::Less(what) | Without::Nothing(what)) = finding.feature.without() else {
            return None;
        };
        let (major, minor) = finding.feature.since();
        (!finding.is_there).then(|| Missing {
            what: format!("{}: {what}", finding.feature.name()),
            remedy: format!("Linux {major}.{minor} or later"),
        })
    });
    let of_process = PURPOSES.iter().filter_map(|it| {
        let is_there = privileges::allows(restrictions.capabilities, it.capability)
            || it.capability == privileges::CapabilitySet::SYSLOG && shows_addresses;
        (!is_there).then(|| Missing {
            what: it.without.to_owned(),
            remedy: format!("give rbprof {}, or run it as root", it.name),
        })
    });
    let mut missing: Vec<_> = of_kernel.chain(of_process).collect();
    let may_see = privileges::allows(restrictions.capabilities, privileges::CapabilitySet::SYSLOG);
    if may_see && !shows_addresses {
        missing.push(Missing {
            what: "frames of the kernel have no names: it shows their addresses to nobody"
                .to_owned(),
            remedy: "sysctl kernel.kptr_restrict=1".to_owned(),
        });
    }
    if restrictions.ptrace_scope == Some(3) {
        missing.push(Missing {
            what: "no process can be attached to: Yama (kernel.yama.ptrace_scope=3) forbids to \
                   read the memory of any"
                .to_owned(),
            remedy: "boot with another setting: this one cannot be taken back".to_owned(),
        });
    }
    missing
}

/// Whether the kernel shows this process where its functions are.
fn kernel_shows_addresses() -> bool {
    /// Some symbols at the beginning have the address 0 in any case.
    const LOOKED_AT: usize = 1000;
    File::open("/proc/kallsyms").is_ok_and(|file| {
        BufReader::new(file)
            .lines()
            .take(LOOKED_AT)
            .map_while(Result::ok)
            .any(|line| {
                let address = line.split(' ').next().unwrap_or_default();
                u64::from_str_radix(address, 16).is_ok_and(|address| address >> 32 != 0)
            })
    })
}

/// Width of the column of names.
const NAMES: usize = 26;

/// One line: a name and what there is to say.
fn line(f: &mut fmt::Formatter<'_>, name: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:NAMES$} {text}")
}

impl fmt::Display for SystemReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(
            f,
            "kernel",
            format_args!(
                "{} on {}, pages of {} bytes",
                plain(&self.kernel),
                self.machine,
                self.page_size
            ),
        )?;
        line(
            f,
            "type information",
            match &self.type_information {
                None => kernel::btf::VMLINUX,
                Some(problem) => problem,
            },
        )?;
        let namespace = if self.initial_pid_namespace {
            "the initial one"
        } else {
            "another one: its processes can be recorded"
        };
        line(f, "PID namespace", namespace)?;
        if !self.own_proc {
            line(f, "/proc", "of another PID namespace, or not mounted")?;
        }
        writeln!(f)?;
        for each in &self.capabilities {
            match (each.held, each.required) {
                (true, _) => line(f, &each.name, format_args!("yes: to {}", each.purpose))?,
                (false, true) => line(f, &each.name, format_args!("NO: {}", each.without))?,
                (false, false) => line(f, &each.name, format_args!("no: {}", each.without))?,
            }
        }
        writeln!(f)?;
        for each in &self.settings {
            let value = each
                .value
                .as_deref()
                .unwrap_or("not there, or not readable");
            line(f, &each.name, value)?;
        }
        writeln!(f)?;
        for each in &self.features {
            let FeatureReport { since, how, .. } = each;
            if each.available {
                line(f, &each.name, format_args!("yes, {how} (Linux {since})"))?;
            } else {
                line(f, &each.name, format_args!("no, {how} (Linux {since})"))?;
                line(f, "", &each.without)?;
            }
        }
        match &self.problem {
            Some(problem) => writeln!(f, "\nrbprof cannot record here: {}", plain(problem)),
            None => {
                writeln!(f, "\nrbprof can record here: this was tried.")?;
                show_missing(&self.missing, f)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::restrictions::Lockdown;
    use crate::privileges::CapabilitySet;

    fn restrictions(capabilities: CapabilitySet) -> Restrictions {
        Restrictions {
            capabilities,
            initial_user_namespace: true,
            lockdown: Some(Lockdown::None),
            perf_event_paranoid: Some(2),
            unprivileged_bpf_disabled: None,
            kptr_restrict: Some(0),
            ptrace_scope: None,
            seccomp: Some(0),
            no_new_privs: Some(0),
            memlock: None,
            memlock_counts: false,
        }
    }

    fn lacks(capabilities: CapabilitySet, shows_addresses: bool) -> Vec<String> {
        let features = Features::probe();
        lacking(&features, &restrictions(capabilities), shows_addresses)
            .into_iter()
            .map(|missing| missing.what)
            .filter(|what| !what.starts_with("bpf_"))
            .collect()
    }

    #[test]
    fn what_is_not_held_is_lacking() {
        assert_eq!(lacks(CapabilitySet::all(), true), Vec::<String>::new());
        let hidden = lacks(CapabilitySet::all(), false);
        assert!(hidden[0].contains("to nobody"), "{hidden:?}");
        let three = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_PTRACE;
        let lacking = lacks(three, false);
        assert_eq!(lacking.len(), 3, "{lacking:?}");
        assert!(lacking[1].contains("no names"), "{lacking:?}");
        // Where the kernel shows them to everybody.
        assert_eq!(lacks(three, true).len(), 2);
    }

    #[test]
    fn the_page_says_what_the_report_says() {
        let mut report = SystemReport::now();
        report.problem = Some("no \x1b[31mluck".to_owned());
        report.verdict = Verdict::Impossible;
        let text = report.to_string();
        assert!(
            text.contains("cannot record here: no \\x1b[31mluck"),
            "{text}"
        );
        for each in &report.capabilities {
            assert!(text.contains(&each.name), "{text}");
        }
        for each in &report.features {
            assert!(text.contains(&each.name), "{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["verdict"], "impossible");
    }
}
