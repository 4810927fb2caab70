//! What the local socket asks for.

use super::host::{Host, Index, Written};
use crate::{
    api::{
        command::{Answer, Command, Refusal},
        peer::Peer,
        types::{self, EventKind},
    },
    clock::{boot_now, wall_ms, whole_ms},
    config::check::Timing,
    core::machine::{self, Action, Event, Input, Loss, StateName},
    lease::{
        local::{Acquire, Reservation},
        store::HoldRecord,
        writer::{Change, WriteError},
    },
};

impl Host {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Fence { service, token, reason, by, answer } => {
                let outcome = self.fence(&service, token, reason, &by);
                // Whoever hung up does not want to know.
                _ = answer.send(outcome);
            }
            Command::Unfence { service, token, reason, by, answer } => {
                _ = answer.send(self.unfence(&service, token, &reason, &by));
            }
            Command::ResetMark { service, mark, reason, by, answer } => {
                self.reset_mark(&service, mark, &reason, &by, answer);
            }
            Command::Acquire { service, holder, ttl, by, answer } => self.acquire(&service, &holder, ttl, &by, answer),
            Command::Renew { service, token, by: _, answer } => _ = answer.send(self.renew(&service, token)),
            Command::Release { service, token, by, answer } => _ = answer.send(self.release(&service, token, &by)),
            Command::Reload { by, answer } => {
                self.tell(EventKind::Command, None, format!("reload asked for by {by}"));
                self.reload(Some(answer));
            }
        }
    }

    fn index(&self, service: &str) -> Result<Index, Refusal> {
        self.by_name.get(service).copied().ok_or_else(|| Refusal::UnknownService { service: service.to_owned() })
    }

    /// Gives a command's input to the machine; what the machine refuses is the answer.
    fn ask(&mut self, index: Index, input: Input) -> Result<(), Refusal> {
        let Some(service) = self.service_mut(index) else { return Err(Refusal::Stopping) };
        let name = service.settings.name.clone();
        let actions = service.machine.step(boot_now(), input);
        let refusal = actions.iter().find_map(|action| match action {
            Action::Record(Event::Refused(refusal)) => Some(refusal.clone()),
            Action::Record(_)
            | Action::Close { .. }
            | Action::Bar { .. }
            | Action::PersistMark { .. }
            | Action::PersistHold { .. }
            | Action::SelfTest { .. }
            | Action::Open { .. }
            | Action::Renew { .. }
            | Action::Verify { .. } => None,
        });
        self.carry_out(index, actions);
        match refusal {
            None => Ok(()),
            Some(machine::Refusal::StaleToken { given, current }) => {
                Err(Refusal::StaleToken { service: name, named: given, current: Some(current) })
            }
            Some(machine::Refusal::NotFenced { .. }) => Err(Refusal::NotFenced { service: name }),
            Some(machine::Refusal::Ending) => Err(Refusal::Stopping),
            Some(
                refusal @ (machine::Refusal::StaleProof { .. }
                | machine::Refusal::BelowMark { .. }
                | machine::Refusal::Untimely { .. }),
            ) => Err(Refusal::State { detail: refusal.to_string() }),
        }
    }

    fn answer(&self, index: Index) -> Result<types::ServiceStatus, Refusal> {
        self.status(index).ok_or(Refusal::Stopping)
    }

    fn fence(
        &mut self,
        name: &str,
        token: Option<u64>,
        reason: String,
        by: &Peer,
    ) -> Result<types::ServiceStatus, Refusal> {
        let index = self.index(name)?;
        let before = self.service(index).and_then(|service| service.hold.clone());
        let hold = HoldRecord { reason: reason.clone(), uid: by.uid, pid: by.pid, since_wall_ms: wall_ms() };
        if let Some(service) = self.service_mut(index) {
            service.hold = Some(hold);
        }
        let asked = self.ask(index, Input::Fence { token, reason, hold: true });
        if asked.is_err()
            && let Some(service) = self.service_mut(index)
        {
            service.hold = before;
        }
        asked?;
        self.tell(EventKind::Command, Some(name), format!("fenced by {by}"));
        self.answer(index)
    }

    fn unfence(
        &mut self,
        name: &str,
        token: Option<u64>,
        reason: &str,
        by: &Peer,
    ) -> Result<types::ServiceStatus, Refusal> {
        let index = self.index(name)?;
        self.ask(index, Input::Unfence { token })?;
        if let Some(service) = self.service_mut(index) {
            service.meddled = None;
        }
        self.tell(EventKind::Command, Some(name), format!("unfenced by {by}: {reason}"));
        self.answer(index)
    }

    fn reset_mark(&mut self, name: &str, mark: u64, reason: &str, by: &Peer, answer: Answer<types::ServiceStatus>) {
        let index = match self.index(name) {
            Ok(index) => index,
            Err(refusal) => return drop(answer.send(Err(refusal))),
        };
        let fenced = |state| matches!(state, StateName::Fenced | StateName::Fencing);
        if !self.service(index).is_some_and(|service| fenced(service.machine.view().state)) {
            return drop(answer.send(Err(Refusal::NotFenced { service: name.to_owned() })));
        }
        // The record comes before the mark of the machine, which may raise it again at once.
        let change = Change::ResetMark {
            service: name.to_owned(),
            token: mark,
            who: format!("{by}: {reason}"),
            wall_ms: wall_ms(),
        };
        let written = self.writer.submit(change);
        self.writes.push(Box::pin(async move {
            Written::MarkReset { index, answer, result: written.await.unwrap_or(Err(WriteError::Ended)) }
        }));
        if let Err(refusal) = self.ask(index, Input::ResetMark { mark }) {
            tracing::error!(service = name, %refusal, "the mark on disk was reset, the running one was not");
        }
        if let Some(ended) = self.leases.reset_mark(name, mark) {
            self.tell(
                EventKind::Lease,
                Some(name),
                format!("the lease of {} ended with the mark's reset", ended.holder),
            );
        }
        self.tell(EventKind::Command, Some(name), format!("mark set to {mark} by {by}: {reason}"));
    }

    fn acquire(
        &mut self,
        name: &str,
        holder: &str,
        ttl: std::time::Duration,
        by: &Peer,
        answer: Answer<types::LeaseGranted>,
    ) {
        let now = boot_now();
        let reserved = self.index(name).and_then(|index| {
            let service = self.service(index).ok_or(Refusal::Stopping)?;
            let timing = Timing::of(&service.settings, &self.config.agent);
            let ttl = ttl.min(timing.ttl);
            if ttl <= timing.shortest_ttl {
                let minimum = timing.shortest_ttl;
                return Err(Refusal::TtlTooShort { service: name.to_owned(), ttl, minimum });
            }
            match self.leases.acquire(name, holder, ttl, now, wall_ms()) {
                Ok(Acquire::Reserved(reservation)) => Ok((index, reservation)),
                Ok(Acquire::Held { holder, expires_in }) => {
                    Err(Refusal::Held { service: name.to_owned(), holder, expires_in })
                }
                Err(exhausted) => Err(Refusal::State { detail: exhausted.to_string() }),
            }
        });
        let (index, reservation) = match reserved {
            Ok(reserved) => reserved,
            Err(refusal) => return drop(answer.send(Err(refusal))),
        };
        tracing::info!(service = name, holder, token = reservation.token, %by, "lease reserved");
        let record = reservation.record(&self.boot_id, wall_ms());
        let written = self.writer.submit(Change::Grant { service: name.to_owned(), record });
        self.writes.push(Box::pin(async move {
            let result = written.await.unwrap_or(Err(WriteError::Ended));
            Written::Grant { index, reservation, answer, result }
        }));
    }

    /// The token of an acquisition is durable, or cannot be.
    pub(super) fn granted(
        &mut self,
        index: Index,
        reservation: &Reservation,
        answer: Answer<types::LeaseGranted>,
        result: Result<(), WriteError>,
    ) {
        let service = reservation.service.clone();
        let token = reservation.token;
        if let Err(error) = result {
            self.leases.refused(reservation);
            return drop(answer.send(Err(Refusal::State { detail: error.to_string() })));
        }
        let Ok(proof) = self.leases.granted(reservation, boot_now()) else {
            return drop(answer.send(Err(Refusal::Lost { service, token })));
        };
        self.check_clock();
        self.tell(EventKind::Lease, Some(&service), format!("acquired by {}", reservation.holder));
        let ttl_ms = whole_ms(reservation.ttl);
        _ = answer.send(Ok(types::LeaseGranted { service, token, ttl_ms }));
        self.input(index, Input::Proven(proof));
    }

    fn renew(&mut self, name: &str, token: u64) -> Result<types::LeaseGranted, Refusal> {
        let index = self.index(name)?;
        let lost = || Refusal::Lost { service: name.to_owned(), token };
        let proof = self.leases.renew(name, token, boot_now()).map_err(|_| lost())?;
        self.check_clock();
        self.input(index, Input::Proven(proof));
        Ok(types::LeaseGranted { service: name.to_owned(), token, ttl_ms: whole_ms(proof.ttl) })
    }

    fn release(&mut self, name: &str, token: u64, by: &Peer) -> Result<types::LeaseReleased, Refusal> {
        let index = self.index(name)?;
        let lost = || Refusal::Lost { service: name.to_owned(), token };
        if self.leases.holding(name, boot_now()).is_none_or(|(_, holding)| holding != token) {
            return Err(lost());
        }
        // The gate first: whoever acquires next must not find it open.
        self.input(index, Input::Lost { token, loss: Loss::Released });
        let ended = self.leases.release(name, token).map_err(|_| lost())?;
        self.write_quietly(Change::Release { service: name.to_owned(), token });
        self.tell(EventKind::Lease, Some(name), format!("released by {} ({by})", ended.holder));
        Ok(types::LeaseReleased { service: name.to_owned(), token })
    }
}
