//! ICMP errors belong to the flow that they quote.

use portcullis_common::{layout::roles, verdict::Verdict};

use crate::{
    bytes::*,
    world::{IN, OUT, World, port},
};

const PORT: u16 = 5432;

fn closed(protocol: u8) -> World {
    let mut world = World::of(port(0, roles::LOCAL, protocol, PORT));
    world.close(0);
    world
}

fn errors(address: &str) -> &'static [u8] {
    if address.contains(':') { &[1, 2, 3, 4] } else { &[3, 4, 5, 11, 12] }
}

#[test]
fn an_error_about_what_the_service_sent_comes_in() {
    for (own, peer) in FAMILIES {
        let router = if own.contains(':') { "fd00::1" } else { "10.0.0.1" };
        for &kind in errors(own) {
            for protocol in [TCP, UDP, SCTP] {
                for from in [peer, router] {
                    let about = |port| {
                        frame(&icmp((from, own), kind, &ip((own, peer), protocol, &transport(protocol, (port, 9)))))
                    };
                    assert_eq!(closed(protocol).frame(&about(PORT), IN), Verdict::Drop, "{kind} from {from}");
                    assert_eq!(closed(protocol).frame(&about(22), IN), Verdict::Foreign, "{kind} from {from}");
                }
            }
        }
    }
}

#[test]
fn an_error_about_what_came_to_the_service_goes_out() {
    for (own, peer) in FAMILIES {
        for &kind in errors(own) {
            for protocol in [TCP, UDP, SCTP] {
                let about =
                    |port| frame(&icmp((own, peer), kind, &ip((peer, own), protocol, &transport(protocol, (9, port)))));
                assert_eq!(closed(protocol).frame(&about(PORT), OUT), Verdict::Drop, "{kind}");
                assert_eq!(closed(protocol).frame(&about(22), OUT), Verdict::Foreign, "{kind}");
            }
        }
    }
}

/// Eight bytes of the quoted transport are all that RFC 792 promises.
#[test]
fn eight_bytes_of_the_quoted_transport_suffice() {
    let quoted = ip(("10.0.0.100", "10.0.0.7"), TCP, &tcp((22, 9), ACK, b""));
    let error = frame(&icmp(("10.0.0.7", "10.0.0.100"), 3, &quoted[..28]));
    assert_eq!(closed(TCP).frame(&error, IN), Verdict::Foreign);
}

#[test]
fn an_error_that_quotes_anything_else_may_be_the_services() {
    for (own, peer) in FAMILIES {
        let stranger = if own.contains(':') { "fd00::99" } else { "10.0.0.99" };
        let kind = errors(own)[0];
        let foreign = ip((stranger, peer), TCP, &tcp((22, 9), ACK, b""));
        for quoted in [&b""[..], &[0xff; 64], &foreign] {
            assert_eq!(closed(TCP).frame(&frame(&icmp((peer, own), kind, quoted)), IN), Verdict::Drop, "{quoted:02x?}");
        }
    }
    let later = ipv4(("10.0.0.100", "10.0.0.7"), TCP, 0x0010, &[], &tcp((22, 9), ACK, b""));
    assert_eq!(closed(TCP).frame(&frame(&icmp(("10.0.0.7", "10.0.0.100"), 3, &later)), IN), Verdict::Drop);
}

#[test]
fn a_query_is_no_ports_affair() {
    assert_eq!(closed(TCP).frame(&frame(&icmp(("10.0.0.7", "10.0.0.100"), 8, b"")), IN), Verdict::Foreign);
    assert_eq!(closed(TCP).frame(&frame(&icmp(("fd00::7", "fd00::100"), 128, b"")), IN), Verdict::Foreign);
}
