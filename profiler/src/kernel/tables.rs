//! The maps with unwind tables, as user space fills them.

use aya::Ebpf;
use aya::maps::Array;
use aya::maps::ArrayOfMaps;
use aya::maps::MapData;
use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::Rule;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::Page;

use super::KernelError;
use super::take;
use crate::unwind::store::Limits;
use crate::unwind::store::Maps;

macro_rules! pod {
    ($name:ident, $inner:ty) => {
        #[doc = concat!("[`", stringify!($inner), "`] as aya wants it.")]
        #[repr(transparent)]
        #[derive(Clone, Copy)]
        struct $name($inner);

        // SAFETY: the type is `bytemuck::Pod`: no padding, every bit pattern valid.
        unsafe impl aya::Pod for $name {}
    };
}

pod!(MappingValue, Mapping);
pod!(PageValue, Page);
pod!(RuleValue, Rule);
pod!(ChunkValue, Chunk);

/// How large the maps are made.
pub(super) const LIMITS: Limits = Limits {
    // 1.5 MiB: a hundred processes of 300 objects each.
    mappings: 1 << 15,
    // 512 KiB: 4 GiB of text.
    pages: 1 << 16,
    // 256 KiB: a file has up to 800, mostly those of others.
    rules: 1 << 14,
    // 32 MiB, taken as they are needed.
    chunks: 512,
};

/// The maps of the loaded kernel half.
pub(super) struct UnwindMaps {
    mappings: Array<MapData, MappingValue>,
    pages: Array<MapData, PageValue>,
    rules: Array<MapData, RuleValue>,
    chunks: ArrayOfMaps<MapData, Array<MapData, ChunkValue>>,
    /// The chunks that exist, by number.
    inner: Vec<Option<Array<MapData, ChunkValue>>>,
}

impl UnwindMaps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self {
            mappings: Array::try_from(take(ebpf, "MAPPINGS")?).map_err(KernelError::map)?,
            pages: Array::try_from(take(ebpf, "PAGES")?).map_err(KernelError::map)?,
            rules: Array::try_from(take(ebpf, "RULES")?).map_err(KernelError::map)?,
            chunks: ArrayOfMaps::try_from(take(ebpf, "CHUNKS")?).map_err(KernelError::map)?,
            inner: Vec::new(),
        })
    }
}

impl Maps for UnwindMaps {
    type Error = KernelError;

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn set_mapping(&mut self, at: u32, mapping: &Mapping) -> Result<(), KernelError> {
        self.mappings
            .set(at, MappingValue(*mapping), 0)
            .map_err(KernelError::map)
    }

    fn set_page(&mut self, at: u32, page: Page) -> Result<(), KernelError> {
        self.pages
            .set(at, PageValue(page), 0)
            .map_err(KernelError::map)
    }

    fn set_rule(&mut self, number: u16, rule: &Rule) -> Result<(), KernelError> {
        self.rules
            .set(u32::from(number), RuleValue(*rule), 0)
            .map_err(KernelError::map)
    }

    fn set_chunk(&mut self, number: u32, rows: &Chunk) -> Result<(), KernelError> {
        let place = number as usize;
        if self.inner.len() <= place {
            self.inner.resize_with(place + 1, || None);
        }
        let Some(slot) = self.inner.get_mut(place) else {
            return Ok(());
        };
        if let Some(chunk) = slot {
            return chunk.set(0, chunk_value(rows), 0).map_err(KernelError::map);
        }
        let mut chunk = Array::create(1, 0).map_err(KernelError::map)?;
        chunk
            .set(0, chunk_value(rows), 0)
            .map_err(KernelError::map)?;
        self.chunks
            .set(number, &chunk, 0)
            .map_err(KernelError::map)?;
        *slot = Some(chunk);
        Ok(())
    }
}

/// The rows as aya wants them: 64 KiB that need not be copied.
const fn chunk_value(rows: &Chunk) -> &ChunkValue {
    // SAFETY: `ChunkValue` is `repr(transparent)` over `Chunk`.
    unsafe { &*(&raw const *rows).cast::<ChunkValue>() }
}
