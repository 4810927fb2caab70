//! What passes a closed gate all the same.

use portcullis_common::{
    layout::{Address, Event, ExemptKey, exempt, roles},
    verdict::{Place, Verdict},
};

use crate::{
    bytes::*,
    world::{FORWARDED, IN, OUT, World, address, every},
};

const OWN: &str = "10.0.0.11";
const PEER: &str = "10.0.0.2";

/// A fenced node that may reach its store, be reached by SSH, and resolve names.
fn node() -> World {
    let mut world = World::new(2);
    world.prefix("0.0.0.0", 96, every(0, roles::NODE));
    world.close(0);
    world.exempt.extend([
        ExemptKey::new(exempt::REMOTE, address(PEER), TCP, 2379),
        ExemptKey::new(exempt::LOCAL_PORT, Address::ANY, TCP, 22),
        ExemptKey::new(exempt::REMOTE_PORT, Address::ANY, UDP, 53),
    ]);
    world
}

fn packet(ends: (&str, &str), protocol: u8, ports: (u16, u16)) -> Vec<u8> {
    frame(&ip(ends, protocol, &transport(protocol, ports)))
}

/// The exempt flows, each in both directions.
fn flows() -> Vec<(Vec<u8>, Place)> {
    [(PEER, TCP, 40000, 2379), ("192.0.2.9", TCP, 22, 40000), ("192.0.2.53", UDP, 40000, 53)]
        .into_iter()
        .flat_map(|(peer, protocol, own_port, peer_port)| {
            [
                (packet((OWN, peer), protocol, (own_port, peer_port)), OUT),
                (packet((peer, OWN), protocol, (peer_port, own_port)), IN),
            ]
        })
        .collect()
}

#[test]
fn the_exempt_pass_a_closed_node_and_are_noted() {
    let world = node();
    for (packet, place) in flows() {
        assert_eq!(world.frame(&packet, place), Verdict::Pass);
        assert_eq!(*world.noted.borrow(), [Event::ExemptPassed]);
    }
}

/// A peer that sends from an exempt port asks nothing of a fenced node.
#[test]
fn a_peer_reaches_nothing_by_choosing_its_port() {
    let mut world = node();
    world.exempt.extend([ExemptKey::new(exempt::REMOTE_PORT, Address::ANY, TCP, 53)]);
    let from = |peer, peer_port, flags| frame(&ip((peer, OWN), TCP, &tcp((peer_port, 5432), flags, b"")));
    for (peer, port) in [(PEER, 2379), ("192.0.2.53", 53)] {
        assert_eq!(world.frame(&from(peer, port, SYN), IN), Verdict::Drop);
        assert_eq!(world.frame(&from(peer, port, SYN | ACK), IN), Verdict::Pass);
    }
    let udp = |own_port| packet(("192.0.2.53", OWN), UDP, (53, own_port));
    assert_eq!(world.frame(&udp(111), IN), Verdict::Drop);
    assert_eq!(world.frame(&udp(53), IN), Verdict::Pass);
    assert_eq!(world.frame(&udp(1024), IN), Verdict::Pass);
}

#[test]
fn an_exemption_is_for_one_end_of_one_protocol() {
    let world = node();
    for (ends, protocol, ports) in [
        ((OWN, PEER), UDP, (40000, 2379)),
        ((OWN, PEER), TCP, (2379, 40000)),
        ((OWN, "10.0.0.3"), TCP, (40000, 2379)),
        ((OWN, PEER), TCP, (40000, 22)),
        ((OWN, PEER), UDP, (53, 40000)),
    ] {
        assert_eq!(world.frame(&packet(ends, protocol, ports), OUT), Verdict::Drop, "{protocol} {ports:?}");
    }
}

#[test]
fn what_is_forwarded_is_not_exempt() {
    let world = node();
    for (packet, place) in flows().into_iter().filter(|(_, place)| place.egress) {
        assert_eq!(world.frame(&packet, Place { forwarded: true, ..place }), Verdict::Drop);
    }
}

#[test]
fn what_has_no_ports_is_not_exempt() {
    let mut world = node();
    let mut fragment = packet((OWN, PEER), TCP, (40000, 2379));
    fragment[20] = 0x20;
    assert_eq!(world.frame(&fragment, OUT), Verdict::Drop);
    world.exempt.insert(ExemptKey::new(exempt::REMOTE, address(PEER), ICMP, 0));
    assert_eq!(world.frame(&frame(&icmp((OWN, PEER), 8, b"")), OUT), Verdict::Drop);
}

/// Whichever of the two is found first.
#[test]
fn nothing_of_a_services_own_address_is_exempt() {
    for own in [roles::LOCAL, roles::BEHIND] {
        for (first, second) in [(every(0, roles::NODE), every(1, own)), (every(1, own), every(0, roles::NODE))] {
            let mut world = node();
            world.rule(OWN, first);
            world.rule(OWN, second);
            for (packet, place) in flows() {
                assert_eq!(world.frame(&packet, place), Verdict::Pass, "the address's own gate is open");
            }
            world.close(1);
            for (packet, place) in flows() {
                assert_eq!(world.frame(&packet, place), Verdict::Drop);
            }
        }
    }
}

/// The store is exempt for the node, also where it is a service's remote.
#[test]
fn a_remote_may_be_exempt() {
    let mut world = node();
    world.rule(PEER, every(1, roles::REMOTE));
    world.close(1);
    assert_eq!(world.frame(&packet((OWN, PEER), TCP, (40000, 2379)), OUT), Verdict::Pass);
    assert_eq!(world.frame(&packet((OWN, PEER), TCP, (40000, 2380)), OUT), Verdict::Drop);
    assert_eq!(world.frame(&packet((OWN, PEER), TCP, (40000, 2379)), FORWARDED), Verdict::Drop);
}
