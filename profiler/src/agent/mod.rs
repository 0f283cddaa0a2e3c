//! Continuous profiling of every Ruby on a machine: `rbprof agent`.
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | what can be configured, and from where |
//! | [`select`] | which processes are profiled |
//! | [`identity`] | who a process is: service, command, container, unit |
//! | [`batch`] | what is handed to the sinks: a service's or a process's profile of a while |
//! | [`http`] | what is served over HTTP |
//! | [`metrics`] | what the agent counts |
//! | [`systemd`] | the service manager: readiness, watchdog, the unit |
//! | [`sinks`] | where profiles go: files, Pyroscope, OTLP |
//! | [`units`] | durations and sizes as a configuration has them |

pub mod batch;
pub mod config;
pub mod http;
pub mod identity;
pub mod metrics;
pub mod select;
pub mod sinks;
pub mod systemd;
pub mod units;
