//! From an open gate to a fence that is known to hold.

use std::time::Duration;

use super::{Action, BootInstant, Confirmation, Event, Machine, Reason, Retry, Stage, State};

/// A fence that is not confirmed is verified again after this long, then after twice as long, and so on ...
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// ... up to this.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

impl Machine {
    /// To the fence from wherever the machine is. Whatever else is done comes after the gate is closed.
    pub(super) fn fence(&mut self, reason: Reason, out: &mut Vec<Action>) {
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

    /// To the fence even from the fence: what was known of the gate is not relied on. It is closed, and verified.
    pub(super) fn fence_anew(&mut self, reason: Reason, out: &mut Vec<Action>) {
        let closed_now = matches!(out.first(), Some(Action::Close { .. }));
        self.void();
        match &self.state {
            // The deadline has passed in this step: closed, with its verification to come.
            State::Fencing if closed_now => return,
            State::Fenced { .. } if closed_now => {
                (self.epoch, self.reason) = (self.epoch.next(), Some(reason.clone()));
            }
            State::Fenced { .. } | State::Opening { .. } | State::Serving { .. } | State::Fencing => {
                self.close(reason.clone(), out);
            }
        }
        out.push(Action::Verify { epoch: self.epoch });
        self.enter(State::Fencing, Some(reason), out);
    }

    pub(super) fn gate_written(&mut self, found: BootInstant, out: &mut Vec<Action>) {
        self.fence_anew(Reason::GateTaken, out);
        out.push(Action::Record(Event::GateWritten { found }));
    }

    /// Nothing counts that was proven, or asked, before now.
    pub(super) fn void(&mut self) {
        self.waiting = None;
        self.asked_from = self.now;
    }

    pub(super) fn close(&mut self, reason: Reason, out: &mut Vec<Action>) {
        self.epoch = self.epoch.next();
        self.reason = Some(reason.clone());
        out.push(Action::Close { reason });
    }

    pub(super) fn verified(&mut self, confirmation: Confirmation, out: &mut Vec<Action>) {
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

    pub(super) fn verify_again(&mut self, out: &mut Vec<Action>) {
        if let State::Fenced { retry, .. } = &mut self.state
            && retry.at.is_some_and(|at| at <= self.now)
        {
            retry.at = None;
            self.epoch = self.epoch.next();
            out.push(Action::Verify { epoch: self.epoch });
        }
    }
}
