//! A data path of one's own: network and mount namespace, bpffs, cgroup, lock; all gone when the test ends.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by several test programs; a failure here fails the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use portcullis::{
    config::model::{Agent, Attach, Tc, Xdp},
    datapath::{Adopted, DataPath, DataPathError, OBJECT, Options},
};
use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

pub(crate) struct Lab {
    folder: tempfile::TempDir,
    pub(crate) agent: Agent,
    cgroup: PathBuf,
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A mount point cannot be removed, and a test that failed early has none.
        let _ = unmount(&self.agent.bpffs, UnmountFlags::DETACH);
        fs::remove_dir(&self.cgroup).unwrap();
    }
}

/// Runs `test` in a thread with namespaces of its own.
pub(crate) fn lab(test: impl FnOnce(&mut Lab) + Send + 'static) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let body = move || {
        // SAFETY: the thread was started for this; nothing in it relies on sharing its namespaces or file system state.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let unified = Path::new("/sys/fs/cgroup/unified");
        let root = if unified.exists() { unified } else { Path::new("/sys/fs/cgroup") };
        let cgroup = root.join(format!("portcullis-datapath-{}-{number}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let agent = agent(folder.path(), &cgroup);
        run("ip link set lo up");
        test(&mut Lab { folder, agent, cgroup });
    };
    if let Err(panic) = std::thread::spawn(body).join() {
        std::panic::resume_unwind(panic);
    }
}

/// What an agent of a lab is configured with.
pub(crate) fn agent(folder: &Path, cgroup: &Path) -> Agent {
    Agent {
        identity: "lab".to_owned(),
        socket: folder.join("agent.sock"),
        socket_group: "portcullis".to_owned(),
        state_dir: folder.join("state"),
        bpffs: folder.join("bpf"),
        lock: folder.join("agent.lock"),
        cgroup_root: Some(cgroup.to_owned()),
        xdp: Xdp::Auto,
        tc: Tc::Auto,
        attach: Attach::Armed,
        exclude_interfaces: Vec::new(),
        drift_ppm: 100_000,
        exempt_ssh: true,
        exempt: Vec::new(),
    }
}

impl Lab {
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn start(&self) -> Result<(DataPath, Vec<Adopted>), DataPathError> {
        DataPath::start(&Options { agent: &self.agent, object: OBJECT })
    }

    pub(crate) fn maps(&self) -> PathBuf {
        self.agent.bpffs.join("v1/maps")
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.agent.bpffs.join("v1/links")
    }

    pub(crate) fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Names of the pinned links with the kernel's numbers of the links.
    pub(crate) fn pinned_links(&self) -> Vec<(String, u32)> {
        let mut links: Vec<_> = fs::read_dir(self.links())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .map(|name| {
                let link = aya::programs::links::PinnedLink::from_pin(self.links().join(&name)).unwrap();
                (name, aya::programs::links::FdLink::from(link).info().unwrap().id())
            })
            .collect();
        links.sort();
        links
    }
}

/// Runs a command of iproute2 in this thread's namespaces.
pub(crate) fn run(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn index(name: &str) -> u32 {
    let shown = run(&format!("ip -o link show {name}"));
    shown.split(':').next().unwrap().parse().unwrap()
}
