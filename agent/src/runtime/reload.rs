//! A changed configuration, applied without opening or closing a gate that the change does not concern.

use std::collections::BTreeMap;

use super::{
    RuntimeError,
    board::lock,
    host::{Host, Index},
    queues::refuse_short_margins,
    service::machine_settings,
    start::{assign, compile},
};
use crate::{
    api::{
        command::Refusal,
        types::{EventKind, Reloaded},
    },
    config::{
        Config,
        model::{Agent, Service},
    },
};

impl Host {
    /// Reads the file again. On any error the old configuration stays in force, whole.
    pub(super) fn reload(&mut self) -> Result<Reloaded, Refusal> {
        super::notify_reloading();
        let outcome = self.apply_file().map_err(|error| Refusal::Configuration { detail: error.to_string() });
        super::notify_ready();
        match &outcome {
            Ok(reloaded) => {
                tracing::info!(?reloaded, "configuration applied");
                self.tell(EventKind::Reload, None, format!("{reloaded:?}"));
            }
            Err(refusal) => self.tell(EventKind::Reload, None, refusal.to_string()),
        }
        outcome
    }

    fn apply_file(&mut self) -> Result<Reloaded, RuntimeError> {
        let loaded = Config::load(&self.path)?;
        for warning in &loaded.warnings {
            tracing::warn!("{warning}");
        }
        let new = loaded.config;
        refuse_short_margins(&new.services)?;
        let needs_restart = needs_restart(&self.config.agent, &new.agent);
        // What needs a restart keeps its old value until then; the rest of [agent] counts from now on.
        let agent = Agent {
            drift_ppm: new.agent.drift_ppm,
            exempt: new.agent.exempt.clone(),
            exempt_ssh: new.agent.exempt_ssh,
            ..self.config.agent.clone()
        };
        let old: BTreeMap<String, (Index, Service)> = self
            .by_name
            .iter()
            .filter_map(|(name, &index)| Some((name.clone(), (index, self.service(index)?.settings.clone()))))
            .collect();
        let mut reloaded = Reloaded { needs_restart, ..Reloaded::default() };

        let (slots, rules) = {
            let mut datapath = lock(&self.datapath);
            let slots = assign(&mut datapath, &new.services)?;
            (slots.clone(), compile(&self.path, &new.services, &slots, &agent)?)
        };
        let kept = |name: &str| new.services.iter().any(|service| service.name == name);
        for (name, (index, _)) in old.iter().filter(|(name, _)| !kept(name)) {
            self.retire(name, *index);
            reloaded.removed.push(name.clone());
        }
        // From here on the kernel may hold a part of the new rules; a second reload mends what an error left.
        lock(&self.datapath).apply_rules(&rules)?;
        self.rules = rules;
        self.config = Config { agent, services: new.services.clone() };
        for (settings, slot) in new.services.into_iter().zip(slots) {
            match old.get(&settings.name) {
                None => {
                    reloaded.added.push(settings.name.clone());
                    let mark = self.leases.mark(&settings.name);
                    self.adopt(settings, slot, mark);
                }
                Some((index, before)) => {
                    if *before != settings {
                        reloaded.changed.push(settings.name.clone());
                    }
                    let machine_settings = machine_settings(&settings, &self.config.agent);
                    if let Some(service) = self.service_mut(*index) {
                        service.machine.configure(machine_settings);
                        service.settings = settings;
                    }
                    self.changed.insert(*index);
                }
            }
        }
        Ok(reloaded)
    }

    /// A service that has left the configuration: its gate is closed, and then nothing is judged by it any more.
    fn retire(&mut self, name: &str, index: Index) {
        tracing::warn!(service = name, "the service has left the configuration: its traffic is no longer judged");
        self.by_name.remove(name);
        self.board.hide(name);
        if let Some(mut service) = self.services.get_mut(index).and_then(Option::take) {
            service.gate.close();
            self.holds.extend(service.hold.map(|hold| (name.to_owned(), hold)));
            if let Some(wake) = service.wake {
                self.calendar.remove(&(wake, index));
            }
        }
    }
}

/// The settings of [agent] that are read at the start alone and differ.
fn needs_restart(old: &Agent, new: &Agent) -> Vec<String> {
    let differ = [
        ("identity", old.identity != new.identity),
        ("socket", old.socket != new.socket),
        ("socket_group", old.socket_group != new.socket_group),
        ("state_dir", old.state_dir != new.state_dir),
        ("bpffs", old.bpffs != new.bpffs),
        ("lock", old.lock != new.lock),
        ("cgroup_root", old.cgroup_root != new.cgroup_root),
        ("xdp", old.xdp != new.xdp),
        ("tc", old.tc != new.tc),
        ("attach", old.attach != new.attach),
        ("exclude_interfaces", old.exclude_interfaces != new.exclude_interfaces),
    ];
    differ.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
}
