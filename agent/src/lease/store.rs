//! What must survive a crash: local leases and the high-water token of every service, in `<state_dir>/state.redb`.
//!
//! Every call may block for as long as the disk does; see [`super::writer`] for the thread that makes them. Each write
//! is one transaction, flushed before the call returns. Each error leaves the service fenced, or held as it was: the
//! caller that asked for a token is refused, and no gate is opened.
//!
//! `state.id` stands beside the file and holds the random name that is also inside it. A state directory that has lost
//! its file, or got another's, is thus told from one that is new: marks never start again from nothing unnoticed.

use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

mod error;
mod files;

use self::files::{failed, guarded, make_directory, open_or_create};
pub use self::{error::StateError, files::check_state_dir};

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
/// Service to [`Record`] as JSON.
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
/// Service to its high-water token.
const MARKS: TableDefinition<&str, u64> = TableDefinition::new("marks");
/// Service to [`HoldRecord`] as JSON; absent: no hold.
const HOLDS: TableDefinition<&str, &[u8]> = TableDefinition::new("holds");
/// Number to [`MarkReset`] as JSON, in order.
const RESETS: TableDefinition<u64, &[u8]> = TableDefinition::new("resets");

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

    /// Sets the mark of `service` to `token` whatever it was, deletes its lease, and keeps a record of the reset. For an operator who restored
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
            // Its token would raise the mark again at the next start.
            transaction.open_table(LEASES)?.remove(service)?;
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

#[cfg(test)]
mod tests;
