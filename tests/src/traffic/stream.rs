//! An established TCP connection with stamped records in both directions.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with},
};

use super::{
    LIGHT, Report, address,
    direction::{Break, Direction},
};
use crate::world::Namespace;

/// How long an open path may take to establish a connection.
const OPEN: Duration = Duration::from_secs(5);
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
            .listen(self.listen)
            .unwrap_or_else(|e| panic!("listen on tcp {} in {}: {e}", self.listen, self.server.name()));
        let client = self.client.run(|| open(self.source, self.destination));
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
    /// What the client's socket said when the connection broke, if it did.
    pub client_saw: Option<Break>,
    /// What the server's socket said.
    pub server_saw: Option<Break>,
}

impl RunningStream {
    /// Records that have arrived so far at the server.
    pub fn arrived_at_server(&self) -> u64 {
        self.to_server.arrived()
    }

    /// Records that have arrived so far at the client.
    pub fn arrived_at_client(&self) -> u64 {
        self.to_client.arrived()
    }

    /// Ends the writers, waits for what is under way, and tells what became of each record.
    #[track_caller]
    pub fn stop(mut self) -> StreamReport {
        // Both writers first: neither end closes before the other has stopped writing.
        self.to_server.end_writer();
        self.to_client.end_writer();
        let (up, down) = (self.to_server.stop(), self.to_client.stop());
        StreamReport {
            to_server: up.report,
            to_client: down.report,
            // A reset is told once, mostly to the reader; a writer after it only learns of a broken pipe.
            client_saw: down.reader_saw.or(up.writer_saw),
            server_saw: up.reader_saw.or(down.writer_saw),
        }
    }
}

/// Opens a connection, or panics.
#[track_caller]
pub(super) fn open(source: SocketAddr, destination: SocketAddr) -> TcpStream {
    connect_from(source, destination).unwrap_or_else(|e| panic!("connect {source} -> {destination}: {e}"))
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
