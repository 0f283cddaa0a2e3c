//! A report as a page for a person.

use std::fmt;

use super::Missing;
use super::Report;
use super::file::FileReport;
use super::file::SymbolReport;
use super::jit::JitReport;
use super::jit::JitState;
use super::process::ProcessReport;
use crate::output::plain;

/// Width of the column of names.
const NAMES: usize = 22;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(process) = &self.process {
            show_head(process, f)?;
        }
        show_file(&self.file, f)?;
        if let Some(process) = &self.process {
            show_roots(process, f)?;
        }
        show_missing(&self.missing, f)
    }
}

/// One line: a name and what there is to say.
fn line(f: &mut fmt::Formatter<'_>, name: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:NAMES$} {text}")
}

fn show_head(process: &ProcessReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    line(
        f,
        "process",
        format_args!("{}: {}", process.pid, plain(&process.command)),
    )?;
    let [threads, ruby] = process.threads;
    line(
        f,
        "threads",
        format_args!("{threads}, {ruby} of them with an execution context"),
    )?;
    line(f, "C library", &process.c_library)?;
    if let Some(problem) = &process.problem {
        line(f, "PROBLEM", plain(problem))?;
    }
    for warning in &process.warnings {
        line(f, "warning", plain(warning))?;
    }
    writeln!(f)
}

fn show_file(file: &FileReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    line(
        f,
        "Ruby",
        format_args!("{}, by {}", plain(&file.version), file.version_from),
    )?;
    line(
        f,
        "file",
        format_args!("{} ({}, {})", plain(&file.path), file.kind, file.machine),
    )?;
    line(f, "build id", file.build_id.as_deref().unwrap_or("none"))?;
    line(
        f,
        "stripped",
        if file.stripped {
            "yes: there is no .symtab"
        } else {
            "no"
        },
    )?;
    if let Some(debug_file) = &file.debug_file {
        line(f, "debug file", plain(debug_file))?;
    }
    match &file.layout {
        Some(layout) => {
            let [from, to] = &layout.checked;
            line(
                f,
                "layout",
                format_args!(
                    "of {from} to {to}{}",
                    if layout.assumed {
                        ", the newest before this release: not checked with it"
                    } else {
                        ""
                    }
                ),
            )?;
        }
        None => line(f, "layout", "none: this release is too old")?,
    }
    for symbol in &file.symbols {
        show_symbol(symbol, f)?;
    }
    if let Some(tls) = &file.tls {
        let offset = match (tls.offset, tls.offset_from) {
            (Some(offset), Some(from)) => format!("ruby_current_ec at {offset:#x} by {from}"),
            _ => "where ruby_current_ec is, only a running process can tell".to_owned(),
        };
        line(
            f,
            "thread-local",
            format_args!("{} bytes, {}; {offset}", tls.size, tls.model),
        )?;
    }
    match (&file.code.vm_exec, &file.code.error) {
        (Some(vm_exec), _) => {
            let [start, end] = vm_exec.range;
            let cold = vm_exec.cold.map_or(String::new(), |[start, end]| {
                format!(" and {start:#x}-{end:#x} (cold)")
            });
            line(
                f,
                "code",
                format_args!(
                    "{} functions; rb_vm_exec {start:#x}-{end:#x}{cold}, by {}",
                    file.code.functions, vm_exec.how
                ),
            )?;
        }
        (None, error) => line(f, "code", error.as_deref().unwrap_or("nothing found"))?,
    }
    line(
        f,
        "PLT",
        format_args!(
            "{} functions are called through it; rb_vm_exec {}",
            file.plt.jump_slots,
            if file.plt.vm_exec {
                "is one of them: its export has default visibility, which costs some speed"
            } else {
                "is not one of them"
            }
        ),
    )?;
    let compilers = if file.jit_compilers.is_empty() {
        "none built in".to_owned()
    } else {
        format!("{} built in", file.jit_compilers.join(" and "))
    };
    line(f, "JIT compilers", compilers)
}

fn show_symbol(symbol: &SymbolReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{:NAMES$} ", symbol.name)?;
    let (Some(source), Some(value), Some(size)) = (&symbol.source, symbol.value, symbol.size)
    else {
        return writeln!(f, "not in any symbol table");
    };
    write!(f, "{source}")?;
    if let Some(visibility) = symbol.visibility {
        write!(f, ", {visibility} visibility")?;
    }
    if symbol.thread_local {
        writeln!(f, ", thread-local, offset {value:#x}")
    } else {
        writeln!(f, ", {value:#x}, {size} bytes")
    }
}

fn show_roots(process: &ProcessReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if let Some(jit) = &process.jit {
        line(f, "JIT code", JitText(jit))?;
    }
    if !process.roots.is_empty() {
        writeln!(f, "\nHow everything was found in the process:")?;
    }
    for root in &process.roots {
        line(
            f,
            &format!("  {}", root.what),
            plain(root.value.as_deref().unwrap_or(&root.how)),
        )?;
        if root.value.is_some() {
            line(f, "", plain(&root.how))?;
        }
    }
    Ok(())
}

/// The state of the JIT compiler in words.
struct JitText<'a>(&'a JitReport);

impl fmt::Display for JitText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [compiled, seen] = self.0.compiled;
        match self.0.state {
            JitState::On => write!(f, "on: {compiled} of {seen} methods on the stacks have it"),
            JitState::Reserved => {
                f.write_str("memory is reserved for it, nothing on the stacks has it")
            }
            JitState::Unknown => f.write_str(
                "not known: there is anonymous executable memory, but nothing on the stacks uses it",
            ),
            JitState::Off => f.write_str("none: no anonymous executable memory"),
        }?;
        for [start, end] in &self.0.ranges {
            write!(f, "; {start:#x}-{end:#x}")?;
        }
        Ok(())
    }
}

pub(super) fn show_missing(missing: &[Missing], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if missing.is_empty() {
        return writeln!(f, "\nA profile would lack nothing.");
    }
    writeln!(f, "\nA profile would lack:")?;
    for each in missing {
        writeln!(f, "- {}\n  To get it: {}", plain(&each.what), each.remedy)?;
    }
    Ok(())
}
