//! One gate and several.

use std::collections::BTreeSet;

use portcullis_common::{
    layout::{Event, FENCE_NUMBERS, RULES_PER_ADDRESS, Rule, roles},
    verdict::{Outcome, Verdict},
};
use proptest::{collection::vec, prelude::*};

use crate::{
    bytes::*,
    world::{IN, NOW, OUT, World, every, port},
};

fn to_own(protocol: u8, port: u16) -> Vec<u8> {
    frame(&ip(("10.0.0.7", "10.0.0.100"), protocol, &transport(protocol, (40000, port))))
}

#[test]
fn a_gate_is_open_before_its_deadline_and_not_at_it() {
    let mut world = World::of(every(0, roles::LOCAL));
    for (deadline_ns, expected) in [
        (NOW + 1, Verdict::Pass),
        (u64::MAX, Verdict::Pass),
        (NOW, Verdict::Drop),
        (FENCE_NUMBERS, Verdict::Drop),
        (FENCE_NUMBERS - 1, Verdict::Drop),
        (0, Verdict::Drop),
    ] {
        world.gates[0].deadline_ns = deadline_ns;
        for (own, peer) in FAMILIES {
            let packet = |ends| frame(&ip(ends, UDP, &udp((1, 2), b"")));
            assert_eq!(world.frame(&packet((peer, own)), IN), expected, "deadline {deadline_ns}");
            assert_eq!(world.frame(&packet((own, peer)), OUT), expected, "deadline {deadline_ns}");
        }
    }
}

#[test]
fn a_fence_number_and_a_foreign_packet_need_no_clock() {
    let mut world = World::of(port(0, roles::LOCAL, TCP, 5432));
    assert_eq!(world.frame(&to_own(TCP, 22), IN), Verdict::Foreign);
    assert_eq!(world.clock_reads.get(), 0);
    assert_eq!(world.frame(&to_own(TCP, 5432), IN), Verdict::Pass);
    assert_eq!(world.clock_reads.get(), 1);
    world.close(0);
    assert_eq!(world.frame(&to_own(TCP, 5432), IN), Verdict::Drop);
    assert_eq!(world.clock_reads.get(), 0);
}

#[test]
fn a_rule_of_a_port_is_for_its_protocol_and_range() {
    let rule = Rule { port_first: 7000, port_last: 7100, ..port(0, roles::LOCAL, UDP, 0) };
    let mut world = World::of(rule);
    world.close(0);
    for (number, expected) in [
        (6999, Verdict::Foreign),
        (7000, Verdict::Drop),
        (7050, Verdict::Drop),
        (7100, Verdict::Drop),
        (7101, Verdict::Foreign),
    ] {
        assert_eq!(world.frame(&to_own(UDP, number), IN), expected, "port {number}");
        assert_eq!(world.frame(&to_own(TCP, number), IN), Verdict::Foreign);
    }
}

#[test]
fn every_gate_of_both_ends_must_be_open() {
    for closed in 0..1 << 3u32 {
        let mut world = World::new(3);
        world.rule("10.0.0.100", every(0, roles::LOCAL));
        world.rule("10.0.0.100", port(1, roles::LOCAL, TCP, 5432));
        world.rule("10.0.0.7", every(2, roles::REMOTE));
        for gate in (0..3).filter(|gate| closed & 1 << gate != 0) {
            world.close(gate);
        }
        let expected = if closed == 0 { Verdict::Pass } else { Verdict::Drop };
        assert_eq!(world.frame(&to_own(TCP, 5432), IN), expected, "closed {closed:03b}");
        if let [(gate, Outcome::Closed)] = world.counted.borrow()[..] {
            assert_ne!(closed & 1 << gate, 0, "counted at an open gate");
        }
    }
}

#[test]
fn a_gate_that_does_not_exist_is_closed() {
    let mut world = World::of(every(0, roles::LOCAL));
    world.gates.clear();
    assert_eq!(world.frame(&to_own(TCP, 1), IN), Verdict::Drop);
    assert_eq!(*world.noted.borrow(), [Event::NoGate]);
}

#[test]
fn exact_ports_are_found_in_their_table() {
    let mut world = World::new(2);
    world.exact("10.0.0.100", port(0, roles::LOCAL, TCP, 5432));
    world.rule("10.0.0.100", port(1, roles::LOCAL, UDP, 53));
    world.close(0);
    assert_eq!(world.frame(&to_own(TCP, 5432), IN), Verdict::Drop);
    assert_eq!(world.frame(&to_own(UDP, 5432), IN), Verdict::Foreign);
    assert_eq!(world.frame(&to_own(TCP, 5432), OUT), Verdict::Foreign);
    assert_eq!(world.frame(&to_own(UDP, 53), IN), Verdict::Pass);
    // Another port of the address counts in the other direction.
    world.exact("10.0.0.100", port(0, roles::REMOTE, TCP, 3260));
    assert_eq!(world.frame(&to_own(TCP, 3260), IN), Verdict::Foreign);
    assert_eq!(world.frame(&to_own(TCP, 3260), OUT), Verdict::Drop);
}

fn rule() -> impl Strategy<Value = Rule> {
    let protocol = prop::sample::select(vec![0, TCP, UDP, SCTP]);
    let roles = prop::sample::select(vec![roles::LOCAL, roles::REMOTE, roles::BEHIND, roles::NODE]);
    (0..4u16, protocol, 0..5u16, 0..3u16, roles).prop_map(|(gate, protocol, first, more, roles)| Rule {
        gate,
        protocol,
        port_first: first,
        port_last: first + more,
        roles,
    })
}

proptest! {
    /// A verdict agrees with a look at every rule, one by one.
    #[test]
    fn a_packet_needs_the_gates_of_the_rules_that_name_it(
        own in vec(rule(), 0..RULES_PER_ADDRESS),
        peer in vec(rule(), 0..RULES_PER_ADDRESS),
        open in vec(any::<bool>(), 4),
        protocol in prop::sample::select(vec![TCP, UDP, SCTP]),
        ports in (0..6u16, 0..6u16),
        egress in any::<bool>(),
        family in 0..2usize,
    ) {
        let (source, destination) = FAMILIES[family];
        let mut world = World::new(4);
        own.iter().for_each(|rule| world.rule(source, *rule));
        peer.iter().for_each(|rule| world.rule(destination, *rule));
        for (gate, _) in open.iter().enumerate().filter(|(_, open)| !**open) {
            world.close(gate);
        }

        let (source_role, destination_role) =
            if egress { (roles::OUT_SOURCE, roles::OUT_DESTINATION) } else { (roles::IN_SOURCE, roles::IN_DESTINATION) };
        let needed: BTreeSet<u32> = [(&own, source_role, ports.0), (&peer, destination_role, ports.1)]
            .into_iter()
            .flat_map(|(rules, role, port)| rules.iter().filter(move |rule| {
                let named = rule.protocol == protocol && (rule.port_first..=rule.port_last).contains(&port);
                rule.roles & role != 0 && (rule.protocol == 0 || named)
            }))
            .map(|rule| u32::from(rule.gate))
            .collect();
        let expected = if needed.is_empty() {
            Verdict::Foreign
        } else if needed.iter().all(|&gate| open[gate as usize]) {
            Verdict::Pass
        } else {
            Verdict::Drop
        };
        let packet = frame(&ip((source, destination), protocol, &transport(protocol, ports)));
        prop_assert_eq!(world.frame(&packet, if egress { OUT } else { IN }), expected);
        if expected != Verdict::Foreign {
            prop_assert!(needed.contains(&world.counted.borrow()[0].0));
        }
    }
}
