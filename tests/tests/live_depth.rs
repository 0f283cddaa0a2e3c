//! Deep stacks arrive, and arrive whole.

use anyhow::Result;
use rbprof::kernel::Looping;
use rbprof_tests::checks::depth::Pace;
use rbprof_tests::checks::depth::arrives_whole;
use rbprof_tests::checks::depth::is_cut;
use rbprof_tests::rig;

fn check(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    for depth in [20, 2_000, 8_000] {
        arrives_whole(&ruby, depth, Looping::Probe, Pace::HOST)?;
    }
    Ok(())
}

#[test]
fn on_debian_2_7_4() -> Result<()> {
    check("debian-2.7.4")
}

#[test]
fn on_debian_3_1_2() -> Result<()> {
    check("debian-3.1.2")
}

#[test]
fn on_3_3_8_with_exports() -> Result<()> {
    check("source-3.3.8-protected-stripped")
}

#[test]
fn without_loops_in_the_kernel() -> Result<()> {
    let Some(ruby) = rig::ruby("debian-3.1.2")? else {
        return Ok(());
    };
    // Two frames above and one below the recursion.
    arrives_whole(&ruby, 2_000, Looping::TailCalls, Pace::HOST)?;
    is_cut(&ruby, 8_000, Looping::TailCalls, Pace::HOST)?;
    Ok(())
}
