//! Starting a program in a root file system.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Arguments: the root; pairs of a folder of the host and the place under the
/// root, without its slash, where it appears; `--`; the program and its
/// arguments.
///
/// Every program here replaces itself by the next, so the process id stays.
/// `unshare` makes the new namespace's mounts private.
const IN_ROOT: &str = r#"
    root=$1; shift
    mount -t proc proc "$root/proc" || exit
    while [ "$1" != -- ]; do
        mount --bind "$1" "$root/$2" || exit
        shift 2
    done
    shift
    cd "$root" && exec chroot "$root" "$@""#;

/// A command that starts `program`, a file in the root file system `root`, with
/// `/proc` in a mount namespace of its own; add the program's arguments.
///
/// The started process *is* the program. `shown`: folders of the host and where
/// they appear under the root (existing folders, without the slash at the
/// front). Needs root.
pub(super) fn command(root: &Path, shown: &[(&Path, &str)], program: &OsStr) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--", "sh", "-c", IN_ROOT, "sh"]);
    command.arg(root);
    for (folder, place) in shown {
        command.arg(folder).arg(place);
    }
    command.arg("--").arg(program);
    command
}
