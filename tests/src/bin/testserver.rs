//! `testserver ADDRESS:PORT...`: an echo server over TCP and UDP, as something for an agent to protect.
//!
//! Prints `ready` once every address is bound. A TCP client that sends the line `stream RATE` gets stamped records instead.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use portcullis_tests::traffic;

fn main() -> anyhow::Result<()> {
    let parse = |text: String| text.parse::<SocketAddr>().with_context(|| format!("{text:?} is no ADDRESS:PORT"));
    let addresses = std::env::args().skip(1).map(parse).collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(!addresses.is_empty(), "usage: testserver ADDRESS:PORT...");
    traffic::serve(&addresses, || println!("ready")).with_context(|| format!("serve on {addresses:?}"))
}
