//! Writers over a profile.
//!
//! Each format is a module of its own and knows the [`profile`](crate::profile)
//! only. [`Destination`] is where the bytes go.

mod destination;
#[cfg(test)]
mod example;
pub mod folded;
mod merged;
pub mod pprof;
mod summary;
pub mod svg;
mod text;
pub mod top;

use std::fmt;
use std::io;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

pub use destination::Destination;
pub use destination::SaveError;
pub(crate) use destination::buffered;
pub(crate) use destination::is_temporary;
pub(crate) use destination::temporary_beside;
pub use folded::FoldedOptions;
pub(crate) use text::plain;

use crate::profile::Profile;

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Gzip-compressed pprof.
    Pprof,
    /// Folded stacks, a line each.
    Folded,
    /// A flame graph to look at in a browser.
    Svg,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Pprof, Self::Folded, Self::Svg];

    /// The format that a file's name asks for: `.pb.gz`, `.pb` and `.pprof`
    /// are pprof, `.folded`, `.collapsed` and `.txt` folded stacks, `.svg` a
    /// flame graph. Capitals count as small letters.
    #[must_use]
    pub fn of_path(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
        let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
        if ends(&[".pb.gz", ".pb", ".pprof"]) {
            Some(Self::Pprof)
        } else if ends(&[".folded", ".collapsed", ".txt"]) {
            Some(Self::Folded)
        } else if ends(&[".svg"]) {
            Some(Self::Svg)
        } else {
            None
        }
    }

    /// The name by which a user asks for the format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pprof => "pprof",
            Self::Folded => "folded",
            Self::Svg => "svg",
        }
    }

    /// The usual ending of a file's name, without the first dot.
    #[must_use]
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Pprof => "pb.gz",
            Self::Folded => "folded",
            Self::Svg => "svg",
        }
    }

    /// Whether the format is text that a terminal can show.
    #[must_use]
    pub const fn is_text(self) -> bool {
        matches!(self, Self::Folded | Self::Svg)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        (Self::ALL.into_iter())
            .find(|format| format.name() == name)
            .ok_or_else(|| UnknownFormat(name.to_owned()))
    }
}

/// A format that does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFormat(String);

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Format::ALL.map(Format::name).join(", ");
        write!(f, "unknown format {:?}: choose one of {names}", self.0)
    }
}

impl std::error::Error for UnknownFormat {}

/// Writes a profile.
///
/// # Errors
/// Those of `out`.
pub fn write(profile: &Profile, format: Format, out: impl Write) -> io::Result<()> {
    match format {
        Format::Pprof => pprof::write(profile, out),
        Format::Folded => folded::write(profile, FoldedOptions::default(), out),
        Format::Svg => svg::write(profile, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_format() {
        let of = |name: &str| Format::of_path(Path::new(name));
        for name in ["a.pb.gz", "/tmp/x.y.PB.GZ", "a.pb", "a.pprof"] {
            assert_eq!(of(name), Some(Format::Pprof), "{name}");
        }
        for name in ["a.folded", "a.txt", "a.collapsed"] {
            assert_eq!(of(name), Some(Format::Folded), "{name}");
        }
        assert_eq!(of("dir.svg/a.svg"), Some(Format::Svg));
        for name in ["a.gz", "a", "svg", "dir.svg/a", "..", "-"] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn formats_are_chosen_by_name() {
        for format in Format::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
            let file = format!("x.{}", format.extension());
            assert_eq!(Format::of_path(Path::new(&file)), Some(format));
        }
        let error = "flame".parse::<Format>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown format \"flame\": choose one of pprof, folded, svg"
        );
    }
}
