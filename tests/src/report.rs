//! What a demonstration or a benchmark found: values, each against its limit.

use std::fmt;
use std::process::ExitCode;

use serde::{Serialize, Serializer};

/// The bound a value must keep. In JSON and in the table it reads `<= 2`, `>= 0.5` or `== 0`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    AtMost(f64),
    AtLeast(f64),
    Exactly(f64),
}

impl Limit {
    fn holds(self, value: f64) -> bool {
        // Not a number keeps no bound.
        match self {
            Limit::AtMost(limit) => value <= limit,
            Limit::AtLeast(limit) => value >= limit,
            Limit::Exactly(limit) => value == limit,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::AtMost(limit) => write!(f, "<= {limit}"),
            Limit::AtLeast(limit) => write!(f, ">= {limit}"),
            Limit::Exactly(limit) => write!(f, "== {limit}"),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One value and whether it kept its limit.
#[derive(Debug, Serialize)]
pub struct Check {
    name: String,
    value: f64,
    unit: &'static str,
    limit: Limit,
    ok: bool,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Subject {
    Story(&'static str),
    Bench(&'static str),
}

/// The checks of one demonstration or benchmark.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    subject: Subject,
    passed: bool,
    checks: Vec<Check>,
    #[serde(skip)]
    notes: Vec<String>,
}

impl Report {
    /// The report of `tests/src/bin/story-NAME.rs`.
    pub fn story(name: &'static str) -> Self {
        Self::new(Subject::Story(name))
    }

    /// The report of `tests/src/bin/bench-NAME.rs`.
    pub fn bench(name: &'static str) -> Self {
        Self::new(Subject::Bench(name))
    }

    fn new(subject: Subject) -> Self {
        Self { subject, passed: true, checks: Vec::new(), notes: Vec::new() }
    }

    /// Adds a value in `unit` (`ms`, `ns`, `packets`; empty for a bare number) and compares it with its limit.
    pub fn check(&mut self, name: impl Into<String>, value: f64, unit: &'static str, limit: Limit) {
        let ok = limit.holds(value);
        self.passed &= ok;
        self.checks.push(Check { name: name.into(), value, unit, limit, ok });
    }

    /// Adds a statement that must be true: its value is 1 or 0.
    pub fn holds(&mut self, name: impl Into<String>, ok: bool) {
        self.check(name, f64::from(u8::from(ok)), "", Limit::Exactly(1.0));
    }

    /// Adds a line for the eye, below the table: figures that have no limit.
    pub fn note(&mut self, line: impl Into<String>) {
        self.notes.push(line.into());
    }

    /// Prints the report, as one line of JSON if the program was given `--json`, else as a table. The exit code is 1 if
    /// a check failed, or if there was none: a program that compared nothing has shown nothing.
    pub fn finish(mut self) -> ExitCode {
        self.passed &= !self.checks.is_empty();
        if std::env::args().any(|argument| argument == "--json") {
            println!("{}", self.json());
        } else {
            print!("{self}");
        }
        if self.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// As [`Report::finish`], for a program that has already shown its values to the person in front: instead of the table
    /// only what failed, and how many checks there were.
    pub fn finish_briefly(mut self) -> ExitCode {
        if std::env::args().any(|argument| argument == "--json") {
            return self.finish();
        }
        let all = self.checks.len();
        self.checks.retain(|check| !check.ok);
        let failed = self.checks.len();
        self.passed &= all > 0;
        print!("\n{self}");
        println!("  {} of {all} checks kept their limits", all - failed);
        if self.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn json(&self) -> String {
        serde_json::to_string(self).expect("invariant: strings, numbers and booleans always serialise")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Subject::Story(name) | Subject::Bench(name)) = self.subject;
        writeln!(f, "{name}: {}", if self.passed { "passed" } else { "FAILED" })?;
        let rows: Vec<[String; 3]> = self
            .checks
            .iter()
            .map(|check| {
                let value = format!("{} {}", rounded(check.value), check.unit);
                [check.name.clone(), value.trim_end().to_owned(), check.limit.to_string()]
            })
            .collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        for (row, check) in rows.iter().zip(&self.checks) {
            writeln!(
                f,
                "  {:name$}  {:>value$}  {:limit$}  {}",
                row[0],
                row[1],
                row[2],
                if check.ok { "ok" } else { "FAILED" },
                name = widths[0],
                value = widths[1],
                limit = widths[2],
            )?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
}

/// At most three decimals for the eye; JSON keeps them all.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut report = Report::story("gate");
        report.check("time to cut", 1.23456, "ms", Limit::AtMost(2.0));
        report.check("leaked packets", 3.0, "", Limit::Exactly(0.0));
        report.holds("agent was dead", true);
        report
    }

    #[test]
    fn json_names_subject_values_and_limits() {
        assert_eq!(
            sample().json(),
            concat!(
                r#"{"story":"gate","passed":false,"checks":["#,
                r#"{"name":"time to cut","value":1.23456,"unit":"ms","limit":"<= 2","ok":true},"#,
                r#"{"name":"leaked packets","value":3.0,"unit":"","limit":"== 0","ok":false},"#,
                r#"{"name":"agent was dead","value":1.0,"unit":"","limit":"== 1","ok":true}]}"#
            )
        );
        assert_eq!(Report::bench("packet").json(), r#"{"bench":"packet","passed":true,"checks":[]}"#);
    }

    #[test]
    fn table_lines_up() {
        let expected = "\
gate: FAILED
  time to cut     1.235 ms  <= 2  ok
  leaked packets         3  == 0  FAILED
  agent was dead         1  == 1  ok
";
        assert_eq!(sample().to_string(), expected);
        let mut noted = sample();
        noted.note("beside: 7 ns");
        assert_eq!(noted.to_string(), format!("{expected}  beside: 7 ns\n"));
        assert_eq!(noted.json(), sample().json());
    }

    #[test]
    fn a_value_that_is_no_number_fails() {
        for limit in [Limit::AtMost(1.0), Limit::AtLeast(1.0), Limit::Exactly(1.0)] {
            assert!(!limit.holds(f64::NAN), "{limit}");
        }
    }

    #[test]
    fn a_report_without_checks_fails() {
        assert_eq!(Report::bench("nothing").finish(), ExitCode::FAILURE);
    }
}
