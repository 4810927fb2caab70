//! Route netlink, as far as the data path needs it: dumps, acknowledged requests, notifications of links.
//!
//! Attributes are picked out by number and everything else is skipped, so that an attribute of a newer kernel cannot hide
//! an interface, and with it a hole in the fence.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const RTMGRP_LINK: u32 = 1;

/// One message without its header.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: u16,
    flags: u16,
    sequence: u32,
    pub(super) body: Vec<u8>,
}

/// A socket for requests, in the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Every answer to a dump. A dump during which something changed is made again.
    pub(super) fn dump(&mut self, kind: u16, body: &[u8]) -> io::Result<Vec<Message>> {
        loop {
            let sequence = self.send(kind, NLM_F_DUMP, body)?;
            let (mut answers, mut interrupted) = (Vec::new(), false);
            'answers: loop {
                for message in self.receive(sequence)? {
                    interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                    match message.kind {
                        NLMSG_DONE => break 'answers,
                        NLMSG_ERROR => check(&message.body)?,
                        _ => answers.push(message),
                    }
                }
            }
            if !interrupted {
                return Ok(answers);
            }
        }
    }

    /// A request that the kernel acknowledges.
    pub(super) fn request(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let sequence = self.send(kind, NLM_F_ACK | flags, body)?;
        loop {
            if let Some(answer) = self.receive(sequence)?.iter().find(|message| message.kind == NLMSG_ERROR) {
                return check(&answer.body);
            }
        }
    }

    fn send(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<u32> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADER + body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(length.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(body);
        self.socket.send(&bytes, 0)?;
        Ok(self.sequence)
    }

    fn receive(&self, sequence: u32) -> io::Result<Vec<Message>> {
        let (bytes, _) = self.socket.recv_from_full()?;
        let mut messages = split(&bytes);
        messages.retain(|message| message.sequence == sequence);
        Ok(messages)
    }
}

/// A socket that hears of every change to an interface.
#[derive(Debug)]
pub(super) struct LinkEvents {
    socket: Socket,
}

impl LinkEvents {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, RTMGRP_LINK))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Empties the socket. True if anything was heard, or if so much was that some of it was lost.
    pub(super) fn drain(&self) -> io::Result<bool> {
        let mut heard = false;
        loop {
            match self.socket.recv_from_full() {
                Ok(_) => heard = true,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => heard = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(heard),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// An error message's code; 0 is an acknowledgement.
fn check(body: &[u8]) -> io::Result<()> {
    match word(body, 0).map(|code| i32::from_ne_bytes(code.to_ne_bytes())) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn split(mut bytes: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while let (Some(length), Some(kind), Some(flags), Some(sequence)) =
        (word(bytes, 0), half(bytes, 4), half(bytes, 6), word(bytes, 8))
    {
        let length = length as usize;
        let Some(body) = bytes.get(HEADER..length) else { break };
        messages.push(Message { kind, flags, sequence, body: body.to_vec() });
        bytes = bytes.get(align(length)..).unwrap_or_default();
    }
    messages
}

/// The attributes that follow a message's fixed part, or that are nested in one.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    // The upper two bits say "nested" and "network byte order".
    const KIND: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let (length, kind) = (usize::from(half(bytes, 0)?), half(bytes, 2)?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(align(length)..).unwrap_or_default();
        Some((kind & KIND, value))
    })
}

/// Appends an attribute.
pub(super) fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(align(body.len()), 0);
}

/// An attribute's zero-terminated text.
pub(super) fn text(value: &[u8]) -> String {
    let length = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..length]).into_owned()
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

pub(super) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

const fn align(length: usize) -> usize {
    (length + 3) & !3
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_a_round_trip_and_nonsense_ends_them() {
        let mut body = Vec::new();
        push_attribute(&mut body, 3, b"eth0\0");
        push_attribute(&mut body, 0x8000 | 18, &7u32.to_ne_bytes());
        let found: Vec<_> = attributes(&body).collect();
        assert_eq!(found, [(3, &b"eth0\0"[..]), (18, &7u32.to_ne_bytes()[..])]);
        body.extend([0, 0, 1, 0]);
        assert_eq!(attributes(&body).count(), 2);
        body.truncate(body.len() - 4);
        body.extend([200, 0, 1, 0]);
        assert_eq!(attributes(&body).count(), 2);
    }

    #[test]
    fn a_dump_lists_the_loopback_interface() {
        let mut netlink = Netlink::open().unwrap();
        let links = netlink.dump(libc::RTM_GETLINK, &[0; 16]).unwrap();
        assert!(links.iter().any(|link| attributes(&link.body[16..]).any(|(kind, v)| kind == 3 && text(v) == "lo")));
    }
}
