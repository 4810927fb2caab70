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

    /// The smallest of the times that at least `share` (0 to 1) of them do not exceed, in milliseconds; not a number if
    /// there are none.
    pub fn quantile(&self, share: f64) -> f64 {
        // The count of a series is far below what a double holds exactly.
        let rank = (share * self.0.len() as f64).ceil().max(1.0) as usize;
        self.0.get(rank - 1).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, p99, longest] = [0.5, 0.99, 1.0].map(|share| self.quantile(share));
        write!(f, "median {median:.3} ms, p99 {p99:.3} ms, longest {longest:.3} ms of {}", self.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_times() {
        let mut spread = Spread::default();
        assert!(spread.quantile(0.5).is_nan());
        (1..=100).rev().for_each(|ms| spread.add(Duration::from_millis(ms)));
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| spread.quantile(share)), [1.0, 50.0, 99.0, 100.0]);
        spread.add(Duration::from_millis(101));
        assert_eq!([0.5, 0.99].map(|share| spread.quantile(share)), [51.0, 100.0]);
    }
}
