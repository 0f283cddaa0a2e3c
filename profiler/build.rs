//! Compiles the kernel half, which is then part of the `rbprof` binary.
//!
//! The target `bpfel-unknown-none` has no prebuilt `core`, so a nested cargo
//! builds it from the `rust-src` component. Where that component cannot be had,
//! `RBPROF_EBPF_CARGO` names a cargo whose toolchain brings a prebuilt `core`
//! for the target (Debian: `rustc-web`, `cargo-web`, `libstd-rust-web-dev-bpf`).

use std::env;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::bail;

/// The toolchain of `rust-toolchain.toml`.
const TOOLCHAIN: &str = "1.95.0";
const TARGET: &str = "bpfel-unknown-none";
const CARGO_VARIABLE: &str = "RBPROF_EBPF_CARGO";
/// The compiler's flags, as cargo tells them to build scripts and reads them.
const FLAGS_VARIABLE: &str = "CARGO_ENCODED_RUSTFLAGS";
/// What stands between two of them.
const FLAGS_SEPARATOR: &str = "\x1f";

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-env-changed={CARGO_VARIABLE}");
    println!("cargo:rerun-if-env-changed={FLAGS_VARIABLE}");
    for path in [
        "build.rs",
        "../profiler-ebpf",
        "../profiler-common/src",
        "../profiler-common/Cargo.toml",
    ] {
        println!("cargo:rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH").context("CARGO_CFG_TARGET_ARCH is not set")?;
    let target_dir = out.join("ebpf");

    // Calls between BPF functions and `bpf_loop` callbacks need BTF.
    let mut flags = vec![
        format!("--cfg=bpf_target_arch=\"{arch}\""),
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
    ];
    flags.extend(renamed_folders());

    let mut cargo = match env::var_os(CARGO_VARIABLE) {
        Some(cargo) => Command::new(cargo),
        None => {
            let mut rustup = Command::new("rustup");
            rustup.args(["run", TOOLCHAIN, "cargo"]);
            rustup
        }
    };
    cargo
        .args([
            "build",
            "--release",
            "--quiet",
            "--package",
            "rbprof-ebpf",
            "--target",
            TARGET,
        ])
        .arg("--target-dir")
        .arg(&target_dir)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        // Unstable features (the target, building `core`) in this nested build
        // only: set globally this would flip feature probes of other crates.
        .env("RUSTC_BOOTSTRAP", "1")
        .env(FLAGS_VARIABLE, flags.join(FLAGS_SEPARATOR))
        // What the outer cargo set for the host must not reach the inner one.
        .env_remove("RUSTC")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTFLAGS");
    match env::var_os(CARGO_VARIABLE) {
        None => {
            cargo.arg("-Zbuild-std=core");
        }
        // The compiler that belongs to that cargo, not the one that rustup
        // would choose.
        Some(other) => {
            let rustc = Path::new(&other).with_file_name("rustc");
            if rustc.is_file() {
                cargo.env("RUSTC", rustc);
            }
        }
    }

    let output = cargo
        .output()
        .with_context(|| format!("cannot start {cargo:?}"))?;
    if !output.status.success() {
        bail!(
            "the eBPF half did not compile. It needs bpf-linker and the rust-src component: \
             `cargo xtask setup` installs both.\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let object = target_dir.join(TARGET).join("release/rbprof-ebpf");
    std::fs::copy(&object, out.join("rbprof-ebpf"))
        .with_context(|| format!("cannot copy {}", object.display()))?;
    Ok(())
}

/// The outer compiler's flags that give folders other names in debug information,
/// so that what is built is the same in any folder: the object's BTF has names of
/// files, too.
fn renamed_folders() -> Vec<String> {
    let flags = env::var(FLAGS_VARIABLE).unwrap_or_default();
    flags
        .split(FLAGS_SEPARATOR)
        .filter(|flag| flag.starts_with("--remap-path-prefix="))
        .map(str::to_owned)
        .collect()
}
