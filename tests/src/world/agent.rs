//! The real agent, on a node.

use std::{
    fs, io,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::process::Signal;
use serde_json::Value;
use toml::{Table, Value as Toml};

use super::{Answer, Command, Connection, Node, Process, binary, http};
use crate::clock;

/// How long an agent may take from its start until it answers.
const READY: Duration = Duration::from_secs(60);
/// How long it may take to answer one request.
const ANSWER: Duration = Duration::from_secs(5);

/// An agent started by [`Node::agent`]. What [`Process`] can do, an agent can do: `kill`, `stop`, `cont`, `terminate`, `log`.
#[derive(Debug)]
pub struct Agent {
    node: Node,
    /// Of its log and its configuration file: a node may be asked to run two.
    name: String,
    config: PathBuf,
    process: Process,
    armed_in: Duration,
}

impl Agent {
    #[track_caller]
    pub(super) fn start(node: Node, config: &str) -> Self {
        match Self::try_start(node, config) {
            Ok(agent) => agent,
            Err(failure) => panic!("the agent {failure}"),
        }
    }

    #[track_caller]
    pub(super) fn try_start(node: Node, config: &str) -> Result<Self, Refusal> {
        static COUNTER: AtomicU32 = AtomicU32::new(1);
        let name = format!("{}-agent-{}", node.name(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let path = node.folder().join(format!("{name}.toml"));
        write_config(&node, &path, config);
        let start = clock::now();
        let process = launch(&node, &name, &path);
        let mut agent = Self { node, name, config: path, process, armed_in: Duration::ZERO };
        agent.wait_ready(start)?;
        Ok(agent)
    }

    /// Starts the agent again with the same configuration; one that still runs is killed first.
    #[track_caller]
    pub fn restart(&mut self) {
        self.process.kill();
        let start = clock::now();
        self.process = launch(&self.node, &self.name, &self.config);
        if let Err(failure) = self.wait_ready(start) {
            panic!("the restarted agent {failure}");
        }
    }

    /// How long the last start took, from before its process was made until it answered that it was ready.
    pub fn armed_in(&self) -> Duration {
        self.armed_in
    }

    /// Starts the agent again, to end itself at a crash point; one that still runs is killed first. The program must have
    /// been built with the feature `crash-points`.
    #[track_caller]
    pub fn restart_to_crash_at(&mut self, point: &str) {
        self.process.kill();
        let mut command = command(&self.node, &self.config);
        self.process = self.node.spawn(&self.name, command.env("PORTCULLIS_CRASH_AT", point));
    }

    /// Replaces the configuration file; the running agent sees it at [`Agent::reload`] or its next start.
    #[track_caller]
    pub fn configure(&self, config: &str) {
        write_config(&self.node, &self.config, config);
    }

    /// SIGHUP.
    pub fn reload(&self) {
        self.process.signal(Signal::HUP);
    }

    /// Asks the agent by GET.
    ///
    /// # Errors
    /// Nobody listens, or nothing is answered within five seconds.
    pub fn get(&self, path: &str) -> io::Result<Answer> {
        self.request("GET", path, None)
    }

    /// Asks the agent by any method, with a JSON body or none.
    ///
    /// # Errors
    /// As [`Agent::get`].
    pub fn request(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<Answer> {
        http::request(&self.node.socket(), method, path, body, ANSWER)
    }

    /// A connection for many requests.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn connect(&self) -> io::Result<Connection> {
        Connection::open(&self.node.socket(), ANSWER)
    }

    /// Asks `path` until its JSON satisfies `condition`, and returns that; panics with the last answer after ten seconds.
    #[track_caller]
    pub fn until(&self, path: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let mut last = None;
        let mut satisfied = None;
        clock::wait_until(Duration::from_secs(10), || {
            let answer = self.get(path);
            satisfied = answer.as_ref().ok().filter(|a| a.status == 200).map(Answer::json).filter(&condition);
            last = Some(answer);
            satisfied.is_some()
        });
        satisfied.unwrap_or_else(|| panic!("{path} never became what the test waits for; the last answer: {last:?}"))
    }

    fn wait_ready(&mut self, start: BootInstant) -> Result<(), Refusal> {
        let mut ended = None;
        let mut last = None;
        // Another agent may hold the socket, and is not to be taken for this one.
        let pid = self.process.pid();
        let ready = clock::wait_until(READY, || {
            ended = self.process.ended();
            let answer = self.get("/v1/health");
            let ready = answer.as_ref().is_ok_and(|answer| answer.status == 200 && answer.pid == pid);
            last = Some(answer);
            ready || ended.is_some()
        });
        match ended {
            Some(status) => Err(Refusal { status, log: self.process.log() }),
            None if ready => {
                self.armed_in = clock::now().saturating_since(start);
                Ok(())
            }
            None => panic!("the agent is not ready after {READY:?}; /v1/health: {last:?}"),
        }
    }
}

impl Deref for Agent {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// An agent that ended instead of becoming ready, see [`Node::try_agent`].
#[derive(Debug)]
pub struct Refusal {
    pub status: ExitStatus,
    pub log: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ended with {} before it was ready:\n{}", self.status, self.log)
    }
}

fn launch(node: &Node, name: &str, config: &Path) -> Process {
    node.spawn(name, &mut command(node, config))
}

fn command(node: &Node, config: &Path) -> Command {
    let mut command = node.command(binary("portcullis"));
    command.arg("agent").arg("--config").arg(config);
    command
}

/// Writes `text` with what ties the agent to its node. A text that is no TOML is written as it is: the agent is to refuse it.
fn write_config(node: &Node, path: &Path, text: &str) {
    let text = complete(node, text).unwrap_or_else(|| text.to_owned());
    fs::write(path, text).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}

fn complete(node: &Node, text: &str) -> Option<String> {
    let mut config: Table = text.parse().ok()?;
    let agent = config.entry("agent").or_insert_with(|| Toml::Table(Table::new())).as_table_mut()?;
    let path = |path: PathBuf| Toml::String(path.to_string_lossy().into_owned());
    for (key, value) in [
        ("identity", Toml::String(node.name().to_owned())),
        ("socket", path(node.socket())),
        ("state_dir", path(node.state())),
        ("lock", path(node.folder().join("agent.lock"))),
        ("bpffs", path(node.bpffs().join("portcullis"))),
        ("cgroup_root", path(node.cgroup().path().to_owned())),
    ] {
        agent.entry(key).or_insert(value);
    }
    Some(config.to_string())
}
