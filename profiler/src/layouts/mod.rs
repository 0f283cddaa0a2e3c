//! Layouts from outside the table: read from a file, written from debug
//! information.
//!
//! The table in [`rbprof_common::layout`] has every release. Who runs a Ruby
//! that is in development, or one with patches that move fields, gives rbprof a
//! file with its layout, which rbprof makes of that Ruby's debug information.
//!
//! | module | what it does |
//! |---|---|
//! | [`toml`] | the file's form: reading and writing |
//! | [`dwarf`] | a layout from debug information |

pub mod dwarf;
pub mod toml;

use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;

pub use self::toml::LayoutError;
pub use self::toml::read;

/// The newest row of the table for a release or a series of releases, such as
/// `3.4` or `3.1.4`.
#[must_use]
pub fn built_in(series: &str) -> Option<&'static Layout> {
    let mut parts = series.split('.').map(str::parse::<u16>);
    let (major, minor) = (parts.next()?.ok()?, parts.next()?.ok()?);
    let patch = match parts.next() {
        None => None,
        Some(patch) => Some(patch.ok()?),
    };
    if parts.next().is_some() {
        return None;
    }
    LAYOUTS.iter().rev().find(|layout| {
        (layout.from.major, layout.from.minor) == (major, minor)
            && patch.is_none_or(|patch| layout.from.patch <= patch && patch <= layout.to.patch)
    })
}

#[cfg(test)]
mod tests {
    use rbprof_common::layout::Version;

    use super::*;

    #[test]
    fn rows_are_found_by_series_and_by_release() {
        let to = |series| built_in(series).map(|layout| layout.to);
        assert_eq!(to("3.4"), Some(Version::new(3, 4, 12)));
        assert_eq!(to("3.1"), Some(Version::new(3, 1, 7)));
        assert_eq!(to("3.1.4"), Some(Version::new(3, 1, 4)));
        assert_eq!(to("4.1"), Some(Version::new(4, 1, 0)));
        for none in ["", "3", "3.", "3.4.99", "3.4.5.6", "5.0", "x.y", "-3.4"] {
            assert_eq!(to(none), None, "{none}");
        }
    }
}
