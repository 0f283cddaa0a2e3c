//! Structures and constants in debug information.

use std::collections::HashMap;

use gimli::AttributeValue;
use gimli::DebugInfoOffset;
use gimli::Dwarf;
use gimli::Unit;
use gimli::UnitOffset;

use super::Slice;

/// Types of types of types that are followed: `typedef`, `const`, members of
/// members.
const MAX_DEPTH: u32 = 32;

type Entry<'a> = gimli::DebuggingInformationEntry<Slice<'a>>;
type Result<T> = gimli::Result<T>;

/// Where a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Bytes from the start of the outermost structure.
    pub(super) offset: u64,
    /// The bit of that byte at which a bit field begins.
    pub(super) bit: Option<u8>,
    /// Its size in bytes, if its type says so.
    pub(super) size: Option<u64>,
}

/// A type: the unit that it is in, by index, and where there.
type TypeId = (usize, UnitOffset);

/// The structures and constants that were asked for.
pub(super) struct Types<'a> {
    dwarf: &'a Dwarf<Slice<'a>>,
    /// Those written in C, in order of their offsets.
    units: Vec<Unit<Slice<'a>>>,
    structures: HashMap<&'static str, TypeId>,
    constants: HashMap<&'static str, u64>,
}

/// A member of a structure.
struct Member<'a> {
    name: Option<Slice<'a>>,
    offset: u64,
    bit: Option<u8>,
    kind: Option<TypeId>,
}

impl<'a> Types<'a> {
    /// Looks for structures, by tag or the name of a `typedef`, and for
    /// constants (enumerators). Of several of one name, the first counts.
    ///
    /// # Errors
    /// If the debug information is damaged.
    pub(super) fn read(
        dwarf: &'a Dwarf<Slice<'a>>,
        structures: &[&'static str],
        constants: &[&'static str],
    ) -> Result<Self> {
        let mut types = Self {
            dwarf,
            units: Vec::new(),
            structures: HashMap::new(),
            constants: HashMap::new(),
        };
        let mut headers = dwarf.units();
        while let Some(header) = headers.next()? {
            let unit = dwarf.unit(header)?;
            if is_c(&unit)? {
                types.units.push(unit);
            }
        }
        for index in 0..types.units.len() {
            types.read_unit(index, structures, constants)?;
        }
        Ok(types)
    }

    fn read_unit(
        &mut self,
        index: usize,
        structures: &[&'static str],
        constants: &[&'static str],
    ) -> Result<()> {
        let Some(unit) = self.units.get(index) else {
            return Ok(());
        };
        let mut entries = unit.entries();
        while let Some(entry) = entries.next_dfs()? {
            let wanted = match entry.tag {
                gimli::DW_TAG_structure_type | gimli::DW_TAG_typedef => structures,
                gimli::DW_TAG_enumerator => constants,
                _ => continue,
            };
            let Some(name) = name_of(self.dwarf, unit, entry)? else {
                continue;
            };
            let Some(&name) = wanted
                .iter()
                .find(|wanted| wanted.as_bytes() == name.slice())
            else {
                continue;
            };
            match entry.tag {
                gimli::DW_TAG_enumerator => {
                    if let Some(value) = constant_of(entry) {
                        self.constants.entry(name).or_insert(value);
                    }
                }
                // A declaration has no members.
                gimli::DW_TAG_structure_type => {
                    if entry.has_attr(gimli::DW_AT_byte_size) {
                        self.structures.entry(name).or_insert((index, entry.offset));
                    }
                }
                _ => {
                    let kind = type_of(&self.units, index, entry);
                    if let Some(id) = kind
                        && let Some(id) = self.structure_behind(id)?
                    {
                        self.structures.entry(name).or_insert(id);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the structure is there.
    pub(super) fn has(&self, structure: &str) -> bool {
        self.structures.contains_key(structure)
    }

    /// The value of a constant.
    pub(super) fn constant(&self, name: &str) -> Option<u64> {
        self.constants.get(name).copied()
    }

    /// The size of a structure in bytes.
    pub(super) fn size(&self, structure: &str) -> Option<u64> {
        let &id = self.structures.get(structure)?;
        self.entry(id)
            .ok()??
            .attr_value(gimli::DW_AT_byte_size)?
            .udata_value()
    }

    /// Where a member is: a name, or several with dots between for members of
    /// members. `None` if the structure is not there or has no such member.
    ///
    /// # Errors
    /// If the debug information is damaged.
    pub(super) fn place(&self, structure: &str, path: &str) -> Result<Option<Place>> {
        match self.structures.get(structure) {
            None => Ok(None),
            Some(&id) => self.place_in(id, path, 0),
        }
    }

    fn place_in(&self, id: TypeId, path: &str, depth: u32) -> Result<Option<Place>> {
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        let (first, rest) = match path.split_once('.') {
            Some((first, rest)) => (first, Some(rest)),
            None => (path, None),
        };
        for member in self.members(id)? {
            let inner = match (member.name, rest) {
                (Some(name), None) if name.slice() == first.as_bytes() => {
                    return Ok(Some(Place {
                        offset: member.offset,
                        bit: member.bit,
                        size: self.size_of(member.kind)?,
                    }));
                }
                (Some(name), Some(rest)) if name.slice() == first.as_bytes() => rest,
                // Without a name: its members are the structure's own.
                (None, _) => path,
                _ => continue,
            };
            if let Some(kind) = member.kind
                && let Some(kind) = self.structure_behind(kind)?
                && let Some(place) = self.place_in(kind, inner, depth + 1)?
            {
                let offset = place.offset.checked_add(member.offset);
                return Ok(offset.map(|offset| Place { offset, ..place }));
            }
        }
        Ok(None)
    }

    fn members(&self, (index, at): TypeId) -> Result<Vec<Member<'a>>> {
        let mut members = Vec::new();
        let Some(unit) = self.units.get(index) else {
            return Ok(members);
        };
        let mut entries = unit.entries_at_offset(at)?;
        if entries.next_dfs()?.is_none_or(|entry| !entry.has_children) {
            return Ok(members);
        }
        let level = entries.depth() + 1;
        while let Some(entry) = entries.next_dfs()? {
            if entry.depth < level {
                break;
            }
            if entry.depth == level && entry.tag == gimli::DW_TAG_member {
                let (offset, bit) = place_of(entry);
                members.push(Member {
                    name: name_of(self.dwarf, unit, entry)?,
                    offset,
                    bit,
                    kind: type_of(&self.units, index, entry),
                });
            }
        }
        Ok(members)
    }

    fn entry(&self, (index, at): TypeId) -> Result<Option<Entry<'a>>> {
        match self.units.get(index) {
            None => Ok(None),
            Some(unit) => unit.entry(at).map(Some),
        }
    }

    /// The type without its names and qualifiers.
    fn plain(&self, id: TypeId) -> Result<Option<(TypeId, Entry<'a>)>> {
        let mut id = id;
        for _ in 0..MAX_DEPTH {
            let Some(entry) = self.entry(id)? else {
                return Ok(None);
            };
            match entry.tag {
                gimli::DW_TAG_typedef
                | gimli::DW_TAG_const_type
                | gimli::DW_TAG_volatile_type
                | gimli::DW_TAG_atomic_type => {}
                _ => return Ok(Some((id, entry))),
            }
            match type_of(&self.units, id.0, &entry) {
                Some(next) => id = next,
                None => return Ok(None),
            }
        }
        Ok(None)
    }

    /// The structure or union that a type is, if it is one.
    fn structure_behind(&self, id: TypeId) -> Result<Option<TypeId>> {
        Ok(match self.plain(id)? {
            Some((id, entry))
                if entry.tag == gimli::DW_TAG_structure_type
                    || entry.tag == gimli::DW_TAG_union_type =>
            {
                Some(id)
            }
            _ => None,
        })
    }

    fn size_of(&self, kind: Option<TypeId>) -> Result<Option<u64>> {
        let Some(kind) = kind else {
            return Ok(None);
        };
        let plain = self.plain(kind)?;
        Ok(plain.and_then(|(_, entry)| entry.attr_value(gimli::DW_AT_byte_size)?.udata_value()))
    }
}

/// Whether a unit was written in C, which Ruby's structures are. Those of YJIT
/// and ZJIT are in Rust, and many.
fn is_c(unit: &Unit<Slice<'_>>) -> Result<bool> {
    let mut entries = unit.entries();
    let language = entries
        .next_dfs()?
        .and_then(|entry| entry.attr_value(gimli::DW_AT_language));
    Ok(matches!(
        language,
        Some(AttributeValue::Language(
            gimli::DW_LANG_C
                | gimli::DW_LANG_C89
                | gimli::DW_LANG_C99
                | gimli::DW_LANG_C11
                | gimli::DW_LANG_C17
        ))
    ))
}

fn name_of<'a>(
    dwarf: &Dwarf<Slice<'a>>,
    unit: &Unit<Slice<'a>>,
    entry: &Entry<'a>,
) -> Result<Option<Slice<'a>>> {
    match entry.attr_value(gimli::DW_AT_name) {
        None => Ok(None),
        // In a file of its own (`.gnu_debugaltlink`), which is not read.
        Some(AttributeValue::DebugStrRefSup(_)) => Ok(None),
        Some(value) => dwarf.attr_string(unit, value).map(Some),
    }
}

fn constant_of(entry: &Entry<'_>) -> Option<u64> {
    let value = entry.attr_value(gimli::DW_AT_const_value)?;
    value
        .udata_value()
        .or_else(|| value.sdata_value().map(i64::cast_unsigned))
}

/// The type of an entry, also if it is in another unit.
fn type_of<'a>(units: &[Unit<Slice<'a>>], index: usize, entry: &Entry<'a>) -> Option<TypeId> {
    match entry.attr_value(gimli::DW_AT_type)? {
        AttributeValue::UnitRef(offset) => Some((index, offset)),
        AttributeValue::DebugInfoRef(offset) => unit_at(units, offset),
        _ => None,
    }
}

fn unit_at(units: &[Unit<Slice<'_>>], offset: DebugInfoOffset) -> Option<TypeId> {
    let starts_after = units.partition_point(|unit| {
        unit.header
            .debug_info_offset()
            .is_some_and(|start| start <= offset)
    });
    let index = starts_after.checked_sub(1)?;
    let at = offset.to_unit_offset(&units.get(index)?.header)?;
    Some((index, at))
}

/// Where a member begins: the byte, and for bit fields the bit.
fn place_of(entry: &Entry<'_>) -> (u64, Option<u8>) {
    let number = |name| entry.attr_value(name)?.udata_value();
    let offset = number(gimli::DW_AT_data_member_location).unwrap_or(0);
    let from_start = if let Some(bits) = number(gimli::DW_AT_data_bit_offset) {
        // DWARF 4 and later: from the structure's start.
        Some(offset.saturating_mul(8).saturating_add(bits))
    } else if let (Some(before), Some(bits)) = (
        number(gimli::DW_AT_bit_offset),
        number(gimli::DW_AT_bit_size),
    ) {
        // DWARF 2 and 3, and GCC's DWARF 4: from the highest bit of a storage
        // unit, down.
        let storage = number(gimli::DW_AT_byte_size).unwrap_or(4);
        storage
            .checked_mul(8)
            .and_then(|all| all.checked_sub(before)?.checked_sub(bits))
            .map(|up| offset.saturating_mul(8).saturating_add(up))
    } else {
        None
    };
    match from_start {
        Some(bits) => (bits / 8, Some((bits % 8) as u8)),
        None => (offset, None),
    }
}
