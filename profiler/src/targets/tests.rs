//! Attaching to live processes.
//!
//! `RBPROF_TEST_RUBY` is the command that starts Ruby (words separated by
//! spaces; `ruby` unless given). Without one the tests that need it say that
//! they are skipped, or fail where `RBPROF_REQUIRE_ALL=1`.

use std::io::BufRead;
use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::ChildStdin;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use rbprof_common::process::root;
use rbprof_common::roots::context_of;

use super::*;
use crate::memory::ProcessMemory;
use crate::memory::TargetMemory;

/// A child that is killed at the end of the test.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Closed when the test ends.
    _input: ChildStdin,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        // SAFETY: one system call, which is safe after a fork. The program must
        // not outlive a test run that is killed.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            output: BufReader::new(child.stdout.take().unwrap()),
            _input: child.stdin.take().unwrap(),
            child,
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the program ended");
        line.trim_end().to_owned()
    }

    fn attach(&self) -> Result<Target, AttachError> {
        attach(self.pid(), &thread_pointers(self.pid()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The words of the command that starts Ruby.
fn ruby() -> Option<Vec<String>> {
    let words: Vec<String> = std::env::var("RBPROF_TEST_RUBY")
        .unwrap_or_else(|_| "ruby".to_owned())
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let found = Command::new(&words[0])
        .args(&words[1..])
        .arg("-v")
        .output()
        .is_ok_and(|output| output.status.success());
    if !found {
        skip("no Ruby to test with");
    }
    found.then_some(words)
}

fn skip(why: &str) {
    let required = std::env::var_os("RBPROF_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "{why}");
    eprintln!("skipped: {why}");
}

/// The libruby that the system's Ruby says it runs.
pub(super) fn libruby() -> Option<PathBuf> {
    let output = Command::new("ruby")
        .args([
            "-e",
            "print File.read('/proc/self/maps')[%r{/\\S*/libruby\\S*}]",
        ])
        .output()
        .ok()
        .filter(|output| output.status.success() && !output.stdout.is_empty());
    let path = output.map(|output| PathBuf::from(String::from_utf8(output.stdout).unwrap()));
    if path.is_none() {
        skip("no libruby to test with");
    }
    path
}

/// Runs a script that must print a line when it is ready.
fn run(words: &[String], script: &str) -> Running {
    let mut running = Running::start(
        Command::new(&words[0])
            .args(&words[1..])
            .args(["-e", script]),
    );
    running.line();
    running
}

const THREE_THREADS: &str = "
    running = Queue.new
    2.times { Thread.new { running << 1; loop { 1 + 1 } } }
    2.times { running.pop }
    $stdout.puts 'ready'; $stdout.flush
    sleep
";

/// The thread pointers of a process, by stopping each thread for a moment: only
/// tests may do that.
fn thread_pointers(pid: u32) -> Vec<ThreadPointer> {
    let process = crate::memory::PinnedProcess::open(pid).unwrap();
    proc::threads(&process)
        .unwrap()
        .into_iter()
        .filter_map(|tid| {
            let value = thread_pointer(tid.cast_signed())?;
            Some(ThreadPointer { tid, value })
        })
        .collect()
}

fn thread_pointer(tid: i32) -> Option<u64> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: no memory of this process is handed out.
    unsafe {
        if libc::ptrace(libc::PTRACE_SEIZE, tid, none, none) != 0 {
            return None;
        }
        libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none);
        libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL);
    }
    let value = stopped_thread_pointer(tid);
    // SAFETY: no memory of this process is handed out.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, none, none) };
    value
}

/// The thread pointer of a thread that is stopped by `ptrace`.
fn stopped_thread_pointer(tid: i32) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    const SET: libc::c_int = libc::NT_PRSTATUS;
    #[cfg(target_arch = "x86_64")]
    const WORD: usize = std::mem::offset_of!(libc::user_regs_struct, fs_base) / 8;
    #[cfg(target_arch = "aarch64")]
    const SET: libc::c_int = 0x401; // NT_ARM_TLS
    #[cfg(target_arch = "aarch64")]
    const WORD: usize = 0;

    let mut words = [0_u64; 64];
    let mut vector = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: size_of_val(&words),
    };
    // SAFETY: the register set is copied into `words`, whose length is given.
    let status = unsafe {
        libc::ptrace(
            libc::PTRACE_GETREGSET,
            tid,
            std::ptr::without_provenance_mut::<libc::c_void>(SET as usize),
            &raw mut vector,
        )
    };
    (status == 0).then_some(words[WORD])
}

fn memory_of(target: &Target) -> ProcessMemory {
    ProcessMemory::open(std::sync::Arc::clone(&target.process)).unwrap()
}

#[test]
fn every_thread_of_a_live_ruby_has_its_own_context() {
    let Some(words) = ruby() else { return };
    let running = run(&words, THREE_THREADS);
    let threads = thread_pointers(running.pid());
    let target = attach(running.pid(), &threads).unwrap();
    println!(
        "{} {:x?}\n{:#?}",
        target.ruby.path, target.entry, target.provenance
    );
    assert_eq!(target.identity.pid, running.pid());
    assert!(!target.ruby.layout_assumed);
    assert!(target.command.contains("2.times"), "{}", target.command);

    let memory = memory_of(&target);
    let mut contexts: Vec<_> = threads
        .iter()
        .filter_map(|thread| context_of(&target.entry, thread.value, &memory).ok())
        .map(|context| context.ec)
        .collect();
    contexts.sort_unstable();
    contexts.dedup();
    let expected = if target.entry.root == root::GLOBAL {
        1
    } else {
        3
    };
    assert_eq!(contexts.len(), expected);
    assert_eq!(
        target.entry.root == root::GLOBAL,
        target.ruby.version.major < 3
    );
    if target.entry.root != root::GLOBAL {
        assert_eq!(target.entry.root, root::TLS_STATIC);
        assert!(target.entry.ec < 0 || cfg!(not(target_arch = "x86_64")));
    }
    let code = target.entry.vm_exec[0];
    let is_exported = target.provenance.iter().any(|it| it.what == "rb_vm_exec");
    assert_eq!(code.end > code.start + 500, is_exported);
    assert_eq!(
        target.warnings.is_empty(),
        is_exported,
        "{:?}",
        target.warnings
    );

    // The symbol table, by name or by its looks: both must agree.
    let variable = target.global_symbols.expect("the symbol table");
    let last_id = TargetMemory::word(&memory, variable).unwrap();
    assert!((500..1 << 20).contains(&last_id), "{last_id}");
    let scanned = target.ruby.scan_for_global_symbols(&memory);
    assert_eq!(scanned.map(|found| found.address), Ok(variable));
}

#[test]
fn both_ways_to_a_thread_s_block_lead_to_the_same_context() {
    let Some(words) = ruby() else { return };
    let running = run(&words, THREE_THREADS);
    let threads = thread_pointers(running.pid());
    let target = attach(running.pid(), &threads).unwrap();
    if target.entry.root != root::TLS_STATIC {
        return;
    }
    let memory = memory_of(&target);
    let mappings = proc::mappings(&target.process).unwrap();
    let found = ruby::find(&target.process, &memory, &mappings, 0).unwrap();
    let elf = found.image.elf().unwrap();
    let symbols = roots::Symbols::of(&elf);
    let Some(symbol) = symbols.current_ec else {
        return;
    };
    let offset = symbol.symbol.value;
    let relocations = tls::relocations(&elf);
    let bias = found.image.bias;
    let machine = elf.machine();
    let name = b"ruby_current_ec";
    let access = tls::access(machine, &relocations, bias, name, offset, &memory);
    let tls::Access::Block { module, offset } = access else {
        panic!("{access:?}")
    };
    let mut entry = target.entry;
    entry.root = root::TLS_DTV;
    entry.module = module;
    entry.ec = offset.cast_signed();
    entry.dtv = tls::CLibrary::of(&mappings).dtv(elf.machine()).unwrap();
    let by_vector = validate::check(&entry, &threads, &memory);
    let by_offset = validate::check(&target.entry, &threads, &memory);
    assert_eq!(by_vector.validated.len(), 3);
    assert_eq!(
        by_vector
            .validated
            .iter()
            .map(|it| it.ec)
            .collect::<Vec<_>>(),
        by_offset
            .validated
            .iter()
            .map(|it| it.ec)
            .collect::<Vec<_>>()
    );
}

#[test]
fn what_is_recovered_is_what_the_symbols_say() {
    let Some(words) = ruby() else { return };
    let running = run(&words, THREE_THREADS);
    let threads = thread_pointers(running.pid());
    let target = attach(running.pid(), &threads).unwrap();
    let mut blind = Attacher {
        ignore_symbols: true,
        ..Attacher::default()
    };
    let recovered = blind.attach(running.pid(), &threads).unwrap();
    assert_eq!(recovered.entry, target.entry);
    assert_eq!(recovered.global_symbols, target.global_symbols);
    assert_eq!(recovered.vm_exec_candidate, None);
    // Each by two ways that know nothing of each other.
    let (vm, context) = if target.entry.root == root::GLOBAL {
        (
            "from the threads' contexts, which agree",
            "the only context among what the code of rb_thread_current refers to",
        )
    } else {
        (
            "where ruby_vm_at_exit looks",
            "by the code of rb_thread_current, and by",
        )
    };
    for (what, both) in [
        ("VM", vm),
        ("execution context", context),
        ("ruby_global_symbols", "where rb_id2str looks"),
        (
            "rb_vm_exec",
            "rb_iseq_eval ends with, and the caller of the interpreter",
        ),
        ("rb_vm_exec", "a native stack has calls from it"),
    ] {
        let by = recovered.provenance.iter().filter(|it| it.what == what);
        let by: Vec<_> = by.map(|it| &it.how).collect();
        assert!(by.iter().any(|how| how.contains(both)), "{what}: {by:?}");
    }
    // The same file is not analysed again.
    assert_eq!(blind.analyses.analysed, 1);
    let again = blind.attach(running.pid(), &threads).unwrap();
    assert_eq!(again.entry, target.entry);
    assert_eq!(blind.analyses.analysed, 1);
}

#[test]
fn without_the_vm_nothing_is_taken_for_a_context() {
    let Some(words) = ruby() else { return };
    let running = run(&words, THREE_THREADS);
    let threads = thread_pointers(running.pid());
    let target = attach(running.pid(), &threads).unwrap();
    if target.entry.root == root::GLOBAL {
        return;
    }
    let memory = memory_of(&target);
    let mappings = proc::mappings(&target.process).unwrap();
    let found = ruby::find(&target.process, &memory, &mappings, 0).unwrap();
    let elf = found.image.elf().unwrap();
    let mut entry = rbprof_common::process::ProcessEntry {
        layout: target.ruby.layout.walk,
        ..Default::default()
    };
    let loaded = roots::Loaded {
        version: target.ruby.version,
        bias: found.image.bias,
        is_program: target.ruby.is_program,
        library: tls::CLibrary::of(&mappings),
        threads: &threads,
        offset_in_code: None,
        places_in_code: &[],
    };
    let blind = roots::find(
        &mut entry,
        &roots::Symbols::default(),
        &elf,
        &loaded,
        &memory,
    );
    assert!(
        matches!(blind, Err(roots::RootError::Missing(_))),
        "{blind:?}"
    );
}

/// Runs a traced child to the next system call; `false` when it has ended.
fn to_next_system_call(pid: i32) -> bool {
    let none = std::ptr::null_mut::<libc::c_void>();
    let mut status = 0;
    // SAFETY: no memory of this process is handed out but `status`.
    unsafe {
        libc::ptrace(libc::PTRACE_SYSCALL, pid, none, none);
        libc::waitpid(pid, &raw mut status, libc::__WALL);
    }
    libc::WIFSTOPPED(status)
}

#[test]
fn a_ruby_that_is_starting_is_not_ready_until_it_is() {
    let Some(words) = ruby() else { return };
    // `chroot` is no Ruby until it has become one.
    if words.len() > 1 {
        return;
    }
    let mut command = Command::new(&words[0]);
    command.args(["-e", "1"]).stdout(Stdio::null());
    // SAFETY: one system call, which is safe after a fork. The child stops at
    // the first instruction of the new program.
    unsafe {
        command.pre_exec(|| {
            let none = std::ptr::null_mut::<libc::c_void>();
            libc::ptrace(libc::PTRACE_TRACEME, 0, none, none);
            Ok(())
        });
    }
    let mut child = command.spawn().unwrap();
    let pid = child.id();
    // SAFETY: waits for an own child; the status is not wanted.
    unsafe { libc::waitpid(pid.cast_signed(), std::ptr::null_mut(), libc::__WALL) };
    // From now on every system call of its start is a moment to attach at.
    let mut attacher = Attacher::default();
    let mut before = 0;
    let mut after = 0;
    while after < 20 {
        let threads = [ThreadPointer {
            tid: pid,
            value: stopped_thread_pointer(pid.cast_signed()).unwrap(),
        }];
        match attacher.attach(pid, &threads) {
            Ok(_) => after += 1,
            Err(AttachError::NotReady { .. }) if after == 0 => before += 1,
            Err(other) => panic!("after {before} + {after} system calls: {other}"),
        }
        assert!(before < 5000);
        assert!(to_next_system_call(pid.cast_signed()), "it has ended");
    }
    println!("ready after {before} system calls");
    assert!(before > 20);
    // The symbol table comes a little later than the first context, and is then
    // found by looking again.
    let target = attach(
        pid,
        &[ThreadPointer {
            tid: pid,
            value: stopped_thread_pointer(pid.cast_signed()).unwrap(),
        }],
    )
    .unwrap();
    while target.find_global_symbols(&memory_of(&target)).is_none() {
        assert!(to_next_system_call(pid.cast_signed()), "it has ended");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_program_that_is_no_ruby_is_named() {
    // Its line comes when it is past the loader.
    let mut running = Running::start(Command::new("sh").args(["-c", "echo ready; read line"]));
    running.line();
    let error = running.attach().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, AttachError::NotRuby { .. }), "{text}");
    let expected = format!(
        "process {} (sh -c echo ready; read line) runs no Ruby",
        running.pid()
    );
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.ends_with("among them) defines ruby_version"), "{text}");

    let pid = running.pid();
    drop(running);
    let error = attach(pid, &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("process {pid} does not exist (any more)")
    );
}

#[test]
fn kernel_threads_are_no_ruby() {
    // kthreadd has the id 2 in the initial PID namespace.
    if !proc::in_initial_pid_namespace() || !Path::new("/proc/2/stat").exists() {
        eprintln!("skipped: no kernel threads in this PID namespace");
        return;
    }
    let error = attach(2, &[]).unwrap_err();
    assert!(
        error.to_string().contains("thread of the kernel"),
        "{error}"
    );
}

#[test]
fn without_thread_pointers_nothing_is_believed() {
    let Some(words) = ruby() else { return };
    let running = run(&words, THREE_THREADS);
    let error = attach(running.pid(), &[]).unwrap_err();
    assert!(matches!(error, AttachError::NotReady { .. }), "{error}");
    // Pointers into the void: the process is young, so this may be a start.
    let nowhere = [ThreadPointer { tid: 1, value: 8 }];
    let error = attach(running.pid(), &nowhere).unwrap_err();
    assert!(matches!(error, AttachError::NotReady { .. }), "{error}");
}

/// A directory that is removed at the end of the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rbprof-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_deleted_and_replaced_libruby_is_still_the_one_that_runs() {
    let Some(library) = libruby() else { return };
    let scratch = Scratch::new("deleted");
    // The name that the program asks the loader for: libruby-3.1.so.3.1.
    let name = library.file_name().unwrap().to_str().unwrap();
    let (wanted, _patch) = name.rsplit_once('.').unwrap();
    let copy = scratch.0.join(wanted);
    std::fs::copy(&library, &copy).unwrap();
    let mut running = Running::start(
        Command::new("ruby")
            .args(["-e", THREE_THREADS])
            .env("LD_LIBRARY_PATH", &scratch.0),
    );
    running.line();
    std::fs::remove_file(&copy).unwrap();
    // Whoever went by the path would now find something else.
    std::fs::write(&copy, "not a library").unwrap();
    let target = running.attach().unwrap();
    assert_eq!(Path::new(&target.ruby.path), copy);
    assert!(target.ruby.deleted);
    assert_eq!(target.entry.root, root::TLS_STATIC);
}

/// Loads the library named by its argument under its own power and runs Ruby
/// code in it, as a program does that has Ruby for a plug-in.
const HOST: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    void *ruby = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    if (!ruby) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    int (*setup)(void) = dlsym(ruby, "ruby_setup");
    unsigned long (*eval)(const char *, int *) = dlsym(ruby, "rb_eval_string_protect");
    int state = setup();
    eval(argv[2], &state);
    return state;
}
"#;

#[test]
fn a_libruby_loaded_late_is_reached_through_the_thread_vector() {
    let Some(library) = libruby() else { return };
    let scratch = Scratch::new("host");
    let source = scratch.0.join("host.c");
    let program = scratch.0.join("host");
    // A library under a name that says nothing.
    let plugin = scratch.0.join("plugin.so");
    std::fs::write(&source, HOST).unwrap();
    std::fs::copy(&library, &plugin).unwrap();
    let [source, output] = [&source, &program].map(|path| path.to_str().unwrap());
    compile(&[source, "-o", output, "-ldl"]);
    let mut running = Running::start(Command::new(&program).arg(&plugin).arg(THREE_THREADS));
    running.line();
    let target = running.attach().unwrap();
    println!("{:#?}", target.provenance);
    assert_eq!(Path::new(&target.ruby.path), plugin);
    assert_eq!(target.entry.root, root::TLS_DTV);
    let memory = memory_of(&target);
    let threads = thread_pointers(running.pid());
    let evidence = validate::check(&target.entry, &threads, &memory);
    let mut contexts: Vec<_> = evidence.validated.iter().map(|it| it.ec).collect();
    contexts.sort_unstable();
    contexts.dedup();
    assert_eq!(contexts.len(), 3);
    // One thread alone has one distance, and proves nothing by it.
    let alone = attach(running.pid(), &threads[..1]).unwrap();
    assert_eq!(alone.entry.root, root::TLS_DTV);
}

/// A library that is there and not used must not stand in for the one that is.
#[test]
fn of_two_rubies_the_one_that_runs_is_taken() {
    let Some(library) = libruby() else { return };
    let scratch = Scratch::new("two");
    let source = scratch.0.join("host.c");
    let program = scratch.0.join("host");
    // Looked at first, by its name.
    let idle = scratch.0.join("libruby-idle.so");
    let used = scratch.0.join("plugin.so");
    let host = HOST.replace(
        "void *ruby =",
        "if (!dlopen(argv[3], RTLD_NOW | RTLD_LOCAL)) return 2;\n    void *ruby =",
    );
    assert_ne!(host, HOST);
    std::fs::write(&source, host).unwrap();
    std::fs::copy(&library, &idle).unwrap();
    std::fs::copy(&library, &used).unwrap();
    let [source, output] = [&source, &program].map(|path| path.to_str().unwrap());
    compile(&[source, "-o", output, "-ldl"]);
    let mut running = Running::start(
        Command::new(&program)
            .arg(&used)
            .arg(THREE_THREADS)
            .arg(&idle),
    );
    running.line();
    let target = running.attach().unwrap();
    assert_eq!(Path::new(&target.ruby.path), used);
    let evidence = validate::check(
        &target.entry,
        &thread_pointers(running.pid()),
        &memory_of(&target),
    );
    assert_eq!(evidence.validated.len(), 3);
}

/// A library with a thread-local pointer to something like an execution context.
const PLUGIN: &str = r#"
#include <stdio.h>
#include <stdlib.h>
__thread long before[3] = {1};
__thread struct context { char *stack; long words; char *frame; } *current;
void set(void) {
    current = malloc(sizeof *current);
    current->stack = calloc(512, 8);
    current->words = 512;
    current->frame = current->stack + 2048;
    printf("%p\n", (void *)current);
    fflush(stdout);
}
"#;

/// Loads it late and uses it in two threads.
const PLUGIN_HOST: &str = r#"
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
static void (*set)(void);
static void *other(void *nothing) { set(); pause(); return nothing; }
int main(int argc, char **argv) {
    pthread_t thread;
    void *plugin = dlopen(argv[1], RTLD_NOW);
    if (!plugin) return 1;
    set = (void (*)(void))dlsym(plugin, "set");
    set();
    pthread_create(&thread, 0, other, 0);
    pause();
}
"#;

/// How each C library keeps thread-local variables of what is loaded late, with
/// its own loader and threads.
#[test]
fn thread_vectors_are_as_each_c_library_lays_them_out() {
    for (compiler, library) in [
        ("cc", tls::CLibrary::Glibc),
        ("musl-gcc", tls::CLibrary::Musl),
    ] {
        let has_compiler = Command::new(compiler)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success());
        if !has_compiler {
            assert!(
                std::env::var_os("RBPROF_REQUIRE_ALL").is_none(),
                "no {compiler}"
            );
            eprintln!("skipped: no {compiler}");
            continue;
        }
        let scratch = Scratch::new(compiler);
        let [plugin_c, host_c, plugin, host] =
            ["plugin.c", "host.c", "plugin.so", "host"].map(|name| scratch.0.join(name));
        std::fs::write(&plugin_c, PLUGIN).unwrap();
        std::fs::write(&host_c, PLUGIN_HOST).unwrap();
        for (source, output, options) in [
            (&plugin_c, &plugin, &["-shared", "-fPIC"][..]),
            (&host_c, &host, &["-ldl", "-lpthread"]),
        ] {
            let mut command = Command::new(compiler);
            command.arg("-o").arg(output).arg(source).args(options);
            assert!(command.status().unwrap().success(), "{compiler}");
        }
        let mut running = Running::start(Command::new(&host).arg(&plugin));
        let mut expected = [running.line(), running.line()]
            .map(|line| u64::from_str_radix(line.trim_start_matches("0x"), 16).unwrap());
        expected.sort_unstable();

        let process = crate::memory::PinnedProcess::open(running.pid()).unwrap();
        let process = std::sync::Arc::new(process);
        let memory = ProcessMemory::open(process.clone()).unwrap();
        let mappings = proc::mappings(&process).unwrap();
        assert_eq!(tls::CLibrary::of(&mappings), library);
        let file = elf::file_cache(std::fs::File::open(&plugin).unwrap());
        let image = elf::Elf::parse(&file).unwrap();
        let offset = image.dynamic_symbol(b"current").unwrap().unwrap().value;
        let dtv = library.dtv(image.machine()).unwrap();
        let threads = thread_pointers(running.pid());
        assert_eq!(threads.len(), 2);
        // The contexts of both threads are in the block of one module only.
        let of_module = |module: u64| {
            let entry = rbprof_common::process::ProcessEntry {
                root: root::TLS_DTV,
                ec: offset.cast_signed(),
                module,
                dtv,
                layout: rbprof_common::layout::LAYOUTS[0].walk,
                ..Default::default()
            };
            let contexts = threads.iter().filter_map(|thread| {
                let context = context_of(&entry, thread.value, &memory).ok()?;
                Some(context.ec)
            });
            let mut contexts: Vec<_> = contexts.collect();
            contexts.sort_unstable();
            contexts
        };
        let right = tls::modules(dtv, library, &threads, &memory)
            .filter(|&module| of_module(module) == expected);
        assert_eq!(right.count(), 1, "{library}");
    }
}

/// Memory made of single words, for what must be tried out of a process.
#[derive(Default)]
pub(super) struct Words(pub(super) std::collections::HashMap<u64, u64>);

impl rbprof_common::Memory for Words {
    fn word(&self, addr: u64) -> Result<u64, rbprof_common::Fault> {
        self.0.get(&addr).copied().ok_or(rbprof_common::Fault)
    }

    fn words3(&self, addr: u64) -> Result<[u64; 3], rbprof_common::Fault> {
        let word = |index: u64| rbprof_common::Memory::word(self, addr + 8 * index);
        Ok([word(0)?, word(1)?, word(2)?])
    }

    fn window(
        &self,
        _: u64,
        _: &mut rbprof_common::memory::Window,
        _: usize,
    ) -> Result<(), rbprof_common::Fault> {
        Err(rbprof_common::Fault)
    }
}

impl TargetMemory for Words {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), rbprof_common::Fault> {
        for (address, bytes) in (address..).step_by(8).zip(buffer.chunks_mut(8)) {
            let word = rbprof_common::Memory::word(self, address)?.to_le_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
        Ok(())
    }
}

/// The child of a process.
fn child_of(pid: u32) -> u32 {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(path).unwrap();
    children.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_ruby_in_other_namespaces_is_found_through_itself() {
    let Some(words) = ruby() else { return };
    let mut inside = ["unshare", "--pid", "--mount", "--fork", "--kill-child"]
        .map(str::to_owned)
        .to_vec();
    let possible = Command::new(&inside[0])
        .args(&inside[1..])
        .arg("true")
        .status();
    if !possible.is_ok_and(|status| status.success()) {
        return skip("namespaces cannot be made");
    }
    inside.extend(words);
    let running = run(&inside, THREE_THREADS);
    let pid = child_of(running.pid());
    let target = attach(pid, &thread_pointers(pid)).unwrap();
    assert_eq!(target.entry.state, rbprof_common::process::state::READY);
    // It is 1 in its own namespace; whoever asks for that is told.
    let elsewhere = proc::known_elsewhere_as(1);
    assert!(
        elsewhere.iter().any(|(here, _)| *here == pid),
        "{elsewhere:?}"
    );
    let error = AttachError::OtherPidNamespace {
        pid: 1,
        here: vec![(pid, "ruby".to_owned())],
    };
    assert!(error.to_string().contains(&format!("{pid} (ruby)")));
}

#[test]
fn without_privileges_the_own_processes_are_open_and_others_are_not() {
    // SAFETY: takes no argument and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    const NOBODY: u32 = 65_534;
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "targets::tests::as_nobody", "--ignored"])
        .uid(NOBODY)
        .gid(NOBODY)
        .status();
    match status {
        Ok(status) => assert!(status.success()),
        Err(error) => skip(&format!("this program is not open to others: {error}")),
    }
}

#[test]
#[ignore = "run as another user by the test before"]
fn as_nobody() {
    let error = attach(1, &[]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, AttachError::Permission { .. }), "{text}");
    assert!(text.contains("CAP_SYS_PTRACE"), "{text}");
    // The way of map_files is closed; the file is opened by its path below the
    // process's root.
    let Some(words) = ruby() else { return };
    if words.len() > 1 {
        return;
    }
    let running = run(&words, THREE_THREADS);
    let target = running.attach().unwrap();
    assert_eq!(target.entry.state, rbprof_common::process::state::READY);
    let mappings = proc::mappings(&target.process).unwrap();
    let range = mappings.iter().find(|it| it.file.is_some()).unwrap().range;
    let link = format!("map_files/{:x}-{:x}", range.start, range.end);
    assert!(target.process.open_below(&link, libc::O_RDONLY).is_err());
}

/// A program with thread-local variables of its own, one of them as Ruby's is
/// named in a program that Ruby is linked into.
const STATIC_HOST: &str = r#"
#include <stdio.h>
__thread char before[5] = "abcd";
_Alignas(ALIGN) __thread long ruby_current_ec = 3;
__thread char after[13];
int main(void) {
    char *self;
    __asm__("mov %%fs:0, %0" : "=r"(self));
    before[0] = after[0] = 1;
    printf("%ld\n", (long)((char *)&ruby_current_ec - self));
    return 0;
}
"#;

#[test]
#[cfg(target_arch = "x86_64")]
fn the_main_program_s_variables_are_where_it_says_itself() {
    let scratch = Scratch::new("static");
    let source = scratch.0.join("host.c");
    let program = scratch.0.join("host");
    std::fs::write(&source, STATIC_HOST).unwrap();
    for align in [8, 64] {
        for kind in ["-pie", "-no-pie"] {
            compile(&[
                source.to_str().unwrap(),
                "-o",
                program.to_str().unwrap(),
                "-rdynamic",
                kind,
                &format!("-DALIGN={align}"),
            ]);
            let output = Command::new(&program).output().unwrap();
            let told: i64 = String::from_utf8(output.stdout)
                .unwrap()
                .trim()
                .parse()
                .unwrap();
            let file = elf::file_cache(std::fs::File::open(&program).unwrap());
            let elf = elf::Elf::parse(&file).unwrap();
            let symbol = elf.dynamic_symbol(b"ruby_current_ec").unwrap().unwrap();
            let tls = elf.tls().unwrap();
            let found = tls::in_main_program(elf.machine(), tls, symbol.value);
            assert_eq!(found, Some(told), "alignment {align}, {kind}");
        }
    }
}

fn compile(arguments: &[&str]) {
    let status = Command::new("cc").args(arguments).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "a C compiler is needed"
    );
}

/// A program that mentions `ruby_version` and is linked for fixed addresses gets
/// a copy of the variable: it is still not the Ruby.
const COPYING_HOST: &str = r#"
#include <stdio.h>
extern const char ruby_version[];
/* Larger than libruby, so that it is looked at first. */
static const volatile char padding[16 << 20] = {1};
extern int ruby_setup(void);
extern unsigned long rb_eval_string_protect(const char *, int *);
int main(int argc, char **argv) {
    int state = ruby_setup();
    rb_eval_string_protect(argv[1], &state);
    return ruby_version[0] == padding[1];
}
"#;

#[test]
fn a_program_with_a_copy_of_the_version_is_not_taken_for_the_ruby() {
    let Some(library) = libruby() else { return };
    let scratch = Scratch::new("copy");
    let source = scratch.0.join("host.c");
    let program = scratch.0.join("ruby");
    std::fs::write(&source, COPYING_HOST).unwrap();
    compile(&[
        source.to_str().unwrap(),
        library.to_str().unwrap(),
        "-o",
        program.to_str().unwrap(),
        "-no-pie",
        "-fno-pie",
    ]);
    let mut running = Running::start(Command::new(&program).arg(THREE_THREADS));
    running.line();
    let target = running.attach().unwrap();
    assert_eq!(Path::new(&target.ruby.path), library);
    let file = elf::file_cache(std::fs::File::open(&program).unwrap());
    let copy = elf::Elf::parse(&file)
        .unwrap()
        .dynamic_symbol(b"ruby_version");
    assert!(matches!(copy, Ok(Some(_))), "the linker has made no copy");
}
