//! Entry programs.

#![expect(
    clippy::needless_pass_by_value,
    reason = "the macros of aya-ebpf want contexts by value"
)]

mod discovery;
mod iterator;
mod namespace;
mod processes;
mod sample;
mod threads;
