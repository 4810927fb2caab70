//! `uninstall`: everything that agents left in the kernel is removed, and every gate is open. Needs no agent.

use std::{
    io::{self, Write as _},
    path::PathBuf,
};

use super::{CliError, EXIT_OK, UninstallArgs};
use crate::{
    config::{Config, LoadError},
    datapath::{self, DataPathError},
};

/// Why nothing, or not everything, was removed. What is left still judges packets by its gates.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    #[error("nothing was removed, since the file that says where the pins are cannot be used")]
    Config(#[from] LoadError),
    #[error("nothing was removed: there is no {} to say where the pins are; --config names another file", path.display())]
    NoConfig { path: PathBuf },
    #[error("not uninstalled, and what is left still cuts")]
    DataPath(#[from] DataPathError),
}

/// Detaches and unpins what agents left. The flag that confirms it is demanded by the command line.
pub fn uninstall(args: &UninstallArgs) -> Result<u8, CliError> {
    let agent = load(args)?;
    datapath::uninstall_and_open_gates(&agent).map_err(UninstallError::from)?;
    writeln!(
        io::stdout(),
        "every gate is open: no program of the agent is attached to this host any more, and nothing is fenced.\n\
         State is left in {}.",
        agent.state_dir.display()
    )?;
    Ok(EXIT_OK)
}

fn load(args: &UninstallArgs) -> Result<crate::config::model::Agent, UninstallError> {
    // The defaults are not taken for a file that was named and is not there: its pins would stay, and be forgotten.
    if !args.config.exists() {
        return Err(UninstallError::NoConfig { path: args.config.clone() });
    }
    Ok(Config::load(&args.config)?.config.agent)
}
