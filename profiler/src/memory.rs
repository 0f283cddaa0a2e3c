//! Reading the memory of a target process from user space.
//!
//! [`TargetMemory`] is what the rest of rbprof sees; [`ProcessMemory`] reads a
//! live process, and [`PinnedProcess`] is the hold on that process which keeps a
//! reused process id from passing for it.

mod pinned;
mod process;

pub use pinned::Identity;
pub use pinned::PinError;
pub use pinned::PinnedProcess;
pub(crate) use pinned::Stat;
pub use process::OpenError;
pub use process::ProcessMemory;
use rbprof_common::memory::Window;

pub use rbprof_common::Fault;

/// Target memory, read by address, for the parts of rbprof that run in user
/// space. Reading never stops or changes the target.
pub trait TargetMemory {
    /// Fills `buffer` from `address` on.
    ///
    /// # Errors
    /// [`Fault`] when any byte of it cannot be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault>;

    /// Reads the little-endian word at `address`.
    ///
    /// # Errors
    /// [`Fault`] when any byte of it cannot be read.
    fn word(&self, address: u64) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Fills many buffers at once; each entry says for itself whether it was
    /// read. Implementations that can make one system call of it do.
    fn read_many(&self, requests: &mut [ReadRequest<'_>]) {
        for request in requests {
            request.done = self.read(request.address, request.buffer).is_ok();
        }
    }
}

/// One read of [`TargetMemory::read_many`].
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// Where to read.
    pub address: u64,
    /// What to fill.
    pub buffer: &'a mut [u8],
    /// Whether all of it was filled.
    pub done: bool,
}

/// Three consecutive words from `address` on: for implementations of
/// [`rbprof_common::Memory`] over a [`TargetMemory`].
///
/// # Errors
/// [`Fault`] when any byte of them cannot be read.
pub fn words3<M: TargetMemory>(memory: &M, address: u64) -> Result<[u64; 3], Fault> {
    let mut words = [0_u64; 3];
    memory.read(address, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words.map(u64::from_le))
}

/// Fills the front of a window with `words` words from `address` on: for
/// implementations of [`rbprof_common::Memory`] over a [`TargetMemory`].
///
/// # Errors
/// [`Fault`] when any byte of them cannot be read, or the window is too small.
pub fn window<M: TargetMemory>(
    memory: &M,
    address: u64,
    window: &mut Window,
    words: usize,
) -> Result<(), Fault> {
    let window = window.get_mut(..words).ok_or(Fault)?;
    memory.read(address, bytemuck::cast_slice_mut(window))?;
    for word in window {
        *word = u64::from_le(*word);
    }
    Ok(())
}
