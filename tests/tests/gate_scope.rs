//! What the selectors other than a service's own addresses cut, and each way in which the programs can be attached.
#![allow(clippy::unwrap_used, reason = "tests")]

mod gate_lab;

use std::{fs, time::Duration};

use gate_lab::{Gated, Traffic, WHOLE, config, config_with, frames, pair, serve, wire};
use portcullis_common::layout::FENCE_NUMBERS;
use portcullis_tests::{
    clock,
    traffic::{Echo, Flow},
    world::{Namespace, Node, World},
};

const SOON: Duration = Duration::from_secs(10);

fn own_service(client: &Namespace, node: &Node) -> Traffic {
    Traffic::default()
        .cut("client to service", Flow::udp(client, "10.9.0.1:0", node, "10.9.0.100:7000"))
        .cut("service to client", Flow::udp(node, "10.9.0.100:7001", client, "10.9.0.1:7001"))
        .cut("client to service, IPv6", Flow::udp(client, "[fd09::1]:0", node, "[fd09::100]:7000"))
        .kept("client to node", Flow::udp(client, "10.9.0.1:0", node, "10.9.0.2:7000"))
}

/// A storage target that the service writes to: what this node sends to it is cut, whoever sends it.
#[test]
fn remotes_are_cut_and_others_are_not() {
    let world = World::new("scope-remotes");
    let (client, node) = pair(&world);
    for address in ["10.9.0.50/32", "10.9.0.51/32", "fd09::50/128"] {
        client.add_address("eth0", address);
    }
    let selectors = r#"
        remotes = ["10.9.0.50", "fd09::50"]
        remote_ports = ["udp/3260", "udp/3261"]"#;
    let mut service = Gated::start(&node, &config(selectors));
    service.open();
    Traffic::default()
        .cut("node to the target", Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.50:3260"))
        .cut("the target to the node", Flow::udp(&client, "10.9.0.50:3261", &node, "10.9.0.2:7001"))
        .cut("node to the target, IPv6", Flow::udp(&node, "[fd09::2]:0", &client, "[fd09::50]:3260"))
        .kept("node to the target's other port", Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.50:7002"))
        .kept("node to another target", Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.51:3260"))
        .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
        .judge(&mut service);
}

#[test]
fn a_whole_node_is_cut_but_for_what_is_exempt() {
    let world = World::new("scope-node");
    let (client, node) = pair(&world);
    let _server = serve(&node, &["10.9.0.2:22"]);
    let mut service = Gated::start(&node, &config(r#"scope = "node""#));
    service.open();
    let ssh = Echo::tcp(&client, "10.9.0.1:0", "10.9.0.2:22").rate(500).start();
    let wire = wire::Wire::open(&client, "eth0");
    let question = frames::arp(1, (wire::mac(&client, "eth0"), [10, 9, 0, 1].into()), ([0; 6], [10, 9, 0, 2].into()));
    let question = frames::ethernet([0xff; 6], wire::mac(&client, "eth0"), &[], frames::ARP, &question);
    let answered = || {
        let capture =
            portcullis_tests::traffic::Capture::start(&client, "eth0", |frame| frame.is_arp() && !frame.outgoing);
        wire.send(&question);
        assert!(clock::wait_until(SOON, || capture.frames() > 0), "ARP for the node's own address is not answered");
        capture.stop();
    };
    answered();
    Traffic::default()
        .cut("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
        .cut("node to client", Flow::udp(&node, "10.9.0.2:7001", &client, "10.9.0.1:7001"))
        .cut("client to node, IPv6", Flow::udp(&client, "[fd09::1]:0", &node, "[fd09::2]:7000"))
        .cut("node to client, IPv6", Flow::udp(&node, "[fd09::2]:7001", &client, "[fd09::1]:7001"))
        .cut("client to another address of the node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
        .kept("node to a name server", Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.1:53"))
        .kept("node to a name server, IPv6", Flow::udp(&node, "[fd09::2]:0", &client, "[fd09::1]:53"))
        .kept("node to a time server", Flow::udp(&node, "10.9.0.2:0", &client, "10.9.0.1:123"))
        .kept("lo", Flow::udp(&node, "127.0.0.1:0", &node, "127.0.0.1:7000"))
        .kept("lo, the node's own address", Flow::udp(&node, "10.9.0.2:0", &node, "10.9.0.2:7003"))
        .judge_closed(&mut service, |_| {
            answered();
            // A new connection to SSH, and the one that was there.
            let new = Echo::tcp(&client, "10.9.0.1:0", "10.9.0.2:22").start();
            assert!(clock::wait_until(SOON, || new.arrived() > 50), "SSH is not reached while closed");
        });
    let (ssh, _) = ssh.stop();
    println!("SSH through all of it: {ssh}");
    ssh.assert_whole();
}

#[test]
fn ssh_can_be_cut_too() {
    let world = World::new("scope-no-ssh");
    let (client, node) = pair(&world);
    let _server = serve(&node, &["10.9.0.2:22"]);
    let mut service = Gated::start(&node, &config_with("exempt_ssh = false", r#"scope = "node""#));
    service.open();
    let reached =
        || portcullis_tests::traffic::connect(&client, "10.9.0.2:22".parse().unwrap(), Duration::from_millis(300));
    assert!(reached().is_ok());
    service.close();
    assert_eq!(reached().map_err(|error| error.kind()).err(), Some(std::io::ErrorKind::TimedOut));
    service.open();
    let again = clock::wait_until(SOON, || reached().is_ok());
    assert!(again);
}

/// The agent is dead and the programs of the interfaces are gone: the root cgroup's still cut the host's own sockets.
#[test]
fn the_cgroup_s_backstop_cuts_alone() {
    let world = World::new("scope-backstop");
    let (client, node) = pair(&world);
    let _server = serve(&node, &["10.9.0.100:9000", "[fd09::100]:9000", "10.9.0.2:9000"]);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    let echo = |address: &str| Echo::udp(&client, "10.9.0.1:0", address).rate(500).start();
    let (cut, kept) = (echo("10.9.0.100:9000"), echo("10.9.0.2:9000"));
    let tcp = Echo::tcp(&client, "10.9.0.1:0", "10.9.0.100:9000").rate(500).start();
    assert!(clock::wait_until(SOON, || cut.arrived() > 50 && kept.arrived() > 50 && tcp.arrived() > 50));
    service.agent.kill();
    let links = node.bpffs().join("portcullis/v1/links");
    for entry in fs::read_dir(&links).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("tcx-") || name.starts_with("xdp-") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    // The kernel detaches when the last reference is gone, a moment later.
    let attached = || node.ip("-d link show dev eth0").contains("prog/xdp");
    assert!(clock::wait_until(SOON, || !attached()), "XDP is still attached");
    close_by_hand(&node);
    let closed = clock::now();
    // A socket of no cgroup below the root: it tells that nothing is left on the interfaces.
    let outsider = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").start();
    assert!(clock::wait_until(SOON, || outsider.arrived() > 50), "the interfaces' programs are still there");
    outsider.stop();
    let (cut, tcp, kept) = (cut.stop().0, tcp.stop().0, kept.stop().0);
    for (name, report) in [("UDP", &cut), ("TCP", &tcp)] {
        let report = report.between(closed, clock::now());
        println!("backstop alone, {name}: {} of {} passed", report.received(), report.sent());
        gate_lab::assert_nothing(name, &report);
    }
    kept.assert_whole();
}

/// Closes the gate as break-glass does: in the pinned map, with no agent.
fn close_by_hand(node: &Node) {
    use aya::maps::{Array, Map, MapData};
    use portcullis_common::layout::{Gate, GateName, maps};
    let pins = node.bpffs().join("portcullis/v1/maps");
    let names: Array<_, GateName> = Map::Array(MapData::from_pin(pins.join(maps::NAMES)).unwrap()).try_into().unwrap();
    let mut gates: Array<_, Gate> = Map::Array(MapData::from_pin(pins.join(maps::GATES)).unwrap()).try_into().unwrap();
    let slot = (0..64).find(|slot| names.get(slot, 0).unwrap().0.starts_with(b"vip\0")).unwrap();
    let gate = gates.get(&slot, 0).unwrap();
    assert!(gate.deadline_ns > FENCE_NUMBERS, "it was open");
    gates.set(slot, Gate { deadline_ns: 1, ..gate }, 0).unwrap();
}

#[test]
fn attached_only_to_fence() {
    let world = World::new("scope-on-fence");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config_with(r#"attach = "on-fence""#, WHOLE));
    let tc = |service: &Gated| service.interface("eth0")["tc"].clone();
    assert_eq!(tc(&service), "tcx", "it starts closed");
    let until_tc = |service: &Gated, wanted: &str| {
        assert!(clock::wait_until(SOON, || tc(service) == wanted), "tc never becomes {wanted}");
    };
    service.open();
    until_tc(&service, "none");
    let health = service.health();
    assert_eq!(health["ok"], false);
    assert!(health["degraded"].to_string().contains("on-fence"), "{health}");
    own_service(&client, &node).judge_closed(&mut service, |service| until_tc(service, "tcx"));
    service.open();
    until_tc(&service, "none");
    // What that forfeits, and what the status said: nobody is alive to attach anything at the deadline.
    service.close();
    service.open_for(Duration::from_secs(1));
    let flow = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").rate(500).start();
    until_tc(&service, "none");
    let deadline = node.deadline("vip");
    service.agent.kill();
    clock::sleep_until(deadline.saturating_add(Duration::from_millis(100)));
    let report = flow.stop();
    println!("on-fence, agent killed: {} packets sent after the deadline passed", report.received_sent_after(deadline));
    assert!(report.received_sent_after(deadline) > 0, "this forfeits nothing: {report}");
}

/// Each mode is what the status says, and cuts.
#[test]
fn every_mode_of_xdp_and_tc_cuts() {
    let cases = [
        ("xdp-native", r#"xdp = "native""#, "tcx", "native"),
        ("xdp-generic", r#"xdp = "generic""#, "tcx", "generic"),
        ("xdp-off", r#"xdp = "off""#, "tcx", "none"),
        ("tc-clsact", "xdp = \"off\"\ntc = \"clsact\"", "clsact", "none"),
        ("tc-clsact-xdp", "tc = \"clsact\"", "clsact", "native"),
    ];
    for (name, agent, tc, xdp) in cases {
        let world = World::new(name);
        let (client, node) = pair(&world);
        let mut service = Gated::start(&node, &config_with(agent, WHOLE));
        let covered = service.interface("eth0");
        println!("{name}: {covered}");
        assert_eq!((covered["tc"].as_str(), covered["xdp"].as_str()), (Some(tc), Some(xdp)));
        service.open();
        own_service(&client, &node).judge(&mut service);
    }
}
