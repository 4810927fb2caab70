//! What a closed gate cuts beside the service's own packets: neighbour discovery for its addresses, fragments, ICMP. The
//! node itself goes on to resolve and reach the address where somebody else serves it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod gate_lab;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use gate_lab::{
    Gated, Traffic, VIP, VIP6, WHOLE, config, frames,
    frames::{Mac, Piece},
    pair,
    wire::{Inbox, Wire, mac},
};
use portcullis_tests::{
    clock,
    traffic::{Capture, Flow, Frame},
    world::{Namespace, Node, World},
};

const SOON: Duration = Duration::from_secs(10);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const NODE6: Ipv6Addr = Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const BROADCAST: Mac = [0xff; 6];

fn vip() -> Ipv4Addr {
    VIP.parse().unwrap()
}

fn vip6() -> Ipv6Addr {
    VIP6.parse().unwrap()
}

/// Frames put on a link by hand, with the hardware addresses of its ends.
struct Link {
    client: (Wire, Mac),
    node: (Wire, Mac),
}

impl Link {
    fn between(client: &Namespace, node: &Node) -> Self {
        let end = |namespace: &Namespace| (Wire::open(namespace, "eth0"), mac(namespace, "eth0"));
        Self { client: end(client), node: end(node) }
    }

    fn from_client(&self, ethertype: u16, packet: &[u8]) -> Vec<u8> {
        frames::ethernet(self.node.1, self.client.1, &[], ethertype, packet)
    }

    /// Who has `target`? Asked by the client, to everybody.
    fn arp_request(&self, target: Ipv4Addr) -> Vec<u8> {
        let packet = frames::arp(1, (self.client.1, CLIENT), ([0; 6], target));
        frames::ethernet(BROADCAST, self.client.1, &[], frames::ARP, &packet)
    }

    /// The same of IPv6, sent straight to the node.
    fn solicitation(&self, target: Ipv6Addr) -> Vec<u8> {
        let body = frames::neighbour(target, 1, self.client.1);
        let message = frames::icmpv6(CLIENT6, target, 135, 0, &body);
        self.from_client(frames::IPV6, &frames::ipv6(CLIENT6, target, frames::ICMPV6, &message))
    }
}

/// Advertisements of `target` by the node.
fn advertises(frame: &Frame, target: Ipv6Addr) -> bool {
    // Behind Ethernet and IPv6 headers: the type of the message, and the address that it is about.
    frame.protocol() == Some(frames::ICMPV6)
        && frame.bytes().get(54) == Some(&136)
        && frame.bytes().get(62..78) == Some(&target.octets())
}

/// Frames that reach the client and speak for `address`.
fn speaks_for(frame: &Frame, address: IpAddr) -> bool {
    !frame.outgoing
        && match address {
            IpAddr::V4(_) => frame.is_arp() && frame.source() == Some(address),
            IpAddr::V6(target) => advertises(frame, target),
        }
}

#[test]
fn nobody_is_told_where_the_address_lives() {
    let world = World::new("closed-neighbours");
    let (client, node) = pair(&world);
    let link = Link::between(&client, &node);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    // A question, and what a host says unasked when it takes an address.
    let announce = frames::arp(1, (link.node.1, vip()), ([0; 6], vip()));
    let announce = frames::ethernet(BROADCAST, link.node.1, &[], frames::ARP, &announce);
    let gratuitous_reply = frames::arp(2, (link.node.1, vip()), (link.node.1, vip()));
    let gratuitous_reply = frames::ethernet(BROADCAST, link.node.1, &[], frames::ARP, &gratuitous_reply);
    let unsolicited = frames::icmpv6(vip6(), ALL_NODES, 136, 0, &frames::neighbour(vip6(), 2, link.node.1));
    let unsolicited = frames::ipv6(vip6(), ALL_NODES, frames::ICMPV6, &unsolicited);
    let unsolicited = frames::ethernet([0x33, 0x33, 0, 0, 0, 1], link.node.1, &[], frames::IPV6, &unsolicited);
    let from_own = frames::icmpv6(NODE6, ALL_NODES, 136, 0, &frames::neighbour(vip6(), 2, link.node.1));
    let from_own = frames::ipv6(NODE6, ALL_NODES, frames::ICMPV6, &from_own);
    let from_own = frames::ethernet([0x33, 0x33, 0, 0, 0, 1], link.node.1, &[], frames::IPV6, &from_own);

    let round = || {
        let capture = Capture::start(&client, "eth0", |frame| !frame.outgoing);
        let seen = |capture: &Capture, condition: &dyn Fn(usize) -> bool| {
            assert!(
                clock::wait_until(SOON, || condition(capture.frames())),
                "the node's own address is not answered for"
            );
        };
        for _ in 0..5 {
            link.client.0.send(&link.arp_request(vip()));
            link.client.0.send(&link.solicitation(vip6()));
            for frame in [&announce, &gratuitous_reply, &unsolicited, &from_own] {
                link.node.0.try_send(frame);
            }
            // The node's own addresses are answered for, and tell that the questions before them were heard.
            let before = capture.frames();
            link.client.0.send(&link.arp_request(NODE));
            link.client.0.send(&link.solicitation(NODE6));
            seen(&capture, &|frames| frames >= before + 2);
        }
        let captured = capture.stop();
        let count = |address: IpAddr| {
            captured.since(portcullis::core::time::BootInstant::ZERO, |frame| speaks_for(frame, address)).len()
        };
        [count(vip().into()), count(vip6().into()), count(NODE.into()), count(NODE6.into())]
    };
    let open = round();
    service.close();
    let closed = round();
    println!("told by the node (service, service IPv6, own, own IPv6): open {open:?}, closed {closed:?}");
    assert_eq!(closed[..2], [0, 0]);
    assert!(open[0] >= 15 && open[1] >= 15, "each question and announcement is seen while open: {open:?}");
    assert!(closed[2] >= 5 && closed[3] >= 5, "the node's own addresses are answered for: {closed:?}");
    service.open();
    assert!(round()[0] >= 15);
}

/// What the kernel itself says when an interface comes up or an address is added.
#[test]
fn the_kernel_s_own_announcements_do_not_leave() {
    let world = World::new("closed-announce");
    let (client, node) = pair(&world);
    for setting in ["net.ipv4.conf.eth0.arp_notify", "net.ipv6.conf.eth0.ndisc_notify"] {
        node.sysctl(setting, "1");
    }
    let mut service = Gated::start(&node, &config(WHOLE));
    let announced = |own: &str| {
        let capture = Capture::start(&client, "eth0", |frame| !frame.outgoing);
        let spoken = |address: IpAddr, capture: &portcullis_tests::traffic::Captured| {
            capture.since(portcullis::core::time::BootInstant::ZERO, |frame| speaks_for(frame, address)).len()
        };
        for (address, address6) in [(VIP, VIP6), (own, "fd09::7")] {
            node.ip(&format!("addr replace {address}/32 dev eth0"));
            node.remove_address("eth0", &format!("{address}/32"));
            node.ip(&format!("-6 addr replace {address6}/128 dev eth0 nodad"));
            node.remove_address("eth0", &format!("{address6}/128"));
            node.add_address("eth0", &format!("{address}/32"));
            node.add_address("eth0", &format!("{address6}/128"));
        }
        // Taking the interface up again announces all of its addresses.
        node.ip("link set eth0 down");
        node.ip("link set eth0 up");
        node.wait_up("eth0");
        let settled = Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.1:7000").start();
        assert!(clock::wait_until(SOON, || settled.arrived() > 100));
        settled.stop();
        node.add_address("eth0", "fd09::2/64");
        node.remove_address("eth0", &format!("{own}/32"));
        let captured = capture.stop();
        [spoken(vip().into(), &captured), spoken(vip6().into(), &captured), spoken(own.parse().unwrap(), &captured)]
    };
    service.open();
    let open = announced("10.9.0.7");
    node.ip("-6 addr replace fd09::100/128 dev eth0 nodad");
    service.close();
    let closed = announced("10.9.0.8");
    println!("announced by the kernel (service, service IPv6, own): open {open:?}, closed {closed:?}");
    assert!(open[0] > 0, "{open:?}");
    assert!(open[2] > 0 && closed[2] > 0, "the kernel announces its own: {open:?}, {closed:?}");
    assert_eq!(closed[..2], [0, 0]);
}

/// The successor took the address: the fenced node is one of its clients like any other.
#[test]
fn f16_the_fenced_node_reaches_the_new_holder() {
    let world = World::new("closed-successor");
    let (client, node, successor, switch) =
        (world.namespace("client"), world.node("node"), world.namespace("successor"), world.namespace("switch"));
    for (host, port, own) in [(&client, "p1", 1), (&*node, "p2", 2), (&successor, "p3", 3)] {
        world.link(host, "eth0", &format!("10.9.0.{own}/24 fd09::{own}/64"), &switch, port, "");
    }
    switch.bridge("br0", &["p1", "p2", "p3"], "");
    node.add_address("eth0", "10.9.0.100/32");
    node.add_address("eth0", "fd09::100/128");
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    Traffic::default()
        .cut("node to its own service", Flow::udp(&node, "10.9.0.2:0", &node, "10.9.0.100:7000"))
        .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7001"))
        .judge_closed(&mut service, |_| {});

    for (address, address6) in [("10.9.0.100/32", "fd09::100/128")] {
        node.remove_address("eth0", address);
        node.remove_address("eth0", address6);
        successor.add_address("eth0", address);
        successor.add_address("eth0", address6);
    }
    client.ip("neigh flush dev eth0");
    // With no neighbour known: each of these asks for the address first.
    let flows = [
        ("node to successor", Flow::udp(&node, "10.9.0.2:0", &successor, "10.9.0.100:7000")),
        ("successor to node", Flow::udp(&successor, "10.9.0.100:7001", &node, "10.9.0.2:7001")),
        ("node to successor, IPv6", Flow::udp(&node, "[fd09::2]:0", &successor, "[fd09::100]:7000")),
        ("client to successor", Flow::udp(&client, "10.9.0.1:0", &successor, "10.9.0.100:7002")),
    ];
    for (name, flow) in flows {
        let flow = flow.start();
        assert!(clock::wait_until(SOON, || flow.arrived() > 50), "{name} does not flow");
        let report = flow.stop();
        println!("{name}: {} of {} passed", report.received(), report.sent());
        report.assert_whole();
    }
    assert!(service.node_is_closed());
}

/// A datagram's pieces before the gate closed, and the rest after.
#[test]
fn fragments_begun_before_closing_are_not_completed_after_it() {
    let world = World::new("closed-fragments");
    let (client, node) = pair(&world);
    let link = Link::between(&client, &node);
    let mut service = Gated::start(
        &node,
        &config(
            r#"
        addresses = ["10.9.0.100", "fd09::100"]
        ports = ["udp/7000"]"#,
        ),
    );
    let inbox = Inbox::open(&node, &["10.9.0.100:7000", "[fd09::100]:7000"], "10.9.0.2:7000");
    let control = SocketAddr::from((NODE, 7000));
    let marker = frames::ipv4(CLIENT, NODE, frames::UDP, &frames::udp((CLIENT, 7).into(), control, b"control"));
    let marker = link.from_client(frames::IPV4, &marker);

    // The first piece and the second of each of `count` datagrams, in both families.
    let pieces = |first_identification: u16, count: u16| {
        let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
        for identification in first_identification..first_identification + count {
            let datagram = frames::udp((CLIENT, 7).into(), (vip(), 7000).into(), &[7; 56]);
            let datagram6 = frames::udp((CLIENT6, 7).into(), (vip6(), 7000).into(), &[7; 56]);
            for (offset, more, pieces) in [(0u16, true, &mut firsts), (32, false, &mut seconds)] {
                let piece = Piece { identification, offset, more };
                let range = usize::from(offset)..if more { 32 } else { 64 };
                let packet = frames::ipv4_with(CLIENT, vip(), frames::UDP, piece, &[], &datagram[range.clone()]);
                pieces.push(link.from_client(frames::IPV4, &packet));
                let packet = frames::ipv6_piece(frames::UDP, piece, &datagram6[range]);
                let packet = frames::ipv6(CLIENT6, vip6(), frames::FRAGMENT, &packet);
                pieces.push(link.from_client(frames::IPV6, &packet));
            }
        }
        (firsts, seconds)
    };
    let deliver = |frames: &[Vec<u8>]| inbox.deliver(&link.client.0, frames, &marker);

    service.open();
    let (firsts, seconds) = pieces(100, 10);
    assert_eq!(deliver(&firsts), 0);
    let open = deliver(&seconds);
    let (firsts, seconds) = pieces(200, 10);
    deliver(&firsts);
    service.close();
    let closed = deliver(&seconds);
    let (firsts, others) = pieces(300, 10);
    let whole_closed = deliver(&[firsts, others].concat());
    println!(
        "datagrams completed, of 20: begun and ended open {open}, ended closed {closed}, all closed {whole_closed}"
    );
    assert_eq!((open, closed, whole_closed), (20, 0, 0));
    service.open();
    let (firsts, seconds) = pieces(400, 10);
    assert_eq!(deliver(&[firsts, seconds].concat()), 20);
}

/// A service that is its whole address answers no ping, and makes no errors about its flows.
#[test]
fn icmp_of_the_address_is_the_service_s() {
    let world = World::new("closed-icmp");
    let (client, node) = pair(&world);
    // Errors are not to be held back by their rate.
    node.sysctl("net.ipv4.icmp_ratelimit", "0");
    node.sysctl("net.ipv6.icmp.ratelimit", "0");
    let link = Link::between(&client, &node);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    let ping = |target: Ipv4Addr| {
        let message = frames::icmp(8, 0, &[0, 1, 0, 1, 0xaa]);
        link.from_client(frames::IPV4, &frames::ipv4(CLIENT, target, frames::ICMP, &message))
    };
    let ping6 = |target: Ipv6Addr| {
        let message = frames::icmpv6(CLIENT6, target, 128, 0, &[0, 1, 0, 1, 0xaa]);
        link.from_client(frames::IPV6, &frames::ipv6(CLIENT6, target, frames::ICMPV6, &message))
    };
    // A port at which nobody listens: the answer is an error from the address.
    let knock = |target: Ipv4Addr| {
        let datagram = frames::udp((CLIENT, 7).into(), (target, 9).into(), b"?");
        link.from_client(frames::IPV4, &frames::ipv4(CLIENT, target, frames::UDP, &datagram))
    };
    // The client knows where the answers go.
    let client_known = |host: &Node| {
        let socket = host.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        socket.send_to(b"?", (CLIENT, 9)).unwrap();
        let socket = host.run(|| UdpSocket::bind("[fd09::2]:0")).unwrap();
        socket.send_to(b"?", (CLIENT6, 9)).unwrap();
    };
    client_known(&node);
    let round = || {
        let echo = |frame: &Frame| {
            !frame.outgoing
                && matches!(frame.protocol(), Some(frames::ICMP | frames::ICMPV6))
                && !matches!((frame.protocol(), frame.bytes().get(54)), (Some(frames::ICMPV6), Some(135 | 136)))
        };
        let capture = Capture::start(&client, "eth0", echo);
        for _ in 0..10 {
            for frame in [ping(vip()), ping6(vip6()), knock(vip())] {
                link.client.0.send(&frame);
            }
            let before = capture.frames();
            link.client.0.send(&ping(NODE));
            link.client.0.send(&knock(NODE));
            assert!(clock::wait_until(SOON, || capture.frames() >= before + 2), "the node does not answer");
        }
        let captured = capture.stop();
        let from = |address: IpAddr| {
            captured.since(portcullis::core::time::BootInstant::ZERO, |frame| frame.source() == Some(address)).len()
        };
        [from(vip().into()), from(vip6().into()), from(NODE.into())]
    };
    let open = round();
    service.close();
    let closed = round();
    println!(
        "ICMP answers (service: 10 pings and 10 errors, IPv6: 10 pings, node: 10 and 10): open {open:?}, closed {closed:?}"
    );
    assert_eq!(open, [20, 10, 20]);
    assert_eq!(closed, [0, 0, 20]);
}

/// An error about a flow belongs to the flow: another service's on the same address is none of its business.
#[test]
fn an_icmp_error_about_another_port_passes() {
    let world = World::new("closed-icmp-port");
    let (client, node) = pair(&world);
    node.sysctl("net.ipv4.icmp_ratelimit", "0");
    let link = Link::between(&client, &node);
    let mut service = Gated::start(
        &node,
        &config(
            r#"
        addresses = ["10.9.0.100"]
        ports = ["udp/7000"]"#,
        ),
    );
    // Errors that reach a connected socket are told to it.
    let told = |port: u16| {
        let socket = node.run(|| UdpSocket::bind(("10.9.0.100", port))).unwrap();
        socket.connect((CLIENT, 4000)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let quoted = frames::udp((vip(), port).into(), (CLIENT, 4000).into(), b"x");
        let quoted = frames::ipv4(vip(), CLIENT, frames::UDP, &quoted);
        let unreachable = frames::icmp(3, 3, &[&[0; 4], &quoted[..]].concat());
        let frame = link.from_client(frames::IPV4, &frames::ipv4(CLIENT, vip(), frames::ICMP, &unreachable));
        link.client.0.send(&frame);
        // A datagram of the other port tells that the error before it was judged.
        let marker = frames::udp((CLIENT, 7).into(), (NODE, 7999).into(), b"control");
        let marker = link.from_client(frames::IPV4, &frames::ipv4(CLIENT, NODE, frames::UDP, &marker));
        let inbox = Inbox::open(&node, &[], "10.9.0.2:7999");
        inbox.deliver(&link.client.0, &[], &marker);
        socket.take_error().unwrap().is_some()
    };
    service.open();
    assert_eq!((told(7000), told(7001)), (true, true), "open");
    service.close();
    assert_eq!((told(7000), told(7001)), (false, true), "closed");
}
