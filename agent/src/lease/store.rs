//! What must survive a crash: local leases and the high-water token of every service, in `<state_dir>/state.redb`.
//!
//! Every call may block for as long as the disk does; see [`super::writer`] for the thread that makes them. Each write
//! is one transaction, flushed before the call returns. Each error leaves the service fenced, or held as it was: the
//! caller that asked for a token is refused, and no gate is opened.
//!
//! `state.id` stands beside the file and holds the random name that is also inside it. A state directory that has lost
//! its file, or got another's, is thus told from one that is new: marks never start again from nothing unnoticed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use redb::{Builder, Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
/// Service to [`Record`] as JSON.
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
/// Service to its high-water token.
const MARKS: TableDefinition<&str, u64> = TableDefinition::new("marks");
/// Service to [`HoldRecord`] as JSON; absent: no hold.
const HOLDS: TableDefinition<&str, &[u8]> = TableDefinition::new("holds");
/// Number to [`MarkReset`] as JSON, in order.
const RESETS: TableDefinition<u64, &[u8]> = TableDefinition::new("resets");

const VERSION: &str = "1";
/// The file is a few pages; redb's own default is 1 GiB.
const CACHE_BYTES: usize = 1 << 20;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const OVERLAYFS_MAGIC: u64 = 0x794c_7630;

/// A local lease as the disk has it. Renewals are not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub holder: String,
    pub token: u64,
    pub ttl_ms: u64,
    /// The boot in which the lease was granted; it ended with it.
    pub boot_id: String,
    /// Milliseconds since 1970 on the wall clock, for people; nothing is decided by it.
    pub granted_wall_ms: u64,
}

/// A fence made by hand: it outlives the agent, and nothing opens the service before it is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldRecord {
    pub reason: String,
    /// Who asked.
    pub uid: u32,
    pub pid: i32,
    pub since_wall_ms: u64,
}

/// One lowering of a mark, kept for ever.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MarkReset {
    pub service: String,
    pub from: u64,
    pub to: u64,
    /// Who asked, as the operator's command was recorded.
    pub who: String,
    pub wall_ms: u64,
}

/// What went wrong with the durable state. In every case nothing new is opened.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "state directory {path} is on {kind}, which forgets at a reboot or with its container: tokens could start \
         again. Set `state_dir` in [agent] to a directory on a disk"
    )]
    Volatile { path: PathBuf, kind: &'static str },
    #[error("{path} is not a directory. Set `state_dir` in [agent] to a directory, or move the file away")]
    NotADirectory { path: PathBuf },
    #[error("cannot {operation} {path}: {source}. Check the disk and that the agent runs as root")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{path} is missing, but state.id beside it says that it was there: tokens could start again. Restore the file \
         from a backup; or, if no holder of an earlier token can be alive anywhere, remove state.id to start afresh"
    )]
    Missing { path: PathBuf },
    #[error(
        "{path} belongs to another state directory (its name is {found}, state.id says {expected}). Put the right file \
         back; or remove state.id to take this one over with its marks"
    )]
    Foreign { path: PathBuf, expected: String, found: String },
    #[error(
        "{path} is damaged ({detail}); services of local leases stay fenced. Restore it from a backup; or, if no holder \
         of an earlier token can be alive anywhere, move it and state.id away to start afresh"
    )]
    Corrupt { path: PathBuf, detail: String },
    #[error(
        "{path} was written in format {found}, this agent knows {VERSION}. Run the agent that wrote it, or a newer one"
    )]
    Version { path: PathBuf, found: String },
    #[error("{path} is open in another process. Stop the other agent first: one agent per host")]
    InUse { path: PathBuf },
    #[error(
        "cannot {operation} in {path}: {source}. Free space on the disk or mend it; new leases are refused until then, \
         and those that are held can be renewed"
    )]
    Write { operation: &'static str, path: PathBuf, source: Box<redb::Error> },
}

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

/// The durable state of one host, open for this process alone.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    path: PathBuf,
    /// Nothing after a failed write: the file is opened, and so checked, again before the next.
    database: Option<Database>,
}

impl Store {
    /// Opens the state in `directory`, which is made if it is missing, and checks all of it.
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        check_state_dir(directory)?;
        make_directory(directory)?;
        let path = directory.join("state.redb");
        let database = open_or_create(directory, &path)?;
        Ok(Self { directory: directory.to_owned(), path, database: Some(database) })
    }

    /// Every lease on disk, those of earlier boots included.
    pub fn leases(&mut self) -> Result<Vec<(String, Record)>, StateError> {
        self.rows(LEASES)
    }

    /// Every fence made by hand, by service.
    pub fn holds(&mut self) -> Result<Vec<(String, HoldRecord)>, StateError> {
        self.rows(HOLDS)
    }

    /// Every service's high-water token.
    pub fn marks(&mut self) -> Result<Vec<(String, u64)>, StateError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(MARKS)?;
            let entries = table.iter()?;
            let owned = entries.map(|entry| entry.map(|(key, value)| (key.value().to_owned(), value.value())));
            Ok(owned.collect::<Result<Vec<_>, _>>()?)
        })
    }

    /// The high-water token of `service`; 0: none.
    pub fn mark(&mut self, service: &str) -> Result<u64, StateError> {
        self.read(|database| Ok(database.begin_read()?.open_table(MARKS)?.get(service)?.map_or(0, |mark| mark.value())))
    }

    /// Makes a grant durable: the lease and its token as the new mark.
    pub fn grant(&mut self, service: &str, record: &Record) -> Result<(), StateError> {
        let json = self.encode(record)?;
        self.write("record a lease", |transaction| {
            transaction.open_table(LEASES)?.insert(service, json.as_slice())?;
            raise_mark(transaction, service, record.token)
        })
    }

    /// Deletes the lease of `service` if `token` is still its holder's.
    pub fn release(&mut self, service: &str, token: u64) -> Result<(), StateError> {
        if !self.leases()?.iter().any(|(name, record)| name == service && record.token == token) {
            return Ok(());
        }
        self.write("delete a lease", |transaction| {
            transaction.open_table(LEASES)?.remove(service)?;
            Ok(())
        })
    }

    /// Records a fence made by hand, or with nothing that it was removed.
    pub fn persist_hold(&mut self, service: &str, hold: Option<&HoldRecord>) -> Result<(), StateError> {
        let json = hold.map(|hold| self.encode(hold)).transpose()?;
        self.write("record a fence made by hand", |transaction| {
            let mut holds = transaction.open_table(HOLDS)?;
            match &json {
                Some(json) => holds.insert(service, json.as_slice())?,
                None => holds.remove(service)?,
            };
            Ok(())
        })
    }

    /// Raises the mark of `service` to `token`; a lower one changes nothing.
    pub fn persist_mark(&mut self, service: &str, token: u64) -> Result<(), StateError> {
        self.write("record a token", |transaction| raise_mark(transaction, service, token))
    }

    /// Sets the mark of `service` to `token` whatever it was, and keeps a record of it. For an operator who restored
    /// a lease store from a backup and knows that no holder of a higher token is alive.
    pub fn reset_mark(&mut self, service: &str, token: u64, who: &str, wall_ms: u64) -> Result<MarkReset, StateError> {
        let reset = MarkReset {
            service: service.to_owned(),
            from: self.mark(service)?,
            to: token,
            who: who.to_owned(),
            wall_ms,
        };
        let json = self.encode(&reset)?;
        self.write("reset a mark", |transaction| {
            let mut resets = transaction.open_table(RESETS)?;
            let number = resets.last()?.map_or(0, |(number, _)| number.value()) + 1;
            resets.insert(number, json.as_slice())?;
            transaction.open_table(MARKS)?.insert(service, token)?;
            Ok(())
        })?;
        Ok(reset)
    }

    /// Every lowering of a mark there ever was, in order.
    pub fn resets(&mut self) -> Result<Vec<MarkReset>, StateError> {
        let rows = self.read(|database| {
            let table = database.begin_read()?.open_table(RESETS)?;
            let values = table.iter()?.map(|entry| entry.map(|(_, value)| value.value().to_vec()));
            Ok(values.collect::<Result<Vec<_>, _>>()?)
        })?;
        rows.iter().map(|bytes| self.decode("a reset of a mark", bytes)).collect()
    }

    /// Every row of a table whose values are JSON.
    fn rows<T: DeserializeOwned>(
        &mut self,
        table: TableDefinition<'static, &'static str, &'static [u8]>,
    ) -> Result<Vec<(String, T)>, StateError> {
        let rows = self.read(|database| {
            let table = database.begin_read()?.open_table(table)?;
            let entries = table.iter()?;
            let owned = entries.map(|entry| entry.map(|(key, value)| (key.value().to_owned(), value.value().to_vec())));
            Ok(owned.collect::<Result<Vec<_>, _>>()?)
        })?;
        let decoded = rows.into_iter().map(|(service, bytes)| {
            let value = self.decode(&service, &bytes)?;
            Ok((service, value))
        });
        decoded.collect()
    }

    fn decode<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> Result<T, StateError> {
        let path = self.path.clone();
        serde_json::from_slice(bytes).map_err(|error| StateError::Corrupt { path, detail: format!("{what}: {error}") })
    }

    fn encode<T: Serialize>(&self, value: &T) -> Result<Vec<u8>, StateError> {
        serde_json::to_vec(value)
            .map_err(|error| StateError::Corrupt { path: self.path.clone(), detail: error.to_string() })
    }

    fn read<T>(&mut self, read: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, StateError> {
        let path = self.path.clone();
        let database = self.database()?;
        guarded(&path, || read(database))?.map_err(|error| failed("read", &path, error))
    }

    fn write(
        &mut self,
        operation: &'static str,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), StateError> {
        let path = self.path.clone();
        let database = self.database()?;
        let outcome = guarded(&path, || {
            let transaction = database.begin_write()?;
            change(&transaction)?;
            transaction.commit()?;
            Ok(())
        });
        let outcome = outcome.and_then(|result| result.map_err(|error| failed(operation, &path, error)));
        if outcome.is_err() {
            self.database = None;
        }
        outcome
    }

    fn database(&mut self) -> Result<&Database, StateError> {
        if self.database.is_none() {
            self.database = Some(open_or_create(&self.directory, &self.path)?);
        }
        self.database.as_ref().ok_or_else(|| StateError::Missing { path: self.path.clone() })
    }
}

fn raise_mark(transaction: &redb::WriteTransaction, service: &str, token: u64) -> Result<(), redb::Error> {
    let mut marks = transaction.open_table(MARKS)?;
    let last = marks.get(service)?.map_or(0, |mark| mark.value());
    if token > last {
        marks.insert(service, token)?;
    }
    Ok(())
}

fn make_directory(directory: &Path) -> Result<(), StateError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|source| StateError::Io { operation: "make", path: directory.to_owned(), source })
}

fn open_or_create(directory: &Path, path: &Path) -> Result<Database, StateError> {
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
fn guarded<T>(
    path: &Path,
    work: impl FnOnce() -> Result<T, redb::Error>,
) -> Result<Result<T, redb::Error>, StateError> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let detail = panic.downcast_ref::<String>().cloned();
        let detail = detail.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        StateError::Corrupt { path: path.to_owned(), detail: detail.unwrap_or_else(|| "unreadable".to_owned()) }
    })
}

fn failed(operation: &'static str, path: &Path, error: redb::Error) -> StateError {
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

#[cfg(test)]
mod tests;
