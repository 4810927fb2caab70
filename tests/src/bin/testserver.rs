//! `testserver ADDRESS:PORT...`: an echo server over TCP and UDP, as something for an agent to protect.
//!
//! Prints `ready` once every address is bound. A TCP client that sends the line `stream RATE` gets stamped records instead.
//!
//! `testserver --listener ADDRESS:PORT`: makes a listening socket, prints its descriptor, and waits for its end, see
//! [`portcullis_tests::world::Namespace::listen`].

use std::{
    net::{SocketAddr, TcpListener},
    os::fd::AsRawFd,
    thread,
};

use anyhow::{Context, ensure};
use portcullis_tests::traffic;

fn main() -> anyhow::Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let lends_listener = arguments.first().is_some_and(|first| first == "--listener");
    if lends_listener {
        arguments.remove(0);
    }
    let parse = |text: &String| text.parse::<SocketAddr>().with_context(|| format!("{text:?} is no ADDRESS:PORT"));
    let addresses = arguments.iter().map(parse).collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(!addresses.is_empty(), "usage: testserver [--listener] ADDRESS:PORT...");
    if lends_listener {
        let listener = TcpListener::bind(addresses[0]).with_context(|| format!("listen on {}", addresses[0]))?;
        println!("{}", listener.as_raw_fd());
        loop {
            thread::park();
        }
    }
    traffic::serve(&addresses, || println!("ready")).with_context(|| format!("serve on {addresses:?}"))
}
