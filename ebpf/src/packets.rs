//! One packet at one hook: its bytes, the maps, the verdict.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::bpf_ktime_get_boot_ns,
    maps::lpm_trie::Key,
    programs::XdpContext,
};
use portcullis_common::{
    layout::{Address, Counters, Event, ExemptKey, Gate, Hook, MAX_GATES, PortKey, PortRule, RuleSet, Settings},
    packet::{Class, Packet, Parsed, parse_frame, parse_network},
    verdict::{
        End, Findings, GateState, Kernel, Outcome, Place, Rules, Socket, Verdict, consult, decide, first_closed, judge,
    },
};

use crate::{
    bytes::{Direct, Fragments, Frame, Network},
    maps::{ADDRESSES, COUNTERS, EVENTS, EXEMPT, GATES, PORTS, PREFIXES, SETTINGS},
    sockets,
};

/// The loopback interface has this index in every network namespace.
const LOOPBACK: u32 = 1;
/// While a gate is closed by a fence number no clock is read but for every so many drops.
const TIMED_DROPS: u64 = 64;

#[inline(always)]
pub(crate) fn judge_xdp(context: &XdpContext) -> Verdict {
    let mut packet = Packet::UNKNOWN;
    let parsed = parse_frame(&Direct { start: context.data(), end: context.data_end() }, &mut packet);
    if is_undecided(parsed, &packet) {
        // Without the helper for the rest it is left to tc, which has one.
        return Verdict::Foreign;
    }
    judge(&Xdp::new(context), parsed, &packet, place_of_xdp(context.ctx))
}

#[inline(always)]
pub(crate) fn judge_xdp_fragments(context: &XdpContext) -> Verdict {
    let mut packet = Packet::UNKNOWN;
    let mut parsed = parse_frame(&Direct { start: context.data(), end: context.data_end() }, &mut packet);
    if is_undecided(parsed, &packet) {
        parsed = read_parsed(parse_fragments(context.ctx, &mut packet));
    }
    judge(&Xdp::new(context), parsed, &packet, place_of_xdp(context.ctx))
}

/// A frame that starts with an Ethernet header.
#[inline(always)]
pub(crate) fn judge_frame(skb: *mut __sk_buff, hook: Hook) -> Verdict {
    let mut packet = Packet::UNKNOWN;
    let mut parsed = parse_frame(&direct(skb), &mut packet);
    if is_undecided(parsed, &packet) {
        parsed = read_parsed(parse_whole(skb, &mut packet));
    }
    judge(&Skb { skb, hook: hook as u32 }, parsed, &packet, place_of_skb(skb, hook as u32))
}

/// A packet of an interface with another link layer, or none.
#[inline(always)]
pub(crate) fn judge_network(skb: *mut __sk_buff, hook: Hook) -> Verdict {
    let mut packet = Packet::UNKNOWN;
    let parsed = read_parsed(parse_inner(skb, &mut packet));
    judge(&Skb { skb, hook: hook as u32 }, parsed, &packet, place_of_skb(skb, hook as u32))
}

/// A packet as a cgroup sees it: from its network header.
#[inline(always)]
pub(crate) fn judge_cgroup(skb: *mut __sk_buff, hook: Hook) -> Verdict {
    let mut packet = Packet::UNKNOWN;
    let mut parsed = parse_network(&direct(skb), &mut packet);
    if is_undecided(parsed, &packet) {
        parsed = read_parsed(parse_inner(skb, &mut packet));
    }
    judge(&Skb { skb, hook: hook as u32 }, parsed, &packet, place_of_skb(skb, hook as u32))
}

#[inline(always)]
fn direct(skb: *mut __sk_buff) -> Direct {
    // SAFETY: the context is the program's own.
    let skb = unsafe { &*skb };
    Direct { start: skb.data as usize, end: skb.data_end as usize }
}

#[inline(always)]
fn place_of_xdp(xdp: *mut xdp_md) -> Place {
    // SAFETY: the context is the program's own.
    let xdp = unsafe { &*xdp };
    Place { egress: false, loopback: xdp.ingress_ifindex == LOOPBACK, forwarded: false }
}

#[inline(always)]
fn place_of_skb(skb: *mut __sk_buff, hook: u32) -> Place {
    // SAFETY: the context is the program's own.
    let skb = unsafe { &*skb };
    let egress = hook == Hook::TcOut as u32 || hook == Hook::CgroupOut as u32;
    Place { egress, loopback: skb.ifindex == LOOPBACK, forwarded: egress && skb.ingress_ifindex != 0 }
}

/// The bytes at hand did not suffice, or the packet is of a kind that looks the same.
#[inline(always)]
fn is_undecided(parsed: Parsed, packet: &Packet) -> bool {
    match parsed {
        Parsed::Other => false,
        Parsed::Unreadable => true,
        Parsed::Packet => matches!(packet.class, Class::Vague),
    }
}

// The verifier checks a global function once, for any arguments, instead of once for every way to its call; that is what
// keeps loading fast and far below the limit. Its arguments are at most five scalars and pointers, which may be null.

/// Parses what direct access left undecided; the answer is a [`Parsed`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn parse_fragments(xdp: *mut xdp_md, packet: *mut Packet) -> u32 {
    // SAFETY: null, or on the caller's stack, and nobody else's.
    let Some(packet) = (unsafe { packet.as_mut() }) else { return Parsed::Unreadable as u32 };
    *packet = Packet::UNKNOWN;
    parse_frame(&Fragments(xdp), packet) as u32
}

/// Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn parse_whole(skb: *mut __sk_buff, packet: *mut Packet) -> u32 {
    // SAFETY: null, or on the caller's stack, and nobody else's.
    let Some(packet) = (unsafe { packet.as_mut() }) else { return Parsed::Unreadable as u32 };
    *packet = Packet::UNKNOWN;
    parse_frame(&Frame(skb), packet) as u32
}

/// Likewise, from the network header on.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn parse_inner(skb: *mut __sk_buff, packet: *mut Packet) -> u32 {
    // SAFETY: null, or on the caller's stack, and nobody else's.
    let Some(packet) = (unsafe { packet.as_mut() }) else { return Parsed::Unreadable as u32 };
    *packet = Packet::UNKNOWN;
    parse_network(&Network(skb), packet) as u32
}

/// [`decide`]; the answer is a [`Verdict`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn decide_xdp(
    xdp: *mut xdp_md,
    packet: *const Packet,
    destination: *const RuleSet,
    source: *const RuleSet,
    length: u64,
) -> u32 {
    // SAFETY: null, or on the caller's stack.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return Verdict::Drop as u32 };
    // SAFETY: null, or a map's value.
    let destination = unsafe { destination.as_ref() };
    // SAFETY: null, or a map's value.
    let source = unsafe { source.as_ref() };
    decide(&Xdp { xdp, length }, packet, place_of_xdp(xdp), Rules { destination, source }) as u32
}

/// [`decide`]; `hook` is a [`Hook`], the answer a [`Verdict`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn decide_skb(
    skb: *mut __sk_buff,
    packet: *const Packet,
    destination: *const RuleSet,
    source: *const RuleSet,
    hook: u32,
) -> u32 {
    // SAFETY: null, or on the caller's stack.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return Verdict::Drop as u32 };
    // SAFETY: null, or a map's value.
    let destination = unsafe { destination.as_ref() };
    // SAFETY: null, or a map's value.
    let source = unsafe { source.as_ref() };
    decide(&Skb { skb, hook }, packet, place_of_skb(skb, hook), Rules { destination, source }) as u32
}

/// [`consult`]. `end` is an [`End`], packed by [`pack`]; the answer is 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn consult_rules(rules: *const RuleSet, address: *const Address, end: u64, findings: *mut Findings) -> u32 {
    // SAFETY: null, or a map's value.
    let Some(rules) = (unsafe { rules.as_ref() }) else { return 0 };
    // SAFETY: null, or on the caller's stack.
    let Some(address) = (unsafe { address.as_ref() }) else { return 0 };
    // SAFETY: null, or on the caller's stack, and nobody else's.
    if let Some(findings) = unsafe { findings.as_mut() } {
        consult(&Maps, rules, address, unpack(end), findings);
    }
    0
}

/// [`first_closed`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn first_closed_gate() -> u32 {
    first_closed(&Maps)
}

/// An [`End`] as one argument.
#[inline(always)]
fn pack(end: End) -> u64 {
    let End { port, protocol, any, all, whole } = end;
    port as u64 | (protocol as u64) << 16 | (any as u64) << 24 | (all as u64) << 32 | (whole as u64) << 40
}

#[inline(always)]
fn unpack(end: u64) -> End {
    End {
        port: end as u16,
        protocol: (end >> 16) as u8,
        any: (end >> 24) as u8,
        all: (end >> 32) as u8,
        whole: end >> 40 != 0,
    }
}

#[inline(always)]
fn read_parsed(parsed: u32) -> Parsed {
    match parsed {
        p if p == Parsed::Other as u32 => Parsed::Other,
        p if p == Parsed::Packet as u32 => Parsed::Packet,
        _ => Parsed::Unreadable,
    }
}

#[inline(always)]
fn read_verdict(verdict: u32) -> Verdict {
    match verdict {
        v if v == Verdict::Foreign as u32 => Verdict::Foreign,
        v if v == Verdict::Pass as u32 => Verdict::Pass,
        _ => Verdict::Drop,
    }
}

#[inline(always)]
pub(crate) fn note(event: Event) {
    if let Some(count) = EVENTS.get_ptr_mut(event as u32) {
        // SAFETY: a per-CPU map's value, of this CPU.
        unsafe { *count += 1 };
    }
}

/// The maps and the clock.
struct Maps;

/// A packet in XDP, which sees no socket.
struct Xdp {
    xdp: *mut xdp_md,
    length: u64,
}

impl Xdp {
    #[inline(always)]
    fn new(context: &XdpContext) -> Self {
        Self { xdp: context.ctx, length: (context.data_end() - context.data()) as u64 }
    }
}

/// A packet in tc or in a cgroup.
struct Skb {
    skb: *mut __sk_buff,
    /// A [`Hook`].
    hook: u32,
}

impl Kernel for Maps {
    #[inline(always)]
    fn settings(&self) -> Settings {
        match SETTINGS.get(0) {
            Some(settings) => *settings,
            // An array's entry always exists; the verifier does not know.
            None => Settings::default(),
        }
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        // SAFETY: a helper without arguments.
        unsafe { bpf_ktime_get_boot_ns() }
    }

    #[inline(always)]
    fn rules(&self, address: &Address) -> Option<&RuleSet> {
        // SAFETY: the agent waits out every program in flight before a freed entry can be used for another address.
        unsafe { ADDRESSES.get(address) }
    }

    #[inline(always)]
    fn prefix_rules(&self, address: &Address) -> Option<&RuleSet> {
        PREFIXES.get(Key::new(128, *address))
    }

    #[inline(always)]
    fn port_rule(&self, key: &PortKey) -> Option<PortRule> {
        // SAFETY: as for `rules`; copied out.
        unsafe { PORTS.get(key) }.copied()
    }

    #[inline(always)]
    fn gate(&self, gate: u32) -> Option<GateState> {
        let gate = GATES.get_ptr(gate)?;
        let before = read(gate, offset_of!(Gate, generation));
        let deadline_ns = read(gate, offset_of!(Gate, deadline_ns));
        let generation = read(gate, offset_of!(Gate, generation));
        let flags = read(gate, offset_of!(Gate, flags));
        // Another opening was written between the reads: trust nothing, this packet meets a closed gate.
        Some(GateState { deadline_ns: if before == generation { deadline_ns } else { 0 }, generation, flags })
    }

    #[inline(always)]
    fn rst_until(&self, gate: u32) -> u64 {
        match GATES.get_ptr(gate) {
            Some(gate) => read(gate, offset_of!(Gate, rst_until_ns)),
            None => 0,
        }
    }

    #[inline(always)]
    fn is_exempt(&self, key: &ExemptKey) -> bool {
        EXEMPT.get_ptr(key).is_some()
    }

    #[inline(always)]
    fn socket(&self) -> Socket {
        Socket::None
    }

    #[inline(always)]
    fn receiver(&self) -> Socket {
        Socket::None
    }

    #[inline(always)]
    fn stamp(&self, _: u64) -> bool {
        false
    }

    #[inline(always)]
    fn count(&self, _: u32, _: Outcome, _: u64) {}

    #[inline(always)]
    fn note(&self, event: Event) {
        note(event);
    }

    #[inline(always)]
    fn consult(&self, rules: &RuleSet, address: &Address, end: End, findings: &mut Findings) {
        consult_rules(rules, address, pack(end), findings);
    }

    #[inline(always)]
    fn first_closed(&self) -> u32 {
        first_closed_gate()
    }
}

/// What every place at which a packet is judged takes from [`Maps`].
macro_rules! from_maps {
    () => {
        #[inline(always)]
        fn settings(&self) -> Settings {
            Maps.settings()
        }

        #[inline(always)]
        fn now(&self) -> u64 {
            Maps.now()
        }

        #[inline(always)]
        fn rules(&self, address: &Address) -> Option<&RuleSet> {
            const { &Maps }.rules(address)
        }

        #[inline(always)]
        fn prefix_rules(&self, address: &Address) -> Option<&RuleSet> {
            const { &Maps }.prefix_rules(address)
        }

        #[inline(always)]
        fn port_rule(&self, key: &PortKey) -> Option<PortRule> {
            Maps.port_rule(key)
        }

        #[inline(always)]
        fn gate(&self, gate: u32) -> Option<GateState> {
            Maps.gate(gate)
        }

        #[inline(always)]
        fn rst_until(&self, gate: u32) -> u64 {
            Maps.rst_until(gate)
        }

        #[inline(always)]
        fn is_exempt(&self, key: &ExemptKey) -> bool {
            Maps.is_exempt(key)
        }

        #[inline(always)]
        fn note(&self, event: Event) {
            note(event);
        }

        #[inline(always)]
        fn consult(&self, rules: &RuleSet, address: &Address, end: End, findings: &mut Findings) {
            Maps.consult(rules, address, end, findings);
        }

        #[inline(always)]
        fn first_closed(&self) -> u32 {
            Maps.first_closed()
        }
    };
}

impl Kernel for Xdp {
    from_maps!();

    #[inline(always)]
    fn socket(&self) -> Socket {
        Socket::None
    }

    #[inline(always)]
    fn receiver(&self) -> Socket {
        Socket::None
    }

    #[inline(always)]
    fn stamp(&self, _: u64) -> bool {
        false
    }

    #[inline(always)]
    fn count(&self, gate: u32, outcome: Outcome, now: u64) {
        count(gate, Hook::Xdp as u32, self.length, outcome, now);
    }

    #[inline(always)]
    fn decide(&self, packet: &Packet, _: Place, rules: Rules<'_>) -> Verdict {
        let (destination, source) = (pointer(rules.destination), pointer(rules.source));
        read_verdict(decide_xdp(self.xdp, packet, destination, source, self.length))
    }
}

impl Kernel for Skb {
    from_maps!();

    #[inline(always)]
    fn socket(&self) -> Socket {
        sockets::of(self.skb)
    }

    #[inline(always)]
    fn receiver(&self) -> Socket {
        // At tc, no socket has been looked for yet.
        if self.hook == Hook::CgroupIn as u32 { sockets::of(self.skb) } else { Socket::None }
    }

    #[inline(always)]
    fn stamp(&self, now: u64) -> bool {
        let stamped = sockets::stamp_sender(self.skb, now);
        if !stamped {
            note(Event::StampFailed);
        }
        stamped
    }

    #[inline(always)]
    fn count(&self, gate: u32, outcome: Outcome, now: u64) {
        // SAFETY: the context is the program's own.
        let length = unsafe { (*self.skb).len } as u64;
        count(gate, self.hook, length, outcome, now);
    }

    #[inline(always)]
    fn decide(&self, packet: &Packet, _: Place, rules: Rules<'_>) -> Verdict {
        let (destination, source) = (pointer(rules.destination), pointer(rules.source));
        read_verdict(decide_skb(self.skb, packet, destination, source, self.hook))
    }
}

#[inline(always)]
fn pointer(rules: Option<&RuleSet>) -> *const RuleSet {
    rules.map_or(core::ptr::null(), core::ptr::from_ref)
}

#[inline(always)]
fn count(gate: u32, hook: u32, length: u64, outcome: Outcome, now: u64) {
    // The number of a gate that does not exist would be another hook's entry.
    if gate >= MAX_GATES {
        return;
    }
    let Some(counters) = COUNTERS.get_ptr_mut(hook * MAX_GATES + gate) else { return };
    // SAFETY: a per-CPU map's value, of this CPU.
    let counters: &mut Counters = unsafe { &mut *counters };
    match outcome {
        Outcome::Passed => {
            counters.passed_packets += 1;
            counters.passed_bytes += length;
            counters.last_pass_ns = now;
            counters.first_drop_ns = 0;
        }
        Outcome::Closed | Outcome::Stale => {
            let timed = now != 0 || counters.first_drop_ns == 0 || counters.dropped_packets & (TIMED_DROPS - 1) == 0;
            counters.dropped_packets += 1;
            counters.dropped_bytes += length;
            counters.stale_packets += (outcome == Outcome::Stale) as u64;
            if timed {
                let now = if now != 0 { now } else { Maps.now() };
                if counters.first_drop_ns == 0 {
                    counters.first_drop_ns = now;
                }
                counters.last_drop_ns = now;
            }
        }
    }
}

/// One word of a gate, which user space writes while we read: aligned, so it is never torn.
#[inline(always)]
fn read(gate: *const Gate, offset: usize) -> u64 {
    // SAFETY: a field of the gate, by its own offset.
    let word = unsafe { gate.cast::<u8>().add(offset) }.cast::<u64>();
    // SAFETY: aligned as the gate is, and alive as long as the map.
    unsafe { word.read_volatile() }
}
