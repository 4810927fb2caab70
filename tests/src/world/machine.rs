//! A host that boots: a node with a systemd of its own as PID 1.

use std::{
    fs, io,
    ops::Deref,
    os::unix::fs::{OpenOptionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Output,
    time::Duration,
};

use serde_json::Value;

use super::{Answer, Command, Node, Process, World, binary, http};
use crate::{clock, residue};

/// How long a boot may take.
const BOOT: Duration = Duration::from_secs(30);
/// How long PID 1's supervisor may take to end once PID 1 is dead.
const END: Duration = Duration::from_secs(10);
/// How long the agent may take to answer one request.
const ANSWER: Duration = Duration::from_secs(5);

/// Makes the container's root, a copy of this machine's that forgets, and becomes its supervisor. All of it happens in a
/// mount namespace of its own, so that nothing is left mounted however the container ends; cgroup v2 alone is shown to
/// the container, also on a hybrid host. `$1` is the machine's folder, the rest the supervisor's arguments.
const START: &str = r#"
set -e
machine=$1; shift
mount -t tmpfs tmpfs "$machine/memory"
mkdir "$machine/memory/upper" "$machine/memory/work"
cp -a "$machine/files/." "$machine/memory/upper"
mount -t overlay -o "lowerdir=/,upperdir=$machine/memory/upper,workdir=$machine/memory/work" overlay "$machine/root"
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
exec systemd-nspawn --directory="$machine/root" "$@"
"#;

/// A node in a container: its network namespace, bpffs, state and cgroup are the machine's. What [`Node`] can do, a machine
/// can do, but its agent belongs to its systemd. PID 1, and with it everything inside, is killed when it is dropped.
#[derive(Debug)]
pub struct Machine {
    node: Node,
    folder: PathBuf,
    booted: Option<(Process, u32)>,
}

impl World {
    /// A machine that is switched off: files can be put on it, then it is booted. The agent's program is there already.
    pub fn machine(&self, name: &str) -> Machine {
        let node = self.node(name);
        let folder = node.folder().join("machine");
        for part in ["files/etc/systemd/system", "memory", "root"] {
            make(&folder.join(part));
        }
        let machine = Machine { node, folder, booted: None };
        // What makes a machine, and nothing of what this one does when it has booted.
        symlink("/usr/lib/systemd/system/sysinit.target", machine.at("/etc/systemd/system/default.target"))
            .unwrap_or_else(|e| panic!("set the boot target: {e}"));
        machine
    }
}

impl Machine {
    /// Where one of the machine's files is to be found from outside.
    fn at(&self, path: &str) -> PathBuf {
        let root = match &self.booted {
            None => self.folder.join("files"),
            Some((_, leader)) => PathBuf::from(format!("/proc/{leader}/root")),
        };
        root.join(path.trim_start_matches('/'))
    }

    /// Writes a file, readable for all; before the machine boots or while it runs.
    #[track_caller]
    pub fn write(&self, path: &str, contents: &str) {
        let at = self.at(path);
        make(at.parent().expect("a file lies in a folder"));
        let file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&at);
        file.and_then(|mut file| io::Write::write_all(&mut file, contents.as_bytes()))
            .unwrap_or_else(|e| panic!("write the machine's {path}: {e}"));
    }

    /// Reads a file of the running machine.
    #[track_caller]
    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap_or_else(|e| panic!("read the machine's {path}: {e}"))
    }

    /// Boots, and waits until nothing is left to be started.
    #[track_caller]
    pub fn boot(&mut self) {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "sh", "-c", START, "start"]).arg(&self.folder).args([
            "--boot",
            "--register=no",
            "--keep-unit",
            "--link-journal=no",
            "--console=pipe",
            "--capability=all",
            "--system-call-filter=bpf perf_event_open",
            &format!("--network-namespace-path={}", text(&self.node.path())),
            &format!("--bind={}:/sys/fs/bpf", text(self.node.bpffs())),
            &format!("--bind={}:/var/lib/portcullis", text(&self.node.state())),
            &format!("--bind-ro={}:/usr/bin/portcullis", text(&binary("portcullis"))),
        ]);
        let name = format!("{}-boot", self.node.name());
        let mut supervisor = self.node.spawn_in(&self.node.cgroup().child("machine"), &name, &mut command);
        let mut leader = None;
        clock::wait_until(BOOT, || {
            leader = residue::child_init(supervisor.pid());
            leader.is_some() || supervisor.ended().is_some()
        });
        let Some(leader) = leader else { panic!("the machine does not boot:\n{}", supervisor.log()) };
        self.booted = Some((supervisor, leader));
        let mut last = None;
        let up = clock::wait_until(BOOT, || {
            // Fails at once until PID 1 answers, then waits.
            let output = self.try_run("systemctl", &["is-system-running", "--wait"]);
            let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let up = matches!(state.as_str(), "running" | "degraded");
            last = Some(output);
            up
        });
        assert!(up, "the machine does not finish to boot: {last:?}");
    }

    /// A command inside the machine.
    pub fn command(&self, program: &str) -> Command {
        let (_, leader) = self.booted.as_ref().expect("the machine was booted");
        let mut command = Command::new("nsenter");
        command.args(["--target", &leader.to_string(), "--all", "--", program]);
        command
    }

    /// Runs a command inside the machine, whatever becomes of it.
    #[track_caller]
    pub fn try_run(&self, program: &str, arguments: &[&str]) -> Output {
        let output = self.command(program).args(arguments).output();
        output.unwrap_or_else(|e| panic!("run {program} inside the machine: {e}"))
    }

    /// Runs a command inside the machine that must succeed; returns its standard output without the last line's end.
    #[track_caller]
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.try_run(program, arguments);
        assert!(
            output.status.success(),
            "{program} {}: {}\n{}{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr),
            self.journal()
        );
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// One property of a unit.
    #[track_caller]
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.run("systemctl", &["show", "--property", name, "--value", unit])
    }

    /// What systemd and the unit itself have logged since the unit was last started.
    pub fn log(&self, unit: &str) -> String {
        let last = format!("_SYSTEMD_INVOCATION_ID={}", self.property(unit, "InvocationID"));
        let by_systemd = format!("INVOCATION_ID={}", self.property(unit, "InvocationID"));
        self.run("journalctl", &["--no-pager", "--output=cat", &last, "+", &by_systemd])
    }

    /// The last lines of the machine's journal, for a failing test.
    pub fn journal(&self) -> String {
        let output = self.try_run("journalctl", &["--no-pager", "--lines=60", "--output=short-monotonic"]);
        format!("--- journal ---\n{}", String::from_utf8_lossy(&output.stdout))
    }

    /// Asks the machine's agent by GET.
    ///
    /// # Errors
    /// Nobody listens, or nothing is answered within five seconds.
    pub fn get(&self, path: &str) -> io::Result<Answer> {
        http::request(&self.at("/run/portcullis/agent.sock"), "GET", path, None, ANSWER)
    }

    /// Asks for `path` until its JSON satisfies `condition`; panics with the last answer after ten seconds.
    #[track_caller]
    pub fn until(&self, path: &str, condition: impl Fn(&Value) -> bool) {
        let mut last = None;
        let satisfied = clock::wait_until(Duration::from_secs(10), || {
            let answer = self.get(path);
            let satisfied = answer.as_ref().is_ok_and(|answer| answer.status == 200 && condition(&answer.json()));
            last = Some(answer);
            satisfied
        });
        assert!(satisfied, "{path} never became what the test waits for: {last:?}\n{}", self.journal());
    }
}

impl Deref for Machine {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some((mut supervisor, leader)) = self.booted.take() {
            // Everything inside dies with PID 1; the supervisor sees that and cleans up.
            residue::kill(leader);
            supervisor.wait(END);
        }
    }
}

#[track_caller]
fn make(folder: &Path) {
    fs::create_dir_all(folder).unwrap_or_else(|e| panic!("make {}: {e}", folder.display()));
}
