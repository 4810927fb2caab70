//! What must hold between several values, and what is allowed but worth a word.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    time::Duration,
};

use portcullis_common::layout::MAX_GATES;

use super::{
    model::{Attach, Config, Lease, Prefix, Scope, Service, StoreLost},
    parse::Places,
    problem::{Problem, Warning, less_drift},
    read::{Item, Reader},
    report::Located,
    rules::{RuleError, RuleTable},
    values::few,
};

/// Where a service's values stand.
pub(super) struct ServicePlaces {
    pub(super) name: Range<usize>,
    pub(super) addresses: Option<Range<usize>>,
    pub(super) when_store_lost: Range<usize>,
}

/// Ranges of which no address is a host's, or only within the host itself.
const SPECIAL: [(Prefix, &str); 8] = [
    (v4([0, 0, 0, 0], 8), "unspecified"),
    (v4([127, 0, 0, 0], 8), "loopback"),
    (v4([224, 0, 0, 0], 4), "multicast"),
    (v4([255; 4], 32), "broadcast"),
    (v6([0; 8], 128), "unspecified"),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), "loopback"),
    (v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), "IPv4 in IPv6 notation"),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), "multicast"),
];

const fn v4([a, b, c, d]: [u8; 4], length: u8) -> Prefix {
    Prefix { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), length }
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], length: u8) -> Prefix {
    Prefix { address: IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), length }
}

/// The special range that shares addresses with `prefix`.
fn special(prefix: &Prefix) -> Option<(Prefix, &'static str)> {
    SPECIAL.iter().find(|(range, _)| range.overlaps(prefix)).copied()
}

pub(super) fn prefix(reader: &mut Reader<'_>, item: &Item<Prefix>) {
    let given = item.value;
    if given.length == 0 {
        reader.refuse(item.span.clone(), Problem::EveryAddress(given));
    } else if let Some((range, kind)) = special(&given) {
        let relation = if range.contains(&given) { "lies within" } else { "holds" };
        reader.refuse(item.span.clone(), Problem::SpecialAddress { given, relation, range, kind });
    }
}

/// The gate must open at all under the longest TTL that a holder may have.
pub(super) fn margin(reader: &mut Reader<'_>, place: Range<usize>, lease: &Lease, margin: Duration, drift_ppm: u32) {
    let Lease::Local { ttl_cap: ttl } = *lease;
    let usable = less_drift(ttl, drift_ppm);
    if margin >= usable {
        reader.refuse(place, Problem::NeverOpens { ttl, drift_ppm, usable, margin });
    }
}

pub(super) fn count(reader: &mut Reader<'_>, places: &Places) {
    let most = usize::try_from(MAX_GATES).unwrap_or(usize::MAX);
    if let Some(first) = places.services.get(most) {
        reader.refuse(first.name.clone(), Problem::TooManyServices);
    }
}

/// An exempt endpoint is no service's own address: its packets would pass the closed gate.
pub(super) fn exemptions(reader: &mut Reader<'_>, config: &Config, places: &Places) {
    for (endpoint, place) in config.agent.exempt.iter().zip(&places.exempt) {
        let host = Prefix::host(endpoint.address);
        if let Some((_, kind)) = special(&host) {
            // The store may listen on this very host.
            if kind != "loopback" {
                reader.refuse(place.clone(), Problem::SpecialEndpoint { address: endpoint.address, kind });
            }
            continue;
        }
        for service in &config.services {
            let named = service.addresses.iter().chain(&service.behind).find(|&prefix| prefix.contains(&host));
            if let Some(&prefix) = named {
                reader.refuse(
                    place.clone(),
                    Problem::ExemptIsService { endpoint: endpoint.to_string(), prefix, service: service.name.clone() },
                );
            }
        }
    }
}

/// The rules fit the kernel's tables, whichever slots the services get.
pub(super) fn rules(reader: &mut Reader<'_>, config: &Config, places: &Places) {
    let numbered: Vec<(u32, &Service)> = (0..).zip(&config.services).collect();
    if let Err(error) = RuleTable::compile(&numbered, &config.agent) {
        let last = match &error {
            RuleError::TooManyRules { services, .. }
            | RuleError::PortTaken { services, .. }
            | RuleError::NeighboursShared { services, .. }
            | RuleError::SlotTaken { services, .. } => services.last(),
            RuleError::NoSuchSlot { service, .. } => Some(service),
            RuleError::TableFull { .. } => None,
        };
        let index = config.services.iter().position(|service| Some(&service.name) == last);
        let place = index.and_then(|index| places.services.get(index)).map(|place| place.name.clone());
        reader.refuse(place.unwrap_or_default(), error.into());
    }
}

/// Renewals per TTL by custom of the field: two may be lost.
pub(super) const RENEWALS_PER_TTL: u32 = 3;

pub(super) fn warnings(reader: &Reader<'_>, config: &Config, places: &Places) -> Vec<Located<Warning>> {
    let mut warnings = Vec::new();
    let mut warn = |place: &Range<usize>, warning| warnings.push(reader.locate(warning, place.clone()));
    let agent = &config.agent;
    match agent.attach {
        Attach::Armed => {}
        Attach::OnFence => warn(&places.attach, Warning::OnFenceForfeits),
    }
    for (interface, place) in agent.exclude_interfaces.iter().zip(&places.excluded) {
        warn(place, Warning::Excluded(interface.clone()));
    }
    if config.services.is_empty() {
        warn(&(0..0), Warning::NoService);
    }
    for (service, place) in config.services.iter().zip(&places.services) {
        let name = || service.name.clone();
        match service.when_store_lost {
            StoreLost::Fence => {}
            StoreLost::Hold => warn(&place.when_store_lost, Warning::HoldForfeits(name())),
        }
        if let (Scope::Service, [_, ..], [], Some(addresses)) =
            (service.scope, &service.addresses[..], &service.ports[..], &place.addresses)
        {
            warn(addresses, Warning::EveryPort { service: name(), addresses: few(&service.addresses) });
        }
        let Lease::Local { ttl_cap: ttl } = service.lease;
        let span = less_drift(ttl, agent.drift_ppm).saturating_sub(service.margin);
        if span <= ttl / RENEWALS_PER_TTL {
            warn(&place.name, Warning::RenewalTooTight { service: name(), span, ttl });
        }
    }
    warnings.sort_by_key(|warning| (warning.line, warning.column));
    warnings
}
