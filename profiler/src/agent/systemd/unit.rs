//! The unit.

use std::path::Path;

/// The unit, for `rbprof` in `/usr/bin`.
const UNIT: &str = include_str!("rbprof.service");
/// The program in it.
const PROGRAM: &str = "/usr/bin/rbprof";

/// The unit that starts this program, whose path should be absolute.
#[must_use]
pub fn unit(program: &Path) -> String {
    let program = program.to_string_lossy();
    // Characters with a meaning in `ExecStart=`.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if program == PROGRAM || !program.starts_with('/') || !program.chars().all(is_plain) {
        return UNIT.to_owned();
    }
    UNIT.replace(PROGRAM, &program)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::privileges::PURPOSES;

    #[test]
    fn the_program_is_named() {
        assert!(unit(Path::new(PROGRAM)).contains("ExecStart=/usr/bin/rbprof agent\n"));
        let other = unit(Path::new("/opt/rbprof-1.0/rbprof"));
        assert!(other.contains("ExecStart=/opt/rbprof-1.0/rbprof agent\n"));
        assert!(!other.contains(PROGRAM));
        for odd in ["rbprof", "/tmp/a b", "/tmp/%n", "/x\nUser=root"] {
            assert_eq!(unit(Path::new(odd)), UNIT, "{odd}");
        }
    }

    #[test]
    fn capabilities_are_those_of_a_recording() {
        for key in ["AmbientCapabilities=", "CapabilityBoundingSet="] {
            let line = UNIT.lines().find_map(|line| line.strip_prefix(key));
            let mut given: Vec<_> = line.unwrap().split(' ').collect();
            let mut wanted = PURPOSES.map(|purpose| purpose.name);
            given.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(given, wanted, "{key}");
        }
    }

    #[test]
    fn systemd_finds_the_unit_safe_enough() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rbprof.service");
        std::fs::write(&path, UNIT).unwrap();
        let output = Command::new("systemd-analyze")
            .args(["security", "--offline=yes", "--no-pager", "--threshold=40"])
            .arg(&path)
            .output();
        let Ok(output) = output else {
            let is_required = std::env::var_os("RBPROF_REQUIRE_ALL").is_some();
            assert!(!is_required, "systemd-analyze is missing");
            eprintln!("skipped: there is no systemd-analyze");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        // A key that systemd does not know is reported there.
        assert!(!errors.contains("rbprof.service"), "{errors}");
        assert!(output.status.success(), "{text}{errors}");
    }
}
