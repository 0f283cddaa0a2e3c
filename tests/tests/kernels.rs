//! What older kernels lack is replaced, and the replacement does as well. Here
//! it is used on a kernel that would not need it.

use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use anyhow::ensure;
use rbprof::kernel::Options;
use rbprof::kernel::UserRegisters;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::sample_flags;
use rbprof_tests::recording::Recorder;
use rbprof_tests::rig;
use rbprof_tests::target::Target;

/// Most samples hit the kernel.
const PROGRAM: &str = "STDOUT.sync = true; puts :ready; \
                       loop { File.read('/proc/self/stat') }";
const RECORDED: Duration = Duration::from_secs(3);
const FREQUENCY: u64 = 199;

#[test]
fn a_thread_in_the_kernel_has_its_native_frames() -> Result<()> {
    for registers in [UserRegisters::Probe, UserRegisters::FromStack] {
        has_its_native_frames(registers)?;
    }
    Ok(())
}

fn has_its_native_frames(registers: UserRegisters) -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    let options = Options {
        frequency: FREQUENCY,
        registers,
        ..Options::default()
    };
    let Some(mut recorder) = Recorder::new(&options)? else {
        return Ok(());
    };
    recorder.session().walk_native(false)?;
    let mut target = Target::start(ruby.command().args(["-e", PROGRAM]))?;
    target.wait_for("ready")?;
    recorder.start(&[target.pid()])?;
    let start = Instant::now();
    recorder.run_until(|| Ok(start.elapsed() >= RECORDED))?;
    let recording = recorder.finish()?;
    let in_kernel: Vec<_> = recording
        .seen
        .iter()
        .filter(|seen| seen.flags & sample_flags::KERNEL != 0)
        .collect();
    let whole = in_kernel
        .iter()
        .filter(|seen| {
            let native = seen
                .stack
                .iter()
                .filter(|it| it.kind() == frame_kind::NATIVE);
            seen.stack_flags & sample_flags::NATIVE_CUT == 0 && native.count() > 5
        })
        .count();
    println!(
        "{registers:?}: {whole} of {} in the kernel are whole",
        in_kernel.len()
    );
    ensure!(in_kernel.len() > 50, "{} samples", in_kernel.len());
    ensure!(
        whole as f64 >= 0.98 * in_kernel.len() as f64,
        "{registers:?}: {whole} of {}",
        in_kernel.len()
    );
    Ok(())
}
