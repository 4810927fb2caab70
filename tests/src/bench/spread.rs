//! Median and p99 of a series of times.

use std::{fmt, time::Duration};

/// Times of one kind, gathered one by one.
#[derive(Clone, Debug, Default)]
pub struct Spread(Vec<Duration>);

impl Spread {
    pub fn add(&mut self, time: Duration) {
        let at = self.0.partition_point(|earlier| *earlier <= time);
        self.0.insert(at, time);
    }

    /// The smallest of the times that at least `per_mille` of a thousand do not exceed, in milliseconds; not a number if
    /// there are none.
    pub fn quantile(&self, per_mille: usize) -> f64 {
        let rank = (per_mille * self.0.len()).div_ceil(1000).max(1);
        self.0.get(rank - 1).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    }

    pub fn median(&self) -> f64 {
        self.quantile(500)
    }

    pub fn p99(&self) -> f64 {
        self.quantile(990)
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (median, p99, longest, count) = (self.median(), self.p99(), self.quantile(1000), self.0.len());
        write!(f, "median {median:.3} ms, p99 {p99:.3} ms, longest {longest:.3} ms of {count}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_times() {
        let mut spread = Spread::default();
        assert!(spread.median().is_nan());
        (1..=100).rev().for_each(|ms| spread.add(Duration::from_millis(ms)));
        assert_eq!([0, 500, 990, 1000].map(|per_mille| spread.quantile(per_mille)), [1.0, 50.0, 99.0, 100.0]);
        spread.add(Duration::from_millis(101));
        assert_eq!((spread.median(), spread.p99()), (51.0, 100.0));
    }
}
