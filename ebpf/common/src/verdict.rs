//! From a packet and the gates to pass or drop.
//!
//! The rule: a packet passes only if every gate that one of its ends belongs to is open, and, when a socket of this host
//! sends it, if that socket was made no earlier than the opening of each of those gates. So what was written before or
//! during a fence stays in the host even after the gate has opened again. The same is asked of a socket that receives it,
//! where the hook knows that socket (a cgroup's): what a peer wrote during a fence reaches no connection of before.
//!
//! The order of the checks is the order of their cost: packets that belong to nobody pay one look-up per end that any
//! rule names and read no clock; a gate closed by a fence number is found closed without a clock; only an open gate's
//! packet pays for the time, and only one about to be dropped pays for the exemptions.

use crate::{
    layout::{
        ANY_PROTOCOL, Address, Event, ExemptKey, FENCE_NUMBERS, MAX_GATES, PortKey, PortRule, Rule, RuleSet, Settings,
        exempt, gate_flags, roles, settings_flags,
    },
    packet::{Class, Packet, Parsed, protocol, tcp_flags},
};

/// What a verdict asks of the kernel (or of a test).
pub trait Kernel {
    fn settings(&self) -> Settings;
    /// `CLOCK_BOOTTIME`, nanoseconds.
    fn now(&self) -> u64;
    fn rules(&self, address: &Address) -> Option<&RuleSet>;
    /// The rules of the longest prefix that covers the address.
    fn prefix_rules(&self, address: &Address) -> Option<&RuleSet>;
    fn port_rule(&self, key: &PortKey) -> Option<PortRule>;
    /// `None` where there is no such gate.
    fn gate(&self, gate: u32) -> Option<GateState>;
    /// `rst_until_ns` of a gate; 0 where there is no such gate.
    fn rst_until(&self, gate: u32) -> u64;
    fn is_exempt(&self, key: &ExemptKey) -> bool;
    /// The socket of this host that sends the packet. Asked only on the way out.
    fn socket(&self) -> Socket;
    /// The socket of this host that a packet on the way in is for, where the hook knows it. Asked only on the way in.
    fn receiver(&self) -> Socket;
    /// Stamps the socket with `now`, unless it has a stamp. False: no memory for it.
    fn stamp(&self, now: u64) -> bool;
    fn count(&self, gate: u32, outcome: Outcome, now: u64);
    fn note(&self, event: Event);

    // Seams. Where there is a verifier, the kernel puts each of these into a function of its own: it checks such a
    // function once, and forgets there what it knows of the caller, instead of following every combination of both.

    /// [`decide`]
    #[inline(always)]
    fn decide(&self, packet: &Packet, place: Place, rules: Rules<'_>) -> Verdict
    where
        Self: Sized,
    {
        decide(self, packet, place, rules)
    }

    /// [`consult`]
    #[inline(always)]
    fn consult(&self, rules: &RuleSet, address: &Address, end: End, findings: &mut Findings)
    where
        Self: Sized,
    {
        consult(self, rules, address, end, findings);
    }

    /// [`first_closed`]
    #[inline(always)]
    fn first_closed(&self) -> u32
    where
        Self: Sized,
    {
        first_closed(self)
    }
}

/// The rules of a packet's ends.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub destination: Option<&'a RuleSet>,
    pub source: Option<&'a RuleSet>,
}

/// A gate's deadline and generation, read so that they belong together, and its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateState {
    pub deadline_ns: u64,
    pub generation: u64,
    /// [`gate_flags`].
    pub flags: u64,
}

/// The sender of a packet, as far as its stamp goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Socket {
    /// None of this host's, or one that carries no data of a process: answered by the kernel, listening, a raw socket.
    None,
    /// A TCP socket that was made before the stamping began, or without memory for a stamp.
    UnstampedTcp,
    /// Of another protocol, whose sockets are stamped by their first packet through an open gate.
    Unstamped,
    /// The boot-clock instant at which it was made.
    Stamped(u64),
}

/// Where a packet is judged.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Goes out of this host, rather than in.
    pub egress: bool,
    /// On `lo`, where what goes out comes in: both directions count.
    pub loopback: bool,
    /// Came in through an interface and goes out through another: no socket of this host sent it.
    pub forwarded: bool,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    /// A gate was closed.
    Closed,
    /// The gates are open, but the socket belongs to an older opening.
    Stale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Belongs to no service.
    Foreign,
    Pass,
    Drop,
}

/// No gate.
pub const NONE: u32 = u32::MAX;
/// The clock has not been read.
const UNREAD: u64 = 0;

/// What the ends of a packet have brought to light so far.
#[repr(C)]
#[derive(Debug)]
pub struct Findings {
    /// The last gate that the packet needs, or [`NONE`].
    needed: u32,
    /// A closed gate that the packet needs, or [`NONE`]; one that no exemption helps past wins.
    closed: u32,
    /// The newest opening among the gates that the packet needs.
    generation: u64,
    now: u64,
    /// Not 0: an exemption may help past `closed`.
    exemptible: u32,
    /// Not 0: gates other than `closed` are closed as well, or may be.
    several: u32,
}

/// One end of a packet, as the rules see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    pub port: u16,
    pub protocol: u8,
    /// The bits of [`roles`] of which a rule needs at least one.
    pub any: u8,
    /// The bits of [`roles`] of which a rule needs every one.
    pub all: u8,
    /// The packet may belong to any rule of the address.
    pub whole: bool,
}

/// Judges a packet and counts it.
#[inline(always)]
pub fn judge<K: Kernel>(kernel: &K, parsed: Parsed, packet: &Packet, place: Place) -> Verdict {
    match parsed {
        Parsed::Other => Verdict::Foreign,
        Parsed::Unreadable => judge_unreadable(kernel),
        Parsed::Packet => {
            let settings = kernel.settings();
            let (source, destination) = ends(place);
            let find = |address: &Address, end: u8| {
                if settings.roles & end as u32 != 0 { find_rules(kernel, &settings, address) } else { None }
            };
            let destination = find(&packet.destination, destination);
            let source = find(&packet.source, source);
            if destination.is_none() && source.is_none() && !matches!(packet.class, Class::Neighbour) {
                return Verdict::Foreign;
            }
            kernel.decide(packet, place, Rules { destination, source })
        }
    }
}

/// Nobody knows whose it is: it passes only while every gate is open.
#[inline(always)]
fn judge_unreadable<K: Kernel>(kernel: &K) -> Verdict {
    if kernel.first_closed() == NONE {
        return Verdict::Foreign;
    }
    kernel.note(Event::UnreadableDropped);
    Verdict::Drop
}

/// The first closed gate of the host that rules name, or [`NONE`].
#[inline(always)]
pub fn first_closed<K: Kernel>(kernel: &K) -> u32 {
    let gates = kernel.settings().gates;
    let now = kernel.now();
    for gate in 0..MAX_GATES {
        if gate >= gates {
            break;
        }
        match kernel.gate(gate) {
            // All ones for an idle gate. A branch more per turn would double the verifier's work.
            Some(state) if now < state.deadline_ns | (state.flags & gate_flags::IDLE).wrapping_neg() => {}
            Some(_) | None => return gate,
        }
    }
    NONE
}

/// The roles of a packet's source and destination.
#[inline(always)]
fn ends(place: Place) -> (u8, u8) {
    match (place.loopback, place.egress) {
        (true, _) => (roles::OUT_SOURCE | roles::IN_SOURCE, roles::OUT_DESTINATION | roles::IN_DESTINATION),
        (false, true) => (roles::OUT_SOURCE, roles::OUT_DESTINATION),
        (false, false) => (roles::IN_SOURCE, roles::IN_DESTINATION),
    }
}

#[inline(always)]
fn find_rules<'a, K: Kernel>(kernel: &'a K, settings: &Settings, address: &Address) -> Option<&'a RuleSet> {
    match kernel.rules(address) {
        None if settings.flags & settings_flags::PREFIXES != 0 => kernel.prefix_rules(address),
        rules => rules,
    }
}

/// Judges a packet of which an end has rules, or may have.
#[inline(always)]
pub fn decide<K: Kernel>(kernel: &K, packet: &Packet, place: Place, rules: Rules<'_>) -> Verdict {
    let (source, destination) = ends(place);
    let neighbour = matches!(packet.class, Class::Neighbour);
    let mut all = 0;
    if place.loopback {
        all |= roles::LOOPBACK;
    }
    if neighbour {
        all |= roles::NEIGHBOURS;
    }
    let whole = neighbour || matches!(packet.class, Class::Vague);
    let end = End { port: 0, protocol: packet.protocol, any: 0, all, whole };
    let mut findings = Findings { needed: NONE, closed: NONE, generation: 0, now: UNREAD, exemptible: 1, several: 0 };
    if let Some(rules) = rules.destination {
        let end = End { port: packet.destination_port, any: destination, ..end };
        consult_quickly(kernel, rules, &packet.destination, end, &mut findings);
    }
    if let Some(rules) = rules.source {
        let end = End { port: packet.source_port, any: source, ..end };
        consult_quickly(kernel, rules, &packet.source, end, &mut findings);
    }
    if neighbour
        && packet.target != Address::ANY
        && let Some(rules) = find_rules(kernel, &kernel.settings(), &packet.target)
    {
        let end = End { any: if packet.claim { source } else { destination }, ..end };
        kernel.consult(rules, &packet.target, end, &mut findings);
    }

    if findings.needed == NONE {
        return Verdict::Foreign;
    }
    if findings.closed != NONE {
        return judge_closed(kernel, packet, place, &findings);
    }
    let current = if place.egress {
        place.forwarded || is_current(kernel, packet, &findings)
    } else {
        is_received_by_current(kernel, &findings)
    };
    if !current {
        kernel.count(findings.needed, Outcome::Stale, findings.now);
        return Verdict::Drop;
    }
    kernel.count(findings.needed, Outcome::Passed, findings.now);
    Verdict::Pass
}

/// Adds what the rules of one end's address say.
#[inline(always)]
pub fn consult<K: Kernel>(kernel: &K, rules: &RuleSet, address: &Address, end: End, findings: &mut Findings) {
    for (index, rule) in rules.rules.iter().enumerate() {
        if index as u32 >= rules.count {
            break;
        }
        apply(kernel, rule, end, findings);
    }
    if rules.more & end.any as u32 == 0 {
        return;
    }
    if !end.whole {
        let key = PortKey::new(*address, end.protocol, end.port);
        if let Some(rule) = kernel.port_rule(&key)
            && rule.roles & end.any != 0
            && rule.roles & end.all == end.all
        {
            // [`NONE`] in a corrupt map is a gate that does not exist, and not no gate.
            need(kernel, rule.gate.min(MAX_GATES), rule.roles, findings);
        }
    } else if end.all & roles::NEIGHBOURS == 0 {
        let closed = kernel.first_closed();
        if closed != NONE {
            findings.needed = closed;
            findings.closed = closed;
            findings.exemptible = 0;
            findings.several = 1;
        }
    }
}

/// Adds what one rule says.
#[inline(always)]
fn apply<K: Kernel>(kernel: &K, rule: &Rule, end: End, findings: &mut Findings) {
    if rule.roles & end.any == 0 || rule.roles & end.all != end.all {
        return;
    }
    let matches = end.whole
        || rule.protocol == ANY_PROTOCOL
        || (rule.protocol == end.protocol && rule.port_first <= end.port && end.port <= rule.port_last);
    if matches {
        need(kernel, rule.gate as u32, rule.roles, findings);
    }
}

/// [`consult`], without a call for the common case of one rule.
#[inline(always)]
fn consult_quickly<K: Kernel>(kernel: &K, rules: &RuleSet, address: &Address, end: End, findings: &mut Findings) {
    if rules.count == 1 && rules.more == 0 {
        let [rule, ..] = &rules.rules;
        apply(kernel, rule, end, findings);
    } else {
        kernel.consult(rules, address, end, findings);
    }
}

/// The packet needs this gate open.
#[inline(always)]
fn need<K: Kernel>(kernel: &K, gate: u32, rule_roles: u8, findings: &mut Findings) {
    findings.needed = gate;
    let mut open = false;
    match kernel.gate(gate) {
        Some(state) if state.deadline_ns >= FENCE_NUMBERS => {
            if findings.now == UNREAD {
                findings.now = kernel.now();
            }
            open = findings.now < state.deadline_ns;
            if state.generation > findings.generation {
                findings.generation = state.generation;
            }
        }
        Some(_) => {}
        None => kernel.note(Event::NoGate),
    }
    if !open && findings.closed != NONE && findings.closed != gate {
        findings.several = 1;
    }
    if !open && (findings.closed == NONE || findings.exemptible != 0) {
        findings.closed = gate;
        findings.exemptible = (rule_roles & roles::OWN == 0) as u32;
    }
}

/// A gate that the packet needs is closed.
#[inline(always)]
fn judge_closed<K: Kernel>(kernel: &K, packet: &Packet, place: Place, findings: &Findings) -> Verdict {
    // One gate's window is not another's: where several are closed, none counts.
    if packet.bare && findings.several == 0 {
        let until = kernel.rst_until(findings.closed);
        let now = if until == 0 { UNREAD } else { kernel.now() };
        // Out: the reset that tells an established peer. In: the acknowledgement that makes the kernel send one.
        let wanted = if place.egress {
            packet.tcp_flags & tcp_flags::RST != 0
        } else {
            packet.tcp_flags & (tcp_flags::SYN | tcp_flags::FIN) == 0
        };
        if wanted && now < until {
            kernel.count(findings.closed, Outcome::Passed, now);
            return Verdict::Pass;
        }
    }
    if findings.exemptible != 0 && is_exempt(kernel, packet, place) {
        kernel.note(Event::ExemptPassed);
        return Verdict::Pass;
    }
    kernel.count(findings.closed, Outcome::Closed, findings.now);
    Verdict::Drop
}

#[inline(always)]
fn is_exempt<K: Kernel>(kernel: &K, packet: &Packet, place: Place) -> bool {
    if !matches!(packet.class, Class::Flow) || place.forwarded {
        return false;
    }
    let (remote, remote_port, local_port) = if place.egress {
        (packet.destination, packet.destination_port, packet.source_port)
    } else {
        (packet.source, packet.source_port, packet.destination_port)
    };
    let protocol = packet.protocol;
    if kernel.is_exempt(&ExemptKey::new(exempt::LOCAL_PORT, Address::ANY, protocol, local_port)) {
        return true;
    }
    // What this host asks for is exempt, not what others ask of it: a peer chooses its own port freely.
    let begins = packet.tcp_flags & (tcp_flags::SYN | tcp_flags::ACK) == tcp_flags::SYN;
    if !place.egress && begins {
        return false;
    }
    let asked = place.egress || local_port >= UNPRIVILEGED || local_port == remote_port;
    kernel.is_exempt(&ExemptKey::new(exempt::REMOTE, remote, protocol, remote_port))
        || asked && kernel.is_exempt(&ExemptKey::new(exempt::REMOTE_PORT, Address::ANY, protocol, remote_port))
}

/// Ports below it are not given to sockets that only ask.
const UNPRIVILEGED: u16 = 1024;

/// The socket that sends the packet was made no earlier than the opening of every gate that the packet needs.
#[inline(always)]
fn is_current<K: Kernel>(kernel: &K, packet: &Packet, findings: &Findings) -> bool {
    if matches!(packet.class, Class::Neighbour) {
        return true;
    }
    match kernel.socket() {
        Socket::Stamped(made) => made >= findings.generation,
        // Without a socket a segment with payload could be anybody's old data; one without carries none.
        Socket::None => packet.protocol != protocol::TCP || packet.bare,
        Socket::UnstampedTcp => false,
        Socket::Unstamped => kernel.stamp(findings.now),
    }
}

/// No connection of an older opening receives the packet: what its peer wrote during the fence, and sends again after it,
/// would reach a process that has not learned of the fence, and could never be acknowledged.
#[inline(always)]
fn is_received_by_current<K: Kernel>(kernel: &K, findings: &Findings) -> bool {
    match kernel.receiver() {
        Socket::Stamped(made) => made >= findings.generation,
        Socket::UnstampedTcp => false,
        // Handshakes, and sockets that have sent nothing yet.
        Socket::None | Socket::Unstamped => true,
    }
}
