//! When the next packets are due.

use std::time::Duration;

use portcullis::core::time::BootInstant;

use crate::clock;

/// Arrears beyond this are forgiven: a sender that was off the CPU does not make up for it with a burst that would overflow
/// a queue.
const MAX_ARREARS: Duration = Duration::from_millis(5);
/// The shortest sleep that is worth it; at high rates several packets are due after each.
const NAP: Duration = Duration::from_micros(200);

/// Gives out packets at a fixed rate.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    next: BootInstant,
}

impl Pace {
    pub(super) fn new(per_second: u32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second, next: clock::now() }
    }

    /// Sleeps until at least one packet is due, and returns how many are, at most `limit`.
    pub(super) fn wait(&mut self, limit: usize) -> usize {
        let mut now = clock::now();
        if self.next > now {
            clock::sleep_until(self.next.max(now.saturating_add(NAP)));
            now = clock::now();
        }
        let arrears = now.saturating_sub(self.interval.max(MAX_ARREARS));
        self.next = self.next.max(arrears);
        let mut due = 0;
        while due < limit && self.next <= now {
            self.next = self.next.saturating_add(self.interval);
            due += 1;
        }
        due
    }
}
