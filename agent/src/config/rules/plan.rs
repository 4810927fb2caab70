//! The order in which one table becomes another under traffic.

use portcullis_common::layout::{Address, ExemptKey, PortKey, PortRule, RuleSet, Settings};

use super::{RuleTable, in_use, names_port};

/// One write to a rule map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapChange {
    AddExempt(ExemptKey),
    SetPort(PortKey, PortRule),
    SetAddress(Address, RuleSet),
    /// The length is over 128 bits.
    SetPrefix(u32, Address, RuleSet),
    SetSettings(Settings),
    RemoveAddress(Address),
    RemovePrefix(u32, Address),
    RemovePort(PortKey),
    RemoveExempt(ExemptKey),
}

impl RuleTable {
    /// The writes that turn the maps from `self` into `new`, in an order in which a packet that a gate judges under both
    /// tables is judged by it after every single write, provided that no service changes its slot.
    ///
    /// Additions and changes come first, then the settings that announce them, then removals; so for a moment the maps
    /// hold both tables, and are full when the two together do not fit.
    ///
    /// One case has no such order: at one port of an address with more rules than stand beside it, one service's rule leaves the
    /// table of ports for a range beside the address while another's takes its place from there. Whoever cannot bear
    /// the instant between the two writes changes the services one after the other.
    pub fn plan(&self, new: &Self) -> Vec<MapChange> {
        let mut plan = Vec::new();
        plan.extend(new.exempt.difference(&self.exempt).map(|&key| MapChange::AddExempt(key)));

        let changed = new.ports.iter().filter(|&(key, rule)| self.ports.get(key) != Some(rule));
        let (after, before): (Vec<_>, Vec<_>) = changed.partition(|&(key, _)| self.moves_inline(key, new));
        plan.extend(before.into_iter().map(|(&key, &rule)| MapChange::SetPort(key, rule)));
        for (&address, &set) in &new.addresses {
            if self.addresses.get(&address) != Some(&set) {
                plan.push(MapChange::SetAddress(address, set));
            }
        }
        // Longer prefixes first: the entry that keeps a short IPv6 prefix off IPv4 is there before it.
        for (&(length, address), &set) in new.prefixes.iter().rev() {
            if self.prefixes.get(&(length, address)) != Some(&set) {
                plan.push(MapChange::SetPrefix(length, address, set));
            }
        }
        plan.extend(after.into_iter().map(|(&key, &rule)| MapChange::SetPort(key, rule)));

        if self.settings != new.settings {
            plan.push(MapChange::SetSettings(new.settings));
        }

        // Shorter prefixes first, hosts last: what an entry hid is then new, never an old one about to go.
        let gone = self.prefixes.keys().filter(|prefix| !new.prefixes.contains_key(prefix));
        plan.extend(gone.map(|&(length, address)| MapChange::RemovePrefix(length, address)));
        let gone = self.addresses.keys().filter(|address| !new.addresses.contains_key(address));
        plan.extend(gone.map(|&address| MapChange::RemoveAddress(address)));
        let gone = self.ports.keys().filter(|key| !new.ports.contains_key(key));
        plan.extend(gone.map(|&key| MapChange::RemovePort(key)));
        plan.extend(self.exempt.difference(&new.exempt).map(|&key| MapChange::RemoveExempt(key)));
        plan
    }

    /// Whether what the rule at `key` says now is said beside its address in `new`: then the address is written first.
    fn moves_inline(&self, key: &PortKey, new: &Self) -> bool {
        let Some(old) = self.ports.get(key) else { return false };
        let Some(set) = new.addresses.get(&key.address) else { return false };
        in_use(set).iter().any(|rule| u32::from(rule.gate) == old.gate && names_port(rule, key.protocol, key.port))
    }
}
