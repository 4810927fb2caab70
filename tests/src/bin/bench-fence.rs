//! Time from a fence on the socket to the gate closed, beside `nft add element`.
//!
//! One thread writes the request to a connection that is already open, then looks at the gate's deadline in the mapped
//! table until it is a fence number. A second thread that looks would only add its own wake-up, and on two processors
//! take the one that the agent needs; so this thread keeps to one processor and the agent to the other. The answer is
//! read afterwards.
//!
//! In turn with it: the commands `nft add element` (a set that a drop rule of the same namespace uses) and
//! `portcullis fence`, each from before it is started until it has ended. Everything runs at the same priority.

use std::{
    hint, panic,
    process::{ExitCode, Stdio},
    thread,
    time::Duration,
};

use portcullis_tests::{
    bench::{go_first, keep_on, spread::Spread, watch::Watch},
    clock,
    report::{Limit, Report},
    world::{Agent, Command, Connection, Node, World, heavy},
};
use serde_json::{Value, json};

const ROUNDS: usize = 1000;
const BUDGET: Duration = Duration::from_secs(40);
/// Between two rounds: the agent sleeps again, and what it does every second or two falls on any part of a round.
const PAUSE: Duration = Duration::from_millis(5);
/// For a gate to close or to open.
const PATIENCE: Duration = Duration::from_secs(5);

const SERVICE: &str = "pg";
const CONFIG: &str = r#"
[[service]]
name = "pg"
lease = { source = "local", ttl = "60s" }
addresses = ["10.9.0.100"]
ports = ["tcp/5432"]
"#;
const SETS: &str = "table inet bench {
    set cut { type ipv4_addr; }
    chain cut { type filter hook prerouting priority raw; ip daddr @cut drop; }
}";

fn main() -> ExitCode {
    let _alone = heavy();
    let mut report = Report::bench("fence");
    let world = World::new("bench-fence");
    let node = world.node("node");
    let peer = world.namespace("peer");
    world.link(&peer, "eth0", "10.9.0.1/24", &node, "eth0", "10.9.0.2/24");
    node.add_address("eth0", "10.9.0.100/32");
    go_first(None);
    let agent = node.agent(CONFIG);
    node.nft(SETS);
    let [ours, nft, command] = rounds(&node, &agent);
    report.check("socket to closed gate, p99", ours.p99(), "ms", Limit::AtMost(1.0));
    let times = nft.median() / ours.median();
    report.note(format!("fence on the socket: {ours}"));
    report.note(format!("`nft add element`:   {nft}; {times:.1} times ours in the median"));
    report.note(format!("`portcullis fence`:  {command}"));
    drop(agent);
    drop(world);
    report.finish()
}

/// The times of the fence on the socket, of `nft`, and of `portcullis fence`.
fn rounds(node: &Node, agent: &Agent) -> [Spread; 3] {
    let mut spreads: [Spread; 3] = Default::default();
    let [ours, nft, command] = &mut spreads;
    let mut connection = agent.connect().expect("the agent listens");
    let asked = json!({ "holder": "bench", "ttl_ms": 60_000 });
    let token = ask(&mut connection, "POST", "lease", &asked)["token"].as_u64().expect("a token");
    let watch = Watch::on(node, SERVICE);
    let end = clock::now().saturating_add(BUDGET);
    // The agent's loop is its first thread.
    keep_on(Some(agent.pid()), 0);
    for round in 0..ROUNDS {
        if clock::now() >= end {
            break;
        }
        open(&mut connection, &watch, token);
        thread::sleep(PAUSE);
        ours.add(thread::scope(|scope| {
            let observer = scope.spawn(|| fence(&mut connection, &watch));
            observer.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        }));
        open(&mut connection, &watch, token);
        let [high, low] = u16::try_from(round).expect("fewer rounds than addresses").to_be_bytes();
        let element = format!("{{ 10.8.{high}.{low} }}");
        nft.add(time(node.command("nft").args(["add", "element", "inet", "bench", "cut", &element])));
        command.add(time(&mut node.portcullis(&["fence", SERVICE, "--reason", "bench"])));
        assert!(watch.is_fenced(), "`portcullis fence` has ended, and the gate is open");
    }
    spreads
}

/// From the request to the first look that finds the gate closed.
fn fence(connection: &mut Connection, watch: &Watch) -> Duration {
    keep_on(None, 1);
    let body = json!({ "reason": "bench" });
    let sent = connection.send("POST", &format!("/v1/services/{SERVICE}/fence"), Some(&body)).expect("sent");
    let end = sent.saturating_add(PATIENCE);
    let closed = loop {
        let closed = watch.is_fenced();
        let now = clock::now();
        if closed {
            break now;
        }
        assert!(now < end, "the gate is still open {PATIENCE:?} after the fence");
        hint::spin_loop();
    };
    let answer = connection.receive().expect("answered");
    assert_eq!(answer.status, 200, "{answer:?}");
    closed.saturating_since(sent)
}

/// Ends a fence and renews until the gate is open: what was proven before the fence counts no more.
fn open(connection: &mut Connection, watch: &Watch, token: u64) {
    if watch.is_fenced() {
        ask(connection, "POST", "unfence", &json!({ "reason": "bench" }));
    }
    let opened = clock::wait_until(PATIENCE, || {
        ask(connection, "PUT", "lease", &json!({ "token": token }));
        !watch.is_fenced()
    });
    assert!(opened, "the gate is not open {PATIENCE:?} after the fence's end");
}

#[track_caller]
fn ask(connection: &mut Connection, method: &str, what: &str, body: &Value) -> Value {
    let answer = connection.ask(method, &format!("/v1/services/{SERVICE}/{what}"), Some(body)).expect("answered");
    assert_eq!(answer.status, 200, "{method} {what}: {answer:?}");
    answer.json()
}

fn time(command: &mut Command) -> Duration {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let start = clock::now();
    let status = command.status();
    let took = clock::now().saturating_since(start);
    assert!(status.as_ref().is_ok_and(|status| status.success()), "{command:?}: {status:?}");
    took
}
