//! What the agent serves over HTTP.
//!
//! | module | what it does |
//! |---|---|
//! | [`backend`] | what the server asks the core for |
//! | `listen` | sockets: addresses, opening, closing |
//! | [`server`] | connections, and their limits |
//! | `guard` | which requests are let in |
//! | `parameters` | what stands behind the `?` |
//! | `routes` | which path is answered how |
//! | `pages` | HTML and JSON |
//!
//! | path | answer |
//! |---|---|
//! | `/debug/pprof/` | what there is, in HTML |
//! | `/debug/pprof/profile` | a fresh profile, gzipped pprof |
//! | `/profiles` | recent profiles: a list, or with `id` one of them as pprof |
//! | `/flamegraph` | a flame graph, SVG: of recent profiles, or with `seconds` a fresh one |
//! | `/targets` | which processes are profiled, HTML or JSON |
//! | `/metrics` | OpenMetrics |
//! | `/healthz` | whether all is well |
//!
//! Bounds: so many connections as are configured, each for as long as the longest
//! profile takes and a minute; heads of requests of 16 KiB and 64 headers, within
//! 10 s; no bodies; so many requests to the core as [`backend::QUEUE`] says, all
//! others are answered with status 503 at once.

pub mod backend;
mod guard;
mod listen;
mod pages;
mod parameters;
mod routes;
pub mod server;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::backend::Backend;
pub use self::listen::Bound;
pub use self::listen::Listen;
pub use self::server::Server;

/// What is served, and to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Where; nowhere if it is empty.
    pub listen: Vec<Listen>,
    /// Permissions of Unix sockets.
    pub socket_mode: u32,
    /// Names of hosts, in small letters, besides those of this machine itself.
    pub hosts: Vec<String>,
    /// The longest fresh profile.
    pub max_duration: Duration,
    /// Most connections at once.
    pub max_connections: usize,
    /// How many recent profiles the core keeps.
    pub recent: usize,
}
