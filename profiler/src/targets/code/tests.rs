use super::instructions::Branch;
use super::instructions::Kind;
use super::instructions::ThreadLocal;
use super::*;
use crate::targets::elf::Machine;
use crate::targets::elf::TlsKind;
use crate::targets::elf::TlsRelocation;

/// `rb_thread_current` of Debian's 3.1.2 and `rb_iseq_eval` of its 3.3.8 for
/// arm64, after the address of the first.
const ARM64: &[u8] = include_bytes!("../../../../tests/fuzz/seeds/code/arm64-functions");
/// The length of the first of them.
const GETTER: usize = 48;

fn arm64() -> (u64, &'static [u8], &'static [u8]) {
    let (address, code) = ARM64.split_first_chunk().unwrap();
    let (getter, rest) = code.split_at(GETTER);
    (u64::from_le_bytes(*address), getter, rest)
}

fn relocation(kind: TlsKind, slot: u64) -> TlsRelocation {
    TlsRelocation {
        kind,
        slot,
        symbol: None,
        addend: 0,
    }
}

/// The bytes of instructions as disassemblers print them.
fn bytes(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

fn used(code: &str, address: u64, relocations: &[TlsRelocation]) -> Vec<ThreadLocal> {
    instructions::thread_locals(Machine::X86_64, &bytes(code), address, relocations)
}

const fn by_first(displacement: i64) -> ThreadLocal {
    ThreadLocal::Relocation {
        index: 0,
        displacement,
    }
}

#[test]
fn every_access_model_of_x86_64_is_understood() {
    // General dynamic, as in Debian's 3.3.8: lea 0x225010(%rip),%rdi; call
    // __tls_get_addr; mov (%rax),%rax.
    let general = "66 48 8d 3d 10 50 22 00 66 66 48 e8 38 9c e0 ff 48 8b 00 48 8b 40 30";
    let module = [relocation(TlsKind::Module, 0x45_aad0)];
    assert_eq!(used(general, 0x23_5ab8, &module), [by_first(0)]);
    // Local dynamic: the offset stands behind the call; another slot is none.
    let local = "66 48 8d 3d 10 50 22 00 66 66 48 e8 38 9c e0 ff 48 8b 80 10 00 00 00";
    assert_eq!(used(local, 0x23_5ab8, &module), [by_first(0x10)]);
    let other = [relocation(TlsKind::Module, 0x45_aad8)];
    assert_eq!(used(general, 0x23_5ab8, &other), []);
    // Descriptors: lea 0x100(%rip),%rax; call *(%rax); mov %fs:(%rax),%rax.
    let descriptor = "48 8d 05 00 01 00 00 ff 10 64 48 8b 00";
    let slot = [relocation(TlsKind::Descriptor, 0x1107)];
    assert_eq!(used(descriptor, 0x1000, &slot), [by_first(0)]);
    // Initial exec: mov 0x100(%rip),%rax; mov %fs:(%rax),%rax.
    let initial = "48 8b 05 00 01 00 00 64 48 8b 00";
    let slot = [relocation(TlsKind::ThreadOffset, 0x1107)];
    assert_eq!(used(initial, 0x1000, &slot), [by_first(0)]);
    // Local exec: mov %fs:-8,%rax.
    let exec = "64 48 8b 04 25 f8 ff ff ff";
    assert_eq!(used(exec, 0, &[]), [ThreadLocal::ThreadPointer(-8)]);
    // The same by way of the thread pointer: mov %fs:0,%rax; mov -16(%rax),%rax.
    let pointer = "64 48 8b 04 25 00 00 00 00 48 8b 80 f0 ff ff ff";
    assert_eq!(used(pointer, 0, &[]), [ThreadLocal::ThreadPointer(-16)]);
    // Initial exec that the linker relaxed: mov $-80,%rax; mov %fs:(%rax),%rax.
    let relaxed = "48 c7 c0 b0 ff ff ff 64 48 8b 00";
    assert_eq!(used(relaxed, 0, &[]), [ThreadLocal::ThreadPointer(-80)]);
    // The stack protector's word is the C library's: mov %fs:0x28,%rbp.
    assert_eq!(used("64 48 8b 2c 25 28 00 00 00", 0, &[]), []);
}

#[test]
fn access_models_of_arm64_are_understood() {
    let (address, getter, _) = arm64();
    let used = |code: &[u8], address, relocations: &[TlsRelocation]| {
        instructions::thread_locals(Machine::Aarch64, code, address, relocations)
    };
    // Two words into a page: adrp x0, 0x37f000; ldr x2, [x0, #1000].
    let descriptor = [relocation(TlsKind::Descriptor, 0x37_f3e8)];
    assert_eq!(used(getter, address, &descriptor), [by_first(0)]);
    let other = [relocation(TlsKind::Descriptor, 0x37_f3f8)];
    assert_eq!(used(getter, address, &other), []);
    // Local exec: mrs x0, tpidr_el0; add x0, x0, #0, lsl #12; add x0, x0, #0x18;
    // ldr x0, [x0].
    let exec = bytes("40 d0 3b d5 00 00 40 91 00 60 00 91 00 00 40 f9");
    assert_eq!(used(&exec, 0, &[]), [ThreadLocal::ThreadPointer(0x18)]);
    // Far into a large block: add x0, x0, #1, lsl #12.
    let far = bytes("40 d0 3b d5 00 04 40 91 00 08 40 f9");
    assert_eq!(used(&far, 0, &[]), [ThreadLocal::ThreadPointer(0x1010)]);
}

#[test]
fn branches_have_their_kinds_and_targets() {
    // At 0x1000: call 0x2000; jmp 0x1000; jne 0x1010; call *%rax; ret.
    let code = bytes("e8 fb 0f 00 00 eb f9 75 07 ff d0 c3");
    let branch = |next, to, kind| Branch { next, to, kind };
    assert_eq!(
        instructions::branches(Machine::X86_64, &code, 0x1000),
        [
            branch(0x1005, 0x2000, Kind::Call),
            branch(0x1007, 0x1000, Kind::Jump),
            branch(0x1009, 0x1010, Kind::Conditional),
        ]
    );
    assert_eq!(
        instructions::return_addresses(Machine::X86_64, &code, 0x1000),
        [0x1005, 0x100b]
    );
    let places =
        |targets: &[u64]| instructions::possible_branches(Machine::X86_64, &code, 0x1000, targets);
    assert_eq!(places(&[0x2000]), [0x1000]);
    assert!(places(&[0x2001]).is_empty());

    // rb_iseq_eval of arm64 ends with rb_vm_exec.
    let (_, _, eval) = arm64();
    let branches = instructions::branches(Machine::Aarch64, eval, 0x27_55e0);
    let jumps: Vec<u64> = branches
        .iter()
        .filter(|branch| branch.kind == Kind::Jump)
        .map(|branch| branch.to)
        .collect();
    assert_eq!(jumps, [0x27_4c50]);
    let calls = branches.iter().filter(|branch| branch.kind == Kind::Call);
    assert_eq!(calls.count(), 4);
    assert_eq!(
        instructions::possible_branches(Machine::Aarch64, eval, 0x27_55e0, &[0x27_4c50]),
        [0x27_5674]
    );
}

#[test]
fn data_is_referred_to_relative_to_code() {
    // lea 0x10(%rip),%rax; cmpq $0,0x20(%rip); mov (%rbx),%rax.
    let code = bytes("48 8d 05 10 00 00 00 48 83 3d 20 00 00 00 00 48 8b 03");
    assert_eq!(
        instructions::references(Machine::X86_64, &code, 0x1000),
        [0x1017, 0x102f]
    );
    let (address, getter, _) = arm64();
    // The slot of the descriptor, read and computed.
    assert_eq!(
        instructions::references(Machine::Aarch64, getter, address),
        [0x37_f3e8, 0x37_f3e8]
    );
    // Unknown machines say nothing.
    assert!(instructions::references(Machine::Other(8), getter, address).is_empty());
}

#[test]
fn stubs_of_imports_lead_to_their_slots() {
    // endbr64; bnd jmp *0x1000(%rip).
    let stub = bytes("f3 0f 1e fa f2 ff 25 00 10 00 00 0f 1f 44 00 00");
    let slot = |machine, code: &[u8]| instructions::stub_slot(machine, code, 0x1000);
    assert_eq!(slot(Machine::X86_64, &stub), Some(0x200b));
    assert_eq!(slot(Machine::X86_64, &bytes("90 90 90 c3")), None);
    // adrp x16, 0x11000; ldr x17, [x16, #8]; add x16, x16, #8; br x17.
    let stub = bytes("90 00 00 90 11 06 40 f9 10 22 00 91 20 02 1f d6");
    assert_eq!(slot(Machine::Aarch64, &stub), Some(0x1_1008));
}

#[test]
fn code_at_the_end_of_memory_is_code_as_well() {
    let code = bytes("e8 fb 0f 00 00 eb f9 75 07 ff d0 c3 90 90 90 90");
    for machine in [Machine::X86_64, Machine::Aarch64] {
        for address in [u64::MAX, u64::MAX - 3, u64::MAX - 8] {
            let branches = instructions::branches(machine, &code, address);
            let targets: Vec<u64> = branches.iter().map(|branch| branch.to).collect();
            let places = instructions::possible_branches(machine, &code, address, &targets);
            assert!(places.len() <= branches.len());
            let returns = instructions::return_addresses(machine, &code, address);
            assert!(returns.len() <= 2);
            assert!(instructions::references(machine, &code, address).is_empty());
            assert!(instructions::thread_locals(machine, &code, address, &[]).is_empty());
            assert_eq!(instructions::stub_slot(machine, &code, address), None);
        }
    }
}
