//! Cases that people who run failover have reported, each as a test of its kind of fault. The killed agent (F3) is among the
//! faults of `gate_deadline`.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use portcullis_common::layout::{Address, RuleSet, maps};
use portcullis_tests::{
    clock,
    story::{SERVERS, Story},
    traffic::{Capture, Echo, PAYLOAD, connect},
};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(10);
const AFTER: Duration = Duration::from_millis(300);

/// The manager hangs and the database goes on accepting: connections that stand and connections that are tried are cut.
#[test]
fn f05_the_manager_hangs_and_the_server_goes_on_accepting() {
    let mut story = Story::new("f05");
    let server = story.serve();
    let mut holder = story.hold("1s");
    let echoes: Vec<_> = [("10.9.0.1:0", SERVERS[0]), ("[fd09::1]:0", SERVERS[1])]
        .into_iter()
        .flat_map(|(from, to)| [Echo::tcp(&story.client, from, to), Echo::udp(&story.client, from, to)])
        .map(Echo::start)
        .collect();
    assert!(clock::wait_until(WAIT, || echoes.iter().all(|echo| echo.arrived() > 20)));
    story.agent.stop();
    holder.stop();
    let deadline = story.until_deadline();
    story.assert_no_connection();
    clock::sleep_until(deadline.saturating_add(AFTER));
    let mut packets = 0;
    for echo in echoes {
        let (report, _) = echo.stop();
        // There and back: what was on its way at the deadline is lost on one of them.
        let cut = report.cut_at(deadline);
        assert_eq!((cut.passed_after, cut.overtaken, cut.measurement_drops), (0, 0, 0), "{cut:?}");
        assert!(cut.sent_after > 100 && report.received() > 20, "{report}");
        packets += report.sent();
    }
    // The server never knew: its own host reaches nothing of it, and it still listens.
    assert!(story.node.output("ss", &["-Htln"]).contains("10.9.0.100:5432"));
    println!("f05: {packets} records, 0 after the deadline, no new connection");
    drop(server);
}

/// The agent is well and hears nothing from the holder: silence is no freshness, the deadline fires.
#[test]
fn f09_silence_of_the_holder_is_no_freshness() {
    let story = Story::new("f09");
    let mut holder = story.hold("1s");
    let flows = story.udp(1000);
    holder.stop();
    let deadline = story.until_deadline();
    // The agent knows by itself, and says why.
    let status = story.agent.until("/v1/services/vip", |service| service["state"] == "fenced");
    clock::sleep_until(deadline.saturating_add(AFTER));
    flows.into_iter().for_each(|flow| flow.stop().assert_cut(deadline));
    println!("f09: {}", status["reason"]);
    story.until_confirmed();
    // A holder that wakes up after its time is told so.
    holder.cont();
    let status = holder.wait(WAIT).expect("it ends");
    assert!(!status.success() && holder.log().contains("lost"), "{}", holder.log());
    assert!(story.is_fenced());
}

/// The lease is acquired, the data path was never programmed: nothing opens, and an alarm says so.
#[test]
fn f12_held_but_not_programmed_stays_fenced_and_raises_an_alarm() {
    let story = Story::new("f12");
    let pin = story.node.pin(maps::ADDRESSES);
    let map = Map::HashMap(MapData::from_pin(&pin).expect("it is pinned"));
    let mut rules: HashMap<_, Address, RuleSet> = map.try_into().expect("a map of rules");
    let addresses: Vec<Address> = rules.keys().collect::<Result<_, _>>().expect("readable");
    assert!(!addresses.is_empty());
    for address in &addresses {
        rules.remove(address).expect("it was there");
    }
    story.acquire(Duration::from_secs(2));
    let status = story.agent.until("/v1/services/vip", |service| {
        service["degraded"].as_array().is_some_and(|why| why.iter().any(|why| why.to_string().contains("cut")))
    });
    assert_eq!(status["state"], "fenced", "{status}");
    assert!(story.is_fenced());
    println!("f12: {}", status["degraded"]);
    let health = story.agent.get("/v1/health").expect("the agent answers").json();
    assert_eq!(health["ok"], false, "{health}");
    // Programmed again, it opens.
    let reloaded = story.node.portcullis(&["reload"]).output().expect("portcullis starts");
    assert!(reloaded.status.success(), "{reloaded:?}");
    let _holder = story.hold("1s");
}

/// Two transfers as fast as they go, one each way: at the deadline the bytes stop on the wire.
#[test]
fn f15_established_transfers_stop_in_both_directions() {
    let mut story = Story::new("f15");
    let _server = story.serve();
    let mut holder = story.hold("1s");
    let to = |server: &str| server.parse::<SocketAddr>().expect("an address");
    let streams: Vec<TcpStream> = SERVERS
        .iter()
        .flat_map(|server| [server, server])
        .map(|server| connect(&story.client, to(server), WAIT).expect("the gate is open"))
        .collect();
    let sizes = streams.iter().enumerate().map(|(number, stream)| {
        let mut stream = stream.try_clone().expect("a descriptor is free");
        stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a socket option");
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a socket option");
        std::thread::spawn(move || {
            let mut bytes = 0;
            // Down: the server writes as fast as records go. Up: what is echoed fills the window and is not read.
            if number % 2 == 0 {
                stream.write_all(b"stream 200000\n").expect("the server reads");
                let mut buffer = vec![0; 1 << 16];
                while let Ok(taken @ 1..) = stream.read(&mut buffer) {
                    bytes += taken;
                }
            } else {
                let mut reader = stream.try_clone().expect("a descriptor is free");
                let drain = std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 16];
                    let mut back = 0;
                    while let Ok(taken @ 1..) = reader.read(&mut buffer) {
                        back += taken;
                    }
                    back
                });
                while stream.write_all(&[7; 16 * PAYLOAD]).is_ok() {}
                bytes = drain.join().expect("it does not panic");
            }
            bytes
        })
    });
    let workers: Vec<_> = sizes.collect();
    let service = SERVERS.map(|server| to(server).ip());
    let capture = Capture::start(&story.client, "eth0", move |frame| {
        frame.payload().is_some_and(|payload| !payload.is_empty())
            && [frame.source(), frame.destination()].iter().flatten().any(|address| service.contains(address))
    });
    clock::sleep_until(clock::now().saturating_add(AFTER));
    story.agent.stop();
    holder.stop();
    let deadline = story.until_deadline();
    clock::sleep_until(deadline.saturating_add(AFTER));
    let bytes: Vec<usize> = workers.into_iter().map(|worker| worker.join().expect("it does not panic")).collect();
    let captured = capture.stop();
    assert!(bytes.iter().all(|bytes| *bytes > 100_000), "each transfer was under way: {bytes:?}");
    // Judged at the node's edge, seen a moment later at the client's.
    const PATH: Duration = Duration::from_millis(20);
    let late =
        captured.frames.iter().filter(|frame| !frame.outgoing && frame.at >= deadline.saturating_add(PATH)).count();
    assert_eq!(late, 0, "frames of the service arrived after the deadline");
    let before = captured.frames.iter().filter(|frame| !frame.outgoing && frame.at < deadline).count();
    let tried = captured.frames.iter().filter(|frame| frame.outgoing && frame.at > deadline).count();
    // Whether the client has anything to send again depends on what was acknowledged just before.
    assert!(before > 0, "nothing came before the deadline");
    let last = captured.frames.iter().rev().find(|frame| !frame.outgoing).map(|frame| frame.at.as_nanos());
    let last = last.unwrap_or_default().cast_signed() - deadline.as_nanos().cast_signed();
    println!("f15: {bytes:?} bytes before the deadline, the last frame at {} us, {tried} tries after it", last / 1000);
}

/// A command that comes late means a holding that is over: it does not hit the one that came after.
#[test]
fn f21_a_stale_command_is_refused() {
    let story = Story::new("f21");
    let mut first = story.hold("1s");
    let old = story.status()["token"].as_u64().expect("a token");
    first.kill();
    story.until_confirmed();
    let _second = story.hold("2s");
    let flows = story.udp(1000);
    let new = story.status()["token"].as_u64().expect("a token");
    assert!(new > old, "{new} > {old}");
    for verb in ["fence", "unfence"] {
        let late = story.node.portcullis(&[verb, "vip", "--token", &old.to_string(), "--reason", "late"]).output();
        let late = late.expect("portcullis starts");
        let said = String::from_utf8_lossy(&late.stderr).into_owned();
        assert!(!late.status.success() && said.contains(&new.to_string()), "{said}");
        println!("f21: {}", said.trim_end());
    }
    let answer = story.agent.request("PUT", "/v1/services/vip/lease", Some(&json!({ "token": old })));
    assert_eq!(answer.expect("the agent answers").status, 409);
    let released = story.agent.request("DELETE", &format!("/v1/services/vip/lease?token={old}"), None);
    assert_eq!(released.expect("the agent answers").status, 409);
    assert!(clock::wait_until(WAIT, || flows.iter().all(|flow| flow.arrived() > 200)));
    flows.into_iter().for_each(|flow| flow.stop().assert_whole());
    assert_eq!(story.status()["state"], "serving");
    // One that means this holding is obeyed.
    let now = story.node.portcullis(&["fence", "vip", "--token", &new.to_string(), "--reason", "meant"]).output();
    assert!(now.expect("portcullis starts").status.success());
    assert!(story.is_fenced());
}
