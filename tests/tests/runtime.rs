//! What the agent makes of a gate that somebody else wrote, of a service that leaves and comes back, of a clock that it
//! cannot read, and of a queue that no margin covers.

use std::{thread, time::Duration};

use portcullis::core::time::BootInstant;
use portcullis_tests::{
    clock,
    world::{Agent, Node, World},
};
use serde_json::{Value, json};

/// No service at all.
const EMPTY: &str = "";
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

#[test]
fn a_hold_is_back_in_force_with_its_service() {
    let (_world, node) = world("hold-comes-back");
    let mut agent = node.agent(WEB);
    let fenced =
        agent.request("POST", "/v1/services/web/fence", Some(&json!({ "reason": "drill" }))).expect("answered");
    assert_eq!(fenced.status, 200, "{fenced:?}");
    let leave_and_return = |agent: &Agent| {
        agent.configure(EMPTY);
        reload(agent, &["web"], &[]);
        agent.configure(WEB);
        reload(agent, &[], &["web"]);
        let service = web(agent, is_confirmed);
        assert_eq!(service["manual_hold"]["reason"], "drill", "{service}");
    };
    leave_and_return(&agent);
    acquire(&agent);
    let service = web(&agent, is_confirmed);
    assert!(is_fenced(&node), "{service}");
    // Also one that an agent without the service found on its disk.
    agent.configure(EMPTY);
    agent.restart();
    agent.configure(WEB);
    reload(&agent, &[], &["web"]);
    assert_eq!(web(&agent, is_confirmed)["manual_hold"]["reason"], "drill");
    let unfenced = agent.request("POST", "/v1/services/web/unfence", Some(&json!({ "reason": "over" })));
    assert_eq!(unfenced.expect("answered").status, 200);
    agent.configure(EMPTY);
    reload(&agent, &["web"], &[]);
    agent.configure(WEB);
    reload(&agent, &[], &["web"]);
    assert_eq!(web(&agent, is_confirmed)["manual_hold"], Value::Null);
}

#[test]
fn a_service_that_comes_back_opens_by_a_new_proof_alone() {
    let (_world, node) = world("lease-comes-back");
    let agent = node.agent(WEB);
    let token = acquire(&agent);
    web(&agent, |service| service["state"] == "serving");
    agent.configure(EMPTY);
    reload(&agent, &["web"], &[]);
    let renewal = json!({ "token": token });
    let renew = || agent.request("PUT", "/v1/services/web/lease", Some(&renewal)).expect("answered");
    assert_eq!(renew().status, 404);
    agent.configure(WEB);
    reload(&agent, &[], &["web"]);
    // The lease is held, and the proofs of it are of before.
    let service = web(&agent, is_confirmed);
    assert!(service["holder"] == "test" && service["token"].is_null() && is_fenced(&node), "{service}");
    assert_eq!(renew().status, 200);
    web(&agent, |service| service["state"] == "serving");
}

#[test]
fn a_configuration_that_cannot_be_read_holds_up_no_fence() {
    let (_world, node) = world("reload-hangs");
    let agent = node.agent(WEB);
    web(&agent, is_confirmed);
    let entries =
        std::fs::read_dir(node.folder()).expect("the node's folder").map(|entry| entry.expect("listed").path());
    let file =
        entries.filter(|path| path.extension().is_some_and(|end| end == "toml")).last().expect("a configuration");
    std::fs::remove_file(&file).expect("removed");
    // Nobody ever writes to it: whoever opens it waits.
    let made = std::process::Command::new("mkfifo").arg(&file).status().expect("mkfifo");
    assert!(made.success(), "{made:?}");
    agent.reload();
    let busy = || agent.request("POST", "/v1/reload", None).is_ok_and(|answer| answer.status == 503);
    assert!(clock::wait_until(Duration::from_secs(20), busy), "the reload that waits is not told");
    let before = node.deadline("web");
    let fenced = agent.request("POST", "/v1/services/web/fence", Some(&json!({ "reason": "drill" })));
    assert_eq!(fenced.expect("answered").status, 200);
    assert!(is_fenced(&node) && node.deadline("web") > before);
}

#[track_caller]
fn reload(agent: &Agent, removed: &[&str], added: &[&str]) {
    let reloaded = agent.request("POST", "/v1/reload", None).expect("answered");
    assert_eq!(reloaded.status, 200, "{reloaded:?}");
    let reloaded = reloaded.json();
    assert!(reloaded["removed"] == json!(removed) && reloaded["added"] == json!(added), "{reloaded}");
}

/// From here on no process that this thread starts can read the clock's slew rate.
fn refuse_adjtimex() {
    let code = |parts: u32| u16::try_from(parts).expect("16 bits hold every instruction's code");
    let is = |number: libc::c_long, skip| libc::sock_filter {
        code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
        jt: skip,
        jf: 0,
        k: u32::try_from(number).expect("a system call's number"),
    };
    let give = |k| libc::sock_filter { code: code(libc::BPF_RET | libc::BPF_K), jt: 0, jf: 0, k };
    let mut filter = [
        // The system call's number is the first word.
        libc::sock_filter { code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), jt: 0, jf: 0, k: 0 },
        is(libc::SYS_adjtimex, 2),
        is(libc::SYS_clock_adjtime, 1),
        give(libc::SECCOMP_RET_ALLOW),
        give(libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs()),
    ];
    let program = libc::sock_fprog { len: 5, filter: filter.as_mut_ptr() };
    // SAFETY: changes a flag of this thread alone.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: `program` and the filter that it points at outlive the call, which copies them.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn an_unfit_clock_holds_for_a_service_that_comes_later() {
    let story = || {
        let (_world, node) = world("unfit-later");
        refuse_adjtimex();
        let agent = node.agent(EMPTY);
        agent.configure(WEB);
        reload(&agent, &[], &["web"]);
        let unfit = |service: &Value| says(service, "degraded", "boot clock");
        assert!(unfit(&web(&agent, is_confirmed)));
        acquire(&agent);
        // An opening takes some system calls; the look at the status comes after all of them.
        let service = web(&agent, is_confirmed);
        assert!(unfit(&service) && is_fenced(&node), "{service}");
    };
    // In a thread of its own, which the refusal ends with.
    if let Err(panic) = thread::spawn(story).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Gives `eth0` of the node a token bucket that holds packets back for two seconds, or takes it away.
#[track_caller]
fn shape(node: &Node, action: &str) {
    let bucket = ["tbf", "rate", "1mbit", "burst", "10kb", "limit", "250000"];
    let mut command = node.command("tc");
    command.args(["qdisc", action, "dev", "eth0", "root"]).args(bucket.iter().filter(|_| action == "add"));
    let output = command.output().expect("tc runs");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_margin_that_does_not_cover_a_shaped_queue_is_refused() {
    let (_world, node) = world("short-margin");
    shape(&node, "add");
    let refusal = node.try_agent(WEB).expect_err("the margin is 500 ms, the queue holds 2 s");
    for words in ["margin of web, 500ms", "eth0", "tbf", "2s", "Raise `margin`"] {
        assert!(refusal.log.contains(words), "no {words:?} in {}", refusal.log);
    }
    let wide = WEB.replace("500ms", "3s");
    let agent = node.agent(&wide);
    agent.configure(WEB);
    let refused = agent.request("POST", "/v1/reload", None).expect("answered");
    assert!(refused.status != 200 && refused.json().to_string().contains("eth0"), "{refused:?}");
}

#[test]
fn a_queue_that_comes_later_is_told_until_it_goes() {
    let (_world, node) = world("later-queue");
    let agent = node.agent(WEB);
    shape(&node, "add");
    agent.until("/v1/health", |health| says(health, "degraded", "tbf of eth0"));
    shape(&node, "del");
    agent.until("/v1/health", |health| !says(health, "degraded", "tbf"));
}
