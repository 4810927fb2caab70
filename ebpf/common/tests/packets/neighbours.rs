//! ARP and neighbour discovery.

use portcullis_common::{
    layout::roles,
    verdict::{Place, Verdict},
};

use crate::{
    bytes::*,
    world::{IN, OUT, World, every, port},
};

const OWN: &str = "10.0.0.100";
const PEER: &str = "10.0.0.7";
const OWN6: &str = "fd00::100";
const PEER6: &str = "fd00::7";
/// The group in which the service's IPv6 address is asked for.
const GROUP: &str = "ff02::1:ff00:100";
const ALL_NODES: &str = "ff02::1";

/// What tells anybody that the address is here, or tells this host of a neighbour on its behalf.
fn of_the_service() -> Vec<(&'static str, Vec<u8>, Place)> {
    vec![
        ("who has it", arp(REQUEST, PEER, OWN), IN),
        ("a peer's answer", arp(REPLY, PEER, OWN), IN),
        ("a peer's probe", arp(REQUEST, "0.0.0.0", OWN), IN),
        ("its own question", arp(REQUEST, OWN, PEER), OUT),
        ("its own answer", arp(REPLY, OWN, PEER), OUT),
        ("its own announcement", arp(REQUEST, OWN, OWN), OUT),
        ("its own announcement by reply", arp(REPLY, OWN, OWN), OUT),
        ("its own probe", arp(REQUEST, "0.0.0.0", OWN), OUT),
        ("who has it", neighbour(SOLICITATION, (PEER6, GROUP), OWN6), IN),
        ("are you there", neighbour(SOLICITATION, (PEER6, OWN6), OWN6), IN),
        ("a peer's answer", neighbour(ADVERTISEMENT, (PEER6, OWN6), PEER6), IN),
        ("its own question", neighbour(SOLICITATION, (OWN6, "ff02::1:ff00:7"), PEER6), OUT),
        ("its own answer", neighbour(ADVERTISEMENT, (OWN6, PEER6), OWN6), OUT),
        ("an answer by another source", neighbour(ADVERTISEMENT, ("fe80::1", PEER6), OWN6), OUT),
        ("its own announcement", neighbour(ADVERTISEMENT, ("fe80::1", ALL_NODES), OWN6), OUT),
        ("its own duplicate address detection", neighbour(SOLICITATION, ("::", GROUP), OWN6), OUT),
    ]
}

/// The next owner makes itself known: this host must learn of it, whatever its own gate says.
fn of_the_next_owner() -> Vec<(&'static str, Vec<u8>, Place)> {
    vec![
        ("announcement", arp(REQUEST, OWN, OWN), IN),
        ("announcement by reply", arp(REPLY, OWN, OWN), IN),
        ("answer to this host", arp(REPLY, OWN, "10.0.0.11"), IN),
        ("question of this host", arp(REQUEST, "10.0.0.11", OWN), OUT),
        ("announcement", neighbour(ADVERTISEMENT, (OWN6, ALL_NODES), OWN6), IN),
        ("answer to this host", neighbour(ADVERTISEMENT, ("fe80::2", "fd00::11"), OWN6), IN),
        ("question of this host", neighbour(SOLICITATION, ("fd00::11", GROUP), OWN6), OUT),
        ("duplicate address detection", neighbour(SOLICITATION, ("::", GROUP), OWN6), IN),
    ]
}

#[test]
fn a_closed_gate_cuts_the_services_neighbours() {
    for rule in [every(0, roles::LOCAL | roles::NEIGHBOURS), port(0, roles::LOCAL | roles::NEIGHBOURS, TCP, 5432)] {
        let mut world = World::of(rule);
        for (what, frame, place) in of_the_service() {
            assert_eq!(world.frame(&frame, place), Verdict::Pass, "{what}, open");
        }
        world.close(0);
        for (what, frame, place) in of_the_service() {
            assert_eq!(world.frame(&frame, place), Verdict::Drop, "{what}, closed");
        }
    }
}

#[test]
fn the_next_owner_is_heard() {
    let mut world = World::of(every(0, roles::LOCAL | roles::NEIGHBOURS));
    world.close(0);
    for (what, frame, place) in of_the_next_owner() {
        assert_eq!(world.frame(&frame, place), Verdict::Foreign, "{what}");
    }
}

#[test]
fn a_shared_address_keeps_its_neighbours() {
    for roles in [roles::LOCAL, roles::BEHIND] {
        let mut world = World::of(every(0, roles));
        world.close(0);
        for (what, frame, place) in of_the_service() {
            assert_eq!(world.frame(&frame, place), Verdict::Foreign, "{what}");
        }
    }
}

/// On a bridge port what a container says comes in.
#[test]
fn neighbours_of_what_lives_behind_are_cut_in_both_directions() {
    let mut world = World::of(every(0, roles::BEHIND | roles::NEIGHBOURS));
    world.close(0);
    for (what, frame, _) in of_the_service().into_iter().chain(of_the_next_owner()) {
        for place in [IN, OUT] {
            assert_eq!(world.frame(&frame, place), Verdict::Drop, "{what} at {place:?}");
        }
    }
}

#[test]
fn other_neighbours_and_routers_are_nobodys() {
    let mut world = World::of(every(0, roles::BEHIND | roles::NEIGHBOURS));
    world.prefix("::", 0, every(0, roles::NODE));
    world.prefix("0.0.0.0", 96, every(0, roles::NODE));
    world.close(0);
    for frame in [
        arp(REQUEST, PEER, "10.0.0.11"),
        arp(REPLY, "10.0.0.11", PEER),
        neighbour(SOLICITATION, (PEER6, "ff02::1:ff00:11"), "fd00::11"),
        neighbour(ADVERTISEMENT, ("fd00::11", PEER6), "fd00::11"),
        frame(&icmp(("fe80::1", "ff02::2"), 133, b"")),
        frame(&icmp(("fe80::1", ALL_NODES), 134, &[0; 8])),
        frame(&icmp(("fe80::1", "fd00::11"), 137, &[0; 32])),
    ] {
        for place in [IN, OUT] {
            assert_eq!(world.frame(&frame, place), Verdict::Foreign, "{frame:02x?}");
        }
    }
}

/// No exemption and no time for resets is meant for them, and no socket is asked.
#[test]
fn neighbours_have_no_socket() {
    let mut world = World::of(every(0, roles::LOCAL | roles::NEIGHBOURS));
    world.socket = portcullis_common::verdict::Socket::UnstampedTcp;
    for (what, frame, place) in of_the_service() {
        assert_eq!(world.frame(&frame, place), Verdict::Pass, "{what}");
    }
}
