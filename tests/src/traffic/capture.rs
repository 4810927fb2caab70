//! Every frame on an interface, with the kernel's time: the judge of what is on the wire.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice::name_to_index, socket_with};

use super::{
    batch::{Receiver, SNAP, bind_to_interface, queue_drops},
    stamp::Stamp,
    worker::Worker,
};
use crate::{
    clock::{self, WallOffset},
    world::Namespace,
};

/// Frames a capture can record.
const LIMIT: usize = 1_000_000;
/// How long the kernel may hold a frame back from a capture that is being stopped.
const QUIET: Duration = Duration::from_millis(50);

const ETHERNET: usize = 14;
const ARP: u16 = 0x0806;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// A frame as a packet socket saw it. Segmentation may not have happened yet on a veth: one frame may stand for several on a
/// real wire.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// When the kernel handed it to the interface (or took it in), on the boot clock.
    pub at: BootInstant,
    /// Sent by the captured interface's own host; otherwise it came from the other side.
    pub outgoing: bool,
    /// Whole length in bytes.
    pub length: u32,
    kept: u8,
    bytes: [u8; SNAP],
}

impl Frame {
    /// The first bytes, from the Ethernet header on: at most 128.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.kept)]
    }

    /// The source address, also of an ARP packet (whose sender it is).
    pub fn source(&self) -> Option<IpAddr> {
        match self.ethertype()? {
            IPV4 => self.v4(ETHERNET + 12),
            IPV6 => self.v6(ETHERNET + 8),
            ARP => self.v4(ETHERNET + 14),
            _ => None,
        }
    }

    /// The destination address, also of an ARP packet (whose target it is).
    pub fn destination(&self) -> Option<IpAddr> {
        match self.ethertype()? {
            IPV4 => self.v4(ETHERNET + 16),
            IPV6 => self.v6(ETHERNET + 24),
            ARP => self.v4(ETHERNET + 24),
            _ => None,
        }
    }

    /// IP protocol number, the first next-header of IPv6.
    pub fn protocol(&self) -> Option<u8> {
        match self.ethertype()? {
            IPV4 => self.bytes().get(ETHERNET + 9).copied(),
            IPV6 => self.bytes().get(ETHERNET + 6).copied(),
            _ => None,
        }
    }

    pub fn is_arp(&self) -> bool {
        self.ethertype() == Some(ARP)
    }

    /// TCP or UDP source port.
    pub fn source_port(&self) -> Option<u16> {
        self.u16(self.transport()?)
    }

    /// TCP or UDP destination port.
    pub fn destination_port(&self) -> Option<u16> {
        self.u16(self.transport()? + 2)
    }

    /// What follows the TCP or UDP header, as far as it was kept; without padding of a short frame.
    pub fn payload(&self) -> Option<&[u8]> {
        let transport = self.transport()?;
        let header = match self.protocol()? {
            TCP => usize::from(self.bytes().get(transport + 12)? >> 4) * 4,
            UDP => 8,
            _ => return None,
        };
        let end = match self.ethertype()? {
            IPV4 => ETHERNET + usize::from(self.u16(ETHERNET + 2)?),
            _ => ETHERNET + 40 + usize::from(self.u16(ETHERNET + 4)?),
        };
        self.bytes().get(transport + header..end.min(self.bytes().len()))
    }

    /// The stamp that its payload starts with.
    pub fn stamp(&self) -> Option<Stamp> {
        Stamp::read(self.payload()?)
    }

    fn transport(&self) -> Option<usize> {
        let start = match self.ethertype()? {
            IPV4 => ETHERNET + usize::from(self.bytes().get(ETHERNET)? & 0xf) * 4,
            IPV6 => ETHERNET + 40,
            _ => return None,
        };
        matches!(self.protocol()?, TCP | UDP).then_some(start)
    }

    fn ethertype(&self) -> Option<u16> {
        self.u16(12)
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(u16::from_be_bytes(*self.bytes().get(at..)?.first_chunk()?))
    }

    fn v4(&self, at: usize) -> Option<IpAddr> {
        Some(Ipv4Addr::from(*self.bytes().get(at..)?.first_chunk::<4>()?).into())
    }

    fn v6(&self, at: usize) -> Option<IpAddr> {
        Some(Ipv6Addr::from(*self.bytes().get(at..)?.first_chunk::<16>()?).into())
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.outgoing { "out" } else { "in" };
        write!(f, "{} {direction} {} bytes", self.at, self.length)?;
        match (self.source(), self.destination()) {
            (Some(source), Some(destination)) => {
                write!(f, " {source}:{:?} -> {destination}:{:?}", self.source_port(), self.destination_port())?;
                write!(f, " protocol {:?}{}", self.protocol(), if self.is_arp() { " arp" } else { "" })
            }
            _ => write!(f, " {:02x?}", self.bytes()),
        }
    }
}

/// A capture under way on one interface. Dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    shared: Arc<Shared>,
    thread: Option<Worker<Captured>>,
}

#[derive(Debug, Default)]
struct Shared {
    ends: AtomicBool,
    frames: AtomicUsize,
}

/// What a capture saw.
#[derive(Clone, Debug, Default)]
pub struct Captured {
    /// The frames that the filter took, in the kernel's order.
    pub frames: Vec<Frame>,
    /// Frames that the capture's queue could not take. Above 0 an absence proves nothing.
    pub drops: u64,
}

/// A frame that a gate let pass just before its deadline reaches the peer's interface a little after it: interrupts are
/// all that comes between the two, so a millisecond is plenty.
pub const WIRE: Duration = Duration::from_millis(1);

impl Captured {
    /// Frames on the wire after a deadline, what may have been under way then ([`WIRE`]) left out. Unlike the count of stamped
    /// packets this also sees what carries no stamp of its own time: retransmissions, resets, ARP.
    #[track_caller]
    pub fn after(&self, deadline: BootInstant, condition: impl Fn(&Frame) -> bool) -> Vec<Frame> {
        self.since(deadline.saturating_add(WIRE), condition)
    }

    /// Frames from `instant` on that satisfy `condition`. Panics if the capture lost frames: they might have been among them.
    #[track_caller]
    pub fn since(&self, instant: BootInstant, condition: impl Fn(&Frame) -> bool) -> Vec<Frame> {
        assert_eq!(self.drops, 0, "the measurement lost packets: the capture's queue was full");
        self.frames.iter().filter(|frame| frame.at >= instant && condition(frame)).copied().collect()
    }
}

impl Capture {
    /// Records the frames on `interface` that `filter` takes. A packet socket sees what comes in before the host's firewall
    /// and after XDP and tc ingress would have dropped it on the *other* side: capture at the peer of who is judged.
    #[track_caller]
    pub fn start(namespace: &Namespace, interface: &str, filter: impl Fn(&Frame) -> bool + Send + 'static) -> Self {
        let (socket, buffers) = namespace
            .run(|| open(interface))
            .unwrap_or_else(|e| panic!("capture on {interface} in {}: {e}", namespace.name()));
        let shared = Arc::new(Shared::default());
        let thread = {
            let shared = Arc::clone(&shared);
            Worker::start("capture", move || record(&socket, buffers, &filter, &shared))
        };
        Self { shared, thread: Some(thread) }
    }

    /// Frames recorded so far.
    pub fn frames(&self) -> usize {
        self.shared.frames.load(Ordering::Relaxed)
    }

    /// Ends the capture once the interface's queue is empty.
    #[track_caller]
    pub fn stop(mut self) -> Captured {
        let captured = self.end().expect("stopped once");
        captured.unwrap_or_else(|e| panic!("the capture: {e}"))
    }

    fn end(&mut self) -> Option<io::Result<Captured>> {
        let thread = self.thread.take()?;
        self.shared.ends.store(true, Ordering::Relaxed);
        Some(thread.join())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.end();
    }
}

fn open(interface: &str) -> io::Result<(OwnedFd, Receiver)> {
    // Protocol 0: nothing is received before the socket is bound to its one interface.
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let buffers = Receiver::prepare(socket.as_fd())?;
    bind_to_interface(&socket, name_to_index(&socket, interface)?)?;
    Ok((socket, buffers))
}

fn record(
    socket: &OwnedFd,
    mut buffers: Receiver,
    filter: &dyn Fn(&Frame) -> bool,
    shared: &Shared,
) -> io::Result<Captured> {
    let offset = WallOffset::measure();
    let mut captured = Captured::default();
    let mut overflow = false;
    // What was sent before the end was asked for has a stamp before it; what comes later is not waited for.
    let mut end = None;
    loop {
        let mut late = false;
        let got = buffers.receive(socket.as_fd(), QUIET, |received| {
            let mut bytes = [0; SNAP];
            bytes[..received.bytes.len()].copy_from_slice(received.bytes);
            let frame = Frame {
                at: offset.to_boot(received.wall_ns),
                outgoing: received.outgoing,
                length: received.length,
                kept: u8::try_from(received.bytes.len()).expect("a snap fits a byte"),
                bytes,
            };
            late |= end.is_some_and(|end| frame.at > end);
            if !filter(&frame) {
            } else if captured.frames.len() == LIMIT {
                overflow = true;
            } else {
                captured.frames.push(frame);
            }
        })?;
        shared.frames.store(captured.frames.len(), Ordering::Relaxed);
        if end.is_some() && (got == 0 || late) {
            break;
        }
        if shared.ends.load(Ordering::Relaxed) && end.is_none() {
            end = Some(clock::now());
        }
    }
    if overflow {
        return Err(io::Error::other(format!("more than {LIMIT} frames: narrow its filter")));
    }
    offset.assert_steady();
    captured.drops = queue_drops(socket.as_fd())?;
    Ok(captured)
}
