//! From a proof to an open gate.

use super::{Action, Basis, Event, Expect, Machine, NEXT, Reason, Stage, State, Waiting};

impl Machine {
    pub(super) fn open_with_waiting(&mut self, out: &mut Vec<Action>) {
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

    pub(super) fn mark_persisted(&mut self, result: Result<(), String>, out: &mut Vec<Action>) {
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

    pub(super) fn self_tested(&mut self, tested: Expect, result: Result<(), String>, out: &mut Vec<Action>) {
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

    pub(super) fn alarm(&mut self, token: u64, why: String, out: &mut Vec<Action>) {
        self.held_but_cut = Some(why.clone());
        out.push(Action::Record(Event::HeldButCut { token, why }));
    }
}
