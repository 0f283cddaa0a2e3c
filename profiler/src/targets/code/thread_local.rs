//! Which thread-local variable a function uses.

use object::read::ReadRef;

use rbprof_common::process::Range;

use crate::targets::elf::Elf;
use crate::targets::elf::TlsKind;
use crate::targets::elf::TlsRelocation;
use crate::targets::tls;

use super::Code;
use super::instructions;
use super::instructions::ThreadLocal;

/// The offset, in the file's thread-local block, of the first thread-local
/// variable that a function uses, or one that it leaves that to.
pub(super) fn used_by<'data, R: ReadRef<'data>>(
    code: &Code<'_, 'data, R>,
    function: Range,
) -> Option<u64> {
    let elf = code.elf;
    let relocations = tls::relocations(elf);
    code.followed(function).into_iter().find_map(|function| {
        let bytes = code.bytes(function);
        let used = instructions::thread_locals(elf.machine(), bytes, function.start, &relocations);
        used.first()
            .and_then(|used| block_offset(elf, &relocations, *used))
    })
}

/// The offset in the block of the variable that is reached so.
fn block_offset<'data, R: ReadRef<'data>>(
    elf: &Elf<'data, R>,
    relocations: &[TlsRelocation],
    used: ThreadLocal,
) -> Option<u64> {
    let segment = elf.tls()?;
    let offset = match used {
        ThreadLocal::ThreadPointer(distance) => {
            let block = tls::in_main_program(elf.machine(), segment, 0)?;
            distance.wrapping_sub(block).cast_unsigned()
        }
        ThreadLocal::Relocation {
            index,
            displacement,
        } => {
            let relocation = relocations.get(index)?;
            let variable = match (&relocation.symbol, relocation.kind) {
                (Some(name), _) => {
                    let symbol = elf.dynamic_symbol(name).ok().flatten()?;
                    symbol.value.wrapping_add_signed(relocation.addend)
                }
                // The second word of the pair is the offset, and the linker
                // writes it where no symbol must be looked up.
                (None, TlsKind::Module) => elf.word64(relocation.slot.wrapping_add(8)).ok()?,
                (None, _) => relocation.addend.cast_unsigned(),
            };
            variable.wrapping_add_signed(displacement)
        }
    };
    (offset < segment.memory_size).then_some(offset)
}
