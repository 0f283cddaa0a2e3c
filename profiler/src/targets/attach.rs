//! Looks at one live process: which Ruby it runs, and where its roots are.

use std::io;
use std::sync::Arc;

use rbprof_common::layout::Layout;

use crate::memory::OpenError;
use crate::memory::PinError;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;
use crate::privileges;
use crate::privileges::CapabilitySet;

use super::AttachError;
use super::ThreadPointer;
use super::analyses::Analyses;
use super::examine::Examination;
use super::loader;
use super::proc;
use super::ruby;
use super::ruby::NotFound;
use super::ruby::RubyImage;
use super::target::Target;

/// Finds the Ruby of the process `pid` and its roots.
///
/// `threads` are the thread pointers of its threads; those that run no Ruby do
/// no harm, but at least one must be a Ruby thread's, or nothing can be
/// validated. The process is neither stopped nor changed.
///
/// # Errors
/// [`AttachError`]; [`AttachError::NotReady`] is worth another try soon.
pub fn attach(pid: u32, threads: &[ThreadPointer]) -> Result<Target, AttachError> {
    Attacher::default().attach(pid, threads)
}

/// Most Rubies of one process that are tried.
const MAX_RUBIES: usize = 4;

/// What one run of rbprof attaches with: its settings, and what it has learnt of
/// the files it has seen.
#[derive(Debug, Default)]
pub struct Attacher {
    /// The layout of every Ruby, instead of the table's.
    pub layout: Option<&'static Layout>,
    /// Recover everything, as from a build that shows nothing: for proving that
    /// what is recovered is what the symbols say.
    pub ignore_symbols: bool,
    /// What was learnt from the code of files.
    pub analyses: Analyses,
}

impl Attacher {
    /// Looks at process `pid`, as [`attach`] does.
    ///
    /// # Errors
    /// [`AttachError`]; [`AttachError::NotReady`] is worth another try soon.
    pub fn attach(&mut self, pid: u32, threads: &[ThreadPointer]) -> Result<Target, AttachError> {
        let process = PinnedProcess::open(pid).map_err(|error| pin_error(pid, error))?;
        let process = Arc::new(process);
        let program = proc::program_mark(&process);
        match look(self, &process, threads) {
            // Whatever went wrong, the end of the process explains it,
            Err(_) if !process.is_alive() => Err(AttachError::Gone { pid }),
            // or that it went on to another program meanwhile.
            Err(error)
                if matches!(error, AttachError::Gone { .. })
                    || proc::program_mark(&process) != program =>
            {
                match error {
                    error @ AttachError::Permission { .. } => Err(error),
                    _ => Err(AttachError::NotReady {
                        ruby: false,
                        pid,
                        why: "it has just begun to run another program".to_owned(),
                    }),
                }
            }
            result => result,
        }
    }
}

fn pin_error(pid: u32, error: PinError) -> AttachError {
    match error {
        PinError::Gone => {
            let here = proc::known_elsewhere_as(pid);
            if here.is_empty() {
                AttachError::Gone { pid }
            } else {
                AttachError::OtherPidNamespace { pid, here }
            }
        }
        PinError::Thread { process } => AttachError::Thread { tid: pid, process },
        PinError::Io { what, source } => AttachError::Io { pid, what, source },
    }
}

fn look(
    attacher: &mut Attacher,
    process: &Arc<PinnedProcess>,
    threads: &[ThreadPointer],
) -> Result<Target, AttachError> {
    let pid = process.identity().pid;
    let not_ruby = |looked_at| AttachError::NotRuby {
        pid,
        command: proc::command(process),
        looked_at,
    };
    if proc::is_kernel_thread(process) {
        return Err(not_ruby("it is a thread of the kernel".to_owned()));
    }
    let memory = ProcessMemory::open(Arc::clone(process)).map_err(|error| match error {
        OpenError::Gone => AttachError::Gone { pid },
        OpenError::Permission(error) => trace_permission(pid, "reading its memory", &error),
        OpenError::Io(source) => AttachError::Io {
            pid,
            what: "reading its memory".to_owned(),
            source,
        },
    })?;
    let mappings = proc::mappings(process).map_err(|error| maps_error(pid, error))?;
    let examine = |attacher: &mut Attacher, image: &RubyImage| {
        Examination {
            attacher,
            process,
            memory: &memory,
            mappings: &mappings,
            ruby: image,
            threads,
        }
        .target()
    };
    let image = ruby::find(process, &memory, &mappings, 0).map_err(|error| match error {
        NotFound::Nowhere { .. } if loader::is_loading(process, &memory, &mappings) => {
            AttachError::NotReady {
                ruby: false,
                pid,
                why: "its libraries are still being loaded".to_owned(),
            }
        }
        NotFound::Nowhere { files } => {
            let program = proc::executable(process).map_or_else(String::new, |path| {
                format!(" ({} among them)", path.display())
            });
            not_ruby(format!(
                "none of the {files} ELF files it has mapped{program} defines ruby_version"
            ))
        }
        NotFound::Unopened { path, error } => AttachError::Permission {
            pid,
            what: format!("opening {path}, which it has mapped: {error}"),
            capability: "CAP_CHECKPOINT_RESTORE (before Linux 5.9: CAP_SYS_ADMIN)",
        },
        NotFound::Unreadable { path } => AttachError::Unsupported {
            pid,
            ruby: path,
            missing: "its ruby_version is not text".to_owned(),
            found: "the symbol was found".to_owned(),
        },
    })?;
    let first = match examine(attacher, &image) {
        Err(error) if error.is_about_this_ruby() => error,
        result => return result,
    };
    // A program may have loaded several and use another one.
    for skip in 1..MAX_RUBIES {
        let Ok(image) = ruby::find(process, &memory, &mappings, skip) else {
            break;
        };
        if let Ok(target) = examine(attacher, &image) {
            return Ok(target);
        }
    }
    Err(first)
}

fn maps_error(pid: u32, error: io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            trace_permission(pid, "reading its list of mappings", &error)
        }
        Some(libc::ESRCH | libc::ENOENT) => AttachError::Gone { pid },
        _ => AttachError::Io {
            pid,
            what: "reading its list of mappings".to_owned(),
            source: error,
        },
    }
}

fn trace_permission(pid: u32, what: &str, error: &io::Error) -> AttachError {
    AttachError::Permission {
        pid,
        what: format!("{what}: {error}"),
        capability: if privileges::effective().contains(CapabilitySet::SYS_PTRACE) {
            "CAP_SYS_PTRACE (this process has it: look at kernel.yama.ptrace_scope, where 3 \
             forbids all, security modules, and user namespaces)"
        } else {
            "CAP_SYS_PTRACE"
        },
    }
}
