//! Debug information of C files made for the purpose, and files that are no
//! Ruby or damaged.

use std::path::PathBuf;
use std::process::Command;

use super::*;

/// The structures of a made-up Ruby 3.4.99, with everything moved by one or more
/// words that may be.
const SOURCE: &str = r#"
typedef unsigned long VALUE;
enum ruby_method_ids { tPLUS = 43, tLAST_OP_ID = 177 };
enum ruby_fl_type { RUBY_FL_SINGLETON = 1 << 13 };
enum imemo_type { imemo_svar = 2, imemo_ment = 6, imemo_iseq = IMEMO_ISEQ };
typedef struct rb_control_frame_struct {
    const VALUE *pc; VALUE *sp; const struct rb_iseq_struct *_iseq; VALUE self; const VALUE *ep;
    const void *block_code; void *jit_return; VALUE more;
} rb_control_frame_t;
struct rb_ractor_struct { VALUE a[7]; struct { VALUE a; struct rb_execution_context_struct *running_ec; } threads; };
struct rb_thread_struct { VALUE a, b, c, d; struct rb_ractor_struct *ractor; struct rb_vm_struct *vm; VALUE f;
    struct rb_execution_context_struct *ec; };
typedef struct rb_execution_context_struct {
    VALUE *vm_stack; unsigned long vm_stack_size; rb_control_frame_t *cfp; VALUE a, b, c, d;
    struct rb_thread_struct *thread_ptr;
} rb_execution_context_t;
typedef struct { VALUE pathobj, label; int first_lineno; } location_t;
struct rb_iseq_constant_body {
    int type; unsigned iseq_size; VALUE *iseq_encoded; VALUE param[6]; const location_t location;
    struct { const void *body; union { unsigned *positions; void *succ_index_table; };
        unsigned size; } insns_info;
    struct rb_iseq_struct *parent_iseq; VALUE x; struct rb_iseq_struct *local_iseq;
    VALUE (*jit_entry)(void);
};
struct rb_iseq_struct { VALUE flags; struct rb_iseq_constant_body *body; };
struct iseq_insn_info_entry { int line_no, node_id, events, more; };
typedef struct rb_classext_struct {
    VALUE super; void *m_tbl; VALUE classpath; VALUE origin_;
    union { struct { VALUE allocator; } class; struct { VALUE attached_object; } singleton_class; } as;
    unsigned char variation_count; _Bool other : 1; _Bool permanent_classpath : 1;
} rb_classext_t;
struct RClass { VALUE flags, klass; };
struct RClass_and_rb_classext_t { struct RClass rclass; rb_classext_t classext; };
typedef struct rb_objspace { VALUE a; struct { unsigned mode : 2, more : BITS, during_gc : 1; } flags;
    struct { VALUE a; unsigned long count; } profile; } rb_objspace_t;
struct rb_vm_struct { VALUE a[9]; struct { rb_objspace_t *objspace; } gc;
    struct { unsigned a, cnt; struct { VALUE a; struct rb_ractor_struct *lock_owner; } sync; } ractor; };
struct RString { VALUE flags, klass; long len; union { struct { char *ptr; } heap; } as; };
const char ruby_version[] = "3.4.99";
rb_execution_context_t *ec; struct iseq_insn_info_entry entry; struct RString string;
struct rb_iseq_constant_body body; struct rb_iseq_struct iseq; struct RClass_and_rb_classext_t class;
struct rb_objspace objspace; struct rb_ractor_struct ractor; struct rb_vm_struct vm; struct rb_thread_struct thread;
enum ruby_method_ids ids; enum ruby_fl_type flags; enum imemo_type imemo;
"#;

/// A file compiled from the source, in a folder that lasts as long as the value.
struct Compiled {
    folder: tempfile::TempDir,
}

impl Compiled {
    fn new(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let compiled = Self { folder };
        std::fs::write(compiled.folder.path().join("ruby.c"), SOURCE).unwrap();
        let status = Command::new("cc")
            .current_dir(compiled.folder.path())
            .args(["-shared", "-fPIC", "-o", "libruby.so", "ruby.c"])
            .args(options)
            .arg(if options.contains(&"-DIMEMO_ISEQ=8") {
                "-UX"
            } else {
                "-DIMEMO_ISEQ=7"
            })
            .arg(if options.contains(&"-DBITS=4") {
                "-UX"
            } else {
                "-DBITS=3"
            })
            .status()
            .unwrap();
        assert!(status.success());
        compiled
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("libruby.so")
    }
}

fn error_of(path: &Path) -> String {
    layout_of(path, None).unwrap_err().to_string()
}

#[test]
fn fields_are_read_from_dwarf_4_and_5_compressed_or_not() {
    for options in [
        &["-gdwarf-4"][..],
        &["-gdwarf-5"],
        &["-gdwarf-5", "-gz=zlib"],
        &["-gdwarf-4", "-gstrict-dwarf"],
        &["-ggdb3", "-O2"],
    ] {
        let compiled = Compiled::new(options);
        let FromDwarf {
            layout,
            base,
            assumed,
        } = layout_of(&compiled.path(), None).unwrap();
        assert_eq!(layout.from, Version::new(3, 4, 99));
        assert_eq!(base.from, Version::new(3, 4, 0));
        let host = |x86_64: u64, other: &PerMachine| match Machine::HOST {
            Machine::X86_64 => PerMachine {
                x86_64: Some(x86_64),
                ..*other
            },
            Machine::Aarch64 => PerMachine {
                aarch64: Some(x86_64),
                ..*other
            },
        };
        let expected = Layout {
            from: layout.from,
            to: layout.from,
            walk: WalkLayout {
                cfp_size: 64,
                ec_thread: 56,
                thread_vm: 40,
                thread_ec: 56,
                thread_id: 0,
                jit_return: 48,
                zjit: 0,
                reserved: 0,
            },
            names: NameLayout {
                iseq_body: 8,
                base_label: None,
                label: 72,
                first_lineno: 80,
                insns_info: 88,
                insns_info_size: 104,
                succ_index_table: 96,
                parent_iseq: 112,
                local_iseq: 128,
                jit_entry: 136,
                insn_info_entry: 16,
                last_operator_id: 177,
                embedding: Embedding::Variable,
                first_line: FirstLine::Int,
                singleton_flag: 1 << 13,
                class_names: ClassNames::Fields {
                    attached_object: 48,
                    classpath: 32,
                    permanent: 57,
                    permanent_bit: 2,
                },
                method_table: ClassField::Direct(24),
                origin: ClassField::Direct(40),
            },
            collector: CollectorLayout {
                vm_objspace: host(72, &base.collector.vm_objspace),
                objspace: Some(ObjspaceLayout {
                    flags: 8,
                    count: Some(24),
                }),
                ractors: base.collector.ractors.map(|base| RactorLayout {
                    thread_ractor: 32,
                    vm_ractors: 84,
                    running_ec: host(64, &base.running_ec),
                    vm_lock_owner: host(96, &base.vm_lock_owner),
                }),
            },
            zjit: false,
            development: false,
        };
        assert_eq!(layout, expected, "{options:?}");
        // The other machine's.
        assert_eq!(assumed.len(), 3, "{assumed:?}");
    }
}

#[test]
fn flags_of_the_collector_with_another_meaning_are_not_known() {
    let compiled = Compiled::new(&["-g", "-DBITS=4"]);
    let found = layout_of(&compiled.path(), None).unwrap();
    assert_eq!(found.layout.collector.objspace, None);
}

#[test]
fn what_rbprof_takes_for_fixed_must_be_so() {
    let compiled = Compiled::new(&["-g", "-DIMEMO_ISEQ=8"]);
    assert_eq!(
        error_of(&compiled.path()),
        "imemo_iseq is 8 in this Ruby; this rbprof can only read Rubies where it is 7"
    );
}

#[test]
fn a_file_with_debug_information_alone_needs_to_be_told_the_release() {
    let compiled = Compiled::new(&["-g"]);
    let debug = compiled.folder.path().join("libruby.debug");
    let status = Command::new("objcopy")
        .arg("--only-keep-debug")
        .args([&compiled.path(), &debug])
        .status()
        .unwrap();
    assert!(status.success());
    assert!(
        error_of(&debug).contains("say which release it is with --version"),
        "{}",
        error_of(&debug)
    );
    let found = layout_of(&debug, Some(Version::new(3, 4, 5))).unwrap();
    assert_eq!(found.layout.from, Version::new(3, 4, 5));
    assert_eq!(found.layout.walk.cfp_size, 64);
}

#[test]
fn files_without_a_ruby_s_debug_information_say_so() {
    let stripped = Compiled::new(&["-s"]);
    assert!(error_of(&stripped.path()).contains("no debug information in it"));

    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, "not an ELF file").unwrap();
    assert!(error_of(&text).starts_with("not a whole ELF file: "));
    std::fs::write(&text, "").unwrap();
    assert!(error_of(&text).starts_with("not a whole ELF file: "));
    assert!(error_of(&folder.path().join("none")).contains("No such file"));

    let source = folder.path().join("other.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let other = folder.path().join("other");
    let status = Command::new("cc")
        .args(["-g", "-o"])
        .args([&other, &source])
        .status()
        .unwrap();
    assert!(status.success());
    assert!(error_of(&other).contains("no ruby_version in it"));
    let error = layout_of(&other, Some(Version::new(3, 4, 5))).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("not that of a Ruby: it has no rb_control_frame_struct"),
        "{error}"
    );
    let old = layout_of(&other, Some(Version::new(2, 5, 0))).unwrap_err();
    assert_eq!(
        old.to_string(),
        "Ruby 2.5.0 is older than any that rbprof knows"
    );
}

#[test]
fn damaged_files_are_refused_or_read_but_never_believed_to_be_larger() {
    let compiled = Compiled::new(&["-gdwarf-5", "-gz=zlib"]);
    let whole = std::fs::read(compiled.path()).unwrap();
    let good = layout_of(&compiled.path(), None).unwrap().layout;
    let path = compiled.folder.path().join("damaged");

    let mut refused = 0;
    for length in (0..whole.len()).step_by(whole.len() / 150) {
        std::fs::write(&path, &whole[..length]).unwrap();
        match layout_of(&path, None) {
            Ok(found) => assert_eq!(found.layout, good),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100, "{refused}");

    // Some bytes changed, always the same ones.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..400 {
        let mut damaged = whole.clone();
        for _ in 0..8 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = random as usize % damaged.len();
            damaged[at] = (random >> 32) as u8;
        }
        std::fs::write(&path, &damaged).unwrap();
        // An error or not: no panic, and no end of time or memory.
        let _ = layout_of(&path, Some(Version::new(3, 4, 5)));
    }
}

#[test]
fn a_section_that_says_it_is_huge_is_not_unpacked() {
    let compiled = Compiled::new(&["-gdwarf-5", "-gz=zlib"]);
    let mut bytes = std::fs::read(compiled.path()).unwrap();
    // Elf64_Chdr of every compressed section: type 1, then the size.
    let header = [1_u32, 0].map(u32::to_le_bytes).concat();
    let mut changed = 0;
    for at in 0..bytes.len() - 24 {
        let size = u64::from_le_bytes(bytes[at + 8..at + 16].try_into().unwrap());
        let zlib = bytes[at + 24..].first() == Some(&0x78);
        if bytes[at..at + 8] == header[..] && zlib && size < 1 << 20 {
            bytes[at + 8..at + 16].copy_from_slice(&(1_u64 << 40).to_le_bytes());
            changed += 1;
        }
    }
    assert!(changed > 0);
    std::fs::write(compiled.path(), bytes).unwrap();
    let error = layout_of(&compiled.path(), None).unwrap_err();
    assert!(
        matches!(error, DwarfError::TooLarge { size, .. } if size == 1 << 40),
        "{error}"
    );
}
