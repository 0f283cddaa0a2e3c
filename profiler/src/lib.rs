//! rbprof, an out-of-process eBPF profiler for Ruby.
//!
//! Data flows one way, and each stage knows the types of the next one only:
//!
//! | module | what it does |
//! |---|---|
//! | [`targets`] | which processes, which Ruby in them, where its roots are |
//! | [`symbolize`] | frames as the kernel half sends them, to names and lines |
//! | [`profile`] | interned functions, locations, stacks, counts, labels |
//! | [`presentation`] | which frames of machine code are shown, and their names |
//! | [`output`] | writers over a profile: pprof, folded stacks, flame graph, table |
//!
//! [`agent`] does all of it for every Ruby on a machine, for as long as it runs.
//! [`inspect`] tells what [`targets`] knows of a process or a file.
//! [`native`] knows which machine code the targets have mapped, and [`unwind`]
//! compiles the tables by which the walk follows its frames.
//! [`layouts`] has layouts of Ruby's structures from outside the table, and
//! [`memory`] reads the memory of a target process for the stages that need it.
//! [`privileges`] says what this process may do, and gives up what it need not.

pub mod agent;
pub mod cli;
pub mod inspect;
pub mod kernel;
pub mod layouts;
pub mod memory;
pub mod native;
pub mod output;
pub mod presentation;
pub mod privileges;
pub mod profile;
pub mod samples;
pub mod session;
pub mod symbolize;
pub mod targets;
pub mod unwind;
