//! An armed gate that is renewed drops no packet of its own service, and none of anybody else's, open or closed.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use portcullis_tests::{
    clock,
    story::{CONFIG, EndOnDrop, Story, is_long},
    traffic::{Flow, Report, RunningFlow, RunningStream, Stream},
    world,
};
use serde_json::json;

/// Of the service, through its open gate.
const PACKETS: usize = 10_000_000;
/// Packets per second that are asked for; the machine gives what it can.
const RATE: u32 = 400_000;
/// Records of one flow that are kept at a time.
const CHUNK: Duration = Duration::from_secs(3);

/// One direction and family after the other, as fast as the machine gives, beside light traffic of somebody else; all the
/// while the lease is renewed, by `run` and, every few milliseconds, by hand.
#[test]
fn ten_million_packets_pass_a_gate_that_is_renewed() {
    let _heavy = world::heavy();
    let story = Story::new("armed");
    let holder = story.hold("2s");
    let token = story.status()["token"].as_u64().expect("a token");
    let dropped = |story: &Story| story.status()["counters"]["dropped_packets"].clone();
    let (dropped_before, overflowed_before) = (dropped(&story), story.wire_drops());
    let foreign = foreign(&story, 500);
    let (client, node) = (&story.client, &story.node);
    let ends = [
        (client, "10.9.0.1:0", &**node, "10.9.0.100:7000"),
        (&**node, "10.9.0.100:7001", client, "10.9.0.1:7001"),
        (client, "[fd09::1]:0", &**node, "[fd09::100]:7000"),
        (&**node, "[fd09::100]:7001", client, "[fd09::1]:7001"),
    ];
    let ended = AtomicBool::new(false);
    let renewals = AtomicU64::new(0);
    let started = Instant::now();
    let wanted = if is_long() { 10 * PACKETS } else { PACKETS };
    let (mut passed, mut spoiled, mut full_ring) = (0, 0, 0);
    thread::scope(|scope| {
        let _ended = EndOnDrop(&ended);
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let renewal = story.agent.request("PUT", "/v1/services/vip/lease", Some(&json!({ "token": token })));
                assert_eq!(renewal.expect("the agent answers").status, 200);
                renewals.fetch_add(1, Ordering::Relaxed);
                clock::sleep_until(clock::now().saturating_add(Duration::from_millis(2)));
            }
        });
        for (from, source, to, destination) in ends.iter().cycle() {
            let overflowed_before = story.wire_drops();
            let flow = Flow::udp(from, source, to, destination).rate(RATE).longest(CHUNK * 2).start();
            clock::sleep_until(clock::now().saturating_add(CHUNK));
            let report = flow.stop();
            // What the measurement could not take says nothing, and does not count.
            if report.measurement_drops > 0 {
                assert!(spoiled < 10, "the machine is too busy to count: {report}");
                spoiled += 1;
            } else {
                let overflowed = story.wire_drops() - overflowed_before;
                assert!(report.lost() <= overflowed, "lost beyond the {overflowed} of a full ring: {report}");
                passed += report.received();
                full_ring += report.lost();
            }
            if passed >= wanted {
                break;
            }
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    let (others, lost) = ended_whole(foreign, vec![]);
    let overflowed = story.wire_drops() - overflowed_before;
    assert!(lost <= overflowed, "{lost} packets of others were lost, {overflowed} by a full ring");
    assert_eq!(dropped(&story), dropped_before, "what the gate itself says");
    println!(
        "{passed} packets of the service in {seconds:.1} s ({:.0}/s, {spoiled} stretches spoiled) and {others} of others, \
         0 dropped, {} renewals by hand; {full_ring} more never left the sender's full ring",
        passed as f64 / seconds,
        renewals.load(Ordering::Relaxed)
    );
    drop(holder);
}

/// Traffic that is not the service's: the node's own addresses, in both directions and families, and on `lo`.
fn foreign(story: &Story, rate: u32) -> Vec<RunningFlow> {
    let (client, node) = (&story.client, &story.node);
    let flows = [
        Flow::udp(client, "10.9.0.1:0", node, "10.9.0.2:7200"),
        Flow::udp(node, "10.9.0.2:7201", client, "10.9.0.1:7201"),
        Flow::udp(client, "[fd09::1]:0", node, "[fd09::2]:7200"),
        Flow::udp(node, "[fd09::2]:7201", client, "[fd09::1]:7201"),
        Flow::udp(node, "127.0.0.1:0", node, "127.0.0.1:7200"),
        Flow::udp(node, "[::1]:0", node, "[::1]:7200"),
    ];
    flows.into_iter().map(|flow| flow.rate(rate).longest(Duration::from_secs(1200)).start()).collect()
}

/// Connections that are not the service's.
fn foreign_streams(story: &Story) -> Vec<RunningStream> {
    let (client, node) = (&story.client, &story.node);
    let streams = [
        Stream::tcp(client, "10.9.0.1:0", node, "10.9.0.2:6200"),
        Stream::tcp(client, "[fd09::1]:0", node, "[fd09::2]:6200"),
    ];
    streams.into_iter().map(Stream::start).collect()
}

/// How many packets there were, and how many of them were lost; no connection broke.
#[track_caller]
fn ended_whole(flows: Vec<RunningFlow>, streams: Vec<RunningStream>) -> (usize, usize) {
    let mut reports: Vec<Report> = flows.into_iter().map(RunningFlow::stop).collect();
    for stream in streams.into_iter().map(RunningStream::stop) {
        assert_eq!((stream.client_saw, stream.server_saw), (None, None));
        reports.extend([stream.to_server, stream.to_client]);
    }
    assert!(
        reports.iter().all(|report| report.measurement_drops == 0 && report.sent() > 0),
        "the measurement lost packets"
    );
    (reports.iter().map(Report::sent).sum(), reports.iter().map(Report::lost).sum())
}

/// The gate closes and opens again and again; others notice nothing, not even on another port of the same address.
#[test]
fn a_closed_gate_is_nobody_elses() {
    let story = Story::with("others", &format!("{CONFIG}ports = [\"udp/7000-7001\", \"tcp/6000\"]\n"));
    let _holder = story.hold("2s");
    let (flows, streams) = (foreign(&story, 1000), foreign_streams(&story));
    let (client, node) = (&story.client, &story.node);
    let same_address = [
        Flow::udp(client, "10.9.0.1:0", node, "10.9.0.100:7300").start(),
        Flow::udp(node, "[fd09::100]:7301", client, "[fd09::1]:7301").start(),
    ];
    for _ in 0..20 {
        for (verb, state) in [("fence", "fenced"), ("unfence", "serving")] {
            let path = format!("/v1/services/vip/{verb}");
            let answer = story.agent.request("POST", &path, Some(&json!({}))).expect("the agent answers");
            assert_eq!(answer.status, 200, "{}", answer.body);
            story.agent.until("/v1/services/vip", |service| service["state"] == state);
            if state == "fenced" {
                let cut = Flow::udp(client, "10.9.0.1:0", node, "10.9.0.100:7000").rate(2000).start_closed();
                assert!(clock::wait_until(Duration::from_secs(5), || cut.sent() > 20));
                cut.stop().assert_nothing_arrived();
            }
        }
    }
    let (elsewhere, lost_elsewhere) = ended_whole(flows, streams);
    let (beside, lost_beside) = ended_whole(same_address.into(), vec![]);
    assert_eq!((lost_elsewhere, lost_beside), (0, 0), "packets of others were lost");
    println!("20 fences: {} packets of others, 0 lost", elsewhere + beside);
}
