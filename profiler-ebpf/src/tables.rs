//! Unwind tables, in maps that the agent fills.

use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::Rule;
use rbprof_common::walk::native::Mapping;
use rbprof_common::walk::native::Page;
use rbprof_common::walk::native::Tables;

use crate::maps::CHUNKS;
use crate::maps::MAPPINGS;
use crate::maps::PAGES;
use crate::maps::RULES;

/// The tables of all processes.
pub(crate) struct UnwindTables;

impl Tables for UnwindTables {
    #[inline(always)]
    fn mapping(&self, at: u32) -> Option<&Mapping> {
        MAPPINGS.get(at)
    }

    #[inline(always)]
    fn page(&self, at: u32) -> Option<Page> {
        PAGES.get(at).copied()
    }

    #[inline(always)]
    fn chunk(&self, number: u32) -> Option<&Chunk> {
        // Not `get_value(number, &0)`: a reference to a constant becomes one to a
        // section of read-only data that is not there when the program runs.
        CHUNKS.get(number)?.get(0)
    }

    #[inline(always)]
    fn rule(&self, number: u16) -> Option<&Rule> {
        RULES.get(u32::from(number))
    }
}
