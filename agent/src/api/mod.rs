//! The local socket: HTTP/1.1 and JSON over a Unix socket.
//!
//! * [`types`]: what goes over the wire, in both directions.
//! * [`command`]: what a request asks of the runtime, and how it refuses.
//! * [`peer`]: who is at the other end, and what they may do.
//! * [`server`]: the socket and its connections. [`routes`]: the requests. [`metrics`]: Prometheus text.
//! * [`client`]: the other end, for the subcommands.
//!
//! `agent/openapi.json` describes the same, and a test holds it against the running server.

pub mod client;
pub mod command;
pub mod metrics;
pub mod peer;
pub mod routes;
pub mod server;
pub mod types;

/// Where the agent listens unless it is configured otherwise.
pub const DEFAULT_SOCKET: &str = "/run/portcullis/agent.sock";
