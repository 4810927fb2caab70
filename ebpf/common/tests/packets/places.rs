//! In which ends and directions an address counts.

use portcullis_common::{
    layout::roles,
    verdict::{
        Place,
        Verdict::{self, Drop, Foreign},
    },
};

use crate::{
    bytes::*,
    world::{FORWARDED, IN, LO_IN, LO_OUT, OUT, World, every},
};

/// Verdicts under a closed gate with `roles`: the address as the destination, then as the source, of what comes in, goes
/// out, is forwarded, and on `lo`, where both directions must agree.
fn check(roles: u8, expected: [[Verdict; 2]; 4]) {
    let mut world = World::of(every(0, roles));
    world.close(0);
    for (own, peer) in FAMILIES {
        for protocol in [TCP, UDP, SCTP] {
            let to = frame(&ip((peer, own), protocol, &transport(protocol, (1, 2))));
            let from = frame(&ip((own, peer), protocol, &transport(protocol, (1, 2))));
            let rows: [(&[Place], _); 4] = [
                (&[IN], expected[0]),
                (&[OUT], expected[1]),
                (&[FORWARDED], expected[2]),
                (&[LO_IN, LO_OUT], expected[3]),
            ];
            for (places, [as_destination, as_source]) in rows {
                for &place in places {
                    assert_eq!(world.frame(&to, place), as_destination, "to {own} at {place:?}");
                    assert_eq!(world.frame(&from, place), as_source, "from {own} at {place:?}");
                }
            }
        }
    }
}

#[test]
fn an_own_address_is_where_packets_come_in_to_and_go_out_from() {
    check(roles::LOCAL, [[Drop, Foreign], [Foreign, Drop], [Foreign, Drop], [Drop, Drop]]);
}

#[test]
fn a_remote_is_where_packets_go_out_to_and_come_in_from() {
    check(roles::REMOTE, [[Foreign, Drop], [Drop, Foreign], [Drop, Foreign], [Drop, Drop]]);
}

#[test]
fn what_lives_behind_is_cut_everywhere() {
    check(roles::BEHIND, [[Drop, Drop]; 4]);
}

#[test]
fn a_whole_node_keeps_its_loopback() {
    check(roles::NODE, [[Drop, Drop], [Drop, Drop], [Drop, Drop], [Foreign, Foreign]]);
}

#[test]
fn a_whole_node_is_every_address() {
    let mut world = World::new(1);
    world.prefix("::", 0, every(0, roles::NODE));
    world.prefix("0.0.0.0", 96, every(0, roles::NODE));
    world.close(0);
    for (own, peer) in FAMILIES {
        for packet in [udp((1, 2), b""), tcp((1, 2), ACK, b"")].iter().zip([UDP, TCP]) {
            let packet = frame(&ip((own, peer), packet.1, packet.0));
            for place in [IN, OUT, FORWARDED] {
                assert_eq!(world.frame(&packet, place), Drop);
            }
            assert_eq!(world.frame(&packet, LO_OUT), Foreign);
        }
    }
}

#[test]
fn the_longest_prefix_answers_and_an_address_before_it() {
    let mut world = World::new(3);
    world.prefix("10.0.0.0", 96 + 8, every(0, roles::LOCAL));
    world.prefix("10.0.0.0", 96 + 24, every(1, roles::LOCAL));
    world.rule("10.0.0.100", every(2, roles::LOCAL));
    let to = |address| frame(&ip(("192.0.2.1", address), UDP, &udp((1, 2), b"")));
    for (address, gate) in [("10.9.9.9", 0), ("10.0.0.99", 1), ("10.0.0.100", 2)] {
        assert_eq!(world.frame(&to(address), IN), Verdict::Pass);
        assert_eq!(world.counted.borrow()[0].0, gate, "{address}");
    }
    assert_eq!(world.frame(&to("11.0.0.1"), IN), Foreign);
}
