//! What a machine is told.

use crate::{
    config::model::StoreLost,
    core::{
        deadline::{Proof, Timing},
        time::BootInstant,
    },
};

/// What the configuration says to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub timing: Timing,
    pub when_store_lost: StoreLost,
}

/// What a starting agent found: the gate in the kernel and the durable state of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The gate's deadline, or its fence number.
    pub deadline: BootInstant,
    /// The gate's generation: when its current or last opening was decided.
    pub generation: BootInstant,
    /// The gate's token: of its current or last holding, or what [`super::Action::Bar`] left there.
    pub token: u64,
    /// The durable high-water mark; 0 if there has never been one.
    pub high_water: u64,
    /// A manual hold that nobody has removed.
    pub hold: bool,
}

/// Numbers the openings, fencings and repeated verifications of one machine. An effect carries it and its outcome
/// brings it back, so that the outcome of something abandoned is told from that of its successor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Everything that can happen to a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The lease source has proven our holding.
    Proven(Proof),
    /// The holding of `token` has ended. No proof asked for before this counts any more. A source that is about to
    /// release says so first, and asks nothing until the release is answered.
    Lost { token: u64, loss: Loss },
    /// The lease source gets no answers.
    StoreSilent,
    /// An operator's command: the gate is closed and verified anew, also where it is closed already. A token below the
    /// current one is refused: the command meant an earlier holding. With `hold` the service stays fenced until
    /// [`Input::Unfence`].
    Fence { token: Option<u64>, reason: String, hold: bool },
    /// An operator's command: removes the hold, and no more.
    Unfence { token: Option<u64> },
    /// An operator's recorded command, after the store was restored from a backup: the high-water mark is to be
    /// `mark`, and what the store said before is forgotten. Only while fenced.
    ResetMark { mark: u64 },
    /// The boot clock cannot be trusted: it is slewed beyond the drift bound, or it is not the one the kernel reads.
    ClockUnfit { why: String },
    /// The boot clock can be trusted, from now on.
    ClockFit,
    /// Time has passed.
    Tick,
    /// An effect has ended. Each one must, so the shell bounds the time of each.
    Done { epoch: Epoch, outcome: Outcome },
    /// The compare-exchange of an `Open` or `Renew` failed: somebody has closed the gate, or another agent wrote.
    RenewRefused { epoch: Epoch },
    /// The gate does not hold what the shell last wrote to it, but `found`: whatever that is, the gate is closed and
    /// verified anew.
    GateWritten { found: BootInstant },
    /// The agent ends. The gate is left to its deadline.
    Shutdown,
}

/// How a holding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The holder gave it back.
    Released,
    /// The record was deleted, or its session revoked.
    Deleted,
    /// The store says that the TTL has run out.
    Expired,
    /// The store names another holder.
    OtherHolder,
}

/// How an effect ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of `PersistMark`; the error says why the mark is not durable.
    MarkPersisted(Result<(), String>),
    /// Of `SelfTest`; the error says what was seen instead.
    SelfTested { expect: Expect, result: Result<(), String> },
    /// Of `Verify`.
    Verified(Confirmation),
}

/// What the synthetic packets of a self-test must meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// A closed gate, before opening.
    Drop,
    /// An open gate, after opening.
    Pass,
}

/// What was seen, a line per observation.
pub type Evidence = Vec<String>;

/// Whether a fence is known to hold. The passing of time confirms nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confirmation {
    /// The rejected side was looked at, and nothing passes.
    Confirmed(Evidence),
    /// Not everything could be looked at.
    Unconfirmed(Evidence),
    /// Something passes.
    Failed(Evidence),
}
