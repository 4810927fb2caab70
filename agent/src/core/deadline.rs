//! The rule for time: `deadline = B + TTL * (1 - drift) - margin`.

use std::time::Duration;

use super::time::BootInstant;

/// Parts per million in a whole.
const WHOLE_PPM: u128 = 1_000_000;

/// What turns a proof of a holding into a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The longest TTL that counts; a longer one is cut to it.
    pub ttl_cap: Duration,
    /// The time kept back for the fence itself.
    pub margin: Duration,
    /// How much slower than the store's clock this host's boot clock may run, in parts per million of the store's.
    /// A whole and more: nothing can be proven, nothing opens.
    pub drift_ppm: u32,
}

/// What a lease store's answer proves: at some instant not before `sent_at` the store granted or renewed the lease for
/// `ttl`, and the holding is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// When the request was sent, a lower bound of the moment the store accepted it; never when the answer came.
    pub sent_at: BootInstant,
    /// How long the store promises not to give the lease to anybody else, by its own clock. A store that lets a later
    /// renewal take this back (a shorter TTL) is outside the guarantee until the answer to that renewal is here.
    pub ttl: Duration,
    /// The monotonic fencing token of the holding.
    pub token: u64,
    /// The store's order of its answers (a revision). Of two answers the one with the larger sequence is the newer; if
    /// they are equal, the one asked for later.
    pub sequence: u64,
}

/// The instant until which the gate may stay open on the strength of `proof`.
///
/// Rounded down and saturating, so that an error of arithmetic closes early. A result that is not after
/// [`Proof::sent_at`] says that the TTL cannot carry the margin: such a proof opens nothing.
pub fn deadline(timing: &Timing, proof: &Proof) -> BootInstant {
    let ttl = proof.ttl.min(timing.ttl_cap).as_nanos();
    let certain_ppm = WHOLE_PPM.saturating_sub(u128::from(timing.drift_ppm));
    // The longest Duration has 94 bits and a million has 20: the product fits.
    let certain = ttl.saturating_mul(certain_ppm) / WHOLE_PPM;
    let certain = Duration::from_nanos(u64::try_from(certain).unwrap_or(u64::MAX));
    // Adding first: a sum that saturates falls short, whereas a difference that did would overshoot.
    proof.sent_at.saturating_add(certain).saturating_sub(timing.margin)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::arithmetic_side_effects)]

    use proptest::prelude::*;

    use super::*;

    fn timing(ttl_cap_ms: u64, margin_ms: u64, drift_ppm: u32) -> Timing {
        Timing { ttl_cap: Duration::from_millis(ttl_cap_ms), margin: Duration::from_millis(margin_ms), drift_ppm }
    }

    fn proof(sent_at: u64, ttl: Duration) -> Proof {
        Proof { sent_at: BootInstant::from_nanos(sent_at), ttl, token: 1, sequence: 1 }
    }

    #[test]
    fn table() {
        let ms = |n: u64| n * 1_000_000;
        let cases = [
            ("drift and margin come off", timing(60_000, 2_000, 100_000), ms(5_000), ms(30_000), ms(30_000)),
            ("no drift, no margin", timing(60_000, 0, 0), ms(5_000), ms(10_000), ms(15_000)),
            ("the TTL is capped", timing(10_000, 0, 0), ms(5_000), ms(99_000), ms(15_000)),
            ("rounded down", timing(60_000, 0, 1), 0, 999_999, 999_998),
            ("a TTL that cannot carry the margin", timing(60_000, 2_000, 0), ms(5_000), ms(1_000), ms(4_000)),
            ("not before the boot", timing(60_000, 9_000, 0), ms(5_000), ms(1_000), 0),
            ("a drift of the whole leaves nothing", timing(60_000, 0, 1_000_000), ms(5_000), ms(9_000), ms(5_000)),
            ("a drift beyond the whole is the whole", timing(60_000, 0, u32::MAX), ms(5_000), ms(9_000), ms(5_000)),
            ("the end of time less the margin", timing(60_000, 1, 0), u64::MAX - 1, ms(9_000), u64::MAX - ms(1)),
        ];
        for (name, timing, sent_at, ttl, expected) in cases {
            let result = deadline(&timing, &proof(sent_at, Duration::from_nanos(ttl)));
            assert_eq!(result, BootInstant::from_nanos(expected), "{name}");
        }
    }

    #[test]
    fn the_longest_durations_do_not_wrap() {
        let timing = Timing { ttl_cap: Duration::MAX, margin: Duration::ZERO, drift_ppm: 1 };
        assert_eq!(deadline(&timing, &proof(7, Duration::MAX)), BootInstant::from_nanos(u64::MAX));
        let timing = Timing { margin: Duration::MAX, ..timing };
        assert_eq!(deadline(&timing, &proof(7, Duration::MAX)), BootInstant::ZERO);
    }

    proptest! {
        /// A local clock that is slow by the whole bound still shows the deadline before the store's TTL has passed.
        #[test]
        fn a_slow_clock_closes_in_time(
            sent_at in 0..1u64 << 62, ttl in 0..1u64 << 60, margin in 0..1u64 << 40, drift_ppm in 0..1_000_000u32,
        ) {
            let timing = Timing { ttl_cap: Duration::MAX, margin: Duration::from_nanos(margin), drift_ppm };
            let open_for = deadline(&timing, &proof(sent_at, Duration::from_nanos(ttl)))
                .saturating_since(BootInstant::from_nanos(sent_at));
            prop_assert!((open_for.as_nanos()) * 1_000_000 <= u128::from(ttl) * u128::from(1_000_000 - drift_ppm));
        }
    }
}
