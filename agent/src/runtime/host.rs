//! Everything the loop owns. Inputs go to a service's machine, and what it asks for is carried out, in its order.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::broadcast;

use super::{
    RuntimeError, Writes,
    board::{Board, SharedDataPath, lock},
    service::{self, Service},
};
use crate::{
    api::{
        command::{Answer, Refusal},
        types::{self, EventKind},
    },
    clock::{boot_now, slew_ppm, wall_ms},
    config::{
        Loaded,
        model::{Attach, Config},
        rules::RuleTable,
    },
    core::{
        machine::{self, Action, Event, Input, Loss, Outcome},
        time::BootInstant,
    },
    coverage,
    datapath::{Change as InterfaceChange, gates::NotOurs},
    lease::{
        local::{LocalLeases, Reservation},
        store::HoldRecord,
        writer::{Change, WriteError, Writer},
    },
};

/// Index of a service in [`Host::services`]; it stays the same while the agent runs.
pub(super) type Index = usize;

/// What the loop did not wait for, and has ended: durable writes above all.
pub(super) enum Written {
    /// The token of an acquisition.
    Grant {
        index: Index,
        reservation: Reservation,
        answer: Answer<types::LeaseGranted>,
        result: Result<(), WriteError>,
    },
    /// The high-water mark that an opening waits for.
    Mark { index: Index, epoch: machine::Epoch, result: Result<(), WriteError> },
    /// The high-water mark that an operator has set.
    MarkReset { index: Index, answer: Answer<types::ServiceStatus>, result: Result<(), WriteError> },
    /// A fence by hand, or its end.
    Hold { index: Index, write: u64, result: Result<(), WriteError> },
    /// No write at all: the configuration file was read. Without an `answer` a signal had asked for that.
    Loaded { loaded: Result<Loaded, RuntimeError>, answer: Option<Answer<types::Reloaded>> },
    /// Nobody waits for it.
    Quiet,
}

pub(super) struct Host {
    pub(super) config: Config,
    pub(super) path: PathBuf,
    pub(super) boot_id: String,
    pub(super) datapath: SharedDataPath,
    /// `None`: the service has left the configuration.
    pub(super) services: Vec<Option<Service>>,
    pub(super) by_name: BTreeMap<String, Index>,
    /// Services held by hand that are not configured now: a hold is of the name, and back in force with it.
    pub(super) holds: BTreeMap<String, HoldRecord>,
    pub(super) leases: LocalLeases,
    pub(super) writer: Writer,
    pub(super) writes: Writes,
    /// The configuration file is being read.
    pub(super) reloading: bool,
    pub(super) board: Arc<Board>,
    pub(super) events: broadcast::Sender<Arc<types::Event>>,
    pub(super) sequence: u64,
    /// The rules that the kernel was given last.
    pub(super) rules: RuleTable,
    /// When which machine wants to be looked at.
    pub(super) calendar: BTreeSet<(BootInstant, Index)>,
    /// Services that changed since they were last shown.
    pub(super) changed: BTreeSet<Index>,
    /// Services whose fence is to be verified, in the order in which that was asked for.
    pub(super) to_verify: VecDeque<Index>,
    /// What was attached when it was last looked at.
    pub(super) attached: Option<crate::datapath::coverage::Coverage>,
    /// Why the margins do not cover the egress queues, or may not.
    pub(super) queues: Vec<String>,
    /// Why the boot clock cannot be trusted, if so.
    pub(super) clock_unfit: Option<String>,
}

impl Host {
    pub(super) fn interfaces_fd(&self) -> std::io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(lock(&self.datapath).interfaces_fd(), 0)?)
    }

    /// When [`Host::due`] is next to be called.
    pub(super) fn next_due(&self) -> Option<BootInstant> {
        let machines = self.calendar.first().map(|(at, _)| *at);
        [machines, self.leases.next_expiry()].into_iter().flatten().min()
    }

    /// Looks at every machine and lease whose time has come.
    pub(super) fn due(&mut self) {
        let now = boot_now();
        while let Some(&(at, index)) = self.calendar.first()
            && at <= now
        {
            self.calendar.pop_first();
            if let Some(service) = self.service_mut(index) {
                service.wake = None;
            }
            self.input(index, Input::Tick);
        }
        for ended in self.leases.expire(now) {
            self.tell(EventKind::Lease, Some(&ended.service), format!("the lease of {} expired", ended.holder));
            if let Some(&index) = self.by_name.get(&ended.service) {
                self.input(index, Input::Lost { token: ended.token, loss: Loss::Expired });
            }
        }
    }

    pub(super) fn service(&self, index: Index) -> Option<&Service> {
        self.services.get(index)?.as_ref()
    }

    pub(super) fn service_mut(&mut self, index: Index) -> Option<&mut Service> {
        self.services.get_mut(index)?.as_mut()
    }

    /// Gives `input` to the machine of a service and carries out what it asks for.
    pub(super) fn input(&mut self, index: Index, input: Input) {
        let Some(service) = self.service_mut(index) else { return };
        let actions = service.machine.step(boot_now(), input);
        self.carry_out(index, actions);
    }

    pub(super) fn input_all(&mut self, input: &Input) {
        for index in 0..self.services.len() {
            self.input(index, input.clone());
        }
    }

    /// Carries out actions in their order. What an action leads to at once is carried out after the rest.
    pub(super) fn carry_out(&mut self, index: Index, actions: Vec<Action>) {
        let mut actions: VecDeque<Action> = actions.into();
        while let Some(action) = actions.pop_front() {
            if let Some(input) = self.act(index, action)
                && let Some(service) = self.service_mut(index)
            {
                actions.extend(service.machine.step(boot_now(), input));
            }
        }
        self.changed.insert(index);
        let Some(service) = self.services.get_mut(index).and_then(Option::as_mut) else { return };
        let wake = service.machine.wake_at();
        if service.wake != wake {
            if let Some(old) = service.wake {
                self.calendar.remove(&(old, index));
            }
            self.calendar.extend(wake.map(|at| (at, index)));
            service.wake = wake;
        }
    }

    /// Carries out one action; what comes back is its outcome, if it has one already.
    fn act(&mut self, index: Index, action: Action) -> Option<Input> {
        let service = self.services.get_mut(index)?.as_mut()?;
        match action {
            Action::Close { reason } => {
                let fence = service.gate.close();
                service.closed_at = boot_now();
                tracing::warn!(service = service.settings.name, fence, %reason, "gate closed");
                None
            }
            Action::Bar { below } => {
                service.gate.bar(below);
                None
            }
            Action::Open { epoch, generation, token, deadline } => {
                let opened = service.gate.open(generation, token, deadline);
                refused(epoch, opened, &service.settings.name)
            }
            Action::Renew { epoch, deadline, basis: _ } => {
                let renewed = service.gate.renew(deadline);
                refused(epoch, renewed, &service.settings.name)
            }
            Action::PersistMark { epoch, token } => {
                let written = self.writer.submit(Change::Mark { service: service.settings.name.clone(), token });
                self.writes.push(Box::pin(async move {
                    Written::Mark { index, epoch, result: written.await.unwrap_or(Err(WriteError::Ended)) }
                }));
                None
            }
            Action::PersistHold { held } => {
                if !held {
                    service.hold = None;
                }
                self.write_hold(index);
                None
            }
            Action::SelfTest { epoch, expect } => {
                let result = self.self_test(index, expect);
                Some(Input::Done { epoch, outcome: Outcome::SelfTested { expect, result } })
            }
            Action::Verify { epoch } => {
                service.verify.push_back(epoch);
                self.to_verify.push_back(index);
                None
            }
            Action::Record(event) => {
                self.record(index, &event);
                None
            }
        }
    }

    /// What the loop did not wait for has ended.
    pub(super) fn written(&mut self, written: Written) {
        match written {
            Written::Quiet => {}
            Written::Loaded { loaded, answer } => self.loaded(loaded, answer),
            Written::Grant { index, reservation, answer, result } => self.granted(index, &reservation, answer, result),
            Written::Mark { index, epoch, result } => {
                let result = result.map_err(|error| error.to_string());
                if let Some(service) = self.service_mut(index) {
                    service.mark_not_durable = result.as_ref().err().cloned();
                }
                self.input(index, Input::Done { epoch, outcome: Outcome::MarkPersisted(result) });
            }
            Written::MarkReset { index, answer, result } => {
                let result = result.map_err(|error| Refusal::State { detail: error.to_string() });
                let status = result.and_then(|()| self.status(index).ok_or(Refusal::Stopping));
                _ = answer.send(status);
            }
            Written::Hold { index, write, result } => {
                if let Some(service) = self.service_mut(index).filter(|service| service.hold_write == write) {
                    service.hold_under_way = false;
                    service.hold_not_durable = result.err().map(|error| error.to_string());
                    self.changed.insert(index);
                }
            }
        }
    }

    /// Makes it durable whether a service is fenced by hand.
    fn write_hold(&mut self, index: Index) {
        let Some(service) = self.services.get_mut(index).and_then(Option::as_mut) else { return };
        service.hold_write += 1;
        service.hold_under_way = true;
        let write = service.hold_write;
        let change = Change::Hold { service: service.settings.name.clone(), hold: service.hold.clone() };
        let written = self.writer.submit(change);
        self.writes.push(Box::pin(async move {
            Written::Hold { index, write, result: written.await.unwrap_or(Err(WriteError::Ended)) }
        }));
    }

    /// Writes again every hold, or removal of one, that the disk has not got.
    pub(super) fn write_holds_again(&mut self) {
        for index in 0..self.services.len() {
            let behind = |service: &Service| service.hold_not_durable.is_some() && !service.hold_under_way;
            if self.service(index).is_some_and(behind) {
                self.write_hold(index);
            }
        }
    }

    /// Hands in a write whose outcome only the log hears of.
    pub(super) fn write_quietly(&mut self, change: Change) {
        let written = self.writer.submit(change);
        self.writes.push(Box::pin(async move {
            // The thread that writes has logged what went wrong.
            _ = written.await;
            Written::Quiet
        }));
    }

    /// The status of a service as of now, whether or not it was shown yet.
    pub(super) fn status(&self, index: Index) -> Option<types::ServiceStatus> {
        let service = self.service(index)?;
        let holder = self.leases.holding(&service.settings.name, boot_now()).map(|(holder, _)| holder);
        Some(service.status(holder))
    }

    /// Reads the rate at which a time daemon slews the boot clock, and fences everything while it is beyond the bound.
    pub(super) fn check_clock(&mut self) {
        let bound = u64::from(self.config.agent.drift_ppm);
        let unfit = match slew_ppm() {
            Ok(slew) if slew <= bound => None,
            Ok(slew) => Some(format!(
                "a time daemon slews it by {slew} ppm, the drift bound is {bound} ppm; limit the daemon's slew rate \
                 (chrony: maxslewrate), or raise `drift` in [agent]"
            )),
            Err(error) => Some(format!("its slew rate cannot be read: {error}; allow the adjtimex system call")),
        };
        if unfit == self.clock_unfit {
            return;
        }
        let was_fit = self.clock_unfit.is_none();
        self.clock_unfit.clone_from(&unfit);
        match unfit {
            // It says the same in other numbers: the machines know already.
            Some(why) if !was_fit => tracing::warn!(why, "the boot clock still cannot be trusted"),
            Some(why) => self.input_all(&Input::ClockUnfit { why }),
            None => self.input_all(&Input::ClockFit),
        }
    }

    /// Interfaces have come, gone or changed their names.
    pub(super) fn interfaces_changed(&mut self) {
        let changes = lock(&self.datapath).interfaces_ready();
        match changes {
            Ok(changes) => {
                for change in &changes {
                    let detail = match change {
                        InterfaceChange::New { name, .. } => format!("interface {name} came and is covered"),
                        InterfaceChange::Gone { name, .. } => format!("interface {name} is gone"),
                        InterfaceChange::Renamed { from, to, .. } => format!("interface {from} is now called {to}"),
                    };
                    self.tell(EventKind::Attachment, None, detail);
                }
                if !changes.is_empty() {
                    self.look_again();
                }
            }
            Err(error) => tracing::error!(%error, "interfaces could not be followed; tried again within seconds"),
        }
    }

    /// Looks at every attachment, mends what can be mended, and says what changed.
    pub(super) fn look_again(&mut self) {
        let coverage = lock(&self.datapath).verify();
        match coverage {
            Ok(coverage) => {
                for mended in &coverage.mended_now {
                    tracing::warn!(mended, "a gap was mended");
                    self.tell(EventKind::Attachment, None, mended.clone());
                }
                let before = self.attached.as_ref().map_or(&[][..], |coverage| &coverage.degraded);
                let news: Vec<String> = coverage.degraded.iter().filter(|why| !before.contains(why)).cloned().collect();
                let over = !before.is_empty() && coverage.degraded.is_empty();
                for why in news {
                    tracing::warn!(why, "degraded");
                    self.tell(EventKind::Degraded, None, why);
                }
                if over {
                    self.tell(EventKind::Degraded, None, "the host is covered as configured again".to_owned());
                }
                self.board.show_coverage(coverage.clone());
                self.attached = Some(coverage);
            }
            Err(error) => {
                tracing::error!(%error, "attachments could not be verified");
                self.attached = None;
            }
        }
    }

    /// Compares every gate with what was last written to it. A gate that somebody else wrote is closed.
    pub(super) fn look_at_gates(&mut self) {
        for index in 0..self.services.len() {
            if let Some(found) = self.service(index).and_then(|service| service.gate.written_by_others()) {
                self.input(index, Input::GateWritten { found: BootInstant::from_nanos(found) });
            }
        }
    }

    /// Looks, on a thread of its own, for listeners at a service's address that no selector matches.
    pub(super) fn look_for_listeners(&self) {
        let (board, rules) = (Arc::clone(&self.board), self.rules.clone());
        let services: Vec<_> = self.services.iter().flatten().map(|service| service.settings.clone()).collect();
        tokio::task::spawn_blocking(move || {
            let listeners = match coverage::listeners() {
                Ok(listeners) => listeners,
                Err(error) => return tracing::warn!(%error, "listeners could not be listed"),
            };
            let mut uncovered = coverage::uncovered(&services, &rules, &listeners);
            if !uncovered.is_empty() {
                coverage::owners::find(Path::new("/proc"), &mut uncovered);
            }
            let warning = |one: &coverage::Uncovered| types::CoverageWarning {
                service: one.services.first().cloned(),
                kind: "uncovered_listener".to_owned(),
                detail: one.to_string(),
            };
            board.show_warnings(uncovered.iter().map(warning).collect());
        });
    }

    /// After each event: attaches or detaches under `attach = "on-fence"`, and shows what changed.
    pub(super) fn settle(&mut self) {
        if self.config.agent.attach == Attach::OnFence && !self.changed.is_empty() {
            self.attach_on_fence();
        }
        for index in std::mem::take(&mut self.changed) {
            let Some(status) = self.status(index) else { continue };
            if let Some(service) = self.service(index) {
                self.board.show(service.slot, status);
            }
        }
    }

    fn attach_on_fence(&mut self) {
        let serving = |service: &Service| service.machine.view().state == machine::StateName::Serving;
        let all_serving = self.services.iter().flatten().all(serving);
        let armed = self.attached.as_ref().is_some_and(|coverage| coverage.armed);
        let result = match (all_serving, armed) {
            (false, false) => lock(&self.datapath).attach_now().map(Some),
            (true, true) => lock(&self.datapath).detach_now().map(|()| None),
            (true, false) | (false, true) => return,
        };
        match result {
            Ok(Some(coverage)) => {
                self.board.show_coverage(coverage.clone());
                self.attached = Some(coverage);
            }
            Ok(None) => self.look_again(),
            Err(error) => tracing::error!(%error, "the classifiers could not be attached or detached"),
        }
    }

    /// Tells who listens on the socket.
    pub(super) fn tell(&mut self, kind: EventKind, service: Option<&str>, detail: String) {
        let view = service.and_then(|name| self.by_name.get(name)).and_then(|&index| self.service(index));
        let view = view.map(|service| service.machine.view());
        self.sequence += 1;
        let event = types::Event {
            sequence: self.sequence,
            at_ns: boot_now().as_nanos(),
            at_wall_ms: wall_ms(),
            kind,
            service: service.map(str::to_owned),
            state: view.as_ref().map(|view| service::state(view.state)),
            token: view.and_then(|view| view.token),
            detail,
        };
        // Nobody listens: nobody misses it.
        _ = self.events.send(Arc::new(event));
    }

    /// Logs an event of the core and tells who listens.
    fn record(&mut self, index: Index, event: &Event) {
        let Some(name) = self.service(index).map(|service| service.settings.name.clone()) else { return };
        let service = name.as_str();
        let (kind, detail) = match event {
            Event::Adopted { token, deadline } => {
                tracing::info!(service, token, %deadline, "adopted an open gate");
                (EventKind::State, format!("adopted the open gate of token {token} until {deadline}"))
            }
            Event::Moved { from, to, token, reason } => {
                let reason = reason.as_ref().map(ToString::to_string).unwrap_or_default();
                tracing::info!(service, %from, %to, token, reason, "state");
                let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                (EventKind::State, format!("{from} -> {to}{why}"))
            }
            Event::Verified(confirmation) => {
                let (word, evidence) = match confirmation {
                    machine::Confirmation::Confirmed(evidence) => ("confirmed", evidence),
                    machine::Confirmation::Unconfirmed(evidence) => ("unconfirmed", evidence),
                    machine::Confirmation::Failed(evidence) => ("failed", evidence),
                };
                tracing::info!(service, confirmation = word, evidence = evidence.join("; "), "fence verified");
                (EventKind::State, format!("fence {word}: {}", evidence.join("; ")))
            }
            Event::Refused(refusal) => {
                tracing::debug!(service, %refusal, "refused");
                return;
            }
            Event::Hold { held: true, reason } => {
                let reason = reason.clone().unwrap_or_default();
                tracing::warn!(service, reason, "held by command");
                (EventKind::Command, format!("held by command: {reason}"))
            }
            Event::Hold { held: false, .. } => {
                tracing::info!(service, "hold removed");
                (EventKind::Command, "the hold was removed".to_owned())
            }
            Event::MarkReset { from, to } => (EventKind::Command, format!("the mark was reset from {from} to {to}")),
            Event::StoreSilent { hold_over } => {
                tracing::warn!(service, hold_over, "the lease store does not answer");
                (EventKind::Degraded, "the lease store does not answer".to_owned())
            }
            Event::HeldOver { until } => {
                tracing::error!(service, %until, "kept open on the operator's word: the guarantee is forfeited");
                (EventKind::Degraded, format!("kept open on the operator's word until {until}"))
            }
            Event::HeldButCut { token, why } => {
                tracing::error!(service, token, why, "the lease is held, but the service is cut");
                (EventKind::Degraded, format!("the lease is held, but the service is cut: {why}"))
            }
            Event::GateWritten { found } => {
                let detail = format!(
                    "somebody else wrote {} to the gate: it was closed; find out who writes to the pinned maps",
                    found.as_nanos()
                );
                tracing::error!(service, detail, "the gate was not as this agent left it");
                if let Some(service) = self.service_mut(index) {
                    service.meddled = Some(detail.clone());
                }
                (EventKind::Degraded, detail)
            }
            Event::ClockUnfit { why } => {
                tracing::error!(service, why, "the boot clock cannot be trusted");
                (EventKind::Degraded, format!("the boot clock cannot be trusted: {why}"))
            }
            Event::ClockFit => (EventKind::Degraded, "the boot clock can be trusted again".to_owned()),
            Event::Shutdown => return,
        };
        self.tell(kind, Some(service), detail);
    }
}

/// An exchange that failed, as the core hears of it.
fn refused(epoch: machine::Epoch, result: Result<(), NotOurs>, service: &str) -> Option<Input> {
    let error = result.err()?;
    tracing::error!(service, %error, "the gate was not opened or renewed");
    Some(Input::RenewRefused { epoch })
}
