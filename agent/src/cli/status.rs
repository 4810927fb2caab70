//! `status`: what a person wants to see at three in the morning.

use std::{
    io::{self, IsTerminal as _, Write},
    time::Duration,
};

use serde::Serialize;

use super::{CliError, EXIT_OK, StatusArgs};
use crate::api::{
    client::{Client, ClientError},
    types::{Confirmation, Coverage, Health, ServiceStatus, State},
};

const WATCH_EVERY: Duration = Duration::from_secs(1);
/// Cursor to the top left, then clear to the end of the screen: no flicker.
const REDRAW: &str = "\x1b[H\x1b[J";

#[derive(Serialize)]
struct Report {
    health: Health,
    services: Vec<ServiceStatus>,
    coverage: Coverage,
}

pub(super) async fn status(client: &Client, args: &StatusArgs) -> Result<u8, CliError> {
    let redraw = args.watch && !args.json && io::stdout().is_terminal();
    loop {
        let report = look(client, args.service.as_deref()).await;
        let mut text = Vec::new();
        match (&report, args.json) {
            // While watching, an agent that restarts is part of the picture.
            (Err(error), _) if args.watch && error.is_passing() => writeln!(text, "{error}")?,
            (Err(_), _) => {}
            (Ok(report), true) => {
                serde_json::to_writer(&mut text, report).map_err(io::Error::from)?;
                writeln!(text)?;
            }
            (Ok(report), false) => render(&mut text, report)?,
        }
        if !args.watch {
            report?;
        } else if let Err(error) = report
            && !error.is_passing()
        {
            return Err(error.into());
        }
        let mut out = io::stdout().lock();
        if redraw {
            out.write_all(REDRAW.as_bytes())?;
        }
        out.write_all(&text)?;
        out.flush()?;
        drop(out);
        if !args.watch {
            return Ok(EXIT_OK);
        }
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

async fn look(client: &Client, service: Option<&str>) -> Result<Report, ClientError> {
    let services = match service {
        Some(name) => vec![client.service(name).await?],
        None => client.services().await?.services,
    };
    let mut coverage = client.coverage().await?;
    if service.is_some() {
        coverage.warnings.retain(|warning| warning.service.is_none() || warning.service.as_deref() == service);
    }
    Ok(Report { health: client.health().await?, services, coverage })
}

fn render(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let degraded = &report.health.degraded;
    if !degraded.is_empty() {
        writeln!(out, "DEGRADED: the guarantee is weakened on this host")?;
        for reason in degraded {
            writeln!(out, "  ! {reason}")?;
        }
        writeln!(out)?;
    }
    let header = ["SERVICE", "STATE", "TOKEN", "LEFT", "HOLDER", "CONFIRMED", "PASSED", "DROPPED", "REASON"];
    let rows: Vec<[String; 9]> = report.services.iter().map(row).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    line(out, &header.map(str::to_owned), &widths)?;
    for (row, service) in rows.iter().zip(&report.services) {
        line(out, row, &widths)?;
        for reason in &service.degraded {
            writeln!(out, "  ! DEGRADED: {reason}")?;
        }
        if service.confirmation.is_some_and(|confirmation| confirmation != Confirmation::Confirmed) {
            for evidence in &service.evidence {
                writeln!(out, "  ! {evidence}")?;
            }
        }
    }
    if report.services.is_empty() {
        writeln!(out, "(no services are configured)")?;
    }
    if !report.coverage.warnings.is_empty() {
        writeln!(out, "\nNOT COVERED:")?;
        for warning in &report.coverage.warnings {
            let service = warning.service.as_deref().unwrap_or("host");
            writeln!(out, "  ! {service}: {} ({})", warning.detail, warning.kind)?;
        }
    }
    Ok(())
}

/// Cells two blanks apart; the last one as long as it is. Numbers stand to the right.
fn line(out: &mut impl Write, cells: &[String; 9], widths: &[usize]) -> io::Result<()> {
    const RIGHT: [usize; 4] = [2, 3, 6, 7];
    let last = cells.len() - 1;
    for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
        match column {
            column if column == last => write!(out, "{cell}")?,
            column if RIGHT.contains(&column) => write!(out, "{cell:>width$}  ")?,
            _ => write!(out, "{cell:<width$}  ")?,
        }
    }
    writeln!(out)
}

fn row(service: &ServiceStatus) -> [String; 9] {
    let none = || "-".to_owned();
    let reason = match &service.manual_hold {
        Some(hold) if hold.reason.is_empty() => format!("fenced by hand (uid {})", hold.uid),
        Some(hold) => format!("fenced by hand (uid {}): {}", hold.uid, hold.reason),
        None => service.reason.clone(),
    };
    [
        service.name.clone(),
        state(service.state).to_owned(),
        service.token.map_or_else(none, |token| token.to_string()),
        service.time_left_ms.map_or_else(none, time_left),
        service.holder.clone().unwrap_or_else(none),
        service.confirmation.map_or_else(none, |confirmation| confirmation_name(confirmation).to_owned()),
        service.counters.passed_packets.to_string(),
        dropped(service),
        reason,
    ]
}

fn dropped(service: &ServiceStatus) -> String {
    let counters = &service.counters;
    match counters.stale_packets {
        0 => counters.dropped_packets.to_string(),
        stale => format!("{} ({stale} stale)", counters.dropped_packets),
    }
}

const fn state(state: State) -> &'static str {
    match state {
        State::Fenced => "FENCED",
        State::Opening => "opening",
        State::Serving => "serving",
        State::Fencing => "FENCING",
    }
}

const fn confirmation_name(confirmation: Confirmation) -> &'static str {
    match confirmation {
        Confirmation::Confirmed => "confirmed",
        Confirmation::Unconfirmed => "UNCONFIRMED",
        Confirmation::Failed => "FAILED",
    }
}

fn time_left(ms: u64) -> String {
    match ms {
        0..60_000 => format!("{}.{}s", ms / 1000, ms % 1000 / 100),
        _ => format!("{}m{:02}s", ms / 60_000, ms / 1000 % 60),
    }
}
