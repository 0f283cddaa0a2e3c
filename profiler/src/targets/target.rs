//! A live process whose Ruby was found.

use std::sync::Arc;

use rbprof_common::layout::Layout;
use rbprof_common::layout::Version;
use rbprof_common::process::ProcessEntry;
use rbprof_common::process::Range;

use crate::memory::Identity;
use crate::memory::PinnedProcess;
use crate::memory::TargetMemory;

use super::ThreadPointer;
use super::global_symbols;
use super::mappings::Mapping;
use super::native_stack;
use super::recover::NotRecovered;
use super::recover::Recovered;
use super::roots::Symbols;

/// A live process whose Ruby was found and whose roots were validated.
#[derive(Debug)]
pub struct Target {
    /// Which process.
    pub identity: Identity,
    /// A hold on it, for reading its memory later.
    pub process: Arc<PinnedProcess>,
    /// Its command line.
    pub command: String,
    /// Its Ruby.
    pub ruby: RubyFacts,
    /// What the kernel half must know.
    pub entry: ProcessEntry,
    /// `rb_vm_exec` as the code of a stripped file has it, where the process has
    /// not confirmed it: it may not have called it yet.
    pub vm_exec_candidate: Option<VmExecCandidate>,
    /// Address of `ruby_global_symbols`; `None`: names of C methods are unknown,
    /// perhaps only yet ([`Target::find_global_symbols`]).
    pub global_symbols: Option<u64>,
    /// How each fact was found.
    pub provenance: Vec<Provenance>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Target {
    /// Looks for the symbol table again, in case Ruby had not set it up yet when
    /// it was attached to. The address stays the same from then on.
    #[must_use]
    pub fn find_global_symbols<M: TargetMemory>(&self, memory: &M) -> Option<u64> {
        self.global_symbols.or_else(|| {
            let found = self.ruby.scan_for_global_symbols(memory);
            found.ok().map(|found| found.address)
        })
    }
}

/// `rb_vm_exec` as the code of a stripped file has it; addresses in the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExecCandidate {
    /// The function, and the part that the compiler moved away from it.
    pub ranges: [Range; 2],
    /// Where its calls come back to, sorted.
    pub returns: Vec<u64>,
    /// How it was found.
    pub how: String,
}

impl VmExecCandidate {
    /// Whether the native stack of a thread has a call from it.
    pub(super) fn is_on_a_stack<M: TargetMemory>(
        &self,
        mappings: &[Mapping],
        threads: &[ThreadPointer],
        memory: &M,
    ) -> bool {
        native_stack::holds_any(&self.returns, mappings, threads, memory)
    }

    /// What to say of it once it was confirmed.
    pub(super) fn provenance(&self) -> Provenance {
        Provenance {
            what: "rb_vm_exec",
            how: format!("{}; a native stack has calls from it", self.how),
        }
    }
}

/// The Ruby of a process.
#[derive(Clone, Debug)]
pub struct RubyFacts {
    /// Its release.
    pub version: Version,
    /// What `ruby_version` holds.
    pub version_text: String,
    /// Where it keeps what rbprof reads.
    pub layout: &'static Layout,
    /// The layout is that of the nearest known release: this one is new.
    pub layout_assumed: bool,
    /// The file that defines it, in the process's mount namespace.
    pub path: String,
    /// The file's build id.
    pub build_id: Option<Vec<u8>>,
    /// What is added to an address in the file to get one in the process.
    pub bias: u64,
    /// What it occupies in the process, from the first mapping to the last.
    pub extent: Range,
    /// Its writable data in the process.
    pub data: Vec<Range>,
    /// The file has no full symbol table.
    pub stripped: bool,
    /// The file has been deleted or replaced since it was loaded.
    pub deleted: bool,
    /// The file is the main program.
    pub is_program: bool,
    /// Its symbols.
    pub symbols: Symbols,
    /// The separate debug file that belongs to it.
    pub debug_file: Option<String>,
    /// Places in its data which the code that looks up names of IDs refers to.
    pub symbol_references: Vec<u64>,
}

impl RubyFacts {
    /// Looks for `ruby_global_symbols` in its data.
    ///
    /// # Errors
    /// [`NotRecovered`].
    pub fn scan_for_global_symbols<M: TargetMemory>(
        &self,
        memory: &M,
    ) -> Result<Recovered, NotRecovered> {
        global_symbols::scan(&self.data, &self.symbol_references, self.version, memory)
    }
}

/// How one fact was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The fact.
    pub what: &'static str,
    /// How it was found.
    pub how: String,
}
