//! What is checked on the machine of a developer, and on emulated ones with
//! other kernels and another architecture: the checks themselves, and how fast
//! each goes where.
//!
//! Every check takes a Ruby and a pace of its own kind, of which there are two:
//! `HOST` for real machines, and `EMULATED` for one whose processors are emulated
//! by software. That is 10 to 30 times slower, so that a sample may take a
//! millisecond there; a moment that the emulator was not given counts as CPU
//! time and has no ticks; and minutes are all there is for every check on every
//! Ruby.
//!
//! A check gives what it has found, or `None` where this machine does not allow
//! it to record.

pub mod children;
pub mod collector;
pub mod depth;
pub mod discovery;
pub mod extension;
pub mod frames;
pub mod load;
pub mod roots;
pub mod split;
pub mod threads;

use std::collections::HashMap;

use anyhow::Result;

/// What a program says it has spent: the lines `spent NAME NUMBER` of all that it
/// said, fields separated by tabs.
pub(crate) fn spent<T>(said: &[String]) -> Result<HashMap<String, T>>
where
    T: std::str::FromStr,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    said.iter()
        .filter_map(|line| line.strip_prefix("spent\t")?.split_once('\t'))
        .map(|(part, spent)| Ok((part.to_owned(), spent.parse()?)))
        .collect()
}
