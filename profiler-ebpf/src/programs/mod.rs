//! Entry programs.

mod processes;
mod sample;
mod threads;
