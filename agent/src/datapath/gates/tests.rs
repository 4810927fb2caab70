#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::{sync::atomic::AtomicBool, time::Duration};

use super::*;

fn gate(table: &Arc<Table>) -> Gate {
    let slot = Slot(7);
    let last = table.cell(slot).deadline.load(Ordering::Acquire);
    Gate { table: Arc::clone(table), slot, last }
}

fn later(seconds: u64) -> BootInstant {
    boot_now().saturating_add(Duration::from_secs(seconds + 10))
}

#[test]
fn opens_renews_and_closes() {
    let table = Arc::new(Table::anonymous());
    let mut gate = gate(&table);
    assert!(gate.view().is_fenced());
    let generation = boot_now();
    gate.open(generation, 42, later(0)).unwrap();
    let view = gate.view();
    assert!(view.is_open(boot_now()));
    assert_eq!((view.generation, view.token), (generation, 42));
    gate.renew(later(60)).unwrap();
    gate.renew(later(1)).unwrap();
    let first = gate.close();
    let second = gate.close();
    assert!(first < second && second < FENCE_NUMBERS);
    assert_eq!(gate.renew(later(0)), Err(NotOurs::NotOpen { fence: second }));
    assert!(gate.view().is_fenced());
}

#[test]
fn an_opening_decided_before_a_fence_fails() {
    let table = Arc::new(Table::anonymous());
    let (mut ours, mut other) = (gate(&table), gate(&table));
    let fence = other.close();
    let refused = ours.open(boot_now(), 1, later(0));
    assert_eq!(refused, Err(NotOurs::Changed { expected: 0, found: fence }));
    assert!(ours.view().is_fenced());
}

#[test]
fn a_renewal_after_a_fence_fails() {
    let table = Arc::new(Table::anonymous());
    let mut ours = gate(&table);
    ours.open(boot_now(), 1, later(0)).unwrap();
    let fence = gate(&table).close();
    assert!(matches!(ours.renew(later(5)), Err(NotOurs::Changed { found, .. }) if found == fence));
    assert_eq!(ours.view().deadline, fence);
}

#[test]
fn a_gate_that_fell_is_not_reopened_by_a_late_renewal() {
    let table = Arc::new(Table::anonymous());
    let mut ours = gate(&table);
    let deadline = boot_now();
    ours.open(deadline, 1, deadline).unwrap();
    assert_eq!(ours.renew(later(5)), Err(NotOurs::Lapsed { deadline }));
    assert!(ours.view().is_fenced());
    ours.open(boot_now(), 2, later(0)).unwrap();
}

#[test]
fn deadlines_that_would_be_fence_numbers_are_refused() {
    let table = Arc::new(Table::anonymous());
    let mut ours = gate(&table);
    let early = BootInstant::from_nanos(FENCE_NUMBERS - 1);
    assert_eq!(ours.open(boot_now(), 1, early), Err(NotOurs::TooEarly { deadline: early }));
    ours.open(boot_now(), 1, later(0)).unwrap();
    assert_eq!(ours.renew(early), Err(NotOurs::TooEarly { deadline: early }));
}

#[test]
fn fence_numbers_start_above_those_found() {
    let table = Arc::new(Table::anonymous());
    table.cells()[3].deadline.store(900, Ordering::Release);
    table.cells()[4].deadline.store(FENCE_NUMBERS + 5, Ordering::Release);
    let again = std::mem::ManuallyDrop::new(Table::over(table.cells.as_ptr().cast()).unwrap());
    assert_eq!(again.next_fence(), 901);
    again.last_fence.store(FENCE_NUMBERS - 2, Ordering::Release);
    assert_eq!(again.next_fence(), FENCE_NUMBERS - 1);
    assert_eq!(again.next_fence(), 1);
}

#[test]
fn twenty_thousand_races_undo_no_fence() {
    const ROUNDS: u64 = 20_000;
    let table = Arc::new(Table::anonymous());
    // Phases of a round: 0 the gate is closed, 1 it is open and renewed, 2 the renewer saw the fence.
    let (phase, closed) = (AtomicU64::new(0), AtomicBool::new(false));
    let wait_for = |wanted| {
        while phase.load(Ordering::Acquire) != wanted {
            std::thread::yield_now();
        }
    };
    let undone = std::thread::scope(|scope| {
        let closer = scope.spawn(|| {
            let (mut gate, mut undone) = (gate(&table), 0u64);
            for _ in 0..ROUNDS {
                wait_for(1);
                let fence = gate.close();
                closed.store(true, Ordering::Release);
                wait_for(2);
                undone += u64::from(gate.view().deadline != fence);
                closed.store(false, Ordering::Release);
                phase.store(0, Ordering::Release);
            }
            undone
        });
        let mut ours = gate(&table);
        let far = later(3_600).as_nanos();
        for _ in 0..ROUNDS {
            ours.close();
            ours.open(boot_now(), 1, BootInstant::from_nanos(far)).unwrap();
            phase.store(1, Ordering::Release);
            for renewal in 0.. {
                let over = closed.load(Ordering::Acquire);
                // A renewal that succeeds after the fence has undone it; the closer counts it.
                if ours.renew(BootInstant::from_nanos(far + renewal)).is_err() || over {
                    break;
                }
            }
            phase.store(2, Ordering::Release);
            wait_for(0);
        }
        closer.join().unwrap()
    });
    assert_eq!(undone, 0);
}
