//! Rubies are announced when they are mapped.

use aya::Ebpf;
use aya::maps::HashMap;
use aya::maps::MapData;
use aya::programs::KProbe;
use rbprof_common::wire::FileKey;
use rbprof_common::wire::verdict;

use super::KernelError;
use super::program;
use super::take;

/// The function of the kernel that is called for each mapping. It is there, and
/// not inlined, in every kernel from 5.10 to 7.2: all of mm calls it. (BTF need not
/// know it: before 6.0 that has the functions alone that ftrace may trace.)
const MAPPING_ANNOUNCED: &str = "perf_event_mmap";

/// [`FileKey`] as aya wants it.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Key(FileKey);

// SAFETY: `FileKey` is `bytemuck::Pod`: no padding, every bit pattern valid.
unsafe impl aya::Pod for Key {}

/// What the kernel half knows of files of code.
pub(super) struct Verdicts(HashMap<MapData, Key, u32>);

impl Verdicts {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        HashMap::try_from(take(ebpf, "VERDICTS")?)
            .map(Self)
            .map_err(KernelError::map)
    }

    /// Says whether there is a Ruby in a file.
    pub(super) fn set(&mut self, file: FileKey, is_ruby: bool) -> Result<(), KernelError> {
        let verdict = if is_ruby {
            verdict::RUBY
        } else {
            verdict::NOT_RUBY
        };
        self.0
            .insert(Key(file), verdict, 0)
            .map_err(KernelError::map)
    }

    /// Forgets which files have no Ruby in them: another file may have come to
    /// the place of one of them.
    pub(super) fn forget_others(&mut self) {
        // One that changes meanwhile is left for the next time.
        let others: Vec<Key> = self
            .0
            .iter()
            .filter_map(Result::ok)
            .filter_map(|(key, known)| (known != verdict::RUBY).then_some(key))
            .collect();
        for key in others {
            // It may be gone already.
            drop(self.0.remove(&key));
        }
    }
}

/// Has mappings announced. `is_known`: whether the kernel describes them.
pub(super) fn attach(ebpf: &mut Ebpf, is_known: bool) -> Result<Verdicts, KernelError> {
    if !is_known {
        return Err(KernelError::NoBtf(
            "the kernel does not describe mappings".to_owned(),
        ));
    }
    let program: &mut KProbe = program(ebpf, "on_mapping")?;
    program
        .load()
        .map_err(|error| KernelError::load("on_mapping", error))?;
    program
        .attach(MAPPING_ANNOUNCED, 0)
        .map_err(|error| KernelError::attach(MAPPING_ANNOUNCED, error))?;
    Verdicts::take(ebpf)
}
