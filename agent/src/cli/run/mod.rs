//! `run`: holds a lease while a command runs.

use std::{io, path::PathBuf, pin::pin};

use tokio::process::Child;

use self::{
    holding::{Acquired, Holding, Loss},
    signals::{Origin, Received, Signals},
};
use super::{EXIT_CANNOT_EXECUTE, EXIT_LEASE, EXIT_NOT_FOUND, EXIT_RUN, RunArgs, wait};
use crate::{
    api::{
        client::{Client, ClientError},
        types::State,
    },
    clock::{BootTimer, boot_now},
};

mod child;
mod holding;
mod signals;

/// Why `run` could not do its work. The command was not started, or has been ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot {operation}: {source}. Check the limits of this process (`ulimit -a`)")]
    System { operation: &'static str, source: io::Error },
    #[error("cannot start {}: {source}", command.display())]
    Start { command: PathBuf, source: io::Error },
}

impl RunError {
    /// The exit status that stands for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(_) | Self::System { .. } => EXIT_RUN,
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => EXIT_NOT_FOUND,
            Self::Start { .. } => EXIT_CANNOT_EXECUTE,
        }
    }
}

fn system(operation: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::System { operation, source }
}

/// Says something to the person in front, beside whatever the command writes.
fn tell(service: &str, message: impl std::fmt::Display) {
    eprintln!("portcullis: {service}: {message}");
}

pub(super) async fn run(client: &Client, args: &RunArgs) -> Result<u8, RunError> {
    let signals = Signals::take_over().map_err(system("take over the signals"))?;
    let acquired = tokio::select! {
        acquired = holding::acquire(client, args) => acquired?,
        signal = interrupted(&signals) => return signal.map(|number| 128 + number),
    };
    let mut holding = match acquired {
        Acquired::Holding(holding) => holding,
        Acquired::HeldByAnother => return Ok(EXIT_LEASE),
    };
    let token = holding.token();
    let outcome = hold(client, args, &mut holding, &signals).await;
    if !matches!(outcome, Ok(Ended { lost: true, .. })) {
        holding::release(client, &args.service, token).await;
    }
    outcome.map(|ended| ended.code)
}

struct Ended {
    code: u8,
    /// There is nothing left to release.
    lost: bool,
}

/// From the acquisition to the end of the command.
async fn hold(client: &Client, args: &RunArgs, holding: &mut Holding, signals: &Signals) -> Result<Ended, RunError> {
    let token = holding.token();
    // Polled in every wait below and never dropped in between, so that a renewal under way is not forgotten.
    let mut loss = pin!(holding.keep());
    tokio::select! {
        serving = until_serving(client, &args.service, token) => serving?,
        loss = &mut loss => return Ok(give_up(args, loss?)),
        signal = interrupted(signals) => return signal.map(|number| Ended { code: 128 + number, lost: false }),
    }
    let mut child = child::start(&args.command, &args.service, token)?;
    loop {
        tokio::select! {
            status = child.wait() => {
                let status = status.map_err(system("wait for the command"))?;
                return Ok(Ended { code: child::exit_code(status), lost: false });
            }
            signal = signals.next() => forward(&child, &signal.map_err(system("read a signal"))?),
            loss = &mut loss => {
                let ended = give_up(args, loss?);
                stop(&mut child, args, signals).await?;
                return Ok(ended);
            }
        }
    }
}

fn give_up(args: &RunArgs, loss: Loss) -> Ended {
    tell(&args.service, format_args!("the lease is lost: {loss}"));
    Ended { code: EXIT_LEASE, lost: true }
}

/// SIGTERM, then SIGKILL. The gate has fallen or is about to, whatever the command does meanwhile.
async fn stop(child: &mut Child, args: &RunArgs, signals: &Signals) -> Result<(), RunError> {
    child::signal(child, libc::SIGTERM);
    let mut timer = BootTimer::new().map_err(system("make a timer"))?;
    let kill_at = boot_now().saturating_add(args.kill_after);
    let mut late = pin!(timer.sleep_until(kill_at));
    loop {
        tokio::select! {
            status = child.wait() => return status.map(drop).map_err(system("wait for the command")),
            signal = signals.next() => forward(child, &signal.map_err(system("read a signal"))?),
            waited = &mut late => {
                waited.map_err(system("wait"))?;
                break;
            }
        }
    }
    tell(&args.service, "the command is still there: SIGKILL");
    child.kill().await.map_err(system("kill the command"))
}

/// What the terminal sent has reached the command already: it is in our process group.
fn forward(child: &Child, signal: &Received) {
    match signal.origin {
        Origin::Process => child::signal(child, signal.number),
        Origin::Terminal => {}
    }
}

/// A signal that ends a process which has no command yet; its number.
async fn interrupted(signals: &Signals) -> Result<u8, RunError> {
    loop {
        let signal = signals.next().await.map_err(system("read a signal"))?;
        match signal.number {
            libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT => {
                return Ok(u8::try_from(signal.number).unwrap_or(0));
            }
            _ => {}
        }
    }
}

/// Until the gate is open for our token. The command must not run before: it would find its network cut.
async fn until_serving(client: &Client, service: &str, token: u64) -> Result<(), RunError> {
    let mut told = String::new();
    let mut looks = 0_u32;
    wait::watch(client, service, |seen| {
        looks += 1;
        let reason = match seen {
            Ok(status) if status.state == State::Serving && status.token == Some(token) => return true,
            Ok(status) => status.reason.clone(),
            Err(error) => error.to_string(),
        };
        // Opening takes a moment every time; only what lasts is worth a line.
        if looks > 5 && reason != told {
            tell(service, format_args!("waiting until it is serving: {reason}"));
            told = reason;
        }
        false
    })
    .await?;
    Ok(())
}
