//! Every way by which a client reaches the service's address is cut: another interface, `lo`, a bridge port, an interface
//! that comes while the gate is closed, translation, tunnels. What is not the service's keeps flowing on the same way.
#![allow(clippy::unwrap_used, reason = "tests")]

mod gate_lab;

use std::{
    fs::File,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use gate_lab::{Gated, Traffic, WHOLE, asks_by_tcp, config, frames, pair, serve, skip, wire::drain};
use portcullis_tests::{
    clock,
    traffic::Flow,
    world::{Namespace, World},
};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn through_the_service_s_own_interface_in_both_families_and_directions() {
    let world = World::new("path-own");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
        .cut("client to service, IPv6", Flow::udp(&client, "[fd09::1]:0", &node, "[fd09::100]:7000"))
        .cut("service to client, IPv6", Flow::udp(&node, "[fd09::100]:7001", &client, "[fd09::1]:7001"))
        .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7002"))
        .kept("node to client, IPv6", Flow::udp(&node, "[fd09::2]:0", &client, "[fd09::1]:7002"))
        .judge(&mut service);
}

/// The weak host model: a host answers for each of its addresses on each of its interfaces.
#[test]
fn through_another_interface() {
    let world = World::new("path-other");
    let (_client, node) = pair(&world);
    let stranger = world.namespace("stranger");
    world.link(&stranger, "eth0", "10.9.1.1/24 fd91::1/64", &node, "eth1", "10.9.1.2/24 fd91::2/64");
    stranger.add_route("10.9.0.100/32 dev eth0");
    stranger.add_route("fd09::100/128 via fd91::2");
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    Traffic::default()
        .cut("by ARP on the other link", Flow::udp(&stranger, "10.9.1.1:0", &node, "10.9.0.100:7000"))
        .cut("and back", Flow::udp(&node, "10.9.0.100:7001", &stranger, "10.9.1.1:7001"))
        .cut("by a route, IPv6", Flow::udp(&stranger, "[fd91::1]:0", &node, "[fd09::100]:7000"))
        .kept("the other link's own address", Flow::udp(&stranger, "10.9.1.1:0", &node, "10.9.1.2:7002"))
        .judge(&mut service);
}

#[test]
fn f16_through_lo_and_a_local_route() {
    let world = World::new("path-lo");
    let (_client, node) = pair(&world);
    // Addresses that nobody has been given, but that the node takes for its own.
    node.add_route("local 10.9.7.0/24 dev lo");
    let _server = serve(&node, &["10.9.0.100:9000", "10.9.0.2:9000", "[fd09::100]:9000", "10.9.7.7:9000"]);
    let mut service = Gated::start(&node, &config(r#"addresses = ["10.9.0.100", "fd09::100", "10.9.7.0/24"]"#));
    service.open();
    for (address, reached) in [("10.9.0.100", true), ("fd09::100", true), ("10.9.7.7", true), ("10.9.0.2", true)] {
        assert_eq!(asks_by_tcp(&node, address, 9000), reached, "open: {address}");
    }
    Traffic::default()
        .cut("node to service", Flow::udp(&node, "10.9.0.2:0", &node, "10.9.0.100:7000"))
        .cut("loopback address to service", Flow::udp(&node, "127.0.0.1:0", &node, "10.9.0.100:7003"))
        .cut("node to service by a local route", Flow::udp(&node, "10.9.0.2:0", &node, "10.9.7.7:7000"))
        .cut("service to node", Flow::udp(&node, "10.9.0.100:7001", &node, "10.9.0.2:7001"))
        .cut("service to itself, IPv6", Flow::udp(&node, "[fd09::100]:0", &node, "[fd09::100]:7000"))
        .kept("node to itself", Flow::udp(&node, "10.9.0.2:0", &node, "10.9.0.2:7002"))
        .kept("loopback address", Flow::udp(&node, "127.0.0.1:0", &node, "127.0.0.1:7002"))
        .judge_closed(&mut service, |_| {
            for (address, reached) in
                [("10.9.0.100", false), ("fd09::100", false), ("10.9.7.7", false), ("10.9.0.2", true)]
            {
                assert_eq!(asks_by_tcp(&node, address, 9000), reached, "closed: {address}");
            }
        });
}

#[test]
fn through_a_bridge_port() {
    let world = World::new("path-bridge");
    let (client, node, guest, other) =
        (world.namespace("client"), world.node("node"), world.namespace("guest"), world.namespace("other"));
    world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "");
    world.link(&guest, "eth0", "10.9.0.100/24 fd09::100/64", &node, "tap0", "");
    world.link(&other, "eth0", "10.9.0.101/24 fd09::101/64", &node, "tap1", "");
    node.bridge("br0", &["eth0", "tap0", "tap1"], "10.9.0.2/24");
    let mut service = Gated::start(&node, &config(r#"behind = ["10.9.0.100", "fd09::100"]"#));
    service.open();
    Traffic::default()
        .cut("client to guest", Flow::udp(&client, "10.9.0.1:0", &guest, "10.9.0.100:7000"))
        .cut("guest to client", Flow::udp(&guest, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
        .cut("client to guest, IPv6", Flow::udp(&client, "[fd09::1]:0", &guest, "[fd09::100]:7000"))
        .cut("one guest to the other", Flow::udp(&other, "10.9.0.101:0", &guest, "10.9.0.100:7002"))
        .cut("node to guest", Flow::udp(&node, "10.9.0.2:0", &guest, "10.9.0.100:7003"))
        .kept("client to the other guest", Flow::udp(&client, "10.9.0.1:0", &other, "10.9.0.101:7000"))
        .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
        .judge(&mut service);
}

/// The gap until an interface is covered is closed by the cgroup's programs, which know no interfaces.
#[test]
fn through_an_interface_that_comes_while_closed() {
    let world = World::new("path-new");
    let (_client, node) = pair(&world);
    // The server is there before the address on which it waits.
    node.sysctl("net.ipv4.ip_nonlocal_bind", "1");
    let server = serve(&node, &["10.9.0.100:9000", "10.9.2.2:9000"]);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    service.close();
    let newcomer = world.namespace("newcomer");
    let (ends, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    let answered = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            newcomer.enter();
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_nonblocking(true).unwrap();
            let mut answered = 0;
            while !ends.load(Ordering::Relaxed) {
                // Refused as long as there is no link.
                let sent = socket.send_to(b"?", "10.9.0.100:9000").is_ok();
                asked.fetch_add(usize::from(sent), Ordering::Relaxed);
                answered += drain(&socket);
                clock::sleep_until(clock::now().saturating_add(Duration::from_micros(200)));
            }
            answered
        });
        world.link(&newcomer, "eth0", "10.9.2.1/24 10.9.0.9/24", &node, "eth2", "10.9.2.2/24");
        service.until_covered("eth2");
        let reached = ask(&newcomer, "10.9.2.2:9000", SOON);
        clock::wait_until(SOON, || asked.load(Ordering::Relaxed) > 200);
        ends.store(true, Ordering::Relaxed);
        assert!(reached, "the node's own address on the new link is not reached: {}", server.log());
        asking.join().unwrap()
    });
    let asked = asked.into_inner();
    println!("new interface: {asked} datagrams sent to the closed service, {answered} answered");
    assert!(asked > 200);
    assert_eq!(answered, 0);
    newcomer.remove_address("eth0", "10.9.0.9/24");
    newcomer.add_route("10.9.0.100/32 via 10.9.2.2");
    service.open();
    Traffic::default()
        .cut("through the new interface", Flow::udp(&newcomer, "10.9.2.1:0", &node, "10.9.0.100:7000"))
        .cut("and back", Flow::udp(&node, "10.9.0.100:7001", &newcomer, "10.9.2.1:7001"))
        .kept("its own address", Flow::udp(&newcomer, "10.9.2.1:0", &node, "10.9.2.2:7000"))
        .judge(&mut service);
}

/// Asks an echo server over UDP until it answers.
fn ask(from: &Namespace, to: &str, timeout: Duration) -> bool {
    let socket = from.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    socket.set_nonblocking(true).unwrap();
    clock::wait_until(timeout, || {
        _ = socket.send_to(b"?", to);
        drain(&socket) > 0
    })
}

#[test]
fn an_interface_that_is_renamed_or_comes_back_stays_covered() {
    let world = World::new("path-renamed");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config(WHOLE));
    let traffic = || {
        Traffic::default()
            .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
            .cut("service to client", Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
            .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
    };
    node.ip("link set eth0 down");
    node.ip("link set eth0 name wan0");
    node.ip("link set wan0 up");
    node.wait_up("wan0");
    service.until_covered("wan0");
    service.open();
    traffic().judge(&mut service);
    service.close();

    node.ip("link del wan0");
    world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "wan0", "10.9.0.2/24 fd09::2/64");
    node.add_address("wan0", "10.9.0.100/32");
    service.until_covered("wan0");
    service.open();
    traffic().judge(&mut service);
}

/// A container engine publishes a port: PREROUTING for clients from outside, OUTPUT for those on the node.
#[test]
fn through_translation_to_a_container() {
    let world = World::new("path-dnat");
    let (client, node) = pair(&world);
    let container = world.namespace("container");
    world.link(&node, "ct0", "10.88.0.1/24", &container, "eth0", "10.88.0.2/24");
    container.add_route("default via 10.88.0.1");
    client.add_route("10.88.0.0/24 via 10.9.0.2");
    node.forward();
    for port in [7000u16, 7001] {
        let from = format!("10.9.0.100:{port}").parse().unwrap();
        let to = format!("10.88.0.2:{}", port + 1000).parse().unwrap();
        node.dnat("udp", from, to);
    }
    let selectors = r#"
        addresses = ["10.9.0.100"]
        behind = ["10.88.0.2"]"#;
    let mut service = Gated::start(&node, &config(selectors));
    service.open();
    let translated = |from: &Namespace, source: &str, port: u16| {
        Flow::udp(from, source, &container, &format!("10.9.0.100:{port}"))
            .translated_to(&format!("10.88.0.2:{}", port + 1000))
    };
    Traffic::default()
        .cut("remote client, PREROUTING", translated(&client, "10.9.0.1:0", 7000))
        .cut("local client, OUTPUT", translated(&node, "10.9.0.2:0", 7001))
        .cut("straight to the container", Flow::udp(&client, "10.9.0.1:0", &container, "10.88.0.2:7005"))
        .cut("container to client", Flow::udp(&container, "10.88.0.2:7006", &client, "10.9.0.1:7006"))
        .kept("client to node", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7002"))
        .kept("container's gateway", Flow::udp(&node, "10.88.0.1:0", &node, "10.88.0.1:7003"))
        .judge(&mut service);
}

#[test]
fn through_a_vxlan_tunnel() {
    let world = World::new("path-vxlan");
    let (client, node) = pair(&world);
    for (host, own, other) in [(&client, "1", "2"), (&*node, "2", "1")] {
        host.ip(&format!(
            "link add vx0 type vxlan id 42 local 10.9.0.{own} remote 10.9.0.{other} dstport 4789 dev eth0"
        ));
        host.add_address("vx0", &format!("10.42.0.{own}/24"));
        host.ip("link set vx0 up");
    }
    node.add_address("vx0", "10.42.0.100/32");
    let mut service = Gated::start(&node, &config(r#"addresses = ["10.42.0.100"]"#));
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.42.0.1:0", &node, "10.42.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.42.0.100:7001", &client, "10.42.0.1:7001"))
        .kept("the node's address in the tunnel", Flow::udp(&client, "10.42.0.1:0", &node, "10.42.0.2:7000"))
        .kept("the node's address outside", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.2:7000"))
        .judge(&mut service);
}

#[test]
fn through_a_macvlan() {
    let world = World::new("path-macvlan");
    let (client, node) = pair(&world);
    node.remove_address("eth0", "10.9.0.100/32");
    node.ip("link add mv0 link eth0 type macvlan mode bridge");
    node.add_address("mv0", "10.9.0.100/24");
    node.ip("link set mv0 up");
    node.remove_address("eth0", "10.9.0.2/24");
    node.add_address("mv0", "10.9.0.3/24");
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001"))
        .kept("another address of the macvlan", Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.3:7000"))
        .judge(&mut service);
}

/// A tun device carries packets that start with the network header: other programs than elsewhere judge them.
#[test]
fn through_a_tun_device() {
    let world = World::new("path-tun");
    let (_client, node) = pair(&world);
    let mut tun = node.run(|| open_tun("tun0"));
    node.add_address("tun0", "10.77.0.2/24");
    node.ip("link set tun0 up");
    let inbox = node.run(|| UdpSocket::bind("10.9.0.100:7000")).unwrap();
    let control = node.run(|| UdpSocket::bind("10.77.0.2:7000")).unwrap();
    let outbox = || node.run(|| UdpSocket::bind("10.9.0.100:0")).unwrap();
    inbox.set_nonblocking(true).unwrap();
    control.set_nonblocking(true).unwrap();
    let mut service = Gated::start(&node, &config(WHOLE));

    let packet = |to: &UdpSocket| {
        let to = to.local_addr().unwrap();
        let from = SocketAddr::from((PEER, 7000));
        let SocketAddr::V4(target) = to else { unreachable!() };
        frames::ipv4(PEER, *target.ip(), frames::UDP, &frames::udp(from, to, b"in"))
    };
    // What comes in is counted at the sockets, what goes out at the device's other end.
    let mut exchange = || {
        for _ in 0..20 {
            assert_eq!(tun.write(&packet(&inbox)).unwrap(), packet(&inbox).len());
        }
        assert_eq!(tun.write(&packet(&control)).unwrap(), packet(&control).len());
        assert!(clock::wait_until(SOON, || drain(&control) > 0), "the control packet did not arrive");
        let sender = outbox();
        for _ in 0..20 {
            _ = sender.send_to(b"out", (PEER, 7000));
        }
        control.send_to(b"control", (PEER, 7000)).unwrap();
        let mut out = 0;
        let mut buffer = [0; 2048];
        loop {
            let length = tun.read(&mut buffer).unwrap();
            match &buffer[..length] {
                bytes if bytes.ends_with(b"control") => break,
                bytes if bytes.ends_with(b"out") => out += 1,
                _ => {}
            }
        }
        (drain(&inbox), out)
    };
    service.open();
    let open = exchange();
    service.close();
    let closed = exchange();
    service.open();
    let again = exchange();
    println!("tun: (in, out) of 20 each: open {open:?}, closed {closed:?}, open again {again:?}");
    assert_eq!((open, closed, again), ((20, 20), (0, 0), (20, 20)));
}

const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// A tun device without a header before the packets. It lives as long as the descriptor.
fn open_tun(name: &str) -> File {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let device = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    // SAFETY: plain integers and bytes, of which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI).unwrap();
    // SAFETY: the request is a `struct ifreq` that outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF, &raw mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    device
}

/// A VLAN's own interface. A kernel without them hands tagged frames to nobody; what tags hide is tested frame by frame.
#[test]
fn through_a_vlan_interface() {
    let world = World::new("path-vlan");
    let (client, node) = pair(&world);
    if !has_vlan_interfaces(&client) {
        return skip("through_a_vlan_interface", "this kernel was built without CONFIG_VLAN_8021Q");
    }
    for (host, own) in [(&client, "1"), (&*node, "2")] {
        host.ip("link add link eth0 name eth0.5 type vlan id 5");
        host.add_address("eth0.5", &format!("10.5.0.{own}/24"));
        host.ip("link set eth0.5 up");
    }
    node.add_address("eth0.5", "10.5.0.100/32");
    let mut service = Gated::start(&node, &config(r#"addresses = ["10.5.0.100"]"#));
    service.open();
    Traffic::default()
        .cut("client to service", Flow::udp(&client, "10.5.0.1:0", &node, "10.5.0.100:7000"))
        .cut("service to client", Flow::udp(&node, "10.5.0.100:7001", &client, "10.5.0.1:7001"))
        .kept("the node's address in the VLAN", Flow::udp(&client, "10.5.0.1:0", &node, "10.5.0.2:7000"))
        .judge(&mut service);
}

/// Only the kernel's own word for "no such kind of link" is a reason to skip.
fn has_vlan_interfaces(namespace: &Namespace) -> bool {
    let made =
        namespace.command("ip").args("link add link eth0 name probe.1 type vlan id 1".split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    match made.status.success() {
        true => {
            namespace.ip("link del probe.1");
            true
        }
        false if said.contains("Unknown device type") || said.contains("Operation not supported") => false,
        false => panic!("a VLAN interface cannot be made: {said}"),
    }
}
