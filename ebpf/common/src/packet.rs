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
    pub const ACK: u8 = 16;
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

    type Header<const N: usize>: Header;

    /// The `N` bytes at `offset`; `None` where the packet ends before. `N` is at least 2: from a bound of a single byte
    /// the verifier learns nothing.
    fn header<const N: usize>(&self, offset: usize) -> Option<Self::Header<N>>;
}

/// Bytes that are there. An index beyond the header is a mistake of the parser: the verifier refuses it, the host panics.
pub trait Header {
    fn byte(&self, index: usize) -> u8;
    /// A big-endian 16-bit number.
    fn short(&self, index: usize) -> u16;
    /// Four bytes as they stand.
    fn word(&self, index: usize) -> u32;
    /// Eight bytes as they stand.
    fn long(&self, index: usize) -> u64;

    /// An IPv4 address.
    #[inline(always)]
    fn v4(&self, index: usize) -> Address {
        Address::from_v4_word(self.word(index))
    }

    /// An IPv6 address.
    #[inline(always)]
    fn v6(&self, index: usize) -> Address {
        Address::from_halves(self.long(index), self.long(index + 8))
    }
}

impl Bytes for [u8] {
    type Header<const N: usize> = [u8; N];

    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk::<N>().copied()
    }
}

impl<const N: usize> Header for [u8; N] {
    #[inline(always)]
    fn byte(&self, index: usize) -> u8 {
        self[index]
    }

    #[inline(always)]
    fn short(&self, index: usize) -> u16 {
        u16::from_be_bytes([self[index], self[index + 1]])
    }

    #[inline(always)]
    fn word(&self, index: usize) -> u32 {
        u32::from_ne_bytes([self[index], self[index + 1], self[index + 2], self[index + 3]])
    }

    #[inline(always)]
    fn long(&self, index: usize) -> u64 {
        let (low, high) = (self.word(index) as u64, self.word(index + 4) as u64);
        if cfg!(target_endian = "little") { low | high << 32 } else { low << 32 | high }
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
#[repr(u8)]
pub enum Class {
    /// A fragment, or not parseable beyond the addresses, or encrypted: it may belong to any service of the address.
    Vague = 0,
    /// Protocol and ports are known. An ICMP error counts as the flow that it quotes.
    Flow,
    /// A protocol without ports: it belongs to whoever has every protocol of the address.
    Portless,
    /// ARP, neighbour discovery or router discovery; `target` is the address it asks for or claims.
    Neighbour,
}

/// A packet as the verdict sees it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub source: Address,
    pub destination: Address,
    /// The address that a [`Class::Neighbour`] packet is about.
    pub target: Address,
    /// Host byte order; 0 where there is none.
    pub source_port: u16,
    pub destination_port: u16,
    pub class: Class,
    /// IP protocol; of an ICMP error the quoted flow's.
    pub protocol: u8,
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
    let Some(ethernet) = bytes.header::<14>(0) else { return Parsed::Unreadable };
    let mut ethertype = ethernet.short(12);
    let mut offset = 14;
    for _ in 0..B::VLAN_TAGS {
        if !is_vlan(ethertype) {
            break;
        }
        let Some(tag) = bytes.header::<4>(offset) else { return Parsed::Unreadable };
        ethertype = tag.short(2);
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
    let Some(start) = bytes.header::<2>(0) else { return Parsed::Unreadable };
    match start.byte(0) >> 4 {
        4 => parse_ipv4(bytes, 0, packet),
        6 => parse_ipv6(bytes, 0, packet),
        _ => Parsed::Other,
    }
}

#[inline(always)]
fn is_vlan(ethertype: u16) -> bool {
    matches!(ethertype, ethertype::VLAN | ethertype::QINQ | ethertype::QINQ_OLD)
}

#[inline(always)]
fn parse_ipv4<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    let Some(header) = bytes.header::<20>(offset) else { return Parsed::Unreadable };
    packet.source = header.v4(12);
    packet.destination = header.v4(16);
    let header_length = ((header.byte(0) & 0xf) as usize) << 2;
    // More fragments, or not the first: the MF bit and 13 bits of offset.
    let fragment = header.short(6) & 0x3fff != 0;
    if header_length >= 20 && !fragment {
        packet.protocol = header.byte(9);
        let length = (header.short(2) as usize).wrapping_sub(header_length);
        transport(bytes, offset + header_length, length, packet);
    }
    Parsed::Packet
}

#[inline(always)]
fn parse_ipv6<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    let Some(header) = bytes.header::<40>(offset) else { return Parsed::Unreadable };
    packet.source = header.v6(8);
    packet.destination = header.v6(24);
    let length = header.short(4) as usize;
    let mut next = header.byte(6);
    let mut skipped = 0;
    for _ in 0..B::EXTENSION_HEADERS {
        if !is_extension(next) {
            break;
        }
        let Some(extension) = bytes.header::<2>(offset + 40 + skipped) else { return Parsed::Packet };
        next = extension.byte(0);
        skipped += (extension.byte(1) as usize + 1) << 3;
    }
    // Too many headers, or a fragment (an atomic one too): vague.
    if !is_extension(next) && next != FRAGMENT {
        packet.protocol = next;
        transport(bytes, offset + 40 + skipped, length.wrapping_sub(skipped), packet);
    }
    Parsed::Packet
}

const FRAGMENT: u8 = 44;

/// Hop-by-hop, routing, destination options, mobility, HIP, shim6: they share one form (RFC 6564).
#[inline(always)]
fn is_extension(next: u8) -> bool {
    matches!(next, 0 | 43 | 60 | 135 | 139 | 140)
}

/// Fills in what stands at `offset` behind the network header: `length` bytes of it by that header, which is no number to
/// rely on when the packet is larger than 64 KiB (it then says 0).
#[inline(always)]
fn transport<B: Bytes + ?Sized>(bytes: &B, offset: usize, length: usize, packet: &mut Packet) {
    match packet.protocol {
        protocol::TCP => {
            let Some(header) = bytes.header::<14>(offset) else { return };
            packet.source_port = header.short(0);
            packet.destination_port = header.short(2);
            packet.tcp_flags = header.byte(13);
            packet.bare = length == ((header.byte(12) >> 4) as usize) << 2;
            packet.class = Class::Flow;
        }
        protocol::UDP | protocol::SCTP => {
            let Some(header) = bytes.header::<4>(offset) else { return };
            packet.source_port = header.short(0);
            packet.destination_port = header.short(2);
            packet.class = Class::Flow;
        }
        protocol::ICMP => {
            let Some(header) = bytes.header::<2>(offset) else { return };
            match header.byte(0) {
                // Unreachable, source quench, redirect, time exceeded, parameter problem.
                3 | 4 | 5 | 11 | 12 => quoted_ipv4(bytes, offset + 8, packet),
                _ => packet.class = Class::Portless,
            }
        }
        protocol::ICMPV6 => {
            let Some(header) = bytes.header::<2>(offset) else { return };
            match header.byte(0) {
                1..=4 => quoted_ipv6(bytes, offset + 8, packet),
                kind @ 133..=137 => neighbour_discovery(bytes, offset, kind, packet),
                _ => packet.class = Class::Portless,
            }
        }
        // What is inside is judged where it is decrypted; here it could be anything.
        protocol::ESP | protocol::AH => {}
        _ => packet.class = Class::Portless,
    }
}

/// An ICMP error belongs to the flow that it quotes, seen from its receiver: the quoted source is the destination of the
/// error. One that quotes something else stays vague.
#[inline(always)]
fn quoted_ipv4<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) {
    let Some(header) = bytes.header::<20>(offset) else { return };
    let header_length = ((header.byte(0) & 0xf) as usize) << 2;
    // A later fragment is quoted without its ports.
    if header_length < 20 || header.short(6) & 0x1fff != 0 {
        return;
    }
    let (source, destination) = (header.v4(12), header.v4(16));
    quoted(bytes, offset + header_length, header.byte(9), source, destination, packet);
}

#[inline(always)]
fn quoted_ipv6<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) {
    let Some(header) = bytes.header::<40>(offset) else { return };
    quoted(bytes, offset + 40, header.byte(6), header.v6(8), header.v6(24), packet);
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
            let Some(header) = bytes.header::<4>(offset) else { return };
            packet.destination_port = header.short(0);
            // A router on the way speaks for itself, not for the quoted destination.
            if destination == packet.source {
                packet.source_port = header.short(2);
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
        let Some(header) = bytes.header::<24>(offset) else { return };
        packet.target = header.v6(8);
        // Duplicate address detection asks from nowhere, on behalf of the address itself.
        packet.claim = kind == ADVERTISEMENT || packet.source == Address::ANY;
    }
    packet.class = Class::Neighbour;
}

#[inline(always)]
fn parse_arp<B: Bytes + ?Sized>(bytes: &B, offset: usize, packet: &mut Packet) -> Parsed {
    const REQUEST: u16 = 1;
    let Some(header) = bytes.header::<8>(offset) else { return Parsed::Unreadable };
    // Only IPv4 over six-byte hardware addresses names an address of ours.
    if header.short(2) != ethertype::IPV4 || header.short(4) != 0x0604 {
        return Parsed::Other;
    }
    let Some(addresses) = bytes.header::<20>(offset + 8) else { return Parsed::Unreadable };
    packet.source = addresses.v4(6);
    packet.destination = addresses.v4(16);
    packet.class = Class::Neighbour;
    if packet.source == packet.destination {
        // An announcement: it asks nothing of its target.
        packet.destination = Address::ANY;
    } else if addresses.word(6) == 0 {
        // A probe (RFC 5227) asks from nowhere, on behalf of the address itself.
        packet.source = Address::ANY;
        packet.target = packet.destination;
        packet.claim = header.short(6) == REQUEST;
    }
    Parsed::Packet
}
