//! An agent without gates: the real socket and the real lease table, and a runtime that only keeps score.
//!
//! Each test program uses a part of it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use portcullis::{
    api::{
        command::{Command, Commands, Inbox, Refusal, View, queues},
        routes::Api,
        server::Server,
        types::{
            Confirmation, Counters, Coverage, CoverageWarning, Event, EventKind, Health, InterfaceCoverage,
            KernelEvents, LeaseGranted, LeaseReleased, ManualHold, Reloaded, ServiceStatus, State,
        },
    },
    clock::{boot_id, boot_now, wall_ms},
    lease::{
        Proof,
        local::{Acquire, LocalLeases},
    },
};
use tokio::sync::{broadcast, oneshot};

/// Events that a reader may fall behind.
pub const EVENTS: usize = 16;

#[derive(Default)]
pub struct Score {
    pub leases: LocalLeases,
    pub holds: BTreeMap<String, ManualHold>,
    /// Services that stay in `opening` although their lease is held.
    pub stuck: Vec<String>,
    /// One line per command that was carried out.
    pub log: Vec<String>,
    /// The answer to the next reload.
    pub refuse_reload: bool,
    events: u64,
}

/// A service `web` whose lease can be held, and one called `away` whose lease somebody else holds.
pub const SERVICES: [&str; 2] = ["away", "web"];

pub struct Fake {
    pub socket: PathBuf,
    pub score: Arc<Mutex<Score>>,
    pub events: broadcast::Sender<Arc<Event>>,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Fake {
    pub fn start(socket: &Path) -> Self {
        let mut fake = Self {
            socket: socket.to_owned(),
            score: Arc::default(),
            events: broadcast::channel(EVENTS).0,
            running: None,
        };
        fake.resume();
        fake
    }

    /// Serves again, with the leases as they were.
    pub fn resume(&mut self) {
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let (socket, score, events) = (self.socket.clone(), Arc::clone(&self.score), self.events.clone());
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (commands, inbox) = queues();
                let server = Server::bind(&socket, "no-such-group").unwrap();
                ready.send(()).unwrap();
                tokio::select! {
                    () = server.serve(api(commands, &score, &events)) => {}
                    () = carry_out(inbox, &score, &events) => {}
                    _ = stopped => {}
                }
            });
        });
        is_ready.recv().expect("the server did not come up");
        self.running = Some((stop, thread));
    }

    /// Breaks every connection and removes the socket, as an agent that goes down.
    pub fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            _ = stop.send(());
            _ = thread.join();
        }
    }

    pub fn log(&self) -> Vec<String> {
        self.score.lock().unwrap().log.clone()
    }

    /// Who holds `web`, and the token.
    pub fn holding(&self) -> Option<(String, u64)> {
        let score = self.score.lock().unwrap();
        score.leases.holding("web", boot_now()).map(|(holder, token)| (holder.to_owned(), token))
    }

    /// Takes `web` for `holder`, as if somebody else had asked; the token.
    pub fn take(&self, holder: &str, ttl: Duration) -> u64 {
        let mut score = self.score.lock().unwrap();
        acquire(&mut score, "web", holder, ttl).unwrap().token
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits until `condition` gives something, for at most 20 s.
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "in vain: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub fn api(commands: Commands, score: &Arc<Mutex<Score>>, events: &broadcast::Sender<Arc<Event>>) -> Api {
    Api::new(commands, Arc::new(Window(Arc::clone(score))), events.clone())
}

struct Window(Arc<Mutex<Score>>);

impl View for Window {
    fn services(&self) -> Vec<ServiceStatus> {
        let score = self.0.lock().unwrap();
        SERVICES.iter().map(|name| status(&score, name)).collect()
    }

    fn service(&self, name: &str) -> Option<ServiceStatus> {
        SERVICES.contains(&name).then(|| status(&self.0.lock().unwrap(), name))
    }

    fn health(&self) -> Health {
        Health {
            ok: false,
            version: "0.0.0".into(),
            identity: "node-a".into(),
            boot_id: boot_id().unwrap(),
            pid: std::process::id(),
            uptime_ms: 1,
            services: 2,
            degraded: vec!["eth0: a stranger's XDP program is attached: tc alone cuts there".into()],
        }
    }

    fn coverage(&self) -> Coverage {
        let note = Some("a stranger's program is attached".into());
        let interface = InterfaceCoverage { name: "eth0".into(), index: 2, tc: "tcx".into(), xdp: "none".into(), note };
        let warning = CoverageWarning {
            service: Some("web".into()),
            kind: "uncovered_listener".into(),
            detail: "tcp/8080 is in no selector: add it to `ports`".into(),
        };
        let kernel_events = KernelEvents { exempt_passed: 5, ..KernelEvents::default() };
        Coverage { interfaces: vec![interface], warnings: vec![warning], gaps_mended: 3, kernel_events }
    }
}

fn status(score: &Score, name: &str) -> ServiceStatus {
    let holding = score.leases.holding(name, boot_now());
    let manual_hold = score.holds.get(name).cloned();
    let state = match (&holding, &manual_hold) {
        (Some(_), None) if score.stuck.iter().any(|stuck| stuck == name) => State::Opening,
        (Some(_), None) => State::Serving,
        (None, _) | (_, Some(_)) => State::Fenced,
    };
    let open = state == State::Serving;
    let mark = score.leases.mark(name);
    ServiceStatus {
        name: name.to_owned(),
        state,
        token: (mark > 0).then_some(mark),
        holder: holding.map(|(holder, _)| holder.to_owned()),
        deadline_ns: open.then(|| boot_now().as_nanos()),
        time_left_ms: open.then_some(1234),
        reason: if open { "the lease is held".into() } else { "no holding is proven".into() },
        confirmation: (!open).then_some(Confirmation::Unconfirmed),
        evidence: vec!["no packet was tried".into()],
        manual_hold,
        counters: Counters { passed_packets: 5, dropped_packets: 7, stale_packets: 1, ..Counters::default() },
        degraded: vec![],
    }
}

async fn carry_out(mut inbox: Inbox, score: &Mutex<Score>, events: &broadcast::Sender<Arc<Event>>) {
    while let Some(command) = inbox.next().await {
        let mut score = score.lock().unwrap();
        let line = format!("{command:?}");
        let line = line.split(", answer:").next().unwrap_or_default().to_owned();
        match command {
            Command::Fence { service, token, reason, by, answer } => {
                let held = score.leases.holding(&service, boot_now()).map(|(_, token)| token);
                _ = answer.send(known(&service).and_then(|()| named(&service, token, held)).map(|()| {
                    let hold = ManualHold { reason, uid: by.uid, pid: by.pid, since_wall_ms: wall_ms() };
                    score.holds.insert(service.clone(), hold);
                    status(&score, &service)
                }));
            }
            Command::Unfence { service, token, answer, .. } => {
                let held = score.leases.holding(&service, boot_now()).map(|(_, token)| token);
                _ = answer.send(known(&service).and_then(|()| named(&service, token, held)).map(|()| {
                    score.holds.remove(&service);
                    status(&score, &service)
                }));
            }
            Command::ResetMark { service, mark, answer, .. } => {
                let fenced = status(&score, &service).state == State::Fenced;
                let refused = Refusal::NotFenced { service: service.clone() };
                let outcome = known(&service).and(if fenced { Ok(()) } else { Err(refused) });
                _ = answer.send(outcome.map(|()| ServiceStatus { token: Some(mark), ..status(&score, &service) }));
            }
            Command::Acquire { service, holder, ttl, answer, .. } => {
                let outcome = known(&service).and_then(|()| acquire(&mut score, &service, &holder, ttl));
                _ = answer.send(outcome.map(|proof| granted(&service, proof)));
            }
            Command::Renew { service, token, answer, .. } => {
                let lost = Refusal::Lost { service: service.clone(), token };
                let renewed = score.leases.renew(&service, token, boot_now()).map_err(|_| lost);
                _ = answer.send(known(&service).and(renewed).map(|proof| granted(&service, proof)));
            }
            Command::Release { service, token, answer, .. } => {
                let lost = Refusal::Lost { service: service.clone(), token };
                let released = score.leases.release(&service, token).map_err(|_| lost);
                _ = answer
                    .send(known(&service).and(released).map(|ended| LeaseReleased { service, token: ended.token }));
            }
            Command::Reload { answer, .. } => {
                let refused = Refusal::Configuration { detail: "line 3: unknown key `adresses`".into() };
                let reloaded = Reloaded { changed: vec!["web".into()], ..Reloaded::default() };
                _ = answer.send(if score.refuse_reload { Err(refused) } else { Ok(reloaded) });
            }
        }
        score.events += 1;
        // Nobody may be listening.
        _ = events.send(Arc::new(event(score.events, &line)));
        score.log.push(line);
    }
}

pub fn event(sequence: u64, detail: &str) -> Event {
    Event {
        sequence,
        at_ns: boot_now().as_nanos(),
        at_wall_ms: wall_ms(),
        kind: EventKind::Command,
        service: Some("web".into()),
        state: Some(State::Fenced),
        token: None,
        detail: detail.to_owned(),
    }
}

fn known(service: &str) -> Result<(), Refusal> {
    let known = SERVICES.contains(&service);
    known.then_some(()).ok_or_else(|| Refusal::UnknownService { service: service.to_owned() })
}

fn named(service: &str, named: Option<u64>, current: Option<u64>) -> Result<(), Refusal> {
    match named {
        Some(named) if current != Some(named) => {
            Err(Refusal::StaleToken { service: service.to_owned(), named, current })
        }
        Some(_) | None => Ok(()),
    }
}

fn acquire(score: &mut Score, service: &str, holder: &str, ttl: Duration) -> Result<Proof, Refusal> {
    if service == "away" {
        let (service, holder) = (service.to_owned(), "somebody else".to_owned());
        return Err(Refusal::Held { service, holder, expires_in: Duration::from_secs(5) });
    }
    let service = service.to_owned();
    match score.leases.acquire(&service, holder, ttl, boot_now(), wall_ms()) {
        Ok(Acquire::Reserved(reservation)) => Ok(score.leases.granted(&reservation, boot_now()).unwrap()),
        Ok(Acquire::Held { holder, expires_in }) => Err(Refusal::Held { service, holder, expires_in }),
        Err(error) => Err(Refusal::State { detail: error.to_string() }),
    }
}

fn granted(service: &str, proof: Proof) -> LeaseGranted {
    let ttl_ms = u64::try_from(proof.ttl.as_millis()).unwrap();
    LeaseGranted { service: service.to_owned(), token: proof.token, ttl_ms }
}
