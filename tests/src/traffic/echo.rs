//! Stamped records to an echoing server and back: what a client sees of a service.

use std::net::SocketAddr;

use super::{
    LIGHT, Report, address,
    direction::{Break, Direction},
    flow::{LONGEST, RunningFlow, bind, records},
    stream,
};
use crate::world::Namespace;

/// Traffic to an echoing server (see [`super::serve`]) to be started. A record counts as arrived when it has come back, so a
/// report judges the way there and the way back at once.
#[derive(Clone, Debug)]
pub struct Echo {
    client: Namespace,
    source: SocketAddr,
    server: SocketAddr,
    udp: bool,
    rate: u32,
}

impl Echo {
    /// Over one TCP connection from `source` to `server`; port 0 at the source is any.
    #[track_caller]
    pub fn tcp(client: &Namespace, source: &str, server: &str) -> Self {
        Self { client: client.clone(), source: address(source), server: address(server), udp: false, rate: LIGHT }
    }

    /// Over UDP.
    #[track_caller]
    pub fn udp(client: &Namespace, source: &str, server: &str) -> Self {
        Self { udp: true, ..Self::tcp(client, source, server) }
    }

    /// Records per second; [`LIGHT`] if not said.
    #[must_use]
    pub fn rate(mut self, per_second: u32) -> Self {
        self.rate = per_second;
        self
    }

    /// Starts once the server has answered; panics if it does not.
    #[track_caller]
    pub fn start(self) -> RunningEcho {
        if self.udp {
            self.start_udp(true)
        } else {
            let socket = self.client.run(|| stream::open(self.source, self.server));
            RunningEcho(Running::Tcp(Direction::start(&socket, &socket, self.rate)))
        }
    }

    /// Starts to count at once, on a path that may be closed; only UDP can.
    #[track_caller]
    pub fn start_closed(self) -> RunningEcho {
        assert!(self.udp, "a TCP connection to {} cannot start on a path that is closed", self.server);
        self.start_udp(false)
    }

    #[track_caller]
    fn start_udp(self, knock: bool) -> RunningEcho {
        let socket = bind(&self.client, self.source);
        let copy = socket.try_clone().unwrap_or_else(|e| panic!("duplicate a socket: {e}"));
        let limit = records(self.rate, LONGEST);
        RunningEcho(Running::Udp(RunningFlow::start(socket, copy, self.server, self.rate, limit, knock)))
    }
}

/// An echo under way. Dropping it ends it.
#[derive(Debug)]
pub struct RunningEcho(Running);

#[derive(Debug)]
enum Running {
    Udp(RunningFlow),
    Tcp(Direction),
}

impl RunningEcho {
    /// Records that have come back so far.
    pub fn arrived(&self) -> u64 {
        match &self.0 {
            Running::Udp(flow) => flow.arrived(),
            Running::Tcp(direction) => direction.arrived(),
        }
    }

    /// Ends it, waits for what is under way, and tells what became of each record, and how the connection broke if it did.
    #[track_caller]
    pub fn stop(self) -> (Report, Option<Break>) {
        match self.0 {
            Running::Udp(flow) => (flow.stop(), None),
            Running::Tcp(mut direction) => {
                let outcome = direction.stop();
                (outcome.report, outcome.reader_saw.or(outcome.writer_saw))
            }
        }
    }
}
