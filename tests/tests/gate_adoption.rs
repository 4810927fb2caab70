//! Start-up, reload, upgrade and a second agent never open a gate, never close one before its deadline, and let nothing slip;
//! a renewal that races a fence loses. What crashes is in `gate_crash`.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use portcullis_tests::{
    clock,
    story::{CONFIG, EndOnDrop, Story, is_long},
    traffic::{Flow, Report, RunningFlow, RunningStream},
    world,
};
use serde_json::json;

/// With room for a restart on a busy machine.
const PATIENT: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "20s" }
margin = "100ms"
addresses = ["10.9.0.100", "fd09::100"]
"#;

/// Another service beside the one under test.
const NEIGHBOUR: &str = r#"
[[service]]
name = "neighbour"
lease = { source = "local", ttl = "2s" }
margin = "100ms"
addresses = ["10.9.0.77"]
"#;

const WAIT: Duration = Duration::from_secs(10);

/// Until every flow has sent `more` packets.
#[track_caller]
fn until_sent(flows: &[RunningFlow], more: u64) {
    let goals: Vec<u64> = flows.iter().map(|flow| flow.sent() + more).collect();
    let sent = || flows.iter().zip(&goals).all(|(flow, goal)| flow.sent() >= *goal);
    assert!(clock::wait_until(WAIT, sent), "the flows do not send");
}

fn whole(flows: Vec<RunningFlow>, streams: Vec<RunningStream>) -> usize {
    let mut reports: Vec<Report> = flows.into_iter().map(RunningFlow::stop).collect();
    for stream in streams.into_iter().map(RunningStream::stop) {
        assert_eq!((stream.client_saw, stream.server_saw), (None, None));
        reports.extend([stream.to_server, stream.to_client]);
    }
    reports.iter().for_each(Report::assert_whole);
    reports.iter().map(Report::sent).sum()
}

fn nothing(flood: Vec<RunningFlow>) -> usize {
    let reports: Vec<Report> = flood.into_iter().map(RunningFlow::stop).collect();
    reports.iter().for_each(Report::assert_nothing_arrived);
    reports.iter().map(Report::sent).sum()
}

#[test]
fn an_agent_dies_and_returns_under_traffic_and_the_holder_goes_on() {
    let mut story = Story::with("dies-open", PATIENT);
    let mut holder = story.hold("10s");
    let token = story.status()["token"].clone();
    let flows = story.udp(1000);
    let streams = story.streams(1000);
    for round in 0..4 {
        // Killed, and asked to stop, as an upgrade does.
        if round % 2 == 0 {
            story.agent.kill()
        } else {
            story.agent.terminate()
        };
        until_sent(&flows, 100);
        story.agent.restart();
        let adopted = story.status();
        assert_eq!((&adopted["state"], &adopted["token"]), (&json!("serving"), &token), "{adopted}");
        story.agent.until("/v1/services/vip", |service| service["reason"] == "the deadline is proven");
    }
    let packets = whole(flows, streams);
    assert_eq!(story.status()["token"], token);
    assert_eq!(holder.ended(), None, "{}", holder.log());
    println!("4 restarts of the agent under an open gate: {packets} packets, 0 lost, the same token");
}

/// An upgrade is the start of a binary over the pins of another: every program is replaced while packets meet it.
#[test]
fn restarts_and_upgrades_under_flood_let_nothing_slip() {
    let _heavy = world::heavy();
    let mut story = Story::new("dies-closed");
    let flood = story.flood(5_000);
    let rounds = if is_long() { 100 } else { 10 };
    for round in 0..rounds {
        if round % 2 == 0 {
            story.agent.kill()
        } else {
            story.agent.terminate()
        };
        until_sent(&flood, 100);
        story.agent.restart();
        until_sent(&flood, 100);
    }
    story.until_confirmed();
    println!("{rounds} restarts under flood: {} packets against a closed gate, 0 slipped", nothing(flood));
}

#[test]
fn a_second_agent_is_refused_by_the_pid_of_the_first() {
    let story = Story::new("second");
    let _holder = story.hold("2s");
    let flows = story.udp(1000);
    let refusal = story.node.try_agent(CONFIG).expect_err("there is an agent already");
    let pid = story.agent.pid().to_string();
    assert!(refusal.log.split(|c: char| !c.is_ascii_digit()).any(|word| word == pid), "{pid}: {}", refusal.log);
    let last = refusal.log.lines().last().unwrap_or_default();
    println!("second agent: {last}");
    whole(flows, vec![]);

    let story = Story::new("second-closed");
    let flood = story.flood(1000);
    story.node.try_agent(CONFIG).expect_err("there is an agent already");
    until_sent(&flood, 100);
    nothing(flood);
}

/// `portcullis reload`: whether it was done, and what it said.
fn reload(story: &Story) -> (bool, String) {
    let output = story.node.portcullis(&["reload"]).output().expect("portcullis starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn a_reload_disturbs_no_traffic() {
    let story = Story::with("reload-open", PATIENT);
    let _holder = story.hold("10s");
    let token = story.status()["token"].clone();
    let flows = story.udp(1000);
    let streams = story.streams(1000);
    let narrow = PATIENT.to_owned() + "ports = [\"udp/7000-7001\", \"tcp/6000\"]\n";
    let wide = PATIENT.replace("\"10.9.0.100\"", "\"10.9.0.100\", \"10.9.0.101\", \"10.9.0.0/24\"");
    for config in [&(PATIENT.to_owned() + NEIGHBOUR), PATIENT, &narrow, &wide, &narrow, PATIENT] {
        story.agent.configure(config);
        let (done, said) = reload(&story);
        assert!(done, "{said}");
        until_sent(&flows, 200);
    }
    println!("6 reloads under an open gate: {} packets, 0 lost", whole(flows, streams));
    let status = story.status();
    assert_eq!((&status["state"], &status["token"]), (&json!("serving"), &token));
}

#[test]
fn a_reload_opens_nothing() {
    let story = Story::new("reload-closed");
    let flood = story.flood(2000);
    let narrow = CONFIG.to_owned() + "ports = [\"udp/7100-7101\"]\n";
    let wide = CONFIG.replace("\"10.9.0.100\"", "\"10.9.0.100\", \"10.9.0.101\", \"10.9.0.0/24\"");
    let mut many = CONFIG.to_owned();
    for number in 1..=200 {
        write!(
            many,
            "{}",
            NEIGHBOUR.replace("neighbour", &format!("n{number}")).replace("9.0.77", &format!("8.0.{number}"))
        )
        .expect("a string takes all");
    }
    for config in [&(CONFIG.to_owned() + NEIGHBOUR), CONFIG, &narrow, &wide, &narrow, &many, CONFIG] {
        story.agent.configure(config);
        let (done, said) = reload(&story);
        assert!(done, "{said}");
        until_sent(&flood, 100);
    }
    story.until_confirmed();
    println!("7 reloads under flood: {} packets against a closed gate, 0 slipped", nothing(flood));
}

#[test]
fn a_bad_file_is_refused_by_its_line_and_the_old_one_stays() {
    let story = Story::with("reload-bad", PATIENT);
    let _holder = story.hold("10s");
    let flows = story.udp(1000);
    let misspelt = PATIENT.replace("margin", "margn");
    let overlong = PATIENT.replace("\"100ms\"", "\"30s\"");
    for (bad, word) in [(misspelt.as_str(), "margn"), (&overlong, "margin"), ("[[service]\nname = 7", "service")] {
        story.agent.configure(bad);
        let (done, said) = reload(&story);
        assert!(!done, "{said}");
        // FILE:LINE:COLUMN, and the line itself.
        let place = said.split(".toml:").nth(1).and_then(|rest| rest.split(':').next());
        assert!(place.is_some_and(|line| line.parse::<u32>().is_ok()) && said.contains(word), "{said}");
        story.agent.reload();
        until_sent(&flows, 100);
        assert_eq!(story.status()["state"], "serving");
    }
    whole(flows, vec![]);

    let story = Story::new("reload-bad-closed");
    let flood = story.flood(1000);
    story.agent.configure("addresses = nonsense");
    assert!(!reload(&story).0);
    until_sent(&flood, 100);
    nothing(flood);
    story.until_confirmed();
}

/// Two holders of the same token renew without a pause; again and again somebody fences by command.
#[test]
fn a_renewal_that_races_a_fence_loses() {
    let story = Story::new("race");
    let token = story.acquire(Duration::from_secs(2));
    let ended = AtomicBool::new(false);
    let renewals = AtomicU64::new(0);
    let rounds = if is_long() { 2000 } else { 200 };
    let agent = &story.agent;
    thread::scope(|scope| {
        let _ended = EndOnDrop(&ended);
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let answer = agent.request("PUT", "/v1/services/vip/lease", Some(&json!({ "token": token })));
                    assert_eq!(answer.expect("the agent answers").status, 200);
                    renewals.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let flow = |from, to| Flow::udp(&story.client, from, &story.node, to).rate(2000).longest(WAIT * 12).start();
        let flows = [flow("10.9.0.1:0", "10.9.0.100:7000"), flow("[fd09::1]:0", "[fd09::100]:7000")];
        let command = |verb: &str| {
            let path = format!("/v1/services/vip/{verb}");
            let answer = agent.request("POST", &path, Some(&json!({ "reason": "race" }))).expect("the agent answers");
            assert_eq!(answer.status, 200, "{}", answer.body);
        };
        let mut fences = Vec::new();
        for _ in 0..rounds {
            command("fence");
            let fenced = clock::now();
            let (number, so_far) = (story.node.deadline("vip"), renewals.load(Ordering::Relaxed));
            until_sent(&flows, 5);
            assert!(clock::wait_until(WAIT, || renewals.load(Ordering::Relaxed) >= so_far + 5));
            assert_eq!(story.node.deadline("vip"), number, "somebody wrote a gate that was fenced");
            assert!(story.is_fenced());
            fences.push((fenced, clock::now()));
            command("unfence");
            let goals = flows.each_ref().map(|flow| flow.arrived() + 2);
            let open = || flows.iter().zip(&goals).all(|(flow, goal)| flow.arrived() >= *goal);
            assert!(clock::wait_until(WAIT, open), "the gate does not open again: {}", story.status());
        }
        let mut sent = 0;
        for report in flows.map(RunningFlow::stop) {
            for (from, to) in &fences {
                let during = report.between(*from, *to);
                during.assert_nothing_arrived();
                sent += during.sent();
            }
        }
        println!(
            "{rounds} fences against {} renewals: {sent} packets while fenced, 0 passed",
            renewals.load(Ordering::Relaxed)
        );
    });
}
