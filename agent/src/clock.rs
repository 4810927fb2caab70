//! The clocks, each read in one place.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::core::time::BootInstant;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Now, on CLOCK_BOOTTIME: the clock that the kernel programs compare with a deadline.
pub fn boot_now() -> BootInstant {
    let time = clock_gettime(ClockId::Boottime);
    // Time since boot: neither field is ever negative, and 64 bits of nanoseconds last 584 years.
    BootInstant::from_nanos(time.tv_sec.unsigned_abs() * NANOS_PER_SECOND + time.tv_nsec.unsigned_abs())
}

/// Milliseconds since 1970 on the wall clock, 0 before that. It may jump; no deadline rests on it.
pub fn wall_ms() -> u64 {
    whole_ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO))
}

/// A span in whole milliseconds, rounded down.
pub fn whole_ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// The random name of this boot; whoever stores a [`BootInstant`] stores it too.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// How far a time daemon makes the boot clock run too fast or too slow right now, in parts per million, rounded up.
pub fn slew_ppm() -> io::Result<u64> {
    // SAFETY: `timex` consists of integers, for which all zero is a valid value; no mode set asks to change nothing.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `timex` is writable.
    if unsafe { libc::adjtimex(&raw mut timex) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(slew_of(&timex))
}

/// The rate of the clock and the slewing of a phase offset, as if both went the same way: the offset's part shrinks, and
/// must not hide the rest until it has. Not in it: the old adjtime(), which slews by 500 ppm at most.
fn slew_of(timex: &libc::timex) -> u64 {
    /// Microseconds per tick of an undisturbed clock; each one more or less is 100 ppm.
    const NOMINAL_TICK: i64 = 10_000;
    /// The kernel's SHIFT_PLL.
    const SHIFT_PLL: i64 = 2;
    const PPS: i32 = libc::STA_PPSTIME | libc::STA_PPSSIGNAL;
    // `freq` has 16 bits of fraction.
    let rate = (timex.tick - NOMINAL_TICK) * 100 * 65536 + timex.freq;
    let offset_ns = if timex.status & libc::STA_NANO == 0 { timex.offset * 1000 } else { timex.offset };
    // At each second the kernel spreads `offset / 2^(SHIFT_PLL + constant)` over the next one, or with a pulse per second all
    // of it. The constant is 0 to 10, and the offset at most half a second.
    let shift = if timex.status & PPS == PPS { 0 } else { SHIFT_PLL + timex.constant.clamp(0, 10) };
    let phase = (offset_ns.unsigned_abs() * 65536 / 1000) >> shift;
    (rate.unsigned_abs() + phase).div_ceil(65536)
}

/// Waits on the boot clock. Tokio's own timers stop while the machine is suspended, and a lease does not.
#[derive(Debug)]
pub struct BootTimer(AsyncFd<OwnedFd>);

impl BootTimer {
    /// Needs a tokio runtime.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        // SAFETY: the descriptor was just made, is owned by the AsyncFd, and is never replaced or closed within it.
        Ok(Self(unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?))
    }

    /// Returns once `instant` has come; at once if it has. Safe to drop while it waits.
    pub async fn sleep_until(&mut self, instant: BootInstant) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // All zero would disarm the timer, and the boot is long past.
        let nanos = instant.as_nanos().max(1);
        let seconds = i64::try_from(nanos / NANOS_PER_SECOND).unwrap_or(i64::MAX);
        let fraction = i64::try_from(nanos % NANOS_PER_SECOND).unwrap_or(0);
        let it_value = Timespec { tv_sec: seconds, tv_nsec: fraction };
        let times = Itimerspec { it_interval: zero, it_value };
        timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::ABSTIME, &times)?;
        // Setting the timer forgot earlier expiries, but a readiness seen before may be left over: look at the clock.
        while boot_now() < instant {
            self.0.readable().await?.clear_ready();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_timer_ends_at_its_instant_and_not_before() {
        let mut timer = BootTimer::new().expect("a timer");
        let start = boot_now();
        for ms in [0, 1, 5, 20] {
            let until = start.saturating_add(Duration::from_millis(ms));
            timer.sleep_until(until).await.expect("slept");
            assert!(boot_now() >= until);
        }
        timer.sleep_until(BootInstant::ZERO).await.expect("long past");
        // Dropped while it waits, and set again: the readiness of the earlier setting does not count.
        let far = start.saturating_add(Duration::from_secs(3600));
        let waited = tokio::time::timeout(Duration::from_millis(5), timer.sleep_until(far)).await;
        assert!(waited.is_err());
        let near = boot_now().saturating_add(Duration::from_millis(5));
        timer.sleep_until(near).await.expect("slept");
        assert!(boot_now() >= near);
    }

    #[test]
    fn the_slew_rate_is_one_that_the_kernel_allows() {
        // A tick 10 % off, a frequency of 500 ppm, and half a second at once.
        assert!(slew_ppm().expect("readable") <= 600_500);
    }

    #[test]
    fn a_phase_that_is_slewed_is_seen_beside_the_rate() {
        let slew = |tick, freq_ppm: i64, offset, constant, status| {
            // SAFETY: `timex` consists of integers, for which all zero is a valid value.
            let mut timex: libc::timex = unsafe { std::mem::zeroed() };
            (timex.tick, timex.freq, timex.offset) = (tick, freq_ppm * 65536, offset);
            (timex.constant, timex.status) = (constant, status);
            slew_of(&timex)
        };
        assert_eq!(slew(10_000, 0, 0, 2, 0), 0);
        assert_eq!(slew(9_990, -500, 0, 2, 0), 1_500);
        assert_eq!(slew(10_000, 0, 500_000, 0, 0), 125_000);
        assert_eq!(slew(10_000, 0, -500_000_000, 2, libc::STA_NANO), 31_250);
        assert_eq!(slew(10_000, 100, -16_000, 2, libc::STA_NANO), 101);
        let pulse = libc::STA_PPSTIME | libc::STA_PPSSIGNAL;
        assert_eq!(slew(10_000, 0, 1_000, 10, pulse), 1_000);
    }

    #[test]
    fn the_boot_has_a_name_and_the_clock_runs() {
        assert_eq!(boot_id().expect("readable").len(), 36);
        assert!(boot_now() > BootInstant::ZERO);
        assert!(wall_ms() > 1_700_000_000_000);
    }
}
