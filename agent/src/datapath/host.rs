//! What the host lends to one agent: the lock, the BPF file system, the cgroup root.

use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock, statfs},
    mount::{MountFlags, mount},
};

use super::error::DataPathError;

const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// The host's lock, held as long as this lives. The kernel lets go of it when the process dies, however it dies.
#[derive(Debug)]
pub(super) struct HostLock {
    _file: File,
}

impl HostLock {
    pub(super) fn take(path: &Path) -> Result<Self, DataPathError> {
        const MODE: u32 = 0o600;
        let failed =
            |operation| move |source: io::Error| DataPathError::Lock { operation, path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed("make the folder of"))?;
        }
        // Not truncated: until the lock is ours, the pid in it is another's.
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(MODE)
            .open(path)
            .map_err(failed("open"))?;
        // Whoever may open it may hold its lock, and keep every agent from starting.
        file.set_permissions(Permissions::from_mode(MODE)).map_err(failed("change the mode of"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).map_err(failed("read"))?;
                let pid = pid.trim();
                let pid = if pid.is_empty() { "unknown" } else { pid };
                return Err(DataPathError::Locked { path: path.to_owned(), pid: pid.to_owned() });
            }
            Err(error) => return Err(failed("lock")(error.into())),
        }
        file.set_len(0).map_err(failed("write"))?;
        writeln!(file, "{}", std::process::id()).map_err(failed("write"))?;
        Ok(Self { _file: file })
    }
}

/// Makes sure that `folder` exists and lies on a BPF file system, mounting one if need be.
///
/// It is mounted on `folder` itself, or on `/sys/fs/bpf` if the folder lies below it: sysfs has no room for folders.
pub(super) fn ensure_bpffs(folder: &Path) -> Result<(), DataPathError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| DataPathError::Bpffs { path, source }
    };
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if !is_bpffs(existing).map_err(failed(existing))? {
        let place = mount_point(folder);
        std::fs::create_dir_all(place).map_err(failed(place))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("bpf", place, "bpf", flags, c"mode=0700").map_err(|error| failed(place)(error.into()))?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|source| DataPathError::Pin {
        operation: "make the folder",
        path: folder.to_owned(),
        source,
    })
}

/// Where a BPF file system is to be mounted for `folder`.
pub(super) fn mount_point(folder: &Path) -> &Path {
    const KERNELS_OWN: &str = "/sys/fs/bpf";
    if folder.starts_with(KERNELS_OWN) { Path::new(KERNELS_OWN) } else { folder }
}

pub(super) fn is_bpffs(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.f_type.cast_unsigned() == BPF_FS_MAGIC)
}

/// The folder under which the whole cgroup v2 tree is mounted.
pub(super) fn cgroup_root() -> io::Result<Option<PathBuf>> {
    Ok(find_cgroup_root(&std::fs::read_to_string("/proc/self/mountinfo")?))
}

fn find_cgroup_root(mountinfo: &str) -> Option<PathBuf> {
    // 30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw
    mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        let whole = root == "/" && file_system.split(' ').next() == Some("cgroup2");
        whole.then(|| PathBuf::from(place.replace("\\040", " ")))
    })
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn finds_the_whole_cgroup_tree() {
        let hybrid = "29 23 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      28 23 0:24 /a /mnt/part rw - cgroup2 cgroup2 rw\n\
                      30 23 0:26 / /sys/fs/my\\040cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(find_cgroup_root(hybrid), Some(PathBuf::from("/sys/fs/my cgroup")));
        assert_eq!(find_cgroup_root("29 23 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"), None);
    }

    #[test]
    fn a_second_lock_names_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/agent.lock");
        let first = HostLock::take(&path).unwrap();
        let refused = HostLock::take(&path).unwrap_err().to_string();
        assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
        drop(first);
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let _second = HostLock::take(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
