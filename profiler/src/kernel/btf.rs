//! Offsets into the running kernel's structures, from its type information.
//!
//! The BTF of a kernel describes some 150,000 types; the crates that read it
//! build all of them first. This reads the few structures that are asked for,
//! in about a millisecond, and nothing else. Anybody may read it, so it also
//! tells those without privileges which helpers a kernel has.
//!
//! Format: the kernel's `Documentation/bpf/btf.rst`. Minimum kernel version:
//! 5.2 for `/sys/kernel/btf/vmlinux` (`CONFIG_DEBUG_INFO_BTF`).

use super::KernelError;

/// Where the kernel gives its own BTF.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// Offsets that the kernel half needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelOffsets {
    /// `task_struct.pid`.
    pub task_pid: u32,
    /// `task_struct.tgid`.
    pub task_tgid: u32,
    /// `task_struct.signal`.
    pub task_signal: u32,
    /// `signal_struct.live`.
    pub signal_live: u32,
    /// The user thread pointer inside `task_struct`.
    pub task_thread_pointer: u32,
    /// Where ids in other PID namespaces than the initial one are; `None`: not
    /// where rbprof would look for them.
    pub ids: Option<IdOffsets>,
    /// Where the user's registers are while a thread is in the kernel; `None`:
    /// not described.
    pub saved_registers: Option<SavedRegisters>,
    /// What leads from a mapping to its file; `None`: not described.
    pub mappings: Option<MappingOffsets>,
}

/// From a `vm_area_struct` to the file that is mapped there, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappingOffsets {
    /// `vm_area_struct.vm_flags`.
    pub vma_flags: u32,
    /// `vm_area_struct.vm_file`.
    pub vma_file: u32,
    /// `vm_area_struct.vm_mm`.
    pub vma_mm: u32,
    /// `task_struct.mm`.
    pub task_mm: u32,
    /// `file.f_inode`.
    pub file_inode: u32,
    /// `file.f_path.dentry`.
    pub file_dentry: u32,
    /// `dentry.d_name.name`.
    pub dentry_name: u32,
    /// `inode.i_ino`.
    pub inode_number: u32,
    /// `inode.i_size`.
    pub inode_size: u32,
    /// `inode.i_generation`.
    pub inode_generation: u32,
    /// `inode.i_sb`.
    pub inode_super: u32,
    /// `super_block.s_dev`.
    pub super_device: u32,
}

impl MappingOffsets {
    fn from_btf(btf: &Btf<'_>) -> Option<Self> {
        Some(Self {
            vma_flags: btf.offset("vm_area_struct", &["vm_flags"])?,
            vma_file: btf.offset("vm_area_struct", &["vm_file"])?,
            vma_mm: btf.offset("vm_area_struct", &["vm_mm"])?,
            task_mm: btf.offset("task_struct", &["mm"])?,
            file_inode: btf.offset("file", &["f_inode"])?,
            file_dentry: btf.offset("file", &["f_path", "dentry"])?,
            dentry_name: btf
                .offset("dentry", &["d_name", "name"])
                .or_else(|| btf.offset("dentry", &["__d_name", "name"]))?,
            inode_number: btf.offset("inode", &["i_ino"])?,
            inode_size: btf.offset("inode", &["i_size"])?,
            inode_generation: btf.offset("inode", &["i_generation"])?,
            inode_super: btf.offset("inode", &["i_sb"])?,
            super_device: btf.offset("super_block", &["s_dev"])?,
        })
    }
}

/// From a `task_struct` to the registers that its thread has in user mode,
/// which the kernel saves at the top of the thread's kernel stack on entry. In
/// bytes. For kernels without `bpf_task_pt_regs` (before 5.15).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedRegisters {
    /// `task_struct.stack`, the address of the stack's low end.
    pub task_stack: u32,
    /// From that end to the `struct pt_regs`; never 0.
    pub in_stack: u32,
}

impl SavedRegisters {
    fn from_btf(btf: &Btf<'_>) -> Option<Self> {
        // Of every x86-64 kernel without KASAN; of an arm64 kernel with larger
        // pages, a page. The registers found are validated before use.
        const STACK: u32 = 16 << 10;
        let page = u32::try_from(rustix::param::page_size()).ok()?;
        let (stack, padding) = if cfg!(target_arch = "aarch64") {
            (STACK.max(page), 0)
        } else {
            // `TOP_OF_KERNEL_STACK_PADDING`, where the kernel is built to
            // deliver events the new way (`CONFIG_X86_FRED`, 6.9). Other names
            // with this beginning are there without it.
            let fred = btf.has_function("fred_entry_from_user");
            (STACK, if fred { 16 } else { 0 })
        };
        let below = btf.size("pt_regs")?.checked_add(padding)?;
        Some(Self {
            task_stack: btf.offset("task_struct", &["stack"])?,
            in_stack: stack.checked_sub(below).filter(|&offset| offset > 0)?,
        })
    }
}

/// What the kernel's BTF says of its abilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelAbilities {
    helpers: Vec<&'static str>,
    /// Whether BPF programs can iterate over tasks.
    pub iterates_tasks: bool,
}

impl KernelAbilities {
    /// Reads them from the running kernel: which of these helpers it has, by
    /// their names in its `enum bpf_func_id`. Some kinds of programs may not be
    /// allowed to call them all the same.
    ///
    /// # Errors
    /// [`KernelError::NoBtf`] when the kernel has no BTF.
    pub fn of_running_kernel(helpers: &[&'static str]) -> Result<Self, KernelError> {
        let bytes = read_vmlinux()?;
        let btf = parse_vmlinux(&bytes)?;
        Ok(Self::from_btf(&btf, helpers))
    }

    fn from_btf(btf: &Btf<'_>, helpers: &[&'static str]) -> Self {
        let has = |name: &&&'static str| btf.has_enumerator("bpf_func_id", name);
        Self {
            helpers: helpers.iter().filter(has).copied().collect(),
            iterates_tasks: btf.has_function("bpf_iter_task"),
        }
    }

    /// Whether the kernel has this helper, one of those that were asked for.
    #[must_use]
    pub fn has_helper(&self, name: &str) -> bool {
        self.helpers.contains(&name)
    }
}

fn read_vmlinux() -> Result<Vec<u8>, KernelError> {
    std::fs::read(VMLINUX).map_err(|error| KernelError::NoBtf(format!("{VMLINUX}: {error}")))
}

fn parse_vmlinux(bytes: &[u8]) -> Result<Btf<'_>, KernelError> {
    Btf::parse(bytes).ok_or_else(|| KernelError::NoBtf(format!("{VMLINUX}: not a BTF file")))
}

/// From a `task_struct` to its ids in all PID namespaces, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdOffsets {
    /// `task_struct.group_leader`.
    pub task_leader: u32,
    /// `task_struct.thread_pid` (since Linux 4.19).
    pub task_thread_pid: u32,
    /// `pid.level`.
    pub pid_level: u32,
    /// `pid.numbers`, an array of `struct upid`.
    pub pid_numbers: u32,
}

impl IdOffsets {
    fn from_btf(btf: &Btf<'_>) -> Option<Self> {
        // The kernel half has a `struct upid` of its own.
        if btf.offset("upid", &["nr"])? != 0 || btf.offset("upid", &["ns"])? != 8 {
            return None;
        }
        Some(Self {
            task_leader: btf.offset("task_struct", &["group_leader"])?,
            task_thread_pid: btf.offset("task_struct", &["thread_pid"])?,
            pid_level: btf.offset("pid", &["level"])?,
            pid_numbers: btf.offset("pid", &["numbers"])?,
        })
    }
}

impl KernelOffsets {
    /// Reads them from the running kernel.
    ///
    /// # Errors
    /// [`KernelError::NoBtf`] when the kernel has no BTF, or not these fields.
    pub fn of_running_kernel() -> Result<Self, KernelError> {
        Self::from_btf(&read_vmlinux()?)
    }

    /// Reads them from the bytes of a BTF file.
    ///
    /// # Errors
    /// [`KernelError::NoBtf`] when a field is missing.
    pub fn from_btf(bytes: &[u8]) -> Result<Self, KernelError> {
        let thread_pointer: &[&str] = if cfg!(target_arch = "aarch64") {
            &["thread", "uw", "tp_value"]
        } else {
            &["thread", "fsbase"]
        };
        let btf = parse_vmlinux(bytes)?;
        let offset = |name: &str, path: &[&str]| {
            btf.offset(name, path).ok_or_else(|| {
                KernelError::NoBtf(format!(
                    "{VMLINUX} does not describe {name}.{}",
                    path.join(".")
                ))
            })
        };
        Ok(Self {
            task_pid: offset("task_struct", &["pid"])?,
            task_tgid: offset("task_struct", &["tgid"])?,
            task_signal: offset("task_struct", &["signal"])?,
            signal_live: offset("signal_struct", &["live"])?,
            task_thread_pointer: offset("task_struct", thread_pointer)?,
            ids: IdOffsets::from_btf(&btf),
            saved_registers: SavedRegisters::from_btf(&btf),
            mappings: MappingOffsets::from_btf(&btf),
        })
    }
}

const MAGIC: u16 = 0xeb9f;
const HEADER_LEN: usize = 24;
const TYPE_LEN: usize = 12;
const MEMBER_LEN: usize = 12;
const ENUMERATOR_LEN: usize = 8;

const KIND_INT: u32 = 1;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_DECL_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;

/// Structures nested in each other, at most.
const MAX_DEPTH: u32 = 16;

/// A BTF file: its types, by offset, and its strings.
struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// Offset of type `n + 1` in `types`.
    index: Vec<u32>,
}

/// The fixed part of a type.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    len: usize,
    /// Members have bit sizes in the high byte of their offsets.
    bitfields: bool,
    /// Size, or the type referred to.
    size_or_type: u32,
}

impl<'a> Btf<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let magic = u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?);
        if magic != MAGIC || bytes.len() < HEADER_LEN {
            return None;
        }
        let header_len = word(bytes, 4)? as usize;
        let section = |at: usize| -> Option<&'a [u8]> {
            let start = header_len.checked_add(word(bytes, at)? as usize)?;
            bytes.get(start..start.checked_add(word(bytes, at + 4)? as usize)?)
        };
        let types = section(8)?;
        let strings = section(16)?;
        let mut index = Vec::with_capacity(types.len() / 32);
        let mut at = 0;
        while at < types.len() {
            index.push(u32::try_from(at).ok()?);
            let found = Type::at(types, at)?;
            at = at.checked_add(TYPE_LEN)?.checked_add(found.rest_len())?;
        }
        Some(Self {
            types,
            strings,
            index,
        })
    }

    /// Offset of the member that `path` leads to, through structures and
    /// unions, named or not.
    fn offset(&self, name: &str, path: &[&str]) -> Option<u32> {
        let (mut at, _) = self.named(KIND_STRUCT, name)?;
        let mut total: u32 = 0;
        for (step, member) in path.iter().enumerate() {
            let (offset, type_id) = self.member(at, member, 0)?;
            total = total.checked_add(offset)?;
            if step + 1 < path.len() {
                at = self.resolve(type_id)?;
            }
        }
        Some(total)
    }

    /// Size of a structure, bytes.
    fn size(&self, name: &str) -> Option<u32> {
        let (_, found) = self.named(KIND_STRUCT, name)?;
        Some(found.size_or_type)
    }

    fn has_function(&self, name: &str) -> bool {
        self.named(KIND_FUNC, name).is_some()
    }

    /// Whether an enumeration has a value of that name.
    fn has_enumerator(&self, name: &str, wanted: &str) -> bool {
        let Some((at, found)) = self.named(KIND_ENUM, name) else {
            return false;
        };
        (0..found.len).any(|value| {
            word(self.types, at + TYPE_LEN + value * ENUMERATOR_LEN)
                .is_some_and(|name| self.string(name) == Some(wanted.as_bytes()))
        })
    }

    /// A type by its kind and name, and where it is.
    fn named(&self, kind: u32, name: &str) -> Option<(usize, Type)> {
        self.index.iter().find_map(|&at| {
            let at = at as usize;
            let found = Type::at(self.types, at)?;
            (found.kind == kind && self.string(found.name) == Some(name.as_bytes()))
                .then_some((at, found))
        })
    }

    /// Offset and type of a member of the structure at `at`.
    fn member(&self, at: usize, wanted: &str, depth: u32) -> Option<(u32, u32)> {
        let found = Type::at(self.types, at)?;
        if depth > MAX_DEPTH || !matches!(found.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        for member in 0..found.len {
            let at = at + TYPE_LEN + member * MEMBER_LEN;
            let name = word(self.types, at)?;
            let type_id = word(self.types, at + 4)?;
            let mut bits = word(self.types, at + 8)?;
            if found.bitfields {
                bits &= 0x00ff_ffff;
            }
            if name != 0 && self.string(name)? == wanted.as_bytes() {
                return Some((bits / 8, type_id));
            }
            if name == 0
                && let Some((offset, type_id)) = self
                    .resolve(type_id)
                    .and_then(|inner| self.member(inner, wanted, depth + 1))
            {
                return Some((bits / 8 + offset, type_id));
            }
        }
        None
    }

    /// Offset of a type behind typedefs and qualifiers.
    fn resolve(&self, mut type_id: u32) -> Option<usize> {
        for _ in 0..MAX_DEPTH {
            let at = *self.index.get((type_id as usize).checked_sub(1)?)? as usize;
            let found = Type::at(self.types, at)?;
            match found.kind {
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                    type_id = found.size_or_type;
                }
                _ => return Some(at),
            }
        }
        None
    }

    fn string(&self, at: u32) -> Option<&'a [u8]> {
        self.strings
            .get(at as usize..)?
            .split(|&byte| byte == 0)
            .next()
    }
}

impl Type {
    fn at(types: &[u8], at: usize) -> Option<Self> {
        let info = word(types, at + 4)?;
        Some(Self {
            name: word(types, at)?,
            kind: info >> 24 & 0x1f,
            len: (info & 0xffff) as usize,
            bitfields: info >> 31 != 0,
            size_or_type: word(types, at + 8)?,
        })
    }

    /// Bytes behind the fixed part.
    const fn rest_len(&self) -> usize {
        match self.kind {
            KIND_INT | KIND_VAR | KIND_DECL_TAG => 4,
            KIND_ARRAY => 12,
            KIND_STRUCT | KIND_UNION | KIND_DATASEC | KIND_ENUM64 => 12 * self.len,
            KIND_ENUM | KIND_FUNC_PROTO => 8 * self.len,
            _ => 0,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A BTF file with `struct outer { int a; struct { struct inner b; }; }`.
    fn sample() -> Vec<u8> {
        let strings = b"\0outer\0a\0inner\0b\0c\0";
        let mut types: Vec<u32> = Vec::new();
        types.extend([0, KIND_INT << 24, 4, 32]); // 1: int
        types.extend([9, KIND_STRUCT << 24 | 2, 8, 15, 1, 0, 17, 1, 32]); // 2: inner {b, c}
        types.extend([0, KIND_TYPEDEF << 24, 2]); // 3: typedef of inner
        types.extend([0, KIND_STRUCT << 24 | 1, 8, 15, 3, 64]); // 4: anonymous {b: inner at 8}
        types.extend([1, KIND_STRUCT << 24 | 2, 24, 7, 1, 0, 0, 4, 32]); // 5: outer
        file(&types, strings)
    }

    fn file(types: &[u32], strings: &[u8]) -> Vec<u8> {
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut file = Vec::new();
        file.extend(MAGIC.to_le_bytes());
        file.extend([1, 0]);
        for field in [HEADER_LEN, 0, types.len(), types.len(), strings.len()] {
            file.extend((field as u32).to_le_bytes());
        }
        file.extend(types);
        file.extend(strings);
        file
    }

    #[test]
    fn members_are_found_through_anonymous_structures_and_typedefs() {
        let file = sample();
        let btf = Btf::parse(&file).unwrap();
        assert_eq!(btf.offset("outer", &["a"]), Some(0));
        assert_eq!(btf.offset("outer", &["b"]), Some(12));
        assert_eq!(btf.offset("outer", &["b", "c"]), Some(16));
        assert_eq!(btf.offset("outer", &["missing"]), None);
        assert_eq!(btf.offset("missing", &["a"]), None);
    }

    /// A BTF file with what the ids of a task are found by; `nr` and `ns` are
    /// where `struct upid` has them.
    fn with_ids(nr: u32, ns: u32) -> Vec<u8> {
        let names = ["upid", "nr", "ns", "pid", "level", "numbers", "task_struct"];
        let names = [&names[..], &["thread_pid", "group_leader"]].concat();
        let mut strings = vec![0];
        let mut at = HashMap::new();
        for name in names {
            at.insert(name, strings.len() as u32);
            strings.extend(name.bytes().chain([0]));
        }
        let mut types: Vec<u32> = vec![0, KIND_INT << 24, 4, 32];
        for (name, members) in [
            ("upid", [("nr", nr), ("ns", ns)]),
            ("pid", [("level", 4), ("numbers", 96)]),
            ("task_struct", [("thread_pid", 40), ("group_leader", 48)]),
        ] {
            types.extend([at[name], KIND_STRUCT << 24 | 2, 64]);
            for (member, offset) in members {
                types.extend([at[member], 1, offset * 8]);
            }
        }
        file(&types, &strings)
    }

    #[test]
    fn ids_are_found_only_where_the_kernel_half_looks_for_them() {
        let ids = |nr, ns| IdOffsets::from_btf(&Btf::parse(&with_ids(nr, ns)).unwrap());
        let offsets = IdOffsets {
            task_leader: 48,
            task_thread_pid: 40,
            pid_level: 4,
            pid_numbers: 96,
        };
        assert_eq!(ids(0, 8), Some(offsets));
        assert_eq!(ids(8, 0), None);
        assert_eq!(IdOffsets::from_btf(&Btf::parse(&sample()).unwrap()), None);
    }

    #[test]
    fn what_a_kernel_can_do_is_read() {
        let strings = b"\0bpf_func_id\0BPF_FUNC_loop\0bpf_iter_task\0pt_regs\0task_struct\0stack\0";
        let at = |name: &str| {
            let text = String::from_utf8_lossy(strings);
            text.find(&format!("\0{name}\0")).unwrap() as u32 + 1
        };
        let mut types: Vec<u32> = vec![at("bpf_func_id"), KIND_ENUM << 24 | 1, 4];
        types.extend([at("BPF_FUNC_loop"), 181]);
        types.extend([at("bpf_iter_task"), KIND_FUNC << 24, 0]);
        types.extend([at("pt_regs"), KIND_STRUCT << 24, 168]);
        types.extend([at("task_struct"), KIND_STRUCT << 24 | 1, 64]);
        types.extend([at("stack"), 0, 24 * 8]);
        let file = file(&types, strings);
        let btf = Btf::parse(&file).unwrap();
        let wanted = ["BPF_FUNC_loop", "BPF_FUNC_task_pt_regs"];
        let abilities = KernelAbilities::from_btf(&btf, &wanted);
        assert!(abilities.iterates_tasks);
        assert!(abilities.has_helper("BPF_FUNC_loop"));
        assert!(!abilities.has_helper("BPF_FUNC_task_pt_regs"));
        let saved = SavedRegisters::from_btf(&btf).unwrap();
        assert_eq!(saved.task_stack, 24);
        assert_eq!((saved.in_stack + 168) % 4096, 0);

        let none = sample();
        let none = Btf::parse(&none).unwrap();
        assert!(!KernelAbilities::from_btf(&none, &wanted).iterates_tasks);
        assert_eq!(SavedRegisters::from_btf(&none), None);
    }

    #[test]
    fn a_cut_or_damaged_file_gives_an_error() {
        let file = sample();
        for len in 0..file.len() {
            assert!(matches!(
                KernelOffsets::from_btf(&file[..len]),
                Err(KernelError::NoBtf(_))
            ));
        }
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 0xff;
            drop(KernelOffsets::from_btf(&damaged));
        }
    }
}
