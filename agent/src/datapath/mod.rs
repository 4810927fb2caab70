//! The data path: everything that touches the kernel's side of the fence, and all use of aya.
//!
//! * [`gates`]: the mapped gates; the only writer of a deadline.
//! * [`coverage`]: what is attached, as the kernel tells it.
//! * [`self_test`]: synthetic packets through the programs.
//! * [`doctor`]: what this host lacks, with the remedy.
//!
//! Programs, links and maps are pinned, so that all of it outlives the agent. A starting agent adopts what it finds after
//! checking it, swaps the programs, and opens nothing.

mod cgroup;
mod clsact;
mod counters;
mod cover;
pub mod coverage;
pub mod doctor;
mod error;
pub mod gates;
mod host;
mod interfaces;
mod links;
mod maps;
mod netlink;
mod programs;
mod rules;
pub mod self_test;
mod sys;

use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
};

use portcullis_common::layout::LAYOUT_VERSION;

use self::{
    cgroup::CgroupRoot,
    coverage::{Coverage, XdpState},
    gates::{GateView, Gates, Slot},
    host::HostLock,
    interfaces::Interfaces,
    links::Links,
    maps::Maps,
    netlink::Netlink,
    programs::Programs,
    sys::AttachType,
};
pub use self::{
    error::DataPathError,
    interfaces::{Change, Interface, InterfaceKind},
};
use crate::{
    config::model::{Agent, Attach, Tc, Xdp},
    crash,
};

/// The kernel object of this build.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/portcullis.o"));

/// Which way packets go at a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    In,
    Out,
}

/// How classifiers are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TcFlavour {
    Tcx,
    Clsact,
}

/// What [`DataPath::start`] needs.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    pub agent: &'a Agent,
    /// The kernel object, aligned to 8 bytes.
    pub object: &'static [u8],
}

/// A gate that was there already: another agent of this boot assigned it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    pub slot: Slot,
    /// The service's name.
    pub name: String,
    pub view: GateView,
}

/// The handle of the data path. Dropping it detaches nothing and closes nothing.
pub struct DataPath {
    // The lock goes last: fields are dropped in this order.
    programs: Programs,
    maps: Maps,
    gates: Gates,
    links: Links,
    netlink: Netlink,
    interfaces: Interfaces,
    cgroup: Result<CgroupRoot, String>,
    flavour: TcFlavour,
    exclude: Vec<String>,
    /// XDP as it was attached at the start, by interface index.
    xdp: BTreeMap<u32, XdpState>,
    armed: bool,
    mended: u64,
    pins: PathBuf,
    _lock: HostLock,
}

impl std::fmt::Debug for DataPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataPath").field("pins", &self.pins).field("links", &self.links).finish_non_exhaustive()
    }
}

impl DataPath {
    /// Takes the host's lock, adopts what is pinned or pins anew, loads the programs and attaches them.
    ///
    /// # Errors
    /// Nothing is removed, and nothing opens: what was attached before stays attached as it was, except that programs
    /// may already have been swapped for this version's.
    pub fn start(options: &Options<'_>) -> Result<(Self, Vec<Adopted>), DataPathError> {
        let agent = options.agent;
        let lock = HostLock::take(&agent.lock)?;
        crash::point("start-after-lock");
        let pins = agent.bpffs.join(format!("v{LAYOUT_VERSION}"));
        let (map_pins, link_pins) = (pins.join("maps"), pins.join("links"));
        host::ensure_bpffs(&agent.bpffs)?;
        for folder in [&map_pins, &link_pins] {
            host::ensure_bpffs(folder)?;
        }
        crash::point("start-after-bpffs");
        check_versions(&agent.bpffs, &pins)?;

        let missing = maps::check_pins(&map_pins)?;
        if !missing.is_empty() && links::any_pinned(&link_pins)? {
            return Err(DataPathError::MissingMaps { folder: map_pins, missing: missing.join(", ") });
        }
        let mut programs = Programs::open(options.object, &map_pins)?;
        crash::point("start-after-maps");
        let (maps, gates, names) = Maps::take(programs.object(), &map_pins)?;
        let gates = Gates::new(&gates, names)?;
        programs.load()?;
        crash::point("start-after-programs");

        let netlink_failed = |operation| move |source| DataPathError::Netlink { operation, source };
        let mut netlink = Netlink::open().map_err(netlink_failed("open a route netlink socket"))?;
        let interfaces = Interfaces::follow(&mut netlink).map_err(netlink_failed("list the interfaces"))?;
        let flavour = choose(agent.tc)?;
        let links = Links::adopt(&link_pins)?;
        check_namespace(&links)?;
        crash::point("start-after-adopt");

        let mut path = Self {
            programs,
            maps,
            gates,
            links,
            netlink,
            interfaces,
            cgroup: CgroupRoot::open(agent),
            flavour,
            exclude: agent.exclude_interfaces.clone(),
            xdp: BTreeMap::new(),
            armed: false,
            mended: 0,
            pins,
            _lock: lock,
        };
        path.swap_adopted()?;
        // A classifier that an earlier agent attached to fence stays until this one has found out whether to.
        path.armed = agent.attach == Attach::Armed || path.has_classifiers();
        path.attach(agent)?;
        crash::point("start-after-attach");
        let adopted = path.adopted();
        Ok((path, adopted))
    }

    fn attach(&mut self, agent: &Agent) -> Result<(), DataPathError> {
        for interface in self.interfaces.known().to_vec() {
            self.cover(&interface);
            self.leave_other_flavour(&interface)?;
            crash::point("attach-between-interfaces");
            let mode = if agent.attach == Attach::Armed { agent.xdp } else { Xdp::Off };
            let state = self.cover_xdp(&interface, mode);
            self.xdp.insert(interface.index, state);
        }
        crash::point("attach-before-cgroup");
        self.cover_cgroup();
        Ok(())
    }

    fn adopted(&self) -> Vec<Adopted> {
        let named = self.gates.named();
        named.map(|(slot, name)| Adopted { slot, name: name.to_owned(), view: self.gates.view(slot) }).collect()
    }

    /// The gates.
    pub fn gates(&mut self) -> &mut Gates {
        &mut self.gates
    }

    /// `attach = "on-fence"`: attaches the classifiers and the backstop now. The gate is closed first.
    pub fn attach_now(&mut self) -> Result<Coverage, DataPathError> {
        self.armed = true;
        let before = self.mended;
        let mut coverage = self.verify()?;
        // What was not there was not meant to be.
        self.mended = before;
        coverage.mended = before;
        coverage.mended_now.clear();
        Ok(coverage)
    }

    /// `attach = "on-fence"`: detaches what [`DataPath::attach_now`] attached, once every gate is open again.
    pub fn detach_now(&mut self) -> Result<(), DataPathError> {
        self.armed = false;
        for interface in self.interfaces.known().to_vec() {
            self.uncover(interface.index)?;
        }
        self.uncover_cgroup()
    }

    /// Readable when interfaces may have changed; then [`DataPath::interfaces_ready`] is due.
    pub fn interfaces_fd(&self) -> BorrowedFd<'_> {
        self.interfaces.fd()
    }

    /// Follows the interfaces: attaches to new ones at once and forgets those that are gone.
    pub fn interfaces_ready(&mut self) -> Result<Vec<Change>, DataPathError> {
        let heard = self.interfaces.heard();
        if heard.map_err(|source| DataPathError::Netlink { operation: "hear of interfaces", source })? {
            self.refresh()
        } else {
            Ok(Vec::new())
        }
    }

    fn refresh(&mut self) -> Result<Vec<Change>, DataPathError> {
        let changes = self.interfaces.refresh(&mut self.netlink);
        let changes = changes.map_err(|source| DataPathError::Netlink { operation: "list the interfaces", source })?;
        for change in &changes {
            match change {
                Change::Gone { index, .. } => self.forget(*index)?,
                Change::New { index, .. } | Change::Renamed { index, .. } => {
                    let interface = self.interfaces.known().iter().find(|one| one.index == *index).cloned();
                    if let Some(interface) = interface {
                        // A refusal is told by the next `verify`, which tries again.
                        self.cover(&interface);
                    }
                }
            }
        }
        Ok(changes)
    }
}

/// Detaches and unpins everything that any version of the agent left on this host: **this opens every gate**. For
/// uninstalling only. It needs no agent, and refuses while one runs.
pub fn uninstall_and_open_gates(agent: &Agent) -> Result<(), DataPathError> {
    let _lock = HostLock::take(&agent.lock)?;
    let failed = |operation| move |source| DataPathError::Netlink { operation, source };
    let mut netlink = Netlink::open().map_err(failed("open a route netlink socket"))?;
    for interface in interfaces::list(&mut netlink).map_err(failed("list the interfaces"))? {
        for direction in [Direction::In, Direction::Out] {
            clsact::remove(&mut netlink, interface.index, direction)
                .map_err(failed("remove a clsact filter of ours"))?;
        }
    }
    for folder in versions(&agent.bpffs)? {
        if folder.join("links").exists() {
            links::detach_all(&folder.join("links"))?;
        }
        std::fs::remove_dir_all(&folder).map_err(|source| DataPathError::Pin {
            operation: "remove",
            path: folder,
            source,
        })?;
    }
    Ok(())
}

/// The folders of pins, one per version of the layout.
fn versions(bpffs: &Path) -> Result<Vec<PathBuf>, DataPathError> {
    let failed = |source| DataPathError::Pin { operation: "read the folder", path: bpffs.to_owned(), source };
    let is_version = |name: &str| name.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok());
    let entries = match std::fs::read_dir(bpffs) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if is_version(&entry.file_name().to_string_lossy()) {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

/// Programs of another layout judge by gates of their own, which fall for good once nobody renews them.
fn check_versions(bpffs: &Path, ours: &Path) -> Result<(), DataPathError> {
    for path in versions(bpffs)?.into_iter().filter(|path| path != ours) {
        if path.join("links").exists() && links::any_pinned(&path.join("links"))? {
            return Err(DataPathError::OtherVersion { path });
        }
    }
    Ok(())
}

/// The loopback interface, the first of every network namespace.
const LOOPBACK: u32 = 1;

fn choose(tc: Tc) -> Result<TcFlavour, DataPathError> {
    let has_tcx = match tc {
        Tc::Clsact => false,
        Tc::Auto | Tc::Tcx => match sys::tcx_query(LOOPBACK, AttachType::TcxIngress) {
            Ok(_) => true,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => false,
            Err(source) => return Err(DataPathError::Netlink { operation: "query the TCX hook of lo", source }),
        },
    };
    match (tc, has_tcx) {
        (Tc::Auto | Tc::Tcx, true) => Ok(TcFlavour::Tcx),
        (Tc::Auto | Tc::Clsact, false) | (Tc::Clsact, true) => Ok(TcFlavour::Clsact),
        (Tc::Tcx, false) => Err(DataPathError::NoTcx),
    }
}

/// Interface numbers repeat in every network namespace. An agent that was started in another one than its predecessor
/// would take the links for its own and detach them.
fn check_namespace(links: &Links) -> Result<(), DataPathError> {
    let canary = links::Attachment::Tcx(Direction::In, LOOPBACK);
    let Some((id, _)) = links.get(canary) else { return Ok(()) };
    match sys::tcx_query(LOOPBACK, AttachType::TcxIngress) {
        Ok(order) if !order.iter().any(|entry| entry.link == id) => {
            Err(DataPathError::OtherNamespace { path: links.path(canary) })
        }
        _ => Ok(()),
    }
}
