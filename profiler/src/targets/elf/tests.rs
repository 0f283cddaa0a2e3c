use std::os::unix::fs::FileExt as _;

use super::*;
use std::process::Command;

/// The system's libruby, if there is one.
fn libruby() -> Option<Vec<u8>> {
    crate::targets::tests::libruby().map(|path| std::fs::read(path).unwrap())
}

/// Asks an image everything; it may answer what it likes.
fn ask_everything<'data, R: ReadRef<'data>>(data: R) {
    let Ok(elf) = Elf::parse(data) else { return };
    let _ = (elf.machine(), elf.has_fixed_address(), elf.tls());
    let _ = (elf.interpreter(), elf.debug_slot(), elf.build_id());
    let _ = (elf.program_headers_address(), elf.is_stripped());
    for name in [
        &b"ruby_version"[..],
        b"rb_vm_exec",
        b"ruby_current_ec",
        b"no",
    ] {
        if let Ok(Some(symbol)) = elf.dynamic_symbol(name) {
            let _ = elf.bytes(symbol.value, symbol.size);
        }
    }
    let _ = elf.tls_relocations();
    let _ = elf.static_symbols([b"ruby_version"]);
}

#[test]
fn symbols_are_found_as_the_linker_tools_print_them() {
    let Some(bytes) = libruby() else { return };
    let elf = Elf::parse(bytes.as_slice()).unwrap();
    let version = elf.dynamic_symbol(b"ruby_version").unwrap().unwrap();
    let text = elf.bytes(version.value, version.size).unwrap();
    let output = Command::new("ruby")
        .args(["-e", "print RUBY_VERSION"])
        .output()
        .unwrap();
    assert_eq!(text.strip_suffix(b"\0"), Some(output.stdout.as_slice()));
    // Imported, not defined; and nowhere at all.
    assert_eq!(elf.dynamic_symbol(b"malloc"), Ok(None));
    assert_eq!(elf.dynamic_symbol(b"ruby_versio"), Ok(None));
    assert!(elf.build_id().is_some_and(|id| id.len() == 20));
    assert!(elf.loads().len() >= 2);
    assert!(!elf.has_fixed_address());
}

#[test]
fn the_thread_local_relocations_name_their_variable() {
    let Some(bytes) = libruby() else { return };
    let elf = Elf::parse(bytes.as_slice()).unwrap();
    let Ok(Some(variable)) = elf.dynamic_symbol(b"ruby_current_ec") else {
        eprintln!("skipped: this libruby exports no ruby_current_ec");
        return;
    };
    assert!(variable.tls);
    assert!(variable.value < elf.tls().unwrap().memory_size);
    let relocations = elf.tls_relocations().unwrap();
    let named = |kind| {
        relocations
            .iter()
            .filter(|it| it.kind == kind && it.symbol.as_deref() == Some(b"ruby_current_ec"))
            .count()
    };
    assert_eq!(named(TlsKind::Module) + named(TlsKind::Descriptor), 1);
}

/// What this program's own linker has made, with its full symbol table.
#[test]
fn the_full_symbol_table_is_read_from_a_file() {
    let own = file_cache(File::open("/proc/self/exe").unwrap());
    let elf = Elf::parse(&own).unwrap();
    assert_eq!(elf.is_stripped(), Ok(false));
    let [main, none] = elf.static_symbols([&b"main"[..], b"mai"]).unwrap();
    assert!(main.is_some_and(|symbol| symbol.value != 0 && !symbol.tls));
    assert_eq!(none, None);
    assert!(elf.interpreter().is_some_and(|path| path.starts_with(b"/")));
    assert!(elf.debug_slot().is_some());
}

#[test]
fn what_is_no_elf_file_is_told_apart() {
    assert_eq!(Elf::parse(&b""[..]).err(), Some(ElfError::NotElf));
    assert_eq!(
        Elf::parse(&b"#!/bin/sh and more of it"[..]).err(),
        Some(ElfError::NotElf)
    );
    let foreign = b"\x7fELF\x01\x01\x01 and so on, for 32 bit";
    assert_eq!(Elf::parse(&foreign[..]).err(), Some(ElfError::Foreign));
    let cut = b"\x7fELF\x02\x01\x01 and so on";
    assert!(matches!(
        Elf::parse(&cut[..]).err(),
        Some(ElfError::Malformed(_))
    ));
}

#[test]
fn a_truncated_library_never_panics() {
    let Some(bytes) = libruby() else { return };
    let lengths = (0..4096).chain((4096..bytes.len()).step_by(7919));
    for length in lengths {
        ask_everything(&bytes[..length]);
    }
}

/// A small generator of numbers (xorshift64*): the same ones in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

#[test]
fn a_corrupted_library_never_panics() {
    let Some(original) = libruby() else { return };
    // Where the structure is: headers, hash table, symbols, dynamic segment,
    // relocations, section headers.
    let elf = Elf::parse(original.as_slice()).unwrap();
    let dynamic = elf.dynamic.unwrap();
    let program = elf.program(elf::PT_DYNAMIC).unwrap();
    let sections = elf.header.e_shoff.get(LE) as usize;
    let mut places: Vec<std::ops::Range<usize>> = vec![
        0..64,
        64..0x300,
        program.p_offset(LE) as usize..(program.p_offset(LE) + program.p_filesz(LE)) as usize,
        sections..original.len(),
    ];
    let tables = [
        dynamic.gnu_hash,
        dynamic.symbols,
        dynamic.names,
        dynamic.relocations[0].0,
    ];
    for table in tables {
        let start = elf.offset_of(table).unwrap() as usize;
        places.push(start..start + 4096);
    }
    let extremes = [0, 1, 0x7f, 0x80, 0xff];
    let mut numbers = Numbers(0x5eed);
    let mut bytes = original.clone();
    for round in 0..6000 {
        let mut changed = Vec::new();
        for _ in 0..=numbers.below(6) {
            let place = places[numbers.below(places.len())].clone();
            let width = [1, 4, 8][numbers.below(3)];
            let start = place.start + numbers.below(place.len() - width);
            for (at, byte) in bytes.iter_mut().enumerate().skip(start).take(width) {
                *byte = match round % 2 {
                    0 => extremes[numbers.below(extremes.len())],
                    _ => numbers.next() as u8,
                };
                changed.push(at);
            }
        }
        ask_everything(bytes.as_slice());
        for at in changed {
            bytes[at] = original[at];
        }
    }
    assert!(bytes == original);
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    let Some(bytes) = libruby() else { return };
    let path = std::env::temp_dir().join(format!("rbprof-elf-{}", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let cache = file_cache(file.try_clone().unwrap());
    let elf = Elf::parse(&cache).unwrap();
    file.set_len(1024).unwrap();
    assert!(elf.dynamic_symbol(b"ruby_version").is_err());
    assert!(elf.tls_relocations().is_err());
    ask_everything(&cache);
}

/// A sparse file may claim any size; nothing is read, and kept, without bound.
#[test]
fn a_file_that_claims_to_be_huge_is_refused() {
    let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let parsed = |edit: &dyn Fn(&mut Vec<u8>), size: u64| {
        let mut bytes = own[..64.max(own.len().min(1 << 20))].to_vec();
        edit(&mut bytes);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.set_len(size).unwrap();
        let cache = file_cache(file);
        let elf = Elf::parse(&cache)?;
        elf.is_stripped()
    };
    // e_phnum is PN_XNUM: the number stands elsewhere.
    let many = parsed(
        &|bytes| bytes[56..58].copy_from_slice(&[0xff, 0xff]),
        40 << 30,
    );
    assert_eq!(many, Err(ElfError::Malformed("segments that are too many")));
    // e_shnum is 0: the number stands elsewhere as well.
    let many = parsed(&|bytes| bytes[60..62].copy_from_slice(&[0, 0]), 40 << 30);
    assert_eq!(many, Err(ElfError::Malformed("sections that are too many")));

    let file = tempfile::tempfile().unwrap();
    file.set_len(8 << 30).unwrap();
    let cache = file_cache(file);
    let piece = 64 << 20;
    let read = (0..16).take_while(|index| (&cache).read_bytes_at(index * piece, piece).is_ok());
    assert_eq!(read.count(), 8);
}
