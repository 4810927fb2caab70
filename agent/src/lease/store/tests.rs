//! The state on a real disk: crashes, damage, a full disk.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use super::{files::TMPFS_MAGIC, *};
use crate::{core::time::BootInstant, lease::local::LocalLeases};

const STATE_VARIABLE: &str = "PORTCULLIS_TEST_STATE";

/// The temporary folder proper may be a tmpfs, which the store refuses.
fn directory() -> TempDir {
    tempfile::tempdir_in("/var/tmp").expect("a folder on disk")
}

fn record(token: u64) -> Record {
    Record { holder: "a".into(), token, ttl_ms: 5000, boot_id: "boot".into(), granted_wall_ms: 1 }
}

#[test]
fn what_was_written_is_there_after_opening_again() {
    let directory = directory();
    let state = directory.path().join("below/state");
    let mut store = Store::open(&state).expect("new");
    store.grant("web", &record(7)).expect("written");
    store.grant("db", &record(9)).expect("written");
    store.persist_mark("web", 6).expect("written");
    store.persist_mark("etcd", 3).expect("written");
    store.release("db", 8).expect("another's token deletes nothing");
    drop(store);

    let mut store = Store::open(&state).expect("whole");
    let leases = store.leases().expect("readable");
    assert_eq!(leases, [("db".to_owned(), record(9)), ("web".to_owned(), record(7))]);
    let marks = store.marks().expect("readable");
    assert_eq!(marks, [("db".to_owned(), 9), ("etcd".to_owned(), 3), ("web".to_owned(), 7)]);
    store.release("db", 9).expect("written");
    assert_eq!(store.leases().expect("readable"), [("web".to_owned(), record(7))]);
    assert_eq!(store.mark("db").expect("readable"), 9, "the mark outlives the lease");
}

#[test]
fn a_mark_goes_down_only_by_a_recorded_reset() {
    let directory = directory();
    let mut store = Store::open(directory.path()).expect("new");
    store.persist_mark("web", 100).expect("written");
    store.persist_mark("web", 50).expect("no change");
    assert_eq!(store.mark("web").expect("readable"), 100);
    let reset = store.reset_mark("web", 10, "uid 0", 5).expect("written");
    let expected = MarkReset { service: "web".into(), from: 100, to: 10, who: "uid 0".into(), wall_ms: 5 };
    assert_eq!(reset, expected);
    assert_eq!(store.mark("web").expect("readable"), 10);
    store.reset_mark("web", 1, "uid 0", 6).expect("written");
    assert_eq!(store.resets().expect("readable").len(), 2);
}

#[test]
fn a_reset_mark_stays_reset_over_a_restart() {
    let directory = directory();
    let mut store = Store::open(directory.path()).expect("new");
    let record = Record { holder: "a".into(), token: 100, ttl_ms: 5000, boot_id: "boot".into(), granted_wall_ms: 1 };
    store.grant("web", &record).expect("written");
    store.grant("db", &record).expect("written");
    store.reset_mark("web", 10, "uid 0", 5).expect("written");
    drop(store);
    let mut store = Store::open(directory.path()).expect("whole");
    let (leases, marks) = (store.leases().expect("readable"), store.marks().expect("readable"));
    assert_eq!(leases, [("db".to_owned(), record)]);
    let restored = LocalLeases::restore(leases, marks, "boot", BootInstant::from_nanos(1));
    assert_eq!((restored.mark("web"), restored.mark("db")), (10, 100));
}

#[test]
fn a_fence_made_by_hand_outlives_the_agent_until_it_is_removed() {
    let directory = directory();
    let mut store = Store::open(directory.path()).expect("new");
    let hold = HoldRecord { reason: "drill".into(), uid: 0, pid: 7, since_wall_ms: 5 };
    store.persist_hold("web", Some(&hold)).expect("written");
    drop(store);
    let mut store = Store::open(directory.path()).expect("whole");
    assert_eq!(store.holds().expect("readable"), [("web".to_owned(), hold)]);
    store.persist_hold("web", None).expect("written");
    assert_eq!(store.holds().expect("readable"), []);
}

#[test]
fn a_second_opening_is_refused() {
    let directory = directory();
    let _store = Store::open(directory.path()).expect("new");
    assert!(matches!(Store::open(directory.path()), Err(StateError::InUse { .. })));
}

#[test]
fn a_lost_or_exchanged_file_is_not_taken_for_a_new_one() {
    let (one, other) = (directory(), directory());
    drop(Store::open(one.path()).expect("new"));
    drop(Store::open(other.path()).expect("new"));
    let file = one.path().join("state.redb");
    fs::rename(other.path().join("state.redb"), &file).expect("moved");
    assert!(matches!(Store::open(one.path()), Err(StateError::Foreign { .. })));
    fs::remove_file(&file).expect("removed");
    assert!(matches!(Store::open(one.path()), Err(StateError::Missing { .. })));
    assert!(!file.exists(), "nothing may be made in its place");
    // What the message tells the operator to do.
    fs::remove_file(one.path().join("state.id")).expect("removed");
    Store::open(one.path()).expect("a fresh start on the operator's word");
}

#[test]
fn a_crash_while_the_file_is_made_leaves_nothing_in_the_way() {
    let directory = directory();
    fs::write(directory.path().join("state.redb.new"), b"half").expect("written");
    let mut store = Store::open(directory.path()).expect("made again");
    store.persist_mark("web", 5).expect("written");
    drop(store);
    // The crash came between the two files.
    fs::remove_file(directory.path().join("state.id")).expect("removed");
    let mut store = Store::open(directory.path()).expect("adopted");
    assert_eq!(store.mark("web").expect("readable"), 5);
    assert!(directory.path().join("state.id").exists());
}

#[test]
fn a_file_that_is_no_state_is_damaged() {
    let directory = directory();
    for content in [&b""[..], b"x", b"#!/bin/sh\nexit 0\n", &[0; 8192]] {
        fs::write(directory.path().join("state.redb"), content).expect("written");
        let outcome = Store::open(directory.path());
        assert!(matches!(outcome, Err(StateError::Corrupt { .. })), "{:?}: {outcome:?}", content.get(..8));
    }
}

/// Opens what is there; true if it is the whole state, false if it was refused. Anything between the two is a failure.
fn whole_or_refused(directory: &Path) -> bool {
    let opened = Store::open(directory).and_then(|mut store| Ok((store.marks()?, store.leases()?)));
    match opened {
        Ok((marks, leases)) => {
            let names: Vec<String> = (0..50).map(|number| format!("service-{number:02}")).collect();
            let expected: Vec<_> = names.iter().map(|name| (name.clone(), record(7))).collect();
            assert_eq!(leases, expected, "something else was taken for the state");
            assert_eq!(marks, names.into_iter().map(|name| (name, 7)).collect::<Vec<_>>());
            true
        }
        Err(StateError::Corrupt { .. }) => false,
        Err(other) => panic!("{other}"),
    }
}

fn damaged_copies(damage: impl Fn(&[u8], usize) -> Vec<u8>, positions: impl Fn(usize) -> Vec<usize>) {
    let (original, copy) = (directory(), directory());
    let mut store = Store::open(original.path()).expect("new");
    for number in 0..50 {
        store.grant(&format!("service-{number:02}"), &record(7)).expect("written");
    }
    drop(store);
    let bytes = fs::read(original.path().join("state.redb")).expect("readable");
    fs::copy(original.path().join("state.id"), copy.path().join("state.id")).expect("copied");
    let mut refused = 0;
    for position in positions(bytes.len()) {
        fs::write(copy.path().join("state.redb"), damage(&bytes, position)).expect("written");
        refused += usize::from(!whole_or_refused(copy.path()));
    }
    assert!(refused > 0, "nothing was ever refused: the damage does no damage");
    fs::write(copy.path().join("state.redb"), &bytes).expect("written");
    assert!(whole_or_refused(copy.path()), "the undamaged copy must open");
}

#[test]
fn a_truncated_file_is_refused_at_every_512th_byte() {
    damaged_copies(|bytes, length| bytes[..length].to_vec(), |length| (0..length).step_by(512).collect());
}

#[test]
fn a_flipped_byte_is_refused_or_does_not_matter() {
    let flip = |bytes: &[u8], position: usize| {
        let mut damaged = bytes.to_vec();
        damaged[position] ^= 0x55;
        damaged
    };
    // The header byte by byte, the pages sparsely, with a step that meets every offset within a page in time.
    damaged_copies(flip, |length| (0..512).chain((512..length).step_by(509)).collect());
}

#[test]
fn volatile_file_systems_are_refused() {
    assert!(check_state_dir(Path::new("/var/tmp")).is_ok());
    assert!(check_state_dir(Path::new("/var/tmp/not/there/yet")).is_ok());
    let shm = Path::new("/dev/shm");
    // Where /dev/shm is no tmpfs there is nothing to look at.
    if rustix::fs::statfs(shm).is_ok_and(|stat| stat.f_type.cast_unsigned() == TMPFS_MAGIC) {
        assert!(matches!(check_state_dir(shm), Err(StateError::Volatile { kind: "tmpfs", .. })));
        assert!(matches!(Store::open(&shm.join("portcullis-not-made")), Err(StateError::Volatile { .. })));
        assert!(!shm.join("portcullis-not-made").exists());
    }
    assert!(matches!(check_state_dir(Path::new("/etc/passwd")), Err(StateError::NotADirectory { .. })));
}

/// A child process of this test, killed and waited for whatever happens.
struct Kid(Child);

impl Drop for Kid {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Runs the test named `name` of this file in a process of its own, where [`STATE_VARIABLE`] tells it what it is.
fn kid(name: &str, state: &Path) -> Kid {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "--nocapture", &format!("lease::store::tests::{name}")]).env(STATE_VARIABLE, state);
    Kid(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("started"))
}

/// In a process of its own: takes leases and lets them go, for ever, and says which tokens were answered.
#[test]
fn kid_that_is_killed() {
    let Some(state) = std::env::var_os(STATE_VARIABLE) else { return };
    let mut store = Store::open(Path::new(&state)).expect("opens after every kill");
    let mut token = store.mark("web").expect("readable");
    loop {
        token += 1;
        store.grant("web", &record(token)).expect("written");
        println!("answered {token}");
        if token.is_multiple_of(3) {
            store.release("web", token).expect("written");
        }
        store.persist_mark("other", token).expect("written");
    }
}

#[test]
fn no_kill_loses_a_token_that_was_answered() {
    let directory = directory();
    drop(Store::open(directory.path()).expect("new"));
    let mut answered = 0;
    for round in 0..40_u64 {
        let mut kid = kid("kid_that_is_killed", directory.path());
        let lines = BufReader::new(kid.0.stdout.take().expect("piped"));
        let patience = Duration::from_micros(round * 7919 % 30_000);
        let mut first = None;
        for line in lines.lines().map_while(Result::ok) {
            let Some(token) = line.rsplit_once("answered ").and_then(|(_, token)| token.parse::<u64>().ok()) else {
                continue;
            };
            assert!(token > answered, "{token} was answered after {answered}");
            answered = token;
            // From the first answer on the kid is at work; it is killed at some instant within that.
            let (since, killed) = first.get_or_insert_with(|| (std::time::Instant::now(), false));
            if since.elapsed() >= patience && !*killed {
                kid.0.kill().expect("alive");
                *killed = true;
            }
        }
        assert!(first.is_some(), "the kid never answered");
        drop(kid);
        let mut store = Store::open(directory.path()).expect("opens after a kill");
        let mark = store.mark("web").expect("readable");
        assert!(mark >= answered, "the disk says {mark}, but {answered} was answered");
        assert!(mark <= answered + 1, "nobody took {mark}");
    }
    assert!(answered > 100, "only {answered} tokens: the kills came too early to prove anything");
}

/// In a process of its own: files cannot grow beyond what they are.
#[test]
fn kid_with_a_full_disk() {
    let Some(state) = std::env::var_os(STATE_VARIABLE) else { return };
    let state = Path::new(&state);
    let mut store = Store::open(state).expect("opens");
    let length = fs::metadata(state.join("state.redb")).expect("there").len();
    // SAFETY: ignoring a signal runs no handler; the limit then shows as EFBIG instead of ending the process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = |bytes| {
        let limit = rustix::process::Rlimit { current: bytes, maximum: None };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).expect("may lower its limit");
    };
    limit(Some(length));
    let (mut granted, mut refused) = (0, 0);
    for number in 0..2000_u64 {
        match store.grant(&format!("{number:0200}"), &record(7)) {
            Ok(()) => granted += 1,
            Err(StateError::Write { .. } | StateError::Io { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        if refused == 3 {
            break;
        }
    }
    assert_eq!(refused, 3, "the disk never filled up");
    limit(None);
    // With room again the same store goes on, and what was answered is all there.
    store.grant("after", &record(8)).expect("written");
    assert_eq!(store.leases().expect("readable").iter().filter(|(_, record)| record.token == 7).count(), granted);
    println!("all of it");
}

#[test]
fn a_full_disk_is_an_error_and_leaves_the_old_state() {
    let directory = directory();
    drop(Store::open(directory.path()).expect("new"));
    let mut kid = kid("kid_with_a_full_disk", directory.path());
    let mut said = String::new();
    kid.0.stdout.take().expect("piped").read_to_string(&mut said).expect("readable");
    assert!(kid.0.wait().expect("ended").success() && said.contains("all of it"), "{said}");
    let mut store = Store::open(directory.path()).expect("opens");
    assert_eq!(store.mark("after").expect("readable"), 8);
}
