//! What the parser finds in a packet.

use portcullis_common::{
    layout::Address,
    packet::{Class, Packet, Parsed, parse_frame, parse_network},
};
use proptest::prelude::*;

use crate::{bytes::*, world::address};

fn parse(frame: &[u8]) -> (Parsed, Packet) {
    let mut packet = Packet::UNKNOWN;
    (parse_frame(frame, &mut packet), packet)
}

fn class(frame: &[u8]) -> Class {
    let (parsed, packet) = parse(frame);
    assert_eq!(parsed, Parsed::Packet);
    packet.class
}

fn ports(packet: &Packet) -> (Class, u8, u16, u16) {
    (packet.class, packet.protocol, packet.source_port, packet.destination_port)
}

#[test]
fn a_flow_behind_up_to_four_tags() {
    for ends in FAMILIES {
        for protocol in [TCP, UDP, SCTP] {
            let packet = ip(ends, protocol, &transport(protocol, (5432, 40000)));
            for tags in [&[][..], &[0x8100], &[0x88a8, 0x8100], &[0x9100, 0x88a8, 0x8100], &[0x8100; 4]] {
                let (parsed, found) = parse(&tagged(tags, &packet));
                assert_eq!(parsed, Parsed::Packet);
                assert_eq!((found.source, found.destination), (address(ends.0), address(ends.1)));
                assert_eq!(ports(&found), (Class::Flow, protocol, 5432, 40000), "{ends:?} {tags:x?}");
            }
            assert_eq!(parse(&tagged(&[0x8100; 5], &packet)).0, Parsed::Unreadable);
        }
    }
}

#[test]
fn other_protocols_are_nobodys() {
    for ethertype in [0x88cc, 0x8847, 0x0026] {
        assert_eq!(parse(&ethernet(ethertype, &[0; 64])).0, Parsed::Other);
    }
    let mut infiniband = arp(REQUEST, "10.0.0.7", "10.0.0.100");
    infiniband[14 + 4] = 20;
    assert_eq!(parse(&infiniband).0, Parsed::Other);
    let mut packet = Packet::UNKNOWN;
    assert_eq!(parse_network(&[0x50, 0][..], &mut packet), Parsed::Other);
}

#[test]
fn options_of_ipv4_are_stepped_over() {
    for words in 0..=10 {
        let options = vec![1; words * 4];
        let frame = frame(&ipv4(FAMILIES[0], TCP, 0, &options, &tcp((5432, 40000), ACK, b"")));
        let (_, found) = parse(&frame);
        assert_eq!(ports(&found), (Class::Flow, TCP, 5432, 40000));
        assert!(found.bare, "{words} words of options");
    }
    for length in 0..5 {
        let mut short = frame(&ip(FAMILIES[0], TCP, &tcp((5432, 40000), ACK, b"")));
        short[14] = 0x40 | length;
        assert_eq!(class(&short), Class::Vague, "a header of {length} words");
    }
}

#[test]
fn extension_headers_are_stepped_over_up_to_a_bound() {
    for kind in [0, 43, 60, 135, 139, 140] {
        for count in 0..=7u8 {
            let mut packet = tcp((5432, 40000), ACK, b"");
            let mut next = TCP;
            for header in 0..count {
                packet = extension(next, header % 3, &packet);
                next = kind;
            }
            let (_, found) = parse(&frame(&ipv6(FAMILIES[1], next, &packet)));
            if count <= 6 {
                assert_eq!(ports(&found), (Class::Flow, TCP, 5432, 40000), "{count} headers of type {kind}");
                assert!(found.bare);
            } else {
                assert_eq!(found.class, Class::Vague);
            }
        }
    }
}

#[test]
fn fragments_are_vague() {
    let segment = tcp((5432, 40000), ACK, b"data");
    for (field, what) in [(0x2000, "first"), (0x2001, "middle"), (0x0010, "last"), (0x1fff, "farthest")] {
        assert_eq!(class(&frame(&ipv4(FAMILIES[0], TCP, field, &[], &segment))), Class::Vague, "{what}");
    }
    for field in [0x4000, 0x8000] {
        assert_eq!(class(&frame(&ipv4(FAMILIES[0], TCP, field, &[], &segment))), Class::Flow, "no fragment");
    }
    for (offset, what) in [([0, 1], "first"), ([1, 1], "middle"), ([1, 0], "last"), ([0, 0], "atomic")] {
        let header = [TCP, 0, offset[0], offset[1], 0, 0, 0, 1];
        let fragment = join(&[&header, &segment]);
        assert_eq!(class(&frame(&ipv6(FAMILIES[1], 44, &fragment))), Class::Vague, "{what}");
        let behind = extension(44, 0, &fragment);
        assert_eq!(class(&frame(&ipv6(FAMILIES[1], 60, &behind))), Class::Vague, "{what} behind an option");
    }
}

#[test]
fn what_is_encrypted_is_vague_and_what_has_no_ports_is_portless() {
    for ends in FAMILIES {
        for protocol in [50, 51] {
            assert_eq!(class(&frame(&ip(ends, protocol, &[0; 32]))), Class::Vague);
        }
        for protocol in [2, 47, 59, 103, 112] {
            assert_eq!(class(&frame(&ip(ends, protocol, &[0; 32]))), Class::Portless);
        }
    }
    assert_eq!(class(&frame(&icmp(FAMILIES[0], 8, b"echo"))), Class::Portless);
    assert_eq!(class(&frame(&icmp(FAMILIES[1], 128, b"echo"))), Class::Portless);
}

#[test]
fn a_segment_is_bare_by_its_own_length() {
    for ends in FAMILIES {
        for (options, payload, bare) in [(0, 0, true), (0, 1, false), (40, 0, true), (40, 1, false), (12, 1400, false)]
        {
            let segment = tcp_with_options((1, 2), SYN | ACK, &vec![1; options], &vec![0; payload]);
            let (_, found) = parse(&frame(&ip(ends, TCP, &segment)));
            assert_eq!((found.bare, found.tcp_flags), (bare, SYN | ACK), "{options} and {payload} bytes");
        }
        // A short frame is padded to 60 bytes.
        let padded = join(&[&frame(&ip(ends, TCP, &tcp((1, 2), RST, b""))), &[0; 20]]);
        assert!(parse(&padded).1.bare);
        // More than 64 KiB say a length of 0.
        let mut giant = frame(&ip(ends, TCP, &tcp((1, 2), ACK, &[0; 100])));
        let length = if ends.0.contains(':') { 14 + 4 } else { 14 + 2 };
        giant[length..length + 2].fill(0);
        assert!(!parse(&giant).1.bare);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200), ethertype in 0..4usize) {
        let mut bytes = bytes;
        if let Some(place) = bytes.get_mut(12..14) {
            place.copy_from_slice(&[[0x08, 0x00], [0x86, 0xdd], [0x08, 0x06], [0x81, 0x00]][ethertype]);
        }
        let (parsed, packet) = parse(&bytes);
        prop_assert!(parsed != Parsed::Other || ethertype >= 2, "IP is never nobody's");
        prop_assert!(!packet.bare || (packet.class == Class::Flow && packet.protocol == TCP));
        prop_assert!(packet.target == Address::ANY || packet.class == Class::Neighbour);
    }

    #[test]
    fn a_packet_is_the_same_without_its_frame(version in prop::sample::select(vec![4u8, 6]), bytes in prop::collection::vec(any::<u8>(), 2..120)) {
        let mut bytes = bytes;
        bytes[0] = version << 4 | bytes[0] & 0xf;
        let mut packet = Packet::UNKNOWN;
        let parsed = parse_network(&bytes[..], &mut packet);
        prop_assert_eq!((parsed, packet), parse(&frame(&bytes)));
    }
}
