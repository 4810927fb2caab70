//! A part of the cgroup v2 hierarchy.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{clock, residue};

/// A cgroup of a world. Removed with the world, whatever runs in it is killed.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub(crate) fn new(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap_or_else(|e| panic!("make the cgroup {}: {e}", path.display()));
        Self { path }
    }

    pub(crate) fn existing(path: PathBuf) -> Self {
        Self { path }
    }

    /// A cgroup below this one.
    #[track_caller]
    pub fn child(&self, name: &str) -> Self {
        Self::new(self.path.join(name))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process, with all its threads, into the cgroup.
    #[track_caller]
    pub fn add(&self, pid: u32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
            .unwrap_or_else(|e| panic!("move process {pid} into {}: {e}", self.path.display()));
    }

    /// The processes in the cgroup and below it.
    pub fn processes(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = fs::read_to_string(self.path.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect();
        for child in self.children() {
            pids.extend(child.processes());
        }
        pids
    }

    /// Kills every process in the cgroup and below it, and waits until none is left.
    pub fn kill(&self, timeout: Duration) -> io::Result<()> {
        // 5.14 and newer; before, one by one, again for those forked in the meantime.
        let at_once = fs::write(self.path.join("cgroup.kill"), "1").is_ok();
        let gone = clock::wait_until(timeout, || {
            let left = self.processes();
            if !at_once {
                left.iter().for_each(|pid| residue::kill(*pid));
            }
            left.is_empty()
        });
        if gone {
            Ok(())
        } else {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("processes {:?} do not end", self.processes())))
        }
    }

    /// Kills what is inside and removes the cgroup with everything below it.
    pub(crate) fn remove(&self, timeout: Duration) -> io::Result<()> {
        self.kill(timeout)?;
        self.remove_empty(timeout)
    }

    fn remove_empty(&self, timeout: Duration) -> io::Result<()> {
        for child in self.children() {
            child.remove_empty(timeout)?;
        }
        let mut last = Ok(());
        // The kernel lets go of killed processes a moment after they have vanished from the list.
        clock::wait_until(timeout, || {
            last = match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            };
            last.is_ok()
        });
        last
    }

    pub(super) fn open_procs(&self) -> File {
        let path = self.path.join("cgroup.procs");
        File::options().write(true).open(&path).unwrap_or_else(|e| panic!("open {}: {e}", path.display()))
    }

    fn children(&self) -> impl Iterator<Item = Self> {
        fs::read_dir(&self.path)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| Self { path: entry.path() })
    }
}

/// Where cgroup v2 is mounted: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` on hybrid hosts.
pub(crate) fn v2_mount() -> PathBuf {
    residue::mounts()
        .into_iter()
        .find(|mount| mount.kind == "cgroup2")
        .map(|mount| mount.point)
        .expect("cgroup v2 is mounted nowhere: mount -t cgroup2 none /sys/fs/cgroup")
}
