//! Lease stores. Each gives proofs of a holding; what a proof is worth in time is the core's business.
//!
//! * [`local`]: leases kept by this agent, in memory; pure, time passed in.
//! * [`store`]: what of them must survive a crash, on disk; every call may block.
//! * [`writer`]: the one thread that calls the disk.
//!
//! Nothing that waits for a disk can delay a fence: the tables in memory answer renewals, releases and expiry, and the
//! disk stands only between an acquisition and its answer. A disk that hangs stops new holdings and nothing else.

use std::time::Duration;

use crate::core::time::BootInstant;

pub mod local;
pub mod store;
pub mod writer;

/// What every store can give, and the only thing that may move a deadline forward: evidence that the lease was held.
///
/// `sent_at` is a lower bound on the instant at which the store accepted the renewal: when it was *sent*, never when the
/// answer arrived. A proof that was long in coming is therefore worth less, and never more, than it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// On the boot clock of this host, in this boot.
    pub sent_at: BootInstant,
    /// What the store promised from `sent_at` on, before drift and margin are taken off.
    pub ttl: Duration,
    /// The fencing token of the holding.
    pub token: u64,
    /// The store's order of proofs: a proof replaces those of a smaller sequence, even where its deadline is earlier.
    pub sequence: u64,
}
