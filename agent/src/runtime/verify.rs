//! Self-tests, and the evidence of a fence: what the rejected side's packets meet, and what is attached.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use portcullis_common::layout::roles;

use super::{
    board::lock,
    host::{Host, Index},
    service::Service,
};
use crate::{
    clock::boot_now,
    config::{
        model::{Protocol, Scope},
        rules::protocol_number,
    },
    core::machine::{Confirmation, Evidence, Expect, Input, Outcome},
    datapath::self_test::{End, Judgement, Probe},
};

/// A packet is judged by the deadline it read, and counted a moment later.
const JUDGED: Duration = Duration::from_millis(1);

impl Host {
    /// Sends synthetic packets of the service through the attached programs. The error says what was seen instead.
    pub(super) fn self_test(&self, index: Index, expect: Expect) -> Result<(), String> {
        let Some(service) = self.service(index) else {
            return Err("the service has left the configuration".to_owned());
        };
        let datapath = lock(&self.datapath);
        for probe in probes(service) {
            let expected = match expect {
                Expect::Drop => Judgement::Drop,
                // Another service's closed gate stops the packet, and rightly so.
                Expect::Pass if self.needs_another_gate(service, &probe) => continue,
                Expect::Pass => Judgement::Pass,
            };
            datapath.self_test(&probe, expected).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Does a packet of `probe` also need a gate that is closed, and not this service's?
    fn needs_another_gate(&self, service: &Service, probe: &Probe) -> bool {
        let protocol = protocol_number(probe.protocol);
        let needed = |role| self.rules.gates(role, probe.address, protocol, probe.port);
        let ends = match probe.end {
            End::Local => [roles::IN_DESTINATION, roles::OUT_SOURCE],
            End::Remote => [roles::IN_SOURCE, roles::OUT_DESTINATION],
        };
        let now = boot_now();
        let closed = |slot: u32| {
            let other = self.services.iter().flatten().find(|other| other.slot.index() == slot);
            other.is_none_or(|other| !other.gate.view().is_open(now))
        };
        ends.into_iter().flat_map(needed).any(|slot| slot != service.slot.index() && closed(slot))
    }

    /// The next service whose fence is to be verified.
    pub(super) fn next_verification(&mut self) -> Option<Index> {
        self.to_verify.pop_front()
    }

    /// Looks at the rejected side of a fence.
    pub(super) fn verify_service(&mut self, index: Index) {
        let Some(epoch) = self.service_mut(index).and_then(|service| service.verify.pop_front()) else { return };
        let confirmation = self.examine(index);
        self.input(index, Input::Done { epoch, outcome: Outcome::Verified(confirmation) });
    }

    fn examine(&mut self, index: Index) -> Confirmation {
        if self.attached.is_none() {
            self.look_again();
        }
        let dropped = self.self_test(index, Expect::Drop);
        let (mut evidence, mut missing): (Evidence, Evidence) = Default::default();
        let Some(service) = self.service(index) else {
            return Confirmation::Unconfirmed(vec!["the service has left the configuration".to_owned()]);
        };
        let view = service.gate.view();
        if !view.is_fenced() {
            return Confirmation::Failed(vec![format!("the gate holds the deadline {}", view.deadline)]);
        }
        evidence.push(format!("the gate is closed by fence number {}", view.deadline));
        match dropped {
            Ok(()) => evidence.push("synthetic packets were dropped in both directions".to_owned()),
            Err(error) => return Confirmation::Failed(vec![error]),
        }
        match &self.attached {
            Some(coverage) if coverage.is_whole() => {
                evidence.push(format!("the programs are first on {} interfaces", coverage.interfaces.len()));
            }
            Some(coverage) => missing.extend(coverage.degraded.iter().cloned()),
            None => missing.push("what is attached could not be read".to_owned()),
        }
        match lock(&self.datapath).counters(service.slot) {
            Ok(counters) => {
                let last_pass = counters.iter().map(|(_, hook)| hook.last_pass_ns).max().unwrap_or(0);
                let dropped: u64 = counters.iter().map(|(_, hook)| hook.dropped_packets).sum();
                if last_pass > service.closed_at.saturating_add(JUDGED).as_nanos() {
                    return Confirmation::Failed(vec![format!(
                        "a packet passed at {last_pass}, after the gate had closed at {}",
                        service.closed_at.as_nanos()
                    )]);
                }
                evidence.push(format!("no packet has passed since the gate closed; {dropped} were dropped so far"));
            }
            Err(error) => missing.push(error.to_string()),
        }
        if missing.is_empty() {
            Confirmation::Confirmed(evidence)
        } else {
            missing.extend(evidence);
            Confirmation::Unconfirmed(missing)
        }
    }
}

/// What stands for a service's traffic.
fn probes(service: &Service) -> Vec<Probe> {
    /// Of TEST-NET-2, which no host has.
    const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1));
    let mut probes = Probe::of(&service.settings);
    match service.settings.scope {
        Scope::Service => {}
        Scope::Node => {
            probes.push(Probe { end: End::Local, address: STRANGER, protocol: Protocol::Tcp, port: 9 });
        }
    }
    probes
}
