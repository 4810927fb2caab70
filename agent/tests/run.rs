//! `portcullis run`, `wait`, `status` and `fence` as a person uses them: the real program against a socket.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    process::{Pid, Signal, ioctl_tiocsctty, kill_process, setsid, test_kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    stdio::stdin,
};
use tempfile::TempDir;

mod fake;

use fake::{Fake, until};

struct Setting {
    folder: TempDir,
    fake: Fake,
}

fn setting() -> Setting {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::start(&folder.path().join("agent.sock"));
    Setting { folder, fake }
}

/// A process that is killed and waited for whatever happens.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

impl Process {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    fn end(&mut self) -> ExitStatus {
        until("the process ends", || self.0.try_wait().unwrap())
    }

    fn stderr(&mut self) -> String {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// The next line of its output.
    fn line(&mut self) -> String {
        let mut line = String::new();
        // Unbuffered, so that nothing of the next line is lost.
        let out = self.0.stdout.as_mut().unwrap();
        BufReader::with_capacity(1, out).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Setting {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
        command.arg("--socket").arg(&self.fake.socket).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn run(&self, options: &[&str], script: &str) -> Process {
        let arguments = [&["run", "web"], options, &["--", "sh", "-c", script]].concat();
        Process(self.command(&arguments).spawn().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[test]
fn the_command_gets_the_token_and_its_status_is_passed_on() {
    let s = setting();
    let output = s.output(&[
        "run",
        "web",
        "--ttl",
        "5s",
        "--",
        "sh",
        "-c",
        "echo $PORTCULLIS_SERVICE $PORTCULLIS_TOKEN; exit 7",
    ]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let token = s.fake.score.lock().unwrap().leases.mark("web");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("web {token}\n"));
    assert_eq!(s.fake.holding(), None, "released at exit");
    assert!(output.stderr.is_empty(), "nothing to say: {output:?}");
}

#[test]
fn a_command_ended_by_a_signal_is_128_and_its_number() {
    let s = setting();
    assert_eq!(s.output(&["run", "web", "--ttl", "5s", "--", "sh", "-c", "kill -9 $$"]).status.code(), Some(137));
}

#[test]
fn a_command_that_is_not_there() {
    let s = setting();
    let output = s.output(&["run", "web", "--ttl", "5s", "--", "/no/such/command"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/command"), "{output:?}");
    assert_eq!(s.output(&["run", "web", "--ttl", "5s", "--", "/etc/passwd"]).status.code(), Some(126));
    assert_eq!(s.fake.holding(), None, "released all the same");
    let output = s.output(&["run", "nobody", "--ttl", "5s", "--", "true"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
}

#[test]
fn the_command_waits_until_the_service_is_serving() {
    let s = setting();
    s.fake.score.lock().unwrap().stuck.push("web".into());
    let started = s.file("started");
    let mut process = s.run(&["--ttl", "300ms"], &format!("touch {}", started.display()));
    // Over several TTLs: the lease is renewed while the service opens.
    until("renewals", || (s.fake.log().iter().filter(|line| line.starts_with("Renew")).count() >= 6).then_some(()));
    assert!(!started.exists());
    s.fake.score.lock().unwrap().stuck.clear();
    assert_eq!(process.end().code(), Some(0));
    assert!(started.exists());
    assert!(process.stderr().contains("waiting until it is serving"));
}

#[test]
fn the_lease_is_renewed_for_as_long_as_the_command_lives() {
    let s = setting();
    let stop = s.file("stop");
    let mut process = s.run(&["--ttl", "300ms"], &format!("until [ -e {} ]; do sleep 0.02; done", stop.display()));
    let (_, token) = until("the lease", || s.fake.holding());
    let start = Instant::now();
    until("three TTLs", || {
        assert_eq!(s.fake.holding().map(|(_, token)| token), Some(token));
        (start.elapsed() > Duration::from_millis(900)).then_some(())
    });
    fs::write(stop, "").unwrap();
    assert_eq!(process.end().code(), Some(0));
}

#[test]
fn a_held_lease_is_waited_for_or_not() {
    let s = setting();
    let token = s.fake.take("somebody", Duration::from_secs(600));
    let output = s.output(&["run", "web", "--ttl", "5s", "--no-wait", "--", "true"]);
    assert_eq!(output.status.code(), Some(75));
    assert!(String::from_utf8_lossy(&output.stderr).contains("held by somebody"), "{output:?}");
    let mut waiting = s.run(&["--ttl", "5s", "--holder", "me"], "exit 3");
    until("it asked", || s.fake.log().iter().any(|line| line.contains("\"me\"")).then_some(()));
    assert_eq!(waiting.0.try_wait().unwrap(), None);
    s.fake.score.lock().unwrap().leases.release("web", token).unwrap();
    assert_eq!(waiting.end().code(), Some(3));
    assert!(waiting.stderr().contains("waiting for the lease, which is held by somebody"));
}

#[test]
fn a_signal_ends_the_waiting() {
    let s = setting();
    s.fake.take("somebody", Duration::from_secs(600));
    let mut waiting = s.run(&["--ttl", "5s", "--holder", "me"], "exit 3");
    until("it asked", || s.fake.log().iter().any(|line| line.contains("\"me\"")).then_some(()));
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.end().code(), Some(143));
}

#[test]
fn signals_reach_the_command() {
    let s = setting();
    let script = "for s in TERM INT HUP QUIT USR1 USR2 WINCH; do trap \"echo got $s\" $s; done; trap 'exit 9' ALRM
        echo ready $$; while :; do sleep 0.01; done";
    let mut process = s.run(&["--ttl", "5s"], script);
    let ready = process.line();
    let pid: i32 = ready.strip_prefix("ready ").and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("{ready}"));
    let signals = [
        (Signal::TERM, "TERM"),
        (Signal::INT, "INT"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::WINCH, "WINCH"),
    ];
    for (signal, name) in signals {
        process.signal(signal);
        assert_eq!(process.line(), format!("got {name}"));
    }
    kill_process(Pid::from_raw(pid).unwrap(), Signal::ALARM).unwrap();
    assert_eq!(process.end().code(), Some(9));
    assert_eq!(s.fake.holding(), None);
}

/// A shell sets its own mask; most commands live with the one that they are given.
#[test]
fn the_command_blocks_no_signal() {
    let s = setting();
    let output = s.output(&["run", "web", "--ttl", "5s", "--", "grep", "SigBlk", "/proc/self/status"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "SigBlk:\t0000000000000000\n", "{output:?}");
}

/// A terminal of its own for `command`: the master's end.
fn with_terminal(command: &mut Command) -> (fs::File, Process) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
    let lead_a_session = || {
        setsid()?;
        ioctl_tiocsctty(stdin())?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(lead_a_session) };
    let process = Process(command.spawn().unwrap());
    // The command keeps the slave's end open; the terminal must hang up when its processes are gone.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    (fs::File::from(master), process)
}

const TELLS_INT_AND_USR1: &str = "trap 'echo got INT' INT; trap 'echo got USR1' USR1; trap 'exit 9' TERM
    echo ready; while :; do sleep 0.01; done";

/// What the command says first after Ctrl-C and a SIGUSR1 sent to `run` after that.
fn first_said_after_ctrl_c(command: &[&str]) -> String {
    let s = setting();
    let mut command = s.command(&[&["run", "web", "--ttl", "5s", "--"], command].concat());
    let (terminal, mut process) = with_terminal(&mut command);
    let mut lines = BufReader::new(terminal.try_clone().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("ready")));
    (&terminal).write_all(b"\x03").unwrap();
    process.signal(Signal::USR1);
    let said = lines.find(|line| line.contains("got")).unwrap();
    process.signal(Signal::TERM);
    assert_eq!(process.end().code(), Some(9));
    said.split("got ").last().unwrap().trim().to_owned()
}

#[test]
fn what_the_terminal_sends_reaches_the_command_directly() {
    assert_eq!(first_said_after_ctrl_c(&["sh", "-c", TELLS_INT_AND_USR1]), "INT");
}

#[test]
fn what_the_terminal_sends_is_not_passed_on() {
    // In a session of its own the terminal does not reach it: it hears only what is passed on.
    assert_eq!(first_said_after_ctrl_c(&["setsid", "sh", "-c", TELLS_INT_AND_USR1]), "USR1");
}

#[test]
fn the_agents_restart_is_ridden_out() {
    let mut s = setting();
    let stop = s.file("stop");
    let mut process =
        s.run(&["--ttl", "3s"], &format!("echo up; until [ -e {} ]; do sleep 0.02; done", stop.display()));
    assert_eq!(process.line(), "up");
    s.fake.stop();
    let gone = Instant::now();
    // Past the first renewal that fails, well before the lease's own time is over.
    until("a renewal failed", || (gone.elapsed() > Duration::from_millis(1500)).then_some(()));
    let before = s.fake.log().len();
    s.fake.resume();
    until("a renewal", || s.fake.log()[before..].iter().any(|line| line.starts_with("Renew")).then_some(()));
    fs::write(stop, "").unwrap();
    assert_eq!(process.end().code(), Some(0));
    let said = process.stderr();
    assert!(said.contains("cannot renew the lease, trying again") && said.contains("renewed again"), "{said}");
}

#[test]
fn an_agent_that_stays_away_costs_the_lease_at_its_own_deadline() {
    let mut s = setting();
    let mut process =
        s.run(&["--ttl", "1s"], "trap 'echo asked to stop; exit 0' TERM; echo up; while :; do sleep 0.01; done");
    assert_eq!(process.line(), "up");
    s.fake.stop();
    let gone = Instant::now();
    assert_eq!(process.line(), "asked to stop");
    let after = gone.elapsed();
    // The last renewal was sent at most a third of the TTL before the agent went.
    assert!(after > Duration::from_millis(600), "given up {after:?} after the agent went");
    assert_eq!(process.end().code(), Some(75));
    assert!(process.stderr().contains("the lease is lost"));
}

#[test]
fn a_lost_lease_ends_a_command_that_does_not_listen() {
    let s = setting();
    let script = "trap '' TERM; echo up; while :; do sleep 0.01; done";
    let mut process = s.run(&["--ttl", "300ms", "--kill-after", "200ms"], script);
    assert_eq!(process.line(), "up");
    let (_, token) = s.fake.holding().unwrap();
    s.fake.score.lock().unwrap().leases.release("web", token).unwrap();
    assert_eq!(process.end().code(), Some(75));
    let said = process.stderr();
    assert!(said.contains("the lease is lost") && said.contains("SIGKILL"), "{said}");
}

#[test]
fn the_command_dies_with_run() {
    let s = setting();
    let mut process = s.run(&["--ttl", "5s"], "echo $$; exec sleep 600");
    let pid = Pid::from_raw(process.line().parse().unwrap()).unwrap();
    test_kill_process(pid).expect("alive");
    process.signal(Signal::KILL);
    assert_eq!(process.end().signal(), Some(9));
    // Whoever adopted it may take its time to collect it.
    until("the command is dead", || {
        let state = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        state.map_or(Some(()), |stat| stat.contains(") Z ").then_some(()))
    });
}

#[test]
fn wait_tells_reached_from_late() {
    let mut s = setting();
    assert_eq!(s.output(&["wait", "web", "--for", "fenced"]).status.code(), Some(0));
    let late = s.output(&["wait", "web", "--timeout", "50ms"]);
    assert_eq!(late.status.code(), Some(124));
    assert!(String::from_utf8_lossy(&late.stderr).contains("no holding is proven"), "{late:?}");
    assert_eq!(s.output(&["wait", "web", "--for", "confirmed", "--timeout", "50ms"]).status.code(), Some(124));
    assert_eq!(s.output(&["wait", "nobody"]).status.code(), Some(1));
    s.fake.take("somebody", Duration::from_secs(600));
    assert_eq!(s.output(&["wait", "web", "--for", "serving"]).status.code(), Some(0));
    s.fake.stop();
    let absent = s.output(&["wait", "web", "--timeout", "50ms"]);
    assert_eq!(absent.status.code(), Some(124));
    assert!(String::from_utf8_lossy(&absent.stderr).contains("no agent is running"), "{absent:?}");
}

#[test]
fn fence_and_unfence_say_what_they_did() {
    let s = setting();
    let token = s.fake.take("somebody", Duration::from_secs(600));
    let stale = s.output(&["fence", "web", "--token", "1"]);
    assert_eq!(stale.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&stale.stderr).contains(&format!("which is {token}")), "{stale:?}");
    let fenced = s.output(&["fence", "web", "--token", &token.to_string(), "--reason", "drill"]);
    assert!(fenced.status.success(), "{fenced:?}");
    let status = s.output(&["status", "web"]);
    let table = String::from_utf8_lossy(&status.stdout);
    assert!(table.contains("FENCED") && table.contains("fenced by hand (uid 0): drill"), "{table}");
    assert!(s.output(&["unfence", "web"]).status.success());
    assert!(s.output(&["wait", "web"]).status.success());
}

#[test]
fn status_is_loud_about_what_is_weak() {
    let s = setting();
    let output = s.output(&["status"]);
    let table = String::from_utf8_lossy(&output.stdout);
    for expected in [
        "DEGRADED",
        "stranger's XDP",
        "SERVICE",
        "7 (1 stale)",
        "UNCONFIRMED",
        "no packet was tried",
        "NOT COVERED",
        "tcp/8080",
    ] {
        assert!(table.contains(expected), "no {expected:?} in:\n{table}");
    }
    let output = s.output(&["status", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["services"][1]["name"], "web");
    assert_eq!(report["coverage"]["gaps_mended"], 3);
    let reload = s.output(&["reload"]);
    assert_eq!(String::from_utf8_lossy(&reload.stdout), "changed: web\n");
    s.fake.score.lock().unwrap().refuse_reload = true;
    let reload = s.output(&["reload"]);
    assert_eq!(reload.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&reload.stderr).contains("portcullis check"), "{reload:?}");
}

#[test]
fn check_points_at_what_is_wrong() {
    let s = setting();
    let file = s.file("portcullis.toml");
    fs::write(&file, "[agent]\nidentiti = \"node-a\"\n").unwrap();
    let wrong = s.output(&["check", file.to_str().unwrap()]);
    assert_eq!(wrong.status.code(), Some(1));
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(said.contains("portcullis.toml:2") && said.contains("`identity`"), "{said}");
    fs::write(&file, "[agent]\nidentity = \"node-a\"\n").unwrap();
    let right = s.output(&["check", file.to_str().unwrap()]);
    assert!(right.status.success() && right.stderr.is_empty() && !right.stdout.is_empty(), "{right:?}");
}

#[test]
fn doctor_examines_the_host_the_files_and_the_running_agent() {
    let s = setting();
    let file = s.file("portcullis.toml");
    fs::write(&file, "[agent]\nstate_dir = \"/dev/shm/portcullis\"\ndrift = \"500ppm\"\n").unwrap();
    let output = s.output(&["doctor", "--config", file.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stdout);
    for check in [
        "kernel: ",
        "BTF: ",
        "bpf(): ",
        "capabilities: ",
        "bpffs: ",
        "cgroup v2: ",
        "lockdown: ",
        "time namespace: ",
        "clock slew: ",
        "queue drain: ",
        "ok    configuration: ",
        "BAD   state directory: ",
        "weak  interface: eth0: tc tcx, XDP none",
        "raise `drift` in",
    ] {
        assert!(said.contains(check), "no {check:?} in:\n{said}");
    }
    assert!(!said.contains("drift_ppm"), "{said}");
    assert_eq!(output.status.code(), Some(1), "a state directory that forgets:\n{said}");
    fs::write(&file, "[agent]\nidentiti = \"node-a\"\n").unwrap();
    let output = s.output(&["doctor", "--config", file.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("BAD   configuration: ") && said.contains("queue drain: "), "{said}");
}
