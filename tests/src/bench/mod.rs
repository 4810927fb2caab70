//! What the benchmarks of the kernel programs share.
//!
//! * [`gates`]: the kernel object with its maps filled as an agent fills them.
//! * [`timing`]: nanoseconds per packet by test run, on a machine that does other things beside.
//! * [`flood`]: packets dropped per second of processor time, by whatever drops them.

pub mod flood;
pub mod gates;
pub mod timing;

use rustix::{
    process::setpriority_process,
    thread::{CpuSet, Pid, sched_setaffinity},
};

/// The highest priority of an ordinary thread: what else runs hardly interrupts it, and leaves its caches warm.
const FIRST: i32 = -20;

/// Keeps a thread (`None`: the calling one) on one processor, if there are so many, and lets it go first there.
pub fn pin(thread: Option<u32>, cpu: usize) {
    let Ok(cpus) = std::thread::available_parallelism() else { return };
    let mut set = CpuSet::new();
    set.set(cpu % cpus);
    let thread = thread.and_then(|id| Pid::from_raw(id.cast_signed()));
    sched_setaffinity(thread, &set).unwrap_or_else(|e| panic!("keep a thread on processor {cpu}: {e}"));
    setpriority_process(thread, FIRST).unwrap_or_else(|e| panic!("let a thread go first: {e}"));
}
