//! The interfaces of this network namespace.

use std::io;

use super::netlink::{self, LinkEvents, Netlink, attributes, half, text, word};

/// `struct ifinfomsg`: family, padding, type, index, flags, change.
const IFINFOMSG: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_XDP: u16 = 43;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_XDP_ATTACHED: u16 = 2;

/// An interface as the kernel tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number: an interface that comes back under its old name has another.
    pub index: u32,
    pub name: String,
    pub kind: InterfaceKind,
    pub(super) xdp: XdpAttached,
}

/// What an interface is, as far as attaching depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceKind {
    Loopback,
    /// Ethernet without a software driver's name: a network card.
    Physical,
    Veth,
    /// Any other with Ethernet frames: a bridge, a VLAN, a macvlan, a tap.
    Ethernet(String),
    /// Packets start with the network header: tun, WireGuard, IP tunnels.
    Layer3(String),
}

impl InterfaceKind {
    /// Frames start with an Ethernet header (`lo` included).
    pub const fn is_ethernet(&self) -> bool {
        !matches!(self, Self::Layer3(_))
    }

    /// XDP is used on network cards and veths only.
    pub(super) const fn wants_xdp(&self) -> bool {
        matches!(self, Self::Physical | Self::Veth)
    }
}

/// How XDP is attached, by whomever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum XdpAttached {
    None,
    Native,
    Generic,
    /// By hardware, or in several modes at once.
    Other,
}

/// What happened to an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// New, or re-created under a name that was there before.
    New {
        name: String,
        index: u32,
    },
    Gone {
        name: String,
        index: u32,
    },
    Renamed {
        from: String,
        to: String,
        index: u32,
    },
}

/// Follows the interfaces: what is there, and when that may have changed.
#[derive(Debug)]
pub(super) struct Interfaces {
    events: LinkEvents,
    known: Vec<Interface>,
}

impl Interfaces {
    /// Listens first and looks then, so that nothing is missed in between.
    pub(super) fn follow(netlink: &mut Netlink) -> io::Result<Self> {
        let events = LinkEvents::open()?;
        Ok(Self { events, known: list(netlink)? })
    }

    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.events.fd()
    }

    pub(super) fn known(&self) -> &[Interface] {
        &self.known
    }

    /// Empties the socket of notifications; true if [`Interfaces::refresh`] is due.
    pub(super) fn heard(&self) -> io::Result<bool> {
        self.events.drain()
    }

    /// Looks anew. A notification only wakes us: what it says may be outdated, and some may have been lost.
    pub(super) fn refresh(&mut self, netlink: &mut Netlink) -> io::Result<Vec<Change>> {
        let found = list(netlink)?;
        let changes = compare(&self.known, &found);
        self.known = found;
        Ok(changes)
    }
}

fn compare(known: &[Interface], found: &[Interface]) -> Vec<Change> {
    let by_index = |list: &[Interface], index: u32| list.iter().find(|one| one.index == index).cloned();
    let gone = known.iter().filter(|old| by_index(found, old.index).is_none());
    let gone = gone.map(|old| Change::Gone { name: old.name.clone(), index: old.index });
    let rest = found.iter().filter_map(|new| match by_index(known, new.index) {
        None => Some(Change::New { name: new.name.clone(), index: new.index }),
        Some(old) if old.name != new.name => {
            Some(Change::Renamed { from: old.name, to: new.name.clone(), index: new.index })
        }
        Some(_) => None,
    });
    gone.chain(rest).collect()
}

/// Every interface there is.
pub(super) fn list(netlink: &mut Netlink) -> io::Result<Vec<Interface>> {
    let links = netlink.dump(libc::RTM_GETLINK, &[0; IFINFOMSG])?;
    Ok(links.iter().filter(|link| link.kind == libc::RTM_NEWLINK).filter_map(parse).collect())
}

fn parse(link: &netlink::Message) -> Option<Interface> {
    let (hardware, index) = (half(&link.body, 2)?, word(&link.body, 4)?);
    let (mut name, mut driver, mut xdp) = (String::new(), String::new(), XdpAttached::None);
    for (kind, value) in attributes(link.body.get(IFINFOMSG..)?) {
        match kind {
            IFLA_IFNAME => name = text(value),
            IFLA_LINKINFO => {
                driver = attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND).map_or(driver, |(_, v)| text(v));
            }
            IFLA_XDP => {
                xdp = match attributes(value).find(|(kind, _)| *kind == IFLA_XDP_ATTACHED).map(|(_, v)| v) {
                    None | Some([] | [0, ..]) => XdpAttached::None,
                    Some([1, ..]) => XdpAttached::Native,
                    Some([2, ..]) => XdpAttached::Generic,
                    Some([_, ..]) => XdpAttached::Other,
                };
            }
            _ => {}
        }
    }
    let kind = match (hardware, driver.as_str()) {
        (libc::ARPHRD_LOOPBACK, _) => InterfaceKind::Loopback,
        (libc::ARPHRD_ETHER, "") => InterfaceKind::Physical,
        (libc::ARPHRD_ETHER, "veth") => InterfaceKind::Veth,
        (libc::ARPHRD_ETHER, _) => InterfaceKind::Ethernet(driver),
        (_, _) => InterfaceKind::Layer3(driver),
    };
    Some(Interface { index, name, kind, xdp })
}

/// Whether a pattern of `exclude_interfaces` names the interface: a `*` at the end matches the rest.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(index: u32, name: &str) -> Interface {
        Interface { index, name: name.to_owned(), kind: InterfaceKind::Veth, xdp: XdpAttached::None }
    }

    #[test]
    fn a_name_that_comes_back_is_another_interface() {
        let changes = compare(
            &[interface(1, "lo"), interface(2, "eth0"), interface(3, "a")],
            &[interface(1, "lo"), interface(4, "eth0"), interface(3, "b")],
        );
        assert_eq!(
            changes,
            [
                Change::Gone { name: "eth0".into(), index: 2 },
                Change::New { name: "eth0".into(), index: 4 },
                Change::Renamed { from: "a".into(), to: "b".into(), index: 3 },
            ]
        );
    }

    #[test]
    fn patterns() {
        assert!(matches("eth0", "eth0") && !matches("eth0", "eth01"));
        assert!(matches("veth*", "veth1a") && matches("*", "lo") && !matches("cali*", "eth0"));
    }
}
