//! What a running process says of the Ruby in it.

use std::time::Duration;

use serde::Serialize;

use rbprof_common::process::root;

use super::Missing;
use super::Report;
use super::file::FileError;
use super::file::FileReport;
use super::jit;
use super::jit::JitReport;
use crate::kernel;
use crate::kernel::Kernel;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::targets::AttachError;
use crate::targets::Attacher;
use crate::targets::Target;
use crate::targets::ThreadPointer;
use crate::targets::debug_file::DebugFile;
use crate::targets::mappings::Mapping;
use crate::targets::proc;
use crate::targets::ruby;
use crate::targets::tls::CLibrary;
use crate::targets::validate;

/// How often a process that cannot be profiled is looked at: it may have just
/// started.
const ATTEMPTS: u32 = 5;
/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(60);

/// What a process says.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessReport {
    /// Its id.
    pub pid: u32,
    /// Its command line.
    pub command: String,
    /// Its C library.
    pub c_library: String,
    /// The file of its Ruby was deleted or replaced since it was loaded.
    pub deleted: bool,
    /// What is added to an address in the file to get one in the process.
    pub bias: u64,
    /// How many threads it has, and how many of them run Ruby.
    pub threads: [usize; 2],
    /// How each fact was found.
    pub roots: Vec<RootReport>,
    /// Why it cannot be profiled.
    pub problem: Option<String>,
    /// Its JIT compiler.
    pub jit: Option<JitReport>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// How one fact was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RootReport {
    /// The fact.
    pub what: String,
    /// Its value: an address in the process, or where the thread has it.
    pub value: Option<String>,
    /// How it was found.
    pub how: String,
}

/// Why a process cannot be reported on.
#[derive(Debug)]
pub enum InspectError {
    /// It cannot be looked at.
    Attach(AttachError),
    /// The file of its Ruby cannot be read.
    File(FileError),
}

impl std::fmt::Display for InspectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attach(error) => error.fmt(f),
            Self::File(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for InspectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Attach(error) => error.source(),
            Self::File(error) => error.source(),
        }
    }
}

impl Report {
    /// A running process, which nothing is done to.
    ///
    /// # Errors
    /// [`InspectError`] when there is no such process, it runs no Ruby, or it
    /// may not be looked at. A Ruby that cannot be profiled is no error: the
    /// report says why.
    pub fn of_process(pid: u32, attacher: &mut Attacher) -> Result<Self, InspectError> {
        for _ in 0..ATTEMPTS {
            match Self::of_program(pid, attacher) {
                // It went on to another program between two looks.
                Err(InspectError::Attach(AttachError::Gone { .. }))
                    if PinnedProcess::open(pid).is_ok_and(|process| process.is_alive()) => {}
                result => return result,
            }
        }
        Err(InspectError::Attach(AttachError::NotReady {
            ruby: false,
            pid,
            why: "it goes on to another program all the time".to_owned(),
        }))
    }

    /// The program that the process runs now.
    fn of_program(pid: u32, attacher: &mut Attacher) -> Result<Self, InspectError> {
        let mut attempt = 1;
        let (threads, no_threads, attached) = loop {
            let (threads, no_threads) = match thread_pointers(pid) {
                Ok(threads) => (threads, None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            };
            let attached = attacher.attach(pid, &threads);
            match &attached {
                Err(error) if error.may_pass() && attempt < ATTEMPTS => {
                    attempt += 1;
                    std::thread::sleep(PAUSE);
                }
                _ => break (threads, no_threads, attached),
            }
        };
        let attached = match attached {
            Ok(target) => Ok(target),
            Err(
                error @ (AttachError::NotReady { ruby: true, .. }
                | AttachError::TooOld { .. }
                | AttachError::Unsupported { .. }),
            ) => Err(error),
            Err(error) => return Err(InspectError::Attach(error)),
        };
        let io = |what: &str, source| {
            InspectError::Attach(AttachError::Io {
                pid,
                what: what.to_owned(),
                source,
            })
        };
        let gone = || InspectError::Attach(AttachError::Gone { pid });
        let process = PinnedProcess::open(pid).map_err(|_| gone())?;
        let process = std::sync::Arc::new(process);
        let memory = ProcessMemory::open(process.clone()).map_err(|_| gone())?;
        let mappings =
            proc::mappings(&process).map_err(|error| io("reading its list of mappings", error))?;
        // The one that was taken, or the one whose errors are told.
        let taken = attached.as_ref().ok().map(|target| target.ruby.bias);
        let mut skip = 0;
        let found = loop {
            let found = ruby::find(&process, &memory, &mappings, skip).map_err(|_| gone())?;
            match taken {
                Some(bias) if found.image.bias != bias => skip += 1,
                _ => break found,
            }
        };
        let elf = found.image.elf().map_err(|error| {
            InspectError::File(FileError::Elf {
                path: found.image.path.clone(),
                error,
            })
        })?;
        let debug = DebugFile::find(&elf, std::path::Path::new(&found.image.path), &process);
        let file =
            FileReport::of(&elf, &found.image.path, debug.as_ref()).map_err(InspectError::File)?;

        let mut missing = file.missing();
        if let Some(error) = &no_threads {
            missing.push(Missing {
                what: format!(
                    "proof: the thread pointers of the process are not known, since the kernel \
                     half could not be loaded: {error}"
                ),
                remedy: "run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE".to_owned(),
            });
        }
        if let Err(error) = &attached {
            missing.push(Missing {
                what: format!("everything: {error}"),
                remedy: "see PROBLEM above".to_owned(),
            });
        }
        let problem = match &attached {
            // It says no more than that, and what to do stands there.
            Err(AttachError::NotReady { .. }) if no_threads.is_some() => None,
            Err(error) => Some(error.to_string()),
            Ok(_) => None,
        };
        let target = attached.ok();
        if let Some(target) = &target {
            missing.extend(missing_in(target));
        }
        let process_report = ProcessReport {
            pid,
            command: proc::command(&process),
            c_library: CLibrary::of(&mappings).to_string(),
            deleted: found.image.deleted,
            bias: found.image.bias,
            threads: [
                threads.len(),
                target.as_ref().map_or(0, |target| {
                    validate::check(&target.entry, &threads, &memory)
                        .validated
                        .len()
                }),
            ],
            roots: target.as_ref().map(roots).unwrap_or_default(),
            problem,
            jit: target
                .as_ref()
                .map(|target| jit_of(target, &threads, &mappings, &memory)),
            warnings: target.map(|target| target.warnings).unwrap_or_default(),
        };
        Ok(Self {
            process: Some(process_report),
            file,
            missing,
        })
    }
}

/// The kernel half knows the thread pointers; nothing else tells them without
/// stopping the threads.
fn thread_pointers(pid: u32) -> Result<Vec<ThreadPointer>, kernel::KernelError> {
    let mut kernel = Kernel::load(&kernel::Options::default())?;
    let threads = kernel.thread_pointers(pid)?;
    Ok(threads.into_iter().map(ThreadPointer::from).collect())
}

fn jit_of(
    target: &Target,
    threads: &[ThreadPointer],
    mappings: &[Mapping],
    memory: &ProcessMemory,
) -> JitReport {
    let evidence = validate::check(&target.entry, threads, memory);
    jit::look(mappings, &evidence.validated, target.ruby.layout, memory)
}

/// How each root was found, with its value.
fn roots(target: &Target) -> Vec<RootReport> {
    let entry = &target.entry;
    let value = |what: &str| match what {
        "VM" => Some(format!("{:#x}", entry.vm)),
        "execution context" => Some(match entry.root {
            root::TLS_STATIC => format!("thread pointer {:+}", entry.ec),
            root::TLS_DTV => format!("thread vector, module {}, {:+#x}", entry.module, entry.ec),
            _ => format!("{:#x}", entry.ec),
        }),
        "rb_vm_exec" => (entry.vm_exec[0].end != 0).then(|| {
            let [hot, cold] = entry.vm_exec;
            let mut text = format!("{:#x}-{:#x}", hot.start, hot.end);
            if cold.end != 0 {
                text.push_str(&format!(" and {:#x}-{:#x}", cold.start, cold.end));
            }
            text
        }),
        "ruby_global_symbols" => target.global_symbols.map(|address| format!("{address:#x}")),
        _ => None,
    };
    target
        .provenance
        .iter()
        .map(|provenance| RootReport {
            what: provenance.what.to_owned(),
            value: value(provenance.what),
            how: provenance.how.clone(),
        })
        .collect()
}

/// What a profile of the process would lack, beyond what its file tells.
fn missing_in(target: &Target) -> Vec<Missing> {
    let mut missing = Vec::new();
    if target.global_symbols.is_none() {
        missing.push(Missing {
            what: "names of C methods: ruby_global_symbols was not found".to_owned(),
            remedy: "try again once the program has started; else install the debug symbols of \
                     this Ruby, or build it with ruby_global_symbols exported"
                .to_owned(),
        });
    }
    if target.vm_exec_candidate.is_some() {
        missing.push(Missing {
            what: "proof that rb_vm_exec is what the code makes of it: no native stack has a call \
                   from it"
                .to_owned(),
            remedy: "try again once the program runs Ruby code".to_owned(),
        });
    }
    missing
}
