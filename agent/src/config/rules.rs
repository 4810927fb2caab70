//! From services to the contents of the kernel's rule maps. Pure: the data path writes what this computes.
//!
//! One look-up answers for one end of a packet, so the entry of an address or prefix repeats the rules of every prefix
//! that covers it.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::{IpAddr, Ipv6Addr},
};

use portcullis_common::layout::{
    ANY_PROTOCOL, Address, ExemptKey, LAYOUT_VERSION, MAX_ADDRESSES, MAX_EXEMPT, MAX_GATES, MAX_PORTS, PortKey,
    PortRule, RULES_PER_ADDRESS, Rule, RuleSet, Settings, roles, settings_flags,
};
use thiserror::Error;

use super::{
    model::{Agent, Neighbours, Ports, Prefix, Protocol, Scope, Service},
    values::few,
};

mod exemptions;
mod plan;
#[cfg(test)]
mod tests;

pub use plan::MapChange;

/// The exact contents of the rule maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleTable {
    pub addresses: BTreeMap<Address, RuleSet>,
    /// Keyed by the prefix length over 128 bits (IPv4: 96 to 128) and the network.
    pub prefixes: BTreeMap<(u32, Address), RuleSet>,
    pub ports: BTreeMap<PortKey, PortRule>,
    pub exempt: BTreeSet<ExemptKey>,
    pub settings: Settings,
}

/// Why services cannot be put into the maps.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RuleError {
    #[error(
        "{address} needs {needed} rules of {}, but only {RULES_PER_ADDRESS} fit beside an address: join ports into \
         ranges, leave the ports out, or split the services over several addresses",
        join(services)
    )]
    TooManyRules { address: Prefix, needed: usize, services: Vec<String> },
    #[error(
        "{} name {ports} at {address}, which has more than {RULES_PER_ADDRESS} rules: beyond those a port belongs to \
         one service; give one of the services another address, or join ports into ranges",
        join(services)
    )]
    PortTaken { address: Prefix, ports: String, services: Vec<String> },
    #[error(
        "{} share {address}, and ARP and ND cannot be cut for one service of an address alone: set `neighbours = \
         \"keep\"` on each",
        join(services)
    )]
    NeighboursShared { address: Prefix, services: Vec<String> },
    #[error("the services need {needed} {what}, but the kernel's table has room for {limit}: name prefixes or ranges")]
    TableFull { what: &'static str, needed: usize, limit: u32 },
    #[error("service {service} has gate slot {slot}, but there are only {MAX_GATES}")]
    NoSuchSlot { service: String, slot: u32 },
    #[error("{} have the same gate slot {slot}", join(services))]
    SlotTaken { slot: u32, services: Vec<String> },
}

fn join(services: &[String]) -> String {
    let quoted: Vec<_> = services.iter().map(|name| format!("`{name}`")).collect();
    format!("{} {}", if quoted.len() == 1 { "service" } else { "services" }, few(&quoted))
}

/// A network on 128 bits; IPv4 lives in `::ffff:0:0/96`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Network {
    length: u32,
    bits: u128,
}

/// Where IPv4 begins.
const V4: Network = Network { length: 96, bits: 0xffff_0000_0000 };

impl Network {
    fn of(prefix: &Prefix) -> Self {
        let bits = Address::from(prefix.address).bits();
        let offset = if prefix.address.is_ipv4() { V4.length } else { 0 };
        Self { length: offset + u32::from(prefix.length), bits }
    }

    fn truncate(self, length: u32) -> Self {
        let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
        Self { length, bits: self.bits & mask }
    }

    fn is_v4(self) -> bool {
        self.length >= V4.length && self.truncate(V4.length) == V4
    }

    fn is_host(self) -> bool {
        self.length == 128
    }

    fn address(self) -> Address {
        Address::from_bits(self.bits)
    }

    /// Networks of the same family that cover this one, itself included. An IPv6 prefix never covers IPv4, although it
    /// may on 128 bits.
    fn covering(self, lengths: &BTreeSet<u32>) -> impl Iterator<Item = Self> + '_ {
        let shortest = if self.is_v4() { V4.length } else { 0 };
        lengths.range(shortest..=self.length).map(move |&length| self.truncate(length))
    }

    fn prefix(self) -> Prefix {
        let v6 = Ipv6Addr::from_bits(self.bits);
        let (address, length) = match v6.to_ipv4_mapped() {
            Some(v4) if self.is_v4() => (IpAddr::V4(v4), self.length - V4.length),
            Some(_) | None => (IpAddr::V6(v6), self.length),
        };
        // A length is at most 128.
        Prefix { address, length: u8::try_from(length).unwrap_or(u8::MAX) }
    }
}

/// The IP protocol number.
pub fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}

/// An exact port as the configuration writes it.
fn port_name(rule: &Rule) -> String {
    let protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    match protocols.into_iter().find(|&protocol| protocol_number(protocol) == rule.protocol) {
        Some(protocol) => Ports { protocol, first: rule.port_first, last: rule.port_last }.to_string(),
        None => format!("port {} of IP protocol {}", rule.port_first, rule.protocol),
    }
}

impl RuleTable {
    /// Compiles the rules of `services`, each with the slot of its gate, and the exemptions.
    ///
    /// # Errors
    /// When something does not fit the kernel's tables. Whether it fits does not depend on the slots.
    pub fn compile(services: &[(u32, &Service)], agent: &Agent) -> Result<Self, RuleError> {
        let names = names(services)?;
        let own = selectors(services);
        let lengths: BTreeSet<u32> = own.keys().map(|network| network.length).collect();

        let mut table = Self { exempt: exemptions::of(services, agent), ..Self::default() };
        for &network in own.keys() {
            let rules = network.covering(&lengths).filter_map(|covering| own.get(&covering)).flatten().copied();
            let rules = condense(rules);
            check_neighbours(network, &rules, &names)?;
            let set = table.place(network, rules, &names)?;
            if network.is_host() {
                table.addresses.insert(network.address(), set);
            } else {
                table.prefixes.insert((network.length, network.address()), set);
            }
        }
        // A short IPv6 prefix would match IPv4 packets too: an entry without rules in front of it prevents that.
        if !own.contains_key(&V4) && own.keys().any(|&network| V4.truncate(network.length.min(V4.length)) == network) {
            table.prefixes.insert((V4.length, V4.address()), RuleSet::default());
        }
        table.settings = table.settings_for(services);
        table.check_limits()?;
        Ok(table)
    }

    /// Puts as many rules as fit beside the address and the rest, exact ports all, into the table of ports.
    fn place(&mut self, network: Network, rules: Vec<Rule>, names: &BTreeMap<u32, &str>) -> Result<RuleSet, RuleError> {
        let (inline, rest) = rules.split_at(rules.len().min(RULES_PER_ADDRESS));
        let mut set = RuleSet::default();
        for (place, rule) in set.rules.iter_mut().zip(inline) {
            *place = *rule;
            set.count += 1;
        }
        if rest.iter().any(|rule| !network.is_host() || is_wide(rule)) {
            let all: BTreeSet<u32> = rules.iter().map(|rule| u32::from(rule.gate)).collect();
            let last = if network.is_host() { rules.iter().rposition(is_wide) } else { None };
            let needed = last.map_or(rules.len(), |last| last + 1);
            return Err(RuleError::TooManyRules {
                address: network.prefix(),
                needed,
                services: all.into_iter().map(|gate| name(names, gate)).collect(),
            });
        }
        for rule in rest {
            let key = PortKey::new(network.address(), rule.protocol, rule.port_first);
            match self.ports.entry(key) {
                Entry::Vacant(entry) => {
                    entry.insert(PortRule { gate: u32::from(rule.gate), roles: rule.roles, pad: [0; 3] });
                }
                Entry::Occupied(entry) => {
                    return Err(RuleError::PortTaken {
                        address: network.prefix(),
                        ports: port_name(rule),
                        services: vec![name(names, entry.get().gate), name(names, u32::from(rule.gate))],
                    });
                }
            }
            set.more |= u32::from(rule.roles & roles::ENDS);
        }
        Ok(set)
    }

    fn settings_for(&self, services: &[(u32, &Service)]) -> Settings {
        let sets = self.addresses.values().chain(self.prefixes.values());
        let roles =
            sets.fold(0, |all, set| in_use(set).iter().fold(all | set.more, |all, rule| all | u32::from(rule.roles)));
        let flags = if self.prefixes.is_empty() { 0 } else { settings_flags::PREFIXES };
        let gates = services.iter().map(|(slot, _)| slot + 1).max().unwrap_or(0);
        Settings { layout_version: LAYOUT_VERSION, roles: roles & u32::from(roles::ENDS), flags, gates }
    }

    fn check_limits(&self) -> Result<(), RuleError> {
        for (what, needed, limit) in [
            ("addresses", self.addresses.len(), MAX_ADDRESSES),
            ("prefixes", self.prefixes.len(), MAX_ADDRESSES),
            ("ports", self.ports.len(), MAX_PORTS),
            ("exempt endpoints", self.exempt.len(), MAX_EXEMPT),
        ] {
            if u32::try_from(needed).is_ok_and(|needed| needed <= limit) {
                continue;
            }
            return Err(RuleError::TableFull { what, needed, limit });
        }
        Ok(())
    }

    /// The gates that one end of a packet needs open, found as the kernel finds them. `role` is one of [`roles::ENDS`],
    /// together with those other [`roles`] that a rule must have; `port` is 0 for a protocol without ports.
    pub fn gates(&self, role: u8, address: IpAddr, protocol: u8, port: u16) -> BTreeSet<u32> {
        let address = Address::from(address);
        let mut gates = BTreeSet::new();
        if self.settings.roles & u32::from(role & roles::ENDS) == 0 {
            return gates;
        }
        let Some(set) = self.addresses.get(&address).or_else(|| self.longest_prefix(address)) else {
            return gates;
        };
        for rule in in_use(set) {
            if counts(rule.roles, role) && names_port(rule, protocol, port) {
                gates.insert(u32::from(rule.gate));
            }
        }
        if set.more & u32::from(role & roles::ENDS) != 0 {
            let rule = self.ports.get(&PortKey::new(address, protocol, port));
            gates.extend(rule.filter(|rule| counts(rule.roles, role)).map(|rule| rule.gate));
        }
        gates
    }

    /// The slots of all gates that a rule names.
    pub fn slots(&self) -> BTreeSet<u32> {
        let sets = self.addresses.values().chain(self.prefixes.values());
        let inline = sets.flat_map(in_use).map(|rule| u32::from(rule.gate));
        inline.chain(self.ports.values().map(|rule| rule.gate)).collect()
    }

    fn longest_prefix(&self, address: Address) -> Option<&RuleSet> {
        if self.settings.flags & settings_flags::PREFIXES == 0 {
            return None;
        }
        let host = Network { length: 128, bits: address.bits() };
        (0..=128).rev().find_map(|length| self.prefixes.get(&(length, host.truncate(length).address())))
    }
}

/// Whether a rule with `roles` counts at an end in `role`.
fn counts(roles: u8, role: u8) -> bool {
    let needed = role & !roles::ENDS;
    roles & role & roles::ENDS != 0 && roles & needed == needed
}

/// A neighbour's packet names an address and no port: it cannot be cut for one of several services.
fn check_neighbours(network: Network, rules: &[Rule], names: &BTreeMap<u32, &str>) -> Result<(), RuleError> {
    let own = || rules.iter().filter(|rule| rule.roles & roles::OWN != 0);
    let gates: BTreeSet<u32> = own().map(|rule| u32::from(rule.gate)).collect();
    if gates.len() < 2 || own().all(|rule| rule.roles & roles::NEIGHBOURS == 0) {
        return Ok(());
    }
    let services = gates.into_iter().map(|gate| name(names, gate)).collect();
    Err(RuleError::NeighboursShared { address: network.prefix(), services })
}

fn names<'a>(services: &[(u32, &'a Service)]) -> Result<BTreeMap<u32, &'a str>, RuleError> {
    let mut names = BTreeMap::new();
    for &(slot, service) in services {
        if slot >= MAX_GATES {
            return Err(RuleError::NoSuchSlot { service: service.name.clone(), slot });
        }
        if let Some(other) = names.insert(slot, service.name.as_str()) {
            return Err(RuleError::SlotTaken { slot, services: vec![other.to_owned(), service.name.clone()] });
        }
    }
    Ok(names)
}

fn name(names: &BTreeMap<u32, &str>, gate: u32) -> String {
    names.get(&gate).map_or_else(|| format!("gate {gate}"), |name| (*name).to_owned())
}

/// The rules that each network gets by being named itself.
fn selectors(services: &[(u32, &Service)]) -> BTreeMap<Network, Vec<Rule>> {
    let mut own: BTreeMap<Network, Vec<Rule>> = BTreeMap::new();
    for &(gate, service) in services {
        let neighbours = match service.neighbours {
            Neighbours::Cut => roles::NEIGHBOURS,
            Neighbours::Keep => 0,
        };
        for (prefixes, ports, roles) in [
            (&service.addresses, &service.ports, roles::LOCAL | neighbours),
            (&service.behind, &service.ports, roles::BEHIND | neighbours),
            (&service.remotes, &service.remote_ports, roles::REMOTE),
        ] {
            for prefix in prefixes {
                own.entry(Network::of(prefix)).or_default().extend(rules(gate, ports, roles));
            }
        }
        match service.scope {
            Scope::Service => {}
            Scope::Node => {
                for network in [Network { length: 0, bits: 0 }, V4] {
                    own.entry(network).or_default().extend(rules(gate, &[], roles::NODE));
                }
            }
        }
    }
    own
}

fn rules(slot: u32, ports: &[Ports], roles: u8) -> Vec<Rule> {
    // Slots have been checked; one beyond them would be no gate, at which every packet is dropped.
    let gate = u16::try_from(slot).unwrap_or(u16::MAX);
    if ports.is_empty() {
        return vec![Rule { gate, port_first: 0, port_last: u16::MAX, protocol: ANY_PROTOCOL, roles }];
    }
    let rule = |ports: &Ports| Rule {
        gate,
        port_first: ports.first,
        port_last: ports.last,
        protocol: protocol_number(ports.protocol),
        roles,
    };
    ports.iter().map(rule).collect()
}

fn is_wide(rule: &Rule) -> bool {
    rule.protocol == ANY_PROTOCOL || rule.port_first != rule.port_last
}

fn in_use(set: &RuleSet) -> &[Rule] {
    let count = usize::try_from(set.count).unwrap_or(RULES_PER_ADDRESS).min(RULES_PER_ADDRESS);
    &set.rules[..count]
}

fn names_port(rule: &Rule, protocol: u8, port: u16) -> bool {
    let named = rule.protocol == protocol && (rule.port_first..=rule.port_last).contains(&port);
    rule.protocol == ANY_PROTOCOL || named
}

/// Whether `wide` says everything that `rule` says.
fn covers(wide: &Rule, rule: &Rule) -> bool {
    let ports =
        wide.protocol == rule.protocol && wide.port_first <= rule.port_first && rule.port_last <= wide.port_last;
    wide.gate == rule.gate && wide.roles & rule.roles == rule.roles && (wide.protocol == ANY_PROTOCOL || ports)
}

/// Merges equal selectors, drops those that another covers, and sorts: what must stand beside the address comes first.
///
/// A neighbour's packet names no port and so finds only what stands beside the address: one rule for it comes first. The
/// table of ports holds one gate per port. So of the gates that name the same exact port all but the last must stand
/// beside the address; how many these are does not depend on the slots.
fn condense(rules: impl Iterator<Item = Rule>) -> Vec<Rule> {
    let mut roles: BTreeMap<_, u8> = BTreeMap::new();
    for rule in rules {
        *roles.entry((rule.gate, rule.protocol, rule.port_first, rule.port_last)).or_default() |= rule.roles;
    }
    let merged: Vec<Rule> = roles
        .into_iter()
        .map(|((gate, protocol, port_first, port_last), roles)| Rule { gate, port_first, port_last, protocol, roles })
        .collect();
    let wide: Vec<Rule> = merged.iter().filter(|rule| is_wide(rule)).copied().collect();
    let mut kept: Vec<Rule> =
        merged.into_iter().filter(|rule| !wide.iter().any(|wide| wide != rule && covers(wide, rule))).collect();
    let selector = |rule: &Rule| (!is_wide(rule), rule.protocol, rule.port_first, rule.port_last);
    let for_neighbours =
        kept.iter().filter(|rule| rule.roles & roles::NEIGHBOURS != 0).min_by_key(|rule| selector(rule)).copied();
    let mut last_gate: BTreeMap<(u8, u16), u16> = BTreeMap::new();
    for rule in kept.iter().filter(|&rule| !is_wide(rule) && Some(*rule) != for_neighbours) {
        let last = last_gate.entry((rule.protocol, rule.port_first)).or_default();
        *last = rule.gate.max(*last);
    }
    kept.sort_by_key(|rule| {
        let last = last_gate.get(&(rule.protocol, rule.port_first)) == Some(&rule.gate);
        (Some(*rule) != for_neighbours, !is_wide(rule), last, rule.gate, rule.protocol, rule.port_first, rule.port_last)
    });
    kept
}
