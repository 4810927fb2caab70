//! What tests may leave behind on a machine: found, listed, removed.
//!
//! Each world checks itself when it is dropped. This is for what a killed test could not do: `residue check` after a test run
//! lists everything that bears the project's names (and, against a snapshot taken before, every namespace, mount, link and
//! cgroup that came up since); `residue clean` removes the worlds whose process is dead.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{maps::loaded_maps, programs::loaded_programs};
use portcullis_common::layout::{maps as map_names, programs as program_names};
use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::{
    clock,
    world::{Cgroup, FOLDERS, PREFIX},
};

/// Programs that are not to run once the tests are over, by their process name.
const PROGRAMS: [&str; 2] = ["portcullis", "testserver"];
/// How long the removal of a dead world's parts may take.
const REMOVAL: Duration = Duration::from_secs(10);

/// Something on the machine that a test may have left, in one line: `KIND NAME`.
pub type Item = String;

/// The machine's state as far as tests change it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot(BTreeSet<Item>);

impl Snapshot {
    /// Looks at network namespaces, the root namespace's links, mounts, cgroups, bpffs, BPF objects, folders, processes.
    pub fn take() -> Self {
        let mut items = ours();
        items.extend(network_namespaces().map(|inode| format!("namespace net:[{inode}]")));
        items.extend(names("/sys/class/net").map(|name| format!("link {name}")));
        items.extend(mounts().into_iter().map(|mount| format!("mount {}", mount.point.display())));
        items.extend(names("/sys/fs/bpf").map(|name| format!("pin /sys/fs/bpf/{name}")));
        Self(items)
    }

    /// One item per line.
    pub fn from_text(text: &str) -> Self {
        Self(text.lines().map(str::to_owned).collect())
    }

    /// What is here and was not in `before`.
    pub fn since(&self, before: &Self) -> Vec<Item> {
        self.0.difference(&before.0).cloned().collect()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|item| writeln!(f, "{item}"))
    }
}

/// What bears the project's names and belongs to nobody alive: folders and cgroups of worlds, mounts in them, processes, BPF
/// programs and maps.
pub fn ours() -> BTreeSet<Item> {
    let mut items = BTreeSet::new();
    items.extend(worlds().into_iter().map(|id| format!("world {FOLDERS}/{id}")));
    items.extend(world_cgroups().into_iter().map(|path| format!("cgroup {}", path.display())));
    let folders = format!("{FOLDERS}/{PREFIX}");
    items.extend(
        mounts()
            .into_iter()
            .filter(|mount| mount.point.to_string_lossy().starts_with(&folders))
            .map(|mount| format!("mount {}", mount.point.display())),
    );
    items.extend(
        processes().filter(|process| PROGRAMS.contains(&process.name.as_str())).map(|process| process.to_string()),
    );
    items.extend(bpf_objects());
    items
}

/// What is left of ours, or came up since `before`, once the kernel has had time to finish its removals.
pub fn left(before: Option<&Snapshot>) -> Vec<Item> {
    let look = || match before {
        Some(before) => Snapshot::take().since(before),
        None => ours().into_iter().collect(),
    };
    let mut items = look();
    // Namespaces and BPF objects are freed by the kernel in the background.
    clock::wait_until(Duration::from_secs(3), || {
        items = look();
        items.is_empty()
    });
    items
}

/// Removes every world whose process is dead; returns their names.
pub fn clean() -> Vec<String> {
    let mut cleaned: BTreeSet<String> = worlds().into_iter().collect();
    cleaned.extend(world_cgroups().iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())));
    cleaned.retain(|id| !crate::world::is_owned(&Path::new(FOLDERS).join(id)));
    for id in &cleaned {
        clean_world(id);
    }
    cleaned.into_iter().collect()
}

/// Removes one dead world: its processes first, then cgroups, mounts, folder.
pub(crate) fn clean_world(id: &str) {
    let cgroup = crate::world::v2_mount().join(id);
    if cgroup.exists()
        && let Err(error) = Cgroup::existing(cgroup.clone()).remove(REMOVAL)
    {
        eprintln!("remove the cgroup {}: {error}", cgroup.display());
    }
    let folder = Path::new(FOLDERS).join(id);
    for mount in mounts_below(&folder).iter().rev() {
        if !clock::wait_until(REMOVAL, || unmount(mount, UnmountFlags::empty()).is_ok()) {
            eprintln!("unmount {}: it is in use", mount.display());
        }
    }
    if mounts_below(&folder).is_empty()
        && let Err(error) = fs::remove_dir_all(&folder)
        && error.kind() != io::ErrorKind::NotFound
    {
        eprintln!("remove {}: {error}", folder.display());
    }
}

/// A mount of this process's mount namespace.
#[derive(Clone, Debug)]
pub(crate) struct Mount {
    pub(crate) point: PathBuf,
    pub(crate) kind: String,
}

/// Every mount, in the order in which they were made.
pub(crate) fn mounts() -> Vec<Mount> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted");
    table
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let point = before.split(' ').nth(4)?.replace("\\040", " ");
            Some(Mount { point: point.into(), kind: after.split(' ').next()?.to_owned() })
        })
        .collect()
}

pub(crate) fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    mounts().into_iter().map(|mount| mount.point).filter(|point| point.starts_with(folder)).collect()
}

/// A process or thread that is somewhere it should not be.
#[derive(Clone, Debug)]
pub(crate) struct Stray {
    pid: u32,
    name: String,
    /// The world's namespace it is in, if that is why it is listed.
    namespace: Option<String>,
}

impl Stray {
    /// Kills it, unless it is a thread of this process.
    pub(crate) fn end(&self) {
        if self.pid != std::process::id() {
            kill(self.pid);
        }
    }
}

/// SIGKILL; a process that has ended in the meantime is what was wanted.
pub(crate) fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed())
        && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
    {
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
    }
}

impl fmt::Display for Stray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)?;
        match &self.namespace {
            Some(namespace) => write!(f, " in the namespace {namespace}"),
            None => Ok(()),
        }
    }
}

/// Processes, and threads of this process, inside one of `namespaces` (name and inode).
pub(crate) fn inside(namespaces: &[(String, u64)]) -> Vec<Stray> {
    let own = std::process::id();
    let threads = names("/proc/self/task").map(|tid| (own, format!("/proc/self/task/{tid}/ns/net")));
    let others = processes().map(|process| (process.pid, format!("/proc/{}/ns/net", process.pid)));
    others
        .chain(threads)
        .filter_map(|(pid, path)| {
            // Ended in the meantime: not inside.
            let inode = fs::metadata(path).ok()?.ino();
            let (name, _) = namespaces.iter().find(|(_, number)| *number == inode)?;
            Some(Stray { pid, name: process_name(pid), namespace: Some(name.clone()) })
        })
        .collect()
}

fn processes() -> impl Iterator<Item = Stray> {
    names("/proc").filter_map(|name| {
        let pid: u32 = name.parse().ok()?;
        Some(Stray { pid, name: process_name(pid), namespace: None })
    })
}

/// The child of `parent` that is PID 1 of a PID namespace, once there is one.
pub(crate) fn child_init(parent: u32) -> Option<u32> {
    names("/proc").filter_map(|name| name.parse::<u32>().ok()).find(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let is_child = field("PPid:").is_some_and(|value| value == parent.to_string());
        // Its number here, then its number in there.
        is_child && field("NSpid:").is_some_and(|value| value.split_whitespace().skip(1).eq(["1"]))
    })
}

fn process_name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// Inodes of the network namespaces that a thread, a descriptor or a mount keeps alive.
fn network_namespaces() -> impl Iterator<Item = u64> {
    let mut inodes = BTreeSet::new();
    let is_net = |path: &Path| fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("net:["));
    for process in names("/proc").filter(|name| name.parse::<u32>().is_ok()) {
        let tasks = format!("/proc/{process}/task");
        let kept = names(&tasks).map(|tid| PathBuf::from(format!("{tasks}/{tid}/ns/net")));
        let descriptors = format!("/proc/{process}/fd");
        let held =
            names(&descriptors).map(|fd| PathBuf::from(format!("{descriptors}/{fd}"))).filter(|path| is_net(path));
        inodes.extend(kept.chain(held).filter_map(|path| Some(fs::metadata(path).ok()?.ino())));
    }
    let mounted = mounts().into_iter().filter(|mount| mount.kind == "nsfs");
    inodes.extend(mounted.filter_map(|mount| Some(fs::metadata(mount.point).ok()?.ino())));
    inodes.into_iter()
}

/// Our kernel programs and maps, by the names of the layout.
fn bpf_objects() -> Vec<Item> {
    // An object that vanishes between being listed and being asked is not left behind.
    let programs = loaded_programs().flatten().filter_map(|program| {
        let name = program.name_as_str()?.to_owned();
        program_names::ALL.contains(&name.as_str()).then(|| format!("bpf-program {name} {}", program.id()))
    });
    let maps = loaded_maps().flatten().filter_map(|map| {
        let name = map.name_as_str()?.to_owned();
        map_names::ALL.contains(&name.as_str()).then(|| format!("bpf-map {name} {}", map.id()))
    });
    programs.chain(maps).collect()
}

/// Names of the worlds that have a folder.
fn worlds() -> Vec<String> {
    names(FOLDERS).filter(|name| name.starts_with(PREFIX)).collect()
}

fn world_cgroups() -> Vec<PathBuf> {
    let root = crate::world::v2_mount();
    names(&root).filter(|name| name.starts_with(PREFIX)).map(|name| root.join(name)).collect()
}

/// Names in a folder; none if it cannot be read.
fn names(folder: impl AsRef<Path>) -> impl Iterator<Item = String> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned())
}
