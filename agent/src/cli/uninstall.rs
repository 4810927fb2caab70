//! `uninstall`: everything that agents left in the kernel is removed, and every gate is open. Needs no agent.

use std::io::{self, Write as _};

use super::{CliError, EXIT_OK, UninstallArgs};
use crate::{
    config::{Config, LoadError},
    datapath::{self, DataPathError},
};

/// Why not everything was removed. What is left still judges packets by its gates.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// The defaults are not taken instead: pins in another place would stay, and be forgotten.
    #[error("nothing was removed: it takes a valid file, here or by --config, to say where the pins and the lock are")]
    Config(#[from] LoadError),
    #[error("not uninstalled, and what is left still cuts")]
    DataPath(#[from] DataPathError),
}

/// Detaches and unpins what agents left. The flag that confirms it is demanded by the command line.
pub fn uninstall(args: &UninstallArgs) -> Result<u8, CliError> {
    let agent = Config::load(&args.config).map_err(UninstallError::from)?.config.agent;
    datapath::uninstall_and_open_gates(&agent).map_err(UninstallError::from)?;
    writeln!(
        io::stdout(),
        "every gate is open: no program of the agent is attached to this host any more, and nothing is fenced.\n\
         State is left in {}.",
        agent.state_dir.display()
    )?;
    Ok(EXIT_OK)
}
