//! Cases from the field, by their numbers: what slipped past other people's filters, and what other agents do to ours.
#![allow(clippy::unwrap_used, reason = "tests")]

mod gate_lab;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::unix::process::CommandExt,
    path::Path,
    time::Duration,
};

use gate_lab::{
    Gated, Traffic, VIP, WHOLE, config, config_with,
    foreign::{self, Foreign, Hook},
    frames::{self, DESTINATION_OPTIONS, FRAGMENT, HOP_BY_HOP, Mac, Piece, QINQ, ROUTING, VLAN},
    pair,
    wire::{Inbox, Wire, drain, mac},
    writer::Writer,
};
use portcullis_tests::{
    clock,
    traffic::{Capture, Flow, Frame},
    world::{Command, Namespace, Node, Process, World},
};

const SOON: Duration = Duration::from_secs(10);
const COUNT: usize = 10;

/// A way of dressing up a datagram.
struct Disguise {
    name: &'static str,
    tags: &'static [(u16, u16)],
    packet: Packet,
    /// Its ports can be read: another port's datagram in the same dress is not the service's. Otherwise it counts as
    /// belonging to every service of the address.
    readable: bool,
}

enum Packet {
    V4 {
        options: &'static [u8],
    },
    /// In two pieces, of which the first has so many bytes.
    V4Pieces(u16),
    V6(&'static [u8]),
    V6Pieces(&'static [u8]),
}

const V4: Packet = Packet::V4 { options: &[] };
const V6: Packet = Packet::V6(&[]);
/// Tags of VLAN 0 carry a priority and no VLAN: the kernel takes them off and hands the packet to its own stack, also
/// without VLAN support, and one inside the other.
const ONE: &[(u16, u16)] = &[(VLAN, 0)];
const PRIORITY: &[(u16, u16)] = &[(VLAN, 0xe000)];
const AD: &[(u16, u16)] = &[(QINQ, 0)];
const TWO: &[(u16, u16)] = &[(QINQ, 0), (VLAN, 0)];
const FOUR: &[(u16, u16)] = &[(QINQ, 0), (VLAN, 0), (VLAN, 0), (VLAN, 0)];
/// One more than is looked through, even with the outer one taken off by "hardware".
const SIX: &[(u16, u16)] = &[(QINQ, 0), (VLAN, 0), (VLAN, 0), (VLAN, 0), (VLAN, 0), (VLAN, 0)];
/// Padding, and the longest that there can be.
const NOP: &[u8] = &[1; 4];
const LONGEST: &[u8] = &[1; 40];
const MANY: &[u8] =
    &[HOP_BY_HOP, DESTINATION_OPTIONS, ROUTING, DESTINATION_OPTIONS, DESTINATION_OPTIONS, DESTINATION_OPTIONS];
const TOO_MANY: &[u8] = &[
    HOP_BY_HOP,
    DESTINATION_OPTIONS,
    ROUTING,
    DESTINATION_OPTIONS,
    DESTINATION_OPTIONS,
    DESTINATION_OPTIONS,
    DESTINATION_OPTIONS,
];

const fn disguise(name: &'static str, tags: &'static [(u16, u16)], packet: Packet, readable: bool) -> Disguise {
    Disguise { name, tags, packet, readable }
}

const DISGUISES: [Disguise; 24] = [
    disguise("plain", &[], V4, true),
    disguise("VLAN tag", ONE, V4, true),
    disguise("VLAN tag with a priority", PRIORITY, V4, true),
    disguise("802.1ad tag", AD, V4, true),
    disguise("QinQ", TWO, V4, true),
    disguise("four tags", FOUR, V4, true),
    disguise("six tags", SIX, V4, false),
    disguise("IPv4 options", &[], Packet::V4 { options: NOP }, true),
    disguise("forty bytes of IPv4 options", &[], Packet::V4 { options: LONGEST }, true),
    disguise("QinQ, IPv4 options", TWO, Packet::V4 { options: LONGEST }, true),
    disguise("IPv4 fragments", &[], Packet::V4Pieces(32), false),
    disguise("a first fragment of 8 bytes", &[], Packet::V4Pieces(8), false),
    disguise("VLAN tag, IPv4 fragments", ONE, Packet::V4Pieces(32), false),
    disguise("IPv6", &[], V6, true),
    disguise("IPv6, QinQ", TWO, V6, true),
    disguise("hop-by-hop options", &[], Packet::V6(&[HOP_BY_HOP]), true),
    disguise("destination options", &[], Packet::V6(&[DESTINATION_OPTIONS]), true),
    disguise("routing header", &[], Packet::V6(&[ROUTING]), true),
    disguise("six extension headers", &[], Packet::V6(MANY), true),
    disguise("VLAN tag, six extension headers", ONE, Packet::V6(MANY), true),
    disguise("seven extension headers", &[], Packet::V6(TOO_MANY), false),
    disguise("atomic fragment", &[], Packet::V6(&[FRAGMENT]), false),
    disguise("IPv6 fragments", &[], Packet::V6Pieces(&[]), false),
    disguise("hop-by-hop options, IPv6 fragments", TWO, Packet::V6Pieces(&[HOP_BY_HOP]), false),
];

/// Both addresses and the hardware address of one side.
#[derive(Clone, Copy)]
struct Side {
    mac: Mac,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Disguise {
    fn is_v6(&self) -> bool {
        matches!(self.packet, Packet::V6(_) | Packet::V6Pieces(_))
    }

    /// The frames of one datagram between two ports.
    fn frames(&self, from: (Side, u16), to: (Side, u16), identification: u16) -> Vec<Vec<u8>> {
        let address = |(side, port): (Side, u16)| match self.is_v6() {
            true => SocketAddr::from((side.v6, port)),
            false => SocketAddr::from((side.v4, port)),
        };
        let datagram = frames::udp(address(from), address(to), &[7; 56]);
        let (from, to) = (from.0, to.0);
        let v4 = |piece, options: &[u8], payload: &[u8]| {
            let packet = frames::ipv4_with(from.v4, to.v4, frames::UDP, piece, options, payload);
            frames::ethernet(to.mac, from.mac, self.tags, frames::IPV4, &packet)
        };
        let v6 = |next, payload: &[u8]| {
            let packet = frames::ipv6(from.v6, to.v6, next, payload);
            frames::ethernet(to.mac, from.mac, self.tags, frames::IPV6, &packet)
        };
        match self.packet {
            Packet::V4 { options } => vec![v4(Piece::default(), options, &datagram)],
            Packet::V4Pieces(first) => {
                let (head, tail) = datagram.split_at(usize::from(first));
                let piece = |offset, more| Piece { identification, offset, more };
                vec![v4(piece(0, true), &[], head), v4(piece(first, false), &[], tail)]
            }
            Packet::V6(headers) => {
                let (next, payload) = frames::extended(headers, frames::UDP, &datagram);
                vec![v6(next, &payload)]
            }
            Packet::V6Pieces(headers) => {
                let piece = |offset: u16, more, bytes: &[u8]| {
                    let piece = frames::ipv6_piece(frames::UDP, Piece { identification, offset, more }, bytes);
                    let (next, payload) = frames::extended(headers, FRAGMENT, &piece);
                    v6(next, &payload)
                };
                vec![piece(0, true, &datagram[..32]), piece(32, false, &datagram[32..])]
            }
        }
    }
}

/// Every disguise in one direction, at the service's port and at another one of its addresses.
struct Smuggling {
    wire: Wire,
    from: Side,
    to: Side,
    /// In: the port is the destination's. Out: the source's.
    incoming: bool,
    inbox: Inbox,
    marker: Vec<u8>,
}

const PORT: u16 = 7000;
const OTHER_PORT: u16 = 7001;

impl Smuggling {
    fn new(client: &Namespace, node: &Node, incoming: bool) -> Self {
        let side = |namespace: &Namespace, v4: &str, v6: &str| Side {
            mac: mac(namespace, "eth0"),
            v4: v4.parse().unwrap(),
            v6: v6.parse().unwrap(),
        };
        let client_side = side(client, "10.9.0.1", "fd09::1");
        let service = side(node, VIP, "fd09::100");
        let (from, to, sender, receiver): (Side, Side, &Namespace, &Namespace) =
            if incoming { (client_side, service, client, node) } else { (service, client_side, node, client) };
        // Ports 7000 and 7001 of the receiver, at the address of the service or the client.
        let at = [IpAddr::V4(to.v4), IpAddr::V6(to.v6)];
        let service_sockets: Vec<String> =
            at.iter().flat_map(|ip| [PORT, OTHER_PORT].map(|port| SocketAddr::new(*ip, port).to_string())).collect();
        let (own_from, own_to) =
            if incoming { ([10, 9, 0, 1], "10.9.0.2:7009") } else { ([10, 9, 0, 2], "10.9.0.1:7009") };
        let inbox = Inbox::open(receiver, &service_sockets.iter().map(String::as_str).collect::<Vec<_>>(), own_to);
        let SocketAddr::V4(target) = inbox.control_address() else { panic!("an IPv4 address") };
        let own_from = Ipv4Addr::from(own_from);
        let marker = frames::udp((own_from, 7009).into(), target.into(), b"control");
        let marker = frames::ipv4(own_from, *target.ip(), frames::UDP, &marker);
        let marker = frames::ethernet(to.mac, from.mac, &[], frames::IPV4, &marker);
        Self { wire: Wire::open(sender, "eth0"), from, to, incoming, inbox, marker }
    }

    /// How many of ten datagrams arrive.
    fn arrive(&self, disguise: &Disguise, port: u16, first: u16) -> usize {
        let frames: Vec<_> = (first..)
            .take(COUNT)
            .flat_map(|identification| match self.incoming {
                true => disguise.frames((self.from, 40_000), (self.to, port), identification),
                // At the receiver the port tells the two apart as well.
                false => disguise.frames((self.from, port), (self.to, port), identification),
            })
            .collect();
        self.inbox.deliver(&self.wire, &frames, &self.marker)
    }
}

fn smuggle(name: &str, agent: &str, incoming: bool) {
    let world = World::new(name);
    let (client, node) = pair(&world);
    let selectors = r#"
        addresses = ["10.9.0.100", "fd09::100"]
        ports = ["udp/7000"]"#;
    let mut service = Gated::start(&node, &config_with(agent, selectors));
    let smuggling = Smuggling::new(&client, &node, incoming);
    let mut identification = 0;
    let mut round = |label: &str| -> Vec<(usize, usize)> {
        let counts = DISGUISES.iter().map(|disguise| {
            identification += 100;
            let service = smuggling.arrive(disguise, PORT, identification);
            let other = smuggling.arrive(disguise, OTHER_PORT, identification + 50);
            (service, other)
        });
        let counts: Vec<_> = counts.collect();
        println!("{name}, {label}: (service's port, another port) of {COUNT} each: {counts:?}");
        counts
    };
    service.open();
    let open = round("open");
    service.close();
    let closed = round("closed");
    service.open();
    let again = round("open again");
    for (index, disguise) in DISGUISES.iter().enumerate() {
        let name = disguise.name;
        assert_eq!(open[index], (COUNT, COUNT), "{name}: this path delivers nothing, and proves nothing");
        let others = if disguise.readable { COUNT } else { 0 };
        assert_eq!(closed[index], (0, others), "{name}, closed");
        assert_eq!(again[index], (COUNT, COUNT), "{name}, open again");
    }
}

#[test]
fn f17_disguised_packets_do_not_come_in_by_xdp() {
    smuggle("f17-in-xdp", r#"xdp = "native""#, true);
}

/// Here the outer tag has been taken off before the classifier sees the frame, as network cards do.
#[test]
fn f17_disguised_packets_do_not_come_in_by_tc() {
    smuggle("f17-in-tc", r#"xdp = "off""#, true);
}

#[test]
fn f17_disguised_packets_do_not_go_out() {
    smuggle("f17-out", "", false);
}

#[test]
fn f18_a_strangers_xdp_program_stays_and_the_gate_cuts_without() {
    let world = World::new("f18-occupied");
    let (client, node) = pair(&world);
    let stranger = node.run(|| Foreign::attach(Hook::Xdp, foreign::index("eth0"))).unwrap();
    let attached = || node.ip("-d link show dev eth0");
    let before = attached();
    assert!(before.contains(foreign::NAME), "{before}");
    let mut service = Gated::start(&node, &config(WHOLE));
    let (health, interface) = (service.health(), service.interface("eth0"));
    println!("f18: {interface}, degraded: {}", health["degraded"]);
    assert_eq!(health["ok"], false);
    assert!(health["degraded"].to_string().contains("eth0: XDP is taken by another program"), "{health}");
    assert_eq!((interface["tc"].as_str(), interface["xdp"].as_str()), (Some("tcx"), Some("none")));
    assert!(interface["note"].to_string().contains("taken"), "{interface}");
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
        .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
        .judge(&mut service);
    service.agent.restart();
    assert!(attached().contains(foreign::NAME), "the stranger was detached: {}", attached());
    drop(stranger);
}

#[test]
fn f18_large_frames_keep_native_xdp_and_are_cut() {
    const LARGE: usize = 8000;
    let world = World::new("f18-mtu");
    let (client, node) = pair(&world);
    for host in [&client, &*node] {
        host.ip("link set eth0 mtu 9000");
    }
    let mut service = Gated::start(&node, &config(WHOLE));
    assert_eq!(service.interface("eth0")["xdp"], "native");
    let bind = |namespace: &Namespace, at: &str| {
        let socket = namespace.run(|| UdpSocket::bind(at)).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let (inbox, control) = (bind(&node, "10.9.0.100:7000"), bind(&node, "10.9.0.2:7000"));
    let sender = bind(&client, "10.9.0.1:0");
    let round = || {
        for _ in 0..COUNT {
            sender.send_to(&[7; LARGE], "10.9.0.100:7000").unwrap();
        }
        sender.send_to(&[7; LARGE], "10.9.0.2:7000").unwrap();
        assert!(clock::wait_until(SOON, || drain(&control) > 0), "the control datagram did not arrive");
        drain(&inbox)
    };
    service.open();
    let open = round();
    service.close();
    let closed = round();
    service.open();
    println!("f18: datagrams of {LARGE} bytes in one frame: {open} of {COUNT} open, {closed} closed");
    assert_eq!((open, closed, round()), (COUNT, 0, COUNT));
}

/// What an agent of `node` is told to run with, as one file. Unlike the harness's it may fail to start, and be held down.
fn f19_config(node: &Node, bpffs: &Path) -> std::path::PathBuf {
    let folder = node.folder();
    let text = format!(
        "[agent]\nidentity = \"node\"\nsocket = {:?}\nstate_dir = {:?}\nlock = {:?}\nbpffs = {bpffs:?}\n\
         cgroup_root = {:?}\n[[service]]\nname = \"vip\"\nlease = {{ source = \"local\" }}\n{WHOLE}\n",
        node.socket(),
        node.state(),
        folder.join("agent.lock"),
        node.cgroup().path(),
    );
    let path = folder.join("f19.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Runs `portcullis` with `arguments`, held down by `hold`, until it ends.
#[track_caller]
fn f19_run(node: &Node, name: &str, arguments: &[&str], hold: impl FnOnce(&mut Command)) -> (i32, String) {
    let mut command = node.portcullis(arguments);
    hold(&mut command);
    let mut process: Process = node.spawn(name, &mut command);
    let status = process.wait(SOON).unwrap_or_else(|| panic!("it goes on: {}", process.log()));
    println!("{name}: {status}: {}", process.log().trim());
    (status.code().unwrap(), process.log())
}

/// Refuses bpf() with EPERM from here on, as the default seccomp profile of a container engine does.
fn without_bpf(command: &mut Command) {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let bpf = u32::try_from(libc::SYS_bpf).unwrap();
    let filter = vec![
        instruction(LOAD_NUMBER, 0, 0, 0),
        instruction(JUMP_EQUAL, 0, 1, bpf),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned()),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: 4, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the call takes numbers alone.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: `program` names four instructions, and both outlive the call.
        if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) };
}

/// Nothing may be mounted from here on, also by root.
fn without_sys_admin(command: &mut Command) {
    const CAP_SYS_ADMIN: libc::c_ulong = 21;
    let drop_it = || {
        // SAFETY: the call takes numbers alone.
        match unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(drop_it) };
}

#[test]
fn f19_without_bpf_the_agent_is_not_ready_and_says_why() {
    let world = World::new("f19-bpf");
    let node = world.node("node");
    let config = f19_config(&node, &node.bpffs().join("portcullis"));
    let config = config.to_str().unwrap();
    let (code, log) = f19_run(&node, "agent", &["agent", "--config", config], without_bpf);
    assert_eq!(code, 1);
    assert!(log.contains("portcullis doctor") && log.contains("Operation not permitted"), "{log}");
    assert!(!node.socket().exists(), "it answers");
    let (code, log) = f19_run(&node, "doctor", &["doctor", "--config", config], without_bpf);
    assert_eq!(code, 1);
    assert!(log.contains("bpf(): the system call is refused, by seccomp"), "{log}");
    // Control: the same without the filter.
    let (code, log) = f19_run(&node, "doctor-free", &["doctor", "--config", config], |_| {});
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("bpf(): the system call is allowed"), "{log}");
}

#[test]
fn f19_without_a_bpffs_the_agent_is_not_ready_and_says_why() {
    let world = World::new("f19-bpffs");
    let node = world.node("node");
    // A folder on a disk, on which only a mount could make room for pins.
    let place = node.folder().join("no-bpffs");
    fs::create_dir(&place).unwrap();
    let config = f19_config(&node, &place);
    let config = config.to_str().unwrap();
    let (code, log) = f19_run(&node, "agent", &["agent", "--config", config], without_sys_admin);
    assert_eq!(code, 1);
    assert!(log.contains("mount -t bpf") && log.contains(place.to_str().unwrap()), "{log}");
    assert!(!node.socket().exists(), "it answers");
    let (_, log) = f19_run(&node, "doctor", &["doctor", "--config", config], without_sys_admin);
    assert!(log.contains("mount -t bpf"), "{log}");
    // A file system that takes no folders.
    let config = f19_config(&node, Path::new("/proc/portcullis"));
    let (code, log) = f19_run(&node, "agent-proc", &["agent", "--config", config.to_str().unwrap()], |_| {});
    assert_eq!(code, 1);
    assert!(log.contains("/proc/portcullis") && log.contains("mount -t bpf"), "{log}");
}

fn from_service(frame: &Frame) -> bool {
    !frame.outgoing && !frame.is_arp() && frame.source() == VIP.parse().ok()
}

/// Another agent deletes the qdisc that holds our filters, while the gate is closed.
#[test]
fn f30_a_deleted_clsact_qdisc_is_put_back_and_the_other_layers_cut_meanwhile() {
    let world = World::new("f30-clsact");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config_with(r#"tc = "clsact""#, WHOLE));
    service.open();
    let writer = Writer::start(&node, &client, &node.cgroup().child("service"), 9000);
    let inwards = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").rate(1000).start();
    let kept = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000").rate(500).start();
    let capture = Capture::start(&client, "eth0", from_service);
    assert!(clock::wait_until(SOON, || inwards.arrived() > 50 && capture.frames() > 50));
    let closing = service.close();
    let mended = |service: &Gated| service.coverage()["gaps_mended"].as_u64().unwrap();
    let before = mended(&service);
    let deleted_at = clock::now();
    node.output("tc", &["qdisc", "del", "dev", "eth0", "clsact"]);
    assert!(!node.output("tc", &["qdisc", "show", "dev", "eth0"]).contains("clsact"));
    service.agent.until("/v1/coverage", |coverage| coverage["gaps_mended"].as_u64().unwrap() >= before + 2);
    let took = clock::now().saturating_since(deleted_at);
    let filters = |direction: &str| node.output("tc", &["filter", "show", "dev", "eth0", direction]);
    assert!(filters("ingress").contains("gate_tc_in") && filters("egress").contains("gate_tc_out"));
    let inwards = inwards.stop();
    let closed = inwards.between(closing.after, clock::now());
    let captured = capture.stop();
    let outwards = captured.after(closing.after, |_| true);
    println!(
        "f30, clsact: mended after {took:?}, {} gaps counted; meanwhile in {} of {} passed (XDP), out {} frames (cgroup)",
        mended(&service) - before,
        closed.received(),
        closed.sent(),
        outwards.len()
    );
    gate_lab::assert_nothing("client to service", &closed);
    assert_eq!(outwards, []);
    assert!(took < Duration::from_secs(5));
    let log = service.agent.log();
    assert!(log.contains("eth0: the classifier was missing at ingress and is attached again"), "{log}");
    kept.stop().assert_whole();
    drop(writer);
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
        .judge(&mut service);
}

/// A program placed before ours that says "accept" hides every packet from it.
#[test]
fn f30_a_program_placed_first_is_overtaken_and_told_of() {
    let world = World::new("f30-tcx");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config_with(r#"xdp = "off""#, WHOLE));
    service.open();
    let writer = Writer::start(&node, &client, &node.cgroup().child("service"), 9000);
    let capture = Capture::start(&client, "eth0", |frame| from_service(frame) && frame.source_port() == Some(9000));
    let inwards = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").rate(1000).start();
    assert!(clock::wait_until(SOON, || inwards.arrived() > 50 && capture.frames() > 50));
    let closing = service.close();
    let mended = |service: &Gated| service.coverage()["gaps_mended"].as_u64().unwrap();
    let before = mended(&service);
    let placed_at = clock::now();
    let strangers = node.run(|| {
        let index = foreign::index("eth0");
        [Hook::TcxIngress, Hook::TcxEgress].map(|hook| Foreign::attach(hook, index).unwrap())
    });
    service.agent.until("/v1/coverage", |coverage| coverage["gaps_mended"].as_u64().unwrap() >= before + 2);
    let (mended_at, took) = (clock::now(), clock::now().saturating_since(placed_at));
    let sent = inwards.sent();
    assert!(clock::wait_until(SOON, || inwards.sent() > sent + 200));
    let inwards = inwards.stop();
    let (gap, after) = (inwards.between(placed_at, mended_at), inwards.between(mended_at, clock::now()));
    let captured = capture.stop();
    let outwards = captured.after(closing.after, |_| true);
    println!(
        "f30, TCX: overtaken after {took:?}, {} gaps counted; to a socket outside the root cgroup {} of {} passed in the \
         gap and {} of {} after it; of a process inside {} frames left",
        mended(&service) - before,
        gap.received(),
        gap.sent(),
        after.received(),
        after.sent(),
        outwards.len()
    );
    // What makes this a test: the stranger did hide packets from the classifier.
    assert!(gap.received() > 0, "the stranger hid nothing: {gap}");
    gate_lab::assert_nothing("after it was mended", &after);
    assert_eq!(outwards, [], "the root cgroup's programs cut what the classifiers do not see");
    assert!(took < Duration::from_secs(5));
    let log = service.agent.log();
    for hook in ["ingress", "egress"] {
        assert!(log.contains(&format!("{} ran before the classifier at {hook}", foreign::NAME)), "{log}");
    }
    drop((writer, strangers));
}
