//! Sockets carry their opening: what was written before or during a fence stays in the host after it, while new sockets and
//! forwarded traffic know only whether the gate is open.
#![allow(clippy::unwrap_used, reason = "tests")]

mod gate_lab;

use std::{
    io::{Read, Write},
    net::{TcpStream, UdpSocket},
    time::Duration,
};

use gate_lab::{Gated, WHOLE, config, pair, wire::drain, writer::Writer};
use portcullis_tests::{
    clock,
    traffic::{self, Capture, Flow, Frame},
    world::{Cgroup, Namespace, World},
};

const SOON: Duration = Duration::from_secs(10);

fn udp(namespace: &Namespace, at: &str) -> UdpSocket {
    let socket = namespace.run(|| UdpSocket::bind(at)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// Sends twenty datagrams and one from an address that no gate cuts; returns how many of the twenty arrived.
fn twenty(sender: &UdpSocket, inbox: &UdpSocket, own: &UdpSocket, control: &UdpSocket) -> usize {
    for _ in 0..20 {
        _ = sender.send_to(b"x", inbox.local_addr().unwrap());
    }
    own.send_to(b"x", control.local_addr().unwrap()).unwrap();
    assert!(clock::wait_until(SOON, || drain(control) > 0), "the control datagram did not arrive");
    drain(inbox)
}

#[test]
fn a_udp_socket_of_an_older_opening_stays_cut() {
    let world = World::new("sockets-udp");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config(WHOLE));
    let (inbox, control) = (udp(&client, "10.9.0.1:7000"), udp(&client, "10.9.0.1:7001"));
    let own = udp(&node, "10.9.0.2:0");
    // Bound before the first opening, but silent until a later one: it has written nothing that could be old.
    let silent = udp(&node, "10.9.0.100:7002");
    let closed_first = udp(&node, "10.9.0.100:7003");

    assert_eq!(twenty(&closed_first, &inbox, &own, &control), 0);
    service.open();
    let old = udp(&node, "10.9.0.100:7001");
    let first = twenty(&old, &inbox, &own, &control);
    service.close();
    let closed = twenty(&old, &inbox, &own, &control);
    service.open();
    let stale = twenty(&old, &inbox, &own, &control);
    let [new, silent] = [udp(&node, "10.9.0.100:0"), silent].map(|socket| twenty(&socket, &inbox, &own, &control));
    let counted = service.status()["counters"]["stale_packets"].as_u64().unwrap();
    println!(
        "UDP, of 20 each: first opening {first}, closed {closed}, the same socket in the next opening {stale} (counted \
         as stale: {counted}), a new socket {new}, one that had not sent before {silent}"
    );
    assert_eq!((first, closed, stale, new, silent), (20, 0, 0, 20, 20));
    assert!(counted >= 20);
    // What comes in is nobody's old data: the old socket receives.
    let asking = udp(&client, "10.9.0.1:0");
    assert!(clock::wait_until(SOON, || {
        asking.send_to(b"x", "10.9.0.100:7001").unwrap();
        drain(&old) > 0
    }));
}

/// The service writes on while the gate is closed and is killed; its socket lives on as an orphan, and the kernel tries to
/// deliver what it holds for minutes.
fn orphans(name: &str, port: u16, bury: impl FnOnce(&Cgroup)) {
    let world = World::new(name);
    let (client, node) = pair(&world);
    let cgroup = node.cgroup().child("service");
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    let mut writer = Writer::start(&node, &client, &cgroup, port);
    let from_service = move |frame: &Frame| {
        !frame.outgoing && frame.source_port() == Some(port) && frame.payload().is_some_and(|data| !data.is_empty())
    };
    let capture = Capture::start(&client, "eth0", from_service);
    assert!(clock::wait_until(SOON, || capture.frames() > 50), "no record is seen while the gate is open");
    let closing = service.close();
    // The stream has stopped, and its writer fills the socket.
    let queued = || {
        let listed = node.output("ss", &["-tnH", "state", "established", "sport", &format!("= {port}")]);
        listed.split_whitespace().nth(1).and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or(0)
    };
    assert!(clock::wait_until(SOON, || queued() > 4096), "the writer does not write on");
    writer.server.kill();
    let orphan = || node.output("ss", &["-tnH", "state", "fin-wait-1", "sport", &format!("= {port}")]);
    assert!(
        clock::wait_until(SOON, || !orphan().trim().is_empty()),
        "the kernel keeps no orphan: nothing is put to the test"
    );
    let held = orphan();
    bury(&cgroup);
    service.open();
    let reopened = clock::now();
    // The kernel has tried to deliver, and was refused by the open gate.
    service.agent.until("/v1/services/vip", |status| status["counters"]["stale_packets"].as_u64() > Some(0));
    // A new connection works, and outlasts another of the orphan's tries.
    let before = service.status()["counters"]["stale_packets"].as_u64();
    let again = Writer::start(&node, &client, &node.cgroup().child("again"), port + 1);
    service.agent.until("/v1/services/vip", |status| status["counters"]["stale_packets"].as_u64() > before);
    let captured = capture.stop();
    let late = captured.after(closing.after, |_| true);
    let stale = service.status()["counters"]["stale_packets"].clone();
    println!(
        "{name}: orphan {:?}; frames with data after closing: {}, refused as stale: {stale}",
        held.trim(),
        late.len()
    );
    assert_eq!(late, []);
    assert!(reopened > closing.after);
    drop((again, writer.connection));
}

#[test]
fn tcp_written_while_closed_never_arrives_from_a_killed_process() {
    orphans("sockets-orphan", 7000, |_| {});
}

#[test]
fn tcp_written_while_closed_never_arrives_from_a_removed_cgroup() {
    orphans("sockets-cgroup", 7000, |cgroup| {
        let removed = clock::wait_until(SOON, || std::fs::remove_dir(cgroup.path()).is_ok());
        assert!(removed, "{} cannot be removed", cgroup.path().display());
        std::fs::create_dir(cgroup.path()).unwrap();
    });
}

/// A live process whose connection is of the older opening: its data is refused for good, a new connection's is not.
#[test]
fn a_tcp_connection_of_an_older_opening_stays_cut() {
    let world = World::new("sockets-tcp");
    let (client, node) = pair(&world);
    let mut service = Gated::start(&node, &config(WHOLE));
    service.open();
    let mut writer = Writer::start(&node, &client, &node.cgroup().child("service"), 7000);
    let mut buffer = vec![0; 1 << 16];
    let mut read = |connection: &mut TcpStream| connection.read(&mut buffer).unwrap_or(0);
    assert!(clock::wait_until(SOON, || read(&mut writer.connection) > 0));
    service.close();
    while read(&mut writer.connection) > 0 {}
    let reopened_stale = service.status()["counters"]["stale_packets"].as_u64();
    service.open();
    service.agent.until("/v1/services/vip", |status| status["counters"]["stale_packets"].as_u64() > reopened_stale);
    assert_eq!(read(&mut writer.connection), 0, "data of the older opening arrived");
    let address = "10.9.0.100:7000".parse().unwrap();
    let mut connection = traffic::connect(&client, address, SOON).unwrap();
    connection.write_all(b"stream 500\n").unwrap();
    connection.set_nonblocking(true).unwrap();
    let mut received = 0;
    assert!(clock::wait_until(SOON, || {
        received += read(&mut connection);
        received > 10 * traffic::PAYLOAD
    }));
    assert_eq!(read(&mut writer.connection), 0, "data of the older opening arrived");
    println!("TCP: 0 bytes of the older opening's connection, {received} of a new one");
}

/// A container's sockets are not this host's: the deadline alone decides, and an old socket passes again.
#[test]
fn forwarded_traffic_is_judged_by_the_deadline_alone() {
    let world = World::new("sockets-forwarded");
    let (client, node) = pair(&world);
    let container = world.namespace("container");
    world.link(&node, "ct0", "10.88.0.1/24", &container, "eth0", "10.88.0.2/24");
    container.add_route("default via 10.88.0.1");
    client.add_route("10.88.0.0/24 via 10.9.0.2");
    node.forward();
    let mut service = Gated::start(&node, &config(r#"behind = ["10.88.0.2"]"#));
    service.open();
    let (inbox, control, own) =
        (udp(&client, "10.9.0.1:7000"), udp(&client, "10.9.0.1:7001"), udp(&node, "10.9.0.2:0"));
    let old = udp(&container, "10.88.0.2:7000");
    // The neighbours are known before anything is counted.
    let first = Flow::udp(&container, "10.88.0.2:0", &client, "10.9.0.1:7005").start();
    assert!(clock::wait_until(SOON, || first.arrived() > 0));
    drop(first);
    let open = twenty(&old, &inbox, &own, &control);
    service.close();
    let closed = twenty(&old, &inbox, &own, &control);
    service.open();
    let again = twenty(&old, &inbox, &own, &control);
    println!("forwarded, the same socket, of 20 each: open {open}, closed {closed}, open again {again}");
    assert_eq!((open, closed, again), (20, 0, 20));
}
