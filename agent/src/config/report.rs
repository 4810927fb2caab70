//! Findings that point at their place in the file.

use std::{fmt, ops::Range};

use thiserror::Error;

use super::problem::{Problem, Warning};

/// Characters of a source line that are shown: a list of a thousand addresses may be one line.
const EXCERPT: usize = 120;

/// What is said about a place in the file, with how grave it is and what to do about it.
pub trait Finding: fmt::Display {
    const SEVERITY: &'static str;
    fn help(&self) -> Option<String>;
}

/// A finding and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    pub finding: T,
    /// As given to the parser.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// What of the line is shown, without control characters.
    excerpt: String,
    /// Where in `excerpt` the caret stands, in characters, and how many there are.
    carets: Range<usize>,
}

impl<T> Located<T> {
    pub(super) fn new(finding: T, file: &str, text: &str, span: Range<usize>) -> Self {
        let start = floor(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let end = floor(text, span.end.clamp(start, line_end));

        let before = text[line_start..start].chars().count();
        let marked = text[start..end].chars().count().max(1);
        let skipped = if before + marked > EXCERPT { before.saturating_sub(EXCERPT / 3) } else { 0 };
        let shown = text[line_start..line_end].trim_end().chars().skip(skipped).take(EXCERPT);
        let caret = before - skipped;
        Self {
            finding,
            file: file.to_owned(),
            line: text[..line_start].matches('\n').count() + 1,
            column: before + 1,
            excerpt: shown.map(|c| if c.is_control() { ' ' } else { c }).collect(),
            carets: caret..caret + marked.min(EXCERPT.saturating_sub(caret).max(1)),
        }
    }
}

/// The nearest character boundary at or before `index`.
fn floor(text: &str, index: usize) -> usize {
    text.floor_char_boundary(index.min(text.len()))
}

impl<T: Finding> fmt::Display for Located<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.line.to_string();
        let gutter = " ".repeat(number.len());
        let carets = format!("{}{}", " ".repeat(self.carets.start), "^".repeat(self.carets.len()));
        writeln!(f, "{}: {}", T::SEVERITY, self.finding)?;
        writeln!(f, "{gutter}--> {}:{}:{}", self.file, self.line, self.column)?;
        writeln!(f, "{gutter} |")?;
        writeln!(f, "{number} | {}", self.excerpt)?;
        write!(f, "{gutter} | {carets}")?;
        match self.finding.help() {
            Some(help) => write!(f, "\n{gutter} = help: {help}"),
            None => Ok(()),
        }
    }
}

/// Everything that is wrong with a file, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Errors(pub Vec<Located<Problem>>);

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.0 {
            writeln!(f, "{problem}\n")?;
        }
        let count = self.0.len();
        let file = self.0.first().map_or("the configuration", |problem| problem.file.as_str());
        write!(f, "{file} is refused: {count} {}", if count == 1 { "error" } else { "errors" })
    }
}

impl Finding for Problem {
    const SEVERITY: &'static str = "error";

    fn help(&self) -> Option<String> {
        Problem::help(self)
    }
}

impl Finding for Warning {
    const SEVERITY: &'static str = "warning";

    fn help(&self) -> Option<String> {
        None
    }
}
