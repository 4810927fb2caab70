//! What a demonstration shows a person: what happens as it happens, the traffic round an instant, a table.
//!
//! Given `--json`, nothing of it is printed: standard output belongs to the report. Colours only on a terminal.

mod chart;
mod table;

use std::io::{self, IsTerminal as _};

use portcullis::core::time::BootInstant;

pub use chart::Chart;
pub use table::Table;

use crate::clock;

/// Ways to mark text on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Strong,
    Faint,
    Good,
    Bad,
    Mark,
}

/// Whether text may be marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colours {
    On,
    Off,
}

impl Colours {
    pub(crate) fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Strong => "1",
            Style::Faint => "2",
            Style::Good => "32",
            Style::Bad => "31",
            Style::Mark => "1;33",
        };
        match self {
            Colours::On if !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            Colours::On | Colours::Off => text.to_owned(),
        }
    }
}

/// Standard output, as a person reads it.
#[derive(Debug)]
pub struct Show {
    silent: bool,
    colours: Colours,
    begun: BootInstant,
}

impl Show {
    /// Begins; times are told from here. Silent if the program was given `--json`.
    pub fn begin() -> Self {
        let plain = !io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some();
        Self {
            silent: std::env::args().any(|argument| argument == "--json"),
            colours: if plain { Colours::Off } else { Colours::On },
            begun: clock::now(),
        }
    }

    /// The title of a part.
    pub fn title(&self, text: &str) {
        self.print(&format!("\n{}", self.colours.paint(Style::Strong, text)));
    }

    /// Something that happens now.
    pub fn say(&self, text: &str) {
        let time = format!("{:6.2} s", clock::now().saturating_since(self.begun).as_secs_f64());
        self.print(&format!("{}  {text}", self.colours.paint(Style::Faint, &time)));
    }

    /// What helps to read the rest.
    pub fn note(&self, text: &str) {
        self.print(&format!("  {}", self.colours.paint(Style::Faint, text)));
    }

    /// What a command printed, as it was, indented.
    pub fn output(&self, command: &str, text: &str) {
        let lines: String = text.trim_end().lines().map(|line| format!("\n  {line}")).collect();
        self.print(&format!("\n  {}{lines}\n", self.colours.paint(Style::Strong, &format!("$ {command}"))));
    }

    pub fn chart(&self, chart: &Chart) {
        self.print(&format!("\n{}", chart.draw(self.colours)));
    }

    pub fn table(&self, table: &Table) {
        self.print(&format!("\n{}", table.draw(self.colours)));
    }

    fn print(&self, text: &str) {
        if !self.silent {
            println!("{text}");
        }
    }
}
