//! Findings that point at their place in the file.

use std::{fmt, ops::Range};

use thiserror::Error;

use super::problem::Problem;

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

/// A file's text and where its lines begin.
pub(super) struct Source<'a> {
    file: &'a str,
    text: &'a str,
    /// Of every line but the first.
    line_starts: Vec<usize>,
}

impl<'a> Source<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Self {
        let line_starts = text.match_indices('\n').map(|(newline, _)| newline + 1).collect();
        Self { file, text, line_starts }
    }

    /// The line on which the byte `offset` stands, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= offset) + 1
    }

    pub(super) fn locate<T>(&self, finding: T, span: Range<usize>) -> Located<T> {
        let text = self.text;
        let start = floor(text, span.start);
        let line = self.line(start);
        let line_start = if line == 1 { 0 } else { self.line_starts[line - 2] };
        let line_end = self.line_starts.get(line - 1).map_or(text.len(), |next| next - 1);
        let end = floor(text, span.end.clamp(start, line_end.max(start)));

        let before = text[line_start..start].chars().count();
        let marked = text[start..end].chars().count().max(1);
        let skipped = if before + marked > EXCERPT { before.saturating_sub(EXCERPT / 3) } else { 0 };
        let shown = text[line_start..line_end].trim_end().chars().skip(skipped).take(EXCERPT);
        let caret = before - skipped;
        Located {
            finding,
            file: self.file.to_owned(),
            line,
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

/// Everything that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Errors {
    /// In the order of the file.
    pub problems: Vec<Located<Problem>>,
    /// How many more there are than anybody would read.
    pub further: usize,
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}\n")?;
        }
        if self.further > 0 {
            writeln!(f, "... and {} more\n", self.further)?;
        }
        let count = self.problems.len() + self.further;
        let file = self.problems.first().map_or("the configuration", |problem| problem.file.as_str());
        write!(f, "{file} is refused: {count} {}", if count == 1 { "error" } else { "errors" })
    }
}
