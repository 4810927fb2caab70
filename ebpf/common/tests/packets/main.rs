//! The parser and the verdict on the host, over packets made byte by byte and a kernel in memory.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bytes;
mod world;

mod exemptions;
mod gates;
mod icmp;
mod neighbours;
mod parse;
mod places;
mod resets;
mod stamps;
mod truncation;
mod unreadable;
