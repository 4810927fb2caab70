//! What can go wrong in the data path, and what to do about it.

use std::{io, path::PathBuf};

use aya::{EbpfError, maps::MapError, programs::ProgramError};
use thiserror::Error;

use super::gates::AssignError;

/// Fail direction of every variant: what was attached before stays attached, gates keep their deadlines, nothing opens.
#[derive(Debug, Error)]
pub enum DataPathError {
    #[error("another agent (pid {pid}) holds {}; one agent runs per host: stop that one first", path.display())]
    Locked { path: PathBuf, pid: String },
    #[error("cannot {operation} the lock file {}; make its folder writable for root, or set `lock`", path.display())]
    Lock {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} is no BPF file system and cannot be made one; run `mount -t bpf bpf {}` before the agent, or give the agent \
         CAP_SYS_ADMIN", path.display(), path.display()
    )]
    Bpffs {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot {operation} {}; see `portcullis doctor`", path.display())]
    Pin {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} was not made by this agent: {reason}. Nothing was changed; move it away, or set `bpffs` to another folder",
        path.display()
    )]
    ForeignPin { path: PathBuf, reason: String },
    #[error(
        "the pinned map {} has {field} {found} where this version needs {expected}. Nothing was changed; start the \
         version that made it, or remove the old state with `portcullis uninstall --opens-gates`", path.display()
    )]
    MapLayout { path: PathBuf, field: &'static str, found: u64, expected: u64 },
    #[error(
        "links are pinned in {} but the maps {missing} are not: the programs that run cannot be taken over. Remove the \
         old state with `portcullis uninstall --opens-gates` and start again", folder.display()
    )]
    MissingMaps { folder: PathBuf, missing: String },
    #[error(
        "{} holds the links of another version, whose gates nobody renews any more. Start that version, or remove its \
         state with `portcullis uninstall --opens-gates` and start again", path.display()
    )]
    OtherVersion { path: PathBuf },
    #[error(
        "{} belongs to the loopback interface of another network namespace; start the agent in the namespace in which it \
         ran before, or set `bpffs` to another folder", path.display()
    )]
    OtherNamespace { path: PathBuf },
    #[error("the kernel programs cannot be loaded; `portcullis doctor` says what this kernel lacks")]
    Object(#[source] Box<EbpfError>),
    #[error("the kernel refuses the program {name}; `portcullis doctor` says what this kernel lacks")]
    Program {
        name: &'static str,
        #[source]
        source: Box<ProgramError>,
    },
    #[error("the kernel object has no {name} of the kind that is expected: build the agent and the object together")]
    ObjectPart { name: &'static str },
    #[error("this kernel has no TCX (6.6 and newer); set `tc = \"clsact\"` or `tc = \"auto\"`")]
    NoTcx,
    #[error("cannot {operation}; see `portcullis doctor`")]
    Netlink {
        operation: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot {operation} the map {name}; see `portcullis doctor`")]
    Map {
        operation: &'static str,
        name: &'static str,
        #[source]
        source: MapError,
    },
    #[error("the gates cannot be mapped into memory; the kernel has to be 5.5 or newer")]
    MapGates(#[source] io::Error),
    #[error(transparent)]
    Gates(#[from] AssignError),
}

/// An error with its causes, for one line of the status.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |cause| cause.source())
        .fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
