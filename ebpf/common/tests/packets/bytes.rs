//! Packets, byte by byte. Checksums are zero: nobody looks at them before the verdict.

use std::net::IpAddr;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const SCTP: u8 = 132;
pub(crate) const ICMP: u8 = 1;
pub(crate) const ICMPV6: u8 = 58;

pub(crate) const SYN: u8 = 2;
pub(crate) const FIN: u8 = 1;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// The service's address and somebody else's, in both families.
pub(crate) const FAMILIES: [(&str, &str); 2] = [("10.0.0.100", "10.0.0.7"), ("fd00::100", "fd00::7")];

pub(crate) fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn octets(address: &str) -> Vec<u8> {
    match address.parse().unwrap() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

pub(crate) fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    join(&[&[2; 6], &[4; 6], &ethertype.to_be_bytes(), payload])
}

/// A frame of an IP packet, with a tag for each of `tags`.
pub(crate) fn tagged(tags: &[u16], packet: &[u8]) -> Vec<u8> {
    let mut frame = join(&[&[2; 6], &[4; 6]]);
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 42]);
    }
    frame.extend(if packet[0] >> 4 == 4 { [0x08, 0x00] } else { [0x86, 0xdd] });
    frame.extend(packet);
    frame
}

pub(crate) fn frame(packet: &[u8]) -> Vec<u8> {
    tagged(&[], packet)
}

/// An IPv4 packet; `fragment` is the field of flags and offset, `options` a multiple of four bytes.
pub(crate) fn ipv4(ends: (&str, &str), protocol: u8, fragment: u16, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + options.len() + payload.len()).unwrap().to_be_bytes();
    let first = 0x45 + u8::try_from(options.len() / 4).unwrap();
    let fragment = fragment.to_be_bytes();
    let header = [first, 0, length[0], length[1], 0, 1, fragment[0], fragment[1], 64, protocol, 0, 0];
    join(&[&header, &octets(ends.0), &octets(ends.1), options, payload])
}

pub(crate) fn ipv6(ends: (&str, &str), next: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    join(&[&[0x60, 0, 0, 0, length[0], length[1], next, 64], &octets(ends.0), &octets(ends.1), payload])
}

/// An IP packet of the family of its ends: source, destination.
pub(crate) fn ip(ends: (&str, &str), protocol: u8, payload: &[u8]) -> Vec<u8> {
    if ends.0.contains(':') { ipv6(ends, protocol, payload) } else { ipv4(ends, protocol, 0, &[], payload) }
}

/// An IPv6 extension header of eight bytes for each of `more`, and eight more, before `payload` of type `next`.
pub(crate) fn extension(next: u8, more: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0; (usize::from(more) + 1) * 8];
    header[0] = next;
    header[1] = more;
    join(&[&header, payload])
}

pub(crate) fn tcp(ports: (u16, u16), flags: u8, payload: &[u8]) -> Vec<u8> {
    tcp_with_options(ports, flags, &[], payload)
}

pub(crate) fn tcp_with_options(ports: (u16, u16), flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let offset = u8::try_from(5 + options.len() / 4).unwrap() << 4;
    let rest = [0, 0, 0, 1, 0, 0, 0, 2, offset, flags, 1, 0, 0, 0, 0, 0];
    join(&[&ports.0.to_be_bytes(), &ports.1.to_be_bytes(), &rest, options, payload])
}

pub(crate) fn udp(ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).unwrap().to_be_bytes();
    join(&[&ports.0.to_be_bytes(), &ports.1.to_be_bytes(), &length, &[0, 0], payload])
}

/// The common header and one DATA chunk.
pub(crate) fn sctp(ports: (u16, u16)) -> Vec<u8> {
    join(&[&ports.0.to_be_bytes(), &ports.1.to_be_bytes(), &[0, 0, 0, 9, 0, 0, 0, 0], &[0, 3, 0, 20], &[0; 16]])
}

/// The transport of `protocol` between `ports`, with a little payload.
pub(crate) fn transport(protocol: u8, ports: (u16, u16)) -> Vec<u8> {
    match protocol {
        TCP => tcp(ports, ACK, b"data"),
        UDP => udp(ports, b"data"),
        SCTP => sctp(ports),
        other => panic!("no transport {other}"),
    }
}

/// An ICMP or ICMPv6 message of type `kind`, by the family of `ends`.
pub(crate) fn icmp(ends: (&str, &str), kind: u8, body: &[u8]) -> Vec<u8> {
    let protocol = if ends.0.contains(':') { ICMPV6 } else { ICMP };
    ip(ends, protocol, &join(&[&[kind, 0, 0, 0, 0, 0, 0, 0], body]))
}

pub(crate) const REQUEST: u8 = 1;
pub(crate) const REPLY: u8 = 2;

pub(crate) fn arp(operation: u8, sender: &str, target: &str) -> Vec<u8> {
    let fixed = [0, 1, 0x08, 0, 6, 4, 0, operation];
    ethernet(0x0806, &join(&[&fixed, &[2; 6], &octets(sender), &[0; 6], &octets(target)]))
}

pub(crate) const SOLICITATION: u8 = 135;
pub(crate) const ADVERTISEMENT: u8 = 136;

/// A neighbour solicitation or advertisement about `target`, with the sender's link-layer address.
pub(crate) fn neighbour(kind: u8, ends: (&str, &str), target: &str) -> Vec<u8> {
    frame(&icmp(ends, kind, &join(&[&octets(target), &[1, 1, 2, 2, 2, 2, 2, 2]])))
}
