//! The boot clock, and the way from the kernel's wall-clock packet stamps to it.

use std::time::Duration;

use portcullis::core::time::BootInstant;
use rustix::{
    thread::clock_nanosleep_absolute,
    time::{ClockId, Timespec, clock_gettime},
};

/// The current instant of `CLOCK_BOOTTIME`.
pub fn now() -> BootInstant {
    BootInstant::from_nanos(nanos(clock_gettime(ClockId::Boottime)))
}

/// Sleeps until `instant`; returns at once if it has passed.
pub fn sleep_until(instant: BootInstant) {
    let request = Timespec {
        tv_sec: (instant.as_nanos() / 1_000_000_000).cast_signed(),
        tv_nsec: (instant.as_nanos() % 1_000_000_000).cast_signed(),
    };
    // A signal ends the sleep early.
    while clock_nanosleep_absolute(ClockId::Boottime, &request).is_err() {}
}

/// Asks `condition` every millisecond until it holds; `false` if it does not within `timeout`.
pub fn wait_until(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = now().saturating_add(timeout);
    loop {
        if condition() {
            return true;
        }
        let at = now();
        if at >= end {
            return false;
        }
        sleep_until(at.saturating_add(Duration::from_millis(1)));
    }
}

/// The distance between the wall clock, in which the kernel stamps packets, and the boot clock.
///
/// Taken twice, at the start and the end of a measurement: a stepped wall clock makes the measurement worthless.
#[derive(Clone, Copy, Debug)]
pub struct WallOffset(i64);

/// What the wall clock may drift from the boot clock within one measurement before its stamps are refused.
const MAX_SHIFT_NS: u64 = 1_000_000;

impl WallOffset {
    /// Measures the distance. The wall clock is read between two readings of the boot clock, and the tightest of
    /// several such readings counts.
    pub fn measure() -> Self {
        let reading = || {
            let before = nanos(clock_gettime(ClockId::Boottime));
            let wall = nanos(clock_gettime(ClockId::Realtime));
            let after = nanos(clock_gettime(ClockId::Boottime));
            (after - before, wall.cast_signed() - (before + (after - before) / 2).cast_signed())
        };
        let (_, offset) = (0..16).map(|_| reading()).min_by_key(|(width, _)| *width).expect("sixteen readings");
        Self(offset)
    }

    /// The boot-clock instant of a wall-clock stamp in nanoseconds.
    pub fn to_boot(self, wall_ns: u64) -> BootInstant {
        BootInstant::from_nanos(wall_ns.saturating_add_signed(-self.0))
    }

    /// Panics if the wall clock was stepped since `self` was measured.
    pub fn assert_steady(self) {
        let shift = Self::measure().0.abs_diff(self.0);
        assert!(shift < MAX_SHIFT_NS, "the wall clock moved by {shift} ns during the measurement: repeat it");
    }
}

fn nanos(time: Timespec) -> u64 {
    // Neither clock is negative on a machine that runs these tests.
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
