//! How far the dynamic loader is with a process.

use crate::memory::PinnedProcess;
use crate::memory::TargetMemory;

use super::image::Image;
use super::mappings::MappedFile;
use super::mappings::Mapping;
use super::proc;

/// `r_debug.r_state`, in the structure that `DT_DEBUG` points to.
const R_STATE: u64 = 24;

/// Whether the loader is still mapping the program's libraries, so that a
/// library may yet come. Never so for programs without a loader.
pub(super) fn is_loading<M: TargetMemory>(
    process: &PinnedProcess,
    memory: &M,
    mappings: &[Mapping],
) -> bool {
    let Some(headers) = proc::program_headers(process) else {
        return false;
    };
    let files = MappedFile::all(mappings);
    let program = files.iter().find(|file| {
        file.mappings
            .iter()
            .any(|mapping| mapping.range.contains(headers))
    });
    let Some(Ok(image)) = program.map(|file| Image::open(process, memory, file)) else {
        return false;
    };
    let slot = match image.elf() {
        Ok(elf) if elf.interpreter().is_some() => elf.debug_slot(),
        _ => None,
    };
    let Some(slot) = slot else { return false };
    match memory.word(image.live(slot)) {
        // The loader has not come to it.
        Ok(0) => true,
        // RT_CONSISTENT is 0, an int.
        Ok(debug) => memory
            .word(debug.wrapping_add(R_STATE))
            .is_ok_and(|state| state & 0xffff_ffff != 0),
        Err(_) => false,
    }
}
