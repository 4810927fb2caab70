//! A socket is as old as its stamp, and what it sends passes no younger gate.

use portcullis_common::{
    layout::roles,
    verdict::{Outcome, Place, Socket, Verdict},
};
use proptest::prelude::*;

use crate::{
    bytes::*,
    world::{FORWARDED, IN, LO_IN, LO_OUT, NOW, OPENED, OUT, World, every},
};

const WITH_DATA: fn() -> Vec<u8> = || tcp((1, 2), ACK, b"data");
const BARE: fn() -> Vec<u8> = || tcp((1, 2), ACK, b"");

/// The verdict on what `socket` sends from the service's open address, in both families.
fn sent(socket: Socket, protocol: u8, transport: &[u8], place: Place) -> (Verdict, World) {
    let mut world = World::of(every(0, roles::LOCAL));
    world.socket = socket;
    let [v4, v6] = FAMILIES.map(|ends| world.frame(&frame(&ip(ends, protocol, transport)), place));
    assert_eq!(v4, v6);
    (v4, world)
}

#[test]
fn a_socket_of_an_older_opening_stays_cut() {
    for (protocol, transport) in [(TCP, WITH_DATA()), (TCP, BARE()), (UDP, udp((1, 2), b"")), (SCTP, sctp((1, 2)))] {
        for place in [OUT, LO_OUT] {
            let (verdict, world) = sent(Socket::Stamped(OPENED - 1), protocol, &transport, place);
            assert_eq!((verdict, &world.counted.borrow()[..]), (Verdict::Drop, &[(0, Outcome::Stale)][..]));
            assert_eq!(sent(Socket::Stamped(OPENED), protocol, &transport, place).0, Verdict::Pass);
        }
    }
}

#[test]
fn only_a_sender_of_this_host_is_asked() {
    for place in [IN, LO_IN, FORWARDED] {
        let mut world = World::of(every(0, roles::BEHIND));
        world.socket = Socket::Stamped(0);
        let packet = frame(&ip(FAMILIES[0], TCP, &WITH_DATA()));
        assert_eq!(world.frame(&packet, place), Verdict::Pass, "{place:?}");
    }
}

#[test]
fn nothing_comes_in_for_a_connection_of_an_older_opening() {
    for (receiver, verdict) in [
        (Socket::Stamped(OPENED - 1), Verdict::Drop),
        (Socket::Stamped(OPENED), Verdict::Pass),
        (Socket::UnstampedTcp, Verdict::Drop),
        (Socket::Unstamped, Verdict::Pass),
        (Socket::None, Verdict::Pass),
    ] {
        for place in [IN, LO_IN] {
            let mut world = World::of(every(0, roles::BEHIND));
            world.receiver = receiver;
            let packet = frame(&ip(FAMILIES[0], TCP, &WITH_DATA()));
            assert_eq!(world.frame(&packet, place), verdict, "{receiver:?} {place:?}");
            assert_eq!(world.stamped.get(), None);
        }
    }
}

#[test]
fn without_a_socket_no_tcp_payload_passes() {
    assert_eq!(sent(Socket::None, TCP, &WITH_DATA(), OUT).0, Verdict::Drop);
    assert_eq!(sent(Socket::None, TCP, &BARE(), OUT).0, Verdict::Pass);
    assert_eq!(sent(Socket::None, UDP, &udp((1, 2), b"data"), OUT).0, Verdict::Pass);
}

#[test]
fn tcp_without_a_stamp_stays_cut() {
    for transport in [WITH_DATA(), BARE()] {
        assert_eq!(sent(Socket::UnstampedTcp, TCP, &transport, OUT).0, Verdict::Drop);
    }
}

#[test]
fn another_socket_is_stamped_by_its_first_packet_through_an_open_gate() {
    let (verdict, world) = sent(Socket::Unstamped, UDP, &udp((1, 2), b""), OUT);
    assert_eq!((verdict, world.stamped.get()), (Verdict::Pass, Some(NOW)));

    for (ends, closed) in [(("10.0.0.7", "10.0.0.8"), false), (FAMILIES[0], true)] {
        let mut world = World::of(every(0, roles::LOCAL));
        world.socket = Socket::Unstamped;
        if closed {
            world.close(0);
        }
        assert_ne!(world.frame(&frame(&ip(ends, UDP, &udp((1, 2), b""))), OUT), Verdict::Pass);
        assert_eq!(world.stamped.get(), None, "closed: {closed}");
    }
}

#[test]
fn without_memory_for_a_stamp_nothing_passes() {
    let mut world = World::of(every(0, roles::LOCAL));
    world.socket = Socket::Unstamped;
    world.memory = false;
    assert_eq!(world.frame(&frame(&ip(FAMILIES[0], UDP, &udp((1, 2), b""))), OUT), Verdict::Drop);
}

proptest! {
    #[test]
    fn a_socket_must_be_as_young_as_each_gate_it_needs(
        made in 0..10u64,
        generations in prop::collection::vec(0..10u64, 1..6),
        protocol in prop::sample::select(vec![TCP, UDP, SCTP]),
    ) {
        let mut world = World::new(u32::try_from(generations.len()).unwrap());
        for (gate, generation) in (0..).zip(&generations) {
            world.gates[gate as usize].generation = *generation;
            let (at, roles) = if gate % 2 == 0 { ("10.0.0.100", roles::LOCAL) } else { ("10.0.0.7", roles::REMOTE) };
            world.rule(at, every(gate, roles));
        }
        world.socket = Socket::Stamped(made);
        let expected = if generations.iter().all(|generation| made >= *generation) { Verdict::Pass } else { Verdict::Drop };
        let packet = frame(&ip(("10.0.0.100", "10.0.0.7"), protocol, &transport(protocol, (1, 2))));
        prop_assert_eq!(world.frame(&packet, OUT), expected);
    }
}
