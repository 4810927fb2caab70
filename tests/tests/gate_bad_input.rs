//! Bad input against an agent and its state: a clear error that says what to do, and the service stays fenced or as it was,
//! judged by its traffic.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    time::Duration,
};

use aya::maps::{Array, Map, MapData};
use portcullis_common::layout::maps;
use portcullis_tests::{
    clock,
    story::{CONFIG, Story},
    traffic::{Report, RunningFlow},
    world::Refusal,
};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(10);

/// Sends bytes to the agent's socket as they are; what it answers until it closes, or falls silent for half a second.
fn raw(story: &Story, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(story.node.socket()).expect("the agent listens");
    stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a socket option");
    stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a socket option");
    // The agent may hang up before it has taken everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Every bad request, with the HTTP status that it must be answered by; none: it is no HTTP.
fn bad_requests() -> Vec<(Vec<u8>, Option<u16>)> {
    let fence = "/v1/services/vip/fence";
    let lease = "/v1/services/vip/lease";
    let deep = [vec![b'['; 8000], vec![b']'; 8000]].concat();
    let mut requests = vec![
        (vec![0xff; 4096], None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), None),
        (format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(1 << 20)).into_bytes(), None),
        (format!("GET /v1/health HTTP/1.1\r\n{}\r\n", "X-Filler: y\r\n".repeat(100_000)).into_bytes(), None),
        (post("/v1/services/nobody/fence", b"{}"), Some(404)),
        (post("/v1/services/nobody/lease", b"{\"holder\":\"x\",\"ttl_ms\":1000}"), Some(404)),
        (post("/v1/nothing", b"{}"), Some(404)),
        (post("/v1/health", b"{}"), Some(405)),
        (post("/v1/services/%00%ff/fence", b"{}"), Some(400)),
        (post("/v1/services/..%2f..%2fetc/fence", b"{}"), Some(404)),
        (post(fence, &vec![b' '; 1 << 20]), Some(413)),
        (post(lease, &[b"{\"holder\":\"".as_slice(), &[b'x'; 300], b"\",\"ttl_ms\":1000}"].concat()), Some(400)),
    ];
    for body in [
        b"".as_slice(),
        b"not json",
        b"[]",
        b"{\"token\":\"1\"}",
        b"{\"token\":-1}",
        b"{\"token\":1e99}",
        b"{\"reason\":7}",
        b"{\"unknown\":true}",
        b"{\"reason\":\"\\u0000\"}",
        &deep,
        b"{\"reason\":\"\xff\xfe\"}",
    ] {
        // An empty body fences whichever holding there is; it is not bad.
        if !body.is_empty() {
            requests.push((post(fence, body), Some(400)));
        }
        requests.push((post(lease, body), Some(400)));
    }
    for ttl in ["0", "-1", "\"1s\"", "1e99", "18446744073709551616", "1"] {
        requests.push((post(lease, format!("{{\"holder\":\"x\",\"ttl_ms\":{ttl}}}").as_bytes()), Some(400)));
    }
    requests
}

fn send_all(story: &Story) -> usize {
    let requests = bad_requests();
    for (request, status) in &requests {
        let answer = raw(story, request);
        let shown = String::from_utf8_lossy(&request[..request.len().min(120)]).into_owned();
        match status {
            None => assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{shown}: {answer}"),
            Some(status) => {
                assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{shown}: {answer}");
                assert!(answer.contains("\"hint\":\""), "{shown}: {answer}");
            }
        }
    }
    requests.len()
}

#[test]
fn bad_requests_change_nothing() {
    let story = Story::new("requests-open");
    let mut holder = story.hold("2s");
    let token = story.status()["token"].clone();
    let flows = story.udp(1000);
    let requests = send_all(&story);
    flows.into_iter().for_each(|flow| flow.stop().assert_whole());
    let status = story.status();
    assert_eq!((&status["state"], &status["token"]), (&json!("serving"), &token), "{status}");

    holder.terminate();
    story.until_confirmed();
    let flood = story.flood(1000);
    send_all(&story);
    nothing(flood);
    assert!(story.is_fenced());
    println!("{requests} bad requests against an open and a closed gate: nothing changed");
}

#[test]
fn idle_and_half_open_connections_keep_no_command_out() {
    let story = Story::new("connections");
    let _holder = story.hold("2s");
    let stalled: Vec<UnixStream> = (0..500)
        .filter_map(|_| UnixStream::connect(story.node.socket()).ok())
        .map(|mut stream| {
            let _ = stream.write_all(b"POST /v1/services/vip/fence HTTP/1.1\r\nContent-Length: 9999\r\n");
            stream
        })
        .collect();
    let flows = story.udp(1000);
    assert!(clock::wait_until(WAIT, || flows.iter().all(|flow| flow.arrived() > 1000)));
    flows.into_iter().for_each(|flow| flow.stop().assert_whole());
    let fenced = story.node.portcullis(&["fence", "vip", "--reason", "test"]).output().expect("portcullis starts");
    assert!(fenced.status.success(), "{} stalled: {fenced:?}", stalled.len());
    assert!(story.is_fenced());
}

fn nothing(flood: Vec<RunningFlow>) -> usize {
    assert!(clock::wait_until(WAIT, || flood.iter().all(|flow| flow.sent() > 50)));
    let reports: Vec<Report> = flood.into_iter().map(RunningFlow::stop).collect();
    reports.iter().for_each(Report::assert_nothing_arrived);
    reports.iter().map(Report::sent).sum()
}

/// Starts a second time what must refuse to, under flood; returns the last line that it said.
#[track_caller]
fn refused(story: &Story, config: &str, words: &[&str]) -> String {
    let flood = story.flood(1000);
    let Refusal { status, log } = story.node.try_agent(config).expect_err("it must refuse to start");
    nothing(flood);
    assert_eq!(status.code(), Some(1), "{log}");
    let said = log.split_once("portcullis: ").map_or(log.as_str(), |(_, said)| said).to_owned();
    for word in words {
        assert!(said.contains(word), "{word} is missing: {log}");
    }
    assert!(!log.contains("panicked"), "{log}");
    println!("refused: {}", said.trim_end());
    said
}

#[test]
fn a_bad_configuration_at_the_start_leaves_the_service_fenced() {
    let mut story = Story::new("config");
    story.agent.kill();
    for (config, words) in [
        ("[[service", [".toml:", "1"]),
        (&CONFIG.replace("margin", "margn"), [".toml:", "margin"]),
        (&CONFIG.replace("10.9.0.100", "10.9.0.300"), [".toml:", "10.9.0.300"]),
        (&CONFIG.replace("\"100ms\"", "\"2s\""), [".toml:", "margin"]),
        (&format!("{CONFIG}{CONFIG}"), [".toml:", "vip"]),
    ] {
        refused(&story, config, &words);
    }
    story.agent.restart();
    story.until_confirmed();
}

#[test]
fn damaged_state_leaves_the_service_fenced() {
    let mut story = Story::new("state");
    let mut holder = story.hold("1s");
    holder.terminate();
    story.agent.terminate();
    let file = story.node.state().join("state.redb");
    let good = fs::read(&file).expect("it is there");
    let mut flipped = good.clone();
    flipped.iter_mut().skip(4096).step_by(97).for_each(|byte| *byte ^= 0x55);
    for bad in [&good[..good.len() / 2], &good[..100], &[], &vec![0xa5; good.len()], &flipped] {
        fs::write(&file, bad).expect("the disk has room");
        refused(&story, CONFIG, &["state.redb", "backup"]);
    }
    fs::remove_file(&file).expect("it is there");
    refused(&story, CONFIG, &["state.redb", "missing", "backup"]);
    fs::write(&file, &good).expect("the disk has room");
    story.agent.restart();
    story.until_confirmed();
    let _holder = story.hold("1s");
}

#[test]
fn foreign_maps_and_pins_are_refused() {
    let mut story = Story::new("pins");
    story.agent.kill();
    let pin = story.node.pin(maps::SETTINGS);
    let aside = pin.with_file_name("ASIDE");
    fs::rename(&pin, &aside).expect("bpffs renames");
    // Of another type and size, made by somebody else.
    let other = story.node.pin(maps::EVENTS);
    let data = MapData::from_pin(&other).expect("it is pinned");
    data.pin(&pin).expect("a free name");
    refused(&story, CONFIG, &[maps::SETTINGS]);
    fs::remove_file(&pin).expect("it is there");
    // None at all, beside programs that use it.
    refused(&story, CONFIG, &[maps::SETTINGS]);
    fs::rename(&aside, &pin).expect("bpffs renames");

    // What stands in a gate is nobody's deadline: beyond every TTL, or of a token that nobody issued.
    for (deadline, token) in [(u64::MAX, 1), (clock::now().as_nanos() + 1_000_000_000, 0)] {
        let path = story.node.pin(maps::GATES);
        let map = Map::Array(MapData::from_pin(&path).expect("it is pinned"));
        let mut gates: Array<_, portcullis_common::layout::Gate> = map.try_into().expect("the gates");
        let mut gate = gates.get(&0, 0).expect("readable");
        (gate.deadline_ns, gate.token) = (deadline, token);
        if token == 0 {
            // A mark that is above it.
            story.agent.restart();
            let mut holder = story.hold("1s");
            holder.terminate();
            story.agent.kill();
        }
        gates.set(0, gate, 0).expect("writable");
        story.agent.restart();
        story.until_confirmed();
        nothing(story.flood(1000));
        story.agent.kill();
    }
    story.agent.restart();
    let _holder = story.hold("1s");
}

/// No byte can be written any more: nothing is granted, what is held goes on, and fences still close.
#[test]
fn a_full_disk_grants_nothing_and_takes_nothing() {
    // As a full disk is: an error of the write. What we start inherits that no signal comes instead.
    // SAFETY: no handler is installed, and no other test waits for this signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let story = Story::new("disk");
    let mut holder = story.hold("2s");
    let flows = story.udp(1000);
    limit_files(&story, 0);
    assert!(clock::wait_until(WAIT, || flows.iter().all(|flow| flow.arrived() > 3000)));
    flows.into_iter().for_each(|flow| flow.stop().assert_whole());
    assert_eq!(story.status()["state"], "serving");
    assert_eq!(holder.ended(), None);

    holder.terminate();
    assert!(story.is_fenced());
    let flood = story.flood(1000);
    let body = json!({ "holder": "test", "ttl_ms": 1000 });
    let answer = story.agent.request("POST", "/v1/services/vip/lease", Some(&body)).expect("the agent answers");
    assert_eq!(answer.status, 503, "{}", answer.body);
    println!("full disk: {}", answer.body);
    assert!(answer.json()["error"]["hint"].to_string().contains("disk"), "{}", answer.body);
    nothing(flood);
    assert!(story.is_fenced());
    let fenced = story.node.portcullis(&["fence", "vip", "--reason", "test"]).output().expect("portcullis starts");
    assert!(fenced.status.success(), "{fenced:?}");

    limit_files(&story, u64::MAX);
    let unfenced = story.node.portcullis(&["unfence", "vip", "--reason", "test"]).output().expect("portcullis starts");
    assert!(unfenced.status.success(), "{unfenced:?}");
    let _holder = story.hold("1s");
}

/// The size to which the agent may write a file: what is there already can be read, and not be added to or replaced.
fn limit_files(story: &Story, bytes: u64) {
    let pid = Pid::from_raw(story.agent.pid().cast_signed()).expect("a process");
    let limit = Rlimit { current: (bytes < u64::MAX).then_some(bytes), maximum: None };
    prlimit(Some(pid), Resource::Fsize, limit).expect("root may");
}
