//! What a machine needs besides packages: file systems that a container or a
//! minimal system may not have mounted.

use std::process::Command;

use crate::cmd;
use crate::setup;

const MOUNTS: [(&str, &str); 2] = [("tracefs", "/sys/kernel/tracing"), ("bpf", "/sys/fs/bpf")];

/// Mounts tracefs and bpffs where they are missing.
///
/// A mount that is refused is reported and not an error: whatever cannot do
/// without it will say so itself.
pub fn prepare() {
    let mounted = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    for (kind, place) in MOUNTS {
        if is_mounted(&mounted, kind, place) {
            println!("  {kind} on {place}: already there");
        } else if !setup::is_root() {
            println!("  {kind} on {place}: missing; as root: mount -t {kind} {kind} {place}");
        } else {
            match cmd::output(Command::new("mount").args(["-t", kind, kind, place])) {
                Ok(_) => println!("  {kind} on {place}: mounted"),
                Err(error) => println!("  {kind} on {place}: missing; {error:#}"),
            }
        }
    }
}

/// `mounts` is the text of `/proc/mounts`: device, mount point, type, options.
fn is_mounted(mounts: &str, kind: &str, place: &str) -> bool {
    mounts.lines().any(|line| {
        let mut words = line.split(' ').skip(1);
        words.next() == Some(place) && words.next() == Some(kind)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_recognised_by_place_and_type() {
        let mounts = "sysfs /sys sysfs rw 0 0\nnone /sys/fs/bpf bpf rw,nosuid 0 0\nnone /sys/kernel/tracing tmpfs rw 0 0\n";
        assert!(is_mounted(mounts, "bpf", "/sys/fs/bpf"));
        assert!(!is_mounted(mounts, "tracefs", "/sys/kernel/tracing"));
        assert!(!is_mounted(mounts, "bpf", "/sys/fs"));
    }
}
