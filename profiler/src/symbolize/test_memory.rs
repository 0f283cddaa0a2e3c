//! Target memory made up for tests.

use std::cell::Cell;
use std::collections::BTreeMap;

use rbprof_common::Fault;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;

use crate::memory::ReadRequest;
use crate::memory::TargetMemory;

/// The layout of a release series.
pub(super) fn of_release(major: u16, minor: u16) -> &'static Layout {
    LAYOUTS
        .iter()
        .find(|layout| (layout.from.major, layout.from.minor) == (major, minor))
        .unwrap()
}

/// Regions by address; counts the requests made of it.
#[derive(Debug, Default)]
pub(super) struct FakeMemory {
    regions: BTreeMap<u64, Vec<u8>>,
    pub(super) requests: Cell<usize>,
    pub(super) rounds: Cell<usize>,
}

impl FakeMemory {
    pub(super) fn map(&mut self, address: u64, len: usize) {
        self.regions.insert(address, vec![0; len]);
    }

    pub(super) fn unmap(&mut self, address: u64) {
        self.regions.remove(&address);
    }

    pub(super) fn put(&mut self, address: u64, word: u64) {
        self.put_bytes(address, &word.to_le_bytes());
    }

    pub(super) fn put_bytes(&mut self, address: u64, bytes: &[u8]) {
        let (start, region) = self.regions.range_mut(..=address).next_back().unwrap();
        let from = (address - start) as usize;
        region[from..from + bytes.len()].copy_from_slice(bytes);
    }
}

impl TargetMemory for FakeMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.requests.set(self.requests.get() + 1);
        let (start, region) = self.regions.range(..=address).next_back().ok_or(Fault)?;
        let from = (address - start) as usize;
        let bytes = from
            .checked_add(buffer.len())
            .and_then(|to| region.get(from..to))
            .ok_or(Fault)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) {
        self.rounds.set(self.rounds.get() + 1);
        for request in requests {
            request.done = self.read(request.address, request.buffer).is_ok();
        }
    }
}
