use std::path::Path;
use std::process::Command;

use rbprof_common::unwind::MAX_PAGE_ROWS;
use rbprof_common::unwind::cfa;
use rbprof_common::unwind::saved;

use super::*;

fn rule(offset: i32) -> Rule {
    Rule {
        cfa: cfa::SP,
        ra: saved::AT_CFA,
        cfa_offset: offset,
        ra_offset: -8,
        ..Rule::UNKNOWN
    }
}

/// Each page as the kernel half relies on it.
fn check(table: &Table) {
    let mut next = 0;
    let mut last = None;
    for &page in table.pages() {
        assert!(last < Some(page.number), "in order, each once");
        last = Some(page.number);
        assert_eq!(page.first, next, "no row is left out");
        next += page.count;
        assert!((1..=MAX_PAGE_ROWS).contains(&page.count));
        let rows = table.rows_of(page);
        assert_eq!(rows.len(), page.count as usize);
        assert_eq!(rows[0].pc, 0);
        assert!(rows.is_sorted_by(|a, b| a.pc < b.pc));
        for row in rows {
            assert!(usize::from(row.rule) < table.rules().len());
        }
    }
    assert_eq!(next as usize, table.rows().len());
    assert_eq!(table.rules()[0], Rule::UNKNOWN);
}

#[test]
fn rows_with_the_same_rule_are_one() {
    let mut builder = Builder::default();
    builder.put(0x1000, 0x1010, rule(8));
    builder.put(0x1010, 0x1020, rule(8));
    builder.put(0x1020, 0x1030, rule(16));
    builder.end(0x1030);
    builder.put(0x1030, 0x1040, rule(8));
    builder.end(0x1040);
    let table = builder.finish();
    check(&table);
    // Before, 8, 16, 8, after.
    assert_eq!(table.rows().len(), 5);
    assert_eq!(table.rules().len(), 3);
    for (address, expected) in [
        (0, Rule::UNKNOWN),
        (0xfff, Rule::UNKNOWN),
        (0x1000, rule(8)),
        (0x101f, rule(8)),
        (0x1020, rule(16)),
        (0x1030, rule(8)),
        (0x1040, Rule::UNKNOWN),
        (0x1_0000, Rule::UNKNOWN),
        (u64::MAX, Rule::UNKNOWN),
    ] {
        assert_eq!(table.rule(address), expected, "{address:#x}");
    }
}

#[test]
fn a_function_reaches_into_pages_without_rows_of_their_own() {
    let mut builder = Builder::default();
    builder.put(0x1_8000, 0x5_0000, rule(8));
    builder.end(0x5_0000);
    builder.put(0x9_0000, 0x9_0001, rule(16));
    builder.end(0x9_0001);
    let table = builder.finish();
    check(&table);
    let numbers: Vec<u32> = table.pages().iter().map(|page| page.number).collect();
    // Where nothing is known there is no page.
    assert_eq!(numbers, [1, 2, 3, 4, 5, 9]);
    assert_eq!(table.rule(0x4_ffff), rule(8));
    assert_eq!(table.rule(0x5_0000), Rule::UNKNOWN);
    assert_eq!(table.rule(0x9_0000), rule(16));
}

#[test]
fn what_a_page_has_no_room_for_is_unknown() {
    let mut builder = Builder::default();
    for address in 0..0x1_8000 {
        builder.put(address, address + 1, rule(8 + address as i32 % 2 * 8));
    }
    let table = builder.finish();
    check(&table);
    let most = u64::from(MAX_PAGE_ROWS);
    assert_eq!(table.rule(most - 2), rule(8));
    assert_eq!(table.rule(most - 1), Rule::UNKNOWN);
    assert_eq!(table.rule(0xffff), Rule::UNKNOWN);
    // The next page begins as it should.
    assert_eq!(table.rule(0x1_0000), rule(8));
    assert_eq!(table.rule(0x1_0001), rule(16));
    let lost = table.statistics().inexpressible(Reason::Limit);
    assert!(lost.text >= 0x1_0000 - most, "{lost:?}");
}

#[test]
fn rules_that_are_too_many_are_unknown() {
    let mut builder = Builder::default();
    for n in 0..20_000 {
        builder.put(64 * n, 64 * n + 1, rule(8 * n as i32));
    }
    let table = builder.finish();
    check(&table);
    assert_eq!(table.rule(64), rule(8));
    assert_eq!(table.rule(64 * 19_999), Rule::UNKNOWN);
    assert!(table.statistics().inexpressible(Reason::Limit).rows > 10_000);
}

const SOURCE: &str = r#"
    #include <string.h>
    void use(char *);
    int calls(int n) { char b[200]; memset(b, n, n); use(b); return b[3]; }
    void use(char *b) { __builtin_printf("%s", b); }
    int main(int argc, char **argv) { (void)argv; return calls(argc); }
"#;

/// Compiles a small program.
fn program(dir: &Path, compiler: &str, flags: &[&str]) -> Vec<u8> {
    let source = dir.join("program.c");
    let program = dir.join("program");
    std::fs::write(&source, SOURCE).unwrap();
    let status = Command::new(compiler)
        .args(["-O2", "-o"])
        .arg(&program)
        .arg(&source)
        .args(flags)
        .status()
        .unwrap();
    assert!(status.success());
    std::fs::read(program).unwrap()
}

fn compiled(data: &[u8]) -> Table {
    let table = compile(&Elf::parse(data).unwrap(), None).unwrap();
    check(&table);
    table
}

fn symbol(data: &[u8], name: &str) -> u64 {
    let elf = Elf::parse(data).unwrap();
    let [symbol] = elf.static_symbols([name.as_bytes()]).unwrap();
    symbol.unwrap().value
}

#[cfg(target_arch = "x86_64")]
#[test]
fn debug_frame_serves_where_there_is_no_eh_frame() {
    let dir = tempfile::tempdir().unwrap();
    let flags = [
        "-g",
        "-fno-asynchronous-unwind-tables",
        "-fno-unwind-tables",
    ];
    let freestanding = ["-nostdlib", "-Wl,-e,main", "-shared", "-fPIC"];
    for compression in ["-gz=none", "-gz=zlib"] {
        let all: Vec<&str> = [compression]
            .iter()
            .chain(&flags)
            .chain(&freestanding)
            .copied()
            .collect();
        let data = program(dir.path(), "cc", &all);
        let elf = Elf::parse(data.as_slice()).unwrap();
        // Some linkers leave an empty section.
        let eh_frame = elf.section_data(b".eh_frame").unwrap();
        assert!(eh_frame.is_none_or(|(_, data)| data.is_empty()));
        let table = compiled(&data);
        let start = symbol(&data, "calls");
        assert_eq!(table.rule(start), rule(8), "{compression}");
        assert!(table.rule(start + 40).cfa_offset > 200);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_separate_debug_file_serves_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let flags = [
        "-g",
        "-fno-asynchronous-unwind-tables",
        "-fno-unwind-tables",
        "-nostdlib",
        "-shared",
        "-fPIC",
    ];
    let whole = program(dir.path(), "cc", &flags);
    let stripped = program(dir.path(), "cc", &[&flags[..], &["-s"]].concat());
    let elf = Elf::parse(stripped.as_slice()).unwrap();
    let debug = Elf::parse(whole.as_slice()).unwrap();
    let table = compile(&elf, Some(&debug)).unwrap();
    check(&table);
    assert_eq!(table, compiled(&whole));
    assert_eq!(table.rule(symbol(&whole, "calls")), rule(8));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_start_and_the_signals_of_musl_are_recognized() {
    let dir = tempfile::tempdir().unwrap();
    // As Ruby's own build does, which gives musl nothing to describe itself by.
    let data = program(dir.path(), "musl-gcc", &["-static"]);
    let table = compiled(&data);
    assert_eq!(table.rule(symbol(&data, "_start")), Rule::END);
    assert_eq!(table.rule(symbol(&data, "calls")), rule(8));
    let flags = ["-static", "-Wl,-u,__restore_rt"];
    let data = program(dir.path(), "musl-gcc", &flags);
    let table = compiled(&data);
    let trampoline = symbol(&data, "__restore_rt");
    for address in [trampoline - 1, trampoline, trampoline + 7] {
        assert_eq!(table.rule(address), Rule::SIGNAL_X86_64, "{address:#x}");
    }
    assert_eq!(table.statistics().recognized, 2);
}

/// Like the arm64 vDSO, where the first function is a leaf and the second is not.
const VDSO: &str = r#"
    .arch armv8.3-a
    .globl __kernel_clock_gettime, __kernel_getrandom
    .type __kernel_clock_gettime, @function
    .type __kernel_getrandom, @function
    __kernel_clock_gettime:
        cmp w0, #15
        mrs x2, cntvct_el0
        stp x2, x2, [x1]
        ret
    .size __kernel_clock_gettime, . - __kernel_clock_gettime
    __kernel_getrandom:
        stp x29, x30, [sp, #-32]!
        ldp x29, x30, [sp], #32
        ret
    .size __kernel_getrandom, . - __kernel_getrandom
        nop
    .globl __kernel_rt_sigreturn
    __kernel_rt_sigreturn:
        mov x8, #139
        svc #0
"#;

#[test]
fn leaves_and_signals_of_the_arm64_vdso_are_recognized() {
    let dir = tempfile::tempdir().unwrap();
    let (source, file) = (dir.path().join("vdso.s"), dir.path().join("vdso.so"));
    std::fs::write(&source, VDSO).unwrap();
    let status = Command::new("aarch64-linux-gnu-gcc")
        .args([
            "-nostdlib",
            "-shared",
            "-Wl,-e,__kernel_clock_gettime",
            "-o",
        ])
        .args([&file, &source])
        .status()
        .unwrap();
    assert!(status.success());
    let data = std::fs::read(file).unwrap();
    let table = compiled(&data);
    let elf = Elf::parse(data.as_slice()).unwrap();
    let of = |name: &str| elf.dynamic_symbol(name.as_bytes()).unwrap().unwrap().value;
    let leaf = of("__kernel_clock_gettime");
    for address in [leaf, leaf + 12] {
        let rule = table.rule(address);
        assert_eq!((rule.cfa, rule.cfa_offset), (cfa::SP, 0));
        assert_eq!((rule.ra, rule.fp), (saved::SAME, saved::SAME));
    }
    let other = of("__kernel_getrandom");
    for address in [other, other + 4, other + 8] {
        assert_eq!(table.rule(address), Rule::UNKNOWN);
    }
    let trampoline = of("__kernel_rt_sigreturn");
    assert_eq!(table.rule(trampoline), Rule::SIGNAL_AARCH64);
    assert_eq!(table.statistics().recognized, 2);
}

#[test]
fn a_file_that_describes_nothing_has_no_table() {
    let mut data = std::fs::read("/proc/self/exe").unwrap();
    // Another machine.
    data[18] = 8;
    let elf = Elf::parse(data.as_slice()).unwrap();
    let error = compile(&elf, None).unwrap_err();
    assert_eq!(error, UnwindError::Machine(Machine::Other(8)));
    assert_eq!(error.to_string(), "no unwinding on ELF machine 8");
}

#[test]
fn damaged_files_have_bounded_tables() {
    let dir = tempfile::tempdir().unwrap();
    let whole = program(dir.path(), "cc", &["-shared", "-fPIC", "-s"]);
    let address = {
        let elf = Elf::parse(whole.as_slice()).unwrap();
        eh_frame(&elf).unwrap().0 as usize
    };
    let mut noise = 1_u64;
    for _ in 0..2000 {
        let mut data = whole.clone();
        for _ in 0..4 {
            noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let place = address + (noise >> 33) as usize % 512;
            if let Some(byte) = data.get_mut(place) {
                *byte = (noise >> 17) as u8;
            }
        }
        if let Ok(table) = compile(&Elf::parse(data.as_slice()).unwrap(), None) {
            check(&table);
            assert!(table.rows().len() < data.len());
        }
    }
}
