//! The test world tests itself: a harness that counts wrongly, or leaves things behind, proves nothing.

use std::{
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use portcullis_tests::{
    clock, residue,
    traffic::{self, Capture, Echo, Flow, HEAVY, Stream},
    world::{self, Namespace, Node, World},
};

const SERVICE: &str = "10.9.0.100";
const SERVICE_V6: &str = "fd09::100";

/// A client and a node with a service address on one link.
fn pair(world: &World) -> (Namespace, Node) {
    let client = world.namespace("client");
    let node = world.node("node");
    world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
    node.add_address("eth0", "10.9.0.100/32");
    node.add_address("eth0", "fd09::100/128");
    (client, node)
}

/// Lets traffic run for a while: here time itself is the condition.
fn run_for(span: Duration) {
    clock::sleep_until(clock::now().saturating_add(span));
}

#[test]
fn light_traffic_arrives_whole_in_every_direction_and_family() {
    let world = World::new("light");
    let (client, node) = pair(&world);
    let flows = [
        Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").start(),
        Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001").start(),
        Flow::udp(&client, "[fd09::1]:0", &node, "[fd09::100]:7000").start(),
        Flow::udp(&node, "[fd09::100]:7001", &client, "[fd09::1]:7001").start(),
    ];
    let streams = [
        Stream::tcp(&client, "10.9.0.1:0", &node, "10.9.0.100:5432").start(),
        Stream::tcp(&client, "[fd09::1]:0", &node, "[fd09::100]:5432").start(),
    ];
    run_for(Duration::from_millis(500));
    for flow in flows {
        let report = flow.stop();
        report.assert_whole();
        assert!(report.sent() > 250, "{report}");
    }
    for stream in streams {
        let report = stream.stop();
        report.to_client.assert_whole();
        report.to_server.assert_whole();
        assert!(report.to_client.sent() > 250, "{}", report.to_client);
    }
}

#[test]
fn heavy_traffic_arrives_whole_and_the_capture_counts_the_same() {
    let _heavy = world::heavy();
    let world = World::new("heavy");
    let (client, node) = pair(&world);
    let capture = Capture::start(&client, "eth0", |frame| frame.stamp().is_some_and(|stamp| !stamp.is_hello()));
    let flow = Flow::udp(&node, "10.9.0.100:7000", &client, "10.9.0.1:7000").rate(HEAVY).start();
    run_for(Duration::from_secs(1));
    let report = flow.stop();
    let captured = capture.stop();
    println!("{report}");
    report.assert_whole();
    // How much of the wanted rate is reached is up to the machine's other load; what is reached must be counted right.
    assert!(report.rate() > 0.2 * f64::from(HEAVY), "{report}");
    assert_eq!(captured.drops, 0);
    assert_eq!(captured.frames.len(), report.sent());
    for (frame, packet) in captured.frames.iter().zip(&report.packets) {
        assert_eq!(frame.stamp().map(|stamp| stamp.sent_at), Some(packet.sent_at));
        assert_eq!(frame.source(), Some(SERVICE.parse().expect("an address")));
        assert!(!frame.outgoing && frame.at >= packet.sent_at);
    }
}

#[test]
fn a_cut_at_a_known_instant_is_measured_on_both_sides() {
    let world = World::new("cut");
    let (client, node) = pair(&world);
    let flows = [
        Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").start(),
        Flow::udp(&node, "10.9.0.100:7001", &client, "10.9.0.1:7001").start(),
    ];
    let stream = Stream::tcp(&client, "10.9.0.1:0", &node, "10.9.0.100:5432").start();
    let capture = Capture::start(&client, "eth0", |frame| frame.source() == SERVICE.parse().ok());
    run_for(Duration::from_millis(200));

    let before = clock::now();
    node.nft(
        "table netdev cut {
            chain in { type filter hook ingress device eth0 priority 0; ip daddr 10.9.0.100 drop; arp daddr ip 10.9.0.100 drop; }
            chain out { type filter hook egress device eth0 priority 0; ip saddr 10.9.0.100 drop; arp saddr ip 10.9.0.100 drop; }
        }",
    );
    let after = clock::now();
    run_for(Duration::from_millis(300));

    let refused = traffic::connect(&client, "10.9.0.100:5432".parse().expect("an address"), Duration::from_millis(200));
    assert_eq!(refused.map_err(|e| e.kind()).err(), Some(std::io::ErrorKind::TimedOut));
    let stream = stream.stop();
    for report in flows.map(traffic::RunningFlow::stop).iter().chain([&stream.to_client, &stream.to_server]) {
        let cut = report.cut_at(after);
        println!("{cut:?}");
        assert_eq!((cut.passed_after, cut.overtaken, cut.measurement_drops), (0, 0, 0), "{report}");
        let first_lost = report.packets.iter().find(|packet| packet.arrived_at.is_none()).expect("something was lost");
        assert!(first_lost.returned_at >= before.saturating_sub(cut.in_flight), "{first_lost:?}, {before}: {cut:?}");
        assert!(report.between(clock::now().saturating_sub(Duration::from_secs(60)), before).received() > 100);
        // What the report says of a deadline that was not kept: too early, and too late.
        assert!(report.cut_at(before.saturating_sub(Duration::from_millis(100))).verify().is_err());
        assert!(report.cut_at(after.saturating_add(Duration::from_millis(100))).verify().is_err());
    }
    let captured = capture.stop();
    assert!(captured.since(before.saturating_sub(Duration::from_millis(100)), |_| true).len() > 50);
    assert_eq!(captured.after(after, |_| true), []);
}

#[test]
fn a_reset_of_an_established_connection_is_seen() {
    let world = World::new("reset");
    let (client, node) = pair(&world);
    let stream = Stream::tcp(&client, "[fd09::1]:0", &node, &format!("[{SERVICE_V6}]:5432")).start();
    assert!(clock::wait_until(Duration::from_secs(5), || stream.arrived_at_client() > 10));
    let before = clock::now();
    node.nft(
        "table inet cut { chain in { type filter hook input priority 0; tcp dport 5432 reject with tcp reset\n}\n}",
    );
    run_for(Duration::from_millis(100));
    let saw = stream.stop().client_saw.expect("the client saw the reset");
    assert_eq!(saw.kind, std::io::ErrorKind::ConnectionReset);
    assert!(saw.at >= before);
}

#[test]
fn a_real_server_answers_and_streams() {
    use std::io::{Read, Write};
    let world = World::new("server");
    let (client, node) = pair(&world);
    let addresses = ["10.9.0.100:7000", "[fd09::100]:7000"];
    let mut server = node.spawn("server", node.command(world::binary("testserver")).args(addresses));
    assert!(clock::wait_until(Duration::from_secs(5), || server.log() == "ready\n"), "{}", server.log());
    let echoes = [
        Echo::tcp(&client, "10.9.0.1:0", addresses[0]).start(),
        Echo::tcp(&client, "[fd09::1]:0", addresses[1]).start(),
        Echo::udp(&client, "10.9.0.1:0", addresses[0]).start(),
        Echo::udp(&client, "[fd09::1]:0", addresses[1]).start(),
    ];
    for echo in echoes {
        assert!(clock::wait_until(Duration::from_secs(5), || echo.arrived() > 100));
        let (report, broken) = echo.stop();
        report.assert_whole();
        assert_eq!(broken, None);
    }
    let to = addresses[0].parse().expect("an address");
    let mut stream = traffic::connect(&client, to, Duration::from_secs(5)).expect("the server accepts");
    stream.write_all(b"stream 1000\n").expect("the server reads");
    for sequence in 0..10 {
        let mut record = [0; traffic::PAYLOAD];
        stream.read_exact(&mut record).expect("the server writes");
        assert_eq!(traffic::Stamp::read(&record).map(|stamp| stamp.sequence), Some(sequence));
    }
    server.stop();
    server.kill();
}

#[test]
fn a_closed_path_is_told_from_an_open_one() {
    let world = World::new("closed");
    let (client, node) = pair(&world);
    node.remove_address("eth0", "10.9.0.100/32");
    let closed = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000");
    let failed = std::panic::catch_unwind(|| closed.clone().start());
    assert!(failed.is_err(), "the receiver cannot even bind");
    let flow = closed.translated_to("10.9.0.2:7000").start_closed();
    assert!(clock::wait_until(Duration::from_secs(5), || flow.sent() > 100));
    flow.stop().assert_nothing_arrived();
}

#[test]
fn traffic_is_followed_over_a_bridge_and_through_a_translation() {
    let world = World::new("bridge");
    let client = world.namespace("client");
    let host = world.node("host");
    let container = world.namespace("container");
    world.link(&client, "eth0", "10.9.0.1/24", &host, "eth0", "10.9.0.2/24");
    world.link(&container, "eth0", "172.18.0.2/24", &host, "port0", "");
    host.bridge("br0", &["port0"], "172.18.0.1/24");
    host.forward();
    container.add_route("default via 172.18.0.1");
    host.dnat("udp", "10.9.0.2:80".parse().expect("an address"), "172.18.0.2:8080".parse().expect("an address"));
    let flow = Flow::udp(&client, "10.9.0.1:0", &container, "10.9.0.2:80").translated_to("172.18.0.2:8080").start();
    assert!(clock::wait_until(Duration::from_secs(5), || flow.arrived() > 100));
    flow.stop().assert_whole();
}

#[test]
fn processes_run_in_their_node_and_end_with_it() {
    let world = World::new("process");
    let (_client, node) = pair(&world);
    let mut sleeper = node.spawn("sleeper", node.command("sleep").arg("1000"));
    assert_eq!(node.cgroup().processes(), [sleeper.pid()]);
    let links = ["ip", "-brief", "link"];
    let mut nsenter = Command::new("nsenter");
    let entered = nsenter.arg(format!("--net={}", node.path().display())).args(links).output().expect("nsenter runs");
    assert_eq!(String::from_utf8_lossy(&entered.stdout), node.output(links[0], &links[1..]));
    sleeper.stop();
    assert_eq!(sleeper.ended(), None);
    sleeper.cont();
    assert!(!sleeper.terminate().success());

    // A grandchild that its parent left alone is the world's to end.
    let mut parent = node.spawn("parent", node.command("sh").args(["-c", "sleep 1000 & echo started"]));
    assert!(parent.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
    assert_eq!(parent.log(), "started\n");
    let [orphan] = node.cgroup().processes()[..] else { panic!("one process is left in the node's cgroup") };
    let cgroup = node.cgroup().path().to_owned();
    drop(world);
    assert!(!cgroup.exists() && !std::path::Path::new(&format!("/proc/{orphan}/ns/net")).exists());
}

#[test]
fn what_a_test_leaves_in_its_world_fails_it() {
    let world = World::new("stray");
    let namespace = world.namespace("host");
    // Outside of the node's cgroup, and nobody's.
    let mut stray = namespace.command("sleep").arg("1000").spawn().expect("sleep starts");
    let message = std::panic::catch_unwind(move || drop(world)).expect_err("the stray process is reported");
    let message = message.downcast::<String>().expect("a message");
    assert!(message.contains(&format!("process {} (sleep) in the namespace host", stray.id())), "{message}");
    assert!(!stray.wait().expect("it was killed").success());
}

/// Stories that end in ways which a test process does not survive: told by a child, see [`tell`].
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn story_child() {
    let story = std::env::var("PORTCULLIS_STORY").unwrap_or_default();
    let world = World::new("story");
    let (client, node) = pair(&world);
    let _sleeper = node.spawn("sleeper", node.command("sleep").arg("1000"));
    let _flow = Flow::udp(&client, "10.9.0.1:0", &node, "10.9.0.100:7000").start();
    println!("\nworld {}", world.id());
    match story.as_str() {
        "panic" => panic!("as told"),
        "hang" => loop {
            std::thread::park();
        },
        _ => {}
    }
}

/// Runs this test program again with one of the stories above; returns the world's name, and the running child.
fn tell(story: &str) -> (std::process::Child, String) {
    use std::io::BufRead;
    let mut child = Command::new(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", "story_child", "--ignored", "--nocapture"])
        .env("PORTCULLIS_STORY", story)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the test program starts");
    let lines = std::io::BufReader::new(child.stdout.take().expect("piped above")).lines();
    let id = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("world ").map(str::to_owned));
    (child, id.expect("the story starts with the world's name"))
}

fn items_of(id: &str) -> Vec<String> {
    residue::ours().into_iter().filter(|item| item.contains(id)).collect()
}

#[test]
fn a_panicking_test_leaves_nothing() {
    let (mut child, id) = tell("panic");
    let status: ExitStatus = child.wait().expect("the child is waited for");
    assert!(!status.success());
    assert_eq!(items_of(&id), [""; 0]);
}

#[test]
fn what_a_killed_test_leaves_is_found_and_removed() {
    let (mut child, id) = tell("hang");
    let own = World::new("bystander");
    child.kill().expect("the child is killed");
    child.wait().expect("the child is waited for");
    for kind in ["world ", "cgroup ", "mount "] {
        assert!(items_of(&id).iter().any(|item| item.starts_with(kind)), "{kind}: {:?}", items_of(&id));
    }
    let residue = |verb: &str| Command::new(env!("CARGO_BIN_EXE_residue")).arg(verb).output().expect("it starts");
    let check = residue("check");
    assert_eq!(check.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&check.stdout).contains(&id));
    assert!(String::from_utf8_lossy(&residue("clean").stdout).contains(&id));
    assert_eq!(items_of(&id), [""; 0]);
    assert!(own.folder().exists(), "the world of a living process is nobody else's to remove");
}

#[test]
fn a_leaked_namespace_mount_or_link_is_found_against_a_snapshot() {
    let _alone = world::heavy();
    let world = World::new("leak");
    let before = residue::Snapshot::take();
    let found = |kind: &str| {
        let since = residue::Snapshot::from_text(&residue::Snapshot::take().to_string()).since(&before);
        since.into_iter().filter(|item| item.starts_with(kind)).count()
    };
    let leaked = world.namespace("leaked");
    assert!(found("namespace ") > 0, "a namespace that a descriptor keeps");
    let bpffs = world.bpffs("bpf");
    assert!(found(&format!("mount {}", bpffs.display())) == 1);
    let inode = format!("namespace net:[{}]", leaked.inode());
    assert_eq!(found(&inode), 1);
    drop(leaked);
    drop(world);
    assert_eq!(found(&inode), 0);
    assert_eq!(found(&format!("mount {}", bpffs.display())), 0);
}
