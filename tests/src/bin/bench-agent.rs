//! What an agent with 1,000 services costs: time from start to armed, resident memory, idle CPU.
//!
//! Every service has an address of its own, as virtual IPs do, and one port: a thousand addresses, a thousand entries in
//! the kernel's table, and neighbours cut for each. Armed is when `/v1/health` answers 200: every program is attached,
//! every rule stands, every gate is closed (or adopted as it was) and was tried with packets of its service.
//!
//! Idle is every service fenced and nobody asking. What a thousand held and renewed services cost is printed beside.

use std::{fmt::Write as _, fs, process::ExitCode, time::Duration};

use portcullis_tests::{
    bench::go_first,
    clock,
    report::{Limit, Report},
    world::{Agent, Connection, Node, World, heavy},
};
use serde_json::{Value, json};

const SERVICES: u16 = 1000;
const TTL: Duration = Duration::from_secs(30);
const WATCHED: Duration = Duration::from_secs(20);
/// Starts on a host that has the pins and the state of an earlier agent.
const RESTARTS: usize = 3;

fn main() -> ExitCode {
    let _alone = heavy();
    let mut report = Report::bench("agent");
    let world = World::new("bench-agent");
    let node = world.node("node");
    let peer = world.namespace("peer");
    world.link(&peer, "eth0", "10.9.0.1/16", &node, "eth0", "10.9.0.2/16");
    add_addresses(&node);

    // What else runs on the machine is not the agent's time.
    go_first(None);
    let bare = world.node("bare").agent("").armed_in();
    let mut agent = node.agent(&config());
    let mut start = |name, agent: &Agent| {
        report.check(name, agent.armed_in().as_secs_f64(), "s", Limit::AtMost(2.0));
    };
    start("first start to armed", &agent);
    for _ in 0..RESTARTS {
        agent.restart();
        start("restart to armed", &agent);
    }

    report.note(format!("start to armed without any service: {:.3} s", bare.as_secs_f64()));

    let idle = cpu_percent(&node, || clock::sleep_until(clock::now().saturating_add(WATCHED)));
    report.check("resident memory", memory(&agent, "VmRSS"), "MB", Limit::AtMost(32.0));
    report.check("idle CPU, all fenced", idle, "%", Limit::AtMost(1.0));
    report.note(format!("resident memory, all fenced: {}", memories(&agent)));

    let mut connection = agent.connect().expect("the agent listens");
    let tokens: Vec<u64> = (0..SERVICES).map(|service| acquire(&mut connection, service)).collect();
    agent.until("/v1/services", |answer| {
        answer["services"].as_array().is_some_and(|all| all.iter().all(|service| service["state"] == "serving"))
    });
    let held = cpu_percent(&node, || renew_all(&mut connection, &tokens));
    report.note(format!("CPU, {SERVICES} held with a TTL of {TTL:?} and renewed every third of it: {held:.2} %"));
    report.note(format!("resident memory, all held: {}", memories(&agent)));
    drop(connection);
    drop(agent);
    drop(world);
    report.finish()
}

fn address(service: u16) -> String {
    format!("10.9.{}.{}", 1 + service / 250, 1 + service % 250)
}

fn name(service: u16) -> String {
    format!("service-{service:04}")
}

fn add_addresses(node: &Node) {
    let batch = node.folder().join("addresses");
    let lines: String = (0..SERVICES).map(|service| format!("addr add {}/32 dev eth0\n", address(service))).collect();
    fs::write(&batch, lines).unwrap_or_else(|e| panic!("write {}: {e}", batch.display()));
    node.output("ip", &["-batch", &batch.to_string_lossy()]);
}

fn config() -> String {
    (0..SERVICES).fold(String::new(), |mut config, service| {
        let (name, address, ttl) = (name(service), address(service), TTL.as_secs());
        writeln!(
            config,
            "[[service]]\nname = \"{name}\"\naddresses = [\"{address}\"]\nports = [\"tcp/5432\"]\n\
             lease = {{ source = \"local\", ttl = \"{ttl}s\" }}\n"
        )
        .expect("a string takes everything");
        config
    })
}

fn acquire(connection: &mut Connection, service: u16) -> u64 {
    let body = json!({ "holder": "bench", "ttl_ms": TTL.as_secs() * 1000 });
    ask(connection, "POST", service, &body)["token"].as_u64().expect("a token")
}

/// Renews every service every third of the TTL, one after the other and evenly, as a thousand holders would on average.
fn renew_all(connection: &mut Connection, tokens: &[u64]) {
    let apart = TTL / 3 / u32::from(SERVICES);
    let end = clock::now().saturating_add(WATCHED);
    let mut next = clock::now();
    for (service, token) in (0..SERVICES).zip(tokens).cycle() {
        if next >= end {
            return;
        }
        clock::sleep_until(next);
        next = next.saturating_add(apart);
        ask(connection, "PUT", service, &json!({ "token": token }));
    }
}

#[track_caller]
fn ask(connection: &mut Connection, method: &str, service: u16, body: &Value) -> Value {
    let path = format!("/v1/services/{}/lease", name(service));
    let answer = connection.ask(method, &path, Some(body)).expect("answered");
    assert_eq!(answer.status, 200, "{method} {path}: {answer:?}");
    answer.json()
}

/// What share of one processor the agent takes while `wait` runs.
fn cpu_percent(node: &Node, wait: impl FnOnce()) -> f64 {
    let (start, before) = (clock::now(), cpu_time(node));
    wait();
    let (end, after) = (clock::now(), cpu_time(node));
    100.0 * (after - before).as_secs_f64() / end.saturating_since(start).as_secs_f64()
}

/// Processor time in user and kernel mode of all that ever ran in the node's cgroup, threads that have ended included:
/// that is the agents alone. `/proc/PID/stat` has the same in steps of 10 ms.
fn cpu_time(node: &Node) -> Duration {
    let path = node.cgroup().path().join("cpu.stat");
    let stat = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
    let usage = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
    Duration::from_micros(usage.unwrap_or_else(|| panic!("{}: no usage_usec in {stat:?}", path.display())))
}

/// A line of the agent's `/proc/PID/status`, in MB (1,000,000 bytes).
fn memory(agent: &Agent, line: &str) -> f64 {
    let path = format!("/proc/{}/status", agent.pid());
    let status = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
    let value = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':')?.strip_suffix("kB"));
    let kib: f64 = value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("{path}: no {line}"));
    kib * 1024.0 / 1e6
}

fn memories(agent: &Agent) -> String {
    let [now, peak, own, files] = ["VmRSS", "VmHWM", "RssAnon", "RssFile"].map(|line| memory(agent, line));
    format!("{now:.1} MB, at most {peak:.1} MB so far; of it its own {own:.1} MB, of files {files:.1} MB")
}
