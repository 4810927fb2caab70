//! UDP packets one way, at a fixed rate.

use std::{
    io::{self, IoSlice},
    net::{SocketAddr, UdpSocket},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::{
    io::Errno,
    net::{MMsgHdr, SendAncillaryBuffer, SendFlags, SocketAddrAny, addr::SocketAddrArg, sendmmsg},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

use super::{
    BATCH, LIGHT, Packet, Report, address,
    batch::{Receiver, backlog_drops, queue_drops},
    pace::Pace,
    stamp::{PAYLOAD, Stamp, flow_id},
    worker::Worker,
};
use crate::{clock, world::Namespace};

/// How long an open path may take to deliver the first packet: neighbour discovery, mostly.
const OPEN: Duration = Duration::from_secs(5);
/// After the sender has ended, silence of this length means that nothing is under way any more.
const QUIET: Duration = Duration::from_millis(100);
/// What a flow records at most if not said, as a time at its rate.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// A flow to be started.
#[derive(Clone, Debug)]
pub struct Flow {
    from: Namespace,
    source: SocketAddr,
    to: Namespace,
    destination: SocketAddr,
    listen: SocketAddr,
    rate: u32,
    longest: Duration,
}

impl Flow {
    /// UDP from `source` in one namespace to `destination` in another; both `ADDRESS:PORT`, port 0 at the source is any.
    #[track_caller]
    pub fn udp(from: &Namespace, source: &str, to: &Namespace, destination: &str) -> Self {
        let destination = address(destination);
        Self {
            from: from.clone(),
            source: address(source),
            to: to.clone(),
            destination,
            listen: destination,
            rate: LIGHT,
            longest: LONGEST,
        }
    }

    /// The destination is translated on the way: the receiver listens here instead.
    #[must_use]
    #[track_caller]
    pub fn translated_to(mut self, listen: &str) -> Self {
        self.listen = address(listen);
        self
    }

    /// Packets per second; [`LIGHT`] if not said.
    #[must_use]
    pub fn rate(mut self, per_second: u32) -> Self {
        self.rate = per_second;
        self
    }

    /// How long the flow can run: a minute if not said. It keeps 64 bytes per packet.
    #[must_use]
    pub fn longest(mut self, span: Duration) -> Self {
        self.longest = span;
        self
    }

    /// Waits until the path is open, then starts to count; panics if it stays closed.
    #[track_caller]
    pub fn start(self) -> RunningFlow {
        self.launch(true)
    }

    /// Starts to count at once, on a path that may be closed.
    #[track_caller]
    pub fn start_closed(self) -> RunningFlow {
        self.launch(false)
    }

    #[track_caller]
    fn launch(self, knock: bool) -> RunningFlow {
        // The receiver first: nothing is sent to a closed port.
        let receiver = bind(&self.to, self.listen);
        let sender = bind(&self.from, self.source);
        RunningFlow::start(sender, receiver, self.destination, self.rate, records(self.rate, self.longest), knock)
    }
}

/// A flow under way. Dropping it ends it.
#[derive(Debug)]
pub struct RunningFlow {
    shared: Arc<Shared>,
    threads: Option<(Worker<Sent>, Worker<Arrived>)>,
    backlog_before: u64,
}

#[derive(Debug, Default)]
struct Shared {
    /// The path has delivered a packet, or was not asked to.
    open: AtomicBool,
    sender_ends: AtomicBool,
    receiver_ends: AtomicBool,
    sent: AtomicU64,
    arrived: AtomicU64,
}

#[derive(Debug)]
struct Sent {
    packets: Vec<Packet>,
    unsent: u64,
}

#[derive(Debug)]
struct Arrived {
    packets: Vec<(u32, BootInstant, BootInstant)>,
    drops: u64,
}

impl RunningFlow {
    /// Sends from one socket and counts at the other, or at the same if the destination echoes. With `knock` it first waits
    /// until the path is open.
    #[track_caller]
    pub(super) fn start(
        sender: UdpSocket,
        receiver: UdpSocket,
        destination: SocketAddr,
        rate: u32,
        limit: usize,
        knock: bool,
    ) -> Self {
        let buffers = Receiver::prepare(receiver.as_fd()).unwrap_or_else(|e| panic!("prepare a receiver: {e}"));
        let shared = Arc::new(Shared { open: AtomicBool::new(!knock), ..Shared::default() });
        let id = flow_id();
        let backlog_before = backlog_drops();
        let receiving = {
            let shared = Arc::clone(&shared);
            Worker::start("receiver", move || receive(&receiver, buffers, id, limit, &shared))
        };
        let sending = {
            let shared = Arc::clone(&shared);
            Worker::start("sender", move || send(&sender, destination, id, rate, limit, &shared))
        };
        let running = Self { shared, threads: Some((sending, receiving)), backlog_before };
        let open = clock::wait_until(OPEN, || running.shared.open.load(Ordering::Relaxed));
        assert!(open, "no packet arrives that is sent to {destination}: is the path open?");
        running
    }

    /// Packets sent so far.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Packets that have arrived so far.
    pub fn arrived(&self) -> u64 {
        self.shared.arrived.load(Ordering::Relaxed)
    }

    /// Ends the flow, waits for what is under way, and tells what became of each packet.
    #[track_caller]
    pub fn stop(mut self) -> Report {
        // One that has only just been started has shown nothing yet.
        clock::wait_until(Duration::from_secs(1), || self.sent() > 0);
        let (sent, arrived) = self.end().expect("stopped once");
        let sent = sent.unwrap_or_else(|e| panic!("the sender of a flow: {e}"));
        let arrived = arrived.unwrap_or_else(|e| panic!("the receiver of a flow: {e}"));
        let mut report = Report {
            packets: sent.packets,
            unsent: sent.unsent,
            measurement_drops: arrived.drops + (backlog_drops() - self.backlog_before),
            ..Report::default()
        };
        for (sequence, sent_at, at) in arrived.packets {
            let index = usize::try_from(sequence).expect("fits an address space");
            let packet = report.packets.get_mut(index).unwrap_or_else(|| panic!("packet {sequence} was never sent"));
            assert_eq!(packet.sent_at, sent_at, "packet {sequence} arrived with another stamp");
            if packet.arrived_at.replace(at).is_some() {
                report.duplicates += 1;
            }
        }
        report
    }

    fn end(&mut self) -> Option<(io::Result<Sent>, io::Result<Arrived>)> {
        let (sending, receiving) = self.threads.take()?;
        self.shared.sender_ends.store(true, Ordering::Relaxed);
        let sent = sending.join();
        self.shared.receiver_ends.store(true, Ordering::Relaxed);
        Some((sent, receiving.join()))
    }
}

impl Drop for RunningFlow {
    fn drop(&mut self) {
        self.end();
    }
}

/// How many packets there are at a rate in a span of time.
pub(super) fn records(rate: u32, span: Duration) -> usize {
    usize::try_from(u128::from(rate) * span.as_millis() / 1000).expect("fits an address space")
}

/// A UDP socket in a namespace.
#[track_caller]
pub(super) fn bind(namespace: &Namespace, at: SocketAddr) -> UdpSocket {
    namespace.run(|| UdpSocket::bind(at)).unwrap_or_else(|e| panic!("bind udp {at} in {}: {e}", namespace.name()))
}

fn send(socket: &UdpSocket, to: SocketAddr, id: u64, rate: u32, limit: usize, shared: &Shared) -> io::Result<Sent> {
    stay_on_one_cpu()?;
    let to = to.as_any();
    let ended = || shared.sender_ends.load(Ordering::Relaxed);
    while !shared.open.load(Ordering::Relaxed) && !ended() {
        // A path that is not open yet may refuse; the next knock tells.
        let _ = transmit(socket, &to, &[Stamp::hello(id).write()]);
        clock::sleep_until(clock::now().saturating_add(Duration::from_millis(5)));
    }
    let mut sent = Sent { packets: Vec::with_capacity(limit), unsent: 0 };
    let mut pace = Pace::new(rate);
    let mut payloads = Vec::with_capacity(BATCH);
    let mut stamps = Vec::with_capacity(BATCH);
    while !ended() {
        let due = pace.wait(BATCH);
        if sent.packets.len() + due > limit {
            return Err(io::Error::other(format!("it ran longer than the {limit} packets it can record")));
        }
        let first = u32::try_from(sent.packets.len()).map_err(io::Error::other)?;
        payloads.clear();
        stamps.clear();
        for sequence in (first..).take(due) {
            let stamp = Stamp { flow: id, sequence, sent_at: clock::now() };
            stamps.push(stamp.sent_at);
            payloads.push(stamp.write());
        }
        let (taken, refused) = match transmit(socket, &to, &payloads) {
            Ok(taken) => (taken, false),
            // The first of the batch was dropped by a program of ours, or one of the firewall.
            Err(Errno::PERM) => (1, true),
            // The sender's own trouble: the sequence number is used again.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => {
                sent.unsent += 1;
                continue;
            }
            // The address or the route is gone for the moment: also a way of being cut.
            Err(Errno::ACCESS | Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL | Errno::NETDOWN) => (1, true),
            Err(error) => return Err(error.into()),
        };
        let returned_at = clock::now();
        let packet = |sent_at: &BootInstant| Packet { sent_at: *sent_at, returned_at, refused, arrived_at: None };
        sent.packets.extend(stamps.iter().take(taken).map(packet));
        shared.sent.store(u64::try_from(sent.packets.len()).map_err(io::Error::other)?, Ordering::Relaxed);
    }
    Ok(sent)
}

/// Gives payloads to the kernel with one call; returns how many it took. An error is that of the first.
fn transmit(socket: &UdpSocket, to: &SocketAddrAny, payloads: &[[u8; PAYLOAD]]) -> Result<usize, Errno> {
    let slices: Vec<[IoSlice<'_>; 1]> = payloads.iter().map(|payload| [IoSlice::new(payload)]).collect();
    let mut controls: Vec<SendAncillaryBuffer<'_, '_, '_>> = payloads.iter().map(|_| Default::default()).collect();
    let mut messages: Vec<MMsgHdr<'_>> =
        slices.iter().zip(&mut controls).map(|(slice, control)| MMsgHdr::new_with_addr(to, slice, control)).collect();
    sendmmsg(socket, &mut messages, SendFlags::empty())
}

fn receive(socket: &UdpSocket, mut buffers: Receiver, id: u64, limit: usize, shared: &Shared) -> io::Result<Arrived> {
    // Room for duplicates is not needed beyond what fits.
    let mut packets = Vec::with_capacity(limit);
    let mut overflow = false;
    loop {
        let mut seen_at = None;
        let got = buffers.receive(socket.as_fd(), QUIET, |received| {
            // One reading of the clock for the batch, when all of it is here.
            let seen_at = *seen_at.get_or_insert_with(clock::now);
            let Some(stamp) = Stamp::read(received.bytes).filter(|stamp| stamp.flow == id) else { return };
            if stamp.is_hello() {
                shared.open.store(true, Ordering::Relaxed);
            } else if packets.len() == limit {
                overflow = true;
            } else {
                packets.push((stamp.sequence, stamp.sent_at, seen_at));
            }
        })?;
        shared.arrived.store(u64::try_from(packets.len()).map_err(io::Error::other)?, Ordering::Relaxed);
        if got == 0 && shared.receiver_ends.load(Ordering::Relaxed) {
            break;
        }
    }
    if overflow {
        return Err(io::Error::other("more packets arrived than were sent"));
    }
    Ok(Arrived { packets, drops: queue_drops(socket.as_fd())? })
}

/// Binds the calling thread to one CPU. Each CPU has a backlog of its own: a sender that moves between them could have its
/// packets judged out of order.
fn stay_on_one_cpu() -> io::Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let allowed = sched_getaffinity(None)?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut one = CpuSet::new();
    one.set(cpus[NEXT.fetch_add(1, Ordering::Relaxed) % cpus.len()]);
    Ok(sched_setaffinity(None, &one)?)
}
