//! Objects: what code is mapped from. Each has a number for the whole recording.
//!
//! A file is known by its device, inode and time of change, so that processes
//! that run the same libraries have the same objects. Copies of a file, as
//! containers have them, are objects of their own, but share one unwind table:
//! that goes by contents.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::io::Write as _;
use std::sync::Arc;

use rbprof_common::wire::object;

use super::compiler::Contents;
use super::compiler::Key;
use crate::targets::elf::Load;
use crate::targets::image::FileVersion;
use crate::unwind::store::Placed;

/// Most objects of a recording: what the numbers, and open files, are bounded
/// by.
pub const MAX_OBJECTS: usize = 4096;

/// What code is mapped from.
#[derive(Debug)]
pub struct Object {
    /// The path in the mount namespace of the process in which it was first
    /// seen, or a name such as `[vdso]`.
    pub path: String,
    /// Its contents, for as long as they are of use.
    pub contents: Contents,
    /// For a file that holds an interpreter: whether it has other code as well.
    pub interpreter: Option<bool>,
    /// Its build id; empty if it has none, or is not known yet.
    pub build_id: Vec<u8>,
    /// What the loader maps; empty while it is not known.
    pub(super) loads: Vec<Load>,
    pub(super) table: TableState,
}

/// How far an object's unwind table is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TableState {
    /// It is being compiled.
    Compiling,
    /// It is, or was, in the kernel half under this key.
    Known(Key),
    /// There is none, for that reason.
    None(String),
}

/// All objects of a recording.
#[derive(Debug, Default)]
pub struct Objects {
    objects: Vec<Object>,
    by_version: HashMap<Version, u32>,
    /// The tables in the kernel half, by contents.
    pub(super) tables: HashMap<Key, PlacedTable>,
}

/// What tells that two files are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Version {
    File(FileVersion),
    /// Code that is only in memory, such as the vDSO.
    Memory(Vec<u8>),
}

/// A table in the kernel half.
#[derive(Clone, Debug)]
pub(super) struct PlacedTable {
    pub(super) placed: Placed,
    /// Process mappings that refer to it.
    pub(super) users: usize,
}

impl Objects {
    /// The object with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Object> {
        let index = number.checked_sub(object::FIRST_FILE)?;
        self.objects.get(index as usize)
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Object> {
        let index = number.checked_sub(object::FIRST_FILE)?;
        self.objects.get_mut(index as usize)
    }

    /// All objects with their numbers.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Object)> {
        (object::FIRST_FILE..).zip(&self.objects)
    }

    pub(super) fn known(&self, version: &Version) -> Option<u32> {
        self.by_version.get(version).copied()
    }

    /// Adds an object. `None` when there are too many.
    pub(super) fn add(
        &mut self,
        version: Option<Version>,
        path: String,
        contents: Contents,
        loads: Vec<Load>,
        build_id: Vec<u8>,
    ) -> Option<u32> {
        if self.objects.len() >= MAX_OBJECTS {
            return None;
        }
        let number = object::FIRST_FILE + u32::try_from(self.objects.len()).ok()?;
        self.objects.push(Object {
            path,
            contents,
            interpreter: None,
            build_id,
            loads,
            table: TableState::Compiling,
        });
        if let Some(version) = version {
            self.by_version.insert(version, number);
        }
        Some(number)
    }

    /// The key of an object's table, if that is in the kernel half.
    pub(super) fn placed_key(&self, number: u32) -> Option<&Key> {
        match &self.get(number)?.table {
            TableState::Known(key) if self.tables.contains_key(key) => Some(key),
            _ => None,
        }
    }

    /// The table of an object, if it is in the kernel half.
    pub(super) fn placed(&self, number: u32) -> Option<&Placed> {
        let key = self.placed_key(number)?;
        self.tables.get(key).map(|table| &table.placed)
    }
}

impl Object {
    /// The contents as a file.
    ///
    /// # Errors
    /// What the system says where a file has to be made of what is in memory.
    pub fn file(&self) -> io::Result<Arc<File>> {
        match &self.contents {
            Contents::File(file) => Ok(Arc::clone(file)),
            Contents::Memory(bytes) => {
                let flags = rustix::fs::MemfdFlags::CLOEXEC;
                let mut file = File::from(rustix::fs::memfd_create("rbprof-object", flags)?);
                file.write_all(bytes)?;
                Ok(Arc::new(file))
            }
        }
    }
}
