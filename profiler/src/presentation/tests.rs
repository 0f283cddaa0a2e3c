//! Profiles from short notations, presented.

use std::collections::HashMap;
use std::time::Instant;

use super::*;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::Metadata;

/// A recording of notations.
#[derive(Default)]
struct Recording {
    profile: Profile,
    roles: HashMap<MappingId, Role>,
    names: HashMap<(MappingId, u64), Arc<Function>>,
}

fn named(kind: FunctionKind, label: &str, file: &str) -> Arc<Function> {
    let label: Arc<str> = label.into();
    Arc::new(Function {
        kind,
        base_label: Arc::clone(&label),
        label,
        file: file.into(),
        first_line: u32::from(kind == FunctionKind::Ruby),
    })
}

impl Recording {
    /// Samples of a stack, outermost frame first. `foo` is a method in Ruby,
    /// `foo()` one in C, `(foo)` a marker, and `zlib:foo` machine code, of an
    /// object that the role is told by; `zlib:` is code without a name.
    fn sample(&mut self, stack: &str, count: u64) {
        let mut frames: Vec<LocationId> = stack
            .split_whitespace()
            .map(|frame| self.location(frame))
            .collect();
        frames.reverse();
        let stack = self.profile.intern_stack(&frames);
        let labels = self.profile.intern_labels(&Labels::default());
        self.profile.add(stack, labels, count);
    }

    fn location(&mut self, frame: &str) -> LocationId {
        if let Some((object, name)) = frame.split_once(':') {
            return self.native(object, name);
        }
        let function = match frame.strip_suffix("()") {
            Some(method) => named(FunctionKind::CFunction, method, "<cfunc>"),
            None if frame.starts_with('(') => Function::marker(frame),
            None => named(FunctionKind::Ruby, frame, "/app.rb"),
        };
        let function = self.profile.intern_function(&function);
        self.profile.intern_location(function, 1)
    }

    fn native(&mut self, object: &str, name: &str) -> LocationId {
        let (kind, role, file) = match object {
            "kernel" => (
                FunctionKind::Kernel,
                Role::Library,
                "[kernel.kallsyms]".to_owned(),
            ),
            "ruby" => (
                FunctionKind::Native,
                Role::Interpreter,
                "/lib/libruby.so".to_owned(),
            ),
            "static" => (FunctionKind::Native, Role::Program, "/bin/ruby".to_owned()),
            "libc" => (FunctionKind::Native, Role::Libc, "/lib/libc.so".to_owned()),
            "jit" => (FunctionKind::Native, Role::Generated, "[jit]".to_owned()),
            other => {
                let file = format!("/lib/{other}.so");
                (FunctionKind::Native, Role::of_file(&file), file)
            }
        };
        let mapping = self.profile.intern_mapping(&Mapping {
            file: file.as_str().into(),
            build_id: "abcd".into(),
            ..Mapping::default()
        });
        self.roles.insert(mapping, role);
        let base = file.rsplit('/').next().unwrap();
        let placeholder = named(kind, &format!("[{}]", base.trim_matches(['[', ']'])), "");
        let function = self.profile.intern_function(&placeholder);
        // Any number that depends on the name.
        let address = name.bytes().fold(7, |sum: u64, byte| {
            sum.wrapping_mul(31).wrapping_add(byte.into())
        });
        if !name.is_empty() {
            self.names
                .insert((mapping, address), named(kind, name, &file));
        }
        (self.profile).intern_native_location(function, 0, mapping, address)
    }

    fn presented(&self, native: NativeFrames, kernel: bool) -> Profile {
        present(
            self.profile.clone(),
            Presentation { native, kernel },
            |mapping| self.roles.get(&mapping).copied().unwrap_or_default(),
            |location| {
                self.names
                    .get(&(location.mapping, location.address))
                    .cloned()
            },
        )
    }

    fn shown(&self, native: NativeFrames) -> Vec<String> {
        readable(&self.presented(native, true))
    }
}

/// The stacks, outermost frame first, with their counts; methods in C with
/// their file.
fn readable(profile: &Profile) -> Vec<String> {
    let mut stacks: Vec<String> = profile
        .counts()
        .map(|(stack, _, count)| {
            let mut frames: Vec<String> = profile
                .stack(stack)
                .map(|id| {
                    let location = profile.location(id).unwrap();
                    let function = profile.function(location.function).unwrap();
                    match function.kind {
                        FunctionKind::CFunction => format!("{}@{}", function.label, function.file),
                        _ => function.label.to_string(),
                    }
                })
                .collect();
            frames.reverse();
            format!("{} {count}", frames.join(" "))
        })
        .collect();
    stacks.sort();
    stacks
}

fn shown(native: NativeFrames, stacks: &[&str]) -> Vec<String> {
    let mut recording = Recording::default();
    for stack in stacks {
        recording.sample(stack, 1);
    }
    recording.shown(native)
}

/// What starts a thread of a program, and the interpreter in it.
const START: &str = "boot:_start libc:__libc_start_main_impl libc:__libc_start_call_main \
                     boot:main ruby:ruby_run_node ruby:rb_vm_exec";

#[test]
fn extensions_are_shown_and_the_interpreter_is_not() {
    let stacks = [
        &format!(
            "{START} <main> ruby:vm_exec_core deflate() ruby:vm_call_cfunc_with_frame \
             zlib:rb_deflate_run libz:deflate libc:memcpy kernel:asm_exc_page_fault"
        ),
        "libc:clone3 libc:start_thread ruby:thread_start work ruby:vm_exec_core map() \
         ruby:rb_ary_map libc: work",
    ];
    let expected = [
        "<main> deflate@/lib/zlib.so rb_deflate_run deflate memcpy asm_exc_page_fault 1",
        "work map@<cfunc> [libc.so] work 1",
    ];
    assert_eq!(shown(NativeFrames::Extensions, &stacks), expected);
}

#[test]
fn a_library_that_starts_ruby_stays() {
    let stacks =
        ["libc:_start server:main server:handle_request ruby:rb_eval_string <main> jit: work"];
    let expected = ["handle_request <main> work 1"];
    assert_eq!(shown(NativeFrames::Extensions, &stacks), expected);
}

#[test]
fn a_program_with_ruby_in_it_loses_what_is_rubys_by_name() {
    let stacks = [
        "static:_start static:main static:ruby_run_node <main> static:vm_exec_core up() \
         static:rb_str_upcase static: static:onigenc_ascii_mbc static:malloc",
    ];
    let expected = ["<main> up@<cfunc> onigenc_ascii_mbc malloc 1"];
    assert_eq!(shown(NativeFrames::Extensions, &stacks), expected);
}

#[test]
fn threads_without_ruby_keep_everything() {
    // The same beginning is shown in one and not in the other.
    let stacks = [
        "libc:start_thread ruby:timer_thread libc:poll kernel:do_poll",
        "libc:start_thread ruby:timer_thread work",
        "jit: (unknown)",
    ];
    let expected = [
        "[jit] (unknown) 1",
        "start_thread timer_thread poll do_poll 1",
        "work 1",
    ];
    assert_eq!(shown(NativeFrames::Extensions, &stacks), expected);
    let recording = {
        let mut recording = Recording::default();
        recording.sample(stacks[0], 1);
        recording.sample("kernel:idle", 1);
        recording
    };
    let without = readable(&recording.presented(NativeFrames::Extensions, false));
    assert_eq!(
        without,
        ["(no Ruby code) 1", "start_thread timer_thread poll 1"]
    );
}

#[test]
fn all_is_all_and_none_is_none() {
    let stacks = [
        "libc:start <main> ruby:vm_exec a() zlib:run kernel:read",
        "libc:start libc:poll",
        "libc:start (truncated) zlib:run",
    ];
    let expected = [
        "start (truncated) run 1",
        "start <main> vm_exec a@/lib/zlib.so run read 1",
        "start poll 1",
    ];
    assert_eq!(shown(NativeFrames::All, &stacks), expected);
    let expected = [
        "(no Ruby code) 1",
        "(truncated) 1",
        "<main> a@/lib/zlib.so 1",
    ];
    assert_eq!(shown(NativeFrames::None, &stacks), expected);
}

#[test]
fn equal_stacks_are_one_and_no_sample_is_lost() {
    let mut recording = Recording::default();
    recording.sample("<main> ruby:rb_ary_push", 2);
    recording.sample("<main> ruby:rb_gc", 3);
    recording.sample("", 4);
    recording.sample("ruby:idle", 5);
    for native in [
        NativeFrames::Extensions,
        NativeFrames::All,
        NativeFrames::None,
    ] {
        assert_eq!(recording.presented(native, true).total(), 14);
    }
    let shown = recording.shown(NativeFrames::Extensions);
    assert_eq!(shown, [" 4", "<main> 5", "idle 5"]);
    let shown = recording.shown(NativeFrames::None);
    assert_eq!(shown, [" 4", "(no Ruby code) 5", "<main> 5"]);
}

#[test]
fn a_method_is_where_its_function_is() {
    let file = |stacks: &[&str]| {
        let shown = shown(NativeFrames::None, stacks);
        let (_, rest) = shown[0].split_once('@').unwrap();
        rest.split(' ').next().unwrap().to_owned()
    };
    // Called by the interpreter, with names and without.
    assert_eq!(file(&["a() zlib:run"]), "/lib/zlib.so");
    assert_eq!(file(&["a() ruby: ruby: zlib:run"]), "/lib/zlib.so");
    assert_eq!(
        file(&["a() ruby:vm_sendish ruby:ractor_safe_call_cfunc_1 zlib:"]),
        "/lib/zlib.so"
    );
    assert_eq!(file(&["a() jit: zlib:run"]), "/lib/zlib.so");
    assert_eq!(file(&["a() static:vm_call_cfunc zlib:run"]), "/lib/zlib.so");
    // The outermost function is the method, not those it calls.
    assert_eq!(
        file(&["a() ruby:vm_call_cfunc zlib:run libz:deflate"]),
        "/lib/zlib.so"
    );
    // The interpreter's own methods, whatever they call.
    assert_eq!(
        file(&["a() ruby:rb_ary_push ruby:rb_gc zlib:mark"]),
        "<cfunc>"
    );
    assert_eq!(
        file(&["a() ruby: ruby: ruby: ruby: ruby: ruby: zlib:mark"]),
        "<cfunc>"
    );
    assert_eq!(file(&["a() ruby: zlib:Init_zlib"]), "<cfunc>");
    assert_eq!(
        file(&["a() ruby:vm_call_cfunc libc:memcpy zlib:hook"]),
        "<cfunc>"
    );
    assert_eq!(file(&["a() ruby: libm:sqrt"]), "<cfunc>");
    assert_eq!(file(&["a() kernel:read"]), "<cfunc>");
    // The next method's function is not this one's.
    assert_eq!(file(&["a() b zlib:run"]), "<cfunc>");
    assert_eq!(file(&["a()"]), "<cfunc>");
}

#[test]
fn files_have_roles_by_their_names() {
    for (path, role) in [
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", Role::Libc),
        ("/lib/x86_64-linux-gnu/libc-2.31.so", Role::Libc),
        ("/lib/ld-musl-x86_64.so.1", Role::Libc),
        ("/lib64/ld-linux-x86-64.so.2 (deleted)", Role::Libc),
        ("[vdso]", Role::Libc),
        ("/usr/lib/ruby/3.3.0/x86_64-linux/zlib.so", Role::Extension),
        ("/gems/nokogiri.so (deleted)", Role::Extension),
        ("/lib/libm.so.6", Role::Library),
        ("/lib/libcrypto.so.3", Role::Library),
        ("/opt/libfoo.so", Role::Library),
        ("/usr/sbin/nginx", Role::Library),
    ] {
        assert_eq!(Role::of_file(path), role, "{path}");
    }
}

#[test]
fn a_method_has_one_file_in_all_stacks() {
    let stacks = [
        "<main> a() ruby:vm_call_cfunc zlib:run",
        "<main> a()",
        "<main> b a()",
    ];
    let expected = [
        "<main> a@/lib/zlib.so 1",
        "<main> a@/lib/zlib.so run 1",
        "<main> b a@/lib/zlib.so 1",
    ];
    assert_eq!(shown(NativeFrames::Extensions, &stacks), expected);
    let mut recording = Recording::default();
    recording.sample("a() ruby: zlib:alloc", 2);
    recording.sample("a() ruby:rb_class_new_instance", 3);
    assert_eq!(recording.shown(NativeFrames::None), ["a@<cfunc> 5"]);
    recording.sample("a() zlib:alloc", 2);
    assert_eq!(recording.shown(NativeFrames::None), ["a@/lib/zlib.so 7"]);
}

#[test]
fn where_the_interpreter_was_left_out_its_methods_are_still_its_own() {
    let mut recording = Recording::default();
    recording.sample("libc:start <main> push()", 5);
    recording.sample("libc:start <main> push() zlib:mark", 1);
    recording.sample("libc:start <main> map() work", 5);
    recording.sample("libc:start <main> map() zlib:mark", 1);
    recording.sample("libc:start <main> deflate() zlib:run", 3);
    recording.sample("libc:start <main> deflate()", 1);
    let expected = [
        "<main> deflate@/lib/zlib.so 4",
        "<main> map@<cfunc> 1",
        "<main> map@<cfunc> work 5",
        "<main> push@<cfunc> 6",
    ];
    assert_eq!(recording.shown(NativeFrames::None), expected);
}

#[test]
fn mappings_tell_whether_all_in_them_has_names() {
    let mut recording = Recording::default();
    recording.sample("<main> zlib:run libz: kernel:read", 1);
    // Nothing of it is shown.
    recording.sample("<main> ruby: ruby:rb_gc", 1);
    let profile = recording.presented(NativeFrames::Extensions, true);
    let mappings: Vec<(&str, &str, bool)> = (profile.mappings().skip(2))
        .map(|(_, mapping)| (&*mapping.file, &*mapping.build_id, mapping.has_functions))
        .collect();
    let expected = [
        ("/lib/zlib.so", "abcd", true),
        ("/lib/libz.so", "abcd", false),
        ("[kernel.kallsyms]", "abcd", true),
    ];
    assert_eq!(mappings, expected);
    let addresses = profile
        .locations()
        .filter(|(_, location)| location.address != 0);
    assert_eq!(addresses.count(), 3, "pprof needs them");
}

#[test]
fn what_has_no_machine_code_stays_as_it_is() {
    let mut recording = Recording::default();
    recording.profile.metadata = Metadata {
        command: "ruby".to_owned(),
        ..Metadata::default()
    };
    recording.sample("<main> a() b (marker)", 3);
    let before = format!("{:?}", recording.profile);
    for native in [
        NativeFrames::Extensions,
        NativeFrames::All,
        NativeFrames::None,
    ] {
        let after = recording.presented(native, false);
        assert_eq!(format!("{after:?}"), before);
    }
    recording.sample("<main> zlib:run", 3);
    let after = recording.presented(NativeFrames::All, true);
    assert_eq!(after.metadata.command, "ruby");
}

#[test]
fn what_is_left_over_is_marked_as_the_recording_does() {
    assert_eq!(
        rebuild::nothing_to_show(),
        crate::session::markers::nothing_to_show()
    );
}

#[test]
fn deep_stacks_cost_no_more_than_their_frames() {
    // A recursion 16,000 deep, sampled at each depth: 128 million frames, did
    // each stack cost all of its own.
    let mut recording = Recording::default();
    let frames = ["work", "run()", "ruby:vm_call_cfunc", "zlib:run"].map(|f| recording.location(f));
    let leaf = recording.location("kernel:read");
    let labels = recording.profile.intern_labels(&Labels::default());
    let mut stack = crate::profile::StackId::EMPTY;
    for depth in 0..16_000 {
        stack = recording.profile.extend_stack(stack, frames[depth % 4]);
        let whole = recording.profile.extend_stack(stack, leaf);
        recording.profile.add(whole, labels, 1);
    }
    let started = Instant::now();
    let profile = recording.presented(NativeFrames::Extensions, true);
    assert!(
        started.elapsed().as_millis() < 500,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(profile.total(), 16_000);
    let footprint = profile.footprint();
    // Of four frames three are shown, and on each the leaf.
    assert_eq!((footprint.frames, footprint.counts), (24_000, 12_000));
}
