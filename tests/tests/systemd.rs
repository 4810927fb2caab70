//! The unit under a real systemd: what a boot, a crash, a restart, a reload, a hang and a stop do to the gates, as the
//! peer's packets see it.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use portcullis_tests::{
    clock,
    traffic::{Flow, RunningFlow},
    world::{Machine, Namespace, World},
};

const UNIT: &str = "portcullis.service";
const CONFIG: &str = "/etc/portcullis/portcullis.toml";
/// The longest that the agent may be away: killed by the watchdog after five seconds, with the time to start again.
const BACK: Duration = Duration::from_secs(20);

/// One service that is held, one that nobody holds.
const SERVICES: &str = r#"
[[service]]
name = "vip"
lease = { source = "local", ttl = "30s" }
margin = "100ms"
addresses = ["10.9.0.100"]
ports = ["udp/7000-7100"]

[[service]]
name = "shut"
lease = { source = "local", ttl = "10s" }
addresses = ["10.9.0.101"]
ports = ["udp/7000-7100"]
"#;

fn deploy(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd").join(file)
}

fn shipped(file: &str) -> String {
    fs::read_to_string(deploy(file)).unwrap_or_else(|e| panic!("read {file}: {e}"))
}

/// A client, and a machine on which the agent is installed as the README says.
struct Story {
    client: Namespace,
    machine: Machine,
    _world: World,
}

impl Story {
    fn installed(name: &str) -> Self {
        let world = World::new(name);
        let client = world.namespace("client");
        let machine = world.machine("node");
        world.link(&client, "eth0", "10.9.0.1/24", &machine, "eth0", "10.9.0.2/24");
        // Neighbour discovery is cut as well, and packets are to meet the gate.
        let link = machine.ip("-o link show dev eth0");
        let (_, mac) = link.split_once("link/ether ").expect("a veth has a MAC");
        let mac = mac.split(' ').next().expect("split gives one part at least");
        for address in ["10.9.0.100", "10.9.0.101"] {
            client.ip(&format!("neigh add {address} lladdr {mac} dev eth0 nud permanent"));
        }
        machine.write("/etc/systemd/system/portcullis.service", &shipped("portcullis.service"));
        machine.write("/usr/lib/sysusers.d/portcullis.conf", &shipped("portcullis.sysusers.conf"));
        // What `systemctl enable` makes of the unit's [Install].
        machine.write("/etc/systemd/system/sysinit.target.d/portcullis.conf", "[Unit]\nWants=portcullis.service\n");
        machine.write(CONFIG, SERVICES);
        Self { client, machine, _world: world }
    }

    fn booted(name: &str) -> Self {
        let mut story = Self::installed(name);
        for address in ["10.9.0.100/32", "10.9.0.101/32"] {
            story.machine.add_address("eth0", address);
        }
        story.machine.boot();
        story
    }

    /// Holds the lease of `vip` in a unit of its own.
    fn hold(&self, ttl: &str) {
        let holder = ["--unit=holder", "--", "portcullis", "run", "vip", "--ttl", ttl, "--", "sleep", "1000"];
        self.machine.run("systemd-run", &holder);
        self.machine.until("/v1/services/vip", |service| service["state"] == "serving");
    }

    /// Both ways through the open gate.
    fn served(&self) -> [RunningFlow; 2] {
        [
            Flow::udp(&self.client, "10.9.0.1:0", &self.machine, "10.9.0.100:7000").start(),
            Flow::udp(&self.machine, "10.9.0.100:7001", &self.client, "10.9.0.1:7001").start(),
        ]
    }

    /// Both ways against the closed gate.
    fn cut(&self) -> [RunningFlow; 2] {
        [
            Flow::udp(&self.client, "10.9.0.1:0", &self.machine, "10.9.0.101:7000").start_closed(),
            Flow::udp(&self.machine, "10.9.0.101:7001", &self.client, "10.9.0.1:7002").start_closed(),
        ]
    }

    fn main_pid(&self) -> String {
        self.machine.property(UNIT, "MainPID")
    }

    /// Waits until systemd has another agent running than `before`.
    fn wait_replaced(&self, before: &str) {
        let replaced = || self.main_pid() != before && self.state() == "active";
        assert!(clock::wait_until(BACK, replaced), "the agent is not replaced\n{}", self.machine.journal());
    }

    fn state(&self) -> String {
        self.machine.property(UNIT, "ActiveState")
    }
}

/// Waits until a flow has sent some packets more.
fn send_on(flow: &RunningFlow) {
    let goal = flow.sent() + 200;
    assert!(clock::wait_until(BACK, || flow.sent() >= goal), "the flow sends no more");
}

fn judge(served: [RunningFlow; 2], cut: [RunningFlow; 2]) {
    served.iter().chain(&cut).for_each(send_on);
    served.into_iter().for_each(|flow| flow.stop().assert_whole());
    cut.into_iter().for_each(|flow| flow.stop().assert_nothing_arrived());
}

#[test]
fn boots_fenced() {
    let mut story = Story::installed("systemd-boots");
    let machine = &mut story.machine;
    machine.ip("link set eth0 down");
    // The network manager: it brings the link and the service's address up when it may.
    machine.write(
        "/etc/systemd/system/network-manager.service",
        "[Unit]\nDefaultDependencies=no\nAfter=network-pre.target\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\n\
         ExecStart=ip address add 10.9.0.100/32 dev eth0\nExecStart=ip link set eth0 up\n\
         ExecStart=sh -c 'systemctl is-active portcullis > /run/agent-then; exec portcullis status vip --json > \
         /run/status-then'\n",
    );
    machine
        .write("/etc/systemd/system/sysinit.target.d/network-manager.conf", "[Unit]\nWants=network-manager.service\n");
    let (client, node) = (&story.client, &*story.machine);
    let flow = Flow::udp(client, "10.9.0.1:0", node, "10.9.0.100:7000").translated_to("0.0.0.0:7000").start_closed();
    story.machine.boot();
    let machine = &story.machine;

    assert_eq!(machine.property("network-manager.service", "Result"), "success", "{}", machine.journal());
    assert_eq!(machine.read("/run/agent-then"), "active\n");
    let then: serde_json::Value = serde_json::from_str(&machine.read("/run/status-then")).expect("one object");
    assert_eq!(then["services"][0]["state"], "fenced", "{then}");
    machine.until("/v1/services/vip", |service| service["counters"]["dropped_packets"].as_u64() > Some(0));
    flow.stop().assert_nothing_arrived();

    // It was the gate and nothing else.
    story.hold("10s");
    let flow = Flow::udp(&story.client, "10.9.0.1:0", &story.machine, "10.9.0.100:7000").start();
    send_on(&flow);
    flow.stop().assert_whole();
}

#[test]
fn killed_and_restarted() {
    let story = Story::booted("systemd-killed");
    // Long enough for two starts on a busy machine.
    story.hold("30s");
    let (served, cut) = (story.served(), story.cut());

    let before = story.main_pid();
    story.machine.run("systemctl", &["kill", "--kill-whom=main", "--signal=KILL", UNIT]);
    story.wait_replaced(&before);
    story.machine.until("/v1/services/vip", |service| service["state"] == "serving");

    let before = story.main_pid();
    story.machine.run("systemctl", &["restart", UNIT]);
    assert_ne!(story.main_pid(), before);
    story.machine.until("/v1/services/vip", |service| service["state"] == "serving");

    // The holder's renewals reach the new agent.
    let deadline = story.machine.deadline("vip");
    let renewed = || story.machine.deadline("vip") > deadline;
    assert!(clock::wait_until(BACK, renewed), "nobody renews\n{}", story.machine.journal());
    judge(served, cut);
}

#[test]
fn reloaded() {
    let story = Story::booted("systemd-reloaded");
    story.hold("10s");
    let (served, cut) = (story.served(), story.cut());
    let before = story.main_pid();

    story.machine.write(
        CONFIG,
        &format!(
            "{SERVICES}\n[[service]]\nname = \"new\"\nlease = {{ source = \"local\" }}\naddresses = [\"10.9.0.102\"]\n"
        ),
    );
    story.machine.run("systemctl", &["reload", UNIT]);
    story.machine.until("/v1/services/new", |service| service["state"] == "fenced");

    story.machine.write(CONFIG, &SERVICES.replace("margin", "margim"));
    let refused = story.machine.try_run("systemctl", &["reload", UNIT]);
    assert!(!refused.status.success(), "a bad file was reloaded\n{}", story.machine.journal());
    assert!(story.machine.journal().contains("margim"), "nobody says why\n{}", story.machine.journal());
    story.machine.until("/v1/services/new", |service| service["state"] == "fenced");
    assert_eq!((story.state().as_str(), story.main_pid()), ("active", before));
    judge(served, cut);

    // The ways past systemd leave it with the right idea of the agent's state.
    story.machine.write(CONFIG, SERVICES);
    story.machine.run("portcullis", &["reload"]);
    let running = || story.machine.property(UNIT, "SubState") == "running";
    assert!(clock::wait_until(BACK, running), "{}", story.machine.journal());
    story.machine.write(CONFIG, &SERVICES.replace("margin", "margim"));

    // A start with the bad file is never active, and leaves the gates as they are.
    let cut = story.cut();
    let refused = story.machine.try_run("systemctl", &["restart", UNIT]);
    assert!(!refused.status.success() && story.state() != "active", "{refused:?}\n{}", story.machine.journal());
    cut.iter().for_each(send_on);
    cut.into_iter().for_each(|flow| flow.stop().assert_nothing_arrived());
    // systemd tries again for ever, so the mended file is all it takes.
    story.machine.write(CONFIG, SERVICES);
    assert!(clock::wait_until(BACK, || story.state() == "active"), "{}", story.machine.journal());
}

#[test]
fn hung() {
    let story = Story::booted("systemd-hung");
    // Two thirds of it are left when the last renewal is due: more than the watchdog takes.
    story.hold("30s");
    let (served, cut) = (story.served(), story.cut());
    let before = story.main_pid();
    story.machine.run("systemctl", &["kill", "--kill-whom=main", "--signal=STOP", UNIT]);
    story.wait_replaced(&before);
    assert!(story.machine.journal().contains("Watchdog timeout"), "{}", story.machine.journal());
    story.machine.until("/v1/services/vip", |service| service["state"] == "serving");
    judge(served, cut);
}

#[test]
fn stopped() {
    let story = Story::booted("systemd-stopped");
    story.hold("4s");
    let (served, cut) = (story.served(), story.cut());
    story.machine.run("systemctl", &["stop", UNIT]);
    assert_eq!(story.state(), "inactive");
    assert_eq!(story.machine.property("holder.service", "ActiveState"), "active", "{}", story.machine.journal());
    let deadline = story.machine.deadline("vip");
    assert!(deadline > clock::now(), "the gate fell before its deadline");
    clock::sleep_until(deadline.saturating_add(Duration::from_millis(300)));
    served.into_iter().for_each(|flow| flow.stop().assert_cut(deadline));
    cut.into_iter().for_each(|flow| flow.stop().assert_nothing_arrived());
}

/// Each capability of the unit is needed, and no other is.
#[test]
fn capabilities() {
    let story = Story::booted("systemd-capabilities");
    let machine = &story.machine;
    let restart = |drop_in: &str| {
        machine.write("/etc/systemd/system/portcullis.service.d/test.conf", drop_in);
        machine.run("systemctl", &["daemon-reload"]);
        machine.try_run("systemctl", &["restart", UNIT]).status.success()
    };
    let needed = [
        ("cap_net_admin", "the kernel refuses the program"),
        ("cap_perfmon", "pointer arithmetic with it prohibited for !root"),
        ("cap_bpf", "Operation not permitted"),
    ];
    assert_eq!(machine.property(UNIT, "CapabilityBoundingSet"), needed.map(|(capability, _)| capability).join(" "));
    for (capability, symptom) in needed {
        let started = restart(&format!("[Service]\nRestart=no\nCapabilityBoundingSet=~{capability}\n"));
        let log = machine.log(UNIT);
        assert!(!started && log.contains(symptom), "without {capability}, started: {started}\n{log}");
    }
    assert!(restart(""), "{}", machine.journal());
}

/// The network does not wait for an agent that cannot start; a service with the README's drop-in does.
#[test]
fn boots_without_an_agent() {
    let mut story = Story::installed("systemd-broken");
    let machine = &mut story.machine;
    machine.write(CONFIG, "no = configuration");
    for (unit, order) in [("network-manager", "After=network-pre.target"), ("vip", "")] {
        let text = format!("[Unit]\nDefaultDependencies=no\n{order}\n[Service]\nRemainAfterExit=yes\nExecStart=true\n");
        machine.write(&format!("/etc/systemd/system/{unit}.service"), &text);
        let wants = format!("[Unit]\nWants={unit}.service\n");
        machine.write(&format!("/etc/systemd/system/sysinit.target.d/{unit}.conf"), &wants);
    }
    machine.write("/etc/systemd/system/vip.service.d/portcullis.conf", &drop_in());
    machine.boot();
    let machine = &story.machine;
    assert_eq!(machine.property("network-manager.service", "ActiveState"), "active");
    assert_eq!(machine.property("vip.service", "ActiveState"), "failed", "{}", machine.journal());

    // More often than systemd's own limit would have it.
    let restarts = || machine.property(UNIT, "NRestarts").parse::<u32>();
    assert!(clock::wait_until(BACK, || restarts().is_ok_and(|times| times > 6)), "{}", machine.journal());
    machine.write(CONFIG, SERVICES);
    assert!(clock::wait_until(BACK, || story.state() == "active"), "{}", machine.journal());
    machine.run("systemctl", &["start", "vip.service"]);
    assert_eq!(machine.property("vip.service", "ActiveState"), "active", "{}", machine.journal());
}

/// The drop-in that the README shows.
fn drop_in() -> String {
    let readme = shipped("README.md");
    let start = readme.find("```ini\n").expect("the README shows a drop-in") + "```ini\n".len();
    let text = &readme[start..];
    text[..text.find("```").expect("its end")].replace("pg-main", "vip")
}

#[test]
fn uninstalled() {
    let story = Story::booted("systemd-uninstalled");
    let machine = &story.machine;
    let uninstall = ["uninstall", "--opens-gates"];

    let refused = machine.try_run("portcullis", &uninstall);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("stop that one first"), "{said}");

    machine.run("systemctl", &["stop", UNIT]);
    let cut = story.cut();
    assert!(!machine.try_run("portcullis", &uninstall[..1]).status.success(), "it does not ask for the flag");
    cut.iter().for_each(send_on);
    cut.into_iter().for_each(|flow| flow.stop().assert_nothing_arrived());

    machine.run("portcullis", &uninstall);
    assert!(machine.gate("shut").is_none(), "a gate is left");
    let open = Flow::udp(&story.client, "10.9.0.1:0", machine, "10.9.0.101:7000").start();
    send_on(&open);
    open.stop().assert_whole();
}

/// The socket is for root and the group.
#[test]
fn the_group_reads() {
    let story = Story::booted("systemd-group");
    let machine = &story.machine;
    assert_eq!(machine.run("stat", &["--format=%U %G %a", "/run/portcullis/agent.sock"]), "root portcullis 660");
    let member = ["--reuid=65534", "--regid=portcullis", "--clear-groups", "portcullis"];
    machine.run("setpriv", &[&member[..], &["status"]].concat());
    assert!(!machine.try_run("setpriv", &[&member[..], &["fence", "vip"]].concat()).status.success());
}

#[test]
fn the_unit_is_sound() {
    // The exposure as systemd 252 weighs it, times ten. Newer versions weigh more settings.
    const EXPOSURE: &str = "--threshold=18";
    let folder = tempfile::tempdir().expect("a folder");
    let unit = folder.path().join(UNIT);
    let program = portcullis_tests::world::binary("portcullis");
    let text = shipped("portcullis.service").replace("/usr/bin/portcullis", &program.to_string_lossy());
    fs::write(&unit, text).expect("written");
    for arguments in [&["verify", "--man=no"][..], &["security", "--offline=true", EXPOSURE]] {
        let output = Command::new("systemd-analyze").args(arguments).arg(&unit).output().expect("systemd-analyze runs");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "systemd-analyze {arguments:?}: {said}");
        assert!(!said.contains(&format!("{UNIT}:")) || arguments[0] == "security", "{said}");
    }
}
