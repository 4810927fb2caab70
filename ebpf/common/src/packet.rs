//! From bytes to what a verdict needs to know of a packet.
//!
//! Every loop and every offset is bounded, so that the verifier accepts the same source that the host tests run. What
//! cannot be parsed is never guessed: it is [`Class::Vague`] where the addresses could be read, else
//! [`Parsed::Unreadable`], and the verdict treats both as belonging to every service that they could belong to.

use crate::layout::Address;

/// IP protocol numbers.
pub mod protocol {
    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const ESP: u8 = 50;
    pub const AH: u8 = 51;
    pub const ICMPV6: u8 = 58;
    pub const SCTP: u8 = 132;
}

/// TCP flags, as in byte 13 of the header.
pub mod tcp_flags {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
}

mod ethertype {
    pub(super) const IPV4: u16 = 0x0800;
    pub(super) const ARP: u16 = 0x0806;
    pub(super) const VLAN: u16 = 0x8100;
    pub(super) const IPV6: u16 = 0x86dd;
    pub(super) const QINQ: u16 = 0x88a8;
    /// 802.1ad as some switches wrote it before the standard; the kernel does not take it off, others may.
    pub(super) const QINQ_OLD: u16 = 0x9100;
}

/// Where a packet's bytes come from: a slice on the host, the packet itself or a helper in the kernel.
pub trait Bytes {
    /// Tags (802.1Q, 802.1ad) that are looked through; a frame with more is unreadable.
    const VLAN_TAGS: usize = 4;
    /// IPv6 extension headers that are looked through; a packet with more is vague.
    const EXTENSION_HEADERS: usize = 6;

    /// The bytes at `offset`; `None` where the packet ends before. `N` is at least 2: from a bound of a single byte the
    /// verifier learns nothing.
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    /// A big-endian 16-bit number.
    #[inline(always)]
    fn short(&self, offset: usize) -> Option<u16> {
        self.load::<2>(offset).map(u16::from_be_bytes)
    }
}

impl Bytes for [u8] {
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk::<N>().copied()
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Neither IP nor ARP: nobody's.
    Other,
    /// The addresses could not be read.
    Unreadable,
    /// The packet has been filled in.
    Packet,
}

/// How much of a packet is known beyond its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Protocol and ports are known. An ICMP error counts as the flow that it quotes.
    Flow,
    /// A protocol without ports: it belongs to whoever has every protocol of the address.
    Portless,
    /// A fragment, or not parseable beyond the addresses, or encrypted: it may belong to any service of the address.
    Vague,
    /// ARP, neighbour discovery or router discovery; `target` is the address it asks for or claims.
    Neighbour,
}

/// A packet as the verdict sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub class: Class,
    /// IP protocol; of an ICMP error the quoted flow's.
    pub protocol: u8,
    pub source: Address,
    pub destination: Address,
    /// Host byte order; 0 where there is none.
    pub source_port: u16,
    pub destination_port: u16,
    /// The address that a [`Class::Neighbour`] packet is about.
    pub target: Address,
    /// `target` is claimed by the sender, rather than asked for.
    pub claim: bool,
    /// Only of an unfragmented TCP segment that is not quoted: its flags.
    pub tcp_flags: u8,
    /// An unfragmented TCP segment without payload. False where that is not known.
    pub bare: bool,
}

impl Packet {
    /// Nothing is known. The parser fills it in where it stands: the kernel's stack has no room for a second one.
    pub const UNKNOWN: Self = Self {
        class: Class::Vague,
        protocol: 0,
        source: Address::ANY,
        destination: Address::ANY,
        source_port: 0,
        destination_port: 0,
        target: Address::ANY,
        claim: false,
        tcp_flags: 0,
        bare: false,
    };
}

/// Parses a frame that starts with an Ethernet header.
#[inline(always)]
pub fn parse_frame<B: Bytes + ?Sized>(bytes: &B, packet: &mut Packet) -> Parsed {
    let Some(mut ethertype) = bytes.short(12) else { return Parsed::Unreadable };
    let mut offset = 14;
    for _ in 0..B::VLAN_TAGS {
        if !is_vlan(ethertype) {
            break;
        }
        let Some(inner) = bytes.short(offset + 2) else { return Parsed::Unreadable };
        ethertype = inner;
        offset += 4;
    }
    match ethertype {
        ethertype::IPV4 => parse_ipv4(bytes, offset, packet),
        ethertype::IPV6 => parse_ipv6(bytes, offset, packet),
        ethertype::ARP => parse_arp(bytes, offset, packet),
        _ if is_vlan(ethertype) => Parsed::Unreadable,
        _ => Parsed::Other,
    }
}

/// Parses a packet that starts with its network header, as a cgroup or a tunnel sees it.
#[inline(always)]
pub fn parse_network<B: Bytes + ?Sized>(bytes: &B, packet: &mut Packet) -> Parsed {
    match bytes.load::<2>(0) {
        Some([first, _]) if first >> 4 == 4 => parse_ipv4(bytes, 0, packet),
        Some([first, _]) if first >> 4 == 6 => parse_ipv6(bytes, 0, packet),
        Some(_) => Parsed::Other,
        None => Parsed::Unreadable,
    }
}

#[inline(always)]
fn is_vlan(ethertype: u16) -> bool {
    matches!(ethertype, ethertype::VLAN | ethertype::QINQ | ethertype::QINQ_OLD)
}

#[inline(always)]
fn parse_ipv4<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    let Some(header) = bytes.load::<20>(offset) else { return Parsed::Unreadable };
    let [first, _, l0, l1, _, _, f0, f1, _, protocol, _, _, s0, s1, s2, s3, d0, d1, d2, d3] = header;
    let length = u16::from_be_bytes([l0, l1]);
    packet.source = Address::v4([s0, s1, s2, s3]);
    packet.destination = Address::v4([d0, d1, d2, d3]);
    let header_length = ((first & 0xf) as usize) << 2;
    // More fragments, or not the first: 13 bits of offset and the MF bit.
    let fragment = u16::from_be_bytes([f0, f1]) & 0x3fff != 0;
    if header_length >= 20 && !fragment {
        packet.protocol = protocol;
        transport(bytes, offset + header_length, (length as usize).wrapping_sub(header_length), packet);
    }
    Parsed::Packet
}

#[inline(always)]
fn parse_ipv6<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    let Some([_, _, _, _, length @ .., next, _]) = bytes.load::<8>(offset) else { return Parsed::Unreadable };
    let Some(source) = bytes.load::<16>(offset + 8) else { return Parsed::Unreadable };
    let Some(destination) = bytes.load::<16>(offset + 24) else { return Parsed::Unreadable };
    packet.source = Address(source);
    packet.destination = Address(destination);
    let mut next = next;
    let mut skipped = 0;
    for _ in 0..B::EXTENSION_HEADERS {
        // Hop-by-hop, routing, destination options, mobility, HIP, shim6 share one form (RFC 6564).
        if !matches!(next, 0 | 43 | 60 | 135 | 139 | 140) {
            break;
        }
        let Some([following, units]) = bytes.load::<2>(offset + 40 + skipped) else {
            return Parsed::Packet;
        };
        next = following;
        skipped += (units as usize + 1) << 3;
    }
    match next {
        // Too many headers; a fragment (atomic ones too); no next header at all is a protocol without ports.
        0 | 43 | 44 | 60 | 135 | 139 | 140 => {}
        protocol => {
            packet.protocol = protocol;
            transport(
                bytes,
                offset + 40 + skipped,
                (u16::from_be_bytes(length) as usize).wrapping_sub(skipped),
                packet,
            );
        }
    }
    Parsed::Packet
}

/// Fills in what stands at `offset` behind the network header: `length` bytes of it by that header, which is no number to
/// rely on when the packet is larger than 64 KiB (it then says 0).
#[inline(always)]
fn transport<B: Bytes + ?Sized>(bytes: &B, offset: usize, length: usize, packet: &mut Packet) {
    match packet.protocol {
        protocol::TCP => {
            let Some(header) = bytes.load::<14>(offset) else { return };
            let [s0, s1, d0, d1, _, _, _, _, _, _, _, _, data_offset, flags] = header;
            packet.source_port = u16::from_be_bytes([s0, s1]);
            packet.destination_port = u16::from_be_bytes([d0, d1]);
            packet.tcp_flags = flags;
            packet.bare = length == ((data_offset >> 4) as usize) << 2;
            packet.class = Class::Flow;
        }
        protocol::UDP | protocol::SCTP => {
            let Some([s0, s1, d0, d1]) = bytes.load::<4>(offset) else { return };
            packet.source_port = u16::from_be_bytes([s0, s1]);
            packet.destination_port = u16::from_be_bytes([d0, d1]);
            packet.class = Class::Flow;
        }
        protocol::ICMP => match bytes.load::<2>(offset) {
            // Unreachable, source quench, redirect, time exceeded, parameter problem.
            Some([3 | 4 | 5 | 11 | 12, _]) => quoted_ipv4(bytes, offset + 8, packet),
            Some(_) => packet.class = Class::Portless,
            None => {}
        },
        protocol::ICMPV6 => match bytes.load::<2>(offset) {
            Some([1..=4, _]) => quoted_ipv6(bytes, offset + 8, packet),
            Some([kind @ 133..=137, _]) => neighbour_discovery(bytes, offset, kind, packet),
            Some(_) => packet.class = Class::Portless,
            None => {}
        },
        // What is inside is judged where it is decrypted; here it could be anything.
        protocol::ESP | protocol::AH => {}
        _ => packet.class = Class::Portless,
    }
}

/// An ICMP error belongs to the flow that it quotes, seen from its receiver: the quoted source is the destination of the
/// error. One that quotes something else stays vague.
#[inline(always)]
fn quoted_ipv4<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) {
    let Some(header) = bytes.load::<20>(offset) else { return };
    let [first, _, _, _, _, _, f0, f1, _, protocol, _, _, s0, s1, s2, s3, d0, d1, d2, d3] = header;
    let header_length = ((first & 0xf) as usize) << 2;
    // A later fragment is quoted without its ports.
    if header_length < 20 || u16::from_be_bytes([f0, f1]) & 0x1fff != 0 {
        return;
    }
    let (source, destination) = (Address::v4([s0, s1, s2, s3]), Address::v4([d0, d1, d2, d3]));
    quoted(bytes, offset + header_length, protocol, source, destination, packet);
}

#[inline(always)]
fn quoted_ipv6<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) {
    let Some([next, _]) = bytes.load::<2>(offset + 6) else { return };
    let Some(source) = bytes.load::<16>(offset + 8) else { return };
    let Some(destination) = bytes.load::<16>(offset + 24) else { return };
    quoted(bytes, offset + 40, next, Address(source), Address(destination), packet);
}

#[inline(always)]
fn quoted<B: Bytes + ?Sized>(
    bytes: &B,
    offset: usize,
    protocol: u8,
    source: Address,
    destination: Address,
    packet: &mut Packet,
) {
    if source != packet.destination {
        return;
    }
    match protocol {
        protocol::TCP | protocol::UDP | protocol::SCTP => {
            let Some([s0, s1, d0, d1]) = bytes.load::<4>(offset) else { return };
            packet.destination_port = u16::from_be_bytes([s0, s1]);
            // A router on the way speaks for itself, not for the quoted destination.
            if destination == packet.source {
                packet.source_port = u16::from_be_bytes([d0, d1]);
            }
            packet.protocol = protocol;
            packet.class = Class::Flow;
        }
        protocol::ICMP | protocol::ICMPV6 => packet.class = Class::Portless,
        _ => {}
    }
}

#[inline(always)]
fn neighbour_discovery<B: Bytes + ?Sized>(bytes: &B, offset: usize, kind: u8, packet: &mut Packet) {
    const SOLICITATION: u8 = 135;
    const ADVERTISEMENT: u8 = 136;
    if kind == SOLICITATION || kind == ADVERTISEMENT {
        let Some(target) = bytes.load::<16>(offset + 8) else { return };
        packet.target = Address(target);
        // Duplicate address detection asks from nowhere, on behalf of the address itself.
        packet.claim = kind == ADVERTISEMENT || packet.source == Address::ANY;
    }
    packet.class = Class::Neighbour;
}

#[inline(always)]
fn parse_arp<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    const REQUEST: [u8; 2] = [0, 1];
    let Some(header) = bytes.load::<8>(offset) else { return Parsed::Unreadable };
    // Only IPv4 over six-byte hardware addresses names an address of ours.
    let [_, _, 0x08, 0x00, 6, 4, operation @ ..] = header else { return Parsed::Other };
    let Some(sender) = bytes.load::<4>(offset + 14) else { return Parsed::Unreadable };
    let Some(target) = bytes.load::<4>(offset + 24) else { return Parsed::Unreadable };
    packet.source = Address::v4(sender);
    packet.destination = Address::v4(target);
    packet.class = Class::Neighbour;
    if sender == target {
        // An announcement: it asks nothing of its target.
        packet.destination = Address::ANY;
    } else if sender == [0; 4] {
        // A probe (RFC 5227) asks from nowhere, on behalf of the address itself.
        packet.source = Address::ANY;
        packet.target = Address::v4(target);
        packet.claim = operation == REQUEST;
    }
    Parsed::Packet
}
