//! A table of every state and input: where it leads, and what is done on the way.

#![allow(clippy::arithmetic_side_effects, clippy::expect_used, clippy::indexing_slicing, clippy::unwrap_used)]

use std::time::Duration;

use super::*;
use crate::core::deadline::Timing;

const NOW: BootInstant = BootInstant::from_nanos(100_000_000_000);
const TOKEN: u64 = 5;

const SETTINGS: Settings = Settings {
    timing: Timing { ttl_cap: Duration::from_secs(20), margin: Duration::from_secs(1), drift_ppm: 0 },
    when_store_lost: StoreLost::Fence,
};

/// Where a row of the table starts.
#[derive(Clone, Copy, Debug)]
enum Start {
    Fenced,
    /// Fenced, and a verification is due.
    Unconfirmed,
    /// Fenced by hand, and a proof waits.
    Held,
    MarkDurable,
    ClosedDrops,
    OpenPasses,
    Serving,
    Adopted,
    Fencing,
}

const ALL: [Start; 9] = [
    Start::Fenced,
    Start::Unconfirmed,
    Start::Held,
    Start::MarkDurable,
    Start::ClosedDrops,
    Start::OpenPasses,
    Start::Serving,
    Start::Adopted,
    Start::Fencing,
];

fn after(seconds: u64) -> BootInstant {
    NOW.saturating_add(Duration::from_secs(seconds))
}

fn proof(token: u64, sequence: u64) -> Proof {
    // Each is asked for after every instant at which a machine below was fenced.
    Proof {
        sent_at: NOW.saturating_add(Duration::from_millis(sequence)),
        ttl: Duration::from_secs(10),
        token,
        sequence,
    }
}

fn found(deadline: BootInstant) -> Found {
    Found { deadline, generation: BootInstant::ZERO, token: TOKEN, high_water: 0, hold: false }
}

fn done(machine: &Machine, outcome: Outcome) -> Input {
    Input::Done { epoch: machine.epoch, outcome }
}

fn fence(hold: bool) -> Input {
    Input::Fence { token: None, reason: "drill".into(), hold }
}

fn tested(expect: Expect) -> Outcome {
    Outcome::SelfTested { expect, result: Ok(()) }
}

fn confirmed() -> Outcome {
    Outcome::Verified(Confirmation::Confirmed(Vec::new()))
}

/// A machine in that state, one second after [`NOW`].
fn machine(from: Start) -> Machine {
    let at = after(1);
    let (mut machine, _) = match from {
        Start::Adopted => Machine::adopt(SETTINGS, NOW, Found { high_water: TOKEN, ..found(after(5)) }),
        Start::Fenced
        | Start::Unconfirmed
        | Start::Held
        | Start::MarkDurable
        | Start::ClosedDrops
        | Start::OpenPasses
        | Start::Serving
        | Start::Fencing => Machine::adopt(SETTINGS, NOW, found(BootInstant::ZERO)),
    };
    let mut tell = |input: fn(&Machine) -> Input| {
        let input = input(&machine);
        machine.step(at, input);
    };
    let steps: &[fn(&Machine) -> Input] = &[
        |machine| done(machine, confirmed()),
        |_| Input::Proven(proof(TOKEN, 1)),
        |machine| done(machine, Outcome::MarkPersisted(Ok(()))),
        |machine| done(machine, tested(Expect::Drop)),
        |machine| done(machine, tested(Expect::Pass)),
    ];
    let count = match from {
        Start::Adopted | Start::Fencing => 0,
        Start::Fenced => 1,
        Start::MarkDurable => 2,
        Start::ClosedDrops => 3,
        Start::OpenPasses => 4,
        Start::Serving => 5,
        Start::Unconfirmed => {
            tell(|machine| done(machine, Outcome::Verified(Confirmation::Unconfirmed(Vec::new()))));
            0
        }
        Start::Held => {
            machine.step(NOW, fence(true));
            machine.step(at, done(&machine, confirmed()));
            machine.step(at, Input::Proven(proof(TOKEN, 1)));
            return machine;
        }
    };
    for step in &steps[..count] {
        tell(*step);
    }
    machine
}

/// What is done, apart from what is only told.
fn doings(actions: &[Action]) -> Vec<&'static str> {
    let doing = |action: &Action| match action {
        Action::Close { .. } => Some("close"),
        Action::Bar { .. } => Some("bar"),
        Action::PersistMark { .. } => Some("mark"),
        Action::PersistHold { .. } => Some("hold"),
        Action::SelfTest { expect: Expect::Drop, .. } => Some("drop?"),
        Action::SelfTest { expect: Expect::Pass, .. } => Some("pass?"),
        Action::Open { .. } => Some("open"),
        Action::Renew { .. } => Some("renew"),
        Action::Verify { .. } => Some("verify"),
        Action::Record(_) => None,
    };
    actions.iter().filter_map(doing).collect()
}

/// Tells the machine of each state the input, 2 s after [`NOW`], and holds the answers against the rows.
fn check(name: &str, input: impl Fn(&Machine) -> Input, rows: [(StateName, &[&str]); 9]) {
    check_at(name, after(2), input, rows);
}

fn check_at(name: &str, at: BootInstant, input: impl Fn(&Machine) -> Input, rows: [(StateName, &[&str]); 9]) {
    for (from, (to, expected)) in ALL.into_iter().zip(rows) {
        let mut machine = machine(from);
        let input = input(&machine);
        let actions = machine.step(at, input);
        assert_eq!((machine.view().state, doings(&actions).as_slice()), (to, expected), "{name} from {from:?}");
    }
}

use StateName::{Fenced, Fencing, Opening, Serving};

/// Nothing happens: the state in which each row starts, and no doing.
const STAYS: [(StateName, &[&str]); 9] = [
    (Fenced, &[]),
    (Fenced, &[]),
    (Fenced, &[]),
    (Opening, &[]),
    (Opening, &[]),
    (Opening, &[]),
    (Serving, &[]),
    (Serving, &[]),
    (Fencing, &[]),
];

/// A fence: an opening that has not opened needs no verification.
const FENCES: [(StateName, &[&str]); 9] = [
    (Fenced, &[]),
    (Fenced, &[]),
    (Fenced, &[]),
    (Fenced, &["close"]),
    (Fenced, &["close"]),
    (Fencing, &["close", "verify"]),
    (Fencing, &["close", "verify"]),
    (Fencing, &["close", "verify"]),
    (Fencing, &[]),
];

/// A fence anew: whatever the gate was believed to be.
const CLOSES: [(StateName, &[&str]); 9] = [(Fencing, &["close", "verify"]); 9];

fn with(
    mut rows: [(StateName, &'static [&'static str]); 9],
    changes: &[(usize, StateName, &'static [&'static str])],
) -> [(StateName, &'static [&'static str]); 9] {
    for (row, to, doings) in changes {
        rows[*row] = (*to, doings);
    }
    rows
}

// Rows by name, for the changes.
const FENCED: usize = 0;
const UNCONFIRMED: usize = 1;
const HELD: usize = 2;
const MARK_DURABLE: usize = 3;
const CLOSED_DROPS: usize = 4;
const OPEN_PASSES: usize = 5;
const SERVING: usize = 6;
const ADOPTED: usize = 7;
const FENCING: usize = 8;

#[test]
fn silence() {
    check("the store is silent", |_| Input::StoreSilent, with(STAYS, &[(UNCONFIRMED, Fenced, &["verify"])]));
}

#[test]
fn proofs() {
    let due = (UNCONFIRMED, Opening, ["mark"].as_slice());
    check(
        "the same holding",
        |_| Input::Proven(proof(TOKEN, 9)),
        with(
            STAYS,
            &[
                (FENCED, Opening, &["mark"]),
                due,
                (OPEN_PASSES, Opening, &["renew"]),
                (SERVING, Serving, &["renew"]),
                (ADOPTED, Serving, &["renew"]),
            ],
        ),
    );
    check(
        "a newer holding",
        |_| Input::Proven(proof(TOKEN + 1, 9)),
        with(
            FENCES,
            &[
                (FENCED, Opening, &["mark"]),
                due,
                (MARK_DURABLE, Opening, &["close", "mark"]),
                (CLOSED_DROPS, Opening, &["close", "mark"]),
            ],
        ),
    );
    let unchanged = with(STAYS, &[(UNCONFIRMED, Fenced, &["verify"])]);
    let late = Proof { sent_at: after(3), ..proof(TOKEN, 9) };
    check("one from the future", |_| Input::Proven(late), unchanged);
    let early = Proof { sent_at: BootInstant::from_nanos(1), ..proof(TOKEN, 0) };
    check(
        "one that has expired",
        |_| Input::Proven(early),
        with(
            FENCES,
            &[
                (UNCONFIRMED, Fenced, &["verify"]),
                (MARK_DURABLE, Opening, &[]),
                (CLOSED_DROPS, Opening, &[]),
                (OPEN_PASSES, Opening, &[]),
                (SERVING, Serving, &[]),
            ],
        ),
    );
    let short = Proof { ttl: Duration::from_millis(500), ..proof(TOKEN, 9) };
    check("a TTL too short", |_| Input::Proven(short), with(FENCES, &[(UNCONFIRMED, Fenced, &["verify"])]));
}

#[test]
fn losses_and_commands() {
    let fences = with(FENCES, &[(UNCONFIRMED, Fenced, &["verify"])]);
    let stays = with(STAYS, &[(UNCONFIRMED, Fenced, &["verify"])]);
    for loss in [Loss::Deleted, Loss::Expired, Loss::OtherHolder] {
        check("the holding is lost", |_| Input::Lost { token: TOKEN, loss }, fences);
    }
    let barred = [
        (Fenced, &["bar"][..]),
        (Fenced, &["bar", "verify"]),
        (Fenced, &["bar"]),
        (Fenced, &["close", "bar"]),
        (Fenced, &["close", "bar"]),
        (Fencing, &["close", "verify", "bar"]),
        (Fencing, &["close", "verify", "bar"]),
        (Fencing, &["close", "verify", "bar"]),
        (Fencing, &["bar"]),
    ];
    check("the holding is given back", |_| Input::Lost { token: TOKEN, loss: Loss::Released }, barred);
    check("by hand", |_| fence(false), CLOSES);
    check("by hand, held", |_| fence(true), [(Fencing, &["close", "verify", "hold"]); 9]);
    // The gate bears the token of its last holding: an agent that has just started knows it too.
    let before = |command: fn() -> Input| check("a token of before", move |_| command(), stays);
    before(|| Input::Lost { token: TOKEN - 1, loss: Loss::Deleted });
    before(|| Input::Fence { token: Some(TOKEN - 1), reason: String::new(), hold: true });
    let unfenced: [(StateName, &[&str]); 9] = [
        (Fenced, &["hold"]),
        (Fenced, &["hold", "verify"]),
        (Opening, &["hold", "mark"]),
        (Opening, &["hold"]),
        (Opening, &["hold"]),
        (Opening, &["hold"]),
        (Serving, &["hold"]),
        (Serving, &["hold"]),
        (Fencing, &["hold"]),
    ];
    check("unfence", |_| Input::Unfence { token: None }, unfenced);
    check(
        "reset the mark",
        |_| Input::ResetMark { mark: 1 },
        with(
            STAYS,
            &[
                (FENCED, Fenced, &["mark", "bar"]),
                (UNCONFIRMED, Fenced, &["mark", "bar", "verify"]),
                (HELD, Fenced, &["mark", "bar"]),
            ],
        ),
    );
}

#[test]
fn a_gate_that_somebody_else_wrote() {
    let written = |_: &Machine| Input::GateWritten { found: after(1000) };
    check("while it should be closed or open", written, CLOSES);
    // One that has fallen meanwhile is closed once, first, and still verified.
    check_at("past every deadline", after(60), written, CLOSES);
    check_at("by hand, past every deadline", after(60), |_| fence(false), CLOSES);
    for from in ALL {
        let mut machine = machine(from);
        let actions = machine.step(after(2), written(&machine));
        assert!(matches!(actions.first(), Some(Action::Close { reason: Reason::GateTaken })), "{from:?}: {actions:?}");
        assert!(actions.contains(&Action::Record(Event::GateWritten { found: after(1000) })), "{from:?}: {actions:?}");
        assert_eq!(machine.view().reason, Some(Reason::GateTaken), "{from:?}");
    }
}

#[test]
fn the_clock_and_the_end() {
    let fences = with(FENCES, &[(UNCONFIRMED, Fenced, &["verify"])]);
    let stays = with(STAYS, &[(UNCONFIRMED, Fenced, &["verify"])]);
    check("unfit", |_| Input::ClockUnfit { why: "slewed".into() }, fences);
    check("fit", |_| Input::ClockFit, stays);
    check(
        "the end",
        |_| Input::Shutdown,
        with(
            stays,
            &[
                (MARK_DURABLE, Fenced, &["close"]),
                (CLOSED_DROPS, Fenced, &["close"]),
                (OPEN_PASSES, Fencing, &["close", "verify"]),
            ],
        ),
    );
    check_at("past every deadline", after(60), |_| Input::Tick, fences);
    // Even of a proof that would have renewed.
    let fresh = Proof { sent_at: after(60), ..proof(TOKEN, 9) };
    check_at(
        "a renewal past every deadline",
        after(61),
        |_| Input::Proven(fresh),
        with(
            fences,
            &[
                (FENCED, Opening, &["mark"]),
                (UNCONFIRMED, Opening, &["mark"]),
                (MARK_DURABLE, Fenced, &["close"]),
                (CLOSED_DROPS, Fenced, &["close"]),
            ],
        ),
    );
}

#[test]
fn outcomes() {
    let stays = with(STAYS, &[(UNCONFIRMED, Fenced, &["verify"])]);
    let failed = || Err("broken".to_owned());
    check(
        "durable",
        |machine| done(machine, Outcome::MarkPersisted(Ok(()))),
        with(stays, &[(MARK_DURABLE, Opening, &["drop?"])]),
    );
    check(
        "not durable",
        |machine| done(machine, Outcome::MarkPersisted(failed())),
        with(stays, &[(MARK_DURABLE, Fenced, &["close"])]),
    );
    check(
        "drops",
        |machine| done(machine, tested(Expect::Drop)),
        with(stays, &[(CLOSED_DROPS, Opening, &["open", "pass?"])]),
    );
    check("passes", |machine| done(machine, tested(Expect::Pass)), with(stays, &[(OPEN_PASSES, Serving, &[])]));
    let test_fails = |expect| {
        move |machine: &Machine| done(machine, Outcome::SelfTested { expect, result: Err("broken".to_owned()) })
    };
    check("does not drop", test_fails(Expect::Drop), with(stays, &[(CLOSED_DROPS, Fenced, &["close"])]));
    check("does not pass", test_fails(Expect::Pass), with(stays, &[(OPEN_PASSES, Fencing, &["close", "verify"])]));
    check("confirmed", |machine| done(machine, confirmed()), with(STAYS, &[(FENCING, Fenced, &[])]));
    check(
        "refused",
        |machine| Input::RenewRefused { epoch: machine.epoch },
        with(FENCES, &[(UNCONFIRMED, Fenced, &["verify"])]),
    );
    for input in [
        Input::RenewRefused { epoch: Epoch(99) },
        Input::Done { epoch: Epoch(99), outcome: confirmed() },
        Input::Done { epoch: Epoch(99), outcome: tested(Expect::Drop) },
    ] {
        check("of another epoch", |_| input.clone(), stays);
    }
}

#[test]
fn a_caller_whose_time_goes_back_is_held_to_the_latest() {
    let mut machine = machine(Start::Serving);
    machine.step(after(60), Input::Tick);
    assert_eq!(machine.view().state, Fencing);
    machine.step(NOW, done(&machine, confirmed()));
    assert_eq!(machine.view().since, after(60));
}

#[test]
fn retries_grow_to_a_bound() {
    let mut machine = machine(Start::Unconfirmed);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let at = machine.wake_at().expect("an unconfirmed fence is verified again");
        pauses.push(at.saturating_since(machine.now).as_secs());
        machine.step(at, Input::Tick);
        assert_eq!(machine.wake_at(), None, "one verification at a time");
        machine.step(at, done(&machine, Outcome::Verified(Confirmation::Failed(Vec::new()))));
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
}

#[test]
fn a_change_of_configuration_counts_from_the_next_proof() {
    let mut machine = machine(Start::Serving);
    let before = machine.view().deadline;
    let timing = Timing { margin: Duration::from_secs(2), ..SETTINGS.timing };
    machine.configure(Settings { timing, ..SETTINGS });
    assert_eq!(machine.view().deadline, before);
    machine.step(after(2), Input::Proven(proof(TOKEN, 9)));
    assert_eq!(machine.view().deadline, Some(deadline(&timing, &proof(TOKEN, 9))));
}
