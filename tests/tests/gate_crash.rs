//! An agent that dies at any instant of its start, of an assignment, of a change of the rules or of an opening opens nothing,
//! and closes nothing early; the next one starts as if nothing had been.

use std::{os::unix::process::ExitStatusExt as _, time::Duration};

use portcullis::core::time::BootInstant;
use portcullis_common::layout::FENCE_NUMBERS;
use portcullis_tests::{
    clock,
    story::{CONFIG, Story},
    traffic::{Report, RunningFlow},
};
use rustix::process::Signal;
use serde_json::json;

/// What must be different at this start for the point to be reached.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    /// A service that has no gate yet.
    Service,
    /// An interface that is not covered yet.
    Interface,
    /// Somebody who acquires the lease.
    Acquisition,
}

const POINTS: [(&str, Needs); 17] = [
    ("start-after-lock", Needs::Nothing),
    ("start-after-bpffs", Needs::Nothing),
    ("start-after-maps", Needs::Nothing),
    ("start-after-programs", Needs::Nothing),
    ("adopt-after-swap", Needs::Nothing),
    ("start-after-adopt", Needs::Nothing),
    ("attach-between-interfaces", Needs::Nothing),
    ("attach-before-cgroup", Needs::Nothing),
    ("start-after-attach", Needs::Nothing),
    ("tcx-after-attach", Needs::Interface),
    ("link-before-pin", Needs::Interface),
    ("link-after-pin", Needs::Interface),
    ("assign-before-close", Needs::Service),
    ("assign-before-name", Needs::Service),
    ("assign-after-name", Needs::Service),
    ("rules-between-changes", Needs::Service),
    ("open-before-deadline", Needs::Acquisition),
];

const WAIT: Duration = Duration::from_secs(15);

/// Starts the agent so that it dies at `point`.
#[track_caller]
fn crash(story: &mut Story, config: &str, (point, needs): (&str, Needs), number: usize) {
    story.agent.kill();
    match needs {
        Needs::Nothing | Needs::Acquisition => {}
        Needs::Service => {
            let name = format!("n{number}");
            let another =
                CONFIG.replace("vip", &name).replace("\"10.9.0.100\", \"fd09::100\"", "\"10.8.0.1\", \"fd08::1\"");
            story.agent.configure(&format!("{config}{another}"));
        }
        Needs::Interface => _ = story.node.ip(&format!("link add v{number} type veth peer name w{number}")),
    }
    story.agent.restart_to_crash_at(point);
    match needs {
        Needs::Nothing | Needs::Service | Needs::Interface => {}
        Needs::Acquisition => {
            let body = json!({ "holder": "test", "ttl_ms": 1000 });
            clock::wait_until(WAIT, || {
                // It dies instead of answering, or right after.
                let _ = story.agent.request("POST", "/v1/services/vip/lease", Some(&body));
                story.agent.ended().is_some()
            });
        }
    }
    let status = story.agent.wait(WAIT);
    let signal = status.and_then(|status| status.signal());
    assert_eq!(signal, Some(Signal::ABORT.as_raw()), "{point} was not reached: {status:?}");
    for name in (0..POINTS.len()).map(|number| format!("n{number}")) {
        let closed = story.node.gate(&name).is_none_or(|gate| gate.deadline_ns < FENCE_NUMBERS);
        assert!(closed, "{point}: the gate of {name} is open");
    }
}

#[test]
fn with_a_closed_gate_nothing_opens() {
    let mut story = Story::new("crash-closed");
    let flood = story.flood(1000);
    for (number, point) in POINTS.into_iter().enumerate() {
        crash(&mut story, CONFIG, point, number);
        assert!(story.is_fenced(), "{}: {:?}", point.0, story.node.gate("vip"));
    }
    let flood: Vec<Report> = flood.into_iter().map(RunningFlow::stop).collect();
    flood.iter().for_each(Report::assert_nothing_arrived);

    story.agent.restart();
    story.until_confirmed();
    let _holder = story.hold("2s");
    story.udp(1000).into_iter().for_each(|flow| flow.stop().assert_whole());
    let packets: usize = flood.iter().map(Report::sent).sum();
    println!("{} crashes under flood: {packets} packets against a closed gate, 0 slipped", POINTS.len());
}

#[test]
fn with_an_open_gate_nothing_closes_or_opens() {
    const LONG: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "2m" }
margin = "100ms"
addresses = ["10.9.0.100", "fd09::100"]
"#;
    let mut story = Story::with("crash-open", LONG);
    let holder = story.hold("2m");
    let token = story.status()["token"].clone();
    let deadline = |story: &Story| -> BootInstant { story.node.deadline("vip") };
    let before = deadline(&story);
    let flows = story.udp(1000);
    let points = POINTS.into_iter().filter(|(_, needs)| !matches!(needs, Needs::Acquisition));
    for (number, point) in points.enumerate() {
        crash(&mut story, LONG, point, number);
        assert_eq!(deadline(&story), before, "{}", point.0);
    }
    story.agent.restart();
    let adopted = story.status();
    assert_eq!((&adopted["state"], &adopted["token"]), (&json!("serving"), &token), "{adopted}");
    let flows: Vec<Report> = flows.into_iter().map(RunningFlow::stop).collect();
    flows.iter().for_each(Report::assert_whole);
    drop(holder);
    let packets: usize = flows.iter().map(Report::sent).sum();
    println!("{} crashes under an open gate: {packets} packets, 0 lost", POINTS.len() - 1);
}
