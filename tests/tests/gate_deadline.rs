//! The main job: at the deadline the service is cut in the kernel, whoever is stopped or dead by then.
//!
//! Each story holds the lease with the real command, runs stamped traffic in both directions, families and protocols past
//! a deadline, and judges by what the peer saw: nothing sent after the deadline arrived, nothing sent before was dropped.

use std::{
    hash::{BuildHasher, RandomState},
    thread,
    time::{Duration, Instant},
};

use portcullis::core::time::BootInstant;
use portcullis_tests::{
    clock,
    story::{SERVERS, Story, is_long, run_for},
    traffic::{Cut, Echo, Flow, HEAVY, Report, RunningFlow, RunningStream, StreamReport},
    world::{self, Process},
};

/// Who is out of action at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    HolderStopped,
    HolderKilled,
    AgentKilled,
    AgentStopped,
    BothStopped,
    BothKilled,
}

impl Fault {
    const ALL: [Self; 6] = [
        Self::HolderStopped,
        Self::HolderKilled,
        Self::AgentKilled,
        Self::AgentStopped,
        Self::BothStopped,
        Self::BothKilled,
    ];

    fn strike(self, story: &mut Story, holder: &mut Process) {
        match self {
            Self::HolderStopped => holder.stop(),
            Self::HolderKilled => _ = holder.kill(),
            Self::AgentKilled => _ = story.agent.kill(),
            Self::AgentStopped => story.agent.stop(),
            Self::BothStopped => {
                story.agent.stop();
                holder.stop();
            }
            Self::BothKilled => {
                story.agent.kill();
                holder.kill();
            }
        }
    }

    /// Brings the agent back, and sees that it fences for good and confirms it.
    fn recover(self, story: &mut Story) {
        match self {
            Self::HolderStopped | Self::HolderKilled => {}
            Self::AgentStopped | Self::BothStopped => story.agent.cont(),
            Self::AgentKilled | Self::BothKilled => story.agent.restart(),
        }
        story.until_confirmed();
    }
}

/// How far off the deadline the cuts of a test were, in the worst case.
#[derive(Debug, Default)]
struct Worst {
    cuts: usize,
    packets: usize,
    sent_after: usize,
    /// The sending of the last packet that passed, before the deadline.
    last_passed: Option<i64>,
    /// The sending of the first packet that was dropped, and its return.
    first_dropped: Option<(i64, i64)>,
}

impl Worst {
    #[track_caller]
    fn judge(&mut self, report: &Report, deadline: BootInstant) {
        report.assert_cut(deadline);
        self.note(report, &report.cut_at(deadline));
    }

    fn note(&mut self, report: &Report, cut: &Cut) {
        self.cuts += 1;
        self.packets += report.sent();
        self.sent_after += cut.sent_after;
        self.last_passed = self.last_passed.max(cut.last_passed_ns);
        let dropped = cut.first_dropped_ns.zip(cut.first_dropped_returned_ns);
        self.first_dropped = [self.first_dropped, dropped].into_iter().flatten().min_by_key(|(_, returned)| *returned);
    }

    fn add(&mut self, other: &Self) {
        self.cuts += other.cuts;
        self.packets += other.packets;
        self.sent_after += other.sent_after;
        self.last_passed = self.last_passed.max(other.last_passed);
        self.first_dropped =
            [self.first_dropped, other.first_dropped].into_iter().flatten().min_by_key(|(_, returned)| *returned);
    }

    fn print(&self, what: &str) {
        let micros = |ns: i64| ns / 1000;
        let (sent, returned) = self.first_dropped.unwrap_or_default();
        println!(
            "{what}: {} cuts, {} packets, {} sent after the deadline, 0 of them arrived; the last that passed was sent at \
             {} us, the first that was dropped at {}..{} us (0 is the deadline)",
            self.cuts,
            self.packets,
            self.sent_after,
            micros(self.last_passed.unwrap_or_default()),
            micros(sent),
            micros(returned),
        );
    }
}

/// Past the deadline, so that the cut is put to the test.
const AFTER: Duration = Duration::from_millis(300);

/// Strikes while traffic flows, and judges every flow; the streams are still there, and may try what they can.
fn cut(
    story: &mut Story,
    fault: Fault,
    holder: &mut Process,
    flows: Vec<RunningFlow>,
    worst: &mut Worst,
) -> BootInstant {
    fault.strike(story, holder);
    let deadline = story.until_deadline();
    clock::sleep_until(deadline.saturating_add(AFTER));
    for flow in flows {
        worst.judge(&flow.stop(), deadline);
    }
    deadline
}

fn judge_streams(streams: Vec<RunningStream>, deadline: BootInstant, worst: &mut Worst) -> Vec<StreamReport> {
    let reports: Vec<_> = streams.into_iter().map(RunningStream::stop).collect();
    for report in reports.iter().flat_map(|stream| [&stream.to_server, &stream.to_client]) {
        worst.judge(report, deadline);
    }
    reports
}

/// One whole story: cut, brought back, re-acquired; the old connections stay dead and new traffic flows.
fn story_of(name: &str, fault: Fault) {
    let mut story = Story::new(name);
    let _server = story.serve();
    let mut holder = story.hold("1s");
    let flows = story.udp(1000);
    let streams = story.streams(1000);
    let mut worst = Worst::default();
    let deadline = cut(&mut story, fault, &mut holder, flows, &mut worst);
    story.assert_no_connection();
    fault.recover(&mut story);
    story.assert_no_connection();

    holder.kill();
    let _holder = story.hold("1s");
    let reopened = clock::now();
    for server in SERVERS {
        let from = if server.starts_with('[') { "[fd09::1]:0" } else { "10.9.0.1:0" };
        let echo = Echo::tcp(&story.client, from, server).start();
        assert!(clock::wait_until(Duration::from_secs(5), || echo.arrived() > 100), "{server}");
        echo.stop().0.assert_whole();
    }
    let flows = story.udp(1000);
    // Both old connections try again, and are refused by an open gate.
    story.agent.until("/v1/services/vip", |service| service["counters"]["stale_packets"].as_u64() >= Some(2));
    flows.into_iter().for_each(|flow| flow.stop().assert_whole());
    for stream in judge_streams(streams, deadline, &mut worst) {
        for report in [stream.to_server, stream.to_client] {
            let late = report.packets.iter().filter(|packet| packet.arrived_at >= Some(reopened)).count();
            assert_eq!(late, 0, "data of the old opening arrived after the re-acquisition: {report}");
        }
    }
    worst.print(name);
}

#[test]
fn holder_stopped() {
    story_of("holder-stopped", Fault::HolderStopped);
}

#[test]
fn holder_killed() {
    story_of("holder-killed", Fault::HolderKilled);
}

#[test]
fn f03_agent_killed() {
    story_of("agent-killed", Fault::AgentKilled);
}

#[test]
fn agent_stopped() {
    story_of("agent-stopped", Fault::AgentStopped);
}

#[test]
fn both_stopped() {
    story_of("both-stopped", Fault::BothStopped);
}

#[test]
fn both_killed() {
    story_of("both-killed", Fault::BothKilled);
}

#[test]
fn a_clean_release_closes_at_once() {
    let story = Story::new("release");
    let mut holder = story.hold("2s");
    let flows = story.udp(1000);
    let streams = story.streams(1000);
    run_for(Duration::from_millis(200));
    let before = clock::now();
    holder.terminate();
    let after = clock::now();
    assert!(story.is_fenced(), "{:?}", story.status());
    clock::sleep_until(after.saturating_add(AFTER));
    let mut reports: Vec<Report> = flows.into_iter().map(RunningFlow::stop).collect();
    reports.extend(streams.into_iter().map(RunningStream::stop).flat_map(|s| [s.to_server, s.to_client]));
    for report in &reports {
        let cut = report.cut_at(after);
        assert_eq!((cut.passed_after, cut.overtaken, cut.measurement_drops), (0, 0, 0), "{report}");
        let first_lost = report.packets.iter().find(|packet| packet.arrived_at.is_none()).expect("something was lost");
        assert!(first_lost.returned_at >= before.saturating_sub(cut.in_flight), "{first_lost:?}, {before}: {cut:?}");
    }
    println!("release: closed within {:?} of SIGTERM to `run`", after.saturating_since(before));
    story.until_confirmed();
}

/// A few rounds, each with one flow as heavy as the machine gives, in another direction and family with another fault.
#[test]
fn heavy_rounds() {
    let _heavy = world::heavy();
    let mut story = Story::new("heavy-rounds");
    let mut worst = Worst::default();
    let mut rates = Vec::new();
    let faults = [Fault::HolderStopped, Fault::AgentKilled, Fault::AgentStopped, Fault::BothStopped];
    let ends = [
        ("10.9.0.1:0", "10.9.0.100:7000"),
        ("10.9.0.100:7001", "10.9.0.1:7001"),
        ("[fd09::1]:0", "[fd09::100]:7000"),
        ("[fd09::100]:7001", "[fd09::1]:7001"),
    ];
    let rounds = if is_long() { 40 } else { 4 };
    let mut round = 0;
    let mut spoiled = 0;
    while round < rounds {
        let (from, to) = ends[round % ends.len()];
        let fault = faults[round % faults.len()];
        let (source, destination) =
            if from.ends_with(":0") { (&story.client, &*story.node) } else { (&*story.node, &story.client) };
        let mut holder = story.hold("1s");
        let wire_drops = story.wire_drops();
        let flow = Flow::udp(source, from, destination, to).rate(HEAVY).longest(Duration::from_secs(10)).start();
        fault.strike(&mut story, &mut holder);
        let deadline = story.until_deadline();
        clock::sleep_until(deadline.saturating_add(AFTER));
        let report = flow.stop();
        let cut = report.cut_at(deadline);
        println!("{fault:?} {from} -> {to}: {report}; {cut:?}");
        assert_eq!(cut.passed_after, 0, "{cut:?}");
        // A machine that was too busy to count says nothing of what was lost, one too busy to send was no heavy round.
        let overflowed = story.wire_drops() > wire_drops;
        let poor = overflowed || cut.measurement_drops > 0 || report.rate() < 0.2 * f64::from(HEAVY);
        if poor && spoiled < rounds {
            spoiled += 1;
        } else {
            worst.judge(&report, deadline);
            rates.push(report.rate());
            round += 1;
        }
        fault.recover(&mut story);
    }
    let slowest = rates.into_iter().fold(f64::INFINITY, f64::min);
    worst.print(&format!("heavy rounds, at least {slowest:.0} packets/s, {spoiled} spoiled"));
    assert!(slowest > 0.2 * f64::from(HEAVY), "{slowest:.0} packets/s");
}

/// Many worlds at once, in each of them round after round: what is stopped or killed, and when, is random.
#[test]
fn light_rounds_side_by_side() {
    let _heavy = world::heavy();
    let (worlds, rounds) = if is_long() { (10, 100) } else { (10, 10) };
    let started = Instant::now();
    let mut worst = Worst::default();
    let outcomes: Vec<Worst> = thread::scope(|scope| {
        let running: Vec<_> = (0..worlds).map(|number| scope.spawn(move || light_rounds(number, rounds))).collect();
        running
            .into_iter()
            .map(|world| world.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload)))
            .collect()
    });
    outcomes.iter().for_each(|outcome| worst.add(outcome));
    worst.print(&format!("{} light rounds in {:.1} s", worlds * rounds, started.elapsed().as_secs_f32()));
}

fn light_rounds(world: usize, rounds: usize) -> Worst {
    let seed = RandomState::new().hash_one(world) | 1;
    let mut random = seed;
    let mut next = |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    let mut story = Story::new(&format!("light-{world}"));
    let mut worst = Worst::default();
    for round in 0..rounds {
        let fault = Fault::ALL[usize::try_from(next(6)).expect("below 6")];
        let moment = Duration::from_millis(next(400));
        println!("light-{world}, round {round}: {fault:?} after {moment:?}, seed {seed}");
        // Ten agents share two processors: with a shorter TTL a late renewal would end a round before it began.
        let mut holder = story.hold("1500ms");
        let flows = story.udp(100);
        let streams = story.streams(100);
        run_for(moment);
        let deadline = cut(&mut story, fault, &mut holder, flows, &mut worst);
        judge_streams(streams, deadline, &mut worst);
        fault.recover(&mut story);
    }
    worst
}
