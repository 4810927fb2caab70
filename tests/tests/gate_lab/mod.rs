//! A service behind a gate that a test opens and closes by its lease, and traffic that is judged by both.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by several test programs; a failure here fails the test")]

pub(crate) mod foreign;
pub(crate) mod frames;
pub(crate) mod wire;
pub(crate) mod writer;

use std::{fs::File, io::Write, time::Duration};

use portcullis::core::time::BootInstant;
use portcullis_common::layout::FENCE_NUMBERS;
use portcullis_tests::{
    clock,
    traffic::{Flow, Report, RunningFlow},
    world::{Agent, Namespace, Node, Process, World, binary},
};
use serde_json::{Value, json};

/// The service's addresses in most stories, both in the client's networks.
pub(crate) const VIP: &str = "10.9.0.100";
pub(crate) const VIP6: &str = "fd09::100";

const SOON: Duration = Duration::from_secs(10);
/// Packets of a flow that are enough to judge a phase by.
const ENOUGH: u64 = 50;
/// Packets a second of one flow: several run side by side.
const RATE: u32 = 500;
/// A loaded machine may hold a packet back for this long; a packet sent so shortly before a command is not judged.
const LAG: Duration = Duration::from_millis(50);

/// A client and a node with the service's addresses, on one link.
pub(crate) fn pair(world: &World) -> (Namespace, Node) {
    let client = world.namespace("client");
    let node = world.node("node");
    world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
    node.add_address("eth0", "10.9.0.100/32");
    node.add_address("eth0", "fd09::100/128");
    (client, node)
}

/// A configuration with the service `vip`.
pub(crate) fn config(selectors: &str) -> String {
    config_with("", selectors)
}

/// The same, with lines for `[agent]`.
pub(crate) fn config_with(agent: &str, selectors: &str) -> String {
    format!(
        "[agent]\n{agent}\n[[service]]\nname = \"vip\"\nlease = {{ source = \"local\", ttl = \"60s\" }}\n\
         margin = \"100ms\"\n{selectors}\n"
    )
}

/// The selectors of most stories: the whole of both addresses.
pub(crate) const WHOLE: &str = r#"addresses = ["10.9.0.100", "fd09::100"]"#;

/// Before and after a gate was closed by a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing {
    pub(crate) before: BootInstant,
    pub(crate) after: BootInstant,
}

/// The service `vip` of a node's agent.
pub(crate) struct Gated {
    pub(crate) agent: Agent,
    node: Node,
    token: Option<u64>,
}

impl Gated {
    /// Starts the agent. The gate is closed.
    #[track_caller]
    pub(crate) fn start(node: &Node, config: &str) -> Self {
        Self { agent: node.agent(config), node: node.clone(), token: None }
    }

    /// Acquires the lease, and waits until the service is served.
    #[track_caller]
    pub(crate) fn open(&mut self) {
        self.open_for(Duration::from_secs(60));
    }

    /// The same, with a lease that ends by itself.
    #[track_caller]
    pub(crate) fn open_for(&mut self, ttl: Duration) {
        let request = json!({ "holder": "test", "ttl_ms": u64::try_from(ttl.as_millis()).unwrap() });
        let granted = self.agent.request("POST", "/v1/services/vip/lease", Some(&request)).unwrap();
        assert_eq!(granted.status, 200, "{}", granted.body);
        self.token = granted.json()["token"].as_u64();
        self.agent.until("/v1/services/vip", |service| service["state"] == "serving");
    }

    /// Releases the lease, and waits until the gate is closed.
    #[track_caller]
    pub(crate) fn close(&mut self) -> Closing {
        let token = self.token.take().expect("it is open");
        let before = clock::now();
        let released = self.agent.request("DELETE", &format!("/v1/services/vip/lease?token={token}"), None).unwrap();
        assert_eq!(released.status, 200, "{}", released.body);
        let closed = clock::wait_until(SOON, || self.node.deadline("vip").as_nanos() < FENCE_NUMBERS);
        assert!(closed, "the gate does not close");
        Closing { before, after: clock::now() }
    }

    /// Whether the gate is closed by command, as the kernel's programs read it.
    pub(crate) fn node_is_closed(&self) -> bool {
        self.node.deadline("vip").as_nanos() < FENCE_NUMBERS
    }

    pub(crate) fn status(&self) -> Value {
        self.agent.get("/v1/services/vip").unwrap().json()
    }

    pub(crate) fn health(&self) -> Value {
        self.agent.get("/v1/health").unwrap().json()
    }

    pub(crate) fn coverage(&self) -> Value {
        self.agent.get("/v1/coverage").unwrap().json()
    }

    /// How one interface is covered.
    #[track_caller]
    pub(crate) fn interface(&self, name: &str) -> Value {
        let coverage = self.coverage();
        let found = coverage["interfaces"].as_array().unwrap().iter().find(|one| one["name"] == name).cloned();
        found.unwrap_or_else(|| panic!("{name} is not in {coverage}"))
    }

    #[track_caller]
    pub(crate) fn until_covered(&self, name: &str) {
        self.agent.until("/v1/coverage", |coverage| {
            let interfaces = coverage["interfaces"].as_array().unwrap();
            interfaces.iter().any(|one| one["name"] == name && one["tc"] != "none")
        });
    }
}

/// Flows that the gate is to cut, and flows that it is to leave alone.
#[derive(Default)]
pub(crate) struct Traffic {
    cut: Vec<(&'static str, Flow)>,
    kept: Vec<(&'static str, Flow)>,
}

impl Traffic {
    #[must_use]
    pub(crate) fn cut(mut self, name: &'static str, flow: Flow) -> Self {
        self.cut.push((name, flow.rate(RATE)));
        self
    }

    #[must_use]
    pub(crate) fn kept(mut self, name: &'static str, flow: Flow) -> Self {
        self.kept.push((name, flow.rate(RATE)));
        self
    }

    /// Closes the open gate under traffic and opens it again: what is to be cut flows before and after, and not between.
    #[track_caller]
    pub(crate) fn judge(&self, service: &mut Gated) {
        self.judge_closed(service, |_| {});
        service.open();
        let again = start(&self.cut);
        for (name, flow) in &again {
            let flows = clock::wait_until(SOON, || flow.arrived() >= ENOUGH);
            assert!(flows, "{name} does not flow again after the gate was opened");
        }
    }

    /// Closes the open gate under traffic, and calls `meanwhile` while the traffic goes on against the closed gate.
    #[track_caller]
    pub(crate) fn judge_closed(&self, service: &mut Gated, meanwhile: impl FnOnce(&mut Gated)) {
        let (cut, kept) = (start(&self.cut), start(&self.kept));
        for (name, flow) in cut.iter().chain(&kept) {
            assert!(
                clock::wait_until(SOON, || flow.arrived() >= ENOUGH),
                "{name} does not flow while the gate is open"
            );
        }
        let closing = service.close();
        wait_for_more(&cut);
        wait_for_more(&kept);
        meanwhile(service);
        wait_for_more(&cut);
        for (name, flow) in cut {
            let report = flow.stop();
            let open = report.between(BootInstant::ZERO, closing.before.saturating_sub(LAG));
            let closed = report.between(closing.after, clock::now());
            println!(
                "{name}: {} of {} passed open, {} of {} closed",
                open.received(),
                open.sent(),
                closed.received(),
                closed.sent()
            );
            assert_whole(name, &open);
            assert_nothing(name, &closed);
        }
        for (name, flow) in kept {
            let report = flow.stop();
            println!("{name}: {} of {} passed (kept)", report.received(), report.sent());
            assert_whole(name, &report);
        }
    }
}

fn start(flows: &[(&'static str, Flow)]) -> Vec<(&'static str, RunningFlow)> {
    flows.iter().map(|(name, flow)| (*name, flow.clone().start())).collect()
}

/// Waits until each flow has sent some more.
fn wait_for_more(flows: &[(&'static str, RunningFlow)]) {
    for (name, flow) in flows {
        let before = flow.sent();
        assert!(clock::wait_until(SOON, || flow.sent() >= before + ENOUGH), "{name}: its sender stands still");
    }
}

#[track_caller]
pub(crate) fn assert_whole(name: &str, report: &Report) {
    assert_eq!(report.measurement_drops, 0, "{name}: the measurement lost packets: {report}");
    assert!(report.sent() > 0, "{name}: nothing was sent");
    assert_eq!(report.lost(), 0, "{name}: {report}");
}

#[track_caller]
pub(crate) fn assert_nothing(name: &str, report: &Report) {
    assert!(report.sent() > 0, "{name}: nothing was sent");
    assert_eq!(report.received(), 0, "{name}: {report}");
}

/// Says that this machine cannot run a test: the run counts it as skipped, never as passed.
pub(crate) fn skip(test: &str, reason: &str) {
    println!("skipped: {test}: {reason}");
    if let Some(list) = std::env::var_os("PORTCULLIS_SKIPS") {
        let mut list = File::options().append(true).create(true).open(list).unwrap();
        writeln!(list, "{test}: {reason}").unwrap();
    }
}

/// An echo server among the node's processes, whose sockets the root cgroup's programs see and stamp.
#[track_caller]
pub(crate) fn serve(node: &Node, addresses: &[&str]) -> Process {
    let server = node.spawn("server", node.command(binary("testserver")).args(addresses));
    assert!(clock::wait_until(SOON, || server.log().contains("ready")), "{}", server.log());
    server
}

/// Whether an echo server answers one line over TCP, asked by a process of `node`.
pub(crate) fn asks_by_tcp(node: &Node, address: &str, port: u16) -> bool {
    let script =
        format!("exec 3<>/dev/tcp/{address}/{port} && echo hi >&3 && read -t 1 line <&3 && [ \"$line\" = hi ]");
    let status =
        node.command("timeout").args(["1", "bash", "-c", &script]).stderr(std::process::Stdio::null()).status();
    status.unwrap().success()
}
