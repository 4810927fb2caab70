//! A table of text cells.

use std::fmt::Write as _;

use super::{Colours, Style};

/// Columns as wide as they need to be: the first to the left, the others to the right.
#[derive(Clone, Debug)]
pub struct Table {
    /// Of one or two lines, the second after a line break.
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { header: header.map(str::to_owned).to_vec(), rows: Vec::new() }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.header.len(), "a cell for each column");
        self.rows.push(cells.to_vec());
    }

    pub(super) fn draw(&self, colours: Colours) -> String {
        let above: Vec<&str> =
            self.header.iter().map(|cell| cell.split_once('\n').map_or("", |(first, _)| first)).collect();
        let below: Vec<&str> =
            self.header.iter().map(|cell| cell.split_once('\n').map_or(cell.as_str(), |(_, second)| second)).collect();
        let rows = self.rows.iter().map(|row| row.iter().map(String::as_str).collect::<Vec<_>>());
        let lines: Vec<Vec<&str>> = [above, below].into_iter().chain(rows).collect();
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let mut text = String::new();
        for (number, line) in lines.iter().enumerate() {
            let mut cells = line.iter().zip(&widths);
            let mut drawn = String::from("  ");
            if let Some((cell, width)) = cells.next() {
                _ = write!(drawn, "{cell:<width$}");
            }
            for (cell, width) in cells {
                _ = write!(drawn, "  {cell:>width$}");
            }
            let drawn = drawn.trim_end();
            text += &if number < 2 { colours.paint(Style::Strong, drawn) } else { drawn.to_owned() };
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["flow", "first\ndropped", "seen"]);
        table.row(["TCP IPv4".to_owned(), "+0.1 ms".to_owned(), "0".to_owned()]);
        assert_eq!(
            table.draw(Colours::Off),
            "              first\n  flow      dropped  seen\n  TCP IPv4  +0.1 ms     0\n"
        );
    }
}
