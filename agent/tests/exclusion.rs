//! At most one node's gate is open at any instant: two machines, one store, clocks within the drift bound, delayed
//! messages, paused and crashed agents.
//!
//! True time is the store's clock. A gate opens only by an action, so that two open gates would be seen at the instant
//! of one: each action is followed by a look at both.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use portcullis::{
    config::model::StoreLost,
    core::{
        deadline::{Proof, Timing},
        machine::{Action, Confirmation, Epoch, Found, Input, Loss, Machine, Outcome, Settings, StateName},
        time::BootInstant,
    },
};
use proptest::{prelude::*, test_runner::TestCaseError};

const DRIFT_PPM: u32 = 100_000;
const MS: u64 = 1_000_000;

const SETTINGS: Settings = Settings {
    // No margin: the rule is tried at its edge.
    timing: Timing { ttl_cap: Duration::from_secs(60), margin: Duration::ZERO, drift_ppm: DRIFT_PPM },
    when_store_lost: StoreLost::Fence,
};

#[derive(Clone, Debug)]
enum Op {
    Wait {
        ms: u64,
    },
    /// Acquire or renew, the request and its answer taking this long.
    Ask {
        node: usize,
        ttl_ms: u64,
        there_ms: u64,
        back_ms: u64,
    },
    /// Acquire at the very instant at which the other's lease expires, over the fastest of networks.
    AskAtExpiry {
        node: usize,
        ttl_ms: u64,
    },
    Release {
        node: usize,
        there_ms: u64,
    },
    Fence {
        node: usize,
    },
    /// The agent does nothing for a time; its gate and the world go on.
    Pause {
        node: usize,
        ms: u64,
    },
    /// The agent dies, now or after so many more actions, and starts anew later.
    Crash {
        node: usize,
        after_actions: Option<usize>,
        down_ms: u64,
    },
    /// How fast the node's clock runs beside the store's.
    Clock {
        node: usize,
        off_ppm: i64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let node = || 0..2usize;
    let delay = || prop_oneof![3 => 0..5u64, 1 => 0..3_000u64];
    let drift = i64::from(DRIFT_PPM);
    prop_oneof![
        4 => (0..1_500u64).prop_map(|ms| Op::Wait { ms }),
        8 => (node(), 500..5_000u64, delay(), delay())
            .prop_map(|(node, ttl_ms, there_ms, back_ms)| Op::Ask { node, ttl_ms, there_ms, back_ms }),
        4 => (node(), 500..5_000u64).prop_map(|(node, ttl_ms)| Op::AskAtExpiry { node, ttl_ms }),
        2 => (node(), delay()).prop_map(|(node, there_ms)| Op::Release { node, there_ms }),
        1 => node().prop_map(|node| Op::Fence { node }),
        1 => (node(), 0..4_000u64).prop_map(|(node, ms)| Op::Pause { node, ms }),
        1 => (node(), proptest::option::of(0..8usize), 0..2_000u64)
            .prop_map(|(node, after_actions, down_ms)| Op::Crash { node, after_actions, down_ms }),
        2 => (node(), prop_oneof![Just(-drift), Just(drift), -drift..=drift])
            .prop_map(|(node, off_ppm)| Op::Clock { node, off_ppm }),
    ]
}

/// A store with one lease: held until it expires by the store's clock, or is released.
#[derive(Default)]
struct Store {
    holder: Option<usize>,
    /// ns of true time
    expires: u64,
    token: u64,
    sequence: u64,
}

impl Store {
    /// The token and sequence granted, unless somebody else holds the lease.
    fn ask(&mut self, now: u64, node: usize, ttl: Duration) -> Option<(u64, u64)> {
        match self.holder {
            // Also after it has expired, as long as nobody else took it: stores that compare versions allow that.
            Some(holder) if holder == node => {}
            Some(_) if now < self.expires => return None,
            Some(_) | None => {
                self.holder = Some(node);
                self.token += 1;
            }
        }
        // A promise is not taken back: a shorter TTL counts once the longer one before it has run out. A store without
        // this rule may hand the lease on before its holder, paused, has heard of the shorter TTL.
        let expires = now + u64::try_from(ttl.as_nanos()).unwrap();
        self.expires = self.expires.max(expires);
        self.sequence += 1;
        Some((self.token, self.sequence))
    }

    /// Ends the holding of `token`, and no other: a release may come after its lease has expired and been taken anew.
    fn release(&mut self, node: usize, token: u64) {
        if self.holder == Some(node) && self.token == token {
            (self.holder, self.expires) = (None, 0);
        }
    }
}

struct Node {
    /// Local time in ns * 10^6, exact.
    clock: u128,
    off_ppm: i64,
    machine: Option<Machine>,
    /// Messages to an agent that has died since are lost.
    life: u32,
    paused_until: u64,
    crash_after: Option<usize>,
    /// A release that is not answered: nothing is asked meanwhile.
    releasing: bool,
    // What outlives the agent.
    gate_deadline: BootInstant,
    gate_generation: BootInstant,
    gate_token: u64,
    mark: u64,
}

impl Node {
    fn now(&self) -> BootInstant {
        BootInstant::from_nanos(u64::try_from(self.clock / 1_000_000).unwrap())
    }

    fn is_open(&self) -> bool {
        self.now() < self.gate_deadline
    }
}

enum Message {
    Ask { node: usize, life: u32, sent_at: BootInstant, ttl: Duration, back: u64 },
    Release { node: usize, life: u32, token: u64 },
    Released { node: usize, life: u32 },
    Deliver { node: usize, life: u32, input: Input },
    Wake { node: usize, life: u32 },
    Start { node: usize, life: u32 },
}

struct World {
    /// True time, ns.
    now: u64,
    store: Store,
    nodes: [Node; 2],
    /// In the order of sending; delivered in the order of time.
    messages: Vec<(u64, Message)>,
    opened: [u32; 2],
    handovers: u32,
}

impl World {
    fn new() -> Result<Self, TestCaseError> {
        let node = |boot_s: u128| Node {
            clock: boot_s * 1_000_000_000 * 1_000_000,
            off_ppm: 0,
            machine: None,
            life: 0,
            paused_until: 0,
            crash_after: None,
            releasing: false,
            gate_deadline: BootInstant::ZERO,
            gate_generation: BootInstant::ZERO,
            gate_token: 0,
            mark: 0,
        };
        let mut world = Self {
            now: 0,
            store: Store::default(),
            nodes: [node(100), node(7_000)],
            messages: Vec::new(),
            opened: [0; 2],
            handovers: 0,
        };
        world.start(0)?;
        world.start(1)?;
        Ok(world)
    }

    fn run(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Wait { ms } => self.advance(self.now + ms * MS),
            Op::Ask { node, ttl_ms, there_ms, back_ms } => {
                self.ask(node, ttl_ms, there_ms * MS, back_ms * MS);
                Ok(())
            }
            Op::AskAtExpiry { node, ttl_ms } => {
                if self.store.expires > self.now {
                    self.advance(self.store.expires)?;
                }
                self.ask(node, ttl_ms, 0, 0);
                self.advance(self.now)
            }
            Op::Release { node, there_ms } => {
                let serving = self.nodes[node].machine.as_ref().map(Machine::view);
                let token = serving.filter(|view| view.state == StateName::Serving).and_then(|view| view.token);
                if let (Some(token), false) = (token, self.nodes[node].releasing || self.is_paused(node)) {
                    let life = self.nodes[node].life;
                    self.step(node, Input::Lost { token, loss: Loss::Released })?;
                    // Unless it died while closing.
                    if self.nodes[node].life == life {
                        self.nodes[node].releasing = true;
                        self.messages.push((self.now + there_ms * MS, Message::Release { node, life, token }));
                    }
                }
                Ok(())
            }
            Op::Fence { node } => {
                let message = Message::Deliver {
                    node,
                    life: self.nodes[node].life,
                    input: Input::Fence { token: None, reason: "drill".into(), hold: false },
                };
                self.messages.push((self.now, message));
                self.advance(self.now)
            }
            Op::Pause { node, ms } => {
                self.nodes[node].paused_until = self.now + ms * MS;
                Ok(())
            }
            Op::Crash { node, after_actions, down_ms } => {
                match after_actions {
                    Some(actions) => self.nodes[node].crash_after = Some(actions),
                    None => self.crash(node, down_ms),
                }
                Ok(())
            }
            Op::Clock { node, off_ppm } => {
                self.nodes[node].off_ppm = off_ppm;
                Ok(())
            }
        }
    }

    fn is_paused(&self, node: usize) -> bool {
        self.now < self.nodes[node].paused_until
    }

    fn ask(&mut self, node: usize, ttl_ms: u64, there: u64, back: u64) {
        let asking = &self.nodes[node];
        if asking.machine.is_none() || asking.releasing || self.is_paused(node) {
            return;
        }
        let (life, sent_at, ttl) = (asking.life, asking.now(), Duration::from_millis(ttl_ms));
        self.messages.push((self.now + there, Message::Ask { node, life, sent_at, ttl, back }));
    }

    fn crash(&mut self, node: usize, down_ms: u64) {
        let dying = &mut self.nodes[node];
        if dying.machine.take().is_some() {
            dying.life += 1;
            (dying.crash_after, dying.releasing) = (None, false);
            let life = dying.life;
            self.messages.push((self.now + down_ms * MS, Message::Start { node, life }));
        }
    }

    fn start(&mut self, node: usize) -> Result<(), TestCaseError> {
        let starting = &mut self.nodes[node];
        let found = Found {
            deadline: starting.gate_deadline,
            generation: starting.gate_generation,
            token: starting.gate_token,
            high_water: starting.mark,
            hold: false,
        };
        let (machine, actions) = Machine::adopt(SETTINGS, starting.now(), found);
        starting.machine = Some(machine);
        self.carry_out(node, actions)
    }

    /// Lets true time pass, and what is due on the way happen.
    fn advance(&mut self, until: u64) -> Result<(), TestCaseError> {
        loop {
            let next =
                self.messages.iter().enumerate().min_by_key(|(_, (at, _))| *at).map(|(index, (at, _))| (index, *at));
            let Some((index, at)) = next.filter(|(_, at)| *at <= until) else { break };
            self.pass(at.max(self.now));
            let (_, message) = self.messages.remove(index);
            self.handle(message)?;
        }
        self.pass(until);
        Ok(())
    }

    fn pass(&mut self, until: u64) {
        let span = u128::from(until - self.now);
        for node in &mut self.nodes {
            node.clock += span * u128::try_from(1_000_000 + node.off_ppm).unwrap();
        }
        self.now = until;
    }

    fn handle(&mut self, message: Message) -> Result<(), TestCaseError> {
        match message {
            Message::Ask { node, life, sent_at, ttl, back } => {
                let before = self.store.holder;
                let input = match self.store.ask(self.now, node, ttl) {
                    Some((token, sequence)) => Input::Proven(Proof { sent_at, ttl, token, sequence }),
                    None => Input::StoreSilent,
                };
                self.handovers += u32::from(before.is_some() && before != self.store.holder);
                self.messages.push((self.now + back, Message::Deliver { node, life, input }));
                Ok(())
            }
            Message::Release { node, life, token } => {
                self.store.release(node, token);
                self.messages.push((self.now, Message::Released { node, life }));
                Ok(())
            }
            Message::Released { node, life } => {
                let released = &mut self.nodes[node];
                released.releasing &= released.life != life;
                Ok(())
            }
            Message::Start { node, life } if self.nodes[node].life == life && self.nodes[node].machine.is_none() => {
                self.start(node)
            }
            Message::Deliver { node, life, input } if self.nodes[node].life == life => {
                if self.is_paused(node) {
                    self.messages.push((self.nodes[node].paused_until, Message::Deliver { node, life, input }));
                    return Ok(());
                }
                self.step(node, input)
            }
            Message::Wake { node, life } if self.nodes[node].life == life && !self.is_paused(node) => {
                self.step(node, Input::Tick)
            }
            Message::Start { .. } | Message::Deliver { .. } | Message::Wake { .. } => Ok(()),
        }
    }

    fn step(&mut self, node: usize, input: Input) -> Result<(), TestCaseError> {
        let now = self.nodes[node].now();
        let Some(machine) = &mut self.nodes[node].machine else { return Ok(()) };
        let actions = machine.step(now, input);
        self.carry_out(node, actions)
    }

    fn carry_out(&mut self, node: usize, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for action in actions {
            if self.nodes[node].crash_after == Some(0) {
                self.crash(node, 100);
                return Ok(());
            }
            self.nodes[node].crash_after = self.nodes[node].crash_after.map(|actions| actions - 1);
            match action {
                Action::Close { .. } => self.nodes[node].gate_deadline = BootInstant::from_nanos(1),
                Action::Bar { below } => self.nodes[node].gate_token = below,
                Action::Open { generation, token, deadline, .. } => {
                    let opening = &mut self.nodes[node];
                    (opening.gate_deadline, opening.gate_generation) = (deadline, generation);
                    opening.gate_token = token;
                    self.opened[node] += 1;
                }
                Action::Renew { deadline, .. } => self.nodes[node].gate_deadline = deadline,
                Action::PersistMark { epoch, token } => {
                    self.nodes[node].mark = token;
                    self.answer(node, epoch, Outcome::MarkPersisted(Ok(())));
                }
                Action::SelfTest { epoch, expect } => {
                    self.answer(node, epoch, Outcome::SelfTested { expect, result: Ok(()) });
                }
                Action::Verify { epoch } => {
                    self.answer(node, epoch, Outcome::Verified(Confirmation::Confirmed(Vec::new())));
                }
                Action::PersistHold { .. } | Action::Record(_) => {}
            }
            let both = self.nodes.iter().all(Node::is_open);
            prop_assert!(!both, "both gates are open at {} ns", self.now);
        }
        // A machine is woken by its local clock, too early if that is slow. Some time passes all the same, so that a
        // machine that does not heed its deadline fails here instead of being woken for ever.
        let node_state = &self.nodes[node];
        if let Some(at) = node_state.machine.as_ref().and_then(Machine::wake_at) {
            let wait = u64::try_from(at.saturating_since(node_state.now()).as_nanos()).unwrap().max(MS);
            let life = node_state.life;
            self.messages.push((self.now + wait, Message::Wake { node, life }));
        }
        Ok(())
    }

    /// Effects take a millisecond of true time.
    fn answer(&mut self, node: usize, epoch: Epoch, outcome: Outcome) {
        let life = self.nodes[node].life;
        self.messages.push((self.now + MS, Message::Deliver { node, life, input: Input::Done { epoch, outcome } }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn at_most_one_gate_is_open(ops in prop::collection::vec(op(), 1..150)) {
        let mut world = World::new()?;
        for op in ops {
            world.run(op)?;
        }
    }
}

/// The rule above says nothing if the authority never moves.
#[test]
fn the_authority_moves() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(op(), 100..150);
    let (mut both_opened, mut handovers) = (0, 0);
    for _ in 0..100 {
        let mut world = World::new().unwrap();
        for op in strategy.new_tree(&mut runner).unwrap().current() {
            world.run(op).unwrap();
        }
        both_opened += u32::from(world.opened.iter().all(|&opened| opened > 0));
        handovers += world.handovers;
    }
    assert!(both_opened > 70, "both nodes opened in only {both_opened} of 100 worlds");
    assert!(handovers > 200, "the lease changed hands only {handovers} times in 100 worlds");
}
