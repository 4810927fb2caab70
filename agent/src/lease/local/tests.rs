//! Local leases one by one, and against a model.

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_secs(5);

fn at(ms: u64) -> BootInstant {
    BootInstant::from_nanos(ms * 1_000_000)
}

fn reserve(leases: &mut LocalLeases, holder: &str, now: BootInstant, wall_ms: u64) -> Reservation {
    match leases.acquire("web", holder, TTL, now, wall_ms) {
        Ok(Acquire::Reserved(reservation)) => reservation,
        other => panic!("{other:?}"),
    }
}

fn held(leases: &mut LocalLeases, now: BootInstant) -> bool {
    matches!(leases.acquire("web", "other", TTL, now, 0), Ok(Acquire::Held { .. }))
}

#[test]
fn a_proof_counts_from_the_request_however_long_the_disk_takes() {
    let mut leases = LocalLeases::default();
    let reservation = reserve(&mut leases, "a", at(1000), 7);
    let proof = leases.granted(&reservation, at(3000)).expect("in time");
    assert_eq!(proof, Proof { sent_at: at(1000), ttl: TTL, token: 7, sequence: 1 });
    assert_eq!(leases.holding("web", at(5999)), Some(("a", 7)));
    assert_eq!(leases.holding("web", at(6000)), None);
}

#[test]
fn a_disk_slower_than_the_ttl_grants_nothing() {
    let mut leases = LocalLeases::default();
    let reservation = reserve(&mut leases, "a", at(0), 7);
    assert!(held(&mut leases, at(9000)), "nobody else may have it while the token is on its way to the disk");
    assert_eq!(leases.granted(&reservation, at(9000)), Err(Lost));
    assert_eq!(reserve(&mut leases, "b", at(9000), 7).token, 8);
}

#[test]
fn a_token_that_was_not_written_is_never_used_again() {
    let mut leases = LocalLeases::default();
    let reservation = reserve(&mut leases, "a", at(0), 7);
    assert_eq!(leases.renew("web", 7, at(1)), Err(Lost), "nobody has heard of the token yet");
    assert_eq!(leases.release("web", 7), Err(Lost));
    leases.refused(&reservation);
    assert_eq!(leases.holding("web", at(1)), None);
    assert_eq!(reserve(&mut leases, "a", at(1), 7).token, 8);
}

#[test]
fn the_token_follows_the_wall_clock_but_never_goes_back() {
    let mut leases = LocalLeases::default();
    for (wall_ms, token) in [(1000, 1000), (900, 1001), (0, 1002), (5000, 5000)] {
        let reservation = reserve(&mut leases, "a", at(0), wall_ms);
        assert_eq!(reservation.token, token);
        leases.granted(&reservation, at(0)).expect("in time");
        leases.release("web", token).expect("held");
    }
    assert_eq!(leases.mark("web"), 5000);
}

#[test]
fn a_reset_lowers_the_next_token_and_ends_the_lease() {
    let mut leases = LocalLeases::default();
    let held = reserve(&mut leases, "a", at(0), 1000);
    leases.granted(&held, at(0)).expect("in time");
    assert_eq!(leases.reset_mark("web", 10).map(|ended| ended.token), Some(1000));
    assert_eq!(leases.renew("web", 1000, at(1)), Err(Lost));
    let awaited = reserve(&mut leases, "b", at(1), 0);
    assert_eq!(awaited.token, 11);
    leases.reset_mark("web", 5);
    assert_eq!(leases.granted(&awaited, at(1)), Err(Lost), "its token is on its way to the disk, and void");
    assert_eq!(leases.mark("web"), 5);
}

#[test]
fn the_last_token_is_refused_instead_of_wrapping() {
    let mut leases = LocalLeases::restore([], [("web".to_owned(), u64::MAX)], "boot", at(0));
    assert_eq!(leases.acquire("web", "a", TTL, at(0), 1), Err(TokensExhausted));
}

#[test]
fn a_renewal_extends_and_a_late_one_is_lost() {
    let mut leases = LocalLeases::default();
    let reservation = reserve(&mut leases, "a", at(0), 7);
    leases.granted(&reservation, at(0)).expect("in time");
    assert_eq!(leases.renew("web", 7, at(4000)).map(|proof| proof.sent_at), Ok(at(4000)));
    assert_eq!(leases.renew("web", 6, at(4000)), Err(Lost));
    assert_eq!(leases.next_expiry(), Some(at(9000)));
    assert_eq!(leases.renew("web", 7, at(9000)), Err(Lost), "at the instant of expiry it is over");
    let ended = Ended { service: "web".into(), holder: "a".into(), token: 7 };
    assert_eq!(leases.expire(at(8999)), []);
    assert_eq!(leases.expire(at(9000)), [ended]);
}

#[test]
fn after_a_restart_a_lease_of_this_boot_lives_one_ttl_and_one_of_another_not_at_all() {
    let record = |boot_id: &str| Record {
        holder: "a".into(),
        token: 7,
        ttl_ms: 5000,
        boot_id: boot_id.into(),
        granted_wall_ms: 7,
    };
    let records = [("web".to_owned(), record("this")), ("old".to_owned(), record("earlier"))];
    let mut leases = LocalLeases::restore(records, [], "this", at(60_000));
    assert!(held(&mut leases, at(64_999)));
    assert_eq!(leases.holding("old", at(60_000)), None);
    assert_eq!(leases.mark("old"), 7, "the record speaks for the mark as well");
    assert_eq!(leases.renew("web", 7, at(64_999)).map(|proof| proof.sent_at), Ok(at(64_999)));
    assert!(!held(&mut leases, at(70_000)));
}

/// What anybody may do, in any order.
#[derive(Clone, Debug)]
enum Step {
    Acquire { holder: u8, wall_ms: u64 },
    Durable { succeeds: bool },
    Renew { back: u64 },
    Release { back: u64 },
    Pass { ms: u64 },
    Expire,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..3_u8, 0..10_u64).prop_map(|(holder, wall_ms)| Step::Acquire { holder, wall_ms }),
        3 => prop::bool::weighted(0.8).prop_map(|succeeds| Step::Durable { succeeds }),
        3 => (0..2_u64).prop_map(|back| Step::Renew { back }),
        1 => (0..2_u64).prop_map(|back| Step::Release { back }),
        3 => (0..4000_u64).prop_map(|ms| Step::Pass { ms }),
        1 => Just(Step::Expire),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    /// The model: the disk's contents, the tokens that were answered, and the last instant to which a holder may
    /// believe itself holding.
    #[test]
    fn at_most_one_holding_and_ever_larger_tokens(steps in prop::collection::vec(step(), 1..80)) {
        let mut leases = LocalLeases::default();
        let mut now = 1_u64;
        let mut disk: Option<Record> = None;
        let mut disk_mark = 0;
        let mut under_way: Option<Reservation> = None;
        let mut answered = 0;
        let mut believed_until = 0;
        let mut sequence = 0;
        for step in steps {
            match step {
                Step::Acquire { holder, wall_ms } => {
                    let outcome = leases.acquire("web", &holder.to_string(), TTL, at(now), wall_ms);
                    if let Ok(Acquire::Reserved(reservation)) = outcome {
                        prop_assert!(under_way.is_none(), "one reservation at a time");
                        prop_assert!(now >= believed_until, "somebody still believes to hold it");
                        prop_assert!(reservation.token > answered && reservation.token > disk_mark);
                        prop_assert!(reservation.token >= wall_ms);
                        under_way = Some(reservation);
                    }
                }
                Step::Durable { succeeds } => {
                    let Some(reservation) = under_way.take() else { continue };
                    // A write that failed may have reached the disk all the same.
                    disk = Some(reservation.record("boot", 0));
                    disk_mark = reservation.token;
                    if !succeeds {
                        leases.refused(&reservation);
                    } else if let Ok(proof) = leases.granted(&reservation, at(now)) {
                        prop_assert!(proof.sequence > sequence && proof.token > answered);
                        (sequence, answered) = (proof.sequence, proof.token);
                        believed_until = reservation.asked_at.saturating_add(TTL).as_nanos() / 1_000_000;
                    }
                }
                Step::Renew { back } => {
                    if let Ok(proof) = leases.renew("web", answered.saturating_sub(back), at(now)) {
                        prop_assert_eq!(back, 0);
                        prop_assert!(proof.sequence > sequence);
                        sequence = proof.sequence;
                        believed_until = now + 5000;
                    }
                }
                Step::Release { back } => {
                    if leases.release("web", answered.saturating_sub(back)).is_ok() {
                        prop_assert_eq!(back, 0);
                        believed_until = 0;
                        disk = None;
                    }
                }
                Step::Pass { ms } => now += ms,
                Step::Expire => {
                    for ended in leases.expire(at(now)) {
                        prop_assert!(now >= believed_until, "{ended:?} ended early");
                    }
                }
                Step::Restart => {
                    // What was under way may or may not have reached the disk; here it did not.
                    under_way = None;
                    let records = disk.clone().map(|record| ("web".to_owned(), record));
                    leases = LocalLeases::restore(records, [("web".to_owned(), disk_mark)], "boot", at(now));
                    sequence = 0;
                }
            }
        }
    }
}
