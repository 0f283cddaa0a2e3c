//! The cached Rubies start as promised.

use std::process::Stdio;

use xtask::rubies;
use xtask::rubies::Installed;
use xtask::setup;

/// The needed interpreters that are cached and that this user may start. All
/// of them must be where continuous integration runs.
fn startable() -> Vec<Installed> {
    let all = std::env::var_os("RBPROF_REQUIRE_ALL").is_some();
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for name in rubies::needed().map(|recipe| recipe.name) {
        match rubies::find(name) {
            Ok(ruby) if ruby.root.is_none() || setup::is_root() => found.push(ruby),
            Ok(_) => absent.push(format!("{name}: starting it needs root")),
            Err(error) => absent.push(error.to_string()),
        }
    }
    assert!(!all || absent.is_empty(), "{absent:?}");
    for reason in absent {
        eprintln!("skipped: {reason}");
    }
    found
}

#[test]
fn a_ruby_runs_a_script_of_the_host_as_the_process_that_was_started() {
    let dir = std::env::temp_dir().join(format!("rbprof script {}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let script = dir.join("who.rb");
    std::fs::write(
        &script,
        "puts RUBY_VERSION, Process.pid, File.basename(__FILE__), ARGV",
    )
    .unwrap();
    for ruby in startable() {
        let child = ruby
            .script(&script)
            .unwrap()
            .arg("two words")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        let expected = format!("{}\n{pid}\nwho.rb\ntwo words\n", ruby.version);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            expected,
            "{}",
            ruby.name
        );
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn starting_a_ruby_leaves_no_mount_behind() {
    for ruby in startable() {
        assert!(
            ruby.command()
                .args(["-e", "exit"])
                .status()
                .unwrap()
                .success(),
            "{}",
            ruby.name
        );
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let root = ruby
            .root
            .as_deref()
            .map_or("", |root| root.to_str().unwrap());
        assert!(root.is_empty() || !mounts.contains(root), "{}", ruby.name);
    }
}

#[test]
fn yjit_compiles_where_there_is_yjit() {
    for ruby in startable() {
        let has_yjit = rubies::needed().any(|recipe| recipe.name == ruby.name && recipe.has_yjit());
        if !has_yjit {
            continue;
        }
        let program = "def twice(n) = n * 2\n\
                       9.times { twice(_1) }\n\
                       print RubyVM::YJIT.runtime_stats[:compiled_iseq_count] > 0";
        let output = ruby
            .command()
            .args(["--yjit", "--yjit-call-threshold=1", "-e", program])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, "true", "{}: {output:?}", ruby.name);
    }
}
