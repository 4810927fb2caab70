//! `portcullis`: parses the command line and hands over.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use portcullis::cli::{self, Cli, CliError, Command};

fn main() -> ExitCode {
    match dispatch(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("portcullis: {error:#}");
            ExitCode::from(error.downcast_ref::<CliError>().map_or(cli::EXIT_FAILURE, CliError::exit_code))
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Agent(_) | Command::Check(_) | Command::Doctor(_) => anyhow::bail!("not part of this build"),
        Command::Client(command) => {
            // One thread: the command of `run` dies with the thread that started it, which must be the main one.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            Ok(runtime.context("cannot start the event loop")?.block_on(cli::execute(command, cli.socket))?)
        }
    }
}
