//! Any bytes as an ELF file whose unwind table is wanted, which must be as the
//! kernel half relies on it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rbprof::targets::elf::Elf;
use rbprof::unwind;
use rbprof_common::unwind::MAX_PAGE_ROWS;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Rule;

fuzz_target!(|data: &[u8]| {
    let Ok(elf) = Elf::parse(data) else { return };
    // With the file as its own debug file.
    let Ok(table) = unwind::compile(&elf, Some(&elf)) else {
        return;
    };
    assert_eq!(table.rules().first(), Some(&Rule::UNKNOWN));
    let mut next = 0;
    let mut last = None;
    for &page in table.pages() {
        assert!(last < Some(page.number), "in order, each once");
        last = Some(page.number);
        assert_eq!(page.first, next, "no row is left out");
        next += page.count;
        assert!(page.count <= MAX_PAGE_ROWS);
        let rows = table.rows_of(page);
        assert_eq!(rows.first().map(|row| row.pc), Some(0));
        assert!(rows.is_sorted_by(|a, b| a.pc < b.pc));
        for row in rows {
            let rule = table.rules().get(usize::from(row.rule)).copied();
            let address = u64::from(page.number) * PAGE + u64::from(row.pc);
            assert_eq!(Some(table.rule(address)), rule);
        }
    }
    assert_eq!(table.rows().len(), next as usize);
});
