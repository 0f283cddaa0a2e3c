//! Compiles unwind tables on a thread of its own, so that samples need not wait
//! for a large library.

use std::fs::File;
use std::hash::BuildHasher as _;
use std::hash::Hash as _;
use std::hash::Hasher as _;
use std::hash::RandomState;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::mpsc::Sender;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use object::read::ReadRef;

use crate::memory::PinnedProcess;
use crate::targets::debug_file::DebugFile;
use crate::targets::elf::Elf;
use crate::targets::elf::file_cache;
use crate::unwind;
use crate::unwind::Table;
use crate::unwind::UnwindError;

/// Where an object's contents are.
#[derive(Clone, Debug)]
pub enum Contents {
    /// In an open file.
    File(Arc<File>),
    /// In memory, as copied from the process.
    Memory(Arc<[u8]>),
}

/// What tells that two objects have the same unwind table: the build id, and a
/// checksum of what the table is made of, since whoever owns a file can give it
/// any build id. The checksum's key is drawn by chance in each run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    build_id: Vec<u8>,
    contents: u64,
}

/// An object to be compiled.
pub(super) struct Job {
    /// Its number.
    pub(super) object: u32,
    pub(super) contents: Contents,
    /// Its path as mapped, and a process that has it mapped: where its debug
    /// file is looked for, should it need one.
    pub(super) path: String,
    pub(super) process: Arc<PinnedProcess>,
}

/// What became of an object.
pub(super) struct Compiled {
    /// The object's number.
    pub(super) object: u32,
    /// Its table and what that is known by, or why there is none.
    pub(super) table: Result<(Key, Table), String>,
}

/// The thread, seen from outside.
pub(super) struct Compiler {
    jobs: Option<Sender<Job>>,
    results: Receiver<Compiled>,
    pending: usize,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler")
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, when it has no room for a thread.
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, todo) = channel::<Job>();
        let (done, results) = channel();
        let thread = std::thread::Builder::new()
            .name("rbprof-unwind".to_owned())
            .spawn(move || {
                let checksums = RandomState::new();
                for job in todo {
                    let table = compile(&job, &checksums);
                    let object = job.object;
                    if done.send(Compiled { object, table }).is_err() {
                        break;
                    }
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            results,
            pending: 0,
            thread: Some(thread),
        })
    }

    /// Has the table of an object compiled.
    pub(super) fn ask(&mut self, job: Job) {
        let sent = self
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send(job).is_ok());
        self.pending += usize::from(sent);
    }

    /// The next result, if there is one within that time.
    pub(super) fn next(&mut self, patience: Duration) -> Option<Compiled> {
        if self.pending == 0 {
            return None;
        }
        match self.results.recv_timeout(patience) {
            Ok(compiled) => {
                self.pending -= 1;
                Some(compiled)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.pending = 0;
                None
            }
        }
    }

    /// Whether there is something to come.
    pub(super) const fn is_busy(&self) -> bool {
        self.pending != 0
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // The thread ends after what it is doing now.
        self.jobs = None;
        while self.results.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            // It has nothing to say; a panic was printed when it happened.
            drop(thread.join());
        }
    }
}

fn compile(job: &Job, checksums: &RandomState) -> Result<(Key, Table), String> {
    match &job.contents {
        Contents::File(file) => {
            let file = file.try_clone().map_err(|error| error.to_string())?;
            let cache = file_cache(file);
            let elf = Elf::parse(&cache).map_err(|error| error.to_string())?;
            match unwind::compile(&elf, None) {
                // Its call frame information may be where its symbols are.
                Err(UnwindError::NoFunctions) => {
                    let debug = DebugFile::find(&elf, Path::new(&job.path), &job.process);
                    let debug = debug.as_ref().and_then(DebugFile::elf);
                    keyed(&elf, unwind::compile(&elf, debug.as_ref()), checksums)
                }
                outcome => keyed(&elf, outcome, checksums),
            }
        }
        Contents::Memory(bytes) => {
            let elf = Elf::parse(&**bytes).map_err(|error| error.to_string())?;
            keyed(&elf, unwind::compile(&elf, None), checksums)
        }
    }
}

fn keyed<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    outcome: Result<Table, UnwindError>,
    checksums: &RandomState,
) -> Result<(Key, Table), String> {
    let table = outcome.map_err(|error| error.to_string())?;
    // The table stands for what it was made of.
    let mut contents = checksums.build_hasher();
    for page in table.pages() {
        (page.number, page.count).hash(&mut contents);
    }
    for row in table.rows() {
        (row.pc, row.rule).hash(&mut contents);
    }
    table.rules().hash(&mut contents);
    let key = Key {
        build_id: elf.build_id().unwrap_or_default().to_vec(),
        contents: contents.finish(),
    };
    Ok((key, table))
}
