//! The kernel half of rbprof: entry programs, and nothing else. The walk they
//! run is in `rbprof-common`.
//!
//! | module | what it holds |
//! |---|---|
//! | `programs::sample` | the timer tick: finds the thread's stack and sends it |
//! | `programs::processes` | fork, exec and exit of targets |
//! | `programs::threads` | an iterator that tells the thread pointers of a process |
//! | `programs::namespace` | an iterator that finds out the agent's PID namespace |
//! | `maps` | what the kernel half shares with the agent |
//! | `registers` | the user registers of the thread that was interrupted |
//! | `tables` | unwind tables, in maps |
//! | `task` | fields of `task_struct`, at offsets the agent takes from BTF |
//! | `memory` | target memory, read with the BPF helpers |
//!
//! On the host this is an empty program, so that `cargo check --workspace`
//! works; the agent's build script compiles the real thing.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod memory;
#[cfg(target_arch = "bpf")]
mod programs;
#[cfg(target_arch = "bpf")]
mod registers;
#[cfg(target_arch = "bpf")]
mod tables;
#[cfg(target_arch = "bpf")]
mod task;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel lends the helpers that read memory to GPL programs only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
