//! Reading the memory of a target process.

/// Words in one [`Window`]: 4 KiB, which the kernel copies in one helper call.
pub const WINDOW_WORDS: usize = 512;

/// A copy of a stretch of target memory.
pub type Window = [u64; WINDOW_WORDS];

/// Target memory could not be read: not mapped, not resident, or out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// Target memory, read by address. A read is whole or it fails; it never
/// changes the target and never makes it fault pages in (the kernel half
/// cannot, the user half has no need to).
pub trait Memory {
    /// Reads the little-endian word at `addr`.
    ///
    /// # Errors
    /// [`Fault`] when any byte of it cannot be read.
    fn word(&self, addr: u64) -> Result<u64, Fault>;

    /// Reads three consecutive words from `addr` on.
    ///
    /// # Errors
    /// [`Fault`] when any byte of them cannot be read.
    fn words3(&self, addr: u64) -> Result<[u64; 3], Fault>;

    /// Copies `words` words (at most [`WINDOW_WORDS`]) from `addr` on to the
    /// front of `dst`; what lies behind them is left as it was or zeroed.
    ///
    /// # Errors
    /// [`Fault`] when any byte of them cannot be read.
    fn window(&self, addr: u64, dst: &mut Window, words: usize) -> Result<(), Fault>;
}
