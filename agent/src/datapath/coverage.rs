//! What is covered, as the kernel tells it: the types that the status shows.

use super::interfaces::InterfaceKind;

/// What [`super::DataPath::verify`] found, after it mended what it could.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Whether the classifiers are attached now (always, unless `attach = "on-fence"`).
    pub armed: bool,
    pub interfaces: Vec<InterfaceCoverage>,
    pub cgroup: CgroupCoverage,
    /// Gaps found and mended since the agent started.
    pub mended: u64,
    /// Gaps found and mended by this call, one sentence each.
    pub mended_now: Vec<String>,
    /// Why the host is covered less than it was asked to be, one sentence each.
    pub degraded: Vec<String>,
}

impl Coverage {
    /// Whether every interface that is not excluded has its classifiers, and sockets are stamped: without that the
    /// agent is not ready. XDP and the cgroup backstop come on top.
    pub fn is_whole(&self) -> bool {
        let attached = |state: &HookState| match state {
            HookState::First | HookState::Clsact | HookState::Excluded => true,
            HookState::NotArmed => !self.armed,
            HookState::Missing { .. } => false,
        };
        self.interfaces.iter().all(|one| attached(&one.ingress) && attached(&one.egress))
            && attached(&self.cgroup.sockets)
    }
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceCoverage {
    pub name: String,
    pub index: u32,
    pub kind: InterfaceKind,
    pub ingress: HookState,
    pub egress: HookState,
    pub xdp: XdpState,
}

/// The classifier at one hook of one interface, or a program of the cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookState {
    /// Attached; at a TCX hook: before every other program.
    First,
    /// Attached as a filter of the clsact qdisc, before every other filter.
    Clsact,
    /// Not attached, or not first, and it could not be mended.
    Missing { reason: String },
    /// Excluded by the configuration.
    Excluded,
    /// `attach = "on-fence"`, and nothing is fenced.
    NotArmed,
}

/// XDP on one interface. It only comes on top of the classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XdpState {
    Native,
    Generic,
    /// Not wanted: by the configuration, by the kind of the interface, or since it came after the start.
    Unused,
    /// A stranger's program is there, and stays.
    Occupied,
    Failed {
        reason: String,
    },
}

/// The programs of the cgroup root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupCoverage {
    /// `None`: there is no cgroup v2.
    pub path: Option<std::path::PathBuf>,
    pub ingress: HookState,
    pub egress: HookState,
    /// The program that stamps sockets.
    pub sockets: HookState,
}
