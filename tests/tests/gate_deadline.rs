//! The main job: at the deadline the service is cut in the kernel, whoever is stopped or dead by then.
//!
//! Each story holds the lease with the real command, runs stamped traffic in both directions, families and protocols past
//! a deadline, and judges by what the peer saw: nothing sent after the deadline arrived, nothing sent before was dropped.

use std::time::Duration;

use portcullis::core::time::BootInstant;
use portcullis_tests::{
    clock,
    traffic::{Flow, RunningFlow},
    world::{Agent, Namespace, Node, Process, World},
};

const CONFIG: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "2s" }
margin = "100ms"
addresses = ["10.9.0.100", "fd09::100"]
"#;

/// A client and a node that serves a virtual address and holds its lease.
struct Story {
    client: Namespace,
    node: Node,
    agent: Agent,
    holder: Process,
    world: World,
}

impl Story {
    fn begin(name: &str) -> Self {
        let world = World::new(name);
        let client = world.namespace("client");
        let node = world.node("node");
        world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
        node.add_address("eth0", "10.9.0.100/32");
        node.add_address("eth0", "fd09::100/128");
        let agent = node.agent(CONFIG);
        let holder = node.hold("vip", "1s", &["sleep", "1000"]);
        agent.until("/v1/services/vip", |service| service["state"] == "serving");
        Self { client, node, agent, holder, world }
    }

    /// UDP in both directions and families; TCP is counted by its own stories.
    fn traffic(&self, rate: u32) -> Vec<RunningFlow> {
        let (client, node) = (&self.client, &self.node);
        vec![
            Flow::udp(client, "10.9.0.1:0", node, "10.9.0.100:7000").rate(rate).start(),
            Flow::udp(node, "10.9.0.100:7001", client, "10.9.0.1:7001").rate(rate).start(),
            Flow::udp(client, "[fd09::1]:0", node, "[fd09::100]:7000").rate(rate).start(),
            Flow::udp(node, "[fd09::100]:7001", client, "[fd09::1]:7001").rate(rate).start(),
        ]
    }

    /// The deadline, once nobody can move it any more.
    fn last_deadline(&self) -> BootInstant {
        self.node.deadline("vip")
    }
}

fn judge(flows: Vec<RunningFlow>, deadline: BootInstant) {
    clock::sleep_until(deadline.saturating_add(Duration::from_millis(300)));
    for flow in flows {
        flow.stop().assert_cut(deadline);
    }
}

#[test]
fn holder_stopped() {
    let mut story = Story::begin("holder-stopped");
    let flows = story.traffic(1000);
    story.holder.stop();
    judge(flows, story.last_deadline());
    story.agent.until("/v1/services/vip", |service| service["confirmation"] == "confirmed");
}
