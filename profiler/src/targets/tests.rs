//! Attaching to live processes.
//!
//! `RBPROF_TEST_RUBY` is the command that starts Ruby (words separated by
//! spaces; `ruby` unless given). Without one the tests that need it say that
//! they are skipped, or fail where `RBPROF_REQUIRE_ALL=1`.

use std::io::BufRead;
use std::io::BufReader;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::ChildStdin;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use rbprof_common::Memory;
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
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the register set is copied into `words`, whose length is given.
    unsafe {
        if libc::ptrace(libc::PTRACE_SEIZE, tid, none, none) != 0 {
            return None;
        }
        libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none);
        libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL);
        let status = libc::ptrace(
            libc::PTRACE_GETREGSET,
            tid,
            std::ptr::without_provenance_mut::<libc::c_void>(SET as usize),
            &raw mut vector,
        );
        libc::ptrace(libc::PTRACE_DETACH, tid, none, none);
        (status == 0).then_some(words[WORD])
    }
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
    assert!(code.end > code.start + 500);

    // The symbol table, by name or by its looks: both must agree.
    let variable = target.global_symbols.expect("the symbol table");
    let last_id = TargetMemory::word(&memory, variable).unwrap();
    assert!((500..1 << 20).contains(&last_id), "{last_id}");
    let scanned = global_symbols::scan(&target.ruby.data, target.ruby.version, &memory);
    assert_eq!(scanned, Some(variable));
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
    let found = ruby::find(&target.process, &memory, &mappings).unwrap();
    let elf = found.image.elf().unwrap();
    let symbols = roots::Symbols::of(&elf);
    let offset = symbols.current_ec.unwrap().symbol.value;
    let relocations = tls::relocations(&elf);
    let bias = found.image.bias;
    let access = tls::access(&relocations, bias, b"ruby_current_ec", offset, &memory);
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
    let compiled = Command::new("cc")
        .args([
            source.as_path(),
            Path::new("-o"),
            &program,
            Path::new("-ldl"),
        ])
        .status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "a C compiler is needed"
    );
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
}
