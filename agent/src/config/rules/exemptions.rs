//! What no gate cuts.

use std::collections::BTreeSet;

use portcullis_common::layout::{Address, ExemptKey, exempt};

use super::protocol_number;
use crate::config::model::{Agent, Protocol, Scope, Service};

/// Inbound SSH.
const SSH: u16 = 22;
/// What a node needs to find its way: a whole node fenced can still resolve names, keep its address and its clock.
const NODE_REMOTE_PORTS: [(Protocol, u16); 5] =
    [(Protocol::Tcp, 53), (Protocol::Udp, 53), (Protocol::Udp, 67), (Protocol::Udp, 547), (Protocol::Udp, 123)];
/// The DHCP client's own ports, at which offers arrive by broadcast or from a relay.
const NODE_LOCAL_PORTS: [(Protocol, u16); 2] = [(Protocol::Udp, 68), (Protocol::Udp, 546)];

/// The endpoints the configuration names, and those without which a fenced node could not be reached.
pub(super) fn of(services: &[(u32, &Service)], agent: &Agent) -> BTreeSet<ExemptKey> {
    let key = |side, address, (protocol, port)| ExemptKey::new(side, address, protocol_number(protocol), port);
    let mut keys: BTreeSet<ExemptKey> = agent
        .exempt
        .iter()
        .map(|endpoint| key(exempt::REMOTE, endpoint.address.into(), (endpoint.protocol, endpoint.port)))
        .collect();
    if services.iter().any(|(_, service)| service.scope == Scope::Node) {
        keys.extend(NODE_REMOTE_PORTS.map(|port| key(exempt::REMOTE_PORT, Address::ANY, port)));
        keys.extend(NODE_LOCAL_PORTS.map(|port| key(exempt::LOCAL_PORT, Address::ANY, port)));
        if agent.exempt_ssh {
            keys.insert(key(exempt::LOCAL_PORT, Address::ANY, (Protocol::Tcp, SSH)));
        }
    }
    keys
}
