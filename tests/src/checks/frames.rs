//! Stacks of every shape, compared frame by frame with what the program itself
//! knows: how many frames, their labels as Ruby 3.4 has them, files and lines.

use anyhow::Result;
use anyhow::ensure;
use xtask::rubies::Installed;

use crate::frames;
use crate::frames::Jit;
use crate::points;
use crate::rig;

/// Methods and blocks of `frames.rb` and `points.rb` that YJIT must have
/// compiled at least: there are about 200.
const COMPILED: u64 = 100;

/// How fast it goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Ticks per second.
    pub frequency: u64,
    /// CPU time at each point, milliseconds.
    pub spin_ms: &'static str,
    /// Samples that each point must have at least.
    pub enough: u64,
    /// Whether Ruby collects its garbage. Names that the collector may have got
    /// hold of before they were read are withheld, which on a slow machine may be
    /// those of whole points.
    pub collector: bool,
    /// Whether the program looks after each point how fast the machine is now. An
    /// emulator becomes faster with code that it has seen for a while.
    pub recalibrates: bool,
}

impl Pace {
    /// Of real machines: 20 ticks in each point.
    pub const HOST: Self = Self {
        frequency: frames::FREQUENCY,
        spin_ms: frames::SPIN_MS,
        enough: frames::ENOUGH,
        collector: true,
        recalibrates: false,
    };
    /// Of emulated machines: nine ticks in each of 100 points. Some are longer than
    /// they should be, and the first ones after the machine has become faster are
    /// shorter.
    pub const EMULATED: Self = Self {
        frequency: 149,
        spin_ms: "60",
        enough: 1,
        collector: false,
        recalibrates: true,
    };
}

/// How many points of `frames.rb` were compared with how many samples, none of
/// which was wrong.
///
/// # Errors
/// If one was, or a point has hardly any.
pub fn frames_are_true(ruby: &Installed, jit: Jit, pace: Pace) -> Result<Option<(usize, u64)>> {
    let mut command = ruby.script(&rig::workload("frames.rb"))?;
    command.env("RUBYOPT", jit.rubyopt());
    if !pace.collector {
        command.env("NO_COLLECTOR", "1");
    }
    if pace.recalibrates {
        command.env("RECALIBRATE", "1");
    }
    let target = frames::start_with(&mut command, pace.spin_ms)?;
    let Some((said, recording)) = frames::record_at(pace.frequency, target)? else {
        return Ok(None);
    };
    let compiled = points::compiled(&said)?;
    match jit {
        Jit::Off => ensure!(compiled == 0, "YJIT was on"),
        Jit::Yjit => ensure!(compiled >= COMPILED, "YJIT has compiled only {compiled}"),
    }
    frames::c_methods_have_names(&recording)?;
    let mut points = points::parse(&said)?;
    points::relabel(&mut points, frames::LABELS)?;
    let samples = frames::compare_some(&points, &recording, jit, pace.enough)?;
    Ok(Some((points.len(), samples)))
}
