//! The one thread that waits for the disk, so that nobody else does.

use std::{io, sync::mpsc, thread};

use tokio::sync::oneshot;

use super::store::{HoldRecord, MarkReset, Record, StateError, Store};

/// Writes that wait for the disk, at most. A full queue means that the disk hangs; what comes then is refused at once.
const QUEUE: usize = 1024;

/// One durable change. Changes are carried out in the order in which they were handed in.
#[derive(Debug)]
pub enum Change {
    /// A lease and its token; the answer to the acquirer waits for it.
    Grant { service: String, record: Record },
    /// A lease that ended. Nobody needs to wait for it.
    Release { service: String, token: u64 },
    /// A token that is about to open a gate.
    Mark { service: String, token: u64 },
    /// A fence made by hand, or nothing: that it was removed.
    Hold { service: String, hold: Option<HoldRecord> },
    /// An operator's lowering of a mark; `who` and when are kept with it.
    ResetMark { service: String, token: u64, who: String, wall_ms: u64 },
}

/// Why a change is not durable. Nothing may be opened on its account.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error("{QUEUE} changes wait for the disk already: it hangs. Mend it; leases that are held can still be renewed")]
    Busy,
    #[error("the thread that writes the state has ended. Restart the agent")]
    Ended,
}

type Outcome = Result<(), WriteError>;

/// Hands changes to the thread; cheap to clone. The thread ends, and the state is closed, with the last of them.
#[derive(Clone, Debug)]
pub struct Writer {
    changes: mpsc::SyncSender<(Change, oneshot::Sender<Outcome>)>,
}

impl Writer {
    /// Starts the thread.
    pub fn spawn(store: Store) -> io::Result<Self> {
        let (changes, queue) = mpsc::sync_channel(QUEUE);
        thread::Builder::new().name("state".into()).spawn(move || write(store, &queue))?;
        Ok(Self { changes })
    }

    /// Hands in `change` without waiting. The receiver hears when it is durable; dropping it changes nothing.
    pub fn submit(&self, change: Change) -> oneshot::Receiver<Outcome> {
        let (answer, outcome) = oneshot::channel();
        match self.changes.try_send((change, answer)) {
            Ok(()) => {}
            Err(mpsc::TrySendError::Full((_, answer))) => _ = answer.send(Err(WriteError::Busy)),
            Err(mpsc::TrySendError::Disconnected((_, answer))) => _ = answer.send(Err(WriteError::Ended)),
        }
        outcome
    }
}

fn write(mut store: Store, queue: &mpsc::Receiver<(Change, oneshot::Sender<Outcome>)>) {
    while let Ok((change, answer)) = queue.recv() {
        let outcome = match change {
            Change::Grant { service, record } => store.grant(&service, &record),
            Change::Release { service, token } => store.release(&service, token),
            Change::Mark { service, token } => store.persist_mark(&service, token),
            Change::Hold { service, hold } => store.persist_hold(&service, hold.as_ref()),
            Change::ResetMark { service, token, who, wall_ms } => {
                store.reset_mark(&service, token, &who, wall_ms).map(log_reset)
            }
        };
        if let Err(error) = &outcome {
            tracing::error!(%error, "state not written");
        }
        // Who no longer waits has no use for the outcome.
        _ = answer.send(outcome.map_err(WriteError::from));
    }
}

fn log_reset(reset: MarkReset) {
    tracing::warn!(service = reset.service, from = reset.from, to = reset.to, who = reset.who, "mark reset");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(token: u64) -> Change {
        Change::Mark { service: "web".into(), token }
    }

    #[tokio::test]
    async fn what_was_answered_is_on_disk() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a folder on disk");
        let writer = Writer::spawn(Store::open(directory.path()).expect("new")).expect("a thread");
        let record = Record { holder: "a".into(), token: 7, ttl_ms: 5000, boot_id: "boot".into(), granted_wall_ms: 1 };
        let hold = HoldRecord { reason: "drill".into(), uid: 0, pid: 1, since_wall_ms: 1 };
        let changes = [
            Change::Grant { service: "web".into(), record },
            Change::Release { service: "web".into(), token: 7 },
            Change::Hold { service: "web".into(), hold: Some(hold.clone()) },
            mark(9),
        ];
        // Handed in at once and answered in order.
        let outcomes: Vec<_> = changes.into_iter().map(|change| writer.submit(change)).collect();
        for outcome in outcomes {
            outcome.await.expect("answered").expect("written");
        }
        let reset = Change::ResetMark { service: "web".into(), token: 2, who: "uid 0".into(), wall_ms: 3 };
        writer.submit(reset).await.expect("answered").expect("written");
        drop(writer);
        // The thread closes the file when it has seen that nobody is left.
        let mut store = loop {
            match Store::open(directory.path()) {
                Err(StateError::InUse { .. }) => thread::yield_now(),
                other => break other.expect("whole"),
            }
        };
        assert_eq!(store.leases().expect("readable"), []);
        assert_eq!(store.holds().expect("readable"), [("web".to_owned(), hold)]);
        assert_eq!(store.mark("web").expect("readable"), 2);
    }

    #[test]
    fn a_disk_that_hangs_refuses_at_once_instead_of_holding_up_the_caller() {
        let (changes, queue) = mpsc::sync_channel(1);
        let writer = Writer { changes };
        let mut first = writer.submit(mark(1));
        let refused = writer.submit(mark(2)).try_recv().expect("answered at once");
        assert!(matches!(refused, Err(WriteError::Busy)));
        first.try_recv().expect_err("still waiting for the disk");
        drop(queue);
        let refused = writer.submit(mark(3)).try_recv().expect("answered at once");
        assert!(matches!(refused, Err(WriteError::Ended)));
    }
}
