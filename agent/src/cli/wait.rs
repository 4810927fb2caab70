//! `wait`: until a service has reached a state.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::{CliError, EXIT_OK, EXIT_TIMEOUT, Goal, WaitArgs};
use crate::api::{
    client::{Client, ClientError},
    types::{Confirmation, ServiceStatus, State},
};

/// Between two looks: short at first, since most waits are.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

pub(super) async fn wait(client: &Client, args: &WaitArgs) -> Result<u8, CliError> {
    let mut last = String::from("the agent has not answered");
    let until = Instant::now() + args.timeout;
    let reached = timeout_at(
        until,
        watch(client, &args.service, |service| {
            last = service.map_or_else(|error| error.to_string(), |service| service.reason.clone());
            service.is_ok_and(|service| is_reached(args.goal, service))
        }),
    );
    match reached.await {
        Ok(outcome) => outcome.map(|_| EXIT_OK).map_err(CliError::Client),
        Err(_) => {
            eprintln!("portcullis: {}: not reached in time: {last}", args.service);
            Ok(EXIT_TIMEOUT)
        }
    }
}

/// Looks at `service` until `done` says so of what was seen. Passing errors are shown to `done` and ridden out.
pub(super) async fn watch(
    client: &Client,
    service: &str,
    mut done: impl FnMut(Result<&ServiceStatus, &ClientError>) -> bool,
) -> Result<(), ClientError> {
    let mut pause = FIRST_PAUSE;
    loop {
        match client.service(service).await {
            Ok(status) if done(Ok(&status)) => return Ok(()),
            Err(error) if !error.is_passing() => return Err(error),
            Err(error) if done(Err(&error)) => return Err(error),
            Ok(_) | Err(_) => {}
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn is_reached(goal: Goal, service: &ServiceStatus) -> bool {
    match goal {
        Goal::Serving => service.state == State::Serving,
        Goal::Fenced => service.state == State::Fenced,
        Goal::Confirmed => service.state == State::Fenced && service.confirmation == Some(Confirmation::Confirmed),
    }
}
