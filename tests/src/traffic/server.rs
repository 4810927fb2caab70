//! A real server: echoes over TCP and UDP, and writes without being asked again to who wants it.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
};

use super::{
    pace::Pace,
    stamp::{PAYLOAD, Stamp},
};
use crate::clock;

/// The line with which a TCP client asks for stamped records at a rate, for as long as the connection lives: `stream 1000\n`.
/// Sequence numbers start at 0, the flow's number is 0. Anything else is echoed.
const STREAM: &[u8] = b"stream ";

/// Serves on every address, TCP and UDP, until the process ends. Calls `ready` once all of them are bound.
///
/// # Errors
/// An address cannot be bound. Errors of single connections end those connections only.
pub fn serve(addresses: &[SocketAddr], ready: impl FnOnce()) -> io::Result<()> {
    let listeners: Vec<_> = addresses.iter().map(TcpListener::bind).collect::<io::Result<_>>()?;
    let sockets: Vec<_> = addresses.iter().map(UdpSocket::bind).collect::<io::Result<_>>()?;
    ready();
    thread::scope(|scope| {
        for listener in &listeners {
            scope.spawn(move || {
                for stream in listener.incoming().flatten() {
                    // A connection that breaks is its client's business.
                    thread::spawn(move || converse(stream));
                }
            });
        }
        for socket in &sockets {
            scope.spawn(move || echo_datagrams(socket));
        }
    });
    Ok(())
}

fn converse(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = [0; 64 * PAYLOAD];
    let mut taken = stream.read(&mut buffer)?;
    if let Some(rate) = buffer[..taken].strip_prefix(STREAM).and_then(wanted_rate) {
        return write_records(&mut stream, rate);
    }
    while taken > 0 {
        stream.write_all(&buffer[..taken])?;
        taken = stream.read(&mut buffer)?;
    }
    Ok(())
}

fn wanted_rate(text: &[u8]) -> Option<u32> {
    str::from_utf8(text).ok()?.trim_end().parse().ok().filter(|rate| *rate > 0)
}

fn write_records(stream: &mut TcpStream, rate: u32) -> io::Result<()> {
    let mut pace = Pace::new(rate);
    for sequence in 0.. {
        pace.wait(1);
        stream.write_all(&Stamp { flow: 0, sequence, sent_at: clock::now() }.write())?;
    }
    Ok(())
}

fn echo_datagrams(socket: &UdpSocket) {
    let mut buffer = [0; 2048];
    loop {
        // A datagram that cannot be answered (the gate is closed) is lost, as any other.
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}
