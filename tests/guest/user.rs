//! Running a program as an ordinary user with chosen capabilities. busybox cannot;
//! so this program replaces itself by that one, when it is called so:
//!
//! ```text
//! rbprof-guest as-nobody CAPABILITIES PROGRAM ARGUMENTS...
//! ```

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use rustix::process::Gid;
use rustix::process::Resource;
use rustix::process::Rlimit;
use rustix::process::Uid;
use rustix::process::setrlimit;
use rustix::thread::CapabilitySet;
use rustix::thread::CapabilitySets;
use rustix::thread::configure_capability_in_ambient_set;
use rustix::thread::set_capabilities;
use rustix::thread::set_keep_capabilities;
use rustix::thread::set_thread_groups;
use rustix::thread::set_thread_res_gid;
use rustix::thread::set_thread_res_uid;

/// What calls it so.
const WORD: &str = "as-nobody";
/// The user and the group that own nothing.
const NOBODY: u32 = 65_534;

/// A command that runs `program` as `nobody` with just these capabilities; add its
/// arguments.
pub(crate) fn as_nobody(capabilities: CapabilitySet, program: &Path) -> Result<Command> {
    let own = std::env::current_exe().context("finding this program's own file")?;
    let mut command = Command::new(own);
    command.arg(WORD).arg(capabilities.bits().to_string());
    command.arg(program);
    Ok(command)
}

/// If this program was called so, becomes the other one.
///
/// # Errors
/// If it cannot.
pub(crate) fn become_other() -> Result<()> {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_none_or(|word| word != WORD) {
        return Ok(());
    }
    let bits = words.next().context("no capabilities")?;
    let bits = bits
        .to_str()
        .context("capabilities are a number")?
        .parse()?;
    let program = words.next().context("no program")?;
    let arguments: Vec<OsString> = words.collect();
    give_up_all_but(CapabilitySet::from_bits_retain(bits))?;
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}

/// This is the only thread yet, so that what holds for it holds for the process.
fn give_up_all_but(capabilities: CapabilitySet) -> Result<()> {
    // Before 5.11, BPF memory counts against this.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited).context("lifting the limit of locked memory")?;
    set_keep_capabilities(true).context("keeping capabilities")?;
    set_thread_groups(&[]).context("leaving all groups")?;
    let (gid, uid) = (Gid::from_raw(NOBODY), Uid::from_raw(NOBODY));
    set_thread_res_gid(gid, gid, gid).context("becoming of another group")?;
    set_thread_res_uid(uid, uid, uid).context("becoming another user")?;
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: capabilities,
    };
    set_capabilities(None, sets).context("setting capabilities")?;
    for one in capabilities.iter() {
        configure_capability_in_ambient_set(one, true).context("making one ambient")?;
    }
    Ok(())
}
