//! Random packets against the parser and the verdict.
//!
//! The first bytes of an input make a world of one gate and one rule, whose address is one that the packet names, so
//! that most inputs hit it; the others are the packet. Beyond not crashing, what must hold of every packet:
//!
//! * a closed gate lets nothing of its service pass, whether it was closed by a fence number or by the time;
//! * what its exceptions let pass is what they are for;
//! * an open gate lets pass what a current socket sends;
//! * every packet of a service is counted once, a foreign one never.
#![no_main]

use std::cell::Cell;

use libfuzzer_sys::fuzz_target;
use portcullis_common::layout::{
    Address, Event, ExemptKey, FENCE_NUMBERS, PortKey, PortRule, RULES_PER_ADDRESS, Rule, RuleSet, Settings, roles,
    settings_flags,
};
use portcullis_common::packet::{Bytes, Class, Packet, Parsed, parse_frame, parse_network};
use portcullis_common::verdict::{self, End, Findings, GateState, Kernel, Outcome, Place, Socket, Verdict, judge};

const NOW: u64 = 1 << 40;
const OPEN: u64 = NOW + 1;
const GENERATION: u64 = NOW - 1000;

/// What the first bytes of an input decide.
struct Choice {
    rule: Rule,
    /// Which address of the packet the rule stands beside.
    end: u8,
    /// The rule stands beside a prefix that covers every address.
    prefix: bool,
    /// The rule stands in the table of exact ports.
    exact: bool,
    place: Place,
    network: bool,
}

impl Choice {
    const BYTES: usize = 6;

    fn read([rule_roles, protocol, first, span, end, flags]: [u8; Self::BYTES]) -> Self {
        let flag = |bit: u8| flags & (1 << bit) != 0;
        Self {
            rule: Rule {
                gate: 0,
                port_first: u16::from(first),
                port_last: u16::from(first).saturating_add(u16::from(span)),
                protocol,
                roles: rule_roles,
            },
            end: end % 3,
            prefix: flag(0),
            exact: flag(1),
            place: Place { egress: flag(2), loopback: flag(3), forwarded: flag(4) },
            network: flag(5),
        }
    }
}

/// One gate, one rule, and what is counted.
struct World {
    deadline_ns: u64,
    rst_until_ns: u64,
    all_exempt: bool,
    address: Address,
    beside: RuleSet,
    prefix: bool,
    exact: Option<(PortKey, PortRule)>,
    settings: Settings,
    passed: Cell<u32>,
    dropped: Cell<u32>,
    unreadable: Cell<u32>,
    exempt: Cell<u32>,
}

impl World {
    fn new(choice: &Choice, packet: &Packet) -> Self {
        let (address, port) = match choice.end {
            0 => (packet.source, packet.source_port),
            1 => (packet.destination, packet.destination_port),
            _ => (packet.target, 0),
        };
        let rule = choice.rule;
        let mut beside = RuleSet { count: 0, more: 0, rules: [Rule::default(); RULES_PER_ADDRESS] };
        let mut exact = None;
        if choice.exact && !choice.prefix {
            beside.more = u32::from(rule.roles);
            let key = PortKey::new(address, rule.protocol, port);
            exact = Some((key, PortRule { gate: 0, roles: rule.roles, pad: [0; 3] }));
        } else {
            beside.count = 1;
            beside.rules[0] = rule;
        }
        let flags = if choice.prefix { settings_flags::PREFIXES } else { 0 };
        Self {
            deadline_ns: OPEN,
            rst_until_ns: 0,
            all_exempt: false,
            address,
            beside,
            prefix: choice.prefix,
            exact,
            settings: Settings { layout_version: 0, roles: u32::from(rule.roles), flags, gates: 1 },
            passed: Cell::new(0),
            dropped: Cell::new(0),
            unreadable: Cell::new(0),
            exempt: Cell::new(0),
        }
    }

    fn judge(&self, parsed: Parsed, packet: &Packet, place: Place) -> Verdict {
        for cell in [&self.passed, &self.dropped, &self.unreadable, &self.exempt] {
            cell.set(0);
        }
        let verdict = judge(self, parsed, packet, place);
        let counted = (self.passed.get(), self.dropped.get(), self.unreadable.get(), self.exempt.get());
        match verdict {
            Verdict::Foreign => assert_eq!(counted, (0, 0, 0, 0), "a foreign packet is counted"),
            Verdict::Pass => assert!(matches!(counted, (1, 0, 0, 0) | (0, 0, 0, 1)), "passed, counted {counted:?}"),
            Verdict::Drop => assert!(matches!(counted, (0, 1, 0, 0) | (0, 0, 1, 0)), "dropped, counted {counted:?}"),
        }
        verdict
    }
}

fn increment(cell: &Cell<u32>) {
    cell.set(cell.get() + 1);
}

impl Kernel for World {
    fn settings(&self) -> Settings {
        self.settings
    }

    fn now(&self) -> u64 {
        NOW
    }

    fn rules(&self, address: &Address) -> Option<&RuleSet> {
        (!self.prefix && *address == self.address).then_some(&self.beside)
    }

    fn prefix_rules(&self, _: &Address) -> Option<&RuleSet> {
        self.prefix.then_some(&self.beside)
    }

    fn port_rule(&self, key: &PortKey) -> Option<PortRule> {
        self.exact.as_ref().and_then(|(known, rule)| (known == key).then_some(*rule))
    }

    fn gate(&self, gate: u32) -> Option<GateState> {
        (gate == 0).then_some(GateState { deadline_ns: self.deadline_ns, generation: GENERATION, flags: 0 })
    }

    fn rst_until(&self, _: u32) -> u64 {
        self.rst_until_ns
    }

    fn is_exempt(&self, _: &ExemptKey) -> bool {
        self.all_exempt
    }

    fn socket(&self) -> Socket {
        Socket::Stamped(GENERATION)
    }

    fn receiver(&self) -> Socket {
        Socket::None
    }

    fn stamp(&self, _: u64) -> bool {
        true
    }

    fn count(&self, gate: u32, outcome: Outcome, _: u64) {
        assert_eq!(gate, 0, "there is one gate");
        increment(match outcome {
            Outcome::Passed => &self.passed,
            Outcome::Closed | Outcome::Stale => &self.dropped,
        });
    }

    fn note(&self, event: Event) {
        match event {
            Event::UnreadableDropped => increment(&self.unreadable),
            Event::ExemptPassed => increment(&self.exempt),
            Event::StampFailed | Event::NoGate => panic!("{event:?} without a cause"),
        }
    }
}

/// What an untagged IPv4 frame says, read the naive way: source, destination, and whether it is a TCP segment without
/// payload; `None` for that where there are options or fragments.
fn naive_ipv4(frame: &[u8]) -> Option<(Address, Address, Option<bool>)> {
    let network = frame.get(14..).filter(|_| frame[12..14] == [0x08, 0x00])?;
    let short = |offset: usize| network.get(offset..)?.first_chunk().copied().map(u16::from_be_bytes);
    let address = |offset: usize| network.get(offset..)?.first_chunk().copied().map(Address::v4);
    network.get(..20)?;
    let plain = network.first()? & 0xf == 5 && short(6)? & 0x3fff == 0 && *network.get(9)? == 6;
    let bare = match (short(2), network.get(32), network.get(33)) {
        (Some(length), Some(offset), Some(_)) if plain => {
            Some(usize::from(length) == 20 + usize::from(*offset >> 4) * 4)
        }
        _ => None,
    };
    Some((address(12)?, address(16)?, bare))
}

fuzz_target!(|data: &[u8]| {
    let Some((head, bytes)) = data.split_first_chunk::<{ Choice::BYTES }>() else { return };
    let choice = Choice::read(*head);
    let mut packet = Packet::UNKNOWN;
    let parsed = if choice.network { parse_network(bytes, &mut packet) } else { parse_frame(bytes, &mut packet) };
    if let (false, Some((source, destination, bare))) = (choice.network, naive_ipv4(bytes)) {
        assert_eq!((parsed, packet.source, packet.destination), (Parsed::Packet, source, destination));
        assert!(bare.is_none_or(|bare| packet.bare == bare), "a segment without payload");
    }
    assert!(!packet.bare || packet.class == Class::Flow, "only a segment that is known is known to be bare");

    let mut world = World::new(&choice, &packet);
    let open = world.judge(parsed, &packet, choice.place);
    assert_ne!(open, Verdict::Drop, "an open gate drops what a current socket sends");

    world.deadline_ns = NOW;
    let expired = world.judge(parsed, &packet, choice.place);
    world.deadline_ns = FENCE_NUMBERS - 1;
    let fenced = world.judge(parsed, &packet, choice.place);
    assert_eq!(expired, fenced, "time and fence number close alike");
    assert_ne!(fenced, Verdict::Pass, "a closed gate lets a packet pass");
    if open == Verdict::Pass {
        assert_eq!(fenced, Verdict::Drop, "a closed gate does not cut what needs it open");
    }

    world.rst_until_ns = OPEN;
    if world.judge(parsed, &packet, choice.place) == Verdict::Pass {
        assert!(packet.bare, "the time for resets is for segments without payload");
    }
    world.rst_until_ns = 0;
    world.all_exempt = true;
    if world.judge(parsed, &packet, choice.place) == Verdict::Pass {
        assert_eq!(choice.rule.roles & roles::OWN, 0, "no exemption helps past a service's own address");
        assert_eq!(packet.class, Class::Flow, "an exemption names ports");
    }
});
