//! `portcullis check`: what a configuration means, in numbers an operator can hold against the failover's own.

use std::{
    fmt::{self, Display},
    path::Path,
    time::Duration,
};

use super::{
    model::{Agent, Config, Lease, Neighbours, Scope, Service},
    parse::{LoadError, Loaded},
    problem::{less_drift, shortest_ttl},
    validate::RENEWALS_PER_TTL,
    values::{Drift, Span, few},
};

/// A valid file's meaning. Its [`Display`] is what `portcullis check` prints.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckReport {
    pub file: String,
    pub loaded: Loaded,
}

/// The deadline arithmetic of one service under the longest TTL it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    pub ttl: Duration,
    /// From a renewal's send time to the deadline: `ttl * (1 - drift) - margin`.
    pub open_for: Duration,
    /// How often a holder renews by custom.
    pub renewal: Duration,
    /// How much later than that a renewal may come before the gate closes.
    pub slack: Duration,
    /// A shorter TTL never opens the gate.
    pub shortest_ttl: Duration,
}

/// Reads and checks the file at `path`.
///
/// # Errors
/// When the file cannot be read, or with everything that is wrong with it.
pub fn check(path: &Path) -> Result<CheckReport, LoadError> {
    Ok(CheckReport { file: path.display().to_string(), loaded: Config::load(path)? })
}

impl Timing {
    pub fn of(service: &Service, agent: &Agent) -> Self {
        let Lease::Local { ttl_cap: ttl } = service.lease;
        let open_for = less_drift(ttl, agent.drift_ppm).saturating_sub(service.margin);
        // To the millisecond: nobody renews more exactly.
        let renewal = Duration::from_millis(u64::try_from((ttl / RENEWALS_PER_TTL).as_millis()).unwrap_or(u64::MAX));
        Self {
            ttl,
            open_for,
            renewal,
            slack: open_for.saturating_sub(renewal),
            shortest_ttl: shortest_ttl(service.margin, agent.drift_ppm),
        }
    }
}

impl Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config { agent, services } = &self.loaded.config;
        let (count, plural) = (services.len(), if services.len() == 1 { "" } else { "s" });
        writeln!(f, "{}: ok, {count} service{plural} on {}", self.file, agent.identity)?;
        for service in services {
            writeln!(f, "\nservice {}", service.name)?;
            selectors(f, service)?;
            let Timing { ttl, open_for, renewal, slack, shortest_ttl } = Timing::of(service, agent);
            let (drift, margin) = (Drift(agent.drift_ppm), Span(service.margin));
            writeln!(f, "  lease     local, TTL at most {}; drift {drift}, margin {margin}", Span(ttl))?;
            writeln!(f, "  deadline  at most {} after a renewal was sent", Span(open_for))?;
            writeln!(f, "  renewal   every {} (a third of the TTL), and at most {} late", Span(renewal), Span(slack))?;
            writeln!(f, "  TTL       one of {} or less never opens the gate", Span(shortest_ttl))?;
        }
        for warning in &self.loaded.warnings {
            writeln!(f, "\n{warning}")?;
        }
        Ok(())
    }
}

fn selectors(f: &mut fmt::Formatter<'_>, service: &Service) -> fmt::Result {
    match service.scope {
        Scope::Service => {}
        Scope::Node => writeln!(f, "  gate      the whole node, but for what is exempt")?,
    }
    for (what, prefixes, ports) in [
        ("addresses", &service.addresses, &service.ports),
        ("behind", &service.behind, &service.ports),
        ("remotes", &service.remotes, &service.remote_ports),
    ] {
        if !prefixes.is_empty() {
            let ports = if ports.is_empty() { "every protocol and port".to_owned() } else { few(ports) };
            writeln!(f, "  gate      {what} {}: {ports}", few(prefixes))?;
        }
    }
    if !service.addresses.is_empty() || !service.behind.is_empty() {
        let neighbours = match service.neighbours {
            Neighbours::Cut => "cut with them",
            Neighbours::Keep => "left alone",
        };
        writeln!(f, "  gate      ARP and ND of addresses and behind: {neighbours}")?;
    }
    Ok(())
}
