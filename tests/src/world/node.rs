//! A host on which an agent runs: a namespace with its cgroup, a bpffs, a folder.

use std::{
    fs,
    ops::Deref,
    path::{Path, PathBuf},
};

use aya::maps::{Array, Map, MapData};
use portcullis::core::time::BootInstant;
use portcullis_common::layout::{Gate, GateName, MAX_GATES, maps};

use super::{Agent, Command, Namespace, Process, Refusal, World, binary, namespace::join_cgroup};

/// A host. What [`Namespace`] can do, a node can do; its cgroup stands in for the host's root cgroup.
#[derive(Clone, Debug)]
pub struct Node {
    namespace: Namespace,
    folder: PathBuf,
    bpffs: PathBuf,
}

impl Node {
    pub(super) fn new(world: &World, name: &str) -> Self {
        let namespace = world.namespace(name);
        let folder = world.folder().join(name);
        let bpffs = world.bpffs(&format!("{name}/bpf"));
        let node = Self { namespace, folder, bpffs };
        // As the service manager does before it starts an agent.
        fs::create_dir(node.state()).unwrap_or_else(|e| panic!("make {}: {e}", node.state().display()));
        node
    }

    /// The node's own folder: configuration, state, socket.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// The agent's durable state.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// The agent's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("agent.sock")
    }

    /// A command that will run in the node's namespace and cgroup, as everything on a host runs below its root cgroup.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.namespace.command(program);
        join_cgroup(&mut command, self.cgroup());
        command
    }

    /// The agent's program, speaking to this node's agent: `node.portcullis(&["run", "pg", "--", "sleep", "9"])`.
    pub fn portcullis(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(binary("portcullis"));
        command.arg("--socket").arg(self.socket()).args(arguments);
        command
    }

    /// Holds a service's lease with `portcullis run` for as long as `command` lives.
    pub fn hold(&self, service: &str, ttl: &str, command: &[&str]) -> Process {
        let arguments = [&["run", service, "--ttl", ttl, "--"], command].concat();
        self.spawn(&format!("{}-run-{service}", self.name()), &mut self.portcullis(&arguments))
    }

    /// Starts an agent and waits until it is ready. `config` is the configuration file's text; what ties the agent to this
    /// node (socket, state, lock, bpffs, cgroup root, identity) is filled in where the text does not say it.
    #[track_caller]
    pub fn agent(&self, config: &str) -> Agent {
        Agent::start(self.clone(), config)
    }

    /// Starts an agent that may refuse to start: a second one on this node, or one with a bad configuration.
    ///
    /// # Errors
    /// The agent ended before it was ready: its status and log.
    #[track_caller]
    pub fn try_agent(&self, config: &str) -> Result<Agent, Refusal> {
        Agent::try_start(self.clone(), config)
    }

    /// Reads a service's gate from the pinned maps, agent or no agent. Nothing if no slot bears the name.
    #[track_caller]
    pub fn gate(&self, service: &str) -> Option<Gate> {
        let slot = self.slot(service)?;
        let gates: Array<_, Gate> = self.pinned_array(maps::GATES)?;
        Some(gates.get(&slot, 0).unwrap_or_else(|e| panic!("read {} {slot}: {e}", maps::GATES)))
    }

    /// Writes a service's deadline into the pinned map, as whoever is root can. Panics if there is no such gate.
    #[track_caller]
    pub fn overwrite_deadline(&self, service: &str, deadline: BootInstant) {
        let gate = self.gate(service).unwrap_or_else(|| panic!("{}: no gate is called {service}", self.name()));
        let slot = self.slot(service).expect("the gate was just read");
        let mut gates: Array<_, Gate> = self.pinned_array(maps::GATES).expect("the gate was just read");
        let written = gates.set(slot, Gate { deadline_ns: deadline.as_nanos(), ..gate }, 0);
        written.unwrap_or_else(|e| panic!("write {} {slot}: {e}", maps::GATES));
    }

    /// The number of a service's gate in the pinned maps. Nothing if no slot bears the name.
    #[track_caller]
    pub(crate) fn slot(&self, service: &str) -> Option<u32> {
        let names: Array<_, GateName> = self.pinned_array(maps::NAMES)?;
        let wanted = service.as_bytes();
        (0..MAX_GATES).find(|slot| {
            let GateName(name) = names.get(slot, 0).unwrap_or_else(|e| panic!("read {} {slot}: {e}", maps::NAMES));
            name.starts_with(wanted) && name[wanted.len()..].iter().all(|byte| *byte == 0)
        })
    }

    /// The instant at which a service's gate closes unless renewed, as the kernel programs read it. Panics if there is no such
    /// gate. Below [`portcullis_common::layout::FENCE_NUMBERS`] the gate has been closed by command.
    #[track_caller]
    pub fn deadline(&self, service: &str) -> BootInstant {
        let gate = self.gate(service).unwrap_or_else(|| panic!("{}: no gate is called {service}", self.name()));
        BootInstant::from_nanos(gate.deadline_ns)
    }

    /// The pin of a map that the agent has made; panics if there is none.
    #[track_caller]
    pub fn pin(&self, name: &str) -> PathBuf {
        find(&self.bpffs, name).unwrap_or_else(|| panic!("no {name} is pinned below {}", self.bpffs.display()))
    }

    fn pinned_array<V: aya::Pod>(&self, name: &str) -> Option<Array<MapData, V>> {
        let pin = find(&self.bpffs, name)?;
        let data = MapData::from_pin(&pin).unwrap_or_else(|e| panic!("open the pin {}: {e}", pin.display()));
        let array = Array::try_from(Map::Array(data));
        Some(array.unwrap_or_else(|e| panic!("{} is not the expected array: {e}", pin.display())))
    }
}

impl Deref for Node {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

/// The file `name` in `folder` or below it: the layout's version is part of the path, and no test's concern.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().find_map(|entry| {
        let path = entry.path();
        if path.is_dir() { find(&path, name) } else { (entry.file_name() == name).then_some(path) }
    })
}
