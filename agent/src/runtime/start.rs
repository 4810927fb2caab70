//! From nothing to a host whose services are armed and whose socket answers.
//!
//! The order is the order of what must not be missing: first the kernel's side, with every configured service closed or
//! as an earlier agent left it; then the durable state, without which nothing may open; the socket last.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex},
};

use tokio::sync::broadcast;

use super::{
    RuntimeError, Writes,
    board::{Board, Facts, SharedDataPath, lock},
    host::Host,
    queues::refuse_short_margins,
    service::{self, Service},
};
use crate::{
    api::{
        command::{Inbox, queues},
        routes::Api,
        server::Server,
    },
    clock::{boot_id, boot_now},
    config::{
        Config,
        model::{self, Agent, Attach},
        rules::RuleTable,
    },
    core::machine::{Input, Machine},
    datapath::{
        DataPath, OBJECT, Options,
        doctor::{CheckState, clock},
        gates::Slot,
    },
    lease::{
        local::LocalLeases,
        store::{HoldRecord, Store},
        writer::Writer,
    },
};

/// Events that a slow reader of the socket may be behind before it is dropped.
const EVENTS_KEPT: usize = 1024;

pub(super) struct Started {
    pub(super) host: Host,
    pub(super) inbox: Inbox,
}

pub(super) fn start(path: PathBuf) -> Result<Started, RuntimeError> {
    let loaded = Config::load(&path)?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let config = loaded.config;
    refuse_other_clock()?;
    refuse_short_margins(&config.services)?;
    let (mut datapath, adopted) = DataPath::start(&Options { agent: &config.agent, object: OBJECT })?;
    for gate in &adopted {
        let open = gate.view.is_open(boot_now());
        tracing::info!(service = gate.name, slot = gate.slot.index(), open, "gate adopted");
    }
    let slots = assign(&mut datapath, &config.services)?;
    let rules = compile(&path, &config.services, &slots, &config.agent)?;
    datapath.apply_rules(&rules)?;
    let coverage = datapath.verify()?;
    if !coverage.is_whole() {
        return Err(RuntimeError::NotCovered(coverage.degraded.join("; ")));
    }

    let system = |operation| move |source| RuntimeError::System { operation, source };
    let boot_id = boot_id().map_err(system("read the boot id"))?;
    let mut store = Store::open(&config.agent.state_dir)?;
    let holds: BTreeMap<String, HoldRecord> = store.holds()?.into_iter().collect();
    let marks: BTreeMap<String, u64> = store.marks()?.into_iter().collect();
    let leases = LocalLeases::restore(store.leases()?, marks.clone(), &boot_id, boot_now());
    let writer = Writer::spawn(store).map_err(system("start the thread that writes the state"))?;

    let datapath: SharedDataPath = Arc::new(Mutex::new(datapath));
    let facts = Facts { identity: config.agent.identity.clone(), boot_id: boot_id.clone(), started_at: boot_now() };
    let board = Arc::new(Board::new(Arc::clone(&datapath), facts));
    board.show_coverage(coverage.clone());
    let server = Server::bind(&config.agent.socket, &config.agent.socket_group)?;
    let (commands, inbox) = queues();
    let (events, _) = broadcast::channel(EVENTS_KEPT);
    tokio::spawn(server.serve(Api::new(commands, Arc::clone(&board) as _, events.clone())));

    let services = config.services.clone();
    let mut host = Host {
        config,
        path,
        boot_id,
        datapath,
        services: Vec::new(),
        by_name: BTreeMap::new(),
        holds,
        leases,
        writer,
        writes: Writes::new(),
        reloading: false,
        board,
        events,
        sequence: 0,
        rules,
        calendar: BTreeSet::new(),
        changed: BTreeSet::new(),
        to_verify: VecDeque::new(),
        attached: Some(coverage),
        queues: Vec::new(),
        clock_unfit: None,
    };
    for (settings, slot) in services.into_iter().zip(slots) {
        let mark = marks.get(&settings.name).copied().unwrap_or(0);
        host.adopt(settings, slot, mark);
    }
    if host.config.agent.attach == Attach::OnFence {
        host.board.show_degraded(vec![
            "`attach = \"on-fence\"`: nothing is attached while every service is served, so no gate falls if this agent \
             dies; set `attach = \"armed\"` for the dead-man's switch"
                .to_owned(),
        ]);
    }
    host.check_clock();
    host.look_at_queues();
    host.settle();
    while let Some(index) = host.next_verification() {
        host.verify_service(index);
    }
    Ok(Started { host, inbox })
}

/// In a time namespace the agent's boot clock is not the one that the kernel programs read.
fn refuse_other_clock() -> Result<(), RuntimeError> {
    let check = clock::namespace();
    match check.state {
        CheckState::Ok | CheckState::Warn => Ok(()),
        CheckState::Fail => Err(RuntimeError::Unfit { finding: check.finding, remedy: check.remedy }),
    }
}

/// A gate for every service, in their order.
pub(super) fn assign(datapath: &mut DataPath, services: &[model::Service]) -> Result<Vec<Slot>, RuntimeError> {
    let assigned = services.iter().map(|service| {
        let slot = datapath.gates().assign(&service.name);
        slot.map_err(|source| RuntimeError::Assign { service: service.name.clone(), source })
    });
    assigned.collect()
}

pub(super) fn compile(
    path: &std::path::Path,
    services: &[model::Service],
    slots: &[Slot],
    agent: &Agent,
) -> Result<RuleTable, RuntimeError> {
    let numbered: Vec<(u32, &model::Service)> = slots.iter().map(|slot| slot.index()).zip(services).collect();
    RuleTable::compile(&numbered, agent).map_err(|source| RuntimeError::Rules { path: path.to_owned(), source })
}

impl Host {
    /// Takes a service on: fenced, or as an earlier agent left its open gate. What holds for every service (a hold of its
    /// name, a clock that cannot be trusted) holds for it from here on.
    pub(super) fn adopt(&mut self, settings: model::Service, slot: Slot, mark: u64) {
        let hold = self.holds.remove(&settings.name);
        let gate = lock(&self.datapath).gates().gate(slot);
        let found = service::found(&gate, mark, hold.is_some());
        let now = boot_now();
        let (machine, actions) = Machine::adopt(service::machine_settings(&settings, &self.config.agent), now, found);
        let index = self.services.len();
        self.by_name.insert(settings.name.clone(), index);
        self.services.push(Some(Service {
            settings,
            slot,
            gate,
            machine,
            hold,
            closed_at: now,
            wake: None,
            verify: VecDeque::new(),
            meddled: None,
            mark_not_durable: None,
            hold_not_durable: None,
            hold_write: 0,
            hold_under_way: false,
        }));
        self.carry_out(index, actions);
        if let Some(why) = self.clock_unfit.clone() {
            self.input(index, Input::ClockUnfit { why });
        }
    }
}
