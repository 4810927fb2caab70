//! A changed configuration, applied without opening or closing a gate that the change does not concern.

use std::{collections::BTreeMap, io, thread};

use tokio::sync::oneshot;

use super::{
    RuntimeError,
    board::lock,
    host::{Host, Index, Written},
    queues::refuse_short_margins,
    service::machine_settings,
    start::{assign, compile},
};
use crate::{
    api::{
        command::{Answer, Refusal},
        types::{EventKind, Reloaded},
    },
    config::{
        Config, Loaded,
        model::{Agent, Service},
    },
    core::machine::Input,
};

impl Host {
    /// Reads the file again, on a thread of its own: the disk may hang, and a fence must not wait for it. An `answer` that
    /// is none belongs to a signal.
    pub(super) fn reload(&mut self, answer: Option<Answer<Reloaded>>) {
        super::notify_reloading();
        if self.reloading {
            // The one under way tells systemd when it has ended.
            return reply(answer, Err(Refusal::Busy));
        }
        self.reloading = true;
        let (read, outcome) = oneshot::channel();
        let path = self.path.clone();
        // Nobody waits for the thread, so that an agent that is stopped does not either.
        let thread = thread::Builder::new().name("reload".into()).spawn(move || {
            _ = read.send(Config::load(&path));
        });
        let missing = thread.err();
        self.writes.push(Box::pin(async move {
            let ended = |_| {
                let source = missing.unwrap_or_else(|| io::Error::other("the thread that reads it has ended"));
                Err(RuntimeError::System { operation: "read the configuration", source })
            };
            let loaded = outcome.await.map_or_else(ended, |loaded| loaded.map_err(RuntimeError::from));
            Written::Loaded { loaded, answer }
        }));
    }

    /// The file was read, or cannot be. On an error before the kernel is told the old configuration stays in force, whole.
    pub(super) fn loaded(&mut self, loaded: Result<Loaded, RuntimeError>, answer: Option<Answer<Reloaded>>) {
        self.reloading = false;
        let applied = loaded.and_then(|loaded| self.apply(loaded));
        let outcome = applied.map_err(|error| Refusal::Configuration { detail: error.to_string() });
        super::notify_ready();
        match &outcome {
            Ok(reloaded) => {
                tracing::info!(?reloaded, "configuration applied");
                self.tell(EventKind::Reload, None, format!("{reloaded:?}"));
            }
            Err(refusal) => self.tell(EventKind::Reload, None, refusal.to_string()),
        }
        reply(answer, outcome);
    }

    fn apply(&mut self, loaded: Loaded) -> Result<Reloaded, RuntimeError> {
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
        let removed: Vec<(&String, Index)> =
            old.iter().filter(|(name, _)| !kept(name)).map(|(name, (index, _))| (name, *index)).collect();
        for (_, index) in &removed {
            let reason = "the service has left the configuration".to_owned();
            self.input(*index, Input::Fence { token: None, reason, hold: false });
        }
        // From here on the kernel may hold a part of the new rules; a second reload mends what an error left. Until the
        // rules are gone the removed services keep the machines that answer for them.
        lock(&self.datapath).apply_rules(&rules)?;
        for (name, index) in removed {
            self.retire(name, index);
            reloaded.removed.push(name.clone());
        }
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

    /// A service that has left the configuration: its gate is closed, and nothing is judged by it any more.
    fn retire(&mut self, name: &str, index: Index) {
        tracing::warn!(service = name, "the service has left the configuration: its traffic is no longer judged");
        self.by_name.remove(name);
        self.board.hide(name);
        if let Some(service) = self.services.get_mut(index).and_then(Option::take) {
            self.holds.extend(service.hold.map(|hold| (name.to_owned(), hold)));
            if let Some(wake) = service.wake {
                self.calendar.remove(&(wake, index));
            }
        }
    }
}

fn reply(answer: Option<Answer<Reloaded>>, outcome: Result<Reloaded, Refusal>) {
    if let Err(refusal) = &outcome {
        tracing::error!(%refusal, "the configuration was not applied; the old one stays in force");
    }
    // Whoever hung up does not want to know.
    answer.map(|answer| answer.send(outcome));
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
