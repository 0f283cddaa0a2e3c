//! Unwind tables say what the call frame information says, on real files of
//! both machines, and lead to the callers of real stacks.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use rbprof::targets::elf::Elf;
use rbprof::unwind::Reason;
use rbprof::unwind::Table;
use rbprof_common::Fault;
use rbprof_common::Memory;
use rbprof_common::memory::Window;
use rbprof_common::unwind::CHUNK_ROWS;
use rbprof_common::unwind::Chunk;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Registers;
use rbprof_common::unwind::Row;
use rbprof_common::unwind::Stepped;
use rbprof_common::unwind::find;
use rbprof_common::unwind::step;
use rbprof_tests::cfi::Caller;
use rbprof_tests::cfi::Cfi;
use rbprof_tests::cfi::Frame;
use rbprof_tests::rig;
use xtask::rubies;

/// Addresses looked at in one file.
const SAMPLED: usize = 20_000;

/// Memory that has another word at each address, all of them above any stack
/// pointer used here, so that no frame is refused for leading backwards.
struct Noise;

impl Noise {
    fn at(address: u64) -> u64 {
        let noise = address.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        0x7f00_0000_0000 | (noise & 0x00ff_ffff_fff8)
    }
}

impl Memory for Noise {
    fn word(&self, addr: u64) -> Result<u64, Fault> {
        Ok(Self::at(addr))
    }

    fn words3(&self, _: u64) -> Result<[u64; 3], Fault> {
        Err(Fault)
    }

    fn window(&self, _: u64, _: &mut Window, _: usize) -> Result<(), Fault> {
        Err(Fault)
    }
}

/// What a file came to.
#[derive(Default)]
struct Compared {
    steps: usize,
    ends: usize,
    undescribed: usize,
    inexpressible: usize,
}

fn table_of(data: &[u8]) -> Result<(Table, Duration)> {
    let elf = Elf::parse(data)?;
    let start = Instant::now();
    let table = rbprof::unwind::compile(&elf, None)?;
    Ok((table, start.elapsed()))
}

/// The rule number as the kernel half finds it: in a chunk, between the rows of
/// other pages.
fn found_in_chunk(table: &Table, address: u64) -> Option<u16> {
    let number = u32::try_from(address / PAGE).ok()?;
    let page = table.pages().iter().find(|page| page.number == number)?;
    let rows = table.rows_of(*page);
    let mut chunk = vec![Row { pc: 0, rule: 1 }; CHUNK_ROWS];
    let first = CHUNK_ROWS - rows.len() - 1;
    chunk
        .get_mut(first..first + rows.len())?
        .copy_from_slice(rows);
    let chunk: Box<Chunk> = chunk.try_into().ok()?;
    let pc = (address % PAGE) as u16;
    Some(find(&chunk, first as u32, page.count, pc))
}

/// `mov $435, %eax`: what comes before that.
const CLONE3: &[u8] = &[0xb8, 0xb3, 1, 0, 0];

/// Holds one address of a table against the call frame information.
fn compare<'data>(
    table: &Table,
    elf: &Elf<'data, &'data [u8]>,
    cfi: &mut Cfi<'_>,
    address: u64,
    seen: &mut Compared,
) -> Result<()> {
    let frame = Frame {
        pc: address,
        sp: 0x7000_0000_0000 + 16 * (address % 4096),
        fp: 0x7000_0200_0000 + 16 * (address % 1021),
        lr: 0x5555_0000_0000 + address,
    };
    let word = |address| Some(Noise::at(address));
    let expected = cfi.caller(address, &frame, &word)?;
    let rule = table.rule(address);
    let mut registers = Registers::newest(frame.pc, frame.sp, frame.fp, frame.lr, u64::MAX);
    let stepped = step(&mut registers, &rule, &Noise);
    let agrees = match (expected, stepped) {
        (Caller::Undescribed, Stepped::Unknown) => {
            seen.undescribed += 1;
            true
        }
        // The entry point has no caller, be it described or not.
        (Caller::End | Caller::Undescribed, Stepped::End) => {
            seen.ends += 1;
            true
        }
        // The system call with which glibc starts a thread.
        (Caller::Undescribed, Stepped::Caller) => {
            let before = address.wrapping_sub(CLONE3.len() as u64);
            elf.bytes(before, CLONE3.len() as u64) == Ok(CLONE3)
        }
        (Caller::Inexpressible, Stepped::Unknown) => {
            seen.inexpressible += 1;
            true
        }
        (Caller::Is { pc, sp, fp }, Stepped::Caller) => {
            seen.steps += 1;
            let told = (registers.fp_known == 1).then_some(registers.fp);
            (pc, sp, fp) == (registers.pc, registers.sp, told)
        }
        _ => false,
    };
    ensure!(
        agrees,
        "{address:#x}: {expected:x?}, not {stepped:?} {registers:x?} by {rule:?}"
    );
    Ok(())
}

/// Holds the first, a middle and the last address of rows against the call frame
/// information, and the address after each.
fn compare_file(path: &Path) -> Result<Compared> {
    let data = std::fs::read(path).with_context(|| path.display().to_string())?;
    let (table, took) = table_of(&data)?;
    let elf = Elf::parse(data.as_slice())?;
    let mut cfi = Cfi::of(&object::File::parse(&*data)?)?;
    let rows = cfi.rows()?;
    let every = (4 * rows.len()).div_ceil(SAMPLED);
    let mut seen = Compared::default();
    for (n, &(start, end)) in rows.iter().step_by(every).enumerate() {
        for address in [start, start + (end - start) / 2, end - 1, end] {
            compare(&table, &elf, &mut cfi, address, &mut seen)
                .with_context(|| path.display().to_string())?;
        }
        if n % 64 == 0
            && let Some(number) = found_in_chunk(&table, start)
        {
            let rule = table.rules().get(usize::from(number)).copied();
            ensure!(rule == Some(table.rule(start)), "{start:#x}: {rule:?}");
        }
    }
    report(path, &data, &table, took)?;
    ensure!(seen.steps > rows.len().min(SAMPLED) / 2, "{}", seen.steps);
    let statistics = table.statistics();
    for reason in Reason::ALL {
        let share = statistics.inexpressible(reason);
        // The loader's resolver of lazily bound functions, three times over for
        // three kinds of processor, finds its frame by `rbx`; assembly of OpenSSL
        // finds it by `rax` or `r11`.
        ensure!(
            share.text * 40 <= statistics.described.text,
            "{}: {reason:?} is {share:?} of {:?}",
            path.display(),
            statistics.described
        );
    }
    Ok(seen)
}

fn report(path: &Path, data: &[u8], table: &Table, took: Duration) -> Result<()> {
    let statistics = table.statistics();
    let text: u64 = Elf::parse(data)?
        .loads()
        .iter()
        .filter(|load| load.executable)
        .map(|load| load.file_size)
        .sum();
    let megabytes = text as f64 / (1 << 20) as f64;
    let densest = table.pages().iter().map(|page| page.count).max();
    println!(
        "{}: {megabytes:.2} MB of text, {} functions, {} rows of {}, at most {} a page, {} rules, \
         {:.0} KB/MB, {:.1} ms/MB",
        path.file_name().unwrap_or_default().display(),
        statistics.functions,
        table.rows().len(),
        statistics.described.rows,
        densest.unwrap_or(0),
        table.rules().len(),
        table.size() as f64 / 1024.0 / megabytes,
        took.as_secs_f64() * 1000.0 / megabytes
    );
    for reason in Reason::ALL {
        let share = statistics.inexpressible(reason);
        if share.rows > 0 {
            println!("  {reason:?}: {} rows, {} bytes", share.rows, share.text);
        }
    }
    Ok(())
}

/// The interpreter's file of a Ruby of the rig, and the libraries beside it.
fn files_of(name: &str) -> Result<Vec<PathBuf>> {
    let Some(ruby) = rig::ruby(name)? else {
        return Ok(Vec::new());
    };
    let mut files = vec![ruby.ruby.clone()];
    let prefix = ruby.ruby.parent().and_then(Path::parent);
    let prefix = prefix.context("no prefix")?;
    for folder in ["lib", "lib/x86_64-linux-gnu"] {
        let Ok(entries) = std::fs::read_dir(prefix.join(folder)) else {
            continue;
        };
        let names = ["libruby", "libc.so.6", "libcrypto.so", "ld-linux"];
        let wanted = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                names.iter().any(|start| name.starts_with(start)) && name.contains(".so")
            })
            .filter_map(|path| path.canonicalize().ok());
        files.extend(wanted);
    }
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

#[cfg(target_arch = "x86_64")]
#[test]
fn tables_of_the_rig_say_what_their_files_say() -> Result<()> {
    let mut files = vec![std::env::current_exe()?];
    for name in ["debian-3.1.2", "source-3.3.8", "source-3.4.5-static"] {
        files.extend(files_of(name)?);
    }
    let mut ends = 0;
    for file in files {
        ends += compare_file(&file)?.ends;
    }
    ensure!(ends > 0, "no end of a stack");
    Ok(())
}

#[test]
fn tables_of_arm64_say_what_their_files_say() -> Result<()> {
    for foreign in rubies::FOREIGN {
        let library = match foreign.library() {
            Ok(library) => library,
            Err(error) => {
                rig::skip(&error.to_string())?;
                continue;
            }
        };
        let folder = library.parent().context("no folder")?;
        compare_file(&library)?;
        for name in ["libcrypto.so.3", "libc.so.6"] {
            if let Ok(path) = folder.join(name).canonicalize() {
                compare_file(&path)?;
            }
        }
    }
    Ok(())
}
