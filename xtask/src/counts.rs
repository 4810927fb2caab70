//! How many tests passed, from the lines that test programs print.

use std::fmt;
use std::ops::AddAssign;
use std::process::ExitCode;

/// How one check ended, with what there is to say of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed(String),
    /// It could not be made here, for a reason that is no fault of the sources.
    Skipped(String),
    Failed(String),
}

impl Outcome {
    /// Prints the outcome as one line.
    pub(crate) fn print(&self, label: &str) {
        match self {
            Outcome::Passed(detail) => println!("{label}: passed: {detail}"),
            Outcome::Skipped(reason) => println!("{label}: skipped: {reason}"),
            Outcome::Failed(reason) => println!("{label}: failed: {reason}"),
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Outcome::Passed(_) | Outcome::Skipped(_) => ExitCode::SUCCESS,
            Outcome::Failed(_) => ExitCode::FAILURE,
        }
    }
}

/// Tests or checks by their outcome.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

impl Counts {
    /// Reads the line in which `cargo test` sums up one program; `None` for any other line.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let rest = line.strip_prefix("test result: ")?;
        let (_, rest) = rest.split_once(". ")?;
        let mut counts = Self::default();
        for part in rest.split("; ") {
            let Some((number, word)) = part.split_once(' ') else { continue };
            match word.trim_end() {
                "passed" => counts.passed = number.parse().ok()?,
                "failed" => counts.failed = number.parse().ok()?,
                "ignored" => counts.skipped = number.parse().ok()?,
                _ => {}
            }
        }
        Some(counts)
    }

    /// Tests that ended by saying why they could not run: to the harness they passed.
    pub(crate) fn reclassify_skipped(&mut self, tests: u32) {
        let tests = tests.min(self.passed);
        self.passed -= tests;
        self.skipped += tests;
    }
}

impl From<&Outcome> for Counts {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Passed(_) => Self { passed: 1, ..Self::default() },
            Outcome::Skipped(_) => Self { skipped: 1, ..Self::default() },
            Outcome::Failed(_) => Self { failed: 1, ..Self::default() },
        }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 { write!(f, ", {} skipped", self.skipped) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_result_lines() {
        let counts = |passed, failed, skipped| Some(Counts { passed, failed, skipped });
        let table = [
            (
                "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.31s",
                counts(12, 0, 1),
            ),
            (
                "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
                counts(3, 2, 0),
            ),
            ("test core::step ... ok", None),
            ("running 12 tests", None),
            ("test result: ok", None),
            ("test result: ok. many passed; 0 failed", None),
        ];
        for (line, expected) in table {
            assert_eq!(Counts::of_line(line), expected, "{line}");
        }
    }

    #[test]
    fn closing_line_names_skips_only_if_there_are_any() {
        let mut sum = Counts::from(&Outcome::Passed(String::new()));
        sum += Counts::from(&Outcome::Failed(String::new()));
        assert_eq!(sum.to_string(), "1 passed, 1 failed");
        sum += Counts::from(&Outcome::Skipped(String::new()));
        assert_eq!(sum.to_string(), "1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn skipped_tests_are_not_passed() {
        let mut counts = Counts { passed: 3, failed: 1, skipped: 0 };
        counts.reclassify_skipped(2);
        assert_eq!(counts, Counts { passed: 1, failed: 1, skipped: 2 });
        counts.reclassify_skipped(2);
        assert_eq!(counts, Counts { passed: 0, failed: 1, skipped: 3 });
    }
}
