//! Compiles the kernel half, which is then part of the `rbprof` binary.

use std::path::Path;

use aya_build::Package;
use aya_build::Toolchain;

/// The toolchain of `rust-toolchain.toml`; the eBPF target builds its own
/// `core`, hence the `rust-src` component.
const TOOLCHAIN: &str = "1.95.0";

fn main() -> anyhow::Result<()> {
    let ebpf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../profiler-ebpf");
    println!("cargo:rerun-if-changed=../profiler-common/src");
    // Building `core` and `bpfel-unknown-none` are unstable features, which the
    // stable toolchain takes with this variable. It is set here, for the nested
    // build only: set globally it would flip feature probes of other crates.
    // SAFETY: the build script has one thread.
    unsafe { std::env::set_var("RUSTC_BOOTSTRAP", "1") };
    aya_build::build_ebpf(
        [Package {
            name: "rbprof-ebpf",
            root_dir: ebpf.to_str().unwrap_or("../profiler-ebpf"),
            ..Package::default()
        }],
        Toolchain::Custom(TOOLCHAIN),
    )
}
