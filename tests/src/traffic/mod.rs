//! Traffic that is stamped by its sender and counted by its receiver.
//!
//! Every packet carries the boot-clock instant read immediately before it was sent, so "a packet sent after the deadline
//! arrived" is decided by one clock and needs no bound on the path. Packets are stamped in batches of up to
//! [`BATCH`]; a stamp is never later than the sending, so no packet is accused that was sent in time.
//!
//! * [`Flow`]: UDP packets one way at a fixed rate.
//! * [`Stream`]: an established TCP connection with stamped records both ways.
//! * [`Echo`]: stamped records to a real server and back, which [`serve`] is.
//! * [`Capture`]: every frame on an interface, with the kernel's time of arrival: the judge of what is on the wire.
//! * [`Report`], [`Cut`]: what was sent, what arrived, and how that fits a deadline.

mod batch;
mod capture;
mod direction;
mod echo;
mod flow;
mod pace;
mod report;
mod server;
mod stamp;
mod stream;
mod worker;

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

pub use batch::BATCH;
pub use capture::{Capture, Captured, Frame, WIRE};
pub use direction::Break;
pub use echo::{Echo, RunningEcho};
pub use flow::{Flow, RunningFlow};
pub use report::{Bucket, Cut, Packet, Report};
pub use server::serve;
pub use stamp::{PAYLOAD, Stamp};
pub use stream::{RunningStream, Stream, StreamReport};

use crate::world::Namespace;

/// Packets per second that tests can run side by side.
pub const LIGHT: u32 = 1_000;
/// Packets per second that a whole machine can just give: take [`crate::world::heavy`] first.
pub const HEAVY: u32 = 100_000;

/// Tries to open a TCP connection from inside a namespace.
///
/// # Errors
/// As `connect(2)`; `TimedOut` if nothing is answered within `timeout`.
pub fn connect(from: &Namespace, to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    from.run(|| TcpStream::connect_timeout(&to, timeout))
}

/// An `ADDRESS:PORT` of a test.
#[track_caller]
fn address(text: &str) -> SocketAddr {
    text.parse().unwrap_or_else(|e| panic!("{text:?} is no ADDRESS:PORT: {e}"))
}
