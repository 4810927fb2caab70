//! What could be anybody's is dropped while any gate that rules name is closed.

use portcullis_common::{
    layout::{Event, roles},
    verdict::Verdict,
};

use crate::{
    bytes::*,
    world::{IN, OUT, World, port},
};

fn unreadable() -> Vec<Vec<u8>> {
    let packet = ip(("10.0.0.1", "10.0.0.2"), UDP, &udp((1, 2), b""));
    vec![vec![], vec![0; 13], tagged(&[0x8100; 5], &packet), frame(&packet)[..33].to_vec()]
}

#[test]
fn one_closed_gate_is_enough() {
    let mut world = World::new(3);
    for frame in unreadable() {
        assert_eq!(world.frame(&frame, IN), Verdict::Foreign, "all are open");
    }
    world.close(2);
    for frame in unreadable() {
        for place in [IN, OUT] {
            assert_eq!(world.frame(&frame, place), Verdict::Drop);
            assert_eq!(*world.noted.borrow(), [Event::UnreadableDropped]);
        }
    }
}

#[test]
fn a_gate_that_does_not_exist_is_closed() {
    let mut world = World::new(1);
    world.gates.clear();
    assert_eq!(world.frame(&[], IN), Verdict::Drop);
}

#[test]
fn an_idle_gate_counts_for_nothing() {
    let mut world = World::new(3);
    world.close(1).idle(1);
    for frame in unreadable() {
        assert_eq!(world.frame(&frame, IN), Verdict::Foreign);
    }
    world.close(2);
    for frame in unreadable() {
        assert_eq!(world.frame(&frame, IN), Verdict::Drop, "another is closed");
    }
}

/// Should a rule still name it, it is as closed as any.
#[test]
fn an_idle_gate_is_not_open() {
    let mut world = World::of(port(0, roles::LOCAL, UDP, 2));
    world.close(0).idle(0);
    assert_eq!(world.frame(&frame(&ip(("10.0.0.7", "10.0.0.100"), UDP, &udp((1, 2), b""))), IN), Verdict::Drop);
}

#[test]
fn a_host_without_services_drops_nothing() {
    for frame in unreadable() {
        assert_eq!(World::new(0).frame(&frame, IN), Verdict::Foreign);
    }
}

/// The rules beyond those beside an address are found by their port alone, and a fragment has none.
#[test]
fn a_fragment_to_an_address_with_many_ports_needs_every_gate() {
    let mut world = World::new(2);
    world.exact("10.0.0.100", port(0, roles::LOCAL, TCP, 5432));
    let fragment = frame(&ipv4(("10.0.0.7", "10.0.0.100"), UDP, 0x2000, &[], &udp((1, 2), b"")));
    assert_eq!(world.frame(&fragment, IN), Verdict::Foreign);
    world.close(1);
    assert_eq!(world.frame(&fragment, IN), Verdict::Drop);
    assert_eq!(world.frame(&fragment, OUT), Verdict::Foreign, "not what its rules are for");
    world.idle(1);
    assert_eq!(world.frame(&fragment, IN), Verdict::Foreign);
}
