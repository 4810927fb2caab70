//! The state machine of one service: `step(now, input) -> actions`.
//!
//! ```text
//! Fenced  --a proof that counts-----------------------------> Opening
//! Opening --mark durable, closed gate drops, open gate passes-> Serving
//! Opening --anything in the way, gate not yet open----------> Fenced
//! Opening, Serving --lost, expired, commanded, ...----------> Fencing
//! Fencing --verification answers----------------------------> Fenced
//! ```
//!
//! A step that fences starts its actions with `Close`. An effect to come (routes, addresses, processes, sockets) is an
//! action with an epoch, an outcome, and a [`Stage`] of the opening or a step of the fencing that waits for it.

mod action;
mod input;
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

/// A fence that is not confirmed is verified again after this long, then after twice as long, and so on ...
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// ... up to this.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Two openings within one nanosecond would share their sockets: the generation of the second is one ahead of its time.
const NEXT: Duration = Duration::from_nanos(1);
/// The part of the longest TTL by which holding over comes before the deadline: as late as an agent that is slow to be
/// woken allows, since it ends the guarantee.
const HOLD_OVER_LEAD: u32 = 10;

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

    fn proven(&mut self, proof: &Proof, out: &mut Vec<Action>) {
        let order = Order { sequence: proof.sequence, sent_at: proof.sent_at };
        if let Err(refusal) = self.counts(proof, order) {
            let cut = self.state.token().is_none() && matches!(refusal, Refusal::BelowMark { .. });
            let why = refusal.to_string();
            out.push(Action::Record(Event::Refused(refusal)));
            if cut {
                self.alarm(proof.token, why, out);
            }
            return;
        }
        self.newest = Some(order);
        let deadline = deadline(&self.settings.timing, proof);
        if deadline <= self.now {
            let carries = deadline > proof.sent_at;
            self.fence(if carries { Reason::Expired } else { Reason::TtlTooShort }, out);
            // It is the newest all the same: what an older one allowed is over.
            self.waiting = None;
            if !carries {
                self.alarm(proof.token, Reason::TtlTooShort.to_string(), out);
            }
            return;
        }
        let epoch = self.epoch;
        match &mut self.state {
            State::Opening { token, deadline: until, stage } if *token == proof.token => {
                *until = deadline;
                match stage {
                    Stage::MarkDurable { .. } | Stage::ClosedDrops { .. } => {}
                    Stage::OpenPasses => out.push(Action::Renew { epoch, deadline, basis: Basis::Proven }),
                }
            }
            State::Serving { token, deadline: until, basis, silent } if *token == proof.token => {
                (*until, *basis, *silent) = (deadline, Basis::Proven, false);
                out.push(Action::Renew { epoch, deadline, basis: Basis::Proven });
            }
            State::Opening { .. } | State::Serving { .. } => {
                self.fence(Reason::NewHolding, out);
                self.waiting = Some(Waiting { token: proof.token, deadline });
            }
            State::Fenced { .. } | State::Fencing => {
                self.waiting = Some(Waiting { token: proof.token, deadline });
            }
        }
    }

    /// Whether a proof is to be believed, and newer than all that the store has said.
    fn counts(&self, proof: &Proof, order: Order) -> Result<(), Refusal> {
        let timely = self.clock_unfit.is_none() && self.asked_from < proof.sent_at && proof.sent_at <= self.now;
        if self.ending {
            Err(Refusal::Ending)
        } else if !timely {
            Err(Refusal::Untimely { sent_at: proof.sent_at })
        } else if self.newest.is_some_and(|newest| order <= newest) {
            Err(Refusal::StaleProof { sequence: proof.sequence })
        } else if proof.token < self.mark {
            Err(Refusal::BelowMark { token: proof.token, mark: self.mark })
        } else {
            Ok(())
        }
    }

    fn lost(&mut self, token: u64, loss: Loss, out: &mut Vec<Action>) {
        if self.is_stale(Some(token), out) {
            return;
        }
        self.void();
        self.held_but_cut = None;
        self.fence(Reason::Lost(loss), out);
    }

    fn store_silent(&mut self, out: &mut Vec<Action>) {
        let hold_over = match &mut self.state {
            // An adopted gate has no proof yet that could be held over.
            State::Serving { basis: Basis::Proven | Basis::HeldOver, silent, .. } => {
                *silent = true;
                self.holds_over(true)
            }
            State::Serving { basis: Basis::Adopted, .. }
            | State::Fenced { .. }
            | State::Opening { .. }
            | State::Fencing => false,
        };
        out.push(Action::Record(Event::StoreSilent { hold_over }));
    }

    fn command_fence(&mut self, token: Option<u64>, reason: String, hold: bool, out: &mut Vec<Action>) {
        if self.is_stale(token, out) {
            return;
        }
        self.void();
        self.fence(Reason::Manual(reason.clone()), out);
        if hold {
            self.hold = true;
            out.push(Action::PersistHold { held: true });
            out.push(Action::Record(Event::Hold { held: true, reason: Some(reason) }));
        }
    }

    fn command_unfence(&mut self, token: Option<u64>, out: &mut Vec<Action>) {
        if self.is_stale(token, out) {
            return;
        }
        self.hold = false;
        out.push(Action::PersistHold { held: false });
        out.push(Action::Record(Event::Hold { held: false, reason: None }));
    }

    /// A command or a loss that means an earlier holding is refused: it would hit the holding that came after.
    fn is_stale(&self, given: Option<u64>, out: &mut Vec<Action>) -> bool {
        let current = self.waiting.map_or(self.mark, |waiting| waiting.token.max(self.mark));
        match given {
            Some(given) if given < current => {
                out.push(Action::Record(Event::Refused(Refusal::StaleToken { given, current })));
                true
            }
            Some(_) | None => false,
        }
    }

    fn reset_mark(&mut self, mark: u64, out: &mut Vec<Action>) {
        match &self.state {
            State::Fenced { .. } => {
                out.push(Action::PersistMark { epoch: self.epoch, token: mark });
                out.push(Action::Record(Event::MarkReset { from: self.mark, to: mark }));
                (self.mark, self.durable) = (mark, None);
                (self.newest, self.held_but_cut) = (None, None);
                self.void();
            }
            State::Opening { .. } | State::Serving { .. } | State::Fencing => {
                out.push(Action::Record(Event::Refused(Refusal::NotFenced { state: self.state.name() })));
            }
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

    fn mark_persisted(&mut self, result: Result<(), String>, out: &mut Vec<Action>) {
        let State::Opening { token, stage, .. } = &mut self.state else { return };
        let (token, Stage::MarkDurable { before }) = (*token, &*stage) else { return };
        match result {
            Ok(()) => {
                *stage = Stage::ClosedDrops { before: before.clone() };
                self.durable = Some(token);
                out.push(Action::SelfTest { epoch: self.epoch, expect: Expect::Drop });
            }
            Err(why) => {
                self.fence(Reason::MarkNotDurable, out);
                self.alarm(token, format!("{}: {why}", Reason::MarkNotDurable), out);
            }
        }
    }

    fn self_tested(&mut self, tested: Expect, result: Result<(), String>, out: &mut Vec<Action>) {
        let State::Opening { token, deadline, stage } = &mut self.state else { return };
        let (token, deadline, epoch) = (*token, *deadline, self.epoch);
        match (&stage, tested) {
            (Stage::ClosedDrops { .. }, Expect::Drop) | (Stage::OpenPasses, Expect::Pass) => {}
            (Stage::MarkDurable { .. }, _) | (Stage::ClosedDrops { .. }, _) | (Stage::OpenPasses, _) => return,
        }
        match (tested, result) {
            (Expect::Drop, Ok(())) => {
                *stage = Stage::OpenPasses;
                self.generation = self.now.max(self.generation.saturating_add(NEXT));
                out.push(Action::Open { epoch, generation: self.generation, token, deadline });
                out.push(Action::SelfTest { epoch, expect: Expect::Pass });
            }
            (Expect::Pass, Ok(())) => {
                self.held_but_cut = None;
                self.reason = None;
                self.enter(State::Serving { token, deadline, basis: Basis::Proven, silent: false }, None, out);
            }
            (Expect::Drop | Expect::Pass, Err(why)) => {
                self.fence(Reason::SelfTestFailed, out);
                self.alarm(token, format!("{}: {why}", Reason::SelfTestFailed), out);
            }
        }
    }

    fn verified(&mut self, confirmation: Confirmation, out: &mut Vec<Action>) {
        match &mut self.state {
            State::Fencing => {
                out.push(Action::Record(Event::Verified(confirmation.clone())));
                let retry = Retry::after(&confirmation, self.now, FIRST_RETRY);
                self.enter(State::Fenced { confirmation, retry }, self.reason.clone(), out);
            }
            State::Fenced { confirmation: known, retry } => {
                out.push(Action::Record(Event::Verified(confirmation.clone())));
                let pause = retry.pause.saturating_mul(2).min(LONGEST_RETRY);
                *retry = Retry::after(&confirmation, self.now, pause);
                *known = confirmation;
            }
            State::Opening { .. } | State::Serving { .. } => {}
        }
    }

    /// To the fence from wherever the machine is. Whatever else is done comes after the gate is closed.
    fn fence(&mut self, reason: Reason, out: &mut Vec<Action>) {
        let next = match &self.state {
            State::Fenced { .. } | State::Fencing => return,
            // The gate has been closed since the fence before, and what was confirmed then still stands. It is closed
            // again: an `Open` on its way must fail.
            State::Opening { stage: Stage::MarkDurable { before } | Stage::ClosedDrops { before }, .. } => {
                let retry = Retry::after(before, self.now, FIRST_RETRY);
                State::Fenced { confirmation: before.clone(), retry }
            }
            State::Opening { stage: Stage::OpenPasses, .. } | State::Serving { .. } => State::Fencing,
        };
        self.void();
        self.close(reason.clone(), out);
        match &next {
            State::Fencing => out.push(Action::Verify { epoch: self.epoch }),
            State::Fenced { .. } | State::Opening { .. } | State::Serving { .. } => {}
        }
        self.enter(next, Some(reason), out);
    }

    /// Nothing counts that was proven, or asked, before now.
    fn void(&mut self) {
        self.waiting = None;
        self.asked_from = self.now;
    }

    fn close(&mut self, reason: Reason, out: &mut Vec<Action>) {
        self.epoch = self.epoch.next();
        self.reason = Some(reason.clone());
        out.push(Action::Close { reason });
    }

    fn open_with_waiting(&mut self, out: &mut Vec<Action>) {
        let State::Fenced { confirmation, .. } = &self.state else { return };
        if self.hold || self.ending || self.clock_unfit.is_some() {
            return;
        }
        let Some(Waiting { token, deadline }) = self.waiting.take() else { return };
        if deadline <= self.now {
            return;
        }
        let before = confirmation.clone();
        self.epoch = self.epoch.next();
        self.mark = token;
        let stage = if self.durable == Some(token) {
            out.push(Action::SelfTest { epoch: self.epoch, expect: Expect::Drop });
            Stage::ClosedDrops { before }
        } else {
            out.push(Action::PersistMark { epoch: self.epoch, token });
            Stage::MarkDurable { before }
        };
        self.enter(State::Opening { token, deadline, stage }, None, out);
    }

    /// `when_store_lost = "hold"`: a little before the deadline it is moved the longest TTL ahead, so that the agent's
    /// death still closes the gate, later.
    fn hold_over(&mut self, out: &mut Vec<Action>) {
        let (lead, until) = (self.hold_over_lead(), self.now.saturating_add(self.settings.timing.ttl_cap));
        let wanted = match &self.state {
            State::Serving { deadline, silent, .. } => {
                self.holds_over(*silent) && deadline.saturating_sub(lead) <= self.now && until > *deadline
            }
            State::Fenced { .. } | State::Opening { .. } | State::Fencing => false,
        };
        if let (true, State::Serving { deadline, basis, .. }) = (wanted, &mut self.state) {
            (*deadline, *basis) = (until, Basis::HeldOver);
            out.push(Action::Renew { epoch: self.epoch, deadline: until, basis: Basis::HeldOver });
            out.push(Action::Record(Event::HeldOver { until }));
        }
    }

    fn holds_over(&self, silent: bool) -> bool {
        match self.settings.when_store_lost {
            StoreLost::Fence => false,
            StoreLost::Hold => silent && !self.ending,
        }
    }

    fn hold_over_lead(&self) -> Duration {
        self.settings.timing.ttl_cap.checked_div(HOLD_OVER_LEAD).unwrap_or_default()
    }

    fn verify_again(&mut self, out: &mut Vec<Action>) {
        if let State::Fenced { retry, .. } = &mut self.state
            && retry.at.is_some_and(|at| at <= self.now)
        {
            retry.at = None;
            self.epoch = self.epoch.next();
            out.push(Action::Verify { epoch: self.epoch });
        }
    }

    fn alarm(&mut self, token: u64, why: String, out: &mut Vec<Action>) {
        self.held_but_cut = Some(why.clone());
        out.push(Action::Record(Event::HeldButCut { token, why }));
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
