//! One holding of the lease: acquired, kept, released.

use std::{fmt, time::Duration};

use super::{RunError, system, tell};
use crate::{
    api::{
        client::{Client, ClientError},
        types::AcquireRequest,
    },
    cli::RunArgs,
    clock::{BootTimer, boot_now},
    core::time::BootInstant,
};

/// Between two attempts, at least and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A release that is not answered is not worth more: the lease expires by itself.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) enum Acquired {
    Holding(Holding),
    /// With `--no-wait`.
    HeldByAnother,
}

/// A lease that is ours until `expires` at least.
pub(super) struct Holding {
    client: Client,
    service: String,
    token: u64,
    ttl: Duration,
    /// The last renewal's send time and the TTL: the agent counts from later.
    expires: BootInstant,
    timer: BootTimer,
}

/// How a lease was lost.
pub(super) enum Loss {
    /// No renewal came through in time; the last reason why.
    Expired(Option<ClientError>),
    Refused(ClientError),
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired(None) => write!(f, "its time ran out before it could be renewed"),
            Self::Expired(Some(error)) => write!(f, "its time ran out: {error}"),
            Self::Refused(error) => write!(f, "{error}"),
        }
    }
}

/// Acquires the lease; unless told otherwise waits for as long as another holds it or there is no agent.
pub(super) async fn acquire(client: &Client, args: &RunArgs) -> Result<Acquired, RunError> {
    let ttl_ms = u64::try_from(args.ttl.as_millis()).unwrap_or(u64::MAX);
    let request = AcquireRequest { holder: args.holder.clone().unwrap_or_else(default_holder), ttl_ms };
    let mut timer = BootTimer::new().map_err(system("make a timer"))?;
    let mut told = String::new();
    let mut pause = FIRST_PAUSE;
    loop {
        let sent = boot_now();
        let error = match client.acquire(&args.service, &request).await {
            Ok(granted) => {
                let ttl = Duration::from_millis(granted.ttl_ms);
                let expires = sent.saturating_add(ttl);
                let (client, service) = (client.clone(), args.service.clone());
                return Ok(Acquired::Holding(Holding { client, service, token: granted.token, ttl, expires, timer }));
            }
            Err(error) => error,
        };
        let mut tell_once = |about: &str, message: &dyn fmt::Display| {
            if about != told {
                tell(&args.service, message);
                told = about.to_owned();
            }
        };
        let held_by = match &error {
            ClientError::Refused { body, .. } if body.code == "held" => Some(body),
            _ => None,
        };
        if let Some(body) = held_by {
            let holder = body.holder.as_deref().unwrap_or("another");
            if args.no_wait {
                tell(&args.service, format_args!("the lease is held by {holder}"));
                return Ok(Acquired::HeldByAnother);
            }
            tell_once(holder, &format_args!("waiting for the lease, which is held by {holder}"));
            let free_in = Duration::from_millis(body.expires_in_ms.unwrap_or(u64::MAX));
            pause = free_in.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        } else if error.is_passing() && !args.no_wait {
            tell_once("", &format_args!("waiting for the agent: {error}"));
            pause = (pause * 2).min(LONGEST_PAUSE);
        } else {
            return Err(error.into());
        }
        timer.sleep_until(boot_now().saturating_add(pause)).await.map_err(system("wait"))?;
    }
}

impl Holding {
    pub(super) fn token(&self) -> u64 {
        self.token
    }

    /// Renews until the lease is lost. What may pass (an agent that restarts) is tried again, in ever longer pauses,
    /// until the lease's own time is over and no earlier.
    pub(super) async fn keep(&mut self) -> Result<Loss, RunError> {
        let mut last_error = None;
        let mut pause = FIRST_PAUSE;
        let mut next = self.expires.saturating_sub(self.ttl - self.ttl / 3);
        loop {
            self.timer.sleep_until(next.min(self.expires)).await.map_err(system("wait"))?;
            let sent = boot_now();
            let left = self.expires.saturating_since(sent);
            if left.is_zero() {
                return Ok(Loss::Expired(last_error));
            }
            match self.client.with_timeout(left).renew(&self.service, self.token).await {
                Ok(renewed) => {
                    if last_error.take().is_some() {
                        tell(&self.service, "the lease is renewed again");
                    }
                    self.ttl = Duration::from_millis(renewed.ttl_ms);
                    self.expires = sent.saturating_add(self.ttl);
                    next = sent.saturating_add(self.ttl / 3);
                    pause = FIRST_PAUSE;
                }
                Err(error) if error.is_passing() => {
                    if last_error.is_none() {
                        tell(&self.service, format_args!("cannot renew the lease, trying again: {error}"));
                    }
                    last_error = Some(error);
                    next = boot_now().saturating_add(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE).min(self.ttl / 6);
                }
                Err(error) => return Ok(Loss::Refused(error)),
            }
        }
    }
}

/// Gives the lease back. A failure is told and not more: the lease expires.
pub(super) async fn release(client: &Client, service: &str, token: u64) {
    if let Err(error) = client.with_timeout(RELEASE_TIMEOUT).release(service, token).await {
        tell(service, format_args!("the lease was not released and must expire: {error}"));
    }
}

fn default_holder() -> String {
    let name = rustix::system::uname();
    format!("{}:{}", name.nodename().to_string_lossy(), std::process::id())
}
