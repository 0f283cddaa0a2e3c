//! x86-64 code.

use iced_x86::Decoder;
use iced_x86::DecoderOptions;
use iced_x86::FlowControl;
use iced_x86::Instruction;
use iced_x86::Mnemonic;
use iced_x86::OpKind;
use iced_x86::Register;

use crate::targets::elf::TlsKind;
use crate::targets::elf::TlsRelocation;

use super::instructions::Branch;
use super::instructions::Kind;
use super::instructions::ThreadLocal;

fn decode(code: &[u8], address: u64) -> impl Iterator<Item = Instruction> + '_ {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    std::iter::from_fn(move || decoder.can_decode().then(|| decoder.decode()))
}

pub(super) fn branches(code: &[u8], address: u64) -> Vec<Branch> {
    decode(code, address)
        .filter_map(|instruction| {
            let kind = match instruction.flow_control() {
                FlowControl::Call => Kind::Call,
                FlowControl::UnconditionalBranch => Kind::Jump,
                FlowControl::ConditionalBranch => Kind::Conditional,
                _ => return None,
            };
            (instruction.op0_kind() == OpKind::NearBranch64).then(|| Branch {
                next: instruction.next_ip(),
                to: instruction.near_branch_target(),
                kind,
            })
        })
        .collect()
}

pub(super) fn return_addresses(code: &[u8], address: u64) -> Vec<u64> {
    decode(code, address)
        .filter(|instruction| {
            matches!(
                instruction.flow_control(),
                FlowControl::Call | FlowControl::IndirectCall
            )
        })
        .map(|instruction| instruction.next_ip())
        .collect()
}

pub(super) fn references(code: &[u8], address: u64) -> Vec<u64> {
    decode(code, address)
        .filter(Instruction::is_ip_rel_memory_operand)
        .map(|instruction| instruction.ip_rel_memory_address())
        .collect()
}

/// A memory operand relative to a register.
fn displacement_from(instruction: &Instruction, base: Register) -> Option<i64> {
    let plain = instruction.memory_base() == base
        && instruction.memory_index() == Register::None
        && has_memory(instruction);
    plain.then(|| instruction.memory_displacement64().cast_signed())
}

fn has_memory(instruction: &Instruction) -> bool {
    (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory)
}

pub(super) fn thread_locals(
    code: &[u8],
    address: u64,
    relocations: &[TlsRelocation],
) -> Vec<ThreadLocal> {
    let mut found = Vec::new();
    // A slot that was loaded for a call, and one whose call has come back: the
    // address of the variable, or of its module's block, is in rax.
    let mut asked = None;
    let mut answered = None;
    // A register that holds the thread pointer itself, and one that holds a
    // distance from it.
    let mut thread_pointer = Register::None;
    let mut distance = (Register::None, 0);
    for instruction in decode(code, address) {
        if instruction.is_ip_rel_memory_operand() {
            let slot = instruction.ip_rel_memory_address();
            let Some(index) = relocations.iter().position(|it| it.slot == slot) else {
                continue;
            };
            match relocations.get(index).map(|it| it.kind) {
                Some(TlsKind::Module | TlsKind::Descriptor) => asked = Some(index),
                Some(TlsKind::ThreadOffset) => found.push(ThreadLocal::Relocation {
                    index,
                    displacement: 0,
                }),
                _ => {}
            }
            continue;
        }
        match instruction.flow_control() {
            FlowControl::Call | FlowControl::IndirectCall => {
                answered = None;
                if let Some(index) = asked.take() {
                    match relocations.get(index).map(|it| it.kind) {
                        Some(TlsKind::Module) => answered = Some(index),
                        _ => found.push(ThreadLocal::Relocation {
                            index,
                            displacement: 0,
                        }),
                    }
                }
                continue;
            }
            FlowControl::Next => {}
            _ => {
                answered = None;
                continue;
            }
        }
        if let Some(index) = answered
            && let Some(displacement) = displacement_from(&instruction, Register::RAX)
        {
            found.push(ThreadLocal::Relocation {
                index,
                displacement,
            });
            answered = None;
            continue;
        }
        if instruction.mnemonic() == Mnemonic::Mov
            && instruction.op1_kind() == OpKind::Immediate32to64
        {
            let value = instruction.immediate32to64();
            distance = (instruction.op0_register(), value);
            continue;
        }
        if has_memory(&instruction) && instruction.memory_segment() == Register::FS {
            let base = instruction.memory_base();
            let displacement = instruction.memory_displacement64().cast_signed();
            // What the linker makes of an access by way of the global offset
            // table.
            if base != Register::None && base == distance.0 && displacement == 0 && distance.1 < 0 {
                found.push(ThreadLocal::ThreadPointer(distance.1));
                continue;
            }
            if base == Register::None && displacement == 0 {
                thread_pointer = instruction.op0_register();
            } else if base == Register::None && displacement < 0 {
                // Above the thread pointer are the C library's own fields.
                found.push(ThreadLocal::ThreadPointer(displacement));
            }
            continue;
        }
        if thread_pointer != Register::None
            && let Some(displacement) = displacement_from(&instruction, thread_pointer)
            && displacement < 0
        {
            found.push(ThreadLocal::ThreadPointer(displacement));
            thread_pointer = Register::None;
        }
    }
    found
}

pub(super) fn possible_branches(code: &[u8], address: u64, targets: &[u64]) -> Vec<u64> {
    // Whoever made the file chose the address: it may be the end of memory.
    let places = (0_u64..).map(|offset| address.wrapping_add(offset));
    code.windows(5)
        .zip(places)
        .filter_map(|(bytes, at)| match *bytes {
            // call rel32, jmp rel32
            [0xe8 | 0xe9, a, b, c, d] => {
                let offset = i32::from_le_bytes([a, b, c, d]);
                let to = at.wrapping_add(5).wrapping_add_signed(offset.into());
                targets.binary_search(&to).is_ok().then_some(at)
            }
            _ => None,
        })
        .collect()
}

pub(super) fn stub_slot(code: &[u8], address: u64) -> Option<u64> {
    decode(code, address)
        .take(3)
        .find(|instruction| {
            instruction.flow_control() == FlowControl::IndirectBranch
                && instruction.is_ip_rel_memory_operand()
        })
        .map(|instruction| instruction.ip_rel_memory_address())
}
