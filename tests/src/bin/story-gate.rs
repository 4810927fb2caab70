//! A service is cut in the kernel at its deadline: holder stopped, agent killed, and opened again by a new lease.
//!
//! A client talks to a real server behind a virtual address, over TCP and UDP, IPv4 and IPv6. Each of its packets is stamped,
//! and counts as seen when the server's echo is back.

use std::{panic, process::ExitCode, thread, time::Duration};

use portcullis::core::time::BootInstant;
use portcullis_tests::{
    clock,
    report::{Limit, Report},
    residue,
    show::{Chart, Show, Table},
    traffic::{self, Echo, RunningEcho},
    world::{Agent, Namespace, Node, Process, World, binary},
};

/// The margin is wide, so that the server outlives the deadline by far: what cuts it is the gate alone.
const CONFIG: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "2s" }
margin = "800ms"
addresses = ["10.9.0.100", "fd09::100"]
"#;
const ADDRESSES: [&str; 2] = ["10.9.0.100:7000", "[fd09::100]:7000"];
const COLUMNS: [&str; 6] =
    ["", "last packet\nseen", "first packet\ndropped", "sent after\nthe deadline", "of these\nseen", "reopened\nafter"];
/// From a deadline until the lease itself has expired too: the margin, and some more. Before that its holder may still
/// renew it, and the gate would open again.
const EXPIRED: Duration = Duration::from_millis(1000);
/// Traffic that is watched on each side of an instant: what a chart shows, and a little more.
const WATCHED: Duration = Duration::from_millis(380);
/// How long a client tries to reach the service.
const PATIENCE: Duration = Duration::from_secs(10);
/// Beyond this, something is waiting that should not.
const REOPENED_WITHIN_MS: f64 = 2000.0;

fn main() -> ExitCode {
    residue::clean();
    let show = Show::begin();
    let mut report = Report::story("gate");
    show.title("The stage");
    let mut stage = Stage::set(&show);

    show.title("1. The holder is stopped (SIGSTOP): nobody renews the lease");
    let (clients, mut holder) = stage.acquire(&show);
    holder.stop();
    show.say("SIGSTOP to `portcullis run`; its server still runs and answers");
    let stopped = stage.watch_deadline(&show, clients, "holder stopped");
    report.holds("holder stopped: the fence is confirmed", stage.confirmed());
    show.say("what an operator sees now:");
    show.output("portcullis status", &stage.status());
    clock::sleep_until(stopped.deadline.saturating_add(EXPIRED));
    holder.cont();
    show.say(&format!("SIGCONT: the holder finds its lease lost and ends its server; {}", ending(&mut holder)));

    show.title("2. The agent is killed (SIGKILL): nobody is left to close the gate");
    let (clients, mut holder) = stage.acquire(&show);
    stage.agent.kill();
    show.say("SIGKILL to the agent; the server still runs and answers");
    let killed = stage.watch_deadline(&show, clients, "agent killed");
    report.holds("agent killed: no agent lived at the deadline", stage.agent.ended().is_some());
    report.holds("agent killed: the server outlived the deadline", holder.ended().is_none());
    show.say(&format!("the holder, which could not renew, has ended its server; {}", ending(&mut holder)));
    stage.agent.restart();
    report.holds("agent killed: the fence is confirmed after the restart", stage.confirmed());
    show.say("the agent is started again: it finds the service fenced, keeps it so and confirms it");

    show.title("3. The lease is acquired again: the gate opens for the new holder");
    let (clients, mut holder) = stage.acquire(&show);
    let reopened = clients.stop(stage.opened());
    show.chart(&Chart::round(reopened.reports(), reopened.opened, "lease granted"));
    holder.terminate();
    report.holds("lease given back: the fence is confirmed", stage.confirmed());
    show.say("SIGTERM to `portcullis run`: the server ends, the lease is given back, the gate is closed");
    drop((holder, stage));

    show.title("What the client saw, relative to the deadline");
    let mut table = Table::new(COLUMNS);
    stopped.judge(&killed.seen, &mut report, &mut table);
    killed.judge(&reopened, &mut report, &mut table);
    show.table(&table);
    show.note("A packet sent just before the deadline is dropped if it, or its reply, comes to the gate after it.");
    show.note("TCP stops sending when its buffer is full of packets that nobody acknowledges.");
    report.finish_briefly()
}

/// A client and a node with an agent, fenced.
struct Stage {
    client: Namespace,
    node: Node,
    agent: Agent,
    // Last: it removes what the others have been made in.
    _world: World,
}

impl Stage {
    fn set(show: &Show) -> Self {
        let world = World::new("story-gate");
        let client = world.namespace("client");
        let node = world.node("node");
        world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
        for address in ["10.9.0.100/32", "fd09::100/128"] {
            node.add_address("eth0", address);
        }
        show.say("two network namespaces, a client and a node, with a link between them");
        let agent = node.agent(CONFIG);
        show.say("the agent runs on the node; its service `vip` is 10.9.0.100 and fd09::100, and is fenced");
        show.say("the client will send 1000 packets a second each by TCP and UDP, IPv4 and IPv6, to be echoed");
        Self { client, node, agent, _world: world }
    }

    /// Holds the lease with a server under it, while clients try to reach it. Returns once all of them have been answered
    /// for a while.
    fn acquire(&self, show: &Show) -> (Clients, Process) {
        let udp = ADDRESSES.map(|address| Echo::udp(&self.client, any_port(address), address).start_closed());
        clock::sleep_until(clock::now().saturating_add(WATCHED));
        assert!(udp.iter().all(|client| client.arrived() == 0), "a closed gate has let packets through");
        show.say("the client sends, and nothing comes back");
        show.say(&format!("portcullis run vip --ttl 2s -- testserver {}", ADDRESSES.join(" ")));
        let server = binary("testserver");
        let holder = self.node.hold("vip", "2s", &[&[&*server.to_string_lossy()], &ADDRESSES[..]].concat());
        let tcp = thread::scope(|scope| {
            let connecting = ADDRESSES.map(|address| scope.spawn(move || self.connect(address)));
            connecting.map(|client| client.join().unwrap_or_else(|payload| panic::resume_unwind(payload)))
        });
        let ([tcp4, tcp6], [udp4, udp6]) = (tcp, udp);
        let clients = Clients([("TCP IPv4", tcp4), ("TCP IPv6", tcp6), ("UDP IPv4", udp4), ("UDP IPv6", udp6)]);
        let answered = clock::wait_until(PATIENCE, || clients.0.iter().all(|(_, echo)| echo.arrived() > 0));
        assert!(answered, "the service is not reached within {PATIENCE:?}; the holder says:\n{}", holder.log());
        show.say("the lease is granted, the gate is open, the server answers");
        clock::sleep_until(clock::now().saturating_add(WATCHED));
        (clients, holder)
    }

    /// Waits for the deadline that nobody moves any more, and a while longer.
    fn watch_deadline(&self, show: &Show, clients: Clients, name: &'static str) -> Act {
        let deadline = self.settled_deadline();
        let left = deadline.saturating_since(clock::now());
        show.say(&format!("nobody moves the deadline any more: it is in {:.2} s", left.as_secs_f64()));
        clock::sleep_until(deadline.saturating_add(WATCHED));
        let seen = clients.stop(self.opened());
        show.chart(&Chart::round(seen.reports(), deadline, "deadline"));
        Act { name, deadline, seen }
    }

    /// Tries to connect until it succeeds, then talks over a connection of its own.
    fn connect(&self, address: &str) -> RunningEcho {
        let to = address.parse().expect("an address of this file");
        let attempt = Duration::from_millis(20);
        let open = clock::wait_until(PATIENCE, || traffic::connect(&self.client, to, attempt).is_ok());
        assert!(open, "no connection to {address} within {PATIENCE:?}");
        Echo::tcp(&self.client, any_port(address), address).start()
    }

    /// The deadline, once what was under way to the agent has arrived.
    fn settled_deadline(&self) -> BootInstant {
        let mut deadline = self.node.deadline("vip");
        loop {
            clock::sleep_until(clock::now().saturating_add(Duration::from_millis(50)));
            let again = self.node.deadline("vip");
            if again == deadline {
                return deadline;
            }
            deadline = again;
        }
    }

    /// When the agent decided on the current (or last) opening: at once when the lease was granted.
    fn opened(&self) -> BootInstant {
        BootInstant::from_nanos(self.node.gate("vip").expect("the service has a gate").generation)
    }

    fn confirmed(&self) -> bool {
        let service =
            self.agent.until("/v1/services/vip", |vip| vip["state"] == "fenced" && !vip["confirmation"].is_null());
        service["confirmation"] == "confirmed"
    }

    fn status(&self) -> String {
        let output = self.node.portcullis(&["status"]).output().expect("`portcullis status` can be run");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// One client of each protocol and family.
struct Clients([(&'static str, RunningEcho); 4]);

impl Clients {
    fn stop(self, opened: BootInstant) -> Seen {
        Seen { opened, flows: self.0.map(|(name, echo)| (name, echo.stop().0)) }
    }
}

/// What became of the clients' packets after an opening.
struct Seen {
    opened: BootInstant,
    flows: [(&'static str, traffic::Report); 4],
}

impl Seen {
    fn reports(&self) -> impl Iterator<Item = &traffic::Report> {
        self.flows.iter().map(|(_, report)| report)
    }
}

/// A deadline, and the traffic round it.
struct Act {
    name: &'static str,
    deadline: BootInstant,
    seen: Seen,
}

impl Act {
    /// Holds each client's traffic against the deadline; `next` is what the clients saw of the next opening.
    fn judge(&self, next: &Seen, report: &mut Report, table: &mut Table) {
        for ((client, flow), (_, later)) in self.seen.flows.iter().zip(&next.flows) {
            let name = |what: &str| format!("{}, {client}: {what}", self.name);
            // Packets from before the opening may come through late: they waited for the server's link address, which a
            // closed gate does not tell. And between the opening and the server's start none is answered.
            let flow = flow.between(self.seen.opened, BootInstant::from_nanos(u64::MAX));
            let first = flow.packets.iter().find(|packet| packet.arrived_at.is_some()).map(|packet| packet.sent_at);
            let flow = flow.between(first.unwrap_or_default(), BootInstant::from_nanos(u64::MAX));
            let cut = flow.cut_at(self.deadline);
            let first_reply = later.packets.iter().filter_map(|packet| packet.arrived_at).min();
            let reopened = first_reply.map(|at| at.saturating_since(next.opened));
            // A packet is judged where it passes the gate: after its sending had returned, for a reply on the way back.
            let dropped_by = cut.first_dropped_returned_ns.map(|ns| ms(ns) + cut.in_flight.as_secs_f64() * 1e3);

            report.check(
                name("seen, sent after the deadline"),
                count(cut.passed_after),
                "packets",
                Limit::Exactly(0.0),
            );
            report.check(name("sent after the deadline"), count(cut.sent_after), "packets", Limit::AtLeast(1.0));
            report.check(
                name("dropped before another that was seen"),
                count(cut.overtaken),
                "packets",
                Limit::Exactly(0.0),
            );
            let measured = count(usize::try_from(cut.measurement_drops).unwrap_or(usize::MAX));
            report.check(name("lost by the measurement"), measured, "packets", Limit::Exactly(0.0));
            let value = dropped_by.unwrap_or(f64::NAN);
            report.check(name("first drop, with its time under way"), value, "ms", Limit::AtLeast(0.0));
            let value = reopened.map_or(f64::NAN, |after| after.as_secs_f64() * 1e3);
            report.check(name("reopened after"), value, "ms", Limit::AtMost(REOPENED_WITHIN_MS));

            let relative = |ns: Option<i64>| ns.map_or("none".to_owned(), |ns| format!("{:+.2} ms", ms(ns)));
            table.row([
                format!("{}, {client}", self.name),
                relative(cut.last_passed_ns),
                relative(cut.first_dropped_ns),
                cut.sent_after.to_string(),
                cut.passed_after.to_string(),
                reopened.map_or("never".to_owned(), |after| format!("{:.1} ms", after.as_secs_f64() * 1e3)),
            ]);
        }
    }
}

/// How a holder ended that has lost its lease.
fn ending(holder: &mut Process) -> String {
    match holder.wait(PATIENCE).and_then(|status| status.code()) {
        Some(code) => format!("exit status {code}"),
        None => "it is still there".to_owned(),
    }
}

/// The client's end of a conversation with `address`.
fn any_port(address: &str) -> &'static str {
    if address.starts_with('[') { "[fd09::1]:0" } else { "10.9.0.1:0" }
}

fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

fn count(packets: usize) -> f64 {
    packets as f64
}
