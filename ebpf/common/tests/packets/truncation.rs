//! Packets that end too early.

use portcullis_common::{layout::roles, verdict::Verdict};

use crate::{
    bytes::*,
    world::{FORWARDED, IN, OUT, World, every, port},
};

const PORT: u16 = 5432;

/// Frames between the service (port 5432) and a peer, in or out of the service's host.
fn samples(inwards: bool) -> Vec<Vec<u8>> {
    let mut samples = Vec::new();
    for (own, peer) in FAMILIES {
        let (ends, ports, back) = if inwards {
            ((peer, own), (40000, PORT), ((own, peer), (PORT, 40000)))
        } else {
            ((own, peer), (PORT, 40000), ((peer, own), (40000, PORT)))
        };
        for protocol in [TCP, UDP, SCTP] {
            let packet = ip(ends, protocol, &transport(protocol, ports));
            samples.extend((0..=5).map(|tags| tagged(&vec![0x8100; tags], &packet)));
        }
        let quoted = ip(back.0, TCP, &tcp(back.1, ACK, b"quoted"));
        samples.push(frame(&icmp(ends, if own.contains(':') { 1 } else { 3 }, &quoted)));
        samples.extend([50, 51].map(|protocol| frame(&ip(ends, protocol, &[0; 32]))));
        if own.contains(':') {
            for headers in 1..=7 {
                let bare = tcp(ports, ACK, b"data");
                let packet = (1..headers).fold(extension(TCP, 0, &bare), |packet, _| extension(60, 1, &packet));
                samples.push(frame(&ipv6(ends, 60, &packet)));
            }
            samples.push(frame(&ipv6(ends, 44, &join(&[&[TCP, 0, 0, 1, 0, 0, 0, 1], &tcp(ports, ACK, b"data")]))));
            samples.push(neighbour(SOLICITATION, ends, own));
            samples.push(neighbour(ADVERTISEMENT, ends, own));
        } else {
            samples.push(frame(&ipv4(ends, TCP, 0, &[1; 12], &tcp(ports, ACK, b"data"))));
            samples.push(frame(&ipv4(ends, TCP, 0x2000, &[], &tcp(ports, ACK, b"data"))));
            samples.push(arp(REQUEST, ends.0, ends.1));
            samples.push(arp(REPLY, ends.0, ends.1));
        }
    }
    samples
}

fn check(world: &World) {
    for (inwards, places) in [(true, &[IN][..]), (false, &[OUT, FORWARDED])] {
        for sample in samples(inwards) {
            for place in places {
                for length in 0..=sample.len() {
                    let verdict = world.frame(&sample[..length], *place);
                    assert_eq!(verdict, Verdict::Drop, "{length} bytes of {sample:02x?} at {place:?}");
                }
            }
        }
    }
}

#[test]
fn no_beginning_of_a_packet_passes_a_closed_gate() {
    check(World::of(every(0, roles::LOCAL | roles::NEIGHBOURS)).close(0));
    check(World::of(every(0, roles::BEHIND | roles::NEIGHBOURS)).close(0));
}

#[test]
fn no_beginning_of_a_packet_passes_a_closed_gate_of_a_port() {
    let mut world = World::new(1);
    for (own, _) in FAMILIES {
        for protocol in [TCP, UDP, SCTP] {
            world.rule(own, port(0, roles::LOCAL | roles::NEIGHBOURS, protocol, PORT));
        }
    }
    check(world.close(0));
}

/// Whatever is cut off, an open gate's packet gets through: nothing is lost to the parser's caution.
#[test]
fn every_beginning_of_a_packet_passes_an_open_gate() {
    let world = World::of(every(0, roles::LOCAL | roles::NEIGHBOURS));
    for sample in samples(true) {
        for length in 0..=sample.len() {
            assert_ne!(world.frame(&sample[..length], IN), Verdict::Drop, "{length} bytes of {sample:02x?}");
        }
    }
}

/// A tunnel's or cgroup's view, from the network header on.
#[test]
fn no_beginning_of_a_packet_without_a_frame_passes() {
    let mut world = World::of(every(0, roles::LOCAL));
    world.close(0);
    for (own, peer) in FAMILIES {
        let packet = ip((peer, own), UDP, &transport(UDP, (1, 2)));
        for length in 0..=packet.len() {
            assert_eq!(world.network(&packet[..length], IN), Verdict::Drop, "{length} bytes");
        }
    }
}
