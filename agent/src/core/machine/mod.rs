//! The state machine of one service: `step(now, input) -> actions`.
//!
//! ```text
//! Fenced  --a proof that counts-----------------------------> Opening
//! Opening --mark durable, closed gate drops, open gate passes-> Serving
//! Opening --anything in the way, gate not yet open----------> Fenced
//! Opening, Serving --lost, expired, commanded, ...----------> Fencing
//! any state --commanded, or somebody else wrote the gate----> Fencing
//! Fencing --verification answers----------------------------> Fenced
//! ```
//!
//! A step that fences starts its actions with `Close`. An effect to come (routes, addresses, processes, sockets) is an
//! action with an epoch, an outcome, and a [`Stage`] of the opening or a step of the fencing that waits for it.

mod action;
mod command;
mod fencing;
mod input;
mod lease;
mod opening;
#[cfg(test)]
mod tests;

use std::time::Duration;

use portcullis_common::layout::FENCE_NUMBERS;

pub use self::{
    action::{Action, Alarm, Basis, Event, Reason, Refusal, StateName, View},
    input::{Confirmation, Epoch, Evidence, Expect, Found, Input, Loss, Outcome, Settings},
};
use super::{
    deadline::{Proof, deadline},
    time::BootInstant,
};
use crate::config::model::StoreLost;

/// Two openings within one nanosecond would share their sockets: the generation of the second is one ahead of its time.
const NEXT: Duration = Duration::from_nanos(1);

/// One service.
#[derive(Clone, Debug)]
pub struct Machine {
    settings: Settings,
    state: State,
    /// When `state` was entered.
    since: BootInstant,
    /// The latest instant of any step: a caller whose time goes back is held to it.
    now: BootInstant,
    /// Of the latest opening, fencing, or verification. Outcomes of others are of something abandoned.
    epoch: Epoch,
    /// No token below it opens. Raised when an opening begins, before that is durable.
    mark: u64,
    /// The mark known to be durable, if it is known.
    durable: Option<u64>,
    /// The newest answer of the store.
    newest: Option<Order>,
    /// A proof that has not been used, for when the fence ends or the hold is removed.
    waiting: Option<Waiting>,
    hold: bool,
    /// Why the boot clock cannot be trusted, if so.
    clock_unfit: Option<String>,
    /// Only what was asked after this proves something: the last fence, loss, or unfit clock. Otherwise a renewal that the
    /// store took just before our release, answered after it, would open beside the next holder.
    asked_from: BootInstant,
    /// Of the last opening. The next is strictly later.
    generation: BootInstant,
    /// Why the service was last fenced.
    reason: Option<Reason>,
    /// Why the lease is held and the gate was not opened.
    held_but_cut: Option<String>,
    /// The agent ends: nothing opens, and nothing is renewed.
    ending: bool,
}

#[derive(Clone, Debug)]
enum State {
    Fenced { confirmation: Confirmation, retry: Retry },
    Opening { token: u64, deadline: BootInstant, stage: Stage },
    Serving { token: u64, deadline: BootInstant, basis: Basis, silent: bool },
    Fencing,
}

/// What an opening waits for. The gate is closed until the last.
#[derive(Clone, Debug)]
enum Stage {
    /// That the token is the durable high-water mark.
    MarkDurable { before: Confirmation },
    /// That the closed gate drops.
    ClosedDrops { before: Confirmation },
    /// That the open gate passes.
    OpenPasses,
}

/// When a fence that is not confirmed is verified again.
#[derive(Clone, Copy, Debug)]
struct Retry {
    /// None: confirmed, or being verified.
    at: Option<BootInstant>,
    /// The time from this verification to the next.
    pause: Duration,
}

/// Of two answers of the store the newer is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Order {
    sequence: u64,
    sent_at: BootInstant,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    token: u64,
    deadline: BootInstant,
}

impl Machine {
    /// The machine of a starting agent. A gate that an earlier agent left open is kept until its deadline, and moved
    /// only by a fresh proof of the same token; anything else is fenced. `now` is the time at which `found` was read.
    pub fn adopt(settings: Settings, now: BootInstant, found: Found) -> (Self, Vec<Action>) {
        let mut machine = Self {
            settings,
            state: State::Fencing,
            since: now,
            now,
            epoch: Epoch::default(),
            mark: found.high_water,
            durable: Some(found.high_water),
            newest: None,
            waiting: None,
            hold: found.hold,
            clock_unfit: None,
            asked_from: BootInstant::ZERO,
            // One from the future is no opening's: keeping it would put off all that come.
            generation: found.generation.min(now.saturating_add(NEXT)),
            reason: None,
            held_but_cut: None,
            ending: false,
        };
        let mut out = Vec::new();
        match machine.adoptable(&found) {
            Ok(()) => {
                machine.state = State::Serving {
                    token: found.token,
                    deadline: found.deadline,
                    basis: Basis::Adopted,
                    silent: false,
                };
                if found.token > machine.mark {
                    machine.mark = found.token;
                    out.push(Action::PersistMark { epoch: machine.epoch, token: found.token });
                }
                out.push(Action::Record(Event::Adopted { token: found.token, deadline: found.deadline }));
            }
            Err(reason) => {
                // A gate that is closed as this agent closes one may bear word of a release, see `bar`.
                if reason == Reason::StartUp {
                    machine.mark = machine.mark.max(found.token);
                }
                // An expired gate is closed as well: then it needs no clock.
                machine.close(reason.clone(), &mut out);
                out.push(Action::Verify { epoch: machine.epoch });
                out.push(Action::Record(Event::Moved {
                    from: StateName::Fenced,
                    to: StateName::Fencing,
                    token: None,
                    reason: Some(reason),
                }));
            }
        }
        (machine, out)
    }

    /// Is the gate one that an earlier agent left open? The error says why it must be fenced.
    fn adoptable(&self, found: &Found) -> Result<(), Reason> {
        if found.deadline <= self.now || found.deadline.as_nanos() < FENCE_NUMBERS {
            return Err(Reason::StartUp);
        }
        let furthest = self.now.saturating_add(self.settings.timing.ttl_cap);
        if found.deadline > furthest
            || found.generation > self.now.saturating_add(NEXT)
            || found.token < found.high_water
            || found.hold
        {
            return Err(Reason::NotOurs);
        }
        Ok(())
    }

    /// Settings of a changed configuration: they count from the next proof on, and open or close nothing.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// When the machine wants a [`Input::Tick`], if nothing else comes before.
    pub fn wake_at(&self) -> Option<BootInstant> {
        match &self.state {
            State::Fenced { retry, .. } => retry.at,
            State::Opening { deadline, .. } => Some(*deadline),
            State::Serving { deadline, silent, .. } if self.holds_over(*silent) => {
                Some(deadline.saturating_sub(self.hold_over_lead()))
            }
            State::Serving { deadline, .. } => Some(*deadline),
            State::Fencing => None,
        }
    }

    /// What others may see.
    pub fn view(&self) -> View {
        let (deadline, basis, confirmation) = match &self.state {
            State::Fenced { confirmation, .. } => (None, None, Some(confirmation.clone())),
            State::Opening { deadline, .. } => (Some(*deadline), None, None),
            State::Serving { deadline, basis, .. } => (Some(*deadline), Some(*basis), None),
            State::Fencing => (None, None, None),
        };
        let alarm = match (&self.clock_unfit, &self.held_but_cut) {
            (Some(why), _) => Some(Alarm::ClockUnfit { why: why.clone() }),
            (None, Some(why)) => Some(Alarm::HeldButCut { why: why.clone() }),
            (None, None) => (basis == Some(Basis::HeldOver)).then_some(Alarm::HeldOver),
        };
        View {
            state: self.state.name(),
            token: self.state.token().or(self.waiting.map(|waiting| waiting.token)),
            deadline,
            basis,
            mark: self.mark,
            hold: self.hold,
            reason: self.reason.clone(),
            confirmation,
            since: self.since,
            alarm,
        }
    }

    /// Takes what has happened by `now`, and gives what must be done, in that order.
    pub fn step(&mut self, now: BootInstant, input: Input) -> Vec<Action> {
        self.now = self.now.max(now);
        let mut out = Vec::new();
        // Whatever has come: a gate that has fallen is not lifted again by a renewal, since what was written meanwhile
        // would pass after it.
        self.expire(&mut out);
        match input {
            Input::Proven(proof) => self.proven(&proof, &mut out),
            Input::Lost { token, loss } => self.lost(token, loss, &mut out),
            Input::StoreSilent => self.store_silent(&mut out),
            Input::Fence { token, reason, hold } => self.command_fence(token, reason, hold, &mut out),
            Input::Unfence { token } => self.command_unfence(token, &mut out),
            Input::ResetMark { mark } => self.reset_mark(mark, &mut out),
            Input::ClockUnfit { why } => self.clock_unfit(why, &mut out),
            Input::ClockFit => self.clock_fit(&mut out),
            Input::Tick => {}
            Input::Done { epoch, outcome } if epoch == self.epoch => self.done(outcome, &mut out),
            Input::RenewRefused { epoch } if epoch == self.epoch => self.fence(Reason::GateTaken, &mut out),
            Input::Done { .. } | Input::RenewRefused { .. } => {}
            Input::GateWritten { found } => self.gate_written(found, &mut out),
            Input::Shutdown => self.shutdown(&mut out),
        }
        self.open_with_waiting(&mut out);
        self.hold_over(&mut out);
        self.verify_again(&mut out);
        out
    }

    fn expire(&mut self, out: &mut Vec<Action>) {
        match &self.state {
            State::Opening { deadline, .. } | State::Serving { deadline, .. } if *deadline <= self.now => {
                self.fence(Reason::Expired, out);
            }
            State::Opening { .. } | State::Serving { .. } | State::Fenced { .. } | State::Fencing => {}
        }
    }

    fn clock_unfit(&mut self, why: String, out: &mut Vec<Action>) {
        self.clock_unfit = Some(why.clone());
        self.void();
        self.held_but_cut = None;
        self.fence(Reason::ClockUnfit(why.clone()), out);
        out.push(Action::Record(Event::ClockUnfit { why }));
    }

    fn clock_fit(&mut self, out: &mut Vec<Action>) {
        if self.clock_unfit.take().is_some() {
            self.asked_from = self.now;
            out.push(Action::Record(Event::ClockFit));
        }
    }

    fn shutdown(&mut self, out: &mut Vec<Action>) {
        self.ending = true;
        match &self.state {
            State::Opening { .. } => self.fence(Reason::Shutdown, out),
            State::Fenced { .. } | State::Serving { .. } | State::Fencing => self.waiting = None,
        }
        out.push(Action::Record(Event::Shutdown));
    }

    fn done(&mut self, outcome: Outcome, out: &mut Vec<Action>) {
        match outcome {
            Outcome::MarkPersisted(result) => self.mark_persisted(result, out),
            Outcome::SelfTested { expect, result } => self.self_tested(expect, result, out),
            Outcome::Verified(confirmation) => self.verified(confirmation, out),
        }
    }

    fn enter(&mut self, next: State, reason: Option<Reason>, out: &mut Vec<Action>) {
        out.push(Action::Record(Event::Moved {
            from: self.state.name(),
            to: next.name(),
            token: next.token().or(self.state.token()),
            reason,
        }));
        self.since = self.now;
        self.state = next;
    }
}

impl State {
    fn name(&self) -> StateName {
        match self {
            Self::Fenced { .. } => StateName::Fenced,
            Self::Opening { .. } => StateName::Opening,
            Self::Serving { .. } => StateName::Serving,
            Self::Fencing => StateName::Fencing,
        }
    }

    fn token(&self) -> Option<u64> {
        match self {
            Self::Opening { token, .. } | Self::Serving { token, .. } => Some(*token),
            Self::Fenced { .. } | Self::Fencing => None,
        }
    }
}

impl Retry {
    fn after(confirmation: &Confirmation, now: BootInstant, pause: Duration) -> Self {
        let at = match confirmation {
            Confirmation::Confirmed(_) => None,
            Confirmation::Unconfirmed(_) | Confirmation::Failed(_) => Some(now.saturating_add(pause)),
        };
        Self { at, pause }
    }
}

impl Epoch {
    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}
