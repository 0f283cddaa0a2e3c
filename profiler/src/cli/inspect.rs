//! `rbprof inspect`.

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

use super::args::Inspect;
use crate::inspect::Report;
use crate::inspect::SystemReport;
use crate::inspect::Verdict;
use crate::inspect::check;
use crate::targets::Attacher;

/// Prints what there is to know.
pub(super) fn run(arguments: &Inspect) -> anyhow::Result<ExitCode> {
    if let Some(path) = &arguments.check {
        let (all, lines) = check(path)?;
        print(&lines)?;
        return Ok(if all {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    if arguments.system {
        let report = SystemReport::now();
        print(&page(&report, arguments.json)?)?;
        return Ok(match report.verdict {
            Verdict::Full | Verdict::Degraded => ExitCode::SUCCESS,
            Verdict::Impossible => ExitCode::FAILURE,
        });
    }
    let report = match (arguments.pid, &arguments.file) {
        (Some(pid), _) => Report::of_process(pid, &mut Attacher::default())?,
        (None, Some(path)) => Report::of_file(path)?,
        (None, None) => anyhow::bail!("give a process or a file"),
    };
    print(&page(&report, arguments.json)?)?;
    // For scripts: a process that cannot be profiled.
    let problem = report.process.and_then(|process| process.problem);
    Ok(match problem {
        Some(_) => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
    })
}

/// A report as JSON, or for a person.
fn page(report: &(impl Serialize + Display), json: bool) -> anyhow::Result<String> {
    if !json {
        return Ok(report.to_string());
    }
    let mut text = serde_json::to_string_pretty(report).context("writing JSON")?;
    text.push('\n');
    Ok(text)
}

fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("writing to standard output"),
    }
}
