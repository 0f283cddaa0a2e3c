//! The thread that finds names.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::Receiver;
use std::sync::mpsc::Sender;

use blazesym::MaybeDefault;
use blazesym::symbolize::Input;
use blazesym::symbolize::Symbolized;
use blazesym::symbolize::Symbolizer;
use blazesym::symbolize::evict;
use blazesym::symbolize::source;

use super::Found;
use super::ObjectFile;
use super::Place;
use super::demangle;
use super::lock;
use super::source::Source;
use super::table::RawTable;
use super::table::Unusable;
use super::table::Which;
use super::table::functions;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::targets::debug_file::DebugFile;
use crate::targets::elf::Elf;
use crate::targets::elf::file_cache;

/// What the thread is asked for.
#[derive(Debug)]
pub(super) enum Request {
    /// A file, under a number.
    Add(u32, ObjectFile),
    /// The name of what is there.
    Name(Place),
    /// To say when it has come this far.
    Tell(Sender<()>),
}

/// The kernel's name for its own code in `maps`-like lists.
const KERNEL_FILE: &str = "[kernel.kallsyms]";

/// A file with machine code, and its symbols while they are in memory.
#[derive(Debug)]
struct Object {
    file: ObjectFile,
    symbols: Symbols,
    /// The separate debug file, once it was found.
    debug: Option<File>,
    /// One for each symbol: different addresses have the same function.
    named: HashMap<Box<str>, Arc<Function>>,
    /// When it was last used, in requests.
    used: u64,
}

#[derive(Debug)]
enum Symbols {
    /// Not read yet.
    Unread,
    /// Read, and dropped to save memory.
    Dropped,
    Loaded(Source),
    /// There are none, or reading them failed.
    None,
}

#[derive(Debug)]
enum KernelSymbols {
    Unread,
    Loaded(Source),
    None,
}

/// The state of the thread.
#[derive(Debug)]
pub(super) struct Worker {
    found: Arc<Mutex<Found>>,
    budget: usize,
    kallsyms: PathBuf,
    symbolizer: Symbolizer,
    objects: HashMap<u32, Object>,
    kernel: KernelSymbols,
    kernel_named: HashMap<Box<str>, Arc<Function>>,
    clock: u64,
}

impl Worker {
    pub(super) fn new(found: Arc<Mutex<Found>>, budget: usize, kallsyms: PathBuf) -> Self {
        Self {
            found,
            budget,
            kallsyms,
            symbolizer: symbolizer(),
            objects: HashMap::new(),
            kernel: KernelSymbols::Unread,
            kernel_named: HashMap::new(),
            clock: 0,
        }
    }

    /// Does what it is asked until nobody can ask any more.
    pub(super) fn run(mut self, requests: &Receiver<Request>) {
        for request in requests {
            match request {
                Request::Add(id, file) => {
                    self.objects.entry(id).or_insert(Object {
                        file,
                        symbols: Symbols::Unread,
                        debug: None,
                        named: HashMap::new(),
                        used: 0,
                    });
                }
                Request::Name(place) => {
                    let name = self.or_give_up(place, |worker| worker.name(place));
                    lock(&self.found).names.insert(place, name);
                }
                // Nobody may be waiting any more.
                Request::Tell(done) => drop(done.send(())),
            }
        }
    }

    /// What `find` finds. Should a file bring a library to panic, it has no names
    /// from then on, and all others keep theirs.
    fn or_give_up(
        &mut self,
        place: Place,
        find: impl FnOnce(&mut Self) -> Option<Arc<Function>>,
    ) -> Option<Arc<Function>> {
        let name = catch_unwind(AssertUnwindSafe(|| find(self)));
        name.unwrap_or_else(|_| {
            self.symbolizer = symbolizer();
            for object in self.objects.values_mut() {
                if let Symbols::Loaded(_) = object.symbols {
                    object.symbols = Symbols::Dropped;
                }
            }
            let what = match place {
                Place::Object(id, _) => self.objects.get_mut(&id).map(|object| {
                    object.symbols = Symbols::None;
                    object.file.path.to_string()
                }),
                Place::Kernel(_) => {
                    self.kernel = KernelSymbols::None;
                    Some("the kernel".to_owned())
                }
            };
            if let Some(what) = what {
                lock(&self.found).note(format!("symbols of {what} could not be used"));
            }
            None
        })
    }

    fn name(&mut self, place: Place) -> Option<Arc<Function>> {
        self.clock += 1;
        match place {
            Place::Object(id, address) => self.name_in_object(id, address),
            Place::Kernel(address) => self.name_in_kernel(address),
        }
    }

    fn name_in_object(&mut self, id: u32, address: u64) -> Option<Arc<Function>> {
        let object = self.objects.get_mut(&id)?;
        object.used = self.clock;
        if let Symbols::Unread | Symbols::Dropped = object.symbols {
            match object.load() {
                Ok(symbols) => object.symbols = symbols,
                Err(why) => {
                    object.symbols = Symbols::None;
                    let path = &object.file.path;
                    lock(&self.found).note(format!("symbols of {path}: {why}"));
                }
            }
            self.shrink(id);
        }
        let object = self.objects.get_mut(&id)?;
        let Symbols::Loaded(source) = &object.symbols else {
            return None;
        };
        let mut elf = source::Elf::new(&source.path);
        elf.debug_syms = false;
        let input = Input::VirtOffset(address);
        let symbol = find(&self.symbolizer, &source::Source::Elf(elf), input)?;
        let (kind, file) = (FunctionKind::Native, &object.file.path);
        Some(function(&mut object.named, kind, file, &symbol))
    }

    fn name_in_kernel(&mut self, address: u64) -> Option<Arc<Function>> {
        if let KernelSymbols::Unread = self.kernel {
            self.kernel = match Source::of_kernel(&self.kallsyms) {
                Ok(Some(source)) => KernelSymbols::Loaded(source),
                Ok(None) => {
                    lock(&self.found).note(
                        "kernel functions have no names: the kernel hides its addresses; \
                         seeing them takes CAP_SYSLOG, and kernel.kptr_restrict below 2"
                            .to_owned(),
                    );
                    KernelSymbols::None
                }
                Err(error) => {
                    let kallsyms = self.kallsyms.display();
                    lock(&self.found).note(format!(
                        "kernel functions have no names: reading {kallsyms}: {error}"
                    ));
                    KernelSymbols::None
                }
            };
        }
        let KernelSymbols::Loaded(source) = &self.kernel else {
            return None;
        };
        let kernel = source::Kernel {
            kallsyms: MaybeDefault::Some(source.path.clone()),
            vmlinux: MaybeDefault::None,
            debug_syms: false,
            ..source::Kernel::default()
        };
        let input = Input::AbsAddr(address);
        let symbol = find(&self.symbolizer, &source::Source::Kernel(kernel), input)?;
        let file: Arc<str> = KERNEL_FILE.into();
        let kind = FunctionKind::Kernel;
        Some(function(&mut self.kernel_named, kind, &file, &symbol))
    }

    /// Drops the symbols that were not used for longest until the rest is within
    /// the budget; but never those of `keep`.
    fn shrink(&mut self, keep: u32) {
        let mut loaded: Vec<(u64, u32, usize)> = self
            .objects
            .iter()
            .filter_map(|(&id, object)| match &object.symbols {
                Symbols::Loaded(source) => Some((object.used, id, source.cost)),
                _ => None,
            })
            .collect();
        let mut total = (loaded.iter()).fold(0_usize, |sum, (.., cost)| sum.saturating_add(*cost));
        loaded.sort_unstable();
        for (_, id, cost) in loaded {
            if total <= self.budget {
                break;
            }
            if id == keep {
                continue;
            }
            if let Some(object) = self.objects.get_mut(&id)
                && let Symbols::Loaded(source) = &object.symbols
            {
                // It always says that all is well. Before the file is closed:
                // the next one may get the same path.
                drop(
                    self.symbolizer
                        .evict(&evict::Evict::Elf(evict::Elf::new(&source.path))),
                );
                object.symbols = Symbols::Dropped;
                total = total.saturating_sub(cost);
            }
        }
    }
}

impl Object {
    /// Reads the symbols of the file and of its debug file.
    fn load(&mut self) -> Result<Symbols, String> {
        let file = &*self.file.file;
        let all = RawTable::read(file, Which::All);
        if let (Ok(None), Symbols::Unread) = (&all, &self.symbols) {
            self.debug = self.find_debug_file();
        }
        let debug = self.debug.as_ref();
        let debug = debug.map_or(Ok(None), |debug| RawTable::read(debug, Which::All));
        let dynamic = RawTable::read(file, Which::Dynamic);
        let mut tables = Vec::new();
        let mut error = None;
        for table in [all, debug, dynamic] {
            match table {
                Ok(table) => tables.extend(table),
                Err(why) => error = Some(why),
            }
        }
        let functions = functions(&tables);
        if functions.is_empty() {
            return match error {
                Some(Unusable::Malformed) => Err("the file cannot be read".to_owned()),
                Some(Unusable::TooLarge) => Err("too many to be read".to_owned()),
                None => Ok(Symbols::None),
            };
        }
        Source::of_functions(&functions)
            .map(Symbols::Loaded)
            .map_err(|error| error.to_string())
    }

    fn find_debug_file(&self) -> Option<File> {
        let cache = file_cache(self.file.file.try_clone().ok()?);
        let elf = Elf::parse(&cache).ok()?;
        let path = Path::new(OsStr::from_bytes(self.file.path.as_bytes()));
        let found = match &self.file.process {
            Some(process) => DebugFile::find(&elf, path, process),
            None => DebugFile::find_on_host(&elf, path),
        };
        found.map(DebugFile::into_file)
    }
}

fn symbolizer() -> Symbolizer {
    Symbolizer::builder()
        // The files are ours; nobody changes them.
        .enable_auto_reload(false)
        .enable_code_info(false)
        .enable_inlined_fns(false)
        .enable_demangling(false)
        .build()
}

/// The symbol at an address.
fn find(symbolizer: &Symbolizer, source: &source::Source<'_>, input: Input<u64>) -> Option<String> {
    match symbolizer.symbolize_single(source, input) {
        Ok(Symbolized::Sym(symbol)) => Some(symbol.name.into_owned()),
        Ok(Symbolized::Unknown(_)) | Err(_) => None,
    }
}

/// The function that a symbol stands for, one for each symbol.
fn function(
    named: &mut HashMap<Box<str>, Arc<Function>>,
    kind: FunctionKind,
    file: &Arc<str>,
    symbol: &str,
) -> Arc<Function> {
    if let Some(known) = named.get(symbol) {
        return Arc::clone(known);
    }
    let base_label: Arc<str> = symbol.into();
    let label = demangle::label(symbol);
    let function = Arc::new(Function {
        kind,
        label: if label == symbol {
            Arc::clone(&base_label)
        } else {
            label.into()
        },
        base_label,
        file: Arc::clone(file),
        first_line: 0,
    });
    named.insert(symbol.into(), Arc::clone(&function));
    function
}

#[cfg(test)]
mod tests {
    use super::super::DEFAULT_BUDGET;
    use super::*;

    /// A worker with two files, 2 and 3, and an address in each.
    fn worker(budget: usize) -> (Worker, [Place; 2]) {
        let mut worker = Worker::new(Arc::default(), budget, PathBuf::new());
        let places = [2, 3].map(|id| {
            let file = File::open("/proc/self/exe").unwrap();
            let table = RawTable::read(&file, Which::All).unwrap().unwrap();
            let tables = [table];
            let address = functions(&tables).first().unwrap().start;
            let object = Object {
                file: ObjectFile {
                    file: Arc::new(file),
                    path: "/bin/test".into(),
                    process: None,
                },
                symbols: Symbols::Unread,
                debug: None,
                named: HashMap::new(),
                used: 0,
            };
            worker.objects.insert(id, object);
            Place::Object(id, address)
        });
        (worker, places)
    }

    /// The files that are in memory.
    fn loaded(worker: &Worker) -> Vec<u32> {
        let is_loaded = |object: &Object| matches!(object.symbols, Symbols::Loaded(_));
        let objects = worker.objects.iter();
        let mut ids: Vec<u32> = (objects.filter(|(_, object)| is_loaded(object)))
            .map(|(&id, _)| id)
            .collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn what_was_used_last_is_kept_within_the_budget() {
        let (mut ample, places) = worker(DEFAULT_BUDGET);
        let (mut tight, _) = worker(1);
        for (place, id) in [(places[0], 2), (places[1], 3), (places[0], 2)] {
            assert!(ample.name(place).is_some());
            assert!(tight.name(place).is_some());
            assert_eq!(loaded(&tight), [id]);
        }
        assert_eq!(loaded(&ample), [2, 3]);
    }

    #[test]
    fn a_panic_costs_the_names_of_one_file() {
        let (mut worker, places) = worker(DEFAULT_BUDGET);
        let before = worker.name(places[1]);
        let lost = worker.or_give_up(places[0], |_| panic!("as a library would"));
        assert_eq!(lost, None);
        assert_eq!(worker.name(places[0]), None);
        assert!(before.is_some());
        assert_eq!(worker.name(places[1]), before);
        let notes = lock(&worker.found).notes.clone();
        assert_eq!(notes, ["symbols of /bin/test could not be used"]);
    }
}
