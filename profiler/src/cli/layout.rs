//! `rbprof layout`.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;

use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Version;

use super::args::Layout as Arguments;
use super::plan::UsageError;
use crate::layouts;
use crate::layouts::dwarf;
use crate::layouts::dwarf::FromDwarf;
use crate::layouts::toml;

/// Writes the layout.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments {
        from,
        version,
        output,
    } = arguments;
    let text = match (from, version.as_deref()) {
        (Some(from), version) => from_debug_information(from, version)?,
        (None, version) => built_in(version.unwrap_or_default())?,
    };
    match output {
        Some(path) => {
            fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        }
        None => {
            let mut stdout = std::io::stdout().lock();
            stdout
                .write_all(text.as_bytes())
                .and_then(|()| stdout.flush())
                .context("writing to standard output")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn from_debug_information(path: &Path, version: Option<&str>) -> anyhow::Result<String> {
    let version = match version {
        None => None,
        Some(text) => Some(Version::parse(text).ok_or_else(|| {
            UsageError::of("layout", format!("{text} is not a release such as 3.4.5"))
        })?),
    };
    let FromDwarf {
        layout,
        base,
        assumed,
    } = dwarf::layout_of(path, version).with_context(|| path.display().to_string())?;
    let head = format!(
        "Layout of Ruby {} for rbprof, from the debug information in\n{}.\nFields that are marked \
         as missing there are as in Ruby {} to {}.\n",
        layout.from,
        path.display(),
        base.from,
        base.to,
    );
    Ok(toml::write(&layout, &head, &assumed))
}

fn built_in(series: &str) -> anyhow::Result<String> {
    let Some(layout) = layouts::built_in(series) else {
        let mut known: Vec<String> = LAYOUTS
            .iter()
            .map(|layout| format!("{}.{}", layout.from.major, layout.from.minor))
            .collect();
        known.dedup();
        let known = known.join(", ");
        let what = format!("rbprof has no layout of Ruby {series}; it has {known}");
        return Err(UsageError::of("layout", what).into());
    };
    let proven = if layout.development {
        "\nIt is that of one revision in development, and not proven."
    } else {
        ""
    };
    let head = format!("Layout of Ruby {series} as rbprof has it.{proven}\n");
    Ok(toml::write(layout, &head, &[]))
}
