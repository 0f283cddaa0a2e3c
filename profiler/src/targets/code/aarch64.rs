//! arm64 code.

use yaxpeax_arch::Decoder as _;
use yaxpeax_arch::U8Reader;
use yaxpeax_arm::armv8::a64::InstDecoder;
use yaxpeax_arm::armv8::a64::Instruction;
use yaxpeax_arm::armv8::a64::Opcode;
use yaxpeax_arm::armv8::a64::Operand;
use yaxpeax_arm::armv8::a64::SizeCode;

use crate::targets::elf::TlsKind;
use crate::targets::elf::TlsRelocation;

use super::instructions::Branch;
use super::instructions::Kind;
use super::instructions::ThreadLocal;

/// Bytes of an instruction.
const SIZE: u64 = 4;
/// Registers that a call may change: x0 to x18 and the link register.
const CALL_CLOBBERS: std::ops::RangeInclusive<u16> = 0..=18;
/// `mrs xN, tpidr_el0` without the register.
const READ_THREAD_POINTER: u32 = 0xd53b_d040;
const REGISTER: u32 = 0x1f;

/// The addresses of instructions from `first` on. Whoever made the file chose
/// it: it may be the end of memory.
fn addresses(first: u64) -> impl Iterator<Item = u64> {
    (0_u64..).map(move |index| first.wrapping_add(index * SIZE))
}

/// Instructions with their addresses and words.
fn decode(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u32, Instruction)> + '_ {
    let decoder = InstDecoder::default();
    code.chunks_exact(SIZE as usize)
        .zip(addresses(address))
        .filter_map(move |(bytes, at)| {
            let word = u32::from_le_bytes(bytes.try_into().ok()?);
            let instruction = decoder.decode(&mut U8Reader::new(bytes)).ok()?;
            Some((at, word, instruction))
        })
}

fn branch_kind(opcode: Opcode) -> Option<Kind> {
    match opcode {
        Opcode::BL => Some(Kind::Call),
        Opcode::B => Some(Kind::Jump),
        Opcode::Bcc(_) | Opcode::CBZ | Opcode::CBNZ | Opcode::TBZ | Opcode::TBNZ => {
            Some(Kind::Conditional)
        }
        _ => None,
    }
}

pub(super) fn branches(code: &[u8], address: u64) -> Vec<Branch> {
    decode(code, address)
        .filter_map(|(at, _, instruction)| {
            let kind = branch_kind(instruction.opcode)?;
            let offset = instruction
                .operands
                .iter()
                .find_map(|operand| match operand {
                    Operand::PCOffset(offset) => Some(*offset),
                    _ => None,
                })?;
            Some(Branch {
                next: at.wrapping_add(SIZE),
                to: at.wrapping_add_signed(offset),
                kind,
            })
        })
        .collect()
}

pub(super) fn return_addresses(code: &[u8], address: u64) -> Vec<u64> {
    decode(code, address)
        .filter(|(_, _, instruction)| {
            matches!(
                instruction.opcode,
                Opcode::BL
                    | Opcode::BLR
                    | Opcode::BLRAA
                    | Opcode::BLRAAZ
                    | Opcode::BLRAB
                    | Opcode::BLRABZ
            )
        })
        .map(|(at, _, _)| at.wrapping_add(SIZE))
        .collect()
}

/// What a register is known to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Value {
    #[default]
    Unknown,
    /// An address in the file.
    Address(u64),
    /// The thread pointer plus something.
    ThreadPointer(i64),
}

impl Value {
    const fn plus(self, offset: i64) -> Self {
        match self {
            Self::Unknown => Self::Unknown,
            Self::Address(address) => Self::Address(address.wrapping_add_signed(offset)),
            Self::ThreadPointer(distance) => Self::ThreadPointer(distance.wrapping_add(offset)),
        }
    }
}

/// What an instruction does with a known value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It computes it; never just the page of an address.
    Computed(Value),
    /// It reads or writes memory there.
    Memory(Value),
}

/// Follows addresses and the thread pointer through the registers, straight
/// down: exact enough for functions that do little, and nothing is believed
/// that is not confirmed otherwise.
fn uses(code: &[u8], address: u64) -> Vec<Use> {
    let mut registers = [Value::default(); 32];
    let mut found = Vec::new();
    for (at, word, instruction) in decode(code, address) {
        let value_of = |register: u16| {
            let value = registers.get(usize::from(register));
            value.copied().unwrap_or_default()
        };
        let [target, source, third, _] = &instruction.operands;
        let mut result = Value::Unknown;
        if word & !REGISTER == READ_THREAD_POINTER {
            result = Value::ThreadPointer(0);
        } else {
            match (instruction.opcode, source, third) {
                (Opcode::ADRP, Operand::PCOffset(offset), _) => {
                    result = Value::Address((at & !0xfff).wrapping_add_signed(*offset));
                }
                (Opcode::ADR, Operand::PCOffset(offset), _) => {
                    result = Value::Address(at.wrapping_add_signed(*offset));
                    found.push(Use::Computed(result));
                }
                (
                    Opcode::ADD,
                    Operand::Register(SizeCode::X, register)
                    | Operand::RegisterOrSP(SizeCode::X, register),
                    _,
                ) => {
                    if let Some(amount) = immediate(third) {
                        result = value_of(*register).plus(amount);
                        if result != Value::Unknown {
                            found.push(Use::Computed(result));
                        }
                    }
                }
                _ => {}
            }
        }
        for operand in &instruction.operands {
            if let Operand::RegPreIndex(base, offset, _) = operand {
                let value = value_of(*base).plus((*offset).into());
                if value != Value::Unknown {
                    found.push(Use::Memory(value));
                }
            }
        }
        if matches!(instruction.opcode, Opcode::BL | Opcode::BLR) {
            for register in registers
                .iter_mut()
                .take(usize::from(*CALL_CLOBBERS.end()) + 1)
            {
                *register = Value::Unknown;
            }
        } else if let Operand::Register(_, register) | Operand::RegisterOrSP(_, register) = target
            && let Some(register) = registers.get_mut(usize::from(*register))
            && !is_store(instruction.opcode)
        {
            *register = result;
        }
    }
    found
}

/// Whether the first operand is read, not written.
const fn is_store(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::STR
            | Opcode::STRB
            | Opcode::STRH
            | Opcode::STUR
            | Opcode::STURB
            | Opcode::STURH
            | Opcode::STP
            | Opcode::CBZ
            | Opcode::CBNZ
            | Opcode::TBZ
            | Opcode::TBNZ
    )
}

fn immediate(operand: &Operand) -> Option<i64> {
    match *operand {
        Operand::Immediate(value) => Some(value.into()),
        Operand::Imm16(value) => Some(value.into()),
        Operand::Imm64(value) => Some(value.cast_signed()),
        Operand::ImmShift(value, shift) => i64::from(value).checked_shl(shift.into()),
        _ => None,
    }
}

pub(super) fn references(code: &[u8], address: u64) -> Vec<u64> {
    uses(code, address)
        .into_iter()
        .filter_map(|used| match used {
            Use::Computed(Value::Address(address)) | Use::Memory(Value::Address(address)) => {
                Some(address)
            }
            _ => None,
        })
        .collect()
}

pub(super) fn thread_locals(
    code: &[u8],
    address: u64,
    relocations: &[TlsRelocation],
) -> Vec<ThreadLocal> {
    let mut found = Vec::new();
    for used in uses(code, address) {
        let accessed = match used {
            // A descriptor's function, or an offset, is loaded from its slot.
            Use::Memory(Value::Address(address)) => relocations
                .iter()
                .position(|it| {
                    it.slot == address
                        && matches!(it.kind, TlsKind::Descriptor | TlsKind::ThreadOffset)
                })
                .map(|index| ThreadLocal::Relocation {
                    index,
                    displacement: 0,
                }),
            // `__tls_get_addr` is called with the slot.
            Use::Computed(Value::Address(address)) => relocations
                .iter()
                .position(|it| it.slot == address && it.kind == TlsKind::Module)
                .map(|index| ThreadLocal::Relocation {
                    index,
                    displacement: 0,
                }),
            // The program's own block follows the thread pointer and the two
            // words at it.
            Use::Memory(Value::ThreadPointer(distance)) if distance >= 16 => {
                Some(ThreadLocal::ThreadPointer(distance))
            }
            _ => None,
        };
        found.extend(accessed);
    }
    found
}

pub(super) fn possible_branches(code: &[u8], address: u64, targets: &[u64]) -> Vec<u64> {
    branches_only(code, address)
        .filter(|(_, to)| targets.binary_search(to).is_ok())
        .map(|(at, _)| at)
        .collect()
}

/// `b` and `bl` without the decoder, for looking through all code.
fn branches_only(code: &[u8], address: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    const OFFSET: u32 = (1 << 26) - 1;
    code.chunks_exact(SIZE as usize)
        .zip(addresses(address))
        .filter_map(|(bytes, at)| {
            let word = u32::from_le_bytes(bytes.try_into().ok()?);
            // The offset is signed, in instructions.
            let offset = ((word & OFFSET) << 6).cast_signed() >> 4;
            matches!(word & !OFFSET, 0x1400_0000 | 0x9400_0000)
                .then(|| (at, at.wrapping_add_signed(offset.into())))
        })
}

pub(super) fn stub_slot(code: &[u8], address: u64) -> Option<u64> {
    // `bti c`, `adrp x16`, `ldr x17, [x16, ..]`, `add x16`, `br x17`.
    let stub = code.get(..code.len().min(20))?;
    uses(stub, address).into_iter().find_map(|used| match used {
        Use::Memory(Value::Address(slot)) => Some(slot),
        _ => None,
    })
}
