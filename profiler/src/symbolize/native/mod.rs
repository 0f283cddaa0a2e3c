//! Names of machine code, found on a thread of their own while the recording
//! goes on.
//!
//! [`NativeNames`] is told which files there are ([`NativeNames::add_object`]) and
//! which addresses are of interest ([`NativeNames::want`]), neither of which
//! waits. A file is read when the first address in it is wanted: its `.symtab`,
//! or that of the separate debug file that belongs to it, and `.dynsym`. At the end
//! [`NativeNames::wait`] lets the thread finish, for as long as the caller has
//! time, and [`NativeNames::lookup`] gives what was found.
//!
//! Files are those of targets, which can put anything into them: a file that
//! cannot be read has no names, and neither has anything that takes too long.
//! Files that were read are kept within a budget of memory, those used last.
//!
//! | module | what it does |
//! |---|---|
//! | `table` | the functions that an ELF file names |
//! | `source` | symbols in a file of our own |
//! | `worker` | the thread, and blazesym |
//! | `demangle` | names of C++ and Rust functions |

mod demangle;
mod source;
mod table;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use self::worker::Request;
use self::worker::Worker;
use crate::memory::PinnedProcess;
use crate::profile::Function;

/// Memory for files that were read, bytes, unless the caller says otherwise.
pub const DEFAULT_BUDGET: usize = 64 << 20;

/// Where the kernel lists its functions.
const KALLSYMS: &str = "/proc/kallsyms";

/// Stack of the thread, bytes. Names can be made so deep that taking them apart
/// needs 4 MB where the compiler does not optimise, and half a megabyte where it
/// does.
const STACK: usize = 16 << 20;

/// Most sentences about what went wrong; more would help nobody.
const MAX_NOTES: usize = 20;

/// A file with machine code.
#[derive(Clone, Debug)]
pub struct ObjectFile {
    /// The file, or a file in memory with the contents of what is mapped from
    /// none, such as the vDSO.
    pub file: Arc<File>,
    /// Its path as the process has it mapped, or a name such as `[vdso]`.
    pub path: Arc<str>,
    /// A process that has it mapped: a separate debug file is looked for below
    /// its root first. `None` looks on the host only.
    pub process: Option<Arc<PinnedProcess>>,
}

/// A place in machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// Object and address in its file.
    Object(u32, u64),
    Kernel(u64),
}

/// What the thread has found.
#[derive(Debug, Default)]
struct Found {
    /// `None` where there is no name.
    names: HashMap<Place, Option<Arc<Function>>>,
    notes: Vec<String>,
}

impl Found {
    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// Nothing that a panic could leave half done is kept in there.
fn lock(found: &Mutex<Found>) -> MutexGuard<'_, Found> {
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names of machine code, found on a thread of their own.
///
/// The thread ends when this is dropped and what was asked for is done; nobody
/// waits for it.
#[derive(Debug)]
pub struct NativeNames {
    requests: Sender<Request>,
    found: Arc<Mutex<Found>>,
    /// With the generation that wanted it last.
    wanted: HashMap<Place, u32>,
    generation: u32,
}

impl NativeNames {
    /// Starts the thread. `budget` is the memory for files that were read, bytes;
    /// the one in use is kept even if it is larger. The list of the kernel's
    /// functions, once it is needed, is not part of it.
    ///
    /// # Errors
    /// What the system says when it has no thread.
    pub fn start(budget: usize) -> io::Result<Self> {
        Self::start_with(budget, Path::new(KALLSYMS))
    }

    fn start_with(budget: usize, kallsyms: &Path) -> io::Result<Self> {
        let (requests, received) = mpsc::channel();
        let found = Arc::new(Mutex::new(Found::default()));
        let (shared, kallsyms) = (Arc::clone(&found), kallsyms.to_owned());
        thread::Builder::new()
            .name("rbprof-symbols".to_owned())
            .stack_size(STACK)
            .spawn(move || Worker::new(shared, budget, kallsyms).run(&received))?;
        Ok(Self {
            requests,
            found,
            wanted: HashMap::new(),
            generation: 0,
        })
    }

    /// Makes a file known under the number that addresses in it are wanted by. A
    /// number stands for one file for good; of two files the first one stays.
    pub fn add_object(&mut self, id: u32, object: ObjectFile) {
        self.send(Request::Add(id, object));
    }

    /// Asks for the name of what is at an address of a file: the file's own
    /// address, of any byte of the instruction. Asking again costs nothing.
    pub fn want(&mut self, id: u32, address: u64) {
        self.ask(Place::Object(id, address));
    }

    /// Asks for the name of what is at an address of the kernel.
    pub fn want_kernel(&mut self, address: u64) {
        self.ask(Place::Kernel(address));
    }

    fn ask(&mut self, place: Place) {
        if self.wanted.insert(place, self.generation).is_none() {
            self.send(Request::Name(place));
        }
    }

    fn send(&self, request: Request) {
        if self.requests.send(request).is_err() {
            lock(&self.found).note(GONE.to_owned());
        }
    }

    /// Waits until everything asked for before is done, at most so long. Gives
    /// whether it is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let in_time = self.when_done().recv_timeout(timeout);
        match in_time {
            Ok(()) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                lock(&self.found).note(format!(
                    "some native functions have no names: finding them took longer than {} s",
                    timeout.as_secs_f64()
                ));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                lock(&self.found).note(GONE.to_owned());
            }
        }
        in_time.is_ok()
    }

    /// What comes, or is closed, once everything asked for before is done.
    #[must_use]
    pub fn when_done(&self) -> Receiver<()> {
        let (done, when_done) = mpsc::channel();
        self.send(Request::Tell(done));
        when_done
    }

    /// Begins another generation, and forgets names if there are more than
    /// `limit`: those that neither this generation nor the one before has asked
    /// for. They are looked for anew when they are wanted again.
    pub fn forget_unused(&mut self, limit: usize) {
        let oldest = self.generation.saturating_sub(1);
        self.generation = self.generation.saturating_add(1);
        if self.wanted.len() <= limit {
            return;
        }
        self.wanted.retain(|_, wanted| *wanted >= oldest);
        self.wanted.shrink_to_fit();
        let mut found = lock(&self.found);
        found
            .names
            .retain(|place, _| self.wanted.contains_key(place));
        found.names.shrink_to_fit();
    }

    /// The function at an address of a file: its kind is `Native`, its file the
    /// path of the object. `None` if it has no name, or is not found yet.
    #[must_use]
    pub fn lookup(&self, id: u32, address: u64) -> Option<Arc<Function>> {
        self.get(Place::Object(id, address))
    }

    /// The function at an address of the kernel: its kind is `Kernel`.
    #[must_use]
    pub fn lookup_kernel(&self, address: u64) -> Option<Arc<Function>> {
        self.get(Place::Kernel(address))
    }

    fn get(&self, place: Place) -> Option<Arc<Function>> {
        lock(&self.found).names.get(&place).cloned().flatten()
    }

    /// What went wrong, in sentences for the profile's warnings.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        lock(&self.found).notes.clone()
    }
}

/// The note when the thread is there no more.
const GONE: &str = "some native functions have no names: the thread that finds them has ended";
