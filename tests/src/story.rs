//! What most stories begin with: a client, a node that serves a virtual address in both families, and the agent that guards it.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use portcullis::core::time::BootInstant;
use portcullis_common::layout::FENCE_NUMBERS;

use crate::{
    clock,
    traffic::{Flow, RunningFlow, RunningStream, Stream},
    world::{self, Agent, Namespace, Node, Process, World},
};

/// The service of a story.
pub const SERVICE: &str = "vip";
/// Where a story's server listens, see [`Story::serve`].
pub const SERVERS: [&str; 2] = ["10.9.0.100:5432", "[fd09::100]:5432"];
/// What the agent of a story is told: a TTL of 1 s leaves the gate open for 800 ms.
pub const CONFIG: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "2s" }
margin = "100ms"
addresses = ["10.9.0.100", "fd09::100"]
"#;

const STATUS: &str = "/v1/services/vip";

/// A client and a node that serves a virtual address. Nobody holds its lease at first.
#[derive(Debug)]
pub struct Story {
    pub agent: Agent,
    pub client: Namespace,
    pub node: Node,
    /// Dropped last: everything above lives in it.
    pub world: World,
}

impl Story {
    /// With an agent of [`CONFIG`].
    #[track_caller]
    pub fn new(name: &str) -> Self {
        Self::with(name, CONFIG)
    }

    #[track_caller]
    pub fn with(name: &str, config: &str) -> Self {
        let world = World::new(name);
        let client = world.namespace("client");
        let node = world.node("node");
        world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
        node.add_address("eth0", "10.9.0.100/32");
        node.add_address("eth0", "fd09::100/128");
        // While closed, neighbours are cut as well: a flood is to reach the gate all the same.
        for (here, there, addresses) in [
            (&client, &*node, ["10.9.0.100", "10.9.0.2", "fd09::100", "fd09::2"].as_slice()),
            (&node, &client, &["10.9.0.1", "fd09::1"]),
        ] {
            let link = there.ip("-o link show dev eth0");
            let station =
                link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).expect("an Ethernet link");
            for address in addresses {
                here.ip(&format!("neigh replace {address} dev eth0 lladdr {station} nud permanent"));
            }
        }
        let agent = node.agent(config);
        Self { agent, client, node, world }
    }

    /// Starts `portcullis run` and waits until the service is served.
    #[track_caller]
    pub fn hold(&self, ttl: &str) -> Process {
        let holder = self.node.hold(SERVICE, ttl, &["sleep", "1000"]);
        self.agent.until(STATUS, |service| service["state"] == "serving");
        holder
    }

    /// Takes the lease through the socket, without anybody who renews it; returns its token.
    #[track_caller]
    pub fn acquire(&self, ttl: Duration) -> u64 {
        let body = serde_json::json!({ "holder": "test", "ttl_ms": u64::try_from(ttl.as_millis()).expect("short") });
        let answer = self.agent.request("POST", "/v1/services/vip/lease", Some(&body)).expect("the agent answers");
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["token"].as_u64().expect("a token")
    }

    /// Starts a real server at [`SERVERS`], TCP and UDP.
    #[track_caller]
    pub fn serve(&self) -> Process {
        let server = self.node.spawn("server", self.node.command(world::binary("testserver")).args(SERVERS));
        assert!(clock::wait_until(Duration::from_secs(5), || server.log() == "ready\n"), "{}", server.log());
        server
    }

    /// Packets that the wire itself has lost so far, before any program saw them: the ring of a veth pair whose peer runs XDP
    /// holds 256, and overflows when the receiving side is off the CPU.
    #[track_caller]
    pub fn wire_drops(&self) -> usize {
        let dropped = |namespace: &Namespace| {
            let table =
                namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("/proc is mounted");
            let line =
                table.lines().find_map(|line| line.trim_start().strip_prefix("eth0:")).expect("there is an eth0");
            // Eight columns of what was received, then bytes, packets, errors and drops of what was sent.
            line.split_whitespace().nth(11).and_then(|drops| drops.parse::<usize>().ok()).expect("a number")
        };
        dropped(&self.client) + dropped(&self.node)
    }

    /// UDP in both directions and families, on ports of their own. Ports below `base + 2` are taken.
    fn flows(&self, base: u16, rate: u32) -> [Flow; 4] {
        let (client, node) = (&self.client, &self.node);
        let (to, from) = (base, base + 1);
        [
            Flow::udp(client, "10.9.0.1:0", node, &format!("10.9.0.100:{to}")),
            Flow::udp(node, &format!("10.9.0.100:{from}"), client, &format!("10.9.0.1:{from}")),
            Flow::udp(client, "[fd09::1]:0", node, &format!("[fd09::100]:{to}")),
            Flow::udp(node, &format!("[fd09::100]:{from}"), client, &format!("[fd09::1]:{from}")),
        ]
        .map(|flow| flow.rate(rate))
    }

    /// UDP in both directions and families through an open gate.
    #[track_caller]
    pub fn udp(&self, rate: u32) -> Vec<RunningFlow> {
        self.flows(7000, rate).into_iter().map(Flow::start).collect()
    }

    /// UDP in both directions and families against a gate that may be closed, on other ports than [`Story::udp`].
    #[track_caller]
    pub fn flood(&self, rate: u32) -> Vec<RunningFlow> {
        self.flows(7100, rate).into_iter().map(Flow::start_closed).collect()
    }

    /// A connection of each family with records in both directions.
    #[track_caller]
    pub fn streams(&self, rate: u32) -> Vec<RunningStream> {
        let (client, node) = (&self.client, &self.node);
        [("10.9.0.1:0", "10.9.0.100:6000"), ("[fd09::1]:0", "[fd09::100]:6000")]
            .map(|(from, to)| Stream::tcp(client, from, node, to).rate(rate).start())
            .into()
    }

    /// Follows the gate until it has closed, and returns the deadline at which it did: the last one that anybody set. Panics
    /// if it was closed before by a command.
    #[track_caller]
    pub fn until_deadline(&self) -> BootInstant {
        let mut last = self.node.deadline(SERVICE);
        assert!(last.as_nanos() >= FENCE_NUMBERS, "the gate is closed already");
        loop {
            if clock::now() >= last {
                return last;
            }
            clock::sleep_until(last.min(clock::now().saturating_add(Duration::from_millis(1))));
            let deadline = self.node.deadline(SERVICE);
            // The agent closes a gate whose deadline has passed, by a number below all deadlines.
            if deadline.as_nanos() < FENCE_NUMBERS {
                assert!(clock::now() >= last, "the gate was closed {:?} early", last.saturating_since(clock::now()));
                return last;
            }
            last = deadline;
        }
    }

    /// Whether the gate is closed for good, by a fence number.
    pub fn is_fenced(&self) -> bool {
        self.node.deadline(SERVICE).as_nanos() < FENCE_NUMBERS
    }

    /// Waits until the agent has confirmed that the service is fenced, and the gate says the same.
    #[track_caller]
    pub fn until_confirmed(&self) {
        self.agent.until(STATUS, |service| service["state"] == "fenced" && service["confirmation"] == "confirmed");
        assert!(self.is_fenced(), "{:?}", self.node.gate(SERVICE));
    }

    /// The service as the agent tells it.
    #[track_caller]
    pub fn status(&self) -> serde_json::Value {
        self.agent.get(STATUS).expect("the agent answers").json()
    }

    /// Panics if a new connection of the client to a [`Story::serve`]d address is made, or refused, within a fifth of a second.
    #[track_caller]
    pub fn assert_no_connection(&self) {
        for server in SERVERS {
            let to: SocketAddr = server.parse().expect("an address");
            let made = crate::traffic::connect(&self.client, to, Duration::from_millis(200));
            assert_eq!(made.map_err(|e| e.kind()).err(), Some(std::io::ErrorKind::TimedOut), "{server}");
        }
    }
}

/// Lets traffic run: here time itself is the condition.
pub fn run_for(span: Duration) {
    clock::sleep_until(clock::now().saturating_add(span));
}

/// Whether the long run was asked for: `cargo xtask test --long`.
pub fn is_long() -> bool {
    std::env::var_os("PORTCULLIS_LONG").is_some_and(|value| value == "1")
}

/// Tells the threads of a scope to end when it is dropped, so that a test that panics does not wait for them.
#[derive(Debug)]
pub struct EndOnDrop<'a>(pub &'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
