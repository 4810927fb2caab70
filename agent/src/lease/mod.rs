//! Lease stores. Each gives proofs of a holding; what a proof is worth in time is the core's business.
//!
//! * [`local`]: leases kept by this agent, in memory; pure, time passed in.
//! * [`store`]: what of them must survive a crash, on disk; every call may block.
//! * [`writer`]: the one thread that calls the disk.
//!
//! Nothing that waits for a disk can delay a fence: the tables in memory answer renewals, releases and expiry, and the
//! disk stands only between an acquisition and its answer. A disk that hangs stops new holdings and nothing else.

pub mod local;
pub mod store;
pub mod writer;

/// What every store can give, and the only thing that may move a deadline forward: evidence that the lease was held.
///
/// `sent_at` is a lower bound on the instant at which the store accepted the renewal: when it was *sent*, never when the
/// answer arrived. A proof that was long in coming is therefore worth less, and never more, than it says.
pub use crate::core::deadline::Proof;
