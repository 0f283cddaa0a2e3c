//! Hidden instance variables of classes: where Ruby before 3.3 keeps the name
//! of a class and the object of a singleton class.
//!
//! Their IDs are numbers that Ruby makes up when it starts, so they are learnt
//! from a class whose values are known. Every chain of superclasses ends at
//! `BasicObject`: its hidden variable that holds the string "BasicObject" is
//! the permanent class path, and the one of its singleton class that holds
//! `BasicObject` is the attached object. An anonymous class's temporary name
//! is kept in another variable, so it cannot be mistaken for a permanent one.

use rbprof_common::layout::ClassNames;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::object_type;

use super::cache::Cache;
use super::evidence::Reader;
use super::evidence::Unreadable;
use super::strings;
use crate::memory::TargetMemory;

/// A hidden variable of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Hidden {
    /// `__classpath__`: the permanent name.
    ClassPath,
    /// `__attached__`: what a singleton class belongs to.
    Attached,
}

/// What had to be learnt from the process.
#[derive(Clone, Copy, Debug)]
struct Learnt {
    class_path: u64,
    attached: u64,
    /// `rb_vm_t.shape_list` (3.2 only).
    shape_list: u64,
}

/// Finds hidden variables.
#[derive(Debug)]
pub(super) struct HiddenIvars {
    vm: Option<u64>,
    learnt: Option<Learnt>,
    /// How often learning has failed.
    failures: u32,
    /// Index of a variable for each shape; shapes never change or go.
    shapes: Cache<(u32, Hidden), Option<u32>>,
}

/// After this many failures to learn, every class is taken for anonymous.
const MAX_FAILURES: u32 = 256;
/// Superclasses on the way to `BasicObject`.
const MAX_ANCESTORS: u32 = 1024;
/// Entries of an ivar table; classes have a handful.
const MAX_ENTRIES: u64 = 8192;
/// Variables of a shape: the length of its chain of parents.
const MAX_SHAPE_DEPTH: u32 = 1024;
/// Shapes remembered.
const SHAPES: usize = 1 << 14;

/// Bits of an ID that tell its scope; zero for the names hidden variables have.
const ID_SCOPE_MASK: u64 = 0xe;

impl HiddenIvars {
    pub(super) fn new(vm: Option<u64>) -> Self {
        Self {
            vm,
            learnt: None,
            failures: 0,
            shapes: Cache::new(SHAPES),
        }
    }

    /// The value of a hidden variable of `class`, or `None` when it has none.
    pub(super) fn get<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        class: u64,
        hidden: Hidden,
    ) -> Result<Option<u64>, Unreadable> {
        let learnt = self.learnt(reader, layout, class)?;
        let id = match hidden {
            Hidden::ClassPath => learnt.class_path,
            Hidden::Attached => learnt.attached,
        };
        match layout.class_names {
            ClassNames::IvarTable { extension, iv_tbl } => {
                Table::read(reader, class, extension, iv_tbl)?
                    .map_or(Ok(None), |table| table.lookup(reader, id))
            }
            ClassNames::Shapes { iv_ptr, .. } => {
                let shape = shape_of(reader, class)?;
                let index = if let Some(known) = self.shapes.get((shape, hidden)) {
                    known
                } else {
                    let index = shape_index(reader, learnt.shape_list, shape, id)?;
                    self.shapes.insert((shape, hidden), index);
                    index
                };
                let Some(index) = index else {
                    return Ok(None);
                };
                let values = reader.word(class.wrapping_add(u64::from(iv_ptr)))?;
                let value = values.wrapping_add(u64::from(index) * 8);
                Ok(Some(reader.word(value)?))
            }
            ClassNames::Fields { .. } | ClassNames::Unknown => Ok(None),
        }
    }

    fn learnt<M: TargetMemory>(
        &mut self,
        reader: &Reader<'_, M>,
        layout: &NameLayout,
        class: u64,
    ) -> Result<Learnt, Unreadable> {
        if let Some(learnt) = self.learnt {
            return Ok(learnt);
        }
        if self.failures >= MAX_FAILURES {
            return Err(Unreadable);
        }
        let mut aside = reader.aside();
        let learnt = learn(&mut aside, layout, self.vm, class);
        match learnt {
            Ok(learnt) => self.learnt = Some(learnt),
            Err(Unreadable) => self.failures += 1,
        }
        learnt
    }
}

/// Learns what a process calls its hidden variables, from the ancestors of
/// `class`.
fn learn<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    vm: Option<u64>,
    class: u64,
) -> Result<Learnt, Unreadable> {
    let root = basic_object(reader, class)?;
    let singleton = reader.word(root.wrapping_add(fixed::OBJECT_CLASS))?;
    match layout.class_names {
        ClassNames::IvarTable { extension, iv_tbl } => {
            let of = |reader: &mut Reader<'_, M>, class| {
                Table::read(reader, class, extension, iv_tbl)?
                    .ok_or(Unreadable)?
                    .entries(reader)
            };
            let names = of(reader, root)?;
            let attachments = of(reader, singleton)?;
            Ok(Learnt {
                class_path: id_of_name(reader, layout, &names).ok_or(Unreadable)?,
                attached: id_of_value(layout, &attachments, root).ok_or(Unreadable)?,
                shape_list: 0,
            })
        }
        ClassNames::Shapes { iv_ptr, vm_search } => {
            let vm = vm.ok_or(Unreadable)?;
            let mut words = vec![0; usize::from(vm_search)];
            reader.peek(vm, &mut words)?;
            // The list is the one word of the VM that leads to these names.
            words
                .chunks_exact(8)
                .filter_map(|word| word.try_into().ok().map(u64::from_le_bytes))
                .filter(|list| list % 8 == 0 && *list != 0)
                .find_map(|list| {
                    check_shape_list(reader, list).ok()?;
                    let names = shape_values(reader, list, root, iv_ptr).ok()?;
                    let attachments = shape_values(reader, list, singleton, iv_ptr).ok()?;
                    Some(Learnt {
                        class_path: id_of_name(reader, layout, &names)?,
                        attached: id_of_value(layout, &attachments, root)?,
                        shape_list: list,
                    })
                })
                .ok_or(Unreadable)
        }
        ClassNames::Fields { .. } | ClassNames::Unknown => Err(Unreadable),
    }
}

/// `BasicObject`: where the superclasses of `class` end.
fn basic_object<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    class: u64,
) -> Result<u64, Unreadable> {
    let mut at = class;
    if reader.masked(at, object_type::MASK)? != object_type::CLASS {
        // A module's chain ends elsewhere; that of its class does not.
        at = reader.word(at.wrapping_add(fixed::OBJECT_CLASS))?;
    }
    for _ in 0..MAX_ANCESTORS {
        let above = reader.word(at.wrapping_add(fixed::CLASS_SUPER))?;
        if above == 0 {
            let kind = reader.masked(at, object_type::MASK)?;
            return (kind == object_type::CLASS).then_some(at).ok_or(Unreadable);
        }
        at = above;
    }
    Err(Unreadable)
}

/// Whether an ID can be that of a hidden variable.
fn is_hidden(layout: &NameLayout, id: u64) -> bool {
    id & ID_SCOPE_MASK == 0 && id > layout.last_operator_id
}

/// The hidden variable of `BasicObject` that holds its name.
fn id_of_name<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    layout: &NameLayout,
    variables: &[(u64, u64)],
) -> Option<u64> {
    variables.iter().find_map(|&(id, value)| {
        let named = is_hidden(layout, id)
            && strings::bytes(reader, layout, value)
                .is_ok_and(|(bytes, _)| bytes == b"BasicObject");
        named.then_some(id)
    })
}

/// The hidden variable that holds `value`.
fn id_of_value(layout: &NameLayout, variables: &[(u64, u64)], value: u64) -> Option<u64> {
    variables
        .iter()
        .find(|&&(id, found)| is_hidden(layout, id) && found == value)
        .map(|&(id, _)| id)
}

/// `struct st_table` with IDs as keys.
struct Table {
    address: u64,
    start: u64,
    bound: u64,
    entries: u64,
}

impl Table {
    const START: u64 = 32;
    const BOUND: u64 = 40;
    const ENTRIES: u64 = 48;
    /// An entry: hash, key, record. The hash of a deleted one is all ones.
    const ENTRY_WORDS: usize = 3;
    const ENTRY_BYTES: usize = 24;
    const DELETED: u64 = u64::MAX;
    /// Entries read at once.
    const CHUNK: u64 = 32;

    /// The ivar table of a class, or `None` when it has no variables.
    fn read<M: TargetMemory>(
        reader: &mut Reader<'_, M>,
        class: u64,
        extension: u16,
        iv_tbl: u16,
    ) -> Result<Option<Self>, Unreadable> {
        let extension = reader.word(class.wrapping_add(u64::from(extension)))?;
        let address = reader.word(extension.wrapping_add(u64::from(iv_tbl)))?;
        if address == 0 {
            return Ok(None);
        }
        let table = Self {
            address,
            start: reader.peek_word(address.wrapping_add(Self::START))?,
            bound: reader.peek_word(address.wrapping_add(Self::BOUND))?,
            entries: reader.word(address.wrapping_add(Self::ENTRIES))?,
        };
        let len = table.bound.checked_sub(table.start).ok_or(Unreadable)?;
        (len <= MAX_ENTRIES)
            .then_some(Some(table))
            .ok_or(Unreadable)
    }

    /// The record of `id`. That there is none holds until one is added.
    fn lookup<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        id: u64,
    ) -> Result<Option<u64>, Unreadable> {
        let mut found = None;
        self.each(reader, |address, key, _| {
            if key == id {
                found = Some(address);
            }
            found.is_none()
        })?;
        let Some(entry) = found else {
            reader.word(self.address.wrapping_add(Self::START))?;
            reader.word(self.address.wrapping_add(Self::BOUND))?;
            return Ok(None);
        };
        // Again, for the notes; the table may have changed since.
        if reader.word(entry.wrapping_add(8))? != id {
            return Err(Unreadable);
        }
        Ok(Some(reader.word(entry.wrapping_add(16))?))
    }

    /// All keys and records.
    fn entries<M: TargetMemory>(
        &self,
        reader: &Reader<'_, M>,
    ) -> Result<Vec<(u64, u64)>, Unreadable> {
        let mut entries = Vec::new();
        self.each(reader, |_, key, record| {
            entries.push((key, record));
            true
        })?;
        Ok(entries)
    }

    /// Calls `visit` with address, key and record of each entry until it
    /// returns `false`.
    fn each<M: TargetMemory>(
        &self,
        reader: &Reader<'_, M>,
        mut visit: impl FnMut(u64, u64, u64) -> bool,
    ) -> Result<(), Unreadable> {
        let mut bytes = [0; Self::CHUNK as usize * Self::ENTRY_BYTES];
        let mut index = self.start;
        while index < self.bound {
            let count = (self.bound - index).min(Self::CHUNK);
            let first = self
                .entries
                .wrapping_add(index.wrapping_mul(Self::ENTRY_BYTES as u64));
            let bytes = bytes
                .get_mut(..count as usize * Self::ENTRY_BYTES)
                .ok_or(Unreadable)?;
            reader.peek(first, bytes)?;
            let mut address = first;
            for entry in bytes.chunks_exact(Self::ENTRY_BYTES) {
                let [hash, key, record] = words::<{ Self::ENTRY_WORDS }>(entry);
                if hash != Self::DELETED && !visit(address, key, record) {
                    return Ok(());
                }
                address = address.wrapping_add(Self::ENTRY_BYTES as u64);
            }
            index += count;
        }
        Ok(())
    }
}

/// The first words in `bytes`.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.try_into().map_or(0, u64::from_le_bytes);
    }
    words
}

/// `struct rb_shape` of 3.2.
struct Shape {
    /// The variable that an object of this shape has and its parent has not.
    edge: u64,
    /// How many variables there are.
    next_index: u32,
    kind: u8,
    parent: u32,
}

impl Shape {
    const BYTES: usize = 32;
    /// `SHAPE_ROOT` and `SHAPE_IVAR`.
    const ROOT: u8 = 0;
    const IVAR: u8 = 1;
    /// `INVALID_SHAPE_ID`: the parent of a root.
    const NO_PARENT: u32 = u32::MAX;

    fn read<M: TargetMemory>(
        reader: &Reader<'_, M>,
        list: u64,
        id: u32,
    ) -> Result<Self, Unreadable> {
        let mut bytes = [0; Self::BYTES];
        let offset = u64::from(id) * Self::BYTES as u64;
        reader.peek(list.wrapping_add(offset), &mut bytes)?;
        let [_, edge, counts, rest] = words::<4>(&bytes);
        Ok(Self {
            edge,
            next_index: counts as u32,
            kind: rest as u8,
            parent: (rest >> 32) as u32,
        })
    }
}

/// The id of a class's shape: the upper half of its flags.
fn shape_of<M: TargetMemory>(reader: &mut Reader<'_, M>, class: u64) -> Result<u32, Unreadable> {
    Ok((reader.masked(class, 0xffff_ffff_0000_0000)? >> 32) as u32)
}

/// Whether a list of shapes begins with the root shape.
fn check_shape_list<M: TargetMemory>(reader: &Reader<'_, M>, list: u64) -> Result<(), Unreadable> {
    let root = Shape::read(reader, list, 0)?;
    let is_root = root.edge == 0
        && root.next_index == 0
        && root.kind == Shape::ROOT
        && root.parent == Shape::NO_PARENT;
    is_root.then_some(()).ok_or(Unreadable)
}

/// Calls `visit` with each variable of a shape and its index, newest first,
/// until it returns `false`.
fn each_variable<M: TargetMemory>(
    reader: &Reader<'_, M>,
    list: u64,
    shape: u32,
    mut visit: impl FnMut(u64, u32) -> bool,
) -> Result<(), Unreadable> {
    let mut id = shape;
    for _ in 0..MAX_SHAPE_DEPTH {
        if id == Shape::NO_PARENT {
            return Ok(());
        }
        let shape = Shape::read(reader, list, id)?;
        if shape.kind == Shape::IVAR {
            let index = shape.next_index.checked_sub(1).ok_or(Unreadable)?;
            if !visit(shape.edge, index) {
                return Ok(());
            }
        }
        id = shape.parent;
    }
    Err(Unreadable)
}

/// Where objects of a shape have the variable `id`.
fn shape_index<M: TargetMemory>(
    reader: &Reader<'_, M>,
    list: u64,
    shape: u32,
    id: u64,
) -> Result<Option<u32>, Unreadable> {
    let mut found = None;
    each_variable(reader, list, shape, |edge, index| {
        if edge == id {
            found = Some(index);
        }
        found.is_none()
    })?;
    Ok(found)
}

/// All variables of a class with their values.
fn shape_values<M: TargetMemory>(
    reader: &mut Reader<'_, M>,
    list: u64,
    class: u64,
    iv_ptr: u16,
) -> Result<Vec<(u64, u64)>, Unreadable> {
    let shape = shape_of(reader, class)?;
    let values = reader.word(class.wrapping_add(u64::from(iv_ptr)))?;
    let mut places = Vec::new();
    each_variable(reader, list, shape, |edge, index| {
        places.push((edge, values.wrapping_add(u64::from(index) * 8)));
        true
    })?;
    places
        .into_iter()
        .map(|(edge, place)| Ok((edge, reader.peek_word(place)?)))
        .collect()
}
