//! Where the bytes of an output go.

use std::error::Error;
use std::fmt;
use std::fs;
use std::fs::File;
use std::io;
use std::io::BufWriter;
use std::io::ErrorKind;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;

use tempfile::NamedTempFile;

/// A place to write an output to.
///
/// A file is written whole or not at all: the bytes go to a new file beside it,
/// which takes its name once everything is on the disk. What is not a regular
/// file (a pipe, `/dev/null`) is written to directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The standard output.
    Stdout,
    /// The file of this path.
    File(PathBuf),
}

impl From<PathBuf> for Destination {
    /// `-` is the standard output.
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "-" {
            Self::Stdout
        } else {
            Self::File(path)
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl Destination {
    /// Finds out whether the destination can be written to, and leaves it as it
    /// is. To be asked before there is something to lose.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(&self) -> Result<(), SaveError> {
        match self {
            Self::Stdout => Ok(()),
            Self::File(path) => match Target::of(path) {
                // Opening a pipe would wait for its reader.
                Ok(Target::Direct) => Ok(()),
                Ok(Target::Replace(path)) => temporary_beside(&path).map(drop),
                Err(error) => Err(error),
            }
            .map_err(|error| self.error(error)),
        }
    }

    /// Writes what `write` writes.
    ///
    /// # Errors
    /// When the destination cannot be written to, or not completely. Then a
    /// file that was there before is as it was, and no other is left behind.
    pub fn save(
        &self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), SaveError> {
        match self {
            Self::Stdout => buffered(io::stdout().lock(), write).map(drop),
            Self::File(path) => save_file(path, write),
        }
        .map_err(|error| self.error(error))
    }

    fn error(&self, source: io::Error) -> SaveError {
        SaveError {
            destination: self.clone(),
            source,
        }
    }
}

/// How to write to a path.
enum Target {
    /// By putting a new file in its place. Links are resolved.
    Replace(PathBuf),
    /// By opening it: it is no regular file.
    Direct,
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() => fs::canonicalize(path).map(Self::Replace),
            Ok(_) => Ok(Self::Direct),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(Self::Replace(path.to_path_buf()))
            }
            Err(error) => Err(error),
        }
    }
}

fn save_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let path = match Target::of(path)? {
        Target::Replace(path) => path,
        Target::Direct => {
            let file = File::options().write(true).open(path)?;
            return buffered(file, write).map(drop);
        }
    };
    // Dropping the temporary file removes it.
    let mut temporary = temporary_beside(&path)?;
    buffered(temporary.as_file_mut(), write)?;
    if let Ok(replaced) = fs::metadata(&path) {
        temporary
            .as_file()
            .set_permissions(replaced.permissions())?;
    }
    // Some file systems find out here only that there is no room.
    temporary.as_file().sync_all()?;
    temporary.persist(&path)?;
    Ok(())
}

/// How the names of temporary files begin and end.
const TEMPORARY: (&str, &str) = (".rbprof-", ".tmp");

/// Whether a file of this name is a temporary one. After a crash, one can be left.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1)
}

/// A new file in the directory of `path`, with the permissions that the user
/// wants for new files.
pub(crate) fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    // Opened here because the crate's own errors name the temporary file, which
    // nobody asked for, and not the system's error.
    tempfile::Builder::new()
        .prefix(TEMPORARY.0)
        .suffix(TEMPORARY.1)
        .make_in(directory, |path| {
            File::options().write(true).create_new(true).open(path)
        })
}

pub(crate) fn buffered<W: Write>(
    out: W,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<W> {
    let mut out = BufWriter::with_capacity(64 * 1024, out);
    write(&mut out)?;
    let mut out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    out.flush()?;
    Ok(out)
}

/// An output that could not be written.
#[derive(Debug)]
pub struct SaveError {
    destination: Destination,
    source: io::Error,
}

impl SaveError {
    /// Whether nobody reads any more: not a failure of ours.
    #[must_use]
    pub fn is_broken_pipe(&self) -> bool {
        self.source.kind() == ErrorKind::BrokenPipe
    }

    fn advice(&self) -> Option<&'static str> {
        match self.source.kind() {
            ErrorKind::NotFound => Some("create the directory first, or choose another with -o"),
            ErrorKind::NotADirectory => Some("part of the path is a file; choose another with -o"),
            ErrorKind::IsADirectory => Some("give the name of a file in it with -o"),
            ErrorKind::PermissionDenied => Some("choose a directory that you may write to with -o"),
            ErrorKind::ReadOnlyFilesystem => {
                Some("choose a directory on a writable file system with -o")
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                Some("free some space, or choose another file system with -o")
            }
            _ => None,
        }
    }
}

impl fmt::Display for SaveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot write {}: {}", self.destination, self.source)?;
        match self.advice() {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

impl Error for SaveError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::fs::symlink;

    use super::*;

    fn to(path: impl Into<PathBuf>) -> Destination {
        Destination::from(path.into())
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_dash_is_standard_output() {
        assert_eq!(to("-"), Destination::Stdout);
        assert_eq!(to("./-"), Destination::File("./-".into()));
        assert_eq!(to("-").to_string(), "standard output");
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("profile.svg");
        let destination = to(&path);
        destination.check().unwrap();
        assert!(names(directory.path()).is_empty(), "a check leaves nothing");
        destination.save(|out| out.write_all(b"first")).unwrap();
        let private = Permissions::from_mode(0o600);
        fs::set_permissions(&path, private).unwrap();
        let failed = destination.save(|out| {
            out.write_all(b"half")?;
            Err(io::Error::other("broken"))
        });
        assert!(failed.unwrap_err().to_string().ends_with("svg: broken"));
        assert_eq!(fs::read(&path).unwrap(), b"first");
        destination.save(|out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the mode is kept");
        assert_eq!(names(directory.path()), ["profile.svg"]);
    }

    #[test]
    fn a_new_file_has_the_usual_mode() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, usual) = (directory.path().join("a"), directory.path().join("b"));
        to(&ours).save(|out| out.write_all(b"x")).unwrap();
        File::create(&usual).unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(ours), mode(usual));
    }

    #[test]
    fn a_link_stays_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        fs::write(&file, "old").unwrap();
        symlink("file", &link).unwrap();
        to(&link).save(|out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn devices_are_written_to_and_not_replaced() {
        let before = fs::metadata("/dev/null").unwrap();
        to("/dev/null").check().unwrap();
        to("/dev/null").save(|out| out.write_all(b"x")).unwrap();
        let after = fs::metadata("/dev/null").unwrap();
        assert_eq!(before.file_type(), after.file_type());
    }

    #[test]
    fn a_full_disk_is_reported() {
        let error = to("/dev/full").save(|out| out.write_all(b"x")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot write /dev/full: No space left on device (os error 28); \
             free some space, or choose another file system with -o"
        );
        assert!(!error.is_broken_pipe());
    }

    #[test]
    fn an_error_says_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let error = to(directory.path()).check().unwrap_err().to_string();
        assert!(
            error.contains("is a directory; give the name of"),
            "{error}"
        );
        let missing = directory.path().join("no/such/a.svg");
        let error = to(&missing).check().unwrap_err().to_string();
        let expected = format!(
            "cannot write {}: No such file or directory (os error 2); \
             create the directory first, or choose another with -o",
            missing.display()
        );
        assert_eq!(error, expected);
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let error = to(file.join("a.svg")).save(|_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("part of the path is a file"));
    }
}
