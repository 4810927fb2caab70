//! Locks by `flock(2)`: who owns a world, and who may load the machine.

use std::{fs::File, path::Path};

use rustix::fs::{FlockOperation, flock};

const HEAVY: &str = "/var/tmp/.portcullis-tests-heavy";
const OWNER: &str = "owner";

/// Held while a test loads the whole machine; released when dropped.
#[derive(Debug)]
pub struct HeavyLock {
    _file: File,
}

/// Waits until no other test of this machine, in whatever process, holds the lock. For tests whose figures suffer from a
/// neighbour: heavy traffic, latencies, benchmarks.
pub fn heavy() -> HeavyLock {
    let file = File::create(HEAVY).unwrap_or_else(|e| panic!("open {HEAVY}: {e}"));
    flock(&file, FlockOperation::LockExclusive).unwrap_or_else(|e| panic!("lock {HEAVY}: {e}"));
    HeavyLock { _file: file }
}

/// Marks a world's folder as owned by this process for as long as the file is open: process ids are reused, locks not.
pub(super) fn own(folder: &Path) -> File {
    let path = folder.join(OWNER);
    let file = File::create(&path).unwrap_or_else(|e| panic!("make {}: {e}", path.display()));
    flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap_or_else(|e| panic!("lock {}: {e}", path.display()));
    file
}

/// Whether the process that made a world's folder still lives.
pub(crate) fn is_owned(folder: &Path) -> bool {
    File::open(folder.join(OWNER)).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockShared).is_err())
}
