//! Any bytes as machine code of x86-64 and arm64.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use rbprof::targets::code::instructions;
use rbprof::targets::code::instructions::ThreadLocal;
use rbprof::targets::elf::Machine;
use rbprof::targets::elf::TlsKind;
use rbprof::targets::elf::TlsRelocation;

fuzz_target!(|data: &[u8]| {
    let Some((address, code)) = data.split_first_chunk() else {
        return;
    };
    let address = u64::from_le_bytes(*address);
    for machine in [Machine::X86_64, Machine::Aarch64, Machine::Other(8)] {
        // What the code refers to may be relocations for thread-local variables.
        let references = instructions::references(machine, code, address);
        let kinds = [
            TlsKind::Module,
            TlsKind::Descriptor,
            TlsKind::ThreadOffset,
            TlsKind::BlockOffset,
        ];
        let relocations: Vec<TlsRelocation> = references
            .iter()
            // A file has a handful.
            .take(16)
            .zip(kinds.iter().cycle())
            .map(|(&slot, &kind)| TlsRelocation {
                kind,
                slot,
                symbol: None,
                addend: 0,
            })
            .collect();
        for used in instructions::thread_locals(machine, code, address, &relocations) {
            if let ThreadLocal::Relocation { index, .. } = used {
                assert!(index < relocations.len());
            }
        }
        let branches = instructions::branches(machine, code, address);
        let mut targets: Vec<u64> = branches.iter().map(|branch| branch.to).collect();
        targets.sort_unstable();
        let end = address.wrapping_add(code.len() as u64);
        for branch in &branches {
            // Only what wraps around the end of memory is before the beginning.
            assert!(branch.next.wrapping_sub(address) <= end.wrapping_sub(address));
        }
        let _ = instructions::possible_branches(machine, code, address, &targets);
        let returns: HashSet<u64> = instructions::return_addresses(machine, code, address)
            .into_iter()
            .collect();
        let calls = branches
            .iter()
            .filter(|branch| branch.kind == instructions::Kind::Call);
        for call in calls {
            assert!(returns.contains(&call.next));
        }
        let _ = instructions::stub_slot(machine, code, address);
    }
});
