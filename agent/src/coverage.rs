//! Listeners that are reachable at a service's address and that no selector of any service matches: they answer there
//! whatever the service's gate says.
//!
//! * This file: which listeners these are. Pure.
//! * [`listeners`]: the sockets that listen, from the kernel.
//! * [`owners`]: whose they are, from `/proc`.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use portcullis_common::layout::roles;

use crate::config::{
    model::{Prefix, Protocol, Service},
    rules::{RuleTable, protocol_number},
    values::few,
};

pub mod listeners;
pub mod owners;

pub use listeners::{CoverageError, listeners};

/// A socket that takes what anybody sends: TCP in LISTEN, UDP without a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    pub protocol: Protocol,
    /// Unspecified: every address of the host.
    pub address: IpAddr,
    pub port: u16,
    /// `::` without the IPv4 addresses of the host.
    pub v6_only: bool,
    /// The socket's number in `/proc/PID/fd`; 0 if it has none there.
    pub inode: u32,
}

/// A process that has a socket open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub pid: u32,
    /// As in `/proc/PID/comm`: at most 15 bytes.
    pub name: String,
}

/// A listener that no selector matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    pub listener: Listener,
    /// Filled in by [`owners::find`]; `None`: not known.
    pub owner: Option<Owner>,
    /// Of each of `services` the first such address.
    pub at: Vec<Prefix>,
    /// The services at whose addresses it is reachable.
    pub services: Vec<String>,
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listener { protocol, address, port, .. } = self.listener;
        match address {
            IpAddr::V4(v4) => write!(f, "{protocol} {v4}:{port}")?,
            IpAddr::V6(v6) => write!(f, "{protocol} [{v6}]:{port}")?,
        }
        if let Some(Owner { pid, name }) = &self.owner {
            write!(f, " ({name}, pid {pid})")?;
        }
        write!(f, " is reachable at {} and no selector of {} matches it", few(&self.at), few(&self.services))
    }
}

/// What of `listeners` is reachable at an address of `services`, of which `table` was compiled, and is in no gate.
///
/// Of a prefix that a service names, and a listener on every address, the first address of the prefix is looked at.
/// `behind` is no address of this host: what listens there is not seen from here.
pub fn uncovered(services: &[Service], table: &RuleTable, listeners: &[Listener]) -> Vec<Uncovered> {
    let mut found = Vec::new();
    for listener in listeners {
        let mut at = BTreeSet::new();
        let mut names = Vec::new();
        for service in services {
            let first = service.addresses.iter().filter_map(|prefix| listener.reachable_at(prefix)).find(|place| {
                let protocol = protocol_number(listener.protocol);
                table.gates(roles::IN_DESTINATION, place.address, protocol, listener.port).is_empty()
            });
            if let Some(first) = first {
                at.insert((first.address, first.length));
                names.push(service.name.clone());
            }
        }
        if !names.is_empty() {
            let at = at.into_iter().map(|(address, length)| Prefix { address, length }).collect();
            found.push(Uncovered { listener: listener.clone(), owner: None, at, services: names });
        }
    }
    found
}

impl Listener {
    /// Where within `prefix` the listener is reachable, provided that the host has the address.
    fn reachable_at(&self, prefix: &Prefix) -> Option<Prefix> {
        if self.address.is_unspecified() {
            let same_family = self.address.is_ipv4() == prefix.address.is_ipv4();
            let dual_stack = self.address.is_ipv6() && !self.v6_only;
            return (same_family || dual_stack).then_some(*prefix);
        }
        let host = Prefix::host(self.address.to_canonical());
        prefix.contains(&host).then_some(host)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::config::Config;

    fn listener(protocol: Protocol, at: &str, port: u16) -> Listener {
        Listener { protocol, address: at.parse().unwrap(), port, v6_only: false, inode: 0 }
    }

    /// What is found with `selectors` in the table of a service `pg-main`, and `more` after it.
    fn found(selectors: &str, more: &str, listener: Listener) -> Vec<String> {
        let text = format!(
            "[agent]\nidentity = \"a\"\n[[service]]\nname = \"pg-main\"\nlease = {{ source = \"local\" }}\n\
             neighbours = \"keep\"\n{selectors}\n{more}"
        );
        let config = Config::from_toml(&text, "test").unwrap_or_else(|errors| panic!("{errors}")).config;
        let numbered: Vec<_> = (0..).zip(&config.services).collect();
        let table = RuleTable::compile(&numbered, &config.agent).unwrap();
        uncovered(&config.services, &table, &[listener]).iter().map(Uncovered::to_string).collect()
    }

    const NARROW: &str = "addresses = [\"10.0.0.100\", \"10.1.0.0/16\", \"fd00::100\"]\nports = [\"tcp/5432\"]";

    #[test]
    fn a_listener_on_every_address_is_found_at_the_services() {
        let api = listener(Protocol::Tcp, "0.0.0.0", 8008);
        let says = "tcp 0.0.0.0:8008 is reachable at 10.0.0.100 and no selector of pg-main matches it";
        assert_eq!(found(NARROW, "", api.clone()), [says]);
        let owner = Some(Owner { pid: 12, name: "postgres".to_owned() });
        let found = Uncovered {
            listener: api,
            owner,
            at: vec!["10.0.0.100".parse().unwrap()],
            services: vec!["pg-main".to_owned()],
        };
        assert_eq!(
            found.to_string(),
            "tcp 0.0.0.0:8008 (postgres, pid 12) is reachable at 10.0.0.100 and no selector of pg-main matches it"
        );
    }

    #[test]
    fn what_a_selector_matches_is_covered() {
        assert_eq!(found(NARROW, "", listener(Protocol::Tcp, "0.0.0.0", 5432)), [""; 0]);
        assert_eq!(found(NARROW, "", listener(Protocol::Udp, "0.0.0.0", 5432)).len(), 1);
        assert_eq!(found("addresses = [\"10.0.0.100\"]", "", listener(Protocol::Udp, "0.0.0.0", 1)), [""; 0]);
        let node = "[[service]]\nname = \"node\"\nlease = { source = \"local\" }\nscope = \"node\"";
        assert_eq!(found(NARROW, node, listener(Protocol::Tcp, "0.0.0.0", 8008)), [""; 0]);
    }

    #[test]
    fn a_selector_of_another_service_covers_too() {
        let other = |ports: &str| {
            format!(
                "[[service]]\nname = \"api\"\nlease = {{ source = \"local\" }}\nneighbours = \"keep\"\n\
                 addresses = [\"10.0.0.100\"]\nports = [{ports:?}]"
            )
        };
        let narrow = "addresses = [\"10.0.0.100\"]\nports = [\"tcp/5432\"]";
        assert_eq!(found(narrow, &other("tcp/8008"), listener(Protocol::Tcp, "0.0.0.0", 8008)), [""; 0]);
        assert_eq!(
            found(narrow, &other("tcp/8009"), listener(Protocol::Tcp, "0.0.0.0", 8008)),
            ["tcp 0.0.0.0:8008 is reachable at 10.0.0.100 and no selector of pg-main, api matches it"]
        );
    }

    #[test]
    fn a_listener_is_where_it_listens() {
        for (at, says) in [
            ("127.0.0.1", None),
            ("10.0.0.7", None),
            ("fd00::7", None),
            ("10.0.0.100", Some("tcp 10.0.0.100:1 is reachable at 10.0.0.100")),
            ("10.1.2.3", Some("tcp 10.1.2.3:1 is reachable at 10.1.2.3")),
            ("::ffff:10.1.2.3", Some("tcp [::ffff:10.1.2.3]:1 is reachable at 10.1.2.3")),
            ("fd00::100", Some("tcp [fd00::100]:1 is reachable at fd00::100")),
        ] {
            let says: Vec<String> =
                says.iter().map(|says| format!("{says} and no selector of pg-main matches it")).collect();
            assert_eq!(found(NARROW, "", listener(Protocol::Tcp, at, 1)), says, "{at}");
        }
    }

    #[test]
    fn every_ipv6_address_is_every_ipv4_address_too_unless_it_says_not() {
        let narrow = "addresses = [\"10.1.0.0/16\"]\nports = [\"tcp/5432\"]";
        let both = listener(Protocol::Tcp, "::", 1);
        assert_eq!(
            found(narrow, "", both.clone()),
            ["tcp [::]:1 is reachable at 10.1.0.0/16 and no selector of pg-main matches it"]
        );
        assert_eq!(found(narrow, "", Listener { v6_only: true, ..both }), [""; 0]);
    }
}
