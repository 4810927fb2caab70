//! An established TCP connection with stamped records in both directions.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, recv, send, socket_with},
};

use super::{
    LIGHT, Packet, Report, address,
    pace::Pace,
    stamp::{PAYLOAD, Stamp, flow_id},
};
use crate::{clock, world::Namespace};

/// How long an open path may take to establish a connection.
const OPEN: Duration = Duration::from_secs(5);
/// After the writers have ended, silence of this length means that nothing is under way any more.
const QUIET: Duration = Duration::from_millis(100);
/// What a stream records at most in each direction.
const LIMIT: usize = 1_000_000;

/// A connection to be made.
#[derive(Clone, Debug)]
pub struct Stream {
    client: Namespace,
    source: SocketAddr,
    server: Namespace,
    destination: SocketAddr,
    listen: SocketAddr,
    rate: u32,
}

impl Stream {
    /// From `source` in the client's namespace to a listener at `destination` in the server's; port 0 at the source is any.
    #[track_caller]
    pub fn tcp(client: &Namespace, source: &str, server: &Namespace, destination: &str) -> Self {
        let destination = address(destination);
        Self {
            client: client.clone(),
            source: address(source),
            server: server.clone(),
            destination,
            listen: destination,
            rate: LIGHT,
        }
    }

    /// The destination is translated on the way: the server listens here instead.
    #[must_use]
    #[track_caller]
    pub fn translated_to(mut self, listen: &str) -> Self {
        self.listen = address(listen);
        self
    }

    /// Records per second in each direction; [`LIGHT`] if not said.
    #[must_use]
    pub fn rate(mut self, per_second: u32) -> Self {
        self.rate = per_second;
        self
    }

    /// Connects, and starts to write at both ends; panics if the path is closed.
    #[track_caller]
    pub fn start(self) -> RunningStream {
        let listener = self
            .server
            .run(|| TcpListener::bind(self.listen))
            .unwrap_or_else(|e| panic!("listen on tcp {} in {}: {e}", self.listen, self.server.name()));
        let client = self
            .client
            .run(|| connect_from(self.source, self.destination))
            .unwrap_or_else(|e| panic!("connect {} -> {}: {e}", self.source, self.destination));
        let (server, _) = listener.accept().unwrap_or_else(|e| panic!("accept on {}: {e}", self.listen));
        RunningStream {
            to_server: Direction::start(&client, &server, self.rate),
            to_client: Direction::start(&server, &client, self.rate),
        }
    }
}

/// A connection under way. Dropping it closes it.
#[derive(Debug)]
pub struct RunningStream {
    to_server: Direction,
    to_client: Direction,
}

/// Both directions of a connection.
#[derive(Clone, Debug)]
pub struct StreamReport {
    pub to_server: Report,
    pub to_client: Report,
}

impl RunningStream {
    /// Records that have arrived so far at the server.
    pub fn arrived_at_server(&self) -> u64 {
        self.to_server.shared.arrived.load(Ordering::Relaxed)
    }

    /// Records that have arrived so far at the client.
    pub fn arrived_at_client(&self) -> u64 {
        self.to_client.shared.arrived.load(Ordering::Relaxed)
    }

    /// Ends the writers, waits for what is under way, and tells what became of each record.
    #[track_caller]
    pub fn stop(mut self) -> StreamReport {
        // Both writers first: neither end closes before the other has stopped writing.
        self.to_server.shared.writer_ends.store(true, Ordering::Relaxed);
        self.to_client.shared.writer_ends.store(true, Ordering::Relaxed);
        StreamReport { to_server: self.to_server.stop(), to_client: self.to_client.stop() }
    }
}

#[derive(Debug)]
struct Direction {
    shared: Arc<Shared>,
    threads: Option<(JoinHandle<io::Result<Report>>, JoinHandle<io::Result<Vec<(u32, BootInstant)>>>)>,
}

#[derive(Debug, Default)]
struct Shared {
    writer_ends: AtomicBool,
    reader_ends: AtomicBool,
    arrived: AtomicU64,
}

impl Direction {
    fn start(from: &TcpStream, to: &TcpStream, rate: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let id = flow_id();
        from.set_nodelay(true).unwrap_or_else(|e| panic!("set TCP_NODELAY: {e}"));
        let copy = |stream: &TcpStream| stream.try_clone().unwrap_or_else(|e| panic!("duplicate a socket: {e}"));
        let reader = {
            let (shared, to) = (Arc::clone(&shared), copy(to));
            thread::Builder::new().name("reader".to_owned()).spawn(move || read(&to, id, &shared))
        };
        let writer = {
            let (shared, from) = (Arc::clone(&shared), copy(from));
            thread::Builder::new().name("writer".to_owned()).spawn(move || write(&from, id, rate, &shared))
        };
        Self { shared, threads: Some((writer.expect("start a thread"), reader.expect("start a thread"))) }
    }

    #[track_caller]
    fn stop(&mut self) -> Report {
        let (written, arrived) = self.end().expect("stopped once");
        let mut report = written.unwrap_or_else(|e| panic!("the writer of a stream: {e}"));
        for (sequence, at) in arrived.unwrap_or_else(|e| panic!("the reader of a stream: {e}")) {
            let index = usize::try_from(sequence).expect("fits an address space");
            let packet = report.packets.get_mut(index).unwrap_or_else(|| panic!("record {sequence} was never sent"));
            packet.arrived_at = Some(at);
        }
        report
    }

    #[expect(clippy::type_complexity, reason = "the two results of the two threads, used once")]
    fn end(&mut self) -> Option<(io::Result<Report>, io::Result<Vec<(u32, BootInstant)>>)> {
        let (writer, reader) = self.threads.take()?;
        self.shared.writer_ends.store(true, Ordering::Relaxed);
        let written = writer.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")));
        self.shared.reader_ends.store(true, Ordering::Relaxed);
        Some((written, reader.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))))
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.end();
    }
}

/// Writes a record whenever one is due. While the kernel takes no more the next record waits, stamped when it was due.
fn write(stream: &TcpStream, id: u64, rate: u32, shared: &Shared) -> io::Result<Report> {
    let mut report = Report { packets: Vec::with_capacity(LIMIT), ..Report::default() };
    let mut pace = Pace::new(rate);
    while !shared.writer_ends.load(Ordering::Relaxed) {
        pace.wait(1);
        if report.packets.len() == LIMIT {
            return Err(io::Error::other(format!("it ran longer than the {LIMIT} records it can keep")));
        }
        let sequence = u32::try_from(report.packets.len()).map_err(io::Error::other)?;
        let stamp = Stamp { flow: id, sequence, sent_at: clock::now() };
        let outcome = write_record(stream, &stamp.write(), shared);
        let returned_at = clock::now();
        report.packets.push(Packet { sent_at: stamp.sent_at, returned_at, refused: false, arrived_at: None });
        if let Err(error) = outcome {
            report.broken = Some((returned_at, error.kind()));
            break;
        }
    }
    Ok(report)
}

/// Writes a whole record, unless the stream is told to end while the kernel takes no more.
fn write_record(stream: &TcpStream, mut rest: &[u8], shared: &Shared) -> io::Result<()> {
    while !rest.is_empty() {
        match send(stream, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(taken) => rest = &rest[taken..],
            Err(Errno::AGAIN) if shared.writer_ends.load(Ordering::Relaxed) => break,
            Err(Errno::AGAIN) => wait(stream, PollFlags::OUT)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read(stream: &TcpStream, id: u64, shared: &Shared) -> io::Result<Vec<(u32, BootInstant)>> {
    let mut arrived = Vec::with_capacity(LIMIT);
    let mut pending = Vec::new();
    let mut buffer = [0; 64 * PAYLOAD];
    loop {
        wait(stream, PollFlags::IN)?;
        let ends = shared.reader_ends.load(Ordering::Relaxed);
        let taken = match recv(stream, &mut buffer, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) if ends => return Ok(arrived),
            Err(Errno::AGAIN) => continue,
            // Closed or broken: how it broke is in the writer's report of the other direction.
            Ok((_, 0)) | Err(_) => return Ok(arrived),
            Ok((_, taken)) => taken,
        };
        let at = clock::now();
        pending.extend_from_slice(&buffer[..taken]);
        let whole = pending.len() - pending.len() % PAYLOAD;
        for record in pending.drain(..whole).as_slice().chunks_exact(PAYLOAD) {
            let stamp = Stamp::read(record).filter(|stamp| stamp.flow == id);
            arrived.push((stamp.ok_or_else(|| io::Error::other("a record is not of this stream"))?.sequence, at));
        }
        shared.arrived.store(u64::try_from(arrived.len()).map_err(io::Error::other)?, Ordering::Relaxed);
    }
}

/// Waits until the socket is ready, at most [`QUIET`].
fn wait(stream: &TcpStream, ready: PollFlags) -> io::Result<()> {
    let timeout = Timespec::try_from(QUIET).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(stream, ready)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Connects from a given address.
fn connect_from(source: SocketAddr, destination: SocketAddr) -> io::Result<TcpStream> {
    let family = if source.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    bind(&socket, &source)?;
    match connect(&socket, &destination) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(socket);
    let timeout = Timespec::try_from(OPEN).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(&stream, PollFlags::OUT)], Some(&timeout))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        None => stream.set_nonblocking(false).map(|()| stream),
    }
}
