//! What readers of the socket see: written by the loop after each change, read without waiting for it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use portcullis_common::layout;

use crate::{
    api::{command::View, types},
    clock::{boot_now, whole_ms},
    core::time::BootInstant,
    datapath::{DataPath, coverage, gates::Slot},
};

/// The data path, which the loop changes and readers only read. Locked for single short calls, never across an await.
pub(super) type SharedDataPath = Arc<Mutex<DataPath>>;

/// Locks. A panic while it was locked would have ended the process, since there is one thread.
pub(super) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The public face of the agent.
pub(super) struct Board {
    datapath: SharedDataPath,
    facts: Facts,
    shown: Mutex<Shown>,
}

/// What does not change while the agent runs.
pub(super) struct Facts {
    pub(super) identity: String,
    pub(super) boot_id: String,
    pub(super) started_at: BootInstant,
}

#[derive(Default)]
struct Shown {
    services: BTreeMap<String, (Slot, types::ServiceStatus)>,
    coverage: Option<coverage::Coverage>,
    /// What weakens the whole host beside what is attached.
    degraded: Vec<String>,
    /// Why the margins do not cover the egress queues, or may not.
    queues: Vec<String>,
    warnings: Vec<types::CoverageWarning>,
}

impl Board {
    pub(super) fn new(datapath: SharedDataPath, facts: Facts) -> Self {
        Self { datapath, facts, shown: Mutex::default() }
    }

    pub(super) fn show(&self, slot: Slot, status: types::ServiceStatus) {
        lock(&self.shown).services.insert(status.name.clone(), (slot, status));
    }

    pub(super) fn hide(&self, service: &str) {
        lock(&self.shown).services.remove(service);
    }

    pub(super) fn show_coverage(&self, coverage: coverage::Coverage) {
        lock(&self.shown).coverage = Some(coverage);
    }

    pub(super) fn show_warnings(&self, warnings: Vec<types::CoverageWarning>) {
        lock(&self.shown).warnings = warnings;
    }

    pub(super) fn show_queues(&self, queues: Vec<String>) {
        lock(&self.shown).queues = queues;
    }

    pub(super) fn show_degraded(&self, degraded: Vec<String>) {
        lock(&self.shown).degraded = degraded;
    }

    /// With what is only worth reading when somebody looks.
    fn complete(&self, slot: Slot, mut status: types::ServiceStatus) -> types::ServiceStatus {
        let left = |deadline| BootInstant::from_nanos(deadline).saturating_since(boot_now());
        status.time_left_ms = status.deadline_ns.map(|deadline| whole_ms(left(deadline)));
        match lock(&self.datapath).counters(slot) {
            Ok(counters) => status.counters = sum(&counters),
            Err(error) => status.degraded.push(format!("the counters cannot be read: {error}")),
        }
        status
    }
}

impl View for Board {
    fn services(&self) -> Vec<types::ServiceStatus> {
        let shown: Vec<_> = lock(&self.shown).services.values().cloned().collect();
        shown.into_iter().map(|(slot, status)| self.complete(slot, status)).collect()
    }

    fn service(&self, name: &str) -> Option<types::ServiceStatus> {
        let shown = lock(&self.shown).services.get(name).cloned();
        shown.map(|(slot, status)| self.complete(slot, status))
    }

    fn health(&self) -> types::Health {
        let shown = lock(&self.shown);
        let mut degraded = shown.degraded.clone();
        degraded.extend(shown.queues.iter().cloned());
        degraded.extend(shown.coverage.iter().flat_map(|coverage| coverage.degraded.iter().cloned()));
        let weak = shown.services.values().filter(|(_, status)| !status.degraded.is_empty());
        degraded
            .extend(weak.flat_map(|(_, status)| status.degraded.iter().map(|why| format!("{}: {why}", status.name))));
        types::Health {
            ok: degraded.is_empty(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            identity: self.facts.identity.clone(),
            boot_id: self.facts.boot_id.clone(),
            pid: std::process::id(),
            uptime_ms: whole_ms(boot_now().saturating_since(self.facts.started_at)),
            services: shown.services.len() as u64,
            degraded,
        }
    }

    fn coverage(&self) -> types::Coverage {
        let events = lock(&self.datapath).events();
        let shown = lock(&self.shown);
        let coverage = shown.coverage.as_ref();
        let host = |detail: &String| types::CoverageWarning {
            service: None,
            kind: "degraded".to_owned(),
            detail: detail.clone(),
        };
        let mut warnings = shown.warnings.clone();
        warnings.extend(coverage.iter().flat_map(|coverage| coverage.degraded.iter().map(host)));
        let kernel_events = match events {
            Ok(events) => kernel_events(&events),
            Err(error) => {
                warnings.push(host(&format!("the kernel's events cannot be read: {error}")));
                types::KernelEvents::default()
            }
        };
        types::Coverage {
            interfaces: coverage.iter().flat_map(|coverage| coverage.interfaces.iter().map(interface)).collect(),
            warnings,
            gaps_mended: coverage.map_or(0, |coverage| coverage.mended),
            kernel_events,
        }
    }
}

fn kernel_events(counted: &[(layout::Event, u64)]) -> types::KernelEvents {
    let mut events = types::KernelEvents::default();
    for (event, count) in counted {
        let field = match event {
            layout::Event::StampFailed => &mut events.stamp_failed,
            layout::Event::UnreadableDropped => &mut events.unreadable_dropped,
            layout::Event::NoGate => &mut events.no_gate,
            layout::Event::ExemptPassed => &mut events.exempt_passed,
        };
        *field += count;
    }
    events
}

fn interface(interface: &coverage::InterfaceCoverage) -> types::InterfaceCoverage {
    use coverage::{HookState, XdpState};
    let worst = [&interface.ingress, &interface.egress]
        .into_iter()
        .find(|state| !matches!(state, HookState::First | HookState::Clsact))
        .unwrap_or(&interface.ingress);
    let (tc, note) = match worst {
        HookState::First => ("tcx", None),
        HookState::Clsact => ("clsact", None),
        HookState::Missing { reason } => ("none", Some(reason.clone())),
        HookState::Excluded => ("none", Some("excluded by the configuration".to_owned())),
        HookState::NotArmed => ("none", Some("attached only while fenced (`attach = \"on-fence\"`)".to_owned())),
    };
    let (xdp, xdp_note) = match &interface.xdp {
        XdpState::Native => ("native", None),
        XdpState::Generic => ("generic", None),
        XdpState::Unused => ("none", None),
        XdpState::Occupied => ("none", Some("XDP is taken by another program, which stays".to_owned())),
        XdpState::Failed { reason } => ("none", Some(format!("no XDP: {reason}"))),
    };
    types::InterfaceCoverage {
        name: interface.name.clone(),
        index: interface.index,
        tc: tc.to_owned(),
        xdp: xdp.to_owned(),
        note: note.or(xdp_note),
    }
}

fn sum(hooks: &[(layout::Hook, layout::Counters)]) -> types::Counters {
    hooks.iter().fold(types::Counters::default(), |sum, (_, hook)| types::Counters {
        passed_packets: sum.passed_packets + hook.passed_packets,
        passed_bytes: sum.passed_bytes + hook.passed_bytes,
        dropped_packets: sum.dropped_packets + hook.dropped_packets,
        dropped_bytes: sum.dropped_bytes + hook.dropped_bytes,
        stale_packets: sum.stale_packets + hook.stale_packets,
        last_pass_ns: sum.last_pass_ns.max(hook.last_pass_ns),
        first_drop_ns: match (sum.first_drop_ns, hook.first_drop_ns) {
            (0, first) | (first, 0) => first,
            (one, other) => one.min(other),
        },
    })
}
