//! What the running kernel has of what came after Linux 5.10, or what it may be
//! built or started without.
//!
//! A feature is tried out where that takes a system call or two, since kernels
//! of distributions have features of later releases, and others lack what their
//! release should have. Where this process may not try, the kernel's type
//! information tells; where that does not, the release.

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::BpfHelper;

use super::btf::KernelAbilities;
use super::error::kernel_release;

/// Something that a kernel may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Ring buffer maps.
    RingBuffer,
    /// BPF iterators over tasks.
    TaskIterator,
    /// BPF programs may read the kernel's memory.
    KernelReads,
    /// `bpf_loop`.
    Loop,
    /// `bpf_task_pt_regs`, and `bpf_get_current_task_btf` for its argument.
    TaskRegisters,
    /// BPF links for perf events.
    PerfLinks,
    /// BPF memory is not charged to the user's limit of locked memory.
    UnlimitedMaps,
}

/// What follows where a feature is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    /// Nothing can be recorded.
    Nothing(&'static str),
    /// Recordings lack something.
    Less(&'static str),
    /// Something else does the same.
    Same(&'static str),
}

impl Feature {
    /// All of them; those without which nothing can be recorded come first.
    pub const ALL: [Self; 7] = [
        Self::RingBuffer,
        Self::TaskIterator,
        Self::KernelReads,
        Self::Loop,
        Self::TaskRegisters,
        Self::PerfLinks,
        Self::UnlimitedMaps,
    ];

    /// As the kernel's documentation calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RingBuffer => "BPF ring buffer",
            Self::TaskIterator => "BPF task iterator",
            Self::KernelReads => "bpf_probe_read_kernel",
            Self::Loop => "bpf_loop",
            Self::TaskRegisters => "bpf_task_pt_regs",
            Self::PerfLinks => "perf event links",
            Self::UnlimitedMaps => "BPF memory in cgroups",
        }
    }

    /// The first release of Linux with it.
    #[must_use]
    pub const fn since(self) -> (u32, u32) {
        match self {
            Self::RingBuffer | Self::TaskIterator => (5, 8),
            Self::KernelReads => (5, 5),
            Self::UnlimitedMaps => (5, 11),
            Self::TaskRegisters | Self::PerfLinks => (5, 15),
            Self::Loop => (5, 17),
        }
    }

    /// What follows where it is missing.
    #[must_use]
    pub const fn without(self) -> Without {
        match self {
            Self::RingBuffer => Without::Nothing("samples cannot be sent"),
            Self::TaskIterator => Without::Nothing("the threads of a process cannot be found"),
            Self::KernelReads => {
                Without::Nothing("kernel lockdown (confidentiality) takes it away")
            }
            Self::Loop => Without::Less("very deep stacks are cut, after 2,048 frames or more"),
            Self::TaskRegisters => {
                Without::Same("user registers are read from the top of the kernel stack")
            }
            Self::PerfLinks => Without::Same("programs are attached by ioctl"),
            Self::UnlimitedMaps => Without::Same(
                "16 MB to 100 MB must fit into the limit of locked memory, which rbprof raises if \
                 it has CAP_SYS_RESOURCE",
            ),
        }
    }

    /// The helper that shows whether the kernel has it.
    const fn helper(self) -> Option<(BpfHelper, &'static str)> {
        use aya::sys::BpfHelper as Helper;
        Some(match self {
            Self::RingBuffer => (Helper::BPF_FUNC_ringbuf_output, "BPF_FUNC_ringbuf_output"),
            Self::KernelReads => (
                Helper::BPF_FUNC_probe_read_kernel,
                "BPF_FUNC_probe_read_kernel",
            ),
            Self::Loop => (Helper::BPF_FUNC_loop, "BPF_FUNC_loop"),
            Self::TaskRegisters => (Helper::BPF_FUNC_task_pt_regs, "BPF_FUNC_task_pt_regs"),
            // It came with the same release, and nothing closer can be seen.
            Self::UnlimitedMaps => (
                Helper::BPF_FUNC_ktime_get_coarse_ns,
                "BPF_FUNC_ktime_get_coarse_ns",
            ),
            Self::TaskIterator | Self::PerfLinks => return None,
        })
    }

    /// Tries it out; `None` where this process may not, or where that would not
    /// tell.
    fn try_out(self) -> Option<bool> {
        let in_kind = |kind, helper| aya::sys::is_helper_supported(kind, helper).ok();
        let helper = |helper| in_kind(ProgramType::PerfEvent, helper);
        match self {
            Self::RingBuffer => aya::sys::is_map_supported(MapType::RingBuf).ok(),
            Self::TaskRegisters => Some(
                helper(BpfHelper::BPF_FUNC_task_pt_regs)?
                    && helper(BpfHelper::BPF_FUNC_get_current_task_btf)?,
            ),
            // That it was not seen may be for want of privileges.
            Self::PerfLinks => aya::features().bpf_perf_link().then_some(true),
            Self::TaskIterator => None,
            // Not for programs that trace.
            Self::UnlimitedMaps => in_kind(ProgramType::SocketFilter, self.helper()?.0),
            Self::KernelReads | Self::Loop => helper(self.helper()?.0),
        }
    }

    fn in_type_information(self, abilities: &KernelAbilities) -> Option<bool> {
        match (self, self.helper()) {
            (Self::TaskIterator, _) => Some(abilities.iterates_tasks),
            (_, Some((_, name))) => Some(abilities.has_helper(name)),
            (_, None) => None,
        }
    }
}

/// How it is known whether the kernel has a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It was tried out.
    Tried,
    /// The kernel's type information says so.
    TypeInformation,
    /// By the kernel's release.
    Release,
}

/// Whether the kernel has a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The feature.
    pub feature: Feature,
    /// Whether the kernel has it.
    pub is_there: bool,
    /// How that is known.
    pub how: How,
}

/// What the running kernel has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    findings: Vec<Finding>,
}

impl Features {
    /// Finds out. Takes some ten system calls and a look at the kernel's type
    /// information, a few milliseconds in all; nothing is left behind.
    #[must_use]
    pub fn probe() -> Self {
        let names: Vec<_> = Feature::ALL
            .iter()
            .filter_map(|feature| Some(feature.helper()?.1))
            .collect();
        let abilities = KernelAbilities::of_running_kernel(&names).ok();
        let release = kernel_release();
        let find = |feature| {
            let known = |how| move |is_there| (is_there, how);
            let tried = Feature::try_out(feature).map(known(How::Tried));
            let (is_there, how) = tried
                .or_else(|| {
                    let abilities = abilities.as_ref()?;
                    Some(feature.in_type_information(abilities)?).map(known(How::TypeInformation))
                })
                .unwrap_or((release >= Some(feature.since()), How::Release));
            Finding {
                feature,
                is_there,
                how,
            }
        };
        Self {
            findings: Feature::ALL.into_iter().map(find).collect(),
        }
    }

    /// Whether the kernel has this one.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.feature == feature && finding.is_there)
    }

    /// All findings, in the order of [`Feature::ALL`].
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_information_is_asked_about_what_can_be_tried() {
        for feature in Feature::ALL {
            if let Some((helper, name)) = feature.helper() {
                assert_eq!(format!("{helper:?}"), name);
            }
        }
    }

    /// Whoever runs the tests: trying and looking must not contradict.
    #[test]
    fn what_this_kernel_should_have_is_found() {
        let features = Features::probe();
        let release = kernel_release().unwrap();
        for finding in features.findings() {
            if finding.feature != Feature::KernelReads {
                assert_eq!(
                    finding.is_there,
                    release >= finding.feature.since(),
                    "{finding:?}"
                );
            }
        }
    }
}
