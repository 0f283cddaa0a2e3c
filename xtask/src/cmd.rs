//! Running other programs: what was run is part of every error.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context;
use anyhow::Result;
use anyhow::bail;

/// How many of a log's last lines an error quotes.
const QUOTED_LINES: usize = 25;

/// The command as a person would type it.
#[must_use]
pub fn describe(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(quote)
        .collect::<Vec<_>>()
        .join(" ")
}

fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%~".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Runs it, its output going where ours goes.
///
/// # Errors
/// If it cannot be started, or ends in anything but success.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("starting {}", describe(command)))?;
    if !status.success() {
        bail!("{}: {status}", describe(command));
    }
    Ok(())
}

/// Runs it and gives its standard output.
///
/// # Errors
/// If it cannot be started or ends in anything but success (the error quotes
/// its standard error), or if its output is not UTF-8.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", describe(command)))?;
    if !output.status.success() {
        bail!(
            "{}: {}\n{}",
            describe(command),
            output.status,
            last_lines(&String::from_utf8_lossy(&output.stderr))
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("the output of {}", describe(command)))
}

/// Runs it with both its outputs appended to the file `log`.
///
/// # Errors
/// As [`run`]; the error quotes the log's end.
pub fn logged(command: &mut Command, log: &Path) -> Result<()> {
    let mut file = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("opening {}", log.display()))?;
    writeln!(file, "$ {}", describe(command))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .with_context(|| format!("starting {}", describe(command)))?;
    if !status.success() {
        let text = std::fs::read(log).unwrap_or_default();
        bail!(
            "{}: {status}; the end of {}:\n{}",
            describe(command),
            log.display(),
            last_lines(&String::from_utf8_lossy(&text)),
        );
    }
    Ok(())
}

/// Where `program` is on `PATH`, if it is.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata()
        .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let skipped = lines.len().saturating_sub(QUOTED_LINES);
    lines
        .into_iter()
        .skip(skipped)
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_described_command_can_be_typed() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'a b'", ""]);
        assert_eq!(describe(&command), r"sh -c 'echo '\''a b'\''' ''");
    }

    #[test]
    fn errors_name_the_command_and_quote_what_it_said() {
        let error = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("why"),
            "{error}"
        );
        let error = run(&mut Command::new("rbprof-no-such-program"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("rbprof-no-such-program"), "{error}");
    }

    #[test]
    fn only_the_end_of_a_long_log_is_quoted() {
        let text: String = (0..100).map(|n| format!("line {n}\n")).collect();
        let quoted = last_lines(&text);
        assert_eq!(quoted.lines().count(), QUOTED_LINES);
        assert!(quoted.ends_with("line 99"));
    }

    #[test]
    fn programs_are_found_on_the_path() {
        assert!(find("sh").is_some());
        assert_eq!(find("rbprof-no-such-program"), None);
    }
}
