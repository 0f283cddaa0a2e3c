//! What `/proc` says of a process.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use crate::memory::PinnedProcess;

use super::mappings::Mapping;

/// `PF_KTHREAD` of the kernel's `include/linux/sched.h`.
const PF_KTHREAD: u64 = 0x0020_0000;
/// Inode of the initial PID namespace (`PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";
/// `AT_PHDR` of the auxiliary vector.
const AT_PHDR: u64 = 3;

/// The command line, or the name in brackets where there is none (kernel
/// threads, zombies), for messages. Bytes that are not UTF-8 are replaced.
#[must_use]
pub fn command(process: &PinnedProcess) -> String {
    let line = process.read("cmdline").unwrap_or_default();
    let words: Vec<_> = line
        .split(|&byte| byte == 0)
        .filter(|word| !word.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    if !words.is_empty() {
        return words.join(" ");
    }
    let name = process.read("comm").unwrap_or_default();
    format!("[{}]", String::from_utf8_lossy(name.trim_ascii_end()))
}

/// The executable, in the process's own mount namespace. For messages: it may
/// be gone, and the path may lead elsewhere from here.
#[must_use]
pub fn executable(process: &PinnedProcess) -> Option<PathBuf> {
    process.link("exe").ok()
}

/// Whether this is a thread of the kernel.
#[must_use]
pub fn is_kernel_thread(process: &PinnedProcess) -> bool {
    process
        .read("stat")
        .ok()
        .and_then(|line| crate::memory::Stat::parse(&line))
        .is_some_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// How long ago the process started, in seconds.
#[must_use]
pub fn age(process: &PinnedProcess) -> Option<f64> {
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    // SAFETY: takes no pointer.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are a million years")]
    let started = process.identity().start_time as f64 / ticks.max(1) as f64;
    Some(uptime - started)
}

/// What the process has mapped.
///
/// # Errors
/// What reading `/proc/PID/maps` says: `EACCES` without the permission to trace
/// the process.
pub fn mappings(process: &PinnedProcess) -> std::io::Result<Vec<Mapping>> {
    Ok(Mapping::parse_all(&process.read("maps")?))
}

/// The ids of the process's threads, in the PID namespace of `/proc`.
///
/// # Errors
/// What reading `/proc/PID/task` says.
pub fn threads(process: &PinnedProcess) -> std::io::Result<Vec<u32>> {
    use std::os::fd::AsRawFd;
    // By the held descriptor: a reused process id must not list another's.
    let task = process.open_below("task", libc::O_RDONLY | libc::O_DIRECTORY)?;
    let entries = fs::read_dir(format!("/proc/self/fd/{}", task.as_raw_fd()))?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect())
}

/// Where the main executable's program headers are in memory (`AT_PHDR`).
#[must_use]
pub fn program_headers(process: &PinnedProcess) -> Option<u64> {
    let auxv = process.read("auxv").ok()?;
    let (pairs, _) = auxv.as_chunks::<16>();
    pairs.iter().find_map(|pair| {
        let (key, value) = pair.split_first_chunk::<8>()?;
        (u64::from_le_bytes(*key) == AT_PHDR)
            .then(|| u64::from_le_bytes(value.try_into().unwrap_or_default()))
    })
}

/// The children of a process, their children, and so on, as far as there are
/// any now.
#[must_use]
pub fn descendants(pid: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = procfs::process::all_processes()
        .into_iter()
        .flatten()
        .filter_map(|process| {
            let stat = process.ok()?.stat().ok()?;
            Some((
                u32::try_from(stat.pid).ok()?,
                u32::try_from(stat.ppid).ok()?,
            ))
        })
        .collect();
    let mut found = vec![pid];
    let mut looked_at = 0;
    while let Some(&parent) = found.get(looked_at) {
        looked_at += 1;
        for &(child, of) in &parents {
            if of == parent && !found.contains(&child) {
                found.push(child);
            }
        }
    }
    found.split_off(1)
}

/// Whether `/proc` is mounted and has the process ids that system calls take:
/// those of rbprof's own PID namespace.
#[must_use]
pub fn is_of_own_pid_namespace() -> bool {
    fs::read_link("/proc/self").is_ok_and(|own| *own == *std::process::id().to_string())
}

/// Whether rbprof itself runs in the initial PID namespace, where the process
/// ids it sees are those that the kernel keeps in each task.
#[must_use]
pub fn in_initial_pid_namespace() -> bool {
    fs::read_link("/proc/self/ns/pid")
        .is_ok_and(|namespace| namespace.as_os_str() == INITIAL_PID_NAMESPACE)
}

/// Processes that have `pid` as their id in a PID namespace of their own (a
/// container's), with the ids they have here and their names.
#[must_use]
pub fn known_elsewhere_as(pid: u32) -> Vec<(u32, String)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|here| {
            let status = fs::read(format!("/proc/{here}/status")).ok()?;
            let (name, ids) = name_and_ids(&status)?;
            (ids.len() > 1 && ids.last() == Some(&pid)).then_some((here, name))
        })
        .collect()
}

/// The name, and the ids in every PID namespace from that of `/proc` inwards,
/// in `/proc/PID/status`.
fn name_and_ids(status: &[u8]) -> Option<(String, Vec<u32>)> {
    let mut name = None;
    let mut ids = None;
    for line in status.split(|&byte| byte == b'\n') {
        if let Some(value) = line.strip_prefix(b"Name:") {
            name = Some(String::from_utf8_lossy(value.trim_ascii()).into_owned());
        } else if let Some(value) = line.strip_prefix(b"NSpid:") {
            ids = Some(
                value
                    .split(u8::is_ascii_whitespace)
                    .filter_map(|id| std::str::from_utf8(id).ok()?.parse().ok())
                    .collect(),
            );
        }
    }
    Some((name?, ids?))
}

/// What is another one after each `exec`: the auxiliary vector, which has the
/// address of random bytes on the new stack. `None` while there is none.
#[must_use]
pub(super) fn program_mark(process: &PinnedProcess) -> Option<Vec<u8>> {
    process
        .read("auxv")
        .ok()
        .filter(|vector| !vector.is_empty())
}

/// The path of a file as seen from the process's own root directory, given the
/// path that `/proc/PID/maps` shows: they differ for a process in a `chroot`
/// within rbprof's own mount namespace.
#[must_use]
pub(super) fn path_in_root(process: &PinnedProcess, path: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let inside = process.link("root").ok().and_then(|root| {
        let root = root.as_os_str().as_bytes();
        let rest = path.strip_prefix(root)?;
        (root != b"/" && rest.first() == Some(&b'/')).then(|| rest.to_vec())
    });
    OsString::from_vec(inside.unwrap_or_else(|| path.to_vec())).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> PinnedProcess {
        PinnedProcess::open(std::process::id()).unwrap()
    }

    #[test]
    fn the_own_process_is_described() {
        let own = own();
        assert!(command(&own).contains("rbprof"));
        assert_eq!(executable(&own), std::env::current_exe().ok());
        assert!(!is_kernel_thread(&own));
        assert!((0.0..86_400.0).contains(&age(&own).unwrap()));
        assert!(threads(&own).unwrap().contains(&own.identity().pid));
        let headers = program_headers(&own).unwrap();
        let mappings = mappings(&own).unwrap();
        assert!(
            mappings
                .iter()
                .any(|mapping| mapping.range.contains(headers))
        );
    }

    #[test]
    fn ids_in_inner_namespaces_are_read() {
        let status = b"Name:\truby\xff\nTgid:\t12\nNSpid:\t12\t7\t1\nX:\t1\n";
        assert_eq!(
            name_and_ids(status),
            Some(("ruby\u{fffd}".to_owned(), vec![12, 7, 1]))
        );
    }
}
