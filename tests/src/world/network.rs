//! Links, addresses, routes and translation between and inside namespaces.

use std::{io::Write, process::Stdio, time::Duration};

use super::{Namespace, World, namespace::finish};
use crate::clock;

/// How long a link may take to come up.
const UP: Duration = Duration::from_secs(5);

impl World {
    /// A veth pair between two namespaces, both ends up. Addresses are prefixes separated by spaces, IPv4 or IPv6; an
    /// empty string gives none (a bridge's port).
    #[track_caller]
    pub fn link(&self, a: &Namespace, a_name: &str, a_addresses: &str, b: &Namespace, b_name: &str, b_addresses: &str) {
        a.ip(&format!("link add {a_name} type veth peer name {b_name} netns {}", b.path().display()));
        for (namespace, interface, addresses) in [(a, a_name, a_addresses), (b, b_name, b_addresses)] {
            for address in addresses.split_whitespace() {
                namespace.add_address(interface, address);
            }
            namespace.ip(&format!("link set {interface} up"));
        }
        a.wait_up(a_name);
        b.wait_up(b_name);
    }
}

impl Namespace {
    /// Adds an address with its prefix length, such as `10.9.0.100/32`; usable at once (no duplicate detection).
    #[track_caller]
    pub fn add_address(&self, interface: &str, address: &str) {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        self.ip(&format!("addr add {address} dev {interface} {nodad}"));
    }

    #[track_caller]
    pub fn remove_address(&self, interface: &str, address: &str) {
        self.ip(&format!("addr del {address} dev {interface}"));
    }

    /// Adds a route as `ip route add` takes it, such as `203.0.113.0/24 via 10.9.0.1`.
    #[track_caller]
    pub fn add_route(&self, route: &str) {
        self.ip(&format!("{} route add {route}", family(route)));
    }

    #[track_caller]
    pub fn remove_route(&self, route: &str) {
        self.ip(&format!("{} route del {route}", family(route)));
    }

    /// A bridge that is up, with `ports` (interfaces of this namespace) attached; addresses as in [`World::link`].
    #[track_caller]
    pub fn bridge(&self, name: &str, ports: &[&str], addresses: &str) {
        self.ip(&format!("link add {name} type bridge forward_delay 0 mcast_snooping 0"));
        for port in ports {
            self.ip(&format!("link set {port} master {name}"));
        }
        for address in addresses.split_whitespace() {
            self.add_address(name, address);
        }
        self.ip(&format!("link set {name} up"));
        self.wait_up(name);
    }

    /// Turns on forwarding of IPv4 and IPv6.
    #[track_caller]
    pub fn forward(&self) {
        self.sysctl("net.ipv4.ip_forward", "1");
        self.sysctl("net.ipv6.conf.all.forwarding", "1");
    }

    /// Loads an nftables rule set inside the namespace.
    #[track_caller]
    pub fn nft(&self, ruleset: &str) {
        let mut child = self
            .command("nft")
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: nft (Debian: apt-get install nftables): {e}", self.name()));
        let mut input = child.stdin.take().expect("piped above");
        let written = input.write_all(ruleset.as_bytes());
        drop(input);
        finish(child.wait_with_output(), || format!("{}: nft -f -\n{ruleset}", self.name()));
        written.unwrap_or_else(|e| panic!("{}: write to nft: {e}", self.name()));
    }

    /// Translates what comes in for `from`, and what local programs send to it, to `to`: as a container engine publishes a
    /// port. Both are `ADDRESS:PORT` with IPv4 addresses; `protocol` is `tcp` or `udp`.
    #[track_caller]
    pub fn dnat(&self, protocol: &str, from: std::net::SocketAddrV4, to: std::net::SocketAddrV4) {
        let rule = format!("ip daddr {} {protocol} dport {} dnat to {to}", from.ip(), from.port());
        self.nft(&format!(
            "table ip nat {{
                chain pre {{ type nat hook prerouting priority -100; {rule}; }}
                chain out {{ type nat hook output priority -100; {rule}; }}
            }}"
        ));
    }

    /// Waits until an interface can carry packets.
    #[track_caller]
    pub fn wait_up(&self, interface: &str) {
        let show = format!("-o link show dev {interface}");
        let up = clock::wait_until(UP, || self.ip(&show).contains("state UP"));
        assert!(up, "{}: {interface} does not come up: {}", self.name(), self.ip(&show));
    }
}

fn family(route: &str) -> &'static str {
    if route.contains(':') { "-6" } else { "-4" }
}
