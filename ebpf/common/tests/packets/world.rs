//! A kernel in memory: its maps, its clock, one sending socket, and what was counted.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use portcullis_common::{
    layout::{
        ANY_PROTOCOL, Address, Event, ExemptKey, Gate, PortKey, PortRule, Rule, RuleSet, Settings, gate_flags, roles,
        settings_flags,
    },
    packet::{Packet, Parsed, parse_frame, parse_network},
    verdict::{GateState, Kernel, Outcome, Place, Socket, Verdict, judge},
};

pub(crate) const NOW: u64 = 1 << 40;
/// When the gates were opened.
pub(crate) const OPENED: u64 = NOW - 1_000_000;

pub(crate) const IN: Place = Place { egress: false, loopback: false, forwarded: false };
pub(crate) const OUT: Place = Place { egress: true, loopback: false, forwarded: false };
pub(crate) const FORWARDED: Place = Place { egress: true, loopback: false, forwarded: true };
pub(crate) const LO_IN: Place = Place { egress: false, loopback: true, forwarded: false };
pub(crate) const LO_OUT: Place = Place { egress: true, loopback: true, forwarded: false };

pub(crate) struct World {
    addresses: HashMap<Address, RuleSet>,
    /// The network as it is written, and its length over 128 bits.
    prefixes: Vec<(Address, u32, RuleSet)>,
    ports: HashMap<PortKey, PortRule>,
    pub(crate) exempt: HashSet<ExemptKey>,
    pub(crate) gates: Vec<Gate>,
    settings: Settings,
    pub(crate) socket: Socket,
    /// Who receives what comes in, as a cgroup's hook knows it.
    pub(crate) receiver: Socket,
    /// There is memory for a stamp.
    pub(crate) memory: bool,
    pub(crate) stamped: Cell<Option<u64>>,
    pub(crate) clock_reads: Cell<u32>,
    pub(crate) counted: RefCell<Vec<(u32, Outcome)>>,
    pub(crate) noted: RefCell<Vec<Event>>,
}

pub(crate) fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

/// A rule for every protocol.
pub(crate) fn every(gate: u16, roles: u8) -> Rule {
    Rule { gate, port_first: 0, port_last: u16::MAX, protocol: ANY_PROTOCOL, roles }
}

pub(crate) fn port(gate: u16, roles: u8, protocol: u8, port: u16) -> Rule {
    Rule { gate, port_first: port, port_last: port, protocol, roles }
}

impl World {
    /// `gates` open gates; the sender's socket is as old as their opening.
    pub(crate) fn new(gates: u32) -> Self {
        let gate = Gate { deadline_ns: NOW + 1, generation: OPENED, token: 7, ..Gate::default() };
        Self {
            addresses: HashMap::new(),
            prefixes: Vec::new(),
            ports: HashMap::new(),
            exempt: HashSet::new(),
            gates: (0..gates).map(|_| gate).collect(),
            settings: Settings { gates, ..Settings::default() },
            receiver: Socket::None,
            socket: Socket::Stamped(OPENED),
            memory: true,
            stamped: Cell::new(None),
            clock_reads: Cell::new(0),
            counted: RefCell::default(),
            noted: RefCell::default(),
        }
    }

    /// One gate, and its rule beside both of the service's addresses.
    pub(crate) fn of(rule: Rule) -> Self {
        let mut world = Self::new(1);
        for (own, _) in super::bytes::FAMILIES {
            world.rule(own, rule);
        }
        world
    }

    pub(crate) fn rule(&mut self, at: &str, rule: Rule) {
        push(self.addresses.entry(address(at)).or_default(), rule);
        self.settings.roles |= u32::from(rule.roles & roles::ENDS);
    }

    pub(crate) fn prefix(&mut self, at: &str, length: u32, rule: Rule) {
        let mut set = RuleSet::default();
        push(&mut set, rule);
        self.prefixes.push((address(at), length, set));
        self.settings.roles |= u32::from(rule.roles & roles::ENDS);
        self.settings.flags |= settings_flags::PREFIXES;
    }

    /// A rule in the table of exact ports.
    pub(crate) fn exact(&mut self, at: &str, rule: Rule) {
        let key = PortKey::new(address(at), rule.protocol, rule.port_first);
        self.ports.insert(key, PortRule { gate: u32::from(rule.gate), roles: rule.roles, pad: [0; 3] });
        self.addresses.entry(key.address).or_default().more |= u32::from(rule.roles & roles::ENDS);
        self.settings.roles |= u32::from(rule.roles & roles::ENDS);
    }

    pub(crate) fn close(&mut self, gate: usize) -> &mut Self {
        self.gates[gate].deadline_ns = 1;
        self
    }

    pub(crate) fn idle(&mut self, gate: usize) -> &mut Self {
        self.gates[gate].flags |= gate_flags::IDLE;
        self
    }

    /// Judges a frame and checks that it was counted once, or not at all if it is nobody's.
    pub(crate) fn frame(&self, bytes: &[u8], place: Place) -> Verdict {
        let mut packet = Packet::UNKNOWN;
        let parsed = parse_frame(bytes, &mut packet);
        self.parsed(parsed, &packet, place)
    }

    /// Likewise a packet without an Ethernet header.
    pub(crate) fn network(&self, bytes: &[u8], place: Place) -> Verdict {
        let mut packet = Packet::UNKNOWN;
        let parsed = parse_network(bytes, &mut packet);
        self.parsed(parsed, &packet, place)
    }

    fn parsed(&self, parsed: Parsed, packet: &Packet, place: Place) -> Verdict {
        self.counted.borrow_mut().clear();
        self.noted.borrow_mut().clear();
        self.clock_reads.set(0);
        let verdict = judge(self, parsed, packet, place);
        let counted: Vec<Outcome> = self.counted.borrow().iter().map(|(_, outcome)| *outcome).collect();
        let exempt = self.noted.borrow().contains(&Event::ExemptPassed);
        let unreadable = self.noted.borrow().contains(&Event::UnreadableDropped);
        match verdict {
            Verdict::Foreign => assert_eq!(counted, [], "nobody's, but counted"),
            Verdict::Pass if exempt => assert_eq!(counted, [], "exempt, but counted"),
            Verdict::Pass => assert_eq!(counted, [Outcome::Passed]),
            Verdict::Drop if unreadable => assert_eq!(counted, [], "unreadable, but counted at a gate"),
            Verdict::Drop => assert!(matches!(counted[..], [Outcome::Closed | Outcome::Stale]), "{counted:?}"),
        }
        verdict
    }
}

fn push(set: &mut RuleSet, rule: Rule) {
    set.rules[set.count as usize] = rule;
    set.count += 1;
}

fn covers(network: Address, length: u32, address: &Address) -> bool {
    let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
    (network.bits() ^ address.bits()) & mask == 0
}

impl Kernel for World {
    fn settings(&self) -> Settings {
        self.settings
    }

    fn now(&self) -> u64 {
        self.clock_reads.set(self.clock_reads.get() + 1);
        NOW
    }

    fn rules(&self, address: &Address) -> Option<&RuleSet> {
        self.addresses.get(address)
    }

    fn prefix_rules(&self, address: &Address) -> Option<&RuleSet> {
        let covering = self.prefixes.iter().filter(|(network, length, _)| covers(*network, *length, address));
        covering.max_by_key(|(_, length, _)| length).map(|(_, _, set)| set)
    }

    fn port_rule(&self, key: &PortKey) -> Option<PortRule> {
        self.ports.get(key).copied()
    }

    fn gate(&self, gate: u32) -> Option<GateState> {
        let gate = self.gates.get(gate as usize)?;
        Some(GateState { deadline_ns: gate.deadline_ns, generation: gate.generation, flags: gate.flags })
    }

    fn rst_until(&self, gate: u32) -> u64 {
        self.gates.get(gate as usize).map_or(0, |gate| gate.rst_until_ns)
    }

    fn is_exempt(&self, key: &ExemptKey) -> bool {
        self.exempt.contains(key)
    }

    fn socket(&self) -> Socket {
        self.socket
    }

    fn receiver(&self) -> Socket {
        self.receiver
    }

    fn stamp(&self, now: u64) -> bool {
        if self.memory {
            self.stamped.set(Some(now));
        }
        self.memory
    }

    fn count(&self, gate: u32, outcome: Outcome, _: u64) {
        self.counted.borrow_mut().push((gate, outcome));
    }

    fn note(&self, event: Event) {
        self.noted.borrow_mut().push(event);
    }
}
