//! What the benchmarks share.
//!
//! * [`gates`]: the kernel object with its maps filled as an agent fills them.
//! * [`timing`]: nanoseconds per packet by test run, on a machine that does other things beside.
//! * [`flood`]: packets dropped per second of processor time, by whatever drops them.
//! * [`watch`]: a gate's deadline, looked at without a system call.
//! * [`spread`]: median and p99 of a series.

pub mod flood;
pub mod gates;
pub mod spread;
pub mod timing;
pub mod watch;

use rustix::{
    process::setpriority_process,
    thread::{CpuSet, Pid, sched_setaffinity},
};

/// The highest priority of an ordinary thread: what else runs hardly interrupts it, and leaves its caches warm.
const FIRST: i32 = -20;

/// Keeps a thread (`None`: the calling one) on one processor, if there are so many, and lets it go first there.
pub fn pin(thread: Option<u32>, cpu: usize) {
    keep_on(thread, cpu);
    go_first(thread);
}

/// Keeps a thread (`None`: the calling one) on one processor, if there are so many.
pub fn keep_on(thread: Option<u32>, cpu: usize) {
    let Ok(cpus) = std::thread::available_parallelism() else { return };
    let mut set = CpuSet::new();
    set.set(cpu % cpus);
    sched_setaffinity(id(thread), &set).unwrap_or_else(|e| panic!("keep a thread on processor {cpu}: {e}"));
}

/// Lets a thread (`None`: the calling one) go before others, and with it the processes it starts from now on.
pub fn go_first(thread: Option<u32>) {
    setpriority_process(id(thread), FIRST).unwrap_or_else(|e| panic!("let a thread go first: {e}"));
}

fn id(thread: Option<u32>) -> Option<Pid> {
    thread.and_then(|id| Pid::from_raw(id.cast_signed()))
}
