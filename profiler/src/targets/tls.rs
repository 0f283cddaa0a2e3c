//! Where a thread-local variable is, from the thread pointer.
//!
//! A module's thread-local block is reached through the dynamic thread vector
//! (DTV) of the thread, whose form depends on the C library. Blocks of what was
//! loaded at start-up lie at one constant distance from the thread pointer in
//! every thread, which saves two reads a sample: [`fold`] takes that way only
//! when the live process proves it.

use std::fmt;

use object::read::ReadRef;

use rbprof_common::process::DtvLayout;

use crate::memory::TargetMemory;

use super::ThreadPointer;
use super::elf::Elf;
use super::elf::Machine;
use super::elf::TlsKind;
use super::elf::TlsRelocation;
use super::elf::TlsSegment;
use super::mappings::Mapping;

/// A C library, as far as threads are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CLibrary {
    /// The GNU C library.
    Glibc,
    /// musl.
    Musl,
}

impl fmt::Display for CLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Glibc => "glibc",
            Self::Musl => "musl",
        })
    }
}

impl CLibrary {
    /// Which one a process uses, by its loader: musl's is the library itself.
    ///
    /// Its file may be called `libc.so`, with the loader's name a link to it;
    /// glibc's file of that name is text for the linker and never mapped.
    #[must_use]
    pub fn of(mappings: &[Mapping]) -> Self {
        let is_musl = mappings.iter().any(|mapping| {
            let name = mapping.path.rsplit(|&byte| byte == b'/').next();
            name.is_some_and(|name| {
                name == b"libc.so"
                    || name.starts_with(b"ld-musl-")
                    || name.starts_with(b"libc.musl-")
            })
        });
        if is_musl { Self::Musl } else { Self::Glibc }
    }

    /// How it lays out the dynamic thread vector.
    #[must_use]
    pub fn dtv(self, machine: Machine) -> Option<DtvLayout> {
        match (self, machine) {
            (Self::Glibc, Machine::X86_64) => Some(DtvLayout::GLIBC_X86_64),
            (Self::Glibc, Machine::Aarch64) => Some(DtvLayout::GLIBC_AARCH64),
            (Self::Musl, Machine::X86_64) => Some(DtvLayout::MUSL_X86_64),
            (Self::Musl, Machine::Aarch64) => Some(DtvLayout::MUSL_AARCH64),
            (_, Machine::Other(_)) => None,
        }
    }
}

/// How to reach a thread-local variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// At this distance from the thread pointer.
    ThreadOffset(i64),
    /// The same, as a descriptor says whose resolver only hands its argument on.
    Descriptor(i64),
    /// At this offset in the block of this module.
    Block {
        /// The module's id.
        module: u64,
        /// The offset in its block.
        offset: u64,
    },
    /// The loader has not written the module's id yet.
    NotLoaded,
    /// The image says nothing from which the module's id could be known.
    Unknown,
}

/// How to reach the variable `name`, at `offset` in the thread-local block of a
/// shared library for `machine` that was loaded with `bias`.
pub fn access<M: TargetMemory>(
    machine: Machine,
    relocations: &[TlsRelocation],
    bias: u64,
    name: &[u8],
    offset: u64,
    memory: &M,
) -> Access {
    let named = |relocation: &&TlsRelocation| relocation.symbol.as_deref() == Some(name);
    let of_kind = |kind: TlsKind| relocations.iter().filter(move |it| it.kind == kind);
    let slot = |relocation: &TlsRelocation| memory.word(bias.wrapping_add(relocation.slot)).ok();

    // A slot of the variable's own, or one of the module's: both hold the id of
    // the module that the variable is in. A named one could be another
    // module's only if a second Ruby came before this one.
    let module = of_kind(TlsKind::Module)
        .find(named)
        .or_else(|| of_kind(TlsKind::Module).find(|it| it.symbol.is_none()));
    if let Some(relocation) = module {
        return match slot(relocation) {
            None | Some(0) => Access::NotLoaded,
            Some(module) => Access::Block { module, offset },
        };
    }
    if let Some(relocation) = of_kind(TlsKind::ThreadOffset).find(named) {
        return match slot(relocation) {
            None | Some(0) => Access::NotLoaded,
            Some(offset) => Access::ThreadOffset(offset.cast_signed()),
        };
    }
    // A descriptor is a resolver and its argument. Several of the block's must
    // agree where it is.
    let mut distances = of_kind(TlsKind::Descriptor).filter_map(|relocation| {
        let in_block = match &relocation.symbol {
            None => relocation.addend,
            Some(_) if named(&relocation) => offset.cast_signed().wrapping_add(relocation.addend),
            // Which of the block's it is, only its symbol tells.
            Some(_) => return None,
        };
        let descriptor = bias.wrapping_add(relocation.slot);
        let resolver = memory.word(descriptor).ok()?;
        let argument = memory.word(descriptor.wrapping_add(8)).ok()?;
        hands_argument_on(machine, resolver, memory)
            .then(|| argument.cast_signed().wrapping_sub(in_block))
    });
    match distances.next() {
        Some(block) if distances.all(|other| other == block) => {
            Access::Descriptor(block.wrapping_add_unsigned(offset))
        }
        _ => Access::Unknown,
    }
}

/// Whether the resolver of a descriptor is the one for blocks in the static area,
/// whose argument is the distance from the thread pointer: it returns the
/// argument, and does nothing else. (`_dl_tlsdesc_return` of glibc,
/// `__tlsdesc_static` of musl.) The others' argument is a pointer, or the
/// relocation that has yet to be done.
fn hands_argument_on<M: TargetMemory>(machine: Machine, resolver: u64, memory: &M) -> bool {
    let mut code = [0; 16];
    for (at, bytes) in (0..).step_by(8).zip(code.chunks_exact_mut(8)) {
        match memory.word(resolver.wrapping_add(at)) {
            Ok(word) => bytes.copy_from_slice(&word.to_le_bytes()),
            Err(_) => return false,
        }
    }
    // A place that may be jumped to, where such are marked; load; return.
    let (mark, body): (&[u8], &[u8]) = match machine {
        // endbr64; mov 8(%rax),%rax; ret
        Machine::X86_64 => (&[0xf3, 0x0f, 0x1e, 0xfa], &[0x48, 0x8b, 0x40, 0x08, 0xc3]),
        // bti c; ldr x0, [x0, #8]; ret
        Machine::Aarch64 => (
            &[0x5f, 0x24, 0x03, 0xd5],
            &[0x00, 0x04, 0x40, 0xf9, 0xc0, 0x03, 0x5f, 0xd6],
        ),
        Machine::Other(_) => return false,
    };
    code.strip_prefix(mark).unwrap_or(&code).starts_with(body)
}

/// The distance from the thread pointer to the variable at `offset` in the
/// block of the main program: the linker itself fixes it.
///
/// x86-64 (the block ends at the thread pointer): `offset - size - pad`, where
/// `pad` keeps the block aligned as its address in the file is. arm64 (the
/// block follows two words at the thread pointer): `16 + pad + offset`.
#[must_use]
pub fn in_main_program(machine: Machine, tls: TlsSegment, offset: u64) -> Option<i64> {
    let mask = tls.align.checked_sub(1)?;
    if tls.align & mask != 0 {
        return None;
    }
    let distance = match machine {
        Machine::X86_64 => {
            let before = tls.address.wrapping_add(tls.memory_size).wrapping_neg() & mask;
            offset.wrapping_sub(tls.memory_size).wrapping_sub(before)
        }
        Machine::Aarch64 => {
            let before = tls.address.wrapping_sub(16) & mask;
            offset.wrapping_add(16).wrapping_add(before)
        }
        Machine::Other(_) => return None,
    };
    Some(distance.cast_signed())
}

/// Farthest from the thread pointer that a block in the static area is believed
/// to be. Real areas are a few KiB; a block on the heap is much farther away.
const MAX_STATIC_DISTANCE: u64 = 16 << 20;

/// The constant distance from the thread pointer to the block of `module`, if
/// the threads prove that there is one.
///
/// glibc tells it: the second word of the vector's entry is the pointer to
/// free, and null for blocks in the static area. (Before 2.25 it was a flag, set
/// for static blocks: then no proof is found, and the vector is used.) All
/// threads must agree, and the block must be on the side of the thread pointer
/// where the static area is. musl does not tell, so there the vector is used.
pub fn fold<M: TargetMemory>(
    library: CLibrary,
    machine: Machine,
    module: u64,
    threads: &[ThreadPointer],
    memory: &M,
) -> Option<i64> {
    if library != CLibrary::Glibc {
        return None;
    }
    let layout = library.dtv(machine)?;
    let mut distance = None;
    for thread in threads {
        let Some((block, to_free)) = entry(layout, module, thread.value, memory) else {
            continue;
        };
        if block == 0 || block == u64::MAX {
            // Not touched by this thread: static blocks are there from the start.
            return None;
        }
        let here = block.wrapping_sub(thread.value).cast_signed();
        let side = match machine {
            Machine::X86_64 => here < 0,
            Machine::Aarch64 => here > 0,
            Machine::Other(_) => false,
        };
        if to_free != 0 || !side || here.unsigned_abs() > MAX_STATIC_DISTANCE {
            return None;
        }
        if *distance.get_or_insert(here) != here {
            return None;
        }
    }
    distance
}

/// The two words of a module's entry in a thread's vector (glibc), if the
/// vector reaches that far.
fn entry<M: TargetMemory>(
    layout: DtvLayout,
    module: u64,
    thread_pointer: u64,
    memory: &M,
) -> Option<(u64, u64)> {
    if thread_pointer == 0 {
        return None;
    }
    let size = u64::from(layout.entry_size);
    let vector = memory
        .word(thread_pointer.wrapping_add_signed(layout.pointer_offset.into()))
        .ok()?;
    // The entry before the first one counts them.
    let length = memory.word(vector.wrapping_sub(size)).ok()?;
    if module > length {
        return None;
    }
    let slot = vector.wrapping_add(module.wrapping_mul(size));
    Some((
        memory.word(slot).ok()?,
        memory.word(slot.wrapping_add(8)).ok()?,
    ))
}

/// Highest module id tried by [`modules`].
const MAX_MODULES: u64 = 1024;

/// The ids of all modules whose blocks the vectors of the threads have, for
/// trying them out: arm64's descriptors do not tell a module's id.
pub fn modules<M: TargetMemory>(
    layout: DtvLayout,
    library: CLibrary,
    threads: &[ThreadPointer],
    memory: &M,
) -> std::ops::RangeInclusive<u64> {
    let length = threads
        .iter()
        .filter(|thread| thread.value != 0)
        .filter_map(|thread| {
            let vector = memory
                .word(
                    thread
                        .value
                        .wrapping_add_signed(layout.pointer_offset.into()),
                )
                .ok()?;
            let length = match library {
                CLibrary::Glibc => vector.wrapping_sub(layout.entry_size.into()),
                // musl counts in the first entry.
                CLibrary::Musl => vector,
            };
            memory.word(length).ok()
        })
        .max()
        .unwrap_or(0);
    1..=length.min(MAX_MODULES)
}

/// The thread-local relocations of an image; none when they cannot be read.
pub fn relocations<'data, R: ReadRef<'data>>(elf: &Elf<'data, R>) -> Vec<TlsRelocation> {
    elf.tls_relocations().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::tests::Words;

    #[test]
    fn the_main_program_s_block_is_where_linkers_put_it() {
        let tls = |address, memory_size, align| TlsSegment {
            address,
            memory_size,
            align,
        };
        let x86 = |tls, offset| in_main_program(Machine::X86_64, tls, offset);
        let arm = |tls, offset| in_main_program(Machine::Aarch64, tls, offset);
        // Ends at the thread pointer; rounded up to the alignment.
        assert_eq!(x86(tls(0x1000, 0x10, 8), 8), Some(-8));
        assert_eq!(x86(tls(0x1000, 0x14, 16), 8), Some(8 - 0x20));
        assert_eq!(x86(tls(0x1008, 0x10, 16), 0), Some(-0x18));
        assert_eq!(arm(tls(0x1000, 0x10, 8), 8), Some(24));
        assert_eq!(arm(tls(0x1000, 0x10, 64), 0), Some(64));
        // Alignments that are none.
        assert_eq!(x86(tls(0, 8, 0), 0), None);
        assert_eq!(x86(tls(0, 8, 3), 0), None);
    }

    #[test]
    fn musl_is_told_by_its_loader() {
        let of = |path: &str| {
            let line = format!("1000-2000 r-xp 00000000 00:01 5 {path}\n");
            CLibrary::of(&Mapping::parse_all(line.as_bytes()))
        };
        assert_eq!(of("/lib/ld-musl-x86_64.so.1"), CLibrary::Musl);
        assert_eq!(of("/lib/libc.musl-aarch64.so.1"), CLibrary::Musl);
        assert_eq!(of("/usr/lib/x86_64-linux-musl/libc.so"), CLibrary::Musl);
        assert_eq!(of("/opt/ld-musl-x/libc.so.6"), CLibrary::Glibc);
    }

    #[test]
    fn a_variable_is_reached_by_its_own_relocation_or_its_module_s() {
        let relocation = |kind, slot, symbol: Option<&[u8]>| TlsRelocation {
            kind,
            slot,
            symbol: symbol.map(<[u8]>::to_vec),
            addend: 0,
        };
        let mut memory = Words(
            [
                (0x1010, 3),
                (0x1020, 5),
                (0x1030, 0),
                (0x1040, (-16_i64).cast_unsigned()),
            ]
            .into(),
        );
        let own = relocation(TlsKind::Module, 0x10, Some(b"v"));
        let module = relocation(TlsKind::Module, 0x20, None);
        let other = relocation(TlsKind::Module, 0x30, Some(b"w"));
        let offset = relocation(TlsKind::ThreadOffset, 0x40, Some(b"v"));
        let descriptor = relocation(TlsKind::Descriptor, 0x50, Some(b"v"));
        let reach = |relocations: &[&TlsRelocation], memory: &Words| {
            let relocations: Vec<_> = relocations.iter().copied().cloned().collect();
            access(Machine::X86_64, &relocations, 0x1000, b"v", 8, memory)
        };
        let block = |module| Access::Block { module, offset: 8 };
        assert_eq!(reach(&[&other, &module, &own], &memory), block(3));
        assert_eq!(reach(&[&other, &module], &memory), block(5));
        assert_eq!(
            reach(&[&other, &offset], &memory),
            Access::ThreadOffset(-16)
        );
        assert_eq!(reach(&[&other, &descriptor], &memory), Access::Unknown);
        memory.0.insert(0x1010, 0);
        assert_eq!(reach(&[&own], &memory), Access::NotLoaded);
    }

    #[test]
    fn a_descriptor_is_believed_if_its_resolver_only_hands_its_argument_on() {
        const RESOLVER: u64 = 0x9000;
        let word = |code: &[u8]| u64::from_le_bytes(code.try_into().unwrap());
        let descriptor = |slot, symbol: Option<&[u8]>, addend| TlsRelocation {
            kind: TlsKind::Descriptor,
            slot,
            symbol: symbol.map(<[u8]>::to_vec),
            addend,
        };
        let of_own = [descriptor(0x10, Some(b"v"), 0)];
        let of_block = [descriptor(0x10, None, 16), descriptor(0x20, None, 24)];
        let of_others = [descriptor(0x10, Some(b"w"), 0)];
        let arm_load = [0x00, 0x04, 0x40, 0xf9, 0xc0, 0x03, 0x5f, 0xd6];
        let mut memory = Words(
            [
                (0x1010, RESOLVER),
                (0x1018, 0x70),
                (0x1020, RESOLVER),
                (0x1028, 0x78),
                (RESOLVER, word(&arm_load)),
                (RESOLVER + 8, 0),
            ]
            .into(),
        );
        let reach = |machine, relocations: &[TlsRelocation], memory: &Words| {
            access(machine, relocations, 0x1000, b"v", 8, memory)
        };
        let arm = |relocations: &[TlsRelocation], memory: &Words| {
            reach(Machine::Aarch64, relocations, memory)
        };
        assert_eq!(arm(&of_own, &memory), Access::Descriptor(0x70));
        assert_eq!(arm(&of_block, &memory), Access::Descriptor(0x68));
        assert_eq!(arm(&of_others, &memory), Access::Unknown);
        // Two that do not agree where the block is.
        memory.0.insert(0x1028, 0x70);
        assert_eq!(arm(&of_block, &memory), Access::Unknown);
        // With the mark for jumps; then another instruction.
        let marked = [0x5f, 0x24, 0x03, 0xd5, 0x00, 0x04, 0x40, 0xf9];
        memory.0.insert(RESOLVER, word(&marked));
        assert_eq!(arm(&of_own, &memory), Access::Unknown);
        memory.0.insert(RESOLVER + 8, 0xd65f_03c0);
        assert_eq!(arm(&of_own, &memory), Access::Descriptor(0x70));
        memory.0.insert(RESOLVER, word(&marked) ^ 1 << 40);
        assert_eq!(arm(&of_own, &memory), Access::Unknown);
        // x86-64's.
        let x86_load = [0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x8b, 0x40, 0x08];
        memory.0.insert(RESOLVER, word(&x86_load));
        memory.0.insert(RESOLVER + 8, 0xc3);
        let x86 = |memory: &Words| reach(Machine::X86_64, &of_own, memory);
        assert_eq!(x86(&memory), Access::Descriptor(0x70));
        memory.0.remove(&(RESOLVER + 8));
        assert_eq!(x86(&memory), Access::Unknown);
    }

    #[test]
    fn only_a_proven_static_block_is_folded() {
        // Two threads with their vectors; module 1 is static, module 2 is not,
        // module 3 lies differently in each.
        let mut memory = Words::default();
        let threads = [0x10_0000, 0x20_0000].map(|value| ThreadPointer { tid: 1, value });
        for (index, thread) in (0_u64..).zip(threads) {
            let vector = thread.value + 0x1000;
            memory.0.extend([
                (thread.value + 8, vector),
                (vector - 16, 3),
                (vector + 16, thread.value - 0x40),
                (vector + 24, 0),
                (vector + 32, thread.value - 0x80),
                (vector + 40, thread.value - 0x80),
                (vector + 48, thread.value - 0x80 - 16 * index),
                (vector + 56, 0),
            ]);
        }
        let of = |library, module, threads: &[ThreadPointer], memory: &Words| {
            fold(library, Machine::X86_64, module, threads, memory)
        };
        let glibc = CLibrary::Glibc;
        assert_eq!(of(glibc, 1, &threads, &memory), Some(-0x40));
        assert_eq!(of(CLibrary::Musl, 1, &threads, &memory), None);
        assert_eq!(of(glibc, 2, &threads, &memory), None);
        assert_eq!(of(glibc, 3, &threads, &memory), None);
        assert_eq!(of(glibc, 3, &threads[..1], &memory), Some(-0x80));
        // Beyond the end of the vectors, and above the thread pointer.
        assert_eq!(of(glibc, 4, &threads, &memory), None);
        memory.0.insert(0x10_1010, 0x10_0040);
        assert_eq!(of(glibc, 1, &threads[..1], &memory), None);
    }
}
