//! Continuous profiling of every Ruby on a machine: `rbprof agent`.
//!
//! | module | what it does |
//! |---|---|
//! | [`mod@run`] | the loop that everything happens in |
//! | [`config`] | what can be configured, and from where |
//! | [`select`] | which processes are profiled |
//! | [`identity`] | who a process is: service, command, container, unit |
//! | [`registry`] | the Rubies on the machine |
//! | [`collect`] | what was recorded, from cuts of the recording to profiles |
//! | [`budget`] | how much of a CPU the agent may use |
//! | [`batch`] | what is handed to the sinks: a service's or a process's profile of a while |
//! | [`http`] | what is served over HTTP |
//! | [`overview`] | what the agent counts, and how it is |
//! | [`metrics`] | the same as a page for Prometheus |
//! | [`journal`] | what the agent says |
//! | [`systemd`] | the service manager: readiness, watchdog, the unit |
//! | [`sinks`] | where profiles go: files, Pyroscope, OTLP |
//! | [`units`] | durations and sizes as a configuration has them |

pub mod batch;
pub mod budget;
pub mod collect;
pub mod config;
pub mod http;
pub mod identity;
pub mod journal;
pub mod metrics;
pub mod overview;
pub mod registry;
pub mod run;
pub mod select;
pub mod sinks;
pub mod systemd;
pub mod units;
