//! What a valid configuration says: checked, with every default filled in. The rest of the agent sees only this.

use std::{net::IpAddr, path::PathBuf, time::Duration};

/// The whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub agent: Agent,
    /// In the order of the file; names are unique.
    pub services: Vec<Service>,
}

/// `[agent]`: what concerns the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    /// Who this host is in a lease. Default: the host name.
    pub identity: String,
    /// Default `/run/portcullis/agent.sock`.
    pub socket: PathBuf,
    /// The group that may read the socket besides root. Default `portcullis`; a group that does not exist reads nothing.
    pub socket_group: String,
    /// Durable state. Default `/var/lib/portcullis`.
    pub state_dir: PathBuf,
    /// Where programs, links and maps are pinned; mounted if it is no bpffs. Default `/sys/fs/bpf/portcullis`.
    pub bpffs: PathBuf,
    /// The host's lock: one agent per host. Default `/run/portcullis/agent.lock`.
    pub lock: PathBuf,
    /// The cgroup whose programs are the backstop. Default: the cgroup v2 root.
    pub cgroup_root: Option<PathBuf>,
    pub xdp: Xdp,
    pub tc: Tc,
    pub attach: Attach,
    /// Interfaces that are left alone, by name; a `*` at the end matches the rest.
    pub exclude_interfaces: Vec<String>,
    /// The bound on clock-rate error, parts per million. Default 100,000 (10 %).
    pub drift_ppm: u32,
    /// With `scope = "node"`: inbound SSH stays open. Default true.
    pub exempt_ssh: bool,
    /// Endpoints that no gate cuts.
    pub exempt: Vec<Endpoint>,
}

/// `xdp`: the earliest drop, on top of tc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xdp {
    /// Native, else generic, else none, per interface; what was chosen is in the status.
    Auto,
    Native,
    Generic,
    Off,
}

/// `tc`: how the classifiers are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tc {
    /// TCX where the kernel has it (6.6), else clsact.
    Auto,
    Tcx,
    Clsact,
}

/// `attach`: when the classifiers are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// From start-up on: the deadline cuts with nobody alive.
    Armed,
    /// Only while fenced: no packet pays before that, and the dead-man's switch is forfeited.
    OnFence,
}

/// `[[service]]`: one single-authority function.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// 1 to 63 bytes of `a-z A-Z 0-9 . _ -`.
    pub name: String,
    pub lease: Lease,
    /// The time kept back for the fence itself.
    pub margin: Duration,
    /// The service's own addresses on this host.
    pub addresses: Vec<Prefix>,
    /// Addresses of the service that live behind this host: containers, virtual machines, DNAT targets.
    pub behind: Vec<Prefix>,
    /// What this host sends to on the service's behalf, such as a storage target.
    pub remotes: Vec<Prefix>,
    /// Narrow `addresses` and `behind` to these; empty: every protocol and port.
    pub ports: Vec<Ports>,
    /// Narrow `remotes` to these; empty: every protocol and port.
    pub remote_ports: Vec<Ports>,
    pub scope: Scope,
    pub neighbours: Neighbours,
    pub when_store_lost: StoreLost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// What the selectors name.
    Service,
    /// All of this node's traffic but what is exempt.
    Node,
}

/// `neighbours`: what becomes of ARP and neighbour discovery for `addresses` and `behind` while the gate is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbours {
    /// Cut with the rest, so that no peer learns or keeps this host as the address's place.
    Cut,
    /// Left alone: the address is also the node's own, or of several services.
    Keep,
}

/// `when_store_lost`: what happens when the store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreLost {
    /// The deadline decides.
    Fence,
    /// Keep serving on the operator's word; forfeits the guarantee.
    Hold,
}

/// `lease`: where the authority is recorded.
#[derive(Clone, Debug, PartialEq)]
pub enum Lease {
    /// Kept by this agent; excludes within this host only.
    Local {
        /// The longest TTL a holder may ask for; longer ones are cut to it.
        ttl_cap: Duration,
    },
}

/// An address or a prefix; a plain address has the full length. Host bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    pub address: IpAddr,
    /// 0 to 32 or 0 to 128.
    pub length: u8,
}

/// A protocol with a port or a range of ports, `tcp/5432` or `udp/7000-7100`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ports {
    pub protocol: Protocol,
    pub first: u16,
    /// Inclusive, not below `first`.
    pub last: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// One remote endpoint, `tcp/10.0.0.2:2379` or `tcp/[fd00::2]:2379`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub protocol: Protocol,
    pub address: IpAddr,
    pub port: u16,
}
