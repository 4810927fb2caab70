//! What the lease source says: proofs, losses, silence.

use std::time::Duration;

use super::{
    Action, Basis, Event, Loss, Machine, Order, Proof, Reason, Refusal, Stage, State, StoreLost, Waiting, deadline,
};

/// The part of the longest TTL by which holding over comes before the deadline: as late as an agent that is slow to be
/// woken allows, since it ends the guarantee.
const HOLD_OVER_LEAD: u32 = 10;

impl Machine {
    pub(super) fn proven(&mut self, proof: &Proof, out: &mut Vec<Action>) {
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

    pub(super) fn lost(&mut self, token: u64, loss: Loss, out: &mut Vec<Action>) {
        if self.is_stale(Some(token), out) {
            return;
        }
        self.void();
        self.held_but_cut = None;
        self.fence(Reason::Lost(loss), out);
        match loss {
            Loss::Released => self.bar(token, out),
            Loss::Deleted | Loss::Expired | Loss::OtherHolder => {}
        }
    }

    /// What was given back never opens again, not even for an agent that starts while the release is still on its way to
    /// the store: a renewal of the same holding could overtake it there.
    fn bar(&mut self, token: u64, out: &mut Vec<Action>) {
        let below = token.saturating_add(1);
        if below > self.mark {
            self.mark = below;
            out.push(Action::Bar { below });
        }
    }

    pub(super) fn store_silent(&mut self, out: &mut Vec<Action>) {
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

    /// `when_store_lost = "hold"`: a little before the deadline it is moved the longest TTL ahead, so that the agent's
    /// death still closes the gate, later.
    pub(super) fn hold_over(&mut self, out: &mut Vec<Action>) {
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

    pub(super) fn holds_over(&self, silent: bool) -> bool {
        match self.settings.when_store_lost {
            StoreLost::Fence => false,
            StoreLost::Hold => silent && !self.ending,
        }
    }

    pub(super) fn hold_over_lead(&self) -> Duration {
        self.settings.timing.ttl_cap.checked_div(HOLD_OVER_LEAD).unwrap_or_default()
    }
}
