//! Typed readers over a parsed document: each value is read once, and each failure keeps its place.

use std::{collections::HashMap, fmt::Display, hash::Hash, ops::Range, path::PathBuf, time::Duration};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    problem::{Problem, TextRule},
    report::{Errors, Located, Source},
    values::{ValueError, parse_duration},
};

/// A table's name for messages and the keys it may have.
pub(super) struct Schema {
    pub(super) place: &'static str,
    pub(super) keys: &'static [&'static str],
    /// Keys of the format that this version does not carry out.
    pub(super) later: &'static [&'static str],
}

/// The text under examination and what was found wrong with it so far.
pub(super) struct Reader<'a> {
    source: Source<'a>,
    problems: Vec<Located<Problem>>,
    further: usize,
}

/// Problems that are shown: a list of a hundred thousand malformed addresses is one mistake.
const SHOWN: usize = 100;

/// One value of a list and where it stands.
pub(super) struct Item<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Self {
        Self { source: Source::new(file, text), problems: Vec::new(), further: 0 }
    }

    pub(super) fn locate<T>(&self, finding: T, span: Range<usize>) -> Located<T> {
        self.source.locate(finding, span)
    }

    pub(super) fn refuse(&mut self, span: Range<usize>, problem: Problem) {
        if self.problems.len() < SHOWN {
            self.problems.push(self.locate(problem, span));
        } else {
            self.further += 1;
        }
    }

    pub(super) fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }

    pub(super) fn into_errors(mut self) -> Errors {
        self.problems.sort_by_key(|problem| (problem.line, problem.column));
        Errors { problems: self.problems, further: self.further }
    }

    pub(super) fn line_of(&self, span: &Range<usize>) -> usize {
        self.source.line(span.start)
    }

    /// Refuses every key of `table` that `schema` does not have. `others` are the file's other tables, where a stray key
    /// may belong.
    pub(super) fn known_keys(&mut self, table: &DeTable<'_>, schema: &Schema, others: &[&Schema]) {
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if schema.keys.contains(&name) {
                continue;
            }
            let problem = if schema.later.contains(&name) {
                Problem::NotInThisVersion { key: name.to_owned() }
            } else {
                Problem::UnknownKey {
                    key: name.to_owned(),
                    place: schema.place,
                    nearest: nearest(name, schema.keys),
                    belongs: others.iter().find(|other| other.keys.contains(&name)).map(|other| other.place),
                }
            };
            self.refuse(key.span(), problem);
        }
    }

    /// The value of `key`, if it is there and `read` accepts it.
    pub(super) fn get<T>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        read: impl FnOnce(&DeValue<'_>) -> Result<T, Problem>,
    ) -> Option<T> {
        let value = table.get(key)?;
        match read(value.get_ref()) {
            Ok(read) => Some(read),
            Err(problem) => {
                self.refuse(value.span(), problem);
                None
            }
        }
    }

    /// As [`Self::get`], and `default` if it is not there: so nothing is left only of what was refused.
    pub(super) fn get_or<T>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        default: T,
        read: impl FnOnce(&DeValue<'_>) -> Result<T, Problem>,
    ) -> Option<T> {
        if table.contains_key(key) { self.get(table, key, read) } else { Some(default) }
    }

    /// The values of the list `key`; empty when it is not there. A value that stands twice is refused.
    pub(super) fn list<T: Clone + Eq + Hash + Display>(
        &mut self,
        table: &DeTable<'_>,
        key: &'static str,
        read: impl Fn(&DeValue<'_>) -> Result<T, Problem>,
    ) -> Vec<Item<T>> {
        let Some(list) = table.get(key) else { return Vec::new() };
        let DeValue::Array(values) = list.get_ref() else {
            self.refuse(list.span(), wrong_type("an array", list.get_ref()));
            return Vec::new();
        };
        let mut seen: HashMap<T, Range<usize>> = HashMap::new();
        let mut items = Vec::new();
        for value in values.iter() {
            match read(value.get_ref()) {
                Ok(item) => {
                    if let Some(first) = seen.get(&item) {
                        let line = self.line_of(first);
                        let problem = Problem::Duplicate { given: item.to_string(), line };
                        self.refuse(value.span(), problem);
                    } else {
                        seen.insert(item.clone(), value.span());
                        items.push(Item { value: item, span: value.span() });
                    }
                }
                Err(problem) => self.refuse(value.span(), problem),
            }
        }
        items
    }

    pub(super) fn table<'t, 'i>(&mut self, value: &'t Spanned<DeValue<'i>>) -> Option<&'t DeTable<'i>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            self.refuse(value.span(), wrong_type("a table", value.get_ref()));
        }
        table
    }
}

/// The name among `known` that `given` most likely means: within a third of its length in edits.
fn nearest(given: &str, known: &[&'static str]) -> Option<&'static str> {
    let distance = |name: &str| strsim::damerau_levenshtein(given, name);
    // A key as long as a book is nobody's slip, and the distance costs the product of the lengths.
    let candidates = known.iter().copied().filter(|name| given.len() <= 2 * name.len());
    candidates.min_by_key(|name| distance(name)).filter(|name| distance(name) <= name.len().div_ceil(3))
}

pub(super) fn wrong_type(expected: &'static str, found: &DeValue<'_>) -> Problem {
    let found = match found {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    };
    Problem::WrongType { expected, found }
}

pub(super) fn tables<'t, 'i>(value: &'t DeValue<'i>) -> Result<Vec<&'t Spanned<DeValue<'i>>>, Problem> {
    match value {
        DeValue::Array(values) => Ok(values.iter().collect()),
        other => Err(wrong_type("tables that each begin with `[[service]]`", other)),
    }
}

pub(super) fn string<'t>(value: &'t DeValue<'_>) -> Result<&'t str, Problem> {
    value.as_str().ok_or_else(|| wrong_type("a string", value))
}

pub(super) fn boolean(value: &DeValue<'_>) -> Result<bool, Problem> {
    value.as_bool().ok_or_else(|| wrong_type("true or false", value))
}

/// A string that its type's own reading accepts.
pub(super) fn parsed<T: std::str::FromStr<Err = ValueError>>(value: &DeValue<'_>) -> Result<T, Problem> {
    Ok(string(value)?.parse()?)
}

pub(super) fn duration(
    what: &'static str,
    least: Duration,
    most: Duration,
) -> impl FnOnce(&DeValue<'_>) -> Result<Duration, Problem> {
    move |value| {
        let text = value.as_str().ok_or_else(|| wrong_type("a duration such as \"2s\"", value))?;
        let given = parse_duration(text)?;
        if (least..=most).contains(&given) {
            Ok(given)
        } else {
            Err(Problem::DurationOutOfRange { what, given, least, most })
        }
    }
}

/// One of a few words.
pub(super) fn choice<T: Copy>(
    choices: &'static [(&'static str, T)],
) -> impl FnOnce(&DeValue<'_>) -> Result<T, Problem> {
    move |value| {
        let given = string(value)?;
        let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
        let chosen = choices.iter().find(|(word, _)| *word == given).map(|(_, choice)| *choice);
        chosen.ok_or_else(|| Problem::NotAChoice {
            given: given.to_owned(),
            nearest: nearest(given, &words),
            choices: words,
        })
    }
}

/// A string that `accept` accepts, or else breaks `rule`.
pub(super) fn text(rule: TextRule, accept: fn(&str) -> bool) -> impl Fn(&DeValue<'_>) -> Result<String, Problem> {
    move |value| {
        let given = string(value)?;
        if accept(given) { Ok(given.to_owned()) } else { Err(Problem::BadText(rule)) }
    }
}

pub(super) fn path(value: &DeValue<'_>) -> Result<PathBuf, Problem> {
    let given = string(value)?;
    if given.starts_with('/') && !given.contains('\0') {
        Ok(PathBuf::from(given))
    } else {
        Err(Problem::BadText(TextRule::Path))
    }
}

pub(super) fn socket_path(value: &DeValue<'_>) -> Result<PathBuf, Problem> {
    let path = path(value)?;
    // sun_path has 108 bytes, the last of them NUL.
    if path.as_os_str().len() <= 107 { Ok(path) } else { Err(Problem::BadText(TextRule::SocketPath)) }
}
