//! Hosts, links, agents: made by a [`World`], removed with it.
//!
//! ```no_run
//! use portcullis_tests::world::World;
//!
//! let world = World::new("story");
//! let client = world.namespace("client");
//! let node = world.node("node");
//! world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
//! node.add_address("eth0", "10.9.0.100/32");
//! let mut agent = node.agent("[[service]]\nname = \"pg\"\naddresses = [\"10.9.0.100\"]");
//! agent.kill();
//! ```

mod agent;
mod cgroup;
mod http;
mod lock;
mod machine;
mod namespace;
mod network;
mod node;
mod process;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

pub use agent::{Agent, Refusal};
pub use cgroup::Cgroup;
pub(crate) use cgroup::v2_mount;
pub use http::{Answer, Connection};
pub(crate) use lock::is_owned;
pub use lock::{HeavyLock, heavy};
pub use machine::Machine;
pub use namespace::{Command, Namespace};
pub use node::Node;
pub use process::{Process, binary};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::{clock, residue};

/// Where worlds keep their folders: durable storage, since an agent refuses to keep its state on a tmpfs.
pub const FOLDERS: &str = "/var/tmp";
/// What the name of a world's folder and of its cgroup begins with.
pub const PREFIX: &str = "portcullis-";

/// How long the removal of something may take before it counts as left behind.
const REMOVAL: Duration = Duration::from_secs(10);

/// One test's machine room. Everything made through it is removed when it is dropped, also by a panic; then it checks
/// that nothing is left, and panics with a list if something is.
#[derive(Debug)]
pub struct World {
    id: String,
    folder: PathBuf,
    /// Tells others that the world's process lives, see [`residue`].
    _owner: fs::File,
    namespaces: Mutex<Vec<Namespace>>,
    cgroup: Mutex<Option<Cgroup>>,
    mounts: Mutex<Vec<PathBuf>>,
}

impl World {
    /// A world with a folder of its own. `name` says in listings which test it belongs to: at most 24 characters of
    /// `a-z A-Z 0-9 -`, since it becomes part of socket paths.
    pub fn new(name: &str) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        assert!(
            (1..=24).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'),
            "a world's name is 1 to 24 characters of a-z A-Z 0-9 -, not {name:?}"
        );
        assert!(rustix::process::geteuid().is_root(), "the test world makes namespaces and mounts: run it as root");
        let id = format!("{PREFIX}{}-{}-{name}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(FOLDERS).join(&id);
        // A world of an earlier process with the same process id, killed before it could clean up.
        if folder.exists() {
            residue::clean_world(&id);
        }
        // Owned before it is seen: whoever cleans up takes a folder without an owner for a dead world's.
        let hidden = Path::new(FOLDERS).join(format!(".{id}"));
        fs::create_dir(&hidden).unwrap_or_else(|e| panic!("make the world's folder {}: {e}", hidden.display()));
        let owner = lock::own(&hidden);
        fs::rename(&hidden, &folder).unwrap_or_else(|e| panic!("rename to {}: {e}", folder.display()));
        Self {
            id,
            folder,
            _owner: owner,
            namespaces: Mutex::default(),
            cgroup: Mutex::default(),
            mounts: Mutex::default(),
        }
    }

    /// `portcullis-PID-COUNTER-NAME`: unique among the worlds of a machine.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The world's folder, on durable storage.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A network namespace with `lo` up and nothing else, and a cgroup of the same name for what will run inside.
    pub fn namespace(&self, name: &str) -> Namespace {
        let namespace = Namespace::new(name, &self.folder, self.cgroup(name));
        guard(&self.namespaces).push(namespace.clone());
        namespace
    }

    /// A cgroup below the world's own, which stands in for a host's root cgroup.
    pub fn cgroup(&self, name: &str) -> Cgroup {
        guard(&self.cgroup).get_or_insert_with(|| Cgroup::new(v2_mount().join(&self.id))).child(name)
    }

    /// Mounts a bpffs at `name` in the world's folder.
    pub fn bpffs(&self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        fs::create_dir_all(&path).unwrap_or_else(|e| panic!("make {}: {e}", path.display()));
        mount("bpf", &path, "bpf", MountFlags::empty(), None)
            .unwrap_or_else(|e| panic!("mount a bpffs at {}: {e}", path.display()));
        guard(&self.mounts).push(path.clone());
        path
    }

    /// A host: a namespace with a bpffs and a folder for an agent's state; its cgroup stands in for the root cgroup.
    pub fn node(&self, name: &str) -> Node {
        Node::new(self, name)
    }

    /// Removes what the world owns, and returns what could not be removed or belongs to nobody.
    fn remove(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        if let Some(cgroup) = guard(&self.cgroup).take()
            && let Err(error) = cgroup.remove(REMOVAL)
        {
            left.push(format!("cgroup {}: {error}", cgroup.path().display()));
        }
        let namespaces: Vec<_> = guard(&self.namespaces).drain(..).map(|n| (n.name().to_owned(), n.inode())).collect();
        let inside = || residue::inside(&namespaces);
        // A thread that was joined a moment ago may still be listed.
        clock::wait_until(Duration::from_millis(500), || inside().is_empty());
        for stray in inside() {
            left.push(stray.to_string());
            stray.end();
        }
        for path in guard(&self.mounts).drain(..).rev() {
            let gone = clock::wait_until(REMOVAL, || unmount(&path, UnmountFlags::empty()).is_ok());
            if !gone {
                left.push(format!("bpffs {} is in use", path.display()));
            }
        }
        let mounts = residue::mounts_below(&self.folder);
        left.extend(mounts.iter().map(|path| format!("mount {}", path.display())));
        if mounts.is_empty()
            && let Err(error) = fs::remove_dir_all(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            left.push(format!("folder {}: {error}", self.folder.display()));
        }
        left
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let left = self.remove();
        if left.is_empty() {
            return;
        }
        let message = format!("world {} leaves behind:\n  {}", self.id, left.join("\n  "));
        if thread::panicking() {
            eprintln!("{message}");
        } else {
            panic!("{message}");
        }
    }
}

/// Locks a mutex of the harness; a panic elsewhere leaves its lists usable for the clean-up.
fn guard<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
