//! What a machine asks for and tells.

use std::fmt;

use super::input::{Confirmation, Epoch, Expect, Loss};
use crate::core::time::BootInstant;

/// What the shell must do, in the order given. An action with an epoch ends with an outcome of that epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Close the gate with a fence number never used before. The first of its list: nothing else can delay it.
    Close { reason: Reason },
    /// Remember in the gate, which outlives the agent, that no token below this opens. A store to memory: it cannot fail.
    Bar { below: u64 },
    /// Make the high-water mark durable, in the order asked for.
    PersistMark { epoch: Epoch, token: u64 },
    /// Make it durable whether a manual hold is in force, and try again until it is. The command does not wait for that:
    /// it is answered when the gate is closed. The status says so while it is not durable.
    PersistHold { held: bool },
    /// Send synthetic packets through the attached programs.
    SelfTest { epoch: Epoch, expect: Expect },
    /// Open the gate by compare-exchange from the value it was closed with.
    Open { epoch: Epoch, generation: BootInstant, token: u64, deadline: BootInstant },
    /// Move the deadline, forward or back, by compare-exchange from the value last written.
    Renew { epoch: Epoch, deadline: BootInstant, basis: Basis },
    /// Look at the rejected side.
    Verify { epoch: Epoch },
    /// Log it, journal it, tell who listens.
    Record(Event),
}

/// What an open gate's deadline rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// A proof.
    Proven,
    /// An earlier agent's proof: found open by a starting agent.
    Adopted,
    /// The operator's word (`when_store_lost = "hold"`); there is no guarantee.
    HeldOver,
}

/// What happened, for the log, the journal, and whoever waits for an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A gate that an earlier agent left open is kept until its deadline.
    Adopted {
        token: u64,
        deadline: BootInstant,
    },
    Moved {
        from: StateName,
        to: StateName,
        /// Of the opening that begins, goes on or ends.
        token: Option<u64>,
        /// Why, on the way to a fence.
        reason: Option<Reason>,
    },
    Verified(Confirmation),
    /// The input changed nothing. Of a command it is the answer.
    Refused(Refusal),
    /// A hold was placed or removed.
    Hold {
        held: bool,
        reason: Option<String>,
    },
    MarkReset {
        from: u64,
        to: u64,
    },
    /// The store does not answer; the gate is kept open on the operator's word, or its deadline decides.
    StoreSilent {
        hold_over: bool,
    },
    /// The gate was kept open without a proof, until then.
    HeldOver {
        until: BootInstant,
    },
    HeldButCut {
        token: u64,
        why: String,
    },
    /// Somebody else has written the gate: what was found in it.
    GateWritten {
        found: BootInstant,
    },
    ClockUnfit {
        why: String,
    },
    ClockFit,
    Shutdown,
}

/// Why a service was fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The agent found the gate closed, or expired.
    StartUp,
    /// The agent found an open gate that it cannot have left so.
    NotOurs,
    /// The deadline passed.
    Expired,
    Lost(Loss),
    /// The newest proof's TTL cannot carry drift and margin.
    TtlTooShort,
    /// A newer holding of our own has begun: it gets its own opening.
    NewHolding,
    Manual(String),
    ClockUnfit(String),
    /// The gate did not have the value last written.
    GateTaken,
    SelfTestFailed,
    MarkNotDurable,
    /// The agent ended while opening.
    Shutdown,
}

/// Why an input was not followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The command or the loss means an earlier holding.
    StaleToken { given: u64, current: u64 },
    /// The store has said something newer.
    StaleProof { sequence: u64 },
    /// A token that the high-water mark has passed: the store has gone back in time.
    BelowMark { token: u64, mark: u64 },
    /// The request was sent before the last fence or loss, while the clock could not be trusted, or in the future.
    Untimely { sent_at: BootInstant },
    /// The high-water mark is reset only while fenced.
    NotFenced { state: StateName },
    /// The agent is ending: no proof counts.
    Ending,
}

/// The states of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateName {
    Fenced,
    Opening,
    Serving,
    Fencing,
}

/// What an operator must know at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// The lease is held, and the gate could not be opened. Tried again with the next proof.
    HeldButCut { why: String },
    /// The gate is open without a proof.
    HeldOver,
    /// Nothing opens until the boot clock can be trusted.
    ClockUnfit { why: String },
}

/// A machine as others may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub state: StateName,
    /// Of the opening or serving holding; while fenced, of a holding that waits to open.
    pub token: Option<u64>,
    /// When the gate closes unless renewed.
    pub deadline: Option<BootInstant>,
    /// What the deadline rests on, while serving.
    pub basis: Option<Basis>,
    /// The high-water mark: no token below it opens.
    pub mark: u64,
    /// A manual hold is in force.
    pub hold: bool,
    /// Why the service was last fenced.
    pub reason: Option<Reason>,
    /// Of the last fence, while fenced.
    pub confirmation: Option<Confirmation>,
    /// When the state was entered.
    pub since: BootInstant,
    pub alarm: Option<Alarm>,
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Proven => "proven",
            Self::Adopted => "adopted",
            Self::HeldOver => "held over",
        })
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fenced => "fenced",
            Self::Opening => "opening",
            Self::Serving => "serving",
            Self::Fencing => "fencing",
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StartUp => f.write_str("the agent started and found the gate closed"),
            Self::NotOurs => f.write_str("the gate was found open, but not as this agent leaves one"),
            Self::Expired => f.write_str("the deadline passed without a renewal"),
            Self::Lost(Loss::Released) => f.write_str("the lease was released"),
            Self::Lost(Loss::Deleted) => f.write_str("the lease was deleted or its session revoked"),
            Self::Lost(Loss::Expired) => f.write_str("the lease expired in the store"),
            Self::Lost(Loss::OtherHolder) => f.write_str("the lease has another holder"),
            Self::TtlTooShort => {
                f.write_str("the TTL cannot carry drift and margin; raise the TTL or lower the margin")
            }
            Self::NewHolding => f.write_str("a newer holding has begun"),
            Self::Manual(why) => write!(f, "fenced by command: {why}"),
            Self::ClockUnfit(why) => write!(f, "the boot clock cannot be trusted: {why}"),
            Self::GateTaken => f.write_str("the gate was closed or written by somebody else"),
            Self::SelfTestFailed => f.write_str("the self-test failed"),
            Self::MarkNotDurable => f.write_str("the high-water mark could not be made durable"),
            Self::Shutdown => f.write_str("the agent ended"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StaleToken { given, current } => {
                write!(f, "token {given} is of an earlier holding, the current one is {current}; read the status again")
            }
            Self::StaleProof { sequence } => write!(f, "the store has said something newer than sequence {sequence}"),
            Self::BelowMark { token, mark } => write!(
                f,
                "token {token} is below the high-water mark {mark}: the store has gone back in time; if it was restored \
                 from a backup, reset the mark"
            ),
            Self::Untimely { sent_at } => write!(
                f,
                "the proof was asked for at {sent_at}: before the last fence, with an unfit clock, or in the future"
            ),
            Self::NotFenced { state } => {
                write!(f, "the service is {state}; the high-water mark is reset only while fenced")
            }
            Self::Ending => f.write_str("the agent is ending: it opens and renews nothing; its successor will"),
        }
    }
}
