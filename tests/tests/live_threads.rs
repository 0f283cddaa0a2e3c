//! Every sample is of its own thread.

use anyhow::Result;
use rbprof_tests::checks::threads::Pace;
use rbprof_tests::checks::threads::threads_are_told_apart;
use rbprof_tests::rig;

fn check(name: &str) -> Result<()> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(());
    };
    threads_are_told_apart(&ruby, Pace::HOST)?;
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
