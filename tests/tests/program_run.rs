//! Packets of every kind through the loaded programs, by test run: each is judged as its gate says, whichever program and
//! whichever object it is. Nothing is attached.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;
#[allow(dead_code, reason = "shared by several test programs")]
#[path = "gate_lab/frames.rs"]
mod frames;

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader, TestRun, TestRunOptions, VerifierLogLevel,
    maps::{Array, HashMap},
    programs::{SchedClassifier, Xdp},
};
use datapath_lab::{index, lab, run};
use frames::{
    ARP, DESTINATION_OPTIONS, FRAGMENT, HOP_BY_HOP, ICMP, ICMPV6, IPV4, IPV6, Mac, Piece, QINQ, ROUTING, SCTP, TCP,
    UDP, VLAN,
};
use portcullis::{clock::boot_now, datapath::OBJECT};
use portcullis_common::layout::{
    ANY_PROTOCOL, Address, Gate, LAYOUT_VERSION, Rule, RuleSet, Settings, maps, programs, roles,
};

const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 100);
const VIP6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x100);
/// Has every protocol and port, while the others have port 5432 alone.
const WHOLE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 101);
const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PEER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const PORT: u16 = 5432;
/// Has nothing to do with it.
const STRANGER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const MAC: Mac = [2, 0, 0, 0, 0, 1];
const ACK: u8 = 0x10;

/// Which way a packet goes: the service's end is its destination or its source.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    In,
    Out,
}

/// Whose a packet is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Whose {
    /// Dropped while the gate is closed.
    Services,
    /// Passes whatever the gate says.
    Foreign,
}

/// A packet, and whether what starts at its network header can be judged alone: a tag belongs to the frame.
struct Case {
    name: &'static str,
    frame: Vec<u8>,
    whose: Whose,
    /// `gate_xdp` reads the linear part with few levels, and leaves the rest to tc.
    simple: bool,
}

/// Every class of packet that the parser knows.
fn cases(way: Way) -> Vec<Case> {
    let ends4 = |own: Ipv4Addr| if way == Way::In { (PEER, own) } else { (own, PEER) };
    let ends6 = || if way == Way::In { (PEER6, VIP6) } else { (VIP6, PEER6) };
    let ports = |port| if way == Way::In { (40_000, port) } else { (port, 40_000) };
    let frame = |tags: &[(u16, u16)], ethertype, packet: &[u8]| frames::ethernet(MAC, MAC, tags, ethertype, packet);
    let transport = |from: (SocketAddr, SocketAddr), protocol| match protocol {
        TCP => frames::tcp(from.0, from.1, ACK, b"data"),
        UDP => frames::udp(from.0, from.1, b"data"),
        _ => frames::sctp(from.0, from.1),
    };
    let v4 = |own, port, protocol| {
        let ((from, to), (from_port, to_port)) = (ends4(own), ports(port));
        let payload = transport(((from, from_port).into(), (to, to_port).into()), protocol);
        (frames::ipv4(from, to, protocol, &payload), payload)
    };
    let v6 = |port, protocol, headers: &[u8]| {
        let ((from, to), (from_port, to_port)) = (ends6(), ports(port));
        let payload = transport(((from, from_port).into(), (to, to_port).into()), protocol);
        let (next, payload) = frames::extended(headers, protocol, &payload);
        frames::ipv6(from, to, next, &payload)
    };
    let v4_with = |own, port, piece, options: &[u8]| {
        let ((from, to), (_, payload)) = (ends4(own), v4(own, port, UDP));
        frames::ipv4_with(from, to, UDP, piece, options, &payload)
    };
    let (mut cases, services, foreign) = (Vec::new(), Whose::Services, Whose::Foreign);
    let mut case = |name, frame, whose, simple| cases.push(Case { name, frame, whose, simple });

    for (name, protocol) in [("TCP", TCP), ("UDP", UDP), ("SCTP", SCTP)] {
        case(name, frame(&[], IPV4, &v4(VIP, PORT, protocol).0), services, true);
        case(name, frame(&[], IPV6, &v6(PORT, protocol, &[])), services, true);
    }
    case("another port", frame(&[], IPV4, &v4(VIP, PORT + 1, TCP).0), foreign, true);
    case("another port, IPv6", frame(&[], IPV6, &v6(PORT + 1, TCP, &[])), foreign, true);
    case("another address", frame(&[], IPV4, &v4(Ipv4Addr::new(10, 0, 0, 99), PORT, TCP).0), foreign, true);
    case("any port of a whole address", frame(&[], IPV4, &v4(WHOLE, 9, UDP).0), services, true);

    case("VLAN tag", frame(&[(VLAN, 5)], IPV4, &v4(VIP, PORT, TCP).0), services, true);
    case("VLAN tag, another port", frame(&[(VLAN, 5)], IPV4, &v4(VIP, PORT + 1, TCP).0), foreign, true);
    let qinq = [(QINQ, 5), (VLAN, 6)];
    case("QinQ", frame(&qinq, IPV4, &v4(VIP, PORT, TCP).0), services, false);
    case("QinQ, another port", frame(&qinq, IPV4, &v4(VIP, PORT + 1, TCP).0), foreign, false);
    case("QinQ as it was", frame(&[(0x9100, 5), (VLAN, 6)], IPV6, &v6(PORT, UDP, &[])), services, false);
    let four = [(QINQ, 1), (VLAN, 2), (VLAN, 3), (VLAN, 4)];
    case("four tags", frame(&four, IPV6, &v6(PORT, TCP, &[])), services, false);
    let five = [(QINQ, 1), (VLAN, 2), (VLAN, 3), (VLAN, 4), (VLAN, 5)];
    case("five tags are unreadable", frame(&five, IPV4, &v4(VIP, PORT + 1, TCP).0), services, false);

    let options = [1; 40];
    case("IPv4 options", frame(&[], IPV4, &v4_with(VIP, PORT, Piece::default(), &options)), services, true);
    case(
        "IPv4 options, another port",
        frame(&[], IPV4, &v4_with(VIP, PORT + 1, Piece::default(), &options)),
        foreign,
        true,
    );
    for (name, offset, more) in
        [("first fragment", 0, true), ("middle fragment", 64, true), ("last fragment", 64, false)]
    {
        let piece = Piece { identification: 7, offset, more };
        case(name, frame(&[], IPV4, &v4_with(VIP, PORT + 1, piece, &[])), services, false);
        let (from, to) = ends6();
        let packet = frames::ipv6(from, to, FRAGMENT, &frames::ipv6_piece(UDP, piece, &[0; 16]));
        case(name, frame(&[], IPV6, &packet), services, false);
    }
    let mut short_header = v4(VIP, PORT + 1, TCP).0;
    short_header[0] = 0x44;
    case("a header length below 20", frame(&[], IPV4, &short_header), services, false);
    let cut = v4(VIP, PORT + 1, TCP).0[..24].to_vec();
    case("a TCP header that ends early", frame(&[], IPV4, &cut), services, false);
    let ends = ends4(VIP);
    case("ESP", frame(&[], IPV4, &frames::ipv4(ends.0, ends.1, 50, &[0; 16])), services, false);
    case("GRE to a service of ports", frame(&[], IPV4, &frames::ipv4(ends.0, ends.1, 47, &[0; 16])), foreign, true);
    let whole = ends4(WHOLE);
    case("GRE to a whole address", frame(&[], IPV4, &frames::ipv4(whole.0, whole.1, 47, &[0; 16])), services, true);

    for (name, headers) in [
        ("hop-by-hop options", &[HOP_BY_HOP][..]),
        ("destination options", &[DESTINATION_OPTIONS]),
        ("routing header", &[ROUTING]),
    ] {
        case(name, frame(&[], IPV6, &v6(PORT, TCP, headers)), services, true);
        case(name, frame(&[], IPV6, &v6(PORT + 1, TCP, headers)), foreign, true);
    }
    let six = [HOP_BY_HOP, DESTINATION_OPTIONS, ROUTING, DESTINATION_OPTIONS, DESTINATION_OPTIONS, DESTINATION_OPTIONS];
    case("six extension headers", frame(&[], IPV6, &v6(PORT, UDP, &six)), services, false);
    case("six extension headers, another port", frame(&[], IPV6, &v6(PORT + 1, UDP, &six)), foreign, false);
    let seven = [&six[..], &[DESTINATION_OPTIONS]].concat();
    case("seven extension headers", frame(&[], IPV6, &v6(PORT + 1, UDP, &seven)), services, false);
    case("atomic fragment", frame(&[], IPV6, &v6(PORT + 1, UDP, &[FRAGMENT])), services, false);

    let ping = frames::icmp(8, 0, &[0; 5]);
    case("ping to a service of ports", frame(&[], IPV4, &frames::ipv4(ends.0, ends.1, ICMP, &ping)), foreign, true);
    case("ping to a whole address", frame(&[], IPV4, &frames::ipv4(whole.0, whole.1, ICMP, &ping)), services, true);
    for (name, port, whose) in [("an error about a flow", PORT, services), ("about another port", PORT + 1, foreign)] {
        // The flow that the receiver of the error sent.
        let quoted = frames::udp(
            (ends.1, if way == Way::In { port } else { 9 }).into(),
            (ends.0, if way == Way::In { 9 } else { port }).into(),
            b"",
        );
        let quoted = frames::ipv4(ends.1, ends.0, UDP, &quoted);
        let error = frames::icmp(3, 3, &[&[0; 4], &quoted[..]].concat());
        case(name, frame(&[], IPV4, &frames::ipv4(ends.0, ends.1, ICMP, &error)), whose, true);
    }
    let other = frames::icmp(3, 3, &[&[0; 4], &frames::ipv4(STRANGER, PEER, UDP, &[0; 8])[..]].concat());
    case(
        "an error about nobody's flow",
        frame(&[], IPV4, &frames::ipv4(ends.0, ends.1, ICMP, &other)),
        services,
        false,
    );

    // A question for the address, and the address's word about itself.
    let arp = if way == Way::In {
        frames::arp(1, (MAC, PEER), ([0; 6], VIP))
    } else {
        frames::arp(2, (MAC, VIP), (MAC, PEER))
    };
    case("ARP", frame(&[], ARP, &arp), services, true);
    let gratuitous = frames::arp(1, (MAC, VIP), ([0; 6], VIP));
    let whose = if way == Way::Out { services } else { foreign };
    case("gratuitous ARP", frame(&[], ARP, &gratuitous), whose, true);
    case(
        "ARP of others",
        frame(&[], ARP, &frames::arp(1, (MAC, PEER), ([0; 6], Ipv4Addr::new(10, 0, 0, 9)))),
        foreign,
        true,
    );
    let (kind, option, from, to) = if way == Way::In { (135, 1, PEER6, VIP6) } else { (136, 2, VIP6, PEER6) };
    let message = frames::icmpv6(from, to, kind, 0, &frames::neighbour(VIP6, option, MAC));
    case("neighbour discovery", frame(&[], IPV6, &frames::ipv6(from, to, ICMPV6, &message)), services, true);
    case("neither IP nor ARP", frame(&[], 0x88cc, &[0; 40]), foreign, true);
    cases
}

/// An object that was loaded, with maps of its own.
struct Loaded {
    object: Ebpf,
    interface: u32,
}

impl Loaded {
    fn new(object: &[u8], interface: u32) -> Self {
        let mut object = EbpfLoader::new().verifier_log_level(VerifierLogLevel::DISABLE).load(object).unwrap();
        for name in [programs::TC_IN, programs::TC_OUT, programs::TC_L3_IN, programs::TC_L3_OUT] {
            let program: &mut SchedClassifier = object.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        for name in [programs::XDP, programs::XDP_FRAGS] {
            let program: &mut Xdp = object.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        let own = roles::LOCAL | roles::NEIGHBOURS;
        let rule = |protocol, first, last| Rule {
            port_first: first,
            port_last: last,
            protocol,
            roles: own,
            ..Rule::default()
        };
        let set = |rules: &[Rule]| {
            let mut set = RuleSet { count: u32::try_from(rules.len()).unwrap(), ..RuleSet::default() };
            set.rules[..rules.len()].copy_from_slice(rules);
            set
        };
        let exact = set(&[TCP, UDP, SCTP].map(|protocol| rule(protocol, PORT, PORT)));
        let whole = set(&[rule(ANY_PROTOCOL, 0, u16::MAX)]);
        let mut addresses: HashMap<_, Address, RuleSet> = object.map_mut(maps::ADDRESSES).unwrap().try_into().unwrap();
        for (address, set) in [
            (Address::v4(VIP.octets()), exact),
            (Address::v6(VIP6.octets()), exact),
            (Address::v4(WHOLE.octets()), whole),
        ] {
            addresses.insert(address, set, 0).unwrap();
        }
        let mut settings: Array<_, Settings> = object.map_mut(maps::SETTINGS).unwrap().try_into().unwrap();
        let contents = Settings { layout_version: LAYOUT_VERSION, roles: u32::from(own), flags: 0, gates: 1 };
        settings.set(0, contents, 0).unwrap();
        Self { object, interface }
    }

    fn set_deadline(&mut self, deadline_ns: u64) {
        let mut gates: Array<_, Gate> = self.object.map_mut(maps::GATES).unwrap().try_into().unwrap();
        gates.set(0, Gate { deadline_ns, generation: 1, ..Gate::default() }, 0).unwrap();
    }

    /// Whether a classifier lets a frame pass. It is a forwarded one: no socket of this host sent it.
    fn tc_passes(&self, name: &str, frame: &[u8]) -> bool {
        let program: &SchedClassifier = self.object.program(name).unwrap().try_into().unwrap();
        // `struct __sk_buff`: ingress_ifindex and ifindex.
        let mut context = [0; 44];
        context[36..40].copy_from_slice(&self.interface.to_ne_bytes());
        context[40..44].copy_from_slice(&self.interface.to_ne_bytes());
        let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), ..TestRunOptions::default() };
        match program.test_run(options).unwrap().return_value {
            2 => false,
            u32::MAX => true,
            answer => panic!("{name} answered {answer}"),
        }
    }

    fn xdp_passes(&self, name: &str, frame: &[u8]) -> bool {
        let program: &Xdp = self.object.program(name).unwrap().try_into().unwrap();
        // `struct xdp_md`: data_end and ingress_ifindex.
        let mut context = [0; 24];
        context[4..8].copy_from_slice(&u32::try_from(frame.len()).unwrap().to_ne_bytes());
        context[12..16].copy_from_slice(&self.interface.to_ne_bytes());
        let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), ..TestRunOptions::default() };
        match program.test_run(options).unwrap().return_value {
            1 => false,
            2 => true,
            answer => panic!("{name} answered {answer}"),
        }
    }
}

/// The object of this build, and the committed one where there is one.
fn objects() -> Vec<(&'static str, Vec<u8>)> {
    let mut objects = vec![("this build's", OBJECT.to_vec())];
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/prebuilt/portcullis.o");
    if committed.exists() {
        objects.push(("the committed one", fs::read(committed).unwrap()));
    }
    objects
}

/// Runs `judge` for every object with a gate that is open, closed by a fence number, and past its deadline.
fn with_every_gate(judge: impl Fn(&str, &Loaded, bool) + Send + 'static) {
    lab(move |_| {
        run("ip link add v0 type veth peer name v1");
        for (origin, object) in objects() {
            let mut loaded = Loaded::new(&object, index("v0"));
            for (state, deadline, open) in
                [("open", u64::MAX, true), ("closed", 7, false), ("expired", boot_now().as_nanos(), false)]
            {
                loaded.set_deadline(deadline);
                judge(&format!("{origin} object, gate {state}"), &loaded, open);
            }
        }
    });
}

#[test]
fn classifiers_judge_every_class_of_packet() {
    with_every_gate(|what, loaded, open| {
        for (way, program) in [(Way::In, programs::TC_IN), (Way::Out, programs::TC_OUT)] {
            let cases = cases(way);
            for case in &cases {
                // Without a socket a segment with data could be anybody's, but a forwarded one is nobody's here.
                let expected = open || case.whose == Whose::Foreign;
                assert_eq!(loaded.tc_passes(program, &case.frame), expected, "{what}: {program}: {}", case.name);
            }
            println!("{what}: {program}: {} packets", cases.len());
        }
    });
}

/// The same packets without their Ethernet headers' help; the kernel's test run always puts one before them.
#[test]
fn classifiers_of_interfaces_without_ethernet_judge_the_same() {
    with_every_gate(|what, loaded, open| {
        for (way, program) in [(Way::In, programs::TC_L3_IN), (Way::Out, programs::TC_L3_OUT)] {
            let plain = |frame: &[u8]| matches!(u16::from_be_bytes([frame[12], frame[13]]), IPV4 | IPV6);
            let cases: Vec<_> = cases(way).into_iter().filter(|case| plain(&case.frame)).collect();
            for case in &cases {
                let expected = open || case.whose == Whose::Foreign;
                assert_eq!(loaded.tc_passes(program, &case.frame), expected, "{what}: {program}: {}", case.name);
            }
            println!("{what}: {program}: {} packets", cases.len());
        }
    });
}

#[test]
fn xdp_judges_every_class_of_packet() {
    with_every_gate(|what, loaded, open| {
        let cases = cases(Way::In);
        for case in &cases {
            let expected = open || case.whose == Whose::Foreign;
            let program = programs::XDP_FRAGS;
            assert_eq!(loaded.xdp_passes(program, &case.frame), expected, "{what}: {program}: {}", case.name);
            // What this one does not read it leaves to tc, and never drops what is not the service's.
            let program = programs::XDP;
            assert_eq!(
                loaded.xdp_passes(program, &case.frame),
                expected || !case.simple,
                "{what}: {program}: {}",
                case.name
            );
        }
        println!("{what}: both XDP programs: {} packets", cases.len());
    });
}

/// A gate that does not exist is closed.
#[test]
fn a_rule_of_no_gate_drops() {
    lab(|_| {
        run("ip link add v0 type veth peer name v1");
        let mut loaded = Loaded::new(OBJECT, index("v0"));
        loaded.set_deadline(u64::MAX);
        let frame = &cases(Way::In)[0].frame;
        assert!(loaded.tc_passes(programs::TC_IN, frame));
        let mut addresses: HashMap<_, Address, RuleSet> =
            loaded.object.map_mut(maps::ADDRESSES).unwrap().try_into().unwrap();
        let mut set = addresses.get(&Address::v4(VIP.octets()), 0).unwrap();
        for rule in &mut set.rules {
            rule.gate = u16::MAX;
        }
        addresses.insert(Address::v4(VIP.octets()), set, 0).unwrap();
        assert!(!loaded.tc_passes(programs::TC_IN, frame));
        assert!(!loaded.xdp_passes(programs::XDP_FRAGS, frame));
    });
}
