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

/// The analyses of the files seen in a run.
#[derive(Debug, Default)]
pub struct Analyses {
    known: HashMap<Key, Result<Arc<Analysis>, ElfError>>,
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
        vm_exec: Option<u64>,
    ) -> Result<Arc<Analysis>, ElfError> {
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
