//! Iterators over tasks, and thread pointers of a process through one.

use std::io::Read;

use aya::programs::Iter;
use rbprof_common::wire::ThreadPointer;

use super::KernelError;

/// Runs the iterator once and gives the thread pointers that it writes.
pub(super) fn read(program: &mut Iter) -> Result<Vec<ThreadPointer>, KernelError> {
    Ok(run(program)?
        .chunks_exact(size_of::<ThreadPointer>())
        .map(bytemuck::pod_read_unaligned)
        .collect())
}

/// Runs the iterator once and gives what it writes.
pub(super) fn run(program: &mut Iter) -> Result<Vec<u8>, KernelError> {
    let link = program
        .attach()
        .map_err(|error| KernelError::attach("iter/task", error))?;
    let link = program
        .take_link(link)
        .map_err(|error| KernelError::attach("iter/task", error))?;
    let mut file = link
        .into_file()
        .map_err(|error| KernelError::step("opening iter/task", error))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|error| KernelError::step("reading iter/task", error))?;
    Ok(bytes)
}
