//! Which machines there are.

use clap::ValueEnum;

/// What a machine's processor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// x86-64.
    Amd64,
    /// aarch64.
    Arm64,
}

impl Architecture {
    /// What Debian calls it.
    #[must_use]
    pub const fn debian(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }
}

/// A kernel that boots in a virtual machine.
#[derive(Debug)]
pub struct Machine {
    /// Its processor.
    pub architecture: Architecture,
    /// What it is called: major and minor version, and what sets it apart.
    pub kernel: &'static str,
    /// What the kernel's version must begin with.
    pub(super) version: &'static str,
    /// The Debian suite that has it.
    pub(super) suite: &'static str,
    /// The package that depends on the suite's newest kernel of its kind.
    pub(super) package: &'static str,
    /// The processor model that is emulated.
    pub(super) processor: &'static str,
    /// Where others are like it but for one thing: the Ruby that is enough there.
    pub(super) only: Option<&'static str>,
}

/// The oldest kernel that rbprof supports, and those of Debian's releases since.
///
/// The first arm64 machine has no pointer authentication and no BTI, the others
/// have; their authentication is a cheap one, since Arm's own is slow to emulate. All
/// set the access flag by themselves: docs/kernels.md says what happens on others.
pub const MACHINES: &[Machine] = &[
    amd64("5.10", "bullseye"),
    amd64("6.1", "bookworm"),
    amd64("6.12", "trixie"),
    amd64("7.2", "sid"),
    Machine {
        processor: "neoverse-n1",
        ..arm64("6.1", "bookworm")
    },
    arm64("6.12", "trixie"),
    Machine {
        // Pages of 16 KiB.
        kernel: "6.12-16k",
        package: "linux-image-arm64-16k",
        only: Some("debian-3.3.8"),
        ..arm64("6.12", "trixie")
    },
    arm64("7.2", "sid"),
];

const fn amd64(version: &'static str, suite: &'static str) -> Machine {
    Machine {
        architecture: Architecture::Amd64,
        kernel: version,
        version,
        suite,
        package: "linux-image-cloud-amd64",
        processor: "max",
        only: None,
    }
}

const fn arm64(version: &'static str, suite: &'static str) -> Machine {
    Machine {
        architecture: Architecture::Arm64,
        kernel: version,
        version,
        suite,
        package: "linux-image-cloud-arm64",
        processor: "max,pauth-impdef=on",
        only: None,
    }
}

impl Machine {
    /// What it is called, such as `arm64 6.12`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{} {}", self.architecture.debian(), self.kernel)
    }
}
