//! From frames as the kernel half sends them to names and lines.
//!
//! [`RubyNames`] reads Ruby's own objects in the memory of the target and
//! composes what Ruby 3.4 would print in a backtrace, whatever the release.
//! Nothing is believed for longer than it can be checked: see `evidence`.
//!
//! | module | what it does |
//! |---|---|
//! | `evidence` | reads memory and remembers what was read |
//! | `cache` | a bounded map |
//! | `strings`, `arrays` | Ruby's basic objects |
//! | `iseq`, `methods` | instruction sequences and method entries |
//! | `lines` | from the program counter to the line |
//! | `classes`, `hidden_ivars` | class names, on every release |
//! | `method_table` | whether a class has a method |
//! | `symbol_table` | names of C methods |
//! | `labels` | how Ruby puts a label together |
//! | [`native`] | names of machine code, of the process and of the kernel |

mod arrays;
mod cache;
mod classes;
mod evidence;
mod hidden_ivars;
mod iseq;
mod labels;
mod lines;
mod method_table;
mod methods;
pub mod native;
mod strings;
mod symbol_table;
#[cfg(test)]
mod test_memory;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use rbprof_common::layout::Layout;
use rbprof_common::layout::NameLayout;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::gc_phase;

use self::cache::Cache;
use self::classes::Classes;
use self::classes::Owner;
use self::evidence::Evidence;
use self::evidence::Metered;
use self::evidence::Reader;
use self::evidence::Unreadable;
use self::evidence::verify;
use self::iseq::Code;
use self::iseq::Iseq;
use self::iseq::IseqType;
use self::labels::Labelled;
use self::labels::method_name;
use self::methods::Body;
use self::methods::Method;
use self::symbol_table::SymbolTable;
use crate::memory::TargetMemory;
use crate::profile::Function;
use crate::profile::FunctionKind;

/// Shown for a name that cannot be read.
const UNREADABLE: &str = "<unreadable>";
/// Shown for a C method whose name cannot be looked up.
const UNKNOWN_C_FUNCTION: &str = "<unknown cfunc>";
/// Shown for a control frame of no known type.
const UNKNOWN_FRAME: &str = "<unknown frame>";
/// The file of C methods.
const C_FILE: &str = "<cfunc>";

/// Names and lines remembered per process: of each, about 2 KiB with its
/// evidence.
const NAMES: usize = 1 << 14;
const LINES: usize = 1 << 16;

/// A frame with its name and line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// What the frame is called.
    pub function: Arc<Function>,
    /// The line under execution; 0 where there is none.
    pub line: u32,
    /// What runs it.
    pub code: Executed,
}

/// What runs a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Executed {
    /// Ruby's interpreter, or the C function of a method.
    Ruby,
    /// Machine code that a compiler of Ruby's made.
    Compiled,
    /// The garbage collector.
    Collector,
    /// Machine code of the process: an object of the recording, and an address
    /// in it. The name is found later.
    Native {
        /// See [`rbprof_common::wire::object`].
        object: u32,
        /// The object's own (ELF) address, of a byte of the instruction.
        address: u64,
    },
    /// Machine code of the kernel. The name is found later.
    Kernel {
        /// Address of a byte of the instruction.
        address: u64,
    },
}

impl Resolved {
    /// Whether the name could not be read.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        *self.function.label == *UNREADABLE
            || self.function.kind == FunctionKind::CFunction
                && *self.function.base_label == *UNKNOWN_C_FUNCTION
    }
}

/// The names of one target process.
///
/// Names are read from the process once and remembered with what they were
/// read from. A caller that wants to be sure of remembered names has them
/// checked first ([`RubyNames::revalidate`]).
#[derive(Debug)]
pub struct RubyNames {
    names: &'static NameLayout,
    symbols: SymbolTable,
    classes: Classes,
    known: Cache<NameKey, (Arc<Name>, Moment)>,
    lines: Cache<LineKey, (Arc<Line>, Moment)>,
    markers: Markers,
}

/// When something was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
    /// [`Collector::epoch`](rbprof_common::process::Collector::epoch) then; 0
    /// where it is not known.
    pub epoch: u64,
}

impl Moment {
    /// Not known to have been at any time.
    const NEVER: Self = Self {
        time: u64::MAX,
        epoch: 0,
    };

    /// Whether what was read at this moment, and holds to this day, is what a
    /// sample saw: it was there before, or nothing has been freed in between.
    #[must_use]
    pub const fn covers(&self, sample: Self) -> bool {
        self.time <= sample.time || self.epoch == sample.epoch || sample.epoch == 0
    }
}

/// What determines the name of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum NameKey {
    /// Ruby code, and the method it runs for.
    Code { iseq: u64, method_entry: u64 },
    /// A method written in C.
    CFunction { method_entry: u64 },
}

impl NameKey {
    /// The key of a frame that has one and that Ruby would show.
    fn of(frame: &Frame) -> Option<Self> {
        match frame.kind() {
            frame_kind::RUBY | frame_kind::RUBY_JIT
                if frame.pc != 0 || frame.has(frame_attr::NO_PC) =>
            {
                Some(Self::Code {
                    iseq: frame.iseq(),
                    method_entry: frame.method_entry,
                })
            }
            frame_kind::CFUNC => Some(Self::CFunction {
                method_entry: frame.method_entry,
            }),
            _ => None,
        }
    }
}

/// What determines the line of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LineKey {
    iseq: u64,
    pc: u64,
}

/// A name, and what it was read from.
#[derive(Debug)]
struct Name {
    function: Arc<Function>,
    /// Of Ruby code.
    code: Option<CodeOfName>,
    evidence: Evidence,
}

/// What resolving a frame needs to know of its code.
#[derive(Clone, Copy, Debug)]
struct CodeOfName {
    body: u64,
    code: Code,
    /// For a `rescue` or `ensure` clause: the sequence it stands in. Its frame
    /// is the next one, and Ruby 3.4 shows the two as one.
    clause_of: Option<u64>,
}

/// A line, and what it was read from.
#[derive(Debug)]
struct Line {
    line: u32,
    evidence: Evidence,
}

/// A key of either cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Name(NameKey),
    Line(LineKey),
}

/// The keys of a frame.
fn keys_of(frame: &Frame) -> impl Iterator<Item = Key> + use<> {
    let name = NameKey::of(frame);
    let line = match name {
        Some(NameKey::Code { iseq, .. }) => Some(LineKey { iseq, pc: frame.pc }),
        _ => None,
    };
    name.map(Key::Name).into_iter().chain(line.map(Key::Line))
}

/// Functions for what has no name.
#[derive(Debug)]
struct Markers {
    unreadable: Arc<Function>,
    unreadable_c: Arc<Function>,
    unknown: Arc<Function>,
    /// Machine code; named later.
    native: Arc<Function>,
    kernel: Arc<Function>,
    /// The garbage collector.
    collection: Arc<Function>,
    /// What it does, by [`gc_phase`] from [`gc_phase::MARKING`] on.
    phases: [Arc<Function>; 3],
}

impl Markers {
    fn new() -> Self {
        let function = |kind, label: &str, file: &str| {
            let label: Arc<str> = label.into();
            Arc::new(Function {
                kind,
                base_label: Arc::clone(&label),
                label,
                file: file.into(),
                first_line: 0,
            })
        };
        Self {
            unreadable: function(FunctionKind::Ruby, UNREADABLE, ""),
            unreadable_c: function(FunctionKind::CFunction, UNKNOWN_C_FUNCTION, C_FILE),
            unknown: function(FunctionKind::Marker, UNKNOWN_FRAME, ""),
            native: function(FunctionKind::Native, "<native>", ""),
            kernel: function(FunctionKind::Kernel, "<kernel>", ""),
            collection: function(FunctionKind::Marker, "(garbage collection)", ""),
            phases: ["(marking)", "(sweeping)", "(compacting)"]
                .map(|label| function(FunctionKind::Marker, label, "")),
        }
    }

    /// What is shown for a frame of the garbage collector, leaf first: what it
    /// does, if that is known, and that it is the one.
    fn collector(&self, frame: &Frame) -> impl Iterator<Item = Resolved> {
        let phase = (frame.iseq() as usize)
            .checked_sub(gc_phase::MARKING as usize)
            .and_then(|phase| self.phases.get(phase));
        phase
            .into_iter()
            .chain([&self.collection])
            .map(|function| Resolved {
                function: Arc::clone(function),
                line: 0,
                code: Executed::Collector,
            })
    }

    /// What is shown for a frame of machine code.
    fn machine(&self, frame: &Frame) -> Option<Resolved> {
        let (function, code) = match frame.kind() {
            frame_kind::NATIVE => (
                &self.native,
                Executed::Native {
                    object: frame.object(),
                    address: frame.pc,
                },
            ),
            frame_kind::KERNEL => (&self.kernel, Executed::Kernel { address: frame.pc }),
            _ => return None,
        };
        Some(Resolved {
            function: Arc::clone(function),
            line: 0,
            code,
        })
    }
}

/// One pass over the frames of a stack.
struct Pass<'a, M> {
    memory: &'a M,
    /// When the frames were taken.
    taken: Moment,
    /// Read in this pass, and remembered since.
    fresh: HashSet<Key>,
    /// Read in this pass, but not completely.
    partial: HashSet<Key>,
    /// Something that is remembered may not be what the frames saw.
    doubted: bool,
    /// Not to be read (again), since what would be read cannot be believed.
    refused: &'a HashSet<Key>,
}

/// Reads of target memory in one pass over a stack. An unknown name takes about
/// 50, and a stack rarely has more than a few hundred different ones.
const MAX_READS: u32 = 1 << 19;

/// Attempts to read names whose evidence keeps changing; after that, none of
/// the stack's names is shown.
const ATTEMPTS: u32 = 4;

impl RubyNames {
    /// The names of a process whose Ruby has that layout, with
    /// `ruby_global_symbols` at `global_symbols` if that is known (without it,
    /// C methods have no names).
    #[must_use]
    pub fn new(layout: &'static Layout, global_symbols: Option<u64>) -> Self {
        let names = &layout.names;
        Self {
            names,
            symbols: SymbolTable::new(global_symbols),
            classes: Classes::new(None),
            known: Cache::new(NAMES),
            lines: Cache::new(LINES),
            markers: Markers::new(),
        }
    }

    /// Tells where the process has its `rb_vm_t`. Ruby 3.2 needs it for the
    /// names of classes; the others do not.
    #[must_use]
    pub fn with_vm(self, vm: u64) -> Self {
        Self {
            classes: Classes::new(Some(vm)),
            ..self
        }
    }

    /// Appends one entry for each frame that is to be shown, leaf first.
    ///
    /// As in Ruby's own backtraces, blocks written in C, frames that have not
    /// begun (`pc` is 0), and the frame around a `rescue` or `ensure` clause
    /// are left out. What cannot be read is shown as such.
    pub fn resolve<M: TargetMemory>(
        &mut self,
        frames: &[Frame],
        memory: &M,
        out: &mut Vec<Resolved>,
    ) {
        let unknown = Moment { time: 0, epoch: 0 };
        self.resolve_taken(frames, memory, unknown, || unknown, out);
    }

    /// As [`RubyNames::resolve`], for frames that were taken a while ago from a
    /// process that goes on.
    ///
    /// What the frames name may have been freed since, and its memory used for
    /// something else. So a name counts only if nothing can have been freed
    /// between the moment when the frames were `taken` and the one when it was
    /// read (`now`), or if it was known before and still holds
    /// ([`RubyNames::revalidate`]). `false` says that some names did not count;
    /// resolving the frames of another sample may give more.
    pub fn resolve_taken<M: TargetMemory>(
        &mut self,
        frames: &[Frame],
        memory: &M,
        taken: Moment,
        now: impl Fn() -> Moment,
        out: &mut Vec<Resolved>,
    ) -> bool {
        let begin = out.len();
        let mut refused = HashSet::new();
        // Read in one of the attempts, and still there after it.
        let mut fresh = HashSet::new();
        let mut believed = true;
        for attempt in 1.. {
            out.truncate(begin);
            let metered = Metered::new(memory, MAX_READS);
            let mut pass = Pass {
                memory: &metered,
                taken,
                fresh: std::mem::take(&mut fresh),
                partial: HashSet::new(),
                doubted: false,
                refused: &refused,
            };
            self.resolve_once(frames, &mut pass, out);
            let partial = pass.partial;
            fresh = pass.fresh;
            believed &= !pass.doubted;
            // The target went on while it was read, so what was read may be of
            // two different moments: it counts when it is still there.
            let gone = self.forget_what_is_gone(fresh.clone(), memory);
            if gone.is_empty() {
                if fresh.is_empty() && partial.is_empty() {
                    break;
                }
                // Good for frames that are taken from now on. Had the memory
                // been freed already, they could not hold on to it.
                let now = now();
                self.establish(&fresh, now);
                if now.covers(taken) {
                    break;
                }
                believed = false;
                refused.extend(fresh.drain());
                refused.extend(partial);
                continue;
            }
            fresh.retain(|key| !gone.contains(key));
            match attempt {
                1 => {}
                2..ATTEMPTS => refused.extend(gone),
                _ => refused.extend(frames.iter().flat_map(keys_of)),
            }
        }
        believed
    }

    /// Notes when names and lines were read.
    fn establish(&mut self, keys: &HashSet<Key>, now: Moment) {
        for key in keys {
            match *key {
                Key::Name(name) => {
                    if let Some((known, _)) = self.known.get(name) {
                        self.known.insert(name, (known, now));
                    }
                }
                Key::Line(line) => {
                    if let Some((known, _)) = self.lines.get(line) {
                        self.lines.insert(line, (known, now));
                    }
                }
            }
        }
    }

    /// Reads again what the remembered names and lines of these frames were
    /// read from, forgets those that it no longer leads to, and returns whether
    /// all were still good.
    pub fn revalidate<M: TargetMemory>(&mut self, frames: &[Frame], memory: &M) -> bool {
        let keys = frames.iter().flat_map(keys_of).collect();
        self.forget_what_is_gone(keys, memory).is_empty()
    }

    /// Verifies what is remembered under `keys`; forgets and returns what does
    /// not hold.
    fn forget_what_is_gone<M: TargetMemory>(
        &mut self,
        keys: HashSet<Key>,
        memory: &M,
    ) -> HashSet<Key> {
        enum Remembered {
            Name(Arc<Name>),
            Line(Arc<Line>),
        }
        let remembered: Vec<(Key, Remembered)> = keys
            .into_iter()
            .filter_map(|key| {
                let found = match key {
                    Key::Name(name) => Remembered::Name(self.known.get(name)?.0),
                    Key::Line(line) => Remembered::Line(self.lines.get(line)?.0),
                };
                Some((key, found))
            })
            .collect();
        let evidence: Vec<&Evidence> = remembered
            .iter()
            .map(|(_, found)| match found {
                Remembered::Name(name) => &name.evidence,
                Remembered::Line(line) => &line.evidence,
            })
            .collect();
        let gone: HashSet<Key> = verify(&evidence, memory)
            .into_iter()
            .zip(&remembered)
            .filter(|(holds, _)| !holds)
            .map(|(_, (key, _))| *key)
            .collect();
        self.forget(&gone);
        gone
    }

    fn forget(&mut self, keys: &HashSet<Key>) {
        for key in keys {
            match *key {
                Key::Name(name) => self.known.remove(name),
                Key::Line(line) => self.lines.remove(line),
            }
        }
    }

    fn resolve_once<M: TargetMemory>(
        &mut self,
        frames: &[Frame],
        pass: &mut Pass<'_, M>,
        out: &mut Vec<Resolved>,
    ) {
        // The sequence whose frame the clause shown last stands for.
        let mut shown_by_clause = None;
        // Recursion repeats a frame thousands of times.
        let mut before: Option<&Frame> = None;
        for frame in frames {
            if before == Some(frame)
                && shown_by_clause.is_none()
                && let Some(same) = out.last()
            {
                out.push(same.clone());
                continue;
            }
            if frame.kind() == frame_kind::COLLECTOR {
                out.extend(self.markers.collector(frame));
                before = None;
                continue;
            }
            if let Some(machine) = self.markers.machine(frame) {
                out.push(machine);
                before = Some(frame);
                continue;
            }
            before = None;
            let shown = out.len();
            match NameKey::of(frame) {
                Some(key @ NameKey::Code { iseq, .. }) => {
                    let name = self.name_of_code(key, frame, pass);
                    let hidden = shown_by_clause == Some(iseq);
                    shown_by_clause = name.as_ref().and_then(|(name, _)| name.code?.clause_of);
                    if hidden {
                        continue;
                    }
                    let code = if frame.kind() == frame_kind::RUBY_JIT {
                        Executed::Compiled
                    } else {
                        Executed::Ruby
                    };
                    out.push(match name {
                        Some((name, pc_holds)) => Resolved {
                            code,
                            function: Arc::clone(&name.function),
                            line: if pc_holds {
                                self.line(iseq, frame.pc, pass)
                            } else {
                                0
                            },
                        },
                        None => Resolved {
                            code,
                            function: Arc::clone(&self.markers.unreadable),
                            line: 0,
                        },
                    });
                }
                Some(key @ NameKey::CFunction { .. }) => {
                    shown_by_clause = None;
                    let function = self.name(key, pass).map_or_else(
                        |Unreadable| Arc::clone(&self.markers.unreadable_c),
                        |name| Arc::clone(&name.function),
                    );
                    out.push(Resolved {
                        function,
                        line: 0,
                        code: Executed::Ruby,
                    });
                }
                None if frame.is_ruby() || frame.kind() == frame_kind::IFUNC => {}
                None => {
                    shown_by_clause = None;
                    out.push(Resolved {
                        function: Arc::clone(&self.markers.unknown),
                        line: 0,
                        code: Executed::Ruby,
                    });
                }
            }
            if out.len() > shown {
                before = Some(frame);
            }
        }
    }

    /// The name of a frame of Ruby code, and whether its `pc` lies in that code.
    ///
    /// Under a JIT, `pc` may be unknown, or anything where the walk does not see
    /// that. Otherwise a `pc` elsewhere means that the sequence is not the one
    /// that was sampled.
    fn name_of_code<M: TargetMemory>(
        &mut self,
        key: NameKey,
        frame: &Frame,
        pass: &mut Pass<'_, M>,
    ) -> Option<(Arc<Name>, bool)> {
        for _ in 0..2 {
            let name = self.name(key, pass).ok()?;
            let CodeOfName { body, code, .. } = name.code?;
            if frame.has(frame_attr::NO_PC) {
                return Some((name, false));
            }
            if code.contains(frame.pc) {
                return Some((name, true));
            }
            if Iseq::has_machine_code(body, &Reader::new(pass.memory), self.names) {
                return Some((name, false));
            }
            // What is remembered may be of a sequence that is gone.
            self.known.remove(key);
            if pass.fresh.remove(&Key::Name(key)) {
                break;
            }
        }
        None
    }

    /// The name for `key`, remembered or read.
    fn name<M: TargetMemory>(
        &mut self,
        key: NameKey,
        pass: &mut Pass<'_, M>,
    ) -> Result<Arc<Name>, Unreadable> {
        if pass.refused.contains(&Key::Name(key)) {
            return Err(Unreadable);
        }
        if let Some((name, established)) = self.known.get(key) {
            if pass.fresh.contains(&Key::Name(key)) || established.covers(pass.taken) {
                return Ok(name);
            }
            pass.doubted = true;
            return Err(Unreadable);
        }
        let mut reader = Reader::new(pass.memory);
        let (function, code) = match key {
            NameKey::Code { iseq, method_entry } => {
                let (function, code) = self.read_code(&mut reader, iseq, method_entry)?;
                (function, Some(code))
            }
            NameKey::CFunction { method_entry } => {
                (self.read_c_function(&mut reader, method_entry)?, None)
            }
        };
        let evidence = reader.finish();
        let whole = evidence.is_some();
        let name = Arc::new(Name {
            function: Arc::new(function),
            code,
            evidence: evidence.unwrap_or_default(),
        });
        if whole {
            self.known.insert(key, (Arc::clone(&name), Moment::NEVER));
            pass.fresh.insert(Key::Name(key));
        } else {
            pass.partial.insert(Key::Name(key));
        }
        Ok(name)
    }

    /// The line at `pc`, remembered or read; 0 when there is none.
    fn line<M: TargetMemory>(&mut self, iseq: u64, pc: u64, pass: &mut Pass<'_, M>) -> u32 {
        let key = LineKey { iseq, pc };
        if pass.refused.contains(&Key::Line(key)) {
            return 0;
        }
        if let Some((known, established)) = self.lines.get(key) {
            if pass.fresh.contains(&Key::Line(key)) || established.covers(pass.taken) {
                return known.line;
            }
            pass.doubted = true;
            return 0;
        }
        let mut reader = Reader::new(pass.memory);
        let Ok(line) = lines::line(&mut reader, self.names, iseq, pc) else {
            return 0;
        };
        if let Some(evidence) = reader.finish() {
            let line = Arc::new(Line { line, evidence });
            self.lines.insert(key, (line, Moment::NEVER));
            pass.fresh.insert(Key::Line(key));
        }
        line
    }

    fn read_code<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        address: u64,
        method_entry: u64,
    ) -> Result<(Function, CodeOfName), Unreadable> {
        let names = self.names;
        let iseq = Iseq::read(reader, names, address)?;
        let owner = self.owner_of_code(reader, &iseq, method_entry);
        let label: Arc<str> = Labelled::find(reader, names, iseq)
            .and_then(|labelled| labelled.label(reader, names, owner.as_ref()))
            .map(Into::into)
            .or_else(|Unreadable| {
                // The label Ruby gave the sequence itself says the same, without
                // a class.
                reader.give_up_part();
                iseq.label(reader, names)
            })
            .unwrap_or_else(|Unreadable| missing(reader, UNREADABLE));
        let base_label = iseq
            .base_label(reader, names)
            .unwrap_or_else(|Unreadable| missing(reader, UNREADABLE));
        let file = iseq
            .path(reader, names)
            .unwrap_or_else(|Unreadable| missing(reader, ""));
        let first_line = iseq.first_line(reader, names)?;
        let clause = matches!(iseq.kind, IseqType::Rescue | IseqType::Ensure);
        let code = CodeOfName {
            body: iseq.body,
            code: iseq.code,
            clause_of: clause.then_some(iseq.parent),
        };
        let function = Function {
            kind: FunctionKind::Ruby,
            label,
            base_label,
            file,
            first_line,
        };
        Ok((function, code))
    }

    /// The class to show with a frame of Ruby code.
    fn owner_of_code<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        iseq: &Iseq,
        method_entry: u64,
    ) -> Option<Owner> {
        if method_entry == 0 {
            return None;
        }
        let owner = Method::read(reader, method_entry).and_then(|method| {
            // A method made of other code than the frame's is not the one that
            // was sampled.
            match method.body {
                Body::Iseq(of_method) if of_method != iseq.local => Err(Unreadable),
                _ => self.classes.owner(reader, self.names, &method),
            }
        });
        owner.unwrap_or_else(|Unreadable| {
            reader.give_up_part();
            None
        })
    }

    fn read_c_function<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        method_entry: u64,
    ) -> Result<Function, Unreadable> {
        let method = Method::read(reader, method_entry)?;
        if method.body != Body::Other {
            return Err(Unreadable);
        }
        let name = self
            .symbols
            .name(reader, self.names, method.id)
            .unwrap_or_else(|Unreadable| {
                reader.give_up_part();
                None
            })
            .unwrap_or_else(|| UNKNOWN_C_FUNCTION.into());
        let owner = self
            .classes
            .owner(reader, self.names, &method)
            .unwrap_or_else(|Unreadable| {
                reader.give_up_part();
                None
            });
        Ok(Function {
            kind: FunctionKind::CFunction,
            label: method_name(owner.as_ref(), &name).into(),
            base_label: name,
            file: C_FILE.into(),
            first_line: 0,
        })
    }
}

/// The name of `id` in the symbol table at `global_symbols`, if there is such a
/// table: for finding out whether there is.
#[must_use]
pub fn id_name<M: TargetMemory>(
    layout: &NameLayout,
    global_symbols: u64,
    id: u64,
    memory: &M,
) -> Option<Arc<str>> {
    symbol_table::read_name(&mut Reader::new(memory), layout, global_symbols, id).ok()
}

/// Something to show for what could not be read this time.
fn missing<M: TargetMemory>(reader: &mut Reader<'_, M>, shown: &str) -> Arc<str> {
    reader.give_up_part();
    shown.into()
}
