//! The shell round the core: one loop that feeds the services' machines and carries out what they ask for.
//!
//! * [`start`]: from nothing to a host whose services are armed and whose socket answers.
//! * [`host`]: everything the loop owns; inputs go in, actions are carried out.
//! * [`service`]: one service: its machine, its gate, what is told of it.
//! * [`commands`]: what the local socket asks for.
//! * [`verify`]: self-tests, and the evidence of a fence.
//! * [`reload`]: a changed configuration.
//! * [`queues`]: what leaves a shaped queue after a gate has closed, against the margins.
//! * [`board`]: what readers of the socket see.
//!
//! One thread, no task per service: an input is carried out to its end before the next is looked at, and only the disk is
//! somebody else's ([`crate::lease::writer`]). Nothing here decides; whoever looks for a rule finds it in the core.

mod board;
mod commands;
mod host;
mod queues;
mod reload;
mod service;
mod start;
mod verify;

use std::{io, path::PathBuf, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{Signal, SignalKind, signal},
    time::{Interval, MissedTickBehavior, interval},
};

use self::{host::Host, start::Started};
use crate::{
    api::{command::Inbox, server::ServerError},
    clock::BootTimer,
    config::LoadError,
    core::{machine::Input, time::BootInstant},
    datapath::DataPathError,
    lease::store::StateError,
};

/// How often the attachment of every program, the value of every gate and the egress queues are looked at again. What was lost is lost for at
/// most this long.
const VERIFY_EVERY: Duration = Duration::from_secs(2);
/// How often listeners that no selector covers are looked for.
const LISTENERS_EVERY: Duration = Duration::from_secs(10);
/// How often the clock's slew rate is read while nothing is renewed, and what could not be written is written again.
const CLOCK_EVERY: Duration = Duration::from_secs(1);

/// Why the agent does not run. Every gate stays as it was: closed, or open until its deadline.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Config(#[from] LoadError),
    #[error("{finding}: {remedy}")]
    Unfit { finding: String, remedy: String },
    #[error(
        "the margin of {service}, {margin:?}, does not cover the egress queue of {interface}: its {kind} lets packets out \
         up to {drain:?} after the gate has closed. Raise `margin` above {drain:?}, or shorten the queue's limit"
    )]
    ShortMargin { service: String, margin: Duration, interface: String, kind: String, drain: Duration },
    #[error(transparent)]
    DataPath(#[from] DataPathError),
    #[error("cannot arm {service}: {source}")]
    Assign { service: String, source: crate::datapath::gates::AssignError },
    #[error("the rules of {path} cannot be installed: {source}", path = path.display())]
    Rules { path: PathBuf, source: crate::config::rules::RuleError },
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("cannot {operation}: {source}. See `portcullis doctor`")]
    System { operation: &'static str, source: io::Error },
    #[error("not ready, since not every interface is covered: {0}. See `portcullis doctor`")]
    NotCovered(String),
}

/// Runs the agent with the configuration at `path` until it is asked to stop. Needs a single-threaded tokio runtime.
///
/// A stop closes no gate before its deadline and opens none.
pub async fn run(path: PathBuf) -> Result<(), RuntimeError> {
    let Started { mut host, mut inbox } = start::start(path)?;
    let mut events = Events::new(&host)?;
    host.settle();
    notify_ready();
    loop {
        let event = events.next(&mut host, &mut inbox).await?;
        let stop = matches!(event, Event::Stop);
        host.handle(event, &mut inbox);
        if stop {
            notify(&[sd_notify::NotifyState::Stopping]);
            return Ok(());
        }
    }
}

/// What wakes the loop.
enum Event {
    Command(crate::api::command::Command),
    /// A durable write, or the reading of the configuration, has ended.
    Written(host::Written),
    /// A machine or a lease wants to be looked at.
    Due,
    Interfaces,
    Verify,
    Listeners,
    Clock,
    Reload,
    Stop,
}

/// The sources of events.
struct Events {
    timer: BootTimer,
    interfaces: AsyncFd<std::os::fd::OwnedFd>,
    verify: Interval,
    listeners: Interval,
    clock: Interval,
    watchdog: Option<Interval>,
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Events {
    fn new(host: &Host) -> Result<Self, RuntimeError> {
        let system = |operation| move |source| RuntimeError::System { operation, source };
        let interfaces = host.interfaces_fd().map_err(system("follow the interfaces"))?;
        // SAFETY: the descriptor was duplicated for this AsyncFd, which owns it and never replaces or closes it.
        let interfaces = unsafe { AsyncFd::register_with_interest(interfaces, Interest::READABLE) };
        let of = |kind| signal(kind).map_err(system("wait for signals"));
        Ok(Self {
            timer: BootTimer::new().map_err(system("make a timer"))?,
            interfaces: interfaces.map_err(|error| system("wait for interfaces")(error.into()))?,
            verify: ticks(VERIFY_EVERY),
            listeners: ticks(LISTENERS_EVERY),
            clock: ticks(CLOCK_EVERY),
            watchdog: sd_notify::watchdog_enabled().map(|period| ticks(period / 2)),
            hangup: of(SignalKind::hangup())?,
            terminate: of(SignalKind::terminate())?,
            interrupt: of(SignalKind::interrupt())?,
        })
    }

    /// The next event; commands, and among them fences, before everything else that is ready.
    async fn next(&mut self, host: &mut Host, inbox: &mut Inbox) -> Result<Event, RuntimeError> {
        loop {
            let due = host.next_due().unwrap_or(BootInstant::from_nanos(u64::MAX));
            tokio::select! {
                biased;
                _ = self.terminate.recv() => return Ok(Event::Stop),
                _ = self.interrupt.recv() => return Ok(Event::Stop),
                Some(command) = inbox.next() => return Ok(Event::Command(command)),
                Some(written) = host.writes.next(), if !host.writes.is_empty() => return Ok(Event::Written(written)),
                slept = self.timer.sleep_until(due) => {
                    slept.map_err(|source| RuntimeError::System { operation: "wait for a deadline", source })?;
                    return Ok(Event::Due);
                }
                ready = self.interfaces.readable() => {
                    ready.map_err(|source| RuntimeError::System { operation: "hear of interfaces", source })?.clear_ready();
                    return Ok(Event::Interfaces);
                }
                _ = self.clock.tick() => return Ok(Event::Clock),
                _ = self.verify.tick() => return Ok(Event::Verify),
                _ = self.listeners.tick() => return Ok(Event::Listeners),
                _ = self.hangup.recv() => return Ok(Event::Reload),
                () = tick(&mut self.watchdog) => notify(&[sd_notify::NotifyState::Watchdog]),
            }
        }
    }
}

impl Host {
    fn handle(&mut self, event: Event, inbox: &mut Inbox) {
        match event {
            Event::Command(command) => self.command(command),
            Event::Written(written) => self.written(written),
            Event::Due => self.due(),
            Event::Interfaces => self.interfaces_changed(),
            Event::Verify => {
                self.look_again();
                self.look_at_gates();
                self.look_at_queues();
            }
            Event::Listeners => self.look_for_listeners(),
            Event::Clock => {
                self.check_clock();
                self.write_holds_again();
            }
            Event::Reload => self.reload(None),
            Event::Stop => self.input_all(&Input::Shutdown),
        }
        // Verifications are long beside everything else: neither a fence nor what attaches for one waits behind them.
        self.settle();
        while let Some(index) = self.next_verification() {
            while let Some(fence) = inbox.next_fence() {
                self.command(fence);
                self.settle();
            }
            self.verify_service(index);
        }
        self.settle();
    }
}

fn ticks(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

async fn tick(interval: &mut Option<Interval>) {
    match interval {
        Some(interval) => _ = interval.tick().await,
        None => std::future::pending().await,
    }
}

fn notify_ready() {
    notify(&[sd_notify::NotifyState::Ready]);
}

/// systemd wants the time with it, to tell this reload from one before.
fn notify_reloading() {
    match sd_notify::NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[sd_notify::NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "systemd could not be notified"),
    }
}

/// Tells systemd, if it started us; who does not listen misses nothing.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be notified");
    }
}

/// Durable writes under way, and the reading of the configuration.
type Writes = FuturesUnordered<futures_util::future::BoxFuture<'static, host::Written>>;
