//! One service: its machine, its gate, and what is told of it.

use std::collections::VecDeque;

use crate::{
    api::types,
    config::model::{Agent, Lease, Service as Settings},
    core::{
        deadline::Timing,
        machine::{self, Alarm, Confirmation, Found, Machine, Reason, StateName, View},
        time::BootInstant,
    },
    datapath::gates::{Gate, Slot},
    lease::store::HoldRecord,
};

/// A service that is configured.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) settings: Settings,
    pub(super) slot: Slot,
    pub(super) gate: Gate,
    pub(super) machine: Machine,
    /// Who fenced it by hand, while that is in force.
    pub(super) hold: Option<HoldRecord>,
    /// When the gate was last closed by this agent.
    pub(super) closed_at: BootInstant,
    /// When the loop has to look at the machine; what stands in the host's calendar.
    pub(super) wake: Option<BootInstant>,
    /// Verifications asked for and not carried out yet.
    pub(super) verify: VecDeque<machine::Epoch>,
    /// That somebody else wrote the gate; shown until the agent ends or `portcullis unfence`.
    pub(super) meddled: Option<String>,
    /// Why its high-water mark on disk is behind, if so.
    pub(super) mark_not_durable: Option<String>,
    /// Why the disk does not say whether it is fenced by hand, if so; written again until it does.
    pub(super) hold_not_durable: Option<String>,
    /// Number of the last write of the hold: its outcome alone counts.
    pub(super) hold_write: u64,
    /// That write has not ended.
    pub(super) hold_under_way: bool,
}

/// What the configuration says to the machine of `service`.
pub(super) fn machine_settings(service: &Settings, agent: &Agent) -> machine::Settings {
    let Lease::Local { ttl_cap } = service.lease;
    machine::Settings {
        timing: Timing { ttl_cap, margin: service.margin, drift_ppm: agent.drift_ppm },
        when_store_lost: service.when_store_lost,
    }
}

/// What the machine of a starting agent finds.
pub(super) fn found(gate: &Gate, high_water: u64, hold: bool) -> Found {
    let view = gate.view();
    Found {
        deadline: BootInstant::from_nanos(view.deadline),
        generation: view.generation,
        token: view.token,
        high_water,
        hold,
    }
}

impl Service {
    /// What is told of it, but for the counters and the time left, which are read when somebody asks.
    pub(super) fn status(&self, holder: Option<&str>) -> types::ServiceStatus {
        let view = self.machine.view();
        let (confirmation, evidence) = match &view.confirmation {
            None => (None, Vec::new()),
            Some(Confirmation::Confirmed(evidence)) => (Some(types::Confirmation::Confirmed), evidence.clone()),
            Some(Confirmation::Unconfirmed(evidence)) => (Some(types::Confirmation::Unconfirmed), evidence.clone()),
            Some(Confirmation::Failed(evidence)) => (Some(types::Confirmation::Failed), evidence.clone()),
        };
        types::ServiceStatus {
            name: self.settings.name.clone(),
            state: state(view.state),
            token: view.token,
            holder: holder.map(str::to_owned),
            deadline_ns: match view.state {
                StateName::Serving => view.deadline.map(BootInstant::as_nanos),
                StateName::Fenced | StateName::Opening | StateName::Fencing => None,
            },
            time_left_ms: None,
            reason: reason(&view),
            confirmation,
            evidence,
            manual_hold: self.hold.as_ref().map(|hold| types::ManualHold {
                reason: hold.reason.clone(),
                uid: hold.uid,
                pid: hold.pid,
                since_wall_ms: hold.since_wall_ms,
            }),
            counters: types::Counters::default(),
            degraded: self.degraded(&view),
        }
    }

    fn degraded(&self, view: &View) -> Vec<String> {
        let alarm = view.alarm.as_ref().map(|alarm| match alarm {
            Alarm::HeldButCut { why } => format!("the lease is held, but the service is cut: {why}"),
            Alarm::HeldOver => "the gate is open on the operator's word alone (`when_store_lost = \"hold\"`): nothing \
                                excludes a second holder"
                .to_owned(),
            Alarm::ClockUnfit { why } => format!("nothing opens until the boot clock can be trusted: {why}"),
        });
        let behind = [&self.mark_not_durable, &self.hold_not_durable].into_iter().flatten();
        let behind = behind.map(|error| format!("its state is not durable: {error}"));
        alarm.into_iter().chain(self.meddled.clone()).chain(behind).collect()
    }
}

pub(super) fn state(state: StateName) -> types::State {
    match state {
        StateName::Fenced => types::State::Fenced,
        StateName::Opening => types::State::Opening,
        StateName::Serving => types::State::Serving,
        StateName::Fencing => types::State::Fencing,
    }
}

fn reason(view: &View) -> String {
    match view.state {
        StateName::Serving => view.basis.map_or_else(String::new, |basis| format!("the deadline is {basis}")),
        StateName::Opening => "the holding is proven; the gate is being tested".to_owned(),
        StateName::Fenced | StateName::Fencing if view.hold => match &view.reason {
            Some(reason @ Reason::Manual(_)) => format!("{reason}; it stays fenced until `portcullis unfence`"),
            Some(Reason::GateTaken) => {
                format!("{}; fenced by command, it stays fenced until `portcullis unfence`", Reason::GateTaken)
            }
            Some(_) | None => "fenced by command; it stays fenced until `portcullis unfence`".to_owned(),
        },
        StateName::Fenced | StateName::Fencing => view.reason.as_ref().map_or_else(String::new, ToString::to_string),
    }
}
