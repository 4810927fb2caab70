//! Whether the boot clock runs as the rule for time assumes.

use super::Check;
use crate::{clock::slew_ppm, config::model::Agent};

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
        Ok(ppm) if ppm > u64::from(agent.drift_ppm) => Check::fail(
            NAME,
            format!("the clock is slewed by {ppm} ppm, beyond the bound of {} ppm", agent.drift_ppm),
            "limit the time daemon (chrony: maxslewrate below the bound), or raise `drift` in [agent]",
        ),
        Ok(ppm) => Check::ok(NAME, format!("{ppm} ppm, within the bound of {} ppm", agent.drift_ppm)),
        Err(error) => Check::warn(NAME, format!("cannot be read: {error}"), "allow the adjtimex system call"),
    }
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
        format!("set `maxslewrate {}` in chrony.conf, or raise `drift` in [agent]", agent.drift_ppm / 2),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifted_boot_clocks_are_seen() {
        assert!(!boottime_is_shifted("monotonic           0         0\nboottime            0         0\n"));
        assert!(!boottime_is_shifted("monotonic          10         0\nboottime            0         0\n"));
        assert!(boottime_is_shifted("monotonic           0         0\nboottime       864000         0\n"));
        assert!(boottime_is_shifted("boottime            0         -1\n"));
    }
}
