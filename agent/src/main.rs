//! `portcullis`: parses the command line and hands over.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Parser as _;
use portcullis::{
    cli::{self, Cli, CliError, Command},
    config::check::check,
};

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
        Command::Check(args) => {
            let report = check(&args.file)?;
            write!(io::stdout(), "{report}").context("cannot write to standard output")?;
            Ok(ExitCode::from(cli::EXIT_OK))
        }
        Command::Agent(_) | Command::Doctor(_) => anyhow::bail!("not part of this build"),
        Command::Client(command) => {
            // One thread: the command of `run` dies with the thread that started it, which must be the main one.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            Ok(runtime.context("cannot start the event loop")?.block_on(cli::execute(command, cli.socket))?)
        }
    }
}
