//! The kernel takes the programs, and they see what they are attached to.

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Looping;
use rbprof::kernel::Options;
use rbprof::kernel::ProgramFacts;
use xtask::rubies::Installed;

use crate::recording::Recorder;
use crate::rig;
use crate::target::Target;

/// Ticks per second, in half a second of CPU time.
const FREQUENCY: u64 = 99;
const CPU_MS: &str = "500";

/// What the kernel made of the programs.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// How the walk loops: `bpf_loop` or `tail calls`.
    pub looping: &'static str,
    /// Each of the programs.
    pub programs: Vec<ProgramFacts>,
    /// Samples of a Ruby program that they were attached to.
    pub samples: usize,
}

impl Loaded {
    /// Instructions that the verifier went through for the program that took it
    /// the most; `None` before Linux 5.16, which does not tell.
    #[must_use]
    pub fn verified(&self) -> Option<u32> {
        let verified = |it: &ProgramFacts| it.verified_instructions;
        self.programs.iter().filter_map(verified).max()
    }
}

/// Loads the kernel half, and attaches it to a program.
///
/// # Errors
/// If the kernel takes it not, or it sees nothing of the program.
pub fn loads_and_attaches(ruby: &Installed, looping: Looping) -> Result<Option<Loaded>> {
    let mut target = Target::start(
        ruby.script(&rig::workload("depth.rb"))?
            .envs([("DEPTH", "20"), ("CPU_MS", CPU_MS)]),
    )?;
    target.wait_for("ready")?;
    let options = Options {
        frequency: FREQUENCY,
        looping,
        ..Options::default()
    };
    let Some(mut recorder) = Recorder::new(&options)? else {
        return Ok(None);
    };
    recorder.start(&[target.pid()])?;
    let kernel = recorder.session().kernel();
    let (looping, programs) = (kernel.looping(), kernel.programs());
    target.go_on()?;
    let mut said = Vec::new();
    recorder.run_until(|| target.listen("finished", &mut said))?;
    let recording = recorder.finish()?;
    let busy = |frame: &rbprof::symbolize::Resolved| &*frame.function.label == "Depth#busy";
    let samples = recording
        .seen
        .iter()
        .filter(|seen| seen.frames.iter().any(busy))
        .count();
    ensure!(samples > 0, "none of the samples is of the program");
    Ok(Some(Loaded {
        looping,
        programs,
        samples,
    }))
}

/// How the walk loops on this kernel: `bpf_loop` or `tail calls`.
///
/// # Errors
/// If the kernel half cannot be loaded.
pub fn looping() -> Result<Option<&'static str>> {
    let recorder = Recorder::unobserved(&Options::default())?;
    Ok(recorder.map(|mut recorder| recorder.session().kernel().looping()))
}
