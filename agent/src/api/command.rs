//! What a request asks of the runtime. The server knows nothing of gates and leases: it turns requests into commands,
//! and the runtime answers each through the command's own channel.
//!
//! Fences travel in a queue of their own and are taken out first, so that no number of other requests delays one.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::{
    peer::Peer,
    types::{Coverage, Health, LeaseGranted, LeaseReleased, Reloaded, ServiceStatus},
};

/// Fences in wait. Each is answered as soon as its gate is closed.
const FENCES: usize = 1024;
/// Other commands in wait; what comes then is refused as busy.
const OTHERS: usize = 256;

/// Where a command's outcome goes. A sender whose receiver is gone belongs to a client that hung up; the command is
/// carried out all the same.
pub type Answer<T> = oneshot::Sender<Result<T, Refusal>>;

/// A change that somebody asked for. `by` is who; the runtime records it.
#[derive(Debug)]
pub enum Command {
    /// Close the gate and keep it closed until unfenced. Answered once the gate is closed, before any other effect.
    Fence {
        service: String,
        token: Option<u64>,
        reason: String,
        by: Peer,
        answer: Answer<ServiceStatus>,
    },
    /// Remove a manual hold. Opens nothing by itself.
    Unfence {
        service: String,
        token: Option<u64>,
        reason: String,
        by: Peer,
        answer: Answer<ServiceStatus>,
    },
    /// Set the high-water token, even lower; only while fenced. The runtime keeps a durable record of it.
    ResetMark {
        service: String,
        mark: u64,
        reason: String,
        by: Peer,
        answer: Answer<ServiceStatus>,
    },
    /// Take the local lease. `ttl` is what was asked for, before the service's cap.
    Acquire {
        service: String,
        holder: String,
        ttl: Duration,
        by: Peer,
        answer: Answer<LeaseGranted>,
    },
    Renew {
        service: String,
        token: u64,
        by: Peer,
        answer: Answer<LeaseGranted>,
    },
    /// Close the gate, then free the lease.
    Release {
        service: String,
        token: u64,
        by: Peer,
        answer: Answer<LeaseReleased>,
    },
    /// Read the configuration again and apply it.
    Reload {
        by: Peer,
        answer: Answer<Reloaded>,
    },
}

/// Why the runtime did not do what it was asked. Nothing was changed, unless the variant says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("there is no service {service}")]
    UnknownService { service: String },
    #[error("token {named} of {service} is not the current one{}", current.map_or(String::new(), |token| format!(", which is {token}")))]
    StaleToken { service: String, named: u64, current: Option<u64> },
    #[error("the lease of {service} is held by {holder} for up to {} ms more", expires_in.as_millis())]
    Held { service: String, holder: String, expires_in: Duration },
    #[error("the lease of {service} with token {token} is lost")]
    Lost { service: String, token: u64 },
    #[error("a TTL of {} ms leaves {service} no time to serve: it must be above {} ms", ttl.as_millis(), minimum.as_millis())]
    TtlTooShort { service: String, ttl: Duration, minimum: Duration },
    #[error("{service} is not fenced")]
    NotFenced { service: String },
    #[error("the configuration was not applied: {detail}")]
    Configuration { detail: String },
    #[error("the state could not be written: {detail}")]
    State { detail: String },
    #[error("the agent is busy with earlier commands")]
    Busy,
    #[error("the agent is going down")]
    Stopping,
}

/// What readers see. Called on the server's thread for each request: it must be cheap and must never wait for the disk or
/// for the runtime's loop.
pub trait View: Send + Sync + 'static {
    fn services(&self) -> Vec<ServiceStatus>;
    /// Nothing: there is no such service.
    fn service(&self, name: &str) -> Option<ServiceStatus>;
    fn health(&self) -> Health;
    fn coverage(&self) -> Coverage;
}

/// The server's end of the queues.
#[derive(Clone, Debug)]
pub struct Commands {
    fences: mpsc::Sender<Command>,
    others: mpsc::Sender<Command>,
}

/// The runtime's end of the queues.
#[derive(Debug)]
pub struct Inbox {
    fences: mpsc::Receiver<Command>,
    others: mpsc::Receiver<Command>,
}

/// Both ends.
pub fn queues() -> (Commands, Inbox) {
    let (fences, fences_out) = mpsc::channel(FENCES);
    let (others, others_out) = mpsc::channel(OTHERS);
    (Commands { fences, others }, Inbox { fences: fences_out, others: others_out })
}

impl Commands {
    /// Hands in the command that `make` builds round its answer channel, and waits for the answer.
    pub async fn ask<T>(&self, make: impl FnOnce(Answer<T>) -> Command) -> Result<T, Refusal> {
        let (answer, outcome) = oneshot::channel();
        let command = make(answer);
        let queue = if matches!(command, Command::Fence { .. }) { &self.fences } else { &self.others };
        queue.try_send(command).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Refusal::Busy,
            mpsc::error::TrySendError::Closed(_) => Refusal::Stopping,
        })?;
        outcome.await.unwrap_or(Err(Refusal::Stopping))
    }
}

impl Inbox {
    /// The next command, fences first. Nothing: the server is gone. Safe to drop while it waits.
    pub async fn next(&mut self) -> Option<Command> {
        tokio::select! {
            biased;
            Some(fence) = self.fences.recv() => Some(fence),
            Some(other) = self.others.recv() => Some(other),
            else => None,
        }
    }

    /// The next fence, if one is waiting: for a runtime that is in the middle of something longer.
    pub fn next_fence(&mut self) -> Option<Command> {
        self.fences.try_recv().ok()
    }
}
