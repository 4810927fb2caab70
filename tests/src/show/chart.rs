//! Traffic round an instant, drawn with characters.

use std::{fmt::Write as _, time::Duration};

use portcullis::core::time::BootInstant;

use super::{Colours, Style};
use crate::traffic::{Bucket, Report};

const BUCKET: Duration = Duration::from_millis(10);
/// Buckets on either side of the instant: with the labels they fit 80 columns.
const BEFORE: usize = 35;
const AFTER: usize = 35;
/// Lines of the highest bar.
const HEIGHT: usize = 5;
/// Eighths of a line from the bottom.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const DROPPED: char = '░';
const MARK: &str = "┃";
/// Between a tick on the axis and the next.
const TICK: usize = 10;
/// Columns of the labels to the left of the axis.
const MARGIN: usize = 12;

/// Packets per 10 ms round an instant: those that came back, and on top of them those that were sent and did not.
#[derive(Clone, Debug)]
pub struct Chart {
    label: String,
    buckets: Vec<Bucket>,
}

impl Chart {
    /// The sum of some flows round `instant`, which is called `label`.
    pub fn round<'a>(
        reports: impl IntoIterator<Item = &'a Report>,
        instant: BootInstant,
        label: impl Into<String>,
    ) -> Self {
        let before = BUCKET * u32::try_from(BEFORE).expect("a few dozen");
        let mut buckets = vec![Bucket::default(); BEFORE + AFTER];
        for report in reports {
            let histogram = report.histogram(instant.saturating_sub(before), BUCKET, BEFORE + AFTER);
            for (sum, part) in buckets.iter_mut().zip(histogram) {
                sum.sent += part.sent;
                sum.received += part.received;
            }
        }
        Self { label: label.into(), buckets }
    }

    pub(super) fn draw(&self, colours: Colours) -> String {
        let highest = self.buckets.iter().map(|bucket| bucket.sent).max().unwrap_or(0).max(1);
        let mut text = String::new();
        let mark = colours.paint(Style::Mark, MARK);
        let label = colours.paint(Style::Mark, &self.label);
        let half = self.label.chars().count() / 2;
        _ = writeln!(text, "{:blank$}{label}", "", blank = MARGIN + 1 + BEFORE - half);
        for line in (0..HEIGHT).rev() {
            let name = match line {
                line if line == HEIGHT - 1 => highest.to_string(),
                line if line == HEIGHT - 2 => "packets".to_owned(),
                line if line == HEIGHT - 3 => "per 10 ms".to_owned(),
                _ => String::new(),
            };
            let axis = if line == HEIGHT - 1 { "┤" } else { "│" };
            let cells: Vec<Cell> = self.buckets.iter().map(|bucket| Cell::of(*bucket, highest, line)).collect();
            let (left, right) = cells.split_at(BEFORE);
            let (left, right) = (paint(left, colours), paint(right, colours));
            _ = writeln!(text, "{name:>width$} {axis}{left}{mark}{right}", width = MARGIN - 1);
        }
        let ticks = |range: std::ops::Range<usize>, at: fn(usize) -> bool| -> String {
            range.map(|column| if at(column) { '┴' } else { '─' }).collect()
        };
        let (left, right) = (
            ticks(0..BEFORE, |column| (BEFORE - column).is_multiple_of(TICK)),
            ticks(0..AFTER, |column| (column + 1).is_multiple_of(TICK)),
        );
        _ = writeln!(text, "{:>width$} └{left}{mark}{right}", "0", width = MARGIN - 1);
        _ = writeln!(text, "{}", axis_labels());
        let (passed, dropped) = (self.sum(|bucket| bucket.received), self.sum(|bucket| bucket.sent - bucket.received));
        _ = write!(
            text,
            "{:MARGIN$} {} {passed} came back   {} {dropped} sent and never seen again",
            "",
            colours.paint(Style::Good, "█"),
            colours.paint(Style::Bad, "░"),
        );
        text + "\n"
    }

    fn sum(&self, of: impl Fn(&Bucket) -> u32) -> u32 {
        self.buckets.iter().map(of).sum()
    }
}

/// One character of a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Empty,
    Passed(char),
    Dropped,
}

impl Cell {
    /// The cell of a bucket in a line, counted from the bottom. A single packet is seen, however high the others are.
    fn of(bucket: Bucket, highest: u32, line: usize) -> Self {
        let eighths = |packets: u32| {
            let full = u64::from(packets) * 8 * HEIGHT as u64;
            usize::try_from(full.div_ceil(u64::from(highest))).expect("at most the height")
        };
        let here = |packets: u32| eighths(packets).saturating_sub(8 * line).min(8);
        match (here(bucket.received), here(bucket.sent)) {
            (0, 0) => Cell::Empty,
            (0, _) => Cell::Dropped,
            (passed, _) => Cell::Passed(BARS[passed]),
        }
    }
}

/// Cells as text, marked in runs.
fn paint(cells: &[Cell], colours: Colours) -> String {
    let style = |cell: &Cell| match cell {
        Cell::Empty => None,
        Cell::Passed(_) => Some(Style::Good),
        Cell::Dropped => Some(Style::Bad),
    };
    let character = |cell: &Cell| match cell {
        Cell::Empty => ' ',
        Cell::Passed(bar) => *bar,
        Cell::Dropped => DROPPED,
    };
    cells
        .chunk_by(|a, b| style(a) == style(b))
        .map(|run| {
            let text: String = run.iter().map(character).collect();
            style(&run[0]).map_or(text.clone(), |style| colours.paint(style, &text))
        })
        .collect()
}

/// Times below the ticks, each centred on its own.
fn axis_labels() -> String {
    let mut line = vec![' '; MARGIN + 1 + BEFORE + 1 + AFTER + 4];
    let mut put = |column: usize, label: &str| {
        let start = column + 1 - label.chars().count().div_ceil(2);
        line.splice(start..start + label.chars().count(), label.chars());
    };
    let instant = MARGIN + 1 + BEFORE;
    put(instant, "0");
    for ticks in 1..=BEFORE / TICK {
        put(instant - ticks * TICK, &format!("-{}", ticks * TICK * 10));
    }
    for ticks in 1..=AFTER / TICK {
        put(instant + ticks * TICK, &format!("+{}", ticks * TICK * 10));
    }
    let end = line.len();
    line.splice(end - 4..end, " ms".chars());
    line.into_iter().collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Packet;

    fn at(us: u64) -> BootInstant {
        BootInstant::from_nanos(us * 1000)
    }

    /// Four packets per 10 ms for a second; `arrives` decides by the millisecond.
    fn drawn(arrives: impl Fn(u64) -> bool) -> Vec<String> {
        let packet = |us| Packet {
            sent_at: at(us),
            returned_at: at(us),
            refused: false,
            arrived_at: arrives(us / 1000).then(|| at(us)),
        };
        let packets = (0..1_000_000).step_by(2500).map(packet).collect();
        let report = Report { packets, ..Report::default() };
        Chart::round([&report], at(500_000), "deadline").draw(Colours::Off).lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_cut_at_the_instant_changes_at_the_mark() {
        let lines = drawn(|ms| ms < 500);
        let bar = format!("{}┃{}", "█".repeat(BEFORE), "░".repeat(AFTER));
        assert_eq!(lines[1], format!("          4 ┤{bar}"));
        assert_eq!(lines[HEIGHT], format!("            │{bar}"));
        assert!(lines[0].ends_with("deadline"));
        assert!(lines.last().expect("legend").contains("140 came back   ░ 140 sent"), "{lines:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn labels_stand_below_their_ticks() {
        let lines = drawn(|_| true);
        let column = |line: &str, what: char| line.chars().position(|c| c == what).expect("there");
        let (axis, labels) = (&lines[HEIGHT + 1], &lines[HEIGHT + 2]);
        assert_eq!(column(axis, '┃'), column(lines[1].as_str(), '┃'));
        let zero = labels.chars().nth(column(axis, '┃'));
        assert_eq!(zero, Some('0'), "{labels}");
        assert!(labels.contains("-300") && labels.contains("+300"), "{labels}");
    }

    #[test]
    fn one_packet_that_slips_through_is_seen() {
        let lines = drawn(|ms| ms < 500 || ms == 650);
        assert_eq!(lines[HEIGHT].matches(&BARS[1..]).count(), BEFORE + 1, "{lines:#?}");
    }
}
