//! Instants of the one clock that fencing rests on.

use std::{fmt, time::Duration};

/// An instant of `CLOCK_BOOTTIME`, the clock the kernel programs read: nanoseconds since boot, suspend included.
///
/// It means nothing after a reboot: whoever stores one stores the boot id beside it. All arithmetic saturates, since a
/// deadline that wrapped round would be an open gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(u64);

impl BootInstant {
    /// The instant of the boot: before every other.
    pub const ZERO: Self = Self(0);

    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Later by `span`, at most the end of time.
    pub fn saturating_add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }

    /// Earlier by `span`, at least the boot.
    pub fn saturating_sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }

    /// The time from `earlier` to this instant; nothing if `earlier` is later.
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for BootInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
