//! `portcullis`: parses the command line and hands over.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Parser as _;
use portcullis::{
    api::client::Client,
    cli::{self, Cli, CliError, Command},
    config::check::check,
    logging, runtime,
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
        Command::Agent(args) => {
            logging::init(args.log.as_deref())?;
            outlive_file_size_limits();
            event_loop()?.block_on(runtime::run(args.config))?;
            Ok(ExitCode::from(cli::EXIT_OK))
        }
        Command::Doctor(args) => Ok(event_loop()?.block_on(cli::doctor(&args, &Client::new(cli.socket)))?.into()),
        Command::Uninstall(args) => Ok(cli::uninstall(&args)?.into()),
        Command::Client(command) => Ok(event_loop()?.block_on(cli::execute(command, cli.socket))?),
    }
}

/// A file that may not grow any more is an error of the write, and not the end of the agent.
fn outlive_file_size_limits() {
    // SAFETY: no handler is set, the signal is ignored; there is no other thread yet.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    debug_assert_ne!(before, libc::SIG_ERR);
}

/// On one thread: the command of `run` dies with the thread that started it, which must be the main one.
fn event_loop() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the event loop")
}
