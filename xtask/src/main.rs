//! The project's tasks: set-up, test tiers, the kernel object, fuzzing, demonstrations and benchmarks.

mod counts;
mod ebpf;
mod fuzz;
#[path = "../../ebpf/build/object.rs"]
mod object;
mod run;
mod setup;
mod stories;
mod tiers;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Find what building and testing need and install what is missing
    Setup {
        /// Only say what is missing; exit code 1 if anything is
        #[arg(long)]
        check: bool,
    },
    /// Run the test tiers in order
    Test(tiers::Options),
    /// Build the kernel object from source
    Ebpf {
        /// Compare the committed object with a build from source, bit for bit
        #[arg(long, conflicts_with = "update")]
        check: bool,
        /// Build the committed object anew and record what it was built by
        #[arg(long)]
        update: bool,
    },
    /// Feed random packets to the parser and the verdict
    Fuzz {
        /// How long to try, in seconds
        #[arg(long, default_value_t = 20)]
        seconds: u32,
    },
    /// Show what Portcullis does on this machine, in namespaces of its own
    Demo(stories::Options),
    /// Measure on this machine
    Bench(stories::Options),
}

fn main() -> anyhow::Result<ExitCode> {
    let root = root()?;
    match Arguments::parse().task {
        Task::Setup { check } => setup::run(setup::Purpose::Everything, check),
        Task::Test(options) => tiers::run(&root, &options),
        Task::Ebpf { check: true, update: _ } => {
            let outcome = ebpf::check(&root)?;
            outcome.print("committed kernel object");
            Ok(outcome.exit_code())
        }
        Task::Ebpf { check: false, update: true } => ebpf::update(&root).map(|()| ExitCode::SUCCESS),
        Task::Ebpf { check: false, update: false } => ebpf::build(&root).map(|()| ExitCode::SUCCESS),
        Task::Fuzz { seconds } => {
            let outcome = fuzz::run(&root, seconds)?;
            outcome.print("fuzz");
            Ok(outcome.exit_code())
        }
        Task::Demo(options) => stories::run(&root, stories::Kind::Demo, &options),
        Task::Bench(options) => stories::run(&root, stories::Kind::Bench, &options),
    }
}

/// The checkout this program was built from.
fn root() -> anyhow::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the checkout")?;
    Ok(root.to_owned())
}

/// Where cargo puts what it builds.
fn target(root: &Path) -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The cargo that runs this program.
fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a program whose failure ends the task.
fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let arguments = command.get_args().map(|argument| argument.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let shown = format!("{} {arguments}", command.get_program().display());
    let status = command.status().with_context(|| format!("cannot run {shown}"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}: see its messages above");
    }
    Ok(())
}
