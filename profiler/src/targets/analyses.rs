//! What was learnt from the code of files, kept for the run: a cluster of
//! workers that were each started on their own is analysed once.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::hash::Hash as _;
use std::hash::Hasher as _;
use std::hash::RandomState;
use std::sync::Arc;

use object::read::ReadRef;

use super::code;
use super::code::Analysis;
use super::elf::Elf;
use super::elf::ElfError;
use super::image::FileVersion;

/// Most files remembered; a machine has a handful of different Rubies.
const CAPACITY: usize = 256;

/// A file, as far as its code is concerned: the build id, and a checksum of the
/// code itself, since whoever owns a file can give it any build id. The
/// checksum's key is drawn by chance in each run, so nobody can aim at another
/// file's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    build_id: Vec<u8>,
    code: u64,
    /// `rb_vm_exec`, if a symbol told it.
    vm_exec: Option<u64>,
}

/// An analysis, or why there is none.
type Outcome = Result<Arc<Analysis>, ElfError>;

/// The analyses of the files seen in a run.
#[derive(Debug, Default)]
pub struct Analyses {
    known: HashMap<Key, Outcome>,
    /// The same, by what is told without reading the file.
    same_file: HashMap<FileVersion, Outcome>,
    checksums: RandomState,
    /// How many files were analysed.
    pub analysed: usize,
}

impl Analyses {
    /// What the code of the file gives away; `vm_exec` is the address of
    /// `rb_vm_exec` where a symbol told it.
    ///
    /// # Errors
    /// [`ElfError`], as [`code::analyse`].
    pub fn of<'data, R: ReadRef<'data>>(
        &mut self,
        elf: &Elf<'data, R>,
        file: Option<FileVersion>,
        vm_exec: Option<u64>,
    ) -> Outcome {
        // With a symbol it is another question, and seldom asked twice.
        let file = file.filter(|_| vm_exec.is_none());
        if let Some(known) = file.and_then(|file| self.same_file.get(&file)) {
            return known.clone();
        }
        let outcome = self.of_contents(elf, vm_exec);
        if let Some(file) = file {
            if self.same_file.len() >= CAPACITY {
                self.same_file.clear();
            }
            self.same_file.insert(file, outcome.clone());
        }
        outcome
    }

    fn of_contents<'data, R: ReadRef<'data>>(
        &mut self,
        elf: &Elf<'data, R>,
        vm_exec: Option<u64>,
    ) -> Outcome {
        let mut code = self.checksums.build_hasher();
        for load in elf.loads().iter().filter(|load| load.executable) {
            load.address.hash(&mut code);
            elf.bytes(load.address, load.file_size)?.hash(&mut code);
        }
        let key = Key {
            build_id: elf.build_id().unwrap_or_default().to_vec(),
            code: code.finish(),
            vm_exec,
        };
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let analysis = code::analyse(elf, vm_exec).map(Arc::new);
        self.analysed += 1;
        if self.known.len() >= CAPACITY {
            self.known.clear();
        }
        self.known.insert(key, analysis.clone());
        analysis
    }
}
