//! What operators say. A refusal is the answer to the command.

use super::{Action, Event, Machine, Reason, Refusal, State};

impl Machine {
    pub(super) fn command_fence(&mut self, token: Option<u64>, reason: String, hold: bool, out: &mut Vec<Action>) {
        if self.is_stale(token, out) {
            return;
        }
        self.void();
        self.fence_anew(Reason::Manual(reason.clone()), out);
        if hold {
            self.hold = true;
            out.push(Action::PersistHold { held: true });
            out.push(Action::Record(Event::Hold { held: true, reason: Some(reason) }));
        }
    }

    pub(super) fn command_unfence(&mut self, token: Option<u64>, out: &mut Vec<Action>) {
        if self.is_stale(token, out) {
            return;
        }
        self.hold = false;
        out.push(Action::PersistHold { held: false });
        out.push(Action::Record(Event::Hold { held: false, reason: None }));
    }

    /// A command or a loss that means an earlier holding is refused: it would hit the holding that came after.
    pub(super) fn is_stale(&self, given: Option<u64>, out: &mut Vec<Action>) -> bool {
        let current = self.waiting.map_or(self.mark, |waiting| waiting.token.max(self.mark));
        match given {
            Some(given) if given < current => {
                out.push(Action::Record(Event::Refused(Refusal::StaleToken { given, current })));
                true
            }
            Some(_) | None => false,
        }
    }

    pub(super) fn reset_mark(&mut self, mark: u64, out: &mut Vec<Action>) {
        match &self.state {
            State::Fenced { .. } => {
                out.push(Action::PersistMark { epoch: self.epoch, token: mark });
                // The gate bears a token too: without this a later agent would take that for the mark.
                out.push(Action::Bar { below: mark });
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
}
