//! While a gate is closed established peers may be told by a reset, for a time.

use portcullis_common::{layout::roles, verdict::Verdict};

use crate::{
    bytes::*,
    world::{IN, NOW, OUT, World, every},
};

fn closed(rst_until_ns: u64) -> World {
    let mut world = World::of(every(0, roles::LOCAL));
    world.close(0).gates[0].rst_until_ns = rst_until_ns;
    world
}

fn verdicts(world: &World, flags: u8, payload: &[u8]) -> Vec<[Verdict; 2]> {
    let segment = tcp((1, 2), flags, payload);
    FAMILIES
        .into_iter()
        .map(|(own, peer)| {
            [
                world.frame(&frame(&ip((peer, own), TCP, &segment)), IN),
                world.frame(&frame(&ip((own, peer), TCP, &segment)), OUT),
            ]
        })
        .collect()
}

#[test]
fn resets_leave_and_acknowledgements_enter_without_payload() {
    use Verdict::{Drop, Pass};
    for (flags, [inwards, outwards]) in [
        (ACK, [Pass, Drop]),
        (RST, [Pass, Pass]),
        (RST | ACK, [Pass, Pass]),
        (SYN, [Drop, Drop]),
        (SYN | ACK, [Drop, Drop]),
        (FIN | ACK, [Drop, Drop]),
    ] {
        assert_eq!(verdicts(&closed(NOW + 1), flags, b""), [[inwards, outwards]; 2], "flags {flags}");
        assert_eq!(verdicts(&closed(NOW + 1), flags, b"x"), [[Drop, Drop]; 2], "flags {flags} with payload");
    }
}

#[test]
fn the_time_for_resets_ends() {
    for until in [0, 1, NOW - 1, NOW] {
        for flags in [ACK, RST] {
            assert_eq!(verdicts(&closed(until), flags, b""), [[Verdict::Drop; 2]; 2], "until {until}");
        }
    }
}

#[test]
fn nothing_but_tcp_is_a_reset() {
    let world = closed(NOW + 1);
    for (own, peer) in FAMILIES {
        for packet in [ip((own, peer), UDP, &udp((1, 2), b"")), ip((own, peer), SCTP, &sctp((1, 2)))] {
            assert_eq!(world.frame(&frame(&packet), OUT), Verdict::Drop);
        }
        let quoted = ip((peer, own), TCP, &tcp((1, 2), RST, b""));
        let error = icmp((own, peer), if own.contains(':') { 1 } else { 3 }, &quoted);
        assert_eq!(world.frame(&frame(&error), OUT), Verdict::Drop);
    }
}

/// The window is the closed gate's own: that of another service opens nothing.
#[test]
fn a_window_is_of_its_own_gate() {
    let mut world = World::new(2);
    world.rule("10.0.0.100", every(0, roles::LOCAL));
    world.rule("10.0.0.100", every(1, roles::LOCAL));
    world.gates[0].rst_until_ns = NOW + 1;
    world.close(1);
    let reset = frame(&ip(FAMILIES[0], TCP, &tcp((1, 2), RST, b"")));
    assert_eq!(world.frame(&reset, OUT), Verdict::Drop);
}

/// Nor does it where its own gate is closed beside another, whichever of them is found first.
#[test]
fn a_window_does_not_help_past_a_second_closed_gate() {
    let reset = frame(&ip(FAMILIES[0], TCP, &tcp((1, 2), RST, b"")));
    for with_window in [0, 1] {
        for (first, second) in [(0, 1), (1, 0)] {
            let mut world = World::new(2);
            world.rule("10.0.0.100", every(first, roles::LOCAL));
            world.rule("10.0.0.100", every(second, roles::LOCAL));
            world.close(0).close(1).gates[with_window].rst_until_ns = NOW + 1;
            assert_eq!(world.frame(&reset, OUT), Verdict::Drop, "window of {with_window}, rule of {first} first");
        }
    }
}

/// A gate that two rules name is one gate.
#[test]
fn a_gate_found_twice_keeps_its_window() {
    let mut world = World::new(1);
    world.rule("10.0.0.100", every(0, roles::LOCAL));
    world.rule("10.0.0.100", every(0, roles::LOCAL));
    world.close(0).gates[0].rst_until_ns = NOW + 1;
    let reset = frame(&ip(FAMILIES[0], TCP, &tcp((1, 2), RST, b"")));
    assert_eq!(world.frame(&reset, OUT), Verdict::Pass);
}
