//! What the agent makes of a gate that somebody else wrote.

use std::time::Duration;

use portcullis::core::time::BootInstant;
use portcullis_tests::{
    clock,
    world::{Agent, Node, World},
};
use serde_json::{Value, json};

const WEB: &str = r#"
[[service]]
name = "web"
lease = { source = "local", ttl = "60s" }
margin = "500ms"
addresses = ["10.9.0.100"]
"#;

fn world(name: &str) -> (World, Node) {
    let world = World::new(name);
    let node = world.node("node");
    let peer = world.namespace("peer");
    world.link(&peer, "eth0", "10.9.0.1/24", &node, "eth0", "10.9.0.2/24");
    (world, node)
}

/// Acquires the lease; the token.
#[track_caller]
fn acquire(agent: &Agent) -> u64 {
    let asked = json!({ "holder": "test", "ttl_ms": 30_000 });
    let granted = agent.request("POST", "/v1/services/web/lease", Some(&asked)).expect("answered");
    assert_eq!(granted.status, 200, "{granted:?}");
    granted.json()["token"].as_u64().expect("a token")
}

#[track_caller]
fn web(agent: &Agent, condition: impl Fn(&Value) -> bool) -> Value {
    agent.until("/v1/services/web", condition)
}

fn is_confirmed(service: &Value) -> bool {
    service["state"] == "fenced" && service["confirmation"] == "confirmed"
}

fn says(service: &Value, key: &str, words: &str) -> bool {
    service[key].to_string().contains(words)
}

fn in_an_hour() -> BootInstant {
    clock::now().saturating_add(Duration::from_secs(3600))
}

/// Is the gate closed by command, and not by the passing of time?
fn is_fenced(node: &Node) -> bool {
    node.deadline("web").as_nanos() < portcullis_common::layout::FENCE_NUMBERS
}

#[test]
fn a_fenced_gate_that_somebody_else_opens_is_closed_and_told() {
    let (_world, node) = world("meddled-fenced");
    let agent = node.agent(WEB);
    web(&agent, is_confirmed);
    node.overwrite_deadline("web", in_an_hour());
    let service = web(&agent, |service| says(service, "reason", "written by somebody else") && is_confirmed(service));
    assert!(is_fenced(&node), "{service}");
    assert!(says(&service, "degraded", "somebody else wrote"), "{service}");
}

#[test]
fn an_open_gate_whose_deadline_somebody_else_moves_is_closed_and_told() {
    let (_world, node) = world("meddled-open");
    let agent = node.agent(WEB);
    acquire(&agent);
    web(&agent, |service| service["state"] == "serving");
    node.overwrite_deadline("web", in_an_hour());
    let service = web(&agent, is_confirmed);
    assert!(is_fenced(&node) && says(&service, "reason", "written by somebody else"), "{service}");
    assert!(says(&service, "degraded", "somebody else wrote"), "{service}");
}

#[test]
fn a_fence_by_hand_closes_a_fenced_gate_whatever_it_holds() {
    let (_world, node) = world("fence-again");
    let agent = node.agent(WEB);
    web(&agent, is_confirmed);
    let before = node.deadline("web");
    let fenced =
        agent.request("POST", "/v1/services/web/fence", Some(&json!({ "reason": "drill" }))).expect("answered");
    assert_eq!(fenced.status, 200, "{fenced:?}");
    // Another fence number: it was closed again, and what is confirmed now was looked at after that.
    assert!(is_fenced(&node) && node.deadline("web") > before);
    web(&agent, |service| is_confirmed(service) && says(service, "reason", "drill"));
}
