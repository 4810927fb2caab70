//! One direction of a TCP connection: a writer that stamps records, a reader that counts them.

use std::{
    io,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};

use super::{
    Packet, Report,
    flow::{LONGEST, records},
    pace::Pace,
    stamp::{PAYLOAD, Stamp, flow_id},
    worker::Worker,
};
use crate::clock;

/// After the writer has ended, silence of this length means that nothing is under way any more.
const QUIET: Duration = Duration::from_millis(100);

/// How and when one end learned that its connection is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Break {
    pub at: BootInstant,
    pub kind: io::ErrorKind,
}

/// A direction under way. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Direction {
    shared: Arc<Shared>,
    threads: Option<(Worker<Written>, Worker<Read>)>,
}

#[derive(Debug, Default)]
struct Shared {
    writer_ends: AtomicBool,
    reader_ends: AtomicBool,
    arrived: AtomicU64,
}

#[derive(Debug)]
struct Written {
    packets: Vec<Packet>,
    saw: Option<Break>,
}

#[derive(Debug)]
struct Read {
    records: Vec<(u32, BootInstant)>,
    saw: Option<Break>,
}

/// What became of a direction.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) report: Report,
    pub(super) writer_saw: Option<Break>,
    pub(super) reader_saw: Option<Break>,
}

impl Direction {
    /// Writes stamped records to `from` and counts them at `to`: the two ends of a connection, or twice the same end if the
    /// other echoes.
    pub(super) fn start(from: &TcpStream, to: &TcpStream, rate: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let (id, limit) = (flow_id(), records(rate, LONGEST));
        from.set_nodelay(true).unwrap_or_else(|e| panic!("set TCP_NODELAY: {e}"));
        let copy = |stream: &TcpStream| stream.try_clone().unwrap_or_else(|e| panic!("duplicate a socket: {e}"));
        let reader = {
            let (shared, to) = (Arc::clone(&shared), copy(to));
            Worker::start("reader", move || read(&to, id, limit, &shared))
        };
        let writer = {
            let (shared, from) = (Arc::clone(&shared), copy(from));
            Worker::start("writer", move || write(&from, id, rate, limit, &shared))
        };
        Self { shared, threads: Some((writer, reader)) }
    }

    /// Records that have arrived so far.
    pub(super) fn arrived(&self) -> u64 {
        self.shared.arrived.load(Ordering::Relaxed)
    }

    /// Asks the writer to end.
    pub(super) fn end_writer(&self) {
        self.shared.writer_ends.store(true, Ordering::Relaxed);
    }

    /// Ends the writer, waits for what is under way, and tells what became of each record.
    #[track_caller]
    pub(super) fn stop(&mut self) -> Outcome {
        let (written, read) = self.end().expect("stopped once");
        let written = written.unwrap_or_else(|e| panic!("the writer of a stream: {e}"));
        let read = read.unwrap_or_else(|e| panic!("the reader of a stream: {e}"));
        let mut report = Report { packets: written.packets, ..Report::default() };
        for (sequence, at) in read.records {
            let index = usize::try_from(sequence).expect("fits an address space");
            let packet = report.packets.get_mut(index).unwrap_or_else(|| panic!("record {sequence} was never sent"));
            packet.arrived_at = Some(at);
        }
        Outcome { report, writer_saw: written.saw, reader_saw: read.saw }
    }

    fn end(&mut self) -> Option<(io::Result<Written>, io::Result<Read>)> {
        let (writer, reader) = self.threads.take()?;
        self.end_writer();
        let written = writer.join();
        self.shared.reader_ends.store(true, Ordering::Relaxed);
        Some((written, reader.join()))
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.end();
    }
}

/// Writes a record whenever one is due. While the kernel takes no more, none is.
fn write(stream: &TcpStream, id: u64, rate: u32, limit: usize, shared: &Shared) -> io::Result<Written> {
    let mut written = Written { packets: Vec::with_capacity(limit), saw: None };
    let mut pace = Pace::new(rate);
    while !shared.writer_ends.load(Ordering::Relaxed) {
        pace.wait(1);
        if written.packets.len() == limit {
            return Err(io::Error::other(format!("it ran longer than the {limit} records it can keep")));
        }
        let sequence = u32::try_from(written.packets.len()).map_err(io::Error::other)?;
        let stamp = Stamp { flow: id, sequence, sent_at: clock::now() };
        let outcome = write_record(stream, &stamp.write(), shared);
        let returned_at = clock::now();
        written.packets.push(Packet { sent_at: stamp.sent_at, returned_at, refused: false, arrived_at: None });
        if let Err(error) = outcome {
            written.saw = Some(Break { at: returned_at, kind: error.kind() });
            break;
        }
    }
    Ok(written)
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

fn read(stream: &TcpStream, id: u64, limit: usize, shared: &Shared) -> io::Result<Read> {
    let mut read = Read { records: Vec::with_capacity(limit), saw: None };
    let mut pending = Vec::new();
    let mut buffer = [0; 64 * PAYLOAD];
    loop {
        let ends = shared.reader_ends.load(Ordering::Relaxed);
        wait(stream, PollFlags::IN)?;
        let taken = match recv(stream, &mut buffer, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) if ends => return Ok(read),
            Err(Errno::AGAIN) => continue,
            Err(error) => {
                read.saw = Some(Break { at: clock::now(), kind: io::Error::from(error).kind() });
                return Ok(read);
            }
            Ok((_, 0)) => return Ok(read),
            Ok((_, taken)) => taken,
        };
        let at = clock::now();
        pending.extend_from_slice(&buffer[..taken]);
        let whole = pending.len() - pending.len() % PAYLOAD;
        for record in pending.drain(..whole).as_slice().chunks_exact(PAYLOAD) {
            let stamp = Stamp::read(record).filter(|stamp| stamp.flow == id);
            let stamp = stamp.ok_or_else(|| io::Error::other("a record is not of this stream"))?;
            read.records.push((stamp.sequence, at));
        }
        shared.arrived.store(u64::try_from(read.records.len()).map_err(io::Error::other)?, Ordering::Relaxed);
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
