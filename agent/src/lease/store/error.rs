//! What can be wrong with the durable state, and what to do about it.

use std::{io, path::PathBuf};

use super::files::VERSION;

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
