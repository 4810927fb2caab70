//! Whether the boot clock runs as the rule for time assumes.

use super::Check;
use crate::{config::model::Agent, datapath::sys};

/// The most that chrony slews by default (`maxslewrate`), parts per million.
const CHRONY_DEFAULT: u32 = 83_333;

/// In a time namespace user space and the kernel programs read different boot clocks.
pub fn namespace() -> Check {
    const NAME: &str = "time namespace";
    match std::fs::read_to_string("/proc/self/timens_offsets") {
        Ok(offsets) if boottime_is_shifted(&offsets) => Check::fail(
            NAME,
            "the agent's boot clock is shifted against the kernel's: deadlines would be wrong",
            "start the agent in the host's time namespace (without `unshare --time` or its container option)",
        ),
        Ok(_) => Check::ok(NAME, "the boot clock is the kernel's"),
        // Kernels before 5.6 have no time namespaces.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Check::ok(NAME, "this kernel has no time namespaces")
        }
        Err(error) => Check::warn(NAME, format!("cannot be told: {error}"), "mount /proc"),
    }
}

/// `boottime  SECONDS  NANOSECONDS`.
fn boottime_is_shifted(offsets: &str) -> bool {
    offsets.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("boottime") && words.any(|word| word != "0")
    })
}

/// The rate at which the clock is being slewed now.
pub(super) fn slew(agent: &Agent) -> Check {
    const NAME: &str = "clock slew";
    match slew_ppm() {
        Ok(ppm) if ppm.abs() > f64::from(agent.drift_ppm) => Check::fail(
            NAME,
            format!("the clock is slewed by {ppm:.0} ppm, beyond the bound of {} ppm", agent.drift_ppm),
            "wait until the time daemon has caught up, or raise `drift_ppm`",
        ),
        Ok(ppm) => Check::ok(NAME, format!("{ppm:.0} ppm, within the bound of {} ppm", agent.drift_ppm)),
        Err(error) => Check::warn(NAME, format!("cannot be read: {error}"), "allow the adjtimex system call"),
    }
}

/// How fast the kernel's clock is set to run against its hardware, parts per million.
pub fn slew_ppm() -> std::io::Result<f64> {
    /// Microseconds of a tick at the nominal rate, USER_HZ being 100.
    const TICK: i64 = 10_000;
    let (frequency, tick) = sys::clock_discipline()?;
    // A microsecond per tick is 100 ppm. Ticks lie between 9,000 and 11,000.
    let ticks = i32::try_from(tick - TICK).unwrap_or(i32::MAX);
    Ok(frequency + 100.0 * f64::from(ticks))
}

/// Whether a time daemon's defaults fit the configured bound.
pub(super) fn drift_bound(agent: &Agent) -> Check {
    const NAME: &str = "drift bound";
    if agent.drift_ppm >= CHRONY_DEFAULT {
        return Check::ok(
            NAME,
            format!("{} ppm covers chrony's default slew of {CHRONY_DEFAULT} ppm", agent.drift_ppm),
        );
    }
    Check::warn(
        NAME,
        format!("{} ppm is tighter than chrony's default slew of {CHRONY_DEFAULT} ppm", agent.drift_ppm),
        format!("set `maxslewrate {}` in chrony.conf, or raise `drift_ppm`", agent.drift_ppm / 2),
    )
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn shifted_boot_clocks_are_seen() {
        assert!(!boottime_is_shifted("monotonic           0         0\nboottime            0         0\n"));
        assert!(!boottime_is_shifted("monotonic          10         0\nboottime            0         0\n"));
        assert!(boottime_is_shifted("monotonic           0         0\nboottime       864000         0\n"));
        assert!(boottime_is_shifted("boottime            0         -1\n"));
    }

    #[test]
    fn the_slew_rate_is_one_that_the_kernel_allows() {
        assert!(slew_ppm().unwrap().abs() <= 100_500.0);
    }
}
