//! Frames, byte by byte: what no well-behaved sender makes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) const IPV4: u16 = 0x0800;
pub(crate) const IPV6: u16 = 0x86dd;
pub(crate) const ARP: u16 = 0x0806;
pub(crate) const VLAN: u16 = 0x8100;
pub(crate) const QINQ: u16 = 0x88a8;

pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;
pub(crate) const UDP: u8 = 17;
pub(crate) const TCP: u8 = 6;
pub(crate) const SCTP: u8 = 132;
pub(crate) const ICMP: u8 = 1;
pub(crate) const ICMPV6: u8 = 58;

pub(crate) type Mac = [u8; 6];

/// An Ethernet header with `tags` (protocol and VLAN number, the outer first) before a packet.
pub(crate) fn ethernet(to: Mac, from: Mac, tags: &[(u16, u16)], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [to, from].concat();
    for (protocol, number) in tags {
        frame.extend(protocol.to_be_bytes());
        frame.extend(number.to_be_bytes());
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

/// Where a piece of an IPv4 packet belongs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Piece {
    pub(crate) identification: u16,
    /// In bytes, a multiple of 8.
    pub(crate) offset: u16,
    pub(crate) more: bool,
}

pub(crate) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ipv4_with(from, to, protocol, Piece::default(), &[], payload)
}

/// `options` are padded by the caller to a multiple of 4.
pub(crate) fn ipv4_with(
    from: Ipv4Addr,
    to: Ipv4Addr,
    protocol: u8,
    piece: Piece,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let header_length = 20 + options.len();
    let mut header = vec![0x40 | u8::try_from(header_length / 4).unwrap(), 0];
    header.extend(short(header_length + payload.len()));
    header.extend(piece.identification.to_be_bytes());
    header.extend((u16::from(piece.more) << 13 | piece.offset / 8).to_be_bytes());
    header.extend([64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    header.extend(options);
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    header.extend(payload);
    header
}

pub(crate) fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(short(payload.len()));
    packet.extend([next, 255]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}

/// Extension headers in their order before `payload`, which is of protocol `last`; with the first one's number.
///
/// Hop-by-hop and destination options hold padding, a routing header has no segments left, a fragment header is the
/// whole packet's.
pub(crate) fn extended(headers: &[u8], last: u8, payload: &[u8]) -> (u8, Vec<u8>) {
    headers.iter().rev().fold((last, payload.to_vec()), |(next, rest), header| {
        let mut packet = match *header {
            ROUTING => vec![next, 0, 0, 0, 0, 0, 0, 0],
            FRAGMENT => vec![next, 0, 0, 0, 0, 0, 0, 7],
            _ => vec![next, 0, 1, 4, 0, 0, 0, 0],
        };
        packet.extend(rest);
        (*header, packet)
    })
}

/// One piece of an IPv6 packet: a fragment header before `payload`.
pub(crate) fn ipv6_piece(next: u8, piece: Piece, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![next, 0];
    packet.extend((piece.offset | u16::from(piece.more)).to_be_bytes());
    packet.extend(u32::from(piece.identification).to_be_bytes());
    packet.extend(payload);
    packet
}

pub(crate) fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut datagram = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    datagram.extend(short(8 + payload.len()));
    datagram.extend([0, 0]);
    datagram.extend(payload);
    let sum = pseudo_checksum(from.ip(), to.ip(), UDP, &datagram);
    datagram[6..8].copy_from_slice(&sum);
    datagram
}

/// A segment with `flags` (byte 13 of the header).
pub(crate) fn tcp(from: SocketAddr, to: SocketAddr, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut segment = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    segment.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(payload);
    let sum = pseudo_checksum(from.ip(), to.ip(), TCP, &segment);
    segment[16..18].copy_from_slice(&sum);
    segment
}

pub(crate) fn sctp(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut packet = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    packet.extend([0; 12]);
    packet
}

/// An ICMP message: `rest` is what follows the checksum.
pub(crate) fn icmp(kind: u8, code: u8, rest: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(rest);
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    message
}

pub(crate) fn icmpv6(from: Ipv6Addr, to: Ipv6Addr, kind: u8, code: u8, rest: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(rest);
    let sum = pseudo_checksum(from.into(), to.into(), ICMPV6, &message);
    message[2..4].copy_from_slice(&sum);
    message
}

/// Operation 1 asks, 2 answers.
pub(crate) fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    for (mac, address) in [sender, target] {
        packet.extend(mac);
        packet.extend(address.octets());
    }
    packet
}

/// The body of a neighbour solicitation or advertisement (behind the checksum), with a link-layer address as option.
pub(crate) fn neighbour(target: Ipv6Addr, option: u8, mac: Mac) -> Vec<u8> {
    // Of an advertisement: override. Of a solicitation the field is reserved.
    let flags = if option == 2 { 0x20 } else { 0 };
    let mut body = vec![flags, 0, 0, 0];
    body.extend(target.octets());
    body.extend([option, 1]);
    body.extend(mac);
    body
}

fn pseudo_checksum(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> [u8; 2] {
    let octets = |address| match address {
        IpAddr::V4(address) => Ipv4Addr::octets(&address).to_vec(),
        IpAddr::V6(address) => Ipv6Addr::octets(&address).to_vec(),
    };
    let mut bytes = [octets(from), octets(to)].concat();
    bytes.extend([0, protocol]);
    bytes.extend(short(payload.len()));
    bytes.extend(payload);
    checksum(&bytes)
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

fn short(length: usize) -> [u8; 2] {
    u16::try_from(length).unwrap().to_be_bytes()
}
