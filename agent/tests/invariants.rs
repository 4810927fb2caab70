//! What must hold of one machine under any sequence of inputs, restarts included.
//!
//! A small world stands for the shell: it carries out each action on a model of the gate and of the disk, and judges it
//! by rules that know nothing of the machine's states.

#![allow(clippy::unwrap_used)]

use std::{collections::VecDeque, time::Duration};

use portcullis::{
    config::model::StoreLost,
    core::{
        deadline::{Proof, Timing, deadline},
        machine::{
            Action, Basis, Confirmation, Epoch, Event, Expect, Found, Input, Loss, Machine, Outcome, Settings,
            StateName,
        },
        time::BootInstant,
    },
};
use proptest::{prelude::*, test_runner::TestCaseError};

/// Long enough after the boot that no deadline is taken for a fence number.
const START: BootInstant = BootInstant::from_nanos(100_000_000_000);

#[derive(Clone, Debug)]
enum Op {
    Wait { ms: u64 },
    Prove { age_ms: u64, ttl_ms: u64, token: u64, lag: u64 },
    Lose { token: u64 },
    StoreSilent,
    Fence { token: Option<u64>, hold: bool },
    Unfence,
    ResetMark { mark: u64 },
    Clock { fit: bool },
    Complete { good: bool },
    CompleteAgain,
    RefuseRenewal,
    Meddle { ms: u64 },
    Restart { clean: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let token = || prop_oneof![8 => Just(2u64), 1 => Just(1u64), 2 => 3..5u64];
    prop_oneof![
        4 => (0..3_000u64).prop_map(|ms| Op::Wait { ms }),
        8 => (0..1_000u64, 500..12_000u64, token(), prop_oneof![4 => Just(0), 1 => 0..4u64])
            .prop_map(|(age_ms, ttl_ms, token, lag)| Op::Prove { age_ms, ttl_ms, token, lag }),
        1 => token().prop_map(|token| Op::Lose { token }),
        2 => Just(Op::StoreSilent),
        1 => (proptest::option::of(token()), any::<bool>()).prop_map(|(token, hold)| Op::Fence { token, hold }),
        2 => Just(Op::Unfence),
        1 => token().prop_map(|mark| Op::ResetMark { mark }),
        1 => prop::bool::weighted(0.8).prop_map(|fit| Op::Clock { fit }),
        16 => prop::bool::weighted(0.9).prop_map(|good| Op::Complete { good }),
        1 => Just(Op::CompleteAgain),
        1 => Just(Op::RefuseRenewal),
        1 => (0..20_000u64).prop_map(|ms| Op::Meddle { ms }),
        1 => any::<bool>().prop_map(|clean| Op::Restart { clean }),
    ]
}

struct World {
    settings: Settings,
    machine: Machine,
    now: BootInstant,
    // The kernel's gate and the disk: they outlive an agent.
    gate_deadline: BootInstant,
    gate_generation: BootInstant,
    gate_token: u64,
    /// No token below it may open any more: what was released.
    barred: u64,
    disk_mark: u64,
    disk_hold: bool,
    // What an agent has asked for and not been told.
    effects: VecDeque<Action>,
    told: Vec<Input>,
    /// The newest that an action carried.
    epoch: Epoch,
    /// What the store has answered so far.
    answers: u64,
    // What the rules remember.
    /// The newest proof this agent was given that counts.
    proof: Option<Proof>,
    newest: Option<(u64, BootInstant)>,
    asked_from: BootInstant,
    silent: bool,
    fit: bool,
    hold: bool,
    last_opened: u64,
    /// The epoch whose closed gate was seen to drop.
    dropped: Option<Epoch>,
    opened: u32,
}

impl World {
    fn new(settings: Settings) -> Result<Self, TestCaseError> {
        let found =
            Found { deadline: BootInstant::ZERO, generation: BootInstant::ZERO, token: 0, high_water: 0, hold: false };
        let (machine, actions) = Machine::adopt(settings, START, found);
        let mut world = Self {
            settings,
            machine,
            now: START,
            gate_deadline: BootInstant::ZERO,
            gate_generation: BootInstant::ZERO,
            gate_token: 0,
            barred: 0,
            disk_mark: 0,
            disk_hold: false,
            effects: VecDeque::new(),
            told: Vec::new(),
            epoch: Epoch::default(),
            answers: 100,
            proof: None,
            newest: None,
            asked_from: BootInstant::ZERO,
            silent: false,
            fit: true,
            hold: false,
            last_opened: 0,
            dropped: None,
            opened: 0,
        };
        world.carry_out(actions)?;
        world.asked_from = BootInstant::ZERO;
        Ok(world)
    }

    fn is_open(&self) -> bool {
        self.now < self.gate_deadline
    }

    fn run(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Wait { ms } => {
                self.now = self.now.saturating_add(Duration::from_millis(ms));
                self.feed(Input::Tick)
            }
            Op::Prove { age_ms, ttl_ms, token, lag } => {
                self.answers += 1;
                let proof = Proof {
                    sent_at: self.now.saturating_sub(Duration::from_millis(age_ms)),
                    ttl: Duration::from_millis(ttl_ms),
                    token,
                    sequence: self.answers - lag,
                };
                let order = (proof.sequence, proof.sent_at);
                if self.machine.view().deadline.is_some_and(|until| until <= self.now) {
                    self.asked_from = self.now;
                }
                let newer = self.newest.is_none_or(|newest| newest < order);
                if self.fit && newer && self.asked_from < proof.sent_at && token >= self.machine.view().mark {
                    self.newest = Some(order);
                    self.proof = Some(proof);
                    self.silent = false;
                }
                self.feed(Input::Proven(proof))
            }
            Op::Lose { token } => {
                let hits = token >= self.machine.view().token.unwrap_or(0).max(self.machine.view().mark);
                self.feed_and_void(hits, Input::Lost { token, loss: Loss::Deleted })
            }
            Op::StoreSilent => {
                self.silent = true;
                self.feed(Input::StoreSilent)
            }
            Op::Fence { token, hold } => {
                let current = self.machine.view().token.unwrap_or(0).max(self.machine.view().mark);
                let hits = token.is_none_or(|token| token >= current);
                self.hold |= hits && hold;
                if hits {
                    // Whatever the gate holds by now.
                    self.gate_deadline = self.gate_deadline.max(self.now.saturating_add(Duration::from_millis(1)));
                }
                self.feed_and_void(hits, Input::Fence { token, reason: "drill".into(), hold })?;
                prop_assert!(!hits || !self.is_open(), "a fence by hand left the gate as it was");
                Ok(())
            }
            Op::Unfence => {
                self.hold = false;
                self.feed(Input::Unfence { token: None })
            }
            Op::ResetMark { mark } => {
                let fenced = self.machine.view().state == StateName::Fenced;
                if fenced {
                    (self.newest, self.last_opened) = (None, 0);
                }
                self.feed_and_void(fenced, Input::ResetMark { mark })
            }
            Op::Clock { fit: true } => {
                if !self.fit {
                    (self.fit, self.asked_from) = (true, self.now);
                }
                self.feed(Input::ClockFit)
            }
            Op::Clock { fit: false } => {
                self.fit = false;
                self.feed_and_void(true, Input::ClockUnfit { why: "slewed".into() })
            }
            Op::Complete { good } => match self.effects.pop_front() {
                Some(effect) => self.complete(&effect, good),
                None => Ok(()),
            },
            Op::CompleteAgain => match self.told.first().cloned() {
                Some(input) => self.feed(input),
                None => Ok(()),
            },
            Op::RefuseRenewal => {
                let epoch = self.epoch;
                self.feed(Input::RenewRefused { epoch })
            }
            // Somebody else writes the gate, and the shell sees it.
            Op::Meddle { ms } => {
                let found = self.now.saturating_add(Duration::from_millis(ms));
                self.gate_deadline = found;
                self.feed_and_void(true, Input::GateWritten { found })?;
                prop_assert!(!self.is_open(), "what somebody else wrote was left");
                prop_assert_eq!(self.machine.view().state, StateName::Fencing, "closed without being verified");
                Ok(())
            }
            Op::Restart { clean } => self.restart(clean),
        }
    }

    /// An input after which nothing counts that was proven before.
    fn feed_and_void(&mut self, void: bool, input: Input) -> Result<(), TestCaseError> {
        if void {
            self.proof = None;
            self.asked_from = self.asked_from.max(self.now);
        }
        self.feed(input)
    }

    fn complete(&mut self, effect: &Action, good: bool) -> Result<(), TestCaseError> {
        let result = || if good { Ok(()) } else { Err("broken".to_owned()) };
        let (epoch, outcome) = match effect {
            Action::PersistMark { epoch, token } => {
                if good {
                    self.disk_mark = *token;
                }
                (*epoch, Outcome::MarkPersisted(result()))
            }
            Action::SelfTest { epoch, expect } => {
                if good && *expect == Expect::Drop {
                    self.dropped = Some(*epoch);
                }
                (*epoch, Outcome::SelfTested { expect: *expect, result: result() })
            }
            Action::Verify { epoch } if good => (*epoch, Outcome::Verified(Confirmation::Confirmed(Vec::new()))),
            Action::Verify { epoch } => (*epoch, Outcome::Verified(Confirmation::Unconfirmed(Vec::new()))),
            Action::Close { .. }
            | Action::Bar { .. }
            | Action::PersistHold { .. }
            | Action::Open { .. }
            | Action::Renew { .. }
            | Action::Record(_) => return Ok(()),
        };
        let input = Input::Done { epoch, outcome };
        self.told.push(input.clone());
        self.feed(input)
    }

    fn restart(&mut self, clean: bool) -> Result<(), TestCaseError> {
        let open = self.is_open();
        if clean {
            self.feed(Input::Shutdown)?;
            let opening = self.machine.view().state != StateName::Serving;
            prop_assert!(self.is_open() == open || opening, "a clean stop moved the gate");
        }
        let open = self.is_open();
        let found = Found {
            deadline: self.gate_deadline,
            generation: self.gate_generation,
            token: self.gate_token,
            high_water: self.disk_mark,
            hold: self.disk_hold,
        };
        self.effects.clear();
        self.told.clear();
        (self.proof, self.newest) = (None, None);
        (self.silent, self.fit, self.hold, self.dropped) = (false, true, self.disk_hold, None);
        let (machine, actions) = Machine::adopt(self.settings, self.now, found);
        self.machine = machine;
        self.carry_out(actions)?;
        self.asked_from = BootInstant::ZERO;
        prop_assert!(!open || self.is_open(), "a restart closed an open gate");
        Ok(())
    }

    fn feed(&mut self, input: Input) -> Result<(), TestCaseError> {
        let before = self.machine.view().state;
        let verified = matches!(input, Input::Done { outcome: Outcome::Verified(_), .. });
        let actions = self.machine.step(self.now, input);
        let confirmed = actions.iter().any(|action| {
            matches!(action, Action::Record(Event::Moved { from: StateName::Fencing, to: StateName::Fenced, .. }))
        });
        prop_assert!(!confirmed || verified, "a fence ended without a verification");
        prop_assert!(before != StateName::Fencing || verified || actions_keep_closed(&actions), "left the fence early");
        self.carry_out(actions)?;
        self.agrees()
    }

    fn carry_out(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for (index, action) in actions.into_iter().enumerate() {
            match &action {
                Action::Close { .. } => {
                    prop_assert_eq!(index, 0, "something came before closing");
                    self.gate_deadline = BootInstant::from_nanos(7);
                    self.asked_from = self.now;
                }
                Action::Open { epoch, generation, token, deadline } => {
                    self.may_open(*epoch, *generation, *token, *deadline)?;
                    (self.gate_deadline, self.gate_generation, self.gate_token) = (*deadline, *generation, *token);
                    self.last_opened = *token;
                    self.opened += 1;
                }
                Action::Renew { deadline, basis, .. } => {
                    self.may_renew(*deadline, *basis)?;
                    self.gate_deadline = *deadline;
                }
                Action::Bar { below } => {
                    prop_assert!(!self.is_open(), "barred through an open gate");
                    (self.gate_token, self.barred) = (*below, *below);
                }
                Action::PersistHold { held } => self.disk_hold = *held,
                Action::PersistMark { .. } | Action::SelfTest { .. } | Action::Verify { .. } | Action::Record(_) => {}
            }
            if let Some(epoch) = epoch_of(&action) {
                self.epoch = epoch;
                self.effects.push_back(action);
            }
        }
        Ok(())
    }

    fn may_open(
        &self,
        epoch: Epoch,
        generation: BootInstant,
        token: u64,
        until: BootInstant,
    ) -> Result<(), TestCaseError> {
        let proof = self.proof.filter(|proof| proof.token == token);
        let Some(proof) = proof else { return Err(TestCaseError::fail("opened without a proof of this token")) };
        prop_assert!(until > self.now, "opened on an expired proof");
        prop_assert_eq!(until, deadline(&self.settings.timing, &proof), "the deadline is not the newest proof's");
        prop_assert!(!self.hold, "opened under a hold");
        prop_assert!(self.fit, "opened by an unfit clock");
        prop_assert!(!self.is_open(), "opened an open gate");
        prop_assert!(token >= self.last_opened, "an older token opened");
        prop_assert!(token >= self.barred, "a token that was released opened");
        prop_assert_eq!(self.disk_mark, token, "opened before the mark was durable");
        prop_assert!(generation > self.gate_generation, "two openings share a generation");
        prop_assert!(generation >= self.now, "sockets from before the opening would pass");
        prop_assert_eq!(self.dropped, Some(epoch), "opened before the closed gate was seen to drop");
        Ok(())
    }

    fn may_renew(&self, until: BootInstant, basis: Basis) -> Result<(), TestCaseError> {
        prop_assert!(self.is_open(), "a fallen gate was lifted again");
        match basis {
            Basis::Proven => {
                let proof = self.proof.filter(|proof| proof.token == self.gate_token);
                let Some(proof) = proof else { return Err(TestCaseError::fail("renewed without a proof")) };
                prop_assert_eq!(until, deadline(&self.settings.timing, &proof));
            }
            Basis::HeldOver => {
                prop_assert_eq!(self.settings.when_store_lost, StoreLost::Hold, "held over against the configuration");
                prop_assert!(self.silent && self.proof.is_some(), "held over what was never proven");
                prop_assert!(until <= self.now.saturating_add(self.settings.timing.ttl_cap));
            }
            Basis::Adopted => return Err(TestCaseError::fail("adopting is no renewal")),
        }
        Ok(())
    }

    /// The machine believes of the gate what is so.
    fn agrees(&self) -> Result<(), TestCaseError> {
        let view = self.machine.view();
        match view.state {
            StateName::Serving => prop_assert_eq!(view.deadline, Some(self.gate_deadline)),
            StateName::Opening => {}
            StateName::Fenced | StateName::Fencing => prop_assert!(!self.is_open(), "fenced, and the gate is open"),
        }
        if let (true, Some(wake_at)) = (self.is_open(), self.machine.wake_at()) {
            prop_assert!(wake_at <= self.gate_deadline, "sleeps through its deadline");
        }
        Ok(())
    }
}

fn actions_keep_closed(actions: &[Action]) -> bool {
    !actions.iter().any(|action| matches!(action, Action::Open { .. } | Action::Renew { .. } | Action::SelfTest { .. }))
}

fn epoch_of(action: &Action) -> Option<Epoch> {
    match action {
        Action::PersistMark { epoch, .. }
        | Action::SelfTest { epoch, .. }
        | Action::Open { epoch, .. }
        | Action::Renew { epoch, .. }
        | Action::Verify { epoch } => Some(*epoch),
        Action::Close { .. } | Action::Bar { .. } | Action::PersistHold { .. } | Action::Record(_) => None,
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    (prop_oneof![Just(StoreLost::Fence), Just(StoreLost::Hold)], 0..500u64, 0..200_000u32).prop_map(
        |(when_store_lost, margin_ms, drift_ppm)| Settings {
            timing: Timing { ttl_cap: Duration::from_secs(10), margin: Duration::from_millis(margin_ms), drift_ppm },
            when_store_lost,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_machine(settings in settings(), ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World::new(settings)?;
        for op in ops {
            world.run(op)?;
        }
    }
}

/// The rules above say nothing if nothing opens: the same inputs must open gates often enough.
#[test]
fn inputs_reach_open_gates() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let strategy = (settings(), prop::collection::vec(op(), 60..120));
    let mut opened = 0;
    for _ in 0..200 {
        let (settings, ops) = strategy.new_tree(&mut runner).unwrap().current();
        let mut world = World::new(settings).unwrap();
        for op in ops {
            world.run(op).unwrap();
        }
        opened += u32::from(world.opened > 0);
    }
    assert!(opened > 100, "only {opened} of 200 worlds opened a gate");
}
