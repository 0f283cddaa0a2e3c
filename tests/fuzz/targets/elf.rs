//! Any bytes as an ELF file: everything that rbprof asks of one, up to the whole
//! report of `rbprof inspect`, with recovery from the code.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rbprof::inspect::FileReport;
use rbprof::targets::code;
use rbprof::targets::elf::Elf;
use rbprof::targets::roots::Symbols;

fuzz_target!(|data: &[u8]| {
    let Ok(elf) = Elf::parse(data) else { return };
    let symbols = Symbols::of(&elf);
    // With the image as its own debug file.
    let _ = Symbols::default().completed_by(&elf);
    let _ = elf.debug_link();
    let _ = elf.debug_slot();
    let _ = elf.program_headers_address();
    if let Ok(relocations) = elf.tls_relocations() {
        for relocation in relocations {
            let _ = elf.word64(relocation.slot);
            let _ = elf.imported_at(relocation.slot);
        }
    }
    let _ = code::analyse(&elf, symbols.vm_exec.map(|located| located.symbol.value));
    if let Ok(report) = FileReport::of(&elf, "fuzz", None) {
        let _ = report.missing();
        assert!(!report.version.is_empty() || report.layout.is_none());
    }
});
