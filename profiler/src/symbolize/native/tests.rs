//! The names of real files: this program, its libc, and what compilers make.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use super::table::RawTable;
use super::table::Which;
use super::table::functions;
use super::*;
use crate::profile::FunctionKind;
use crate::targets::elf::Elf;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);

/// Two functions that call each other's kind, in C or C++.
const PROGRAM: &str = "
    static int __attribute__((noinline)) hidden(int n) { return n * 3; }
    #ifdef __cplusplus
    namespace shop { struct Order { int total(int n) const; }; }
    int __attribute__((noinline)) shop::Order::total(int n) const { return hidden(n) + 1; }
    extern \"C\" {
    #endif
    int visible(int n) { return hidden(n) + n; }
    #ifdef __cplusplus
    }
    #endif
";

/// A shared object, compiled, and the addresses of its symbols.
struct Built {
    dir: TempDir,
    path: PathBuf,
    symbols: BTreeMap<String, u64>,
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn built(compiler: &str) -> Built {
    let dir = tempfile::tempdir().unwrap();
    let source = dir
        .path()
        .join(if compiler == "cc" { "a.c" } else { "a.cc" });
    fs::write(&source, PROGRAM).unwrap();
    let path = dir.path().join("liba.so");
    run(Command::new(compiler)
        .args(["-O1", "-g", "-shared", "-fPIC", "-Wl,--build-id", "-o"])
        .args([&path, &source]));
    let data = fs::read(&path).unwrap();
    let elf = Elf::parse(data.as_slice()).unwrap();
    let names = [
        "hidden",
        "visible",
        "_ZL6hiddeni",
        "_ZNK4shop5Order5totalEi",
    ];
    let found = elf.static_symbols(names.map(str::as_bytes)).unwrap();
    let symbols = (names.iter().zip(found))
        .filter_map(|(name, symbol)| Some(((*name).to_owned(), symbol?.value)))
        .collect();
    Built { dir, path, symbols }
}

fn object(path: &Path) -> ObjectFile {
    ObjectFile {
        file: Arc::new(File::open(path).unwrap()),
        path: path.to_str().unwrap().into(),
        process: None,
    }
}

/// The name of one address of one file.
fn name_of(object: ObjectFile, address: u64) -> (Option<Arc<Function>>, Vec<String>) {
    let mut names = NativeNames::start(DEFAULT_BUDGET).unwrap();
    names.add_object(7, object);
    names.want(7, address);
    assert!(names.wait(LONG));
    (names.lookup(7, address), names.notes())
}

/// The file and the file's address of a function of this process.
fn mapped(address: u64) -> (String, u64) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let hex = |text| u64::from_str_radix(text, 16).unwrap();
        (hex(start)..hex(end)).contains(&address)
    });
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    let hex = |text| u64::from_str_radix(text, 16).unwrap();
    let offset = address - hex(words[0].split('-').next().unwrap()) + hex(words[2]);
    let path = words[5];
    let data = fs::read(path).unwrap();
    let elf = Elf::parse(data.as_slice()).unwrap();
    let load = elf
        .loads()
        .iter()
        .find(|load| (load.offset..load.offset + load.file_size).contains(&offset))
        .unwrap();
    (path.to_owned(), offset - load.offset + load.address)
}

#[test]
fn this_program_and_its_libc_have_names() {
    let here = this_program_and_its_libc_have_names as *const () as u64;
    let (program, own) = mapped(here + 1);
    let (libc, raise) = mapped(libc::raise as *const () as u64 + 1);
    let mut names = NativeNames::start(DEFAULT_BUDGET).unwrap();
    names.add_object(2, object(program.as_ref()));
    names.add_object(3, object(libc.as_ref()));
    for _ in 0..3 {
        names.want(2, own);
        names.want(3, raise);
        names.want(3, raise + 1);
        names.want(4, 1);
    }
    assert!(names.wait(LONG));
    let function = names.lookup(2, own).unwrap();
    let label = "rbprof::symbolize::native::tests::this_program_and_its_libc_have_names";
    assert_eq!(&*function.label, label);
    assert!(function.base_label.starts_with("_"), "{function:?}");
    assert_eq!(*function.file, *program);
    assert_eq!(
        (function.kind, function.first_line),
        (FunctionKind::Native, 0)
    );
    let function = names.lookup(3, raise).unwrap();
    assert_eq!(
        (&*function.label, &*function.base_label),
        ("raise", "raise")
    );
    assert!(Arc::ptr_eq(&function, &names.lookup(3, raise + 1).unwrap()));
    assert_eq!(names.lookup(4, 1), None);
    assert_eq!(names.notes(), [""; 0]);
}

#[test]
fn static_functions_have_names_until_they_are_stripped() {
    let built = built("cc");
    let (hidden, visible) = (built.symbols["hidden"], built.symbols["visible"]);
    let label = |path: &Path, address| {
        let (function, notes) = name_of(object(path), address);
        assert_eq!(notes, [""; 0]);
        function.map(|function| function.label.to_string())
    };
    assert_eq!(label(&built.path, hidden + 1).as_deref(), Some("hidden"));
    assert_eq!(label(&built.path, visible + 1).as_deref(), Some("visible"));
    run(Command::new("strip").arg("--strip-all").arg(&built.path));
    assert_eq!(label(&built.path, hidden + 1), None);
    assert_eq!(label(&built.path, visible + 1).as_deref(), Some("visible"));
}

#[test]
fn a_separate_debug_file_names_what_was_stripped() {
    let built = built("cc");
    let debug = built.dir.path().join("liba.so.debug");
    run(Command::new("objcopy")
        .arg("--only-keep-debug")
        .args([&built.path, &debug]));
    run(Command::new("strip").arg("--strip-all").arg(&built.path));
    let mut link = OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    run(Command::new("objcopy").arg(link).arg(&built.path));
    let hidden = built.symbols["hidden"] + 1;
    let of_process = ObjectFile {
        process: Some(Arc::new(PinnedProcess::open(std::process::id()).unwrap())),
        ..object(&built.path)
    };
    for object in [object(&built.path), of_process] {
        let (function, _) = name_of(object, hidden);
        assert_eq!(&*function.unwrap().label, "hidden");
    }
    // The debug file of another build.
    fs::write(&debug, fs::read("/proc/self/exe").unwrap()).unwrap();
    let (function, _) = name_of(object(&built.path), hidden);
    assert_eq!(function, None);
}

#[test]
fn names_of_cpp_are_as_their_authors_wrote_them() {
    let built = built("c++");
    let address = built.symbols["_ZNK4shop5Order5totalEi"];
    let (function, _) = name_of(object(&built.path), address + 2);
    let function = function.unwrap();
    assert_eq!(&*function.label, "shop::Order::total(int) const");
    assert_eq!(&*function.base_label, "_ZNK4shop5Order5totalEi");
}

#[test]
fn a_deleted_file_is_named_by_what_was_opened() {
    let built = built("cc");
    let object = object(&built.path);
    fs::remove_file(&built.path).unwrap();
    let (function, _) = name_of(object, built.symbols["hidden"]);
    assert_eq!(&*function.unwrap().label, "hidden");
}

#[test]
fn a_file_that_was_cut_or_spoilt_does_no_harm() {
    let built = built("cc");
    let whole = fs::read(&built.path).unwrap();
    let mut names = NativeNames::start(DEFAULT_BUDGET).unwrap();
    let address = built.symbols["hidden"];
    let mut id = 2;
    let mut add = |names: &mut NativeNames, data: &[u8]| {
        let path = built.dir.path().join("spoilt.so");
        fs::write(&path, data).unwrap();
        names.add_object(id, object(&path));
        names.want(id, address);
        // Otherwise the file changes while it waits.
        assert!(names.wait(LONG));
        id += 1;
    };
    for length in (0..whole.len()).step_by(whole.len() / 60) {
        add(&mut names, &whole[..length]);
    }
    assert!(!names.notes().is_empty(), "cut files are told of");
    // Every field of the section headers, one after the other.
    let sections = u64::from_le_bytes(whole[0x28..0x30].try_into().unwrap());
    let sections = usize::try_from(sections).unwrap();
    for at in (sections..whole.len()).step_by(4) {
        let mut spoilt = whole.clone();
        let end = (at + 4).min(spoilt.len());
        spoilt[at..end].fill(0xff);
        add(&mut names, &spoilt);
    }
    add(&mut names, &whole);
    assert_eq!(&*names.lookup(id - 1, address).unwrap().label, "hidden");
}

#[test]
fn a_file_cut_while_in_use_does_no_harm() {
    let built = built("cc");
    let mut names = NativeNames::start(DEFAULT_BUDGET).unwrap();
    names.add_object(2, object(&built.path));
    names.want(2, built.symbols["hidden"]);
    assert!(names.wait(LONG));
    fs::OpenOptions::new()
        .write(true)
        .open(&built.path)
        .unwrap()
        .set_len(0)
        .unwrap();
    let visible = built.symbols["visible"];
    names.want(2, visible);
    assert!(names.wait(LONG));
    assert_eq!(&*names.lookup(2, visible).unwrap().label, "visible");
}

#[test]
fn code_that_is_mapped_from_no_file_is_named_by_a_copy() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
    let (range, _) = line.split_once(' ').unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let hex = |text| u64::from_str_radix(text, 16).unwrap();
    let mut contents = vec![0; usize::try_from(hex(end) - hex(start)).unwrap()];
    let memory = File::open("/proc/self/mem").unwrap();
    memory.read_exact_at(&mut contents, hex(start)).unwrap();
    let mut copy = tempfile::tempfile().unwrap();
    copy.write_all(&contents).unwrap();

    let tables = [RawTable::read(&copy, Which::Dynamic).unwrap().unwrap()];
    let functions = functions(&tables);
    let clock = functions
        .iter()
        .find(|f| f.name.ends_with(b"clock_gettime"));
    let object = ObjectFile {
        file: Arc::new(copy),
        path: "[vdso]".into(),
        process: None,
    };
    let (function, notes) = name_of(object, clock.unwrap().start + 1);
    let function = function.unwrap();
    assert!(function.label.ends_with("clock_gettime"), "{function:?}");
    assert_eq!(&*function.file, "[vdso]");
    assert_eq!(notes, [""; 0]);
}

#[test]
fn files_beyond_the_budget_are_read_again() {
    let (c, cpp) = (built("cc"), built("c++"));
    let mut names = NativeNames::start(1).unwrap();
    names.add_object(2, object(&c.path));
    names.add_object(3, object(&cpp.path));
    for offset in 0..3 {
        names.want(2, c.symbols["hidden"] + offset);
        names.want(3, cpp.symbols["visible"] + offset);
    }
    assert!(names.wait(LONG));
    for offset in 0..3 {
        let label = |id, address| names.lookup(id, address).unwrap().label.to_string();
        assert_eq!(label(2, c.symbols["hidden"] + offset), "hidden");
        assert_eq!(label(3, cpp.symbols["visible"] + offset), "visible");
    }
}

fn kernel_name(kallsyms: &str, address: u64) -> (Option<String>, Vec<String>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(kallsyms.as_bytes()).unwrap();
    let mut names = NativeNames::start_with(DEFAULT_BUDGET, file.path()).unwrap();
    names.want_kernel(address);
    assert!(names.wait(LONG));
    let function = names.lookup_kernel(address);
    let label = function.map(|function| {
        assert_eq!(function.kind, FunctionKind::Kernel);
        function.label.to_string()
    });
    (label, names.notes())
}

#[test]
fn kernel_functions_have_names_where_the_kernel_tells() {
    let told = "ffffffff81000000 T do_syscall_64\n\
                ffffffff81000010 D some_data\n\
                ffffffff81000020 t nf_hook\t[nf_tables]\n";
    let name = |address| kernel_name(told, address);
    let named = |label: &str| (Some(label.to_owned()), Vec::new());
    assert_eq!(name(0xffff_ffff_8100_0018), named("do_syscall_64"));
    assert_eq!(name(0xffff_ffff_8100_0020), named("nf_hook"));
    assert_eq!(name(0xffff_ffff_8000_0000), (None, Vec::new()));
    let hidden = "0000000000000000 T do_syscall_64\n0000000000000000 t nf_hook\n";
    let (label, notes) = kernel_name(hidden, 0xffff_ffff_8100_0018);
    assert_eq!(label, None);
    assert!(notes[0].contains("kptr_restrict"), "{notes:?}");
}

#[test]
fn the_running_kernel_has_names_for_root() {
    let list = fs::read_to_string(KALLSYMS).unwrap();
    let address = list.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[2] == "do_syscall_64" || words[2] == "invoke_syscall")
            .then(|| (u64::from_str_radix(words[0], 16).unwrap(), words[2]))
    });
    let mut names = NativeNames::start(DEFAULT_BUDGET).unwrap();
    match address {
        Some((address, name)) if address != 0 => {
            names.want_kernel(address + 4);
            assert!(names.wait(LONG));
            assert_eq!(&*names.lookup_kernel(address + 4).unwrap().label, name);
        }
        // Not root: addresses are hidden, and that is said.
        _ => {
            names.want_kernel(u64::MAX - 1);
            assert!(names.wait(LONG));
            assert!(names.notes()[0].contains("kernel functions have no names"));
        }
    }
}
