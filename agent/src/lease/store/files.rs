//! The files of a state directory: made whole or not at all, and refused if they are not what they were.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use redb::{Builder, Database, ReadableDatabase as _};

use super::{HOLDS, LEASES, MARKS, META, RESETS, error::StateError};

pub(super) const VERSION: &str = "1";
/// The file is a few pages; redb's own default is 1 GiB.
const CACHE_BYTES: usize = 1 << 20;

pub(super) const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const OVERLAYFS_MAGIC: u64 = 0x794c_7630;

/// Refuses a directory whose file system forgets: tmpfs, ramfs, overlayfs. Of a directory that does not exist yet, its
/// nearest existing parent is looked at.
pub fn check_state_dir(path: &Path) -> Result<(), StateError> {
    let io = |source| StateError::Io { operation: "look at", path: path.to_owned(), source };
    let mut existing = path;
    let stat = loop {
        match rustix::fs::statfs(existing) {
            Err(rustix::io::Errno::NOENT) => existing = existing.parent().unwrap_or(Path::new("/")),
            other => break other.map_err(|errno| io(errno.into()))?,
        }
    };
    if existing == path && !fs::metadata(path).map_err(io)?.is_dir() {
        return Err(StateError::NotADirectory { path: path.to_owned() });
    }
    // The field's type differs between architectures; every magic number has 32 bits.
    #[allow(clippy::unnecessary_cast)]
    let kind = match stat.f_type as u64 & 0xffff_ffff {
        TMPFS_MAGIC => "tmpfs",
        RAMFS_MAGIC => "ramfs",
        OVERLAYFS_MAGIC => "an overlay file system",
        _ => return Ok(()),
    };
    Err(StateError::Volatile { path: path.to_owned(), kind })
}

pub(super) fn make_directory(directory: &Path) -> Result<(), StateError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|source| StateError::Io { operation: "make", path: directory.to_owned(), source })
}

pub(super) fn open_or_create(directory: &Path, path: &Path) -> Result<Database, StateError> {
    let id_path = directory.join("state.id");
    let expected = match fs::read_to_string(&id_path) {
        Ok(id) => Some(id.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(StateError::Io { operation: "read", path: id_path, source }),
    };
    match (path.try_exists(), &expected) {
        (Err(source), _) => return Err(StateError::Io { operation: "look for", path: path.to_owned(), source }),
        (Ok(false), Some(_)) => return Err(StateError::Missing { path: path.to_owned() }),
        (Ok(false), None) => create(directory, path)?,
        (Ok(true), _) => {}
    }
    let database = open(path)?;
    let meta = |key: &str| -> Result<String, StateError> {
        let value = guarded(path, || {
            let table = database.begin_read()?.open_table(META)?;
            Ok(table.get(key)?.map(|value| value.value().to_owned()))
        })?;
        value
            .map_err(|error| failed("read", path, error))?
            .ok_or_else(|| StateError::Corrupt { path: path.to_owned(), detail: format!("no {key} in it") })
    };
    let version = meta("version")?;
    if version != VERSION {
        return Err(StateError::Version { path: path.to_owned(), found: version });
    }
    let found = meta("id")?;
    match expected {
        Some(expected) if expected != found => Err(StateError::Foreign { path: path.to_owned(), expected, found }),
        Some(_) => Ok(database),
        None => {
            write_durably(directory, &id_path, format!("{found}\n").as_bytes())?;
            Ok(database)
        }
    }
}

/// Makes the file under another name and renames it, so that `state.redb` is whole whenever it exists.
fn create(directory: &Path, path: &Path) -> Result<(), StateError> {
    let new = directory.join("state.redb.new");
    let io = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| StateError::Io { operation, path, source }
    };
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io("remove", &new)(error)),
        _ => {}
    }
    // The kernel's own generator; the name need not be secret, only unlike any other.
    let id = fs::read_to_string("/proc/sys/kernel/random/uuid")
        .map_err(io("read", Path::new("/proc/sys/kernel/random/uuid")))?;
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(io("make", &new))?;
    guarded(&new, || {
        let database = builder().create(&new)?;
        let transaction = database.begin_write()?;
        {
            let mut meta = transaction.open_table(META)?;
            meta.insert("version", VERSION)?;
            meta.insert("id", id.trim())?;
        }
        transaction.open_table(LEASES)?;
        transaction.open_table(MARKS)?;
        transaction.open_table(HOLDS)?;
        transaction.open_table(RESETS)?;
        transaction.commit()?;
        Ok(())
    })?
    .map_err(|error| failed("make the state", &new, error))?;
    fs::rename(&new, path).map_err(io("rename", &new))?;
    sync_directory(directory)
}

fn write_durably(directory: &Path, path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let new = path.with_extension("id.new");
    let io = |operation| {
        let path = path.to_owned();
        move |source| StateError::Io { operation, path, source }
    };
    let mut file = File::create(&new).map_err(io("make"))?;
    file.write_all(bytes).map_err(io("write"))?;
    file.sync_all().map_err(io("flush"))?;
    fs::rename(&new, path).map_err(io("rename"))?;
    sync_directory(directory)
}

fn sync_directory(directory: &Path) -> Result<(), StateError> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|source| StateError::Io { operation: "flush", path: directory.to_owned(), source })
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    // The whole file is a few pages, so its checksums are verified at every start: a damaged page is an error here
    // rather than a surprise later.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

fn open(path: &Path) -> Result<Database, StateError> {
    guarded(path, || builder().open(path).map_err(redb::Error::from))?.map_err(|error| failed("open", path, error))
}

/// redb asserts what a file that it wrote cannot be; of a file that somebody else damaged, that is an error like others.
pub(super) fn guarded<T>(
    path: &Path,
    work: impl FnOnce() -> Result<T, redb::Error>,
) -> Result<Result<T, redb::Error>, StateError> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let detail = panic.downcast_ref::<String>().cloned();
        let detail = detail.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        StateError::Corrupt { path: path.to_owned(), detail: detail.unwrap_or_else(|| "unreadable".to_owned()) }
    })
}

pub(super) fn failed(operation: &'static str, path: &Path, error: redb::Error) -> StateError {
    let path = path.to_owned();
    match error {
        redb::Error::DatabaseAlreadyOpen => StateError::InUse { path },
        redb::Error::Corrupted(detail) => StateError::Corrupt { path, detail },
        redb::Error::UpgradeRequired(found) => {
            StateError::Version { path, found: format!("of redb file version {found}") }
        }
        redb::Error::Io(source) if is_of_content(&source) => StateError::Corrupt { path, detail: source.to_string() },
        redb::Error::TableDoesNotExist(table) => StateError::Corrupt { path, detail: format!("no table {table}") },
        other => StateError::Write { operation, path, source: Box::new(other) },
    }
}

/// An error that speaks of what is in the file, not of the disk under it.
fn is_of_content(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput)
}
