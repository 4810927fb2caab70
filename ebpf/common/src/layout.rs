//! Map layouts: a contract between the kernel programs and every version of the agent that adopts their maps.
//!
//! Fixed-width integers only, explicit padding, sizes and offsets asserted at compile time. Whoever changes a layout
//! raises [`LAYOUT_VERSION`]: pinned maps of another version are refused, not reinterpreted.

use core::mem::{align_of, offset_of, size_of};

/// Version of everything in this file. It is part of the folder name under which maps and links are pinned.
pub const LAYOUT_VERSION: u32 = 1;

/// Gates, and so services, of one host within one boot: a slot belongs to a name and is never reused.
pub const MAX_GATES: u32 = 2048;
/// Addresses (and, separately, prefixes) that rules name. The table is allocated as it fills.
pub const MAX_ADDRESSES: u32 = 1 << 17;
/// Exact ports beyond the rules that fit beside an address.
pub const MAX_PORTS: u32 = 1 << 17;
/// Endpoints that no gate cuts.
pub const MAX_EXEMPT: u32 = 1024;
/// Rules that stand beside one address. With them an entry of the table fills two cache lines, and no third.
pub const RULES_PER_ADDRESS: usize = 6;

/// A deadline below this is a *fence number*: the gate is closed whatever the time, and no clock is read.
///
/// 2^32 ns are 4.3 s of boot time, before which no agent opens anything.
pub const FENCE_NUMBERS: u64 = 1 << 32;

/// Names of the maps in the object and of their pins. At most 15 bytes: the kernel's limit.
pub mod maps {
    /// `Array<Gate>`, memory-mapped, [`super::MAX_GATES`] entries.
    pub const GATES: &str = "GATES";
    /// `Array<GateName>`, [`super::MAX_GATES`] entries: which service a slot belongs to.
    pub const NAMES: &str = "NAMES";
    /// `Array<Settings>`, one entry.
    pub const SETTINGS: &str = "SETTINGS";
    /// `HashMap<Address, RuleSet>`.
    pub const ADDRESSES: &str = "ADDRESSES";
    /// `LpmTrie<Address, RuleSet>`, the key led by a prefix length of 0 to 128 bits.
    pub const PREFIXES: &str = "PREFIXES";
    /// `HashMap<PortKey, PortRule>`.
    pub const PORTS: &str = "PORTS";
    /// `HashMap<ExemptKey, u32>`; the value is 1.
    pub const EXEMPT: &str = "EXEMPT";
    /// `PerCpuArray<Counters>`, indexed by [`super::counter_index`].
    pub const COUNTERS: &str = "COUNTERS";
    /// `PerCpuArray<u64>`, indexed by [`super::Event`].
    pub const EVENTS: &str = "EVENTS";
    /// `SkStorage<u64>`: the boot-clock instant at which a socket was made, see [`crate::verdict`].
    pub const STAMPS: &str = "STAMPS";

    /// Every map of the object, in the order in which they are pinned.
    pub const ALL: [&str; 10] = [GATES, NAMES, SETTINGS, ADDRESSES, PREFIXES, PORTS, EXEMPT, COUNTERS, EVENTS, STAMPS];
}

/// Names of the programs in the object. At most 15 bytes: the kernel's limit.
pub mod programs {
    /// XDP, multi-buffer (5.18 and newer, needed for an MTU of 9000).
    pub const XDP_FRAGS: &str = "gate_xdp_frags";
    /// XDP for kernels without multi-buffer.
    pub const XDP: &str = "gate_xdp";
    /// tc ingress of an interface whose frames start with an Ethernet header (`lo` included).
    pub const TC_IN: &str = "gate_tc_in";
    /// tc egress of the same.
    pub const TC_OUT: &str = "gate_tc_out";
    /// tc ingress of any other interface (tun, WireGuard, IP tunnels): judged from the network header on.
    pub const TC_L3_IN: &str = "gate_tc_l3_in";
    /// tc egress of the same.
    pub const TC_L3_OUT: &str = "gate_tc_l3_out";
    /// cgroup_skb ingress: the root cgroup's backstop.
    pub const CGROUP_IN: &str = "gate_cg_in";
    /// cgroup_skb egress of the same.
    pub const CGROUP_OUT: &str = "gate_cg_out";
    /// sock_ops on the root cgroup: stamps TCP sockets with the instant they were made.
    pub const SOCKETS: &str = "stamp_sockets";

    /// Every program of the object.
    pub const ALL: [&str; 9] = [XDP_FRAGS, XDP, TC_IN, TC_OUT, TC_L3_IN, TC_L3_OUT, CGROUP_IN, CGROUP_OUT, SOCKETS];
}

/// The kernel object that is open while `now < deadline_ns` (CLOCK_BOOTTIME).
///
/// Writers: opening writes `generation` and `token` first and the deadline last; closing writes the deadline first.
/// Readers of more than the deadline read generation, deadline, generation and trust nothing if the two differ.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// The instant at which the gate closes by itself, or a fence number (below [`FENCE_NUMBERS`]).
    pub deadline_ns: u64,
    /// The boot-clock instant at which the current (or last) opening was decided. Unique per opening: a socket made
    /// before it belongs to an older opening and stays cut for ever.
    pub generation: u64,
    /// The monotonic fencing token of the current (or last) holding.
    pub token: u64,
    /// The smallest token the protected side accepts (token guard; 0: none).
    pub min_token: u64,
    /// While closed, resets without payload leave and acknowledgements without payload enter until this instant.
    pub rst_until_ns: u64,
    /// [`gate_flags`]. Written apart from opening and closing, which leave it alone.
    pub flags: u64,
    pub pad: [u64; 2],
}

pub mod gate_flags {
    /// No rule names this gate: it counts for nothing. The slot of a service that left the configuration stays assigned
    /// to its name, and closed; without this flag it would have every packet dropped whose addresses cannot be read.
    ///
    /// Set after the last rule that names the gate has left the maps, cleared before the first one enters.
    pub const IDLE: u64 = 1;
}

/// The service's name that a gate's slot belongs to, UTF-8, zero-padded; all zero: free.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateName(pub [u8; 64]);

/// For which packets a rule counts.
pub mod roles {
    /// The destination of a packet that comes in.
    pub const IN_DESTINATION: u8 = 1;
    /// The source of a packet that comes in.
    pub const IN_SOURCE: u8 = 2;
    /// The source of a packet that goes out.
    pub const OUT_SOURCE: u8 = 4;
    /// The destination of a packet that goes out.
    pub const OUT_DESTINATION: u8 = 8;

    /// The rule also counts on the loopback interface, where both directions count at once.
    pub const LOOPBACK: u8 = 16;
    /// The address is the service's own: no exemption lets its packets through a closed gate.
    pub const OWN: u8 = 32;
    /// ARP and neighbour discovery for the address belong to the service. Not set for an address that it shares with the
    /// node or with another service, since neighbours cannot be cut for one port alone.
    pub const NEIGHBOURS: u8 = 64;

    /// The bits that say in which ends of a packet an address counts.
    pub const ENDS: u8 = IN_DESTINATION | IN_SOURCE | OUT_SOURCE | OUT_DESTINATION;
    /// The service's own address on this host.
    pub const LOCAL: u8 = IN_DESTINATION | OUT_SOURCE | LOOPBACK | OWN;
    /// What this host sends to (and what answers it), such as a storage target.
    pub const REMOTE: u8 = IN_SOURCE | OUT_DESTINATION | LOOPBACK;
    /// An address that lives behind this host (a container, a virtual machine): both ends, both directions.
    pub const BEHIND: u8 = ENDS | LOOPBACK | OWN;
    /// Everything this node sends and receives, but for `lo`, neighbours, and what is exempt.
    pub const NODE: u8 = ENDS;
}

/// `protocol` of a rule for every protocol.
pub const ANY_PROTOCOL: u8 = 0;

/// One selector of one service at one address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Slot in [`maps::GATES`].
    pub gate: u16,
    /// First port, host byte order. With [`ANY_PROTOCOL`] ports are not looked at.
    pub port_first: u16,
    /// Last port, inclusive.
    pub port_last: u16,
    /// IP protocol number (6, 17, 132) or [`ANY_PROTOCOL`].
    pub protocol: u8,
    /// [`roles`] in which the address counts.
    pub roles: u8,
}

/// All the rules of one address or prefix. A more specific entry repeats the rules of every prefix that covers it, so
/// that one look-up answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleSet {
    /// How many of `rules` are in use.
    pub count: u32,
    /// The [`roles::ENDS`] for which [`maps::PORTS`] holds more rules of this address; 0: none. Hosts only, never
    /// prefixes. A fragment names no port: to such an address it is dropped while any gate of the host is closed, unless
    /// no rule names that gate.
    pub more: u32,
    pub rules: [Rule; RULES_PER_ADDRESS],
}

/// An IPv6 address, or an IPv4 address mapped into `::ffff:0:0/96`: the sixteen bytes of the header, taken as two words
/// because that is how they are copied and compared for every packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Address {
    high: u64,
    low: u64,
}

/// Key of [`maps::PORTS`]: one exact port of one address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortKey {
    pub address: Address,
    /// Host byte order.
    pub port: u16,
    pub protocol: u8,
    pub pad: [u8; 5],
}

/// Value of [`maps::PORTS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortRule {
    pub gate: u32,
    pub roles: u8,
    pub pad: [u8; 3],
}

/// Which end of a packet an exemption names.
pub mod exempt {
    /// A remote endpoint that this host's own sockets talk to (the lease store).
    pub const REMOTE: u8 = 1;
    /// A port of this host (inbound SSH): the address is all zero.
    pub const LOCAL_PORT: u8 = 2;
    /// A remote port at any address (DNS, DHCP, NTP under `scope = "node"`): the address is all zero.
    pub const REMOTE_PORT: u8 = 3;
}

/// Key of [`maps::EXEMPT`]. Looked at only when a packet is about to be dropped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExemptKey {
    pub address: Address,
    /// Host byte order.
    pub port: u16,
    pub protocol: u8,
    /// One of [`exempt`].
    pub side: u8,
    pub pad: [u8; 4],
}

/// What is the same for every packet. Written by the agent after the rules it announces.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// [`LAYOUT_VERSION`] of who made the maps.
    pub layout_version: u32,
    /// The union of all rules' [`roles::ENDS`]: an end that no rule names costs no look-up.
    pub roles: u32,
    /// [`settings_flags`].
    pub flags: u32,
    /// Slots in use, from 0: bounds the search for a closed gate when a packet names no address.
    pub gates: u32,
}

pub mod settings_flags {
    /// [`super::maps::PREFIXES`] is not empty.
    pub const PREFIXES: u32 = 1;
}

/// Where a packet was judged; part of the index into [`maps::COUNTERS`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    Xdp = 0,
    TcIn = 1,
    TcOut = 2,
    CgroupIn = 3,
    CgroupOut = 4,
}

impl Hook {
    pub const ALL: [Hook; 5] = [Hook::Xdp, Hook::TcIn, Hook::TcOut, Hook::CgroupIn, Hook::CgroupOut];

    /// Which way a packet goes that this hook sees.
    #[inline(always)]
    pub const fn is_egress(self) -> bool {
        matches!(self, Hook::TcOut | Hook::CgroupOut)
    }
}

/// Hooks per gate in [`maps::COUNTERS`], rounded up to a power of two.
pub const HOOK_SLOTS: u32 = 8;

/// Index of a gate's and hook's entry in [`maps::COUNTERS`]. What one hook touches lies side by side: with the hooks of
/// each gate side by side, a thousand gates would share an eighth of the cache's sets.
#[inline(always)]
pub const fn counter_index(gate: u32, hook: Hook) -> u32 {
    hook as u32 * MAX_GATES + gate
}

/// One CPU's count of one gate at one hook. Times are CLOCK_BOOTTIME nanoseconds, 0: never.
///
/// A packet of several services is counted once: at the gate that stopped it, else at the last that let it pass.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub passed_packets: u64,
    pub passed_bytes: u64,
    pub dropped_packets: u64,
    pub dropped_bytes: u64,
    /// The last packet that passed.
    pub last_pass_ns: u64,
    /// The first packet dropped since one last passed.
    pub first_drop_ns: u64,
    /// The last packet dropped; of a gate closed by a fence number (no clock is read there) every 64th is timed.
    pub last_drop_ns: u64,
    /// Of `dropped_packets`, those that an open gate refused: their socket belongs to an older opening.
    pub stale_packets: u64,
}

/// Index into [`maps::EVENTS`]: what should not happen often, counted for the status.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A socket's stamp could not be stored (no memory left for socket options): the socket stays cut.
    StampFailed = 0,
    /// A packet whose addresses could not be read was dropped because a gate was closed.
    UnreadableDropped = 1,
    /// A rule names a gate that does not exist: the packet was dropped.
    NoGate = 2,
    /// A packet of an exempt endpoint passed a closed gate.
    ExemptPassed = 3,
}

impl Event {
    pub const ALL: [Event; 4] = [Event::StampFailed, Event::UnreadableDropped, Event::NoGate, Event::ExemptPassed];
}

/// Entries of [`maps::EVENTS`], with room to grow.
pub const EVENT_SLOTS: u32 = 16;

const _: () = {
    assert!(size_of::<Gate>() == 64 && align_of::<Gate>() == 64);
    assert!(offset_of!(Gate, deadline_ns) == 0);
    assert!(offset_of!(Gate, generation) == 8);
    assert!(offset_of!(Gate, token) == 16);
    assert!(offset_of!(Gate, rst_until_ns) == 32);
    assert!(offset_of!(Gate, flags) == 40);
    assert!(size_of::<GateName>() == 64);
    assert!(size_of::<Rule>() == 8);
    assert!(MAX_GATES <= u16::MAX as u32);
    assert!(size_of::<RuleSet>() == 8 + 8 * RULES_PER_ADDRESS);
    assert!(size_of::<Address>() == 16 && align_of::<Address>() == 8);
    assert!(size_of::<PortKey>() == 24);
    assert!(size_of::<PortRule>() == 8);
    assert!(size_of::<ExemptKey>() == 24);
    assert!(size_of::<Settings>() == 16);
    assert!(size_of::<Counters>() == 64);
};

impl Address {
    /// All zero: "any" in an exemption.
    pub const ANY: Address = Address { high: 0, low: 0 };

    /// The two halves as they stand in a header.
    #[inline(always)]
    pub const fn from_halves(high: u64, low: u64) -> Self {
        Self { high, low }
    }

    /// An IPv4 address as it stands in a header, in `::ffff:0:0/96`.
    #[inline(always)]
    pub const fn from_v4_word(word: u32) -> Self {
        let low = if cfg!(target_endian = "little") {
            0xffff_0000 | (word as u64) << 32
        } else {
            0xffff_0000_0000 | word as u64
        };
        Self { high: 0, low }
    }

    pub const fn v4(octets: [u8; 4]) -> Self {
        Self::from_v4_word(u32::from_ne_bytes(octets))
    }

    pub const fn v6(octets: [u8; 16]) -> Self {
        Self::from_bits(u128::from_be_bytes(octets))
    }

    /// The address as a number, the first byte the most significant.
    pub const fn bits(self) -> u128 {
        (u64::from_be(self.high) as u128) << 64 | u64::from_be(self.low) as u128
    }

    pub const fn from_bits(bits: u128) -> Self {
        Self { high: ((bits >> 64) as u64).to_be(), low: (bits as u64).to_be() }
    }
}

impl PortKey {
    #[inline(always)]
    pub const fn new(address: Address, protocol: u8, port: u16) -> Self {
        Self { address, port, protocol, pad: [0; 5] }
    }
}

impl ExemptKey {
    /// `side` is one of [`exempt`].
    #[inline(always)]
    pub const fn new(side: u8, address: Address, protocol: u8, port: u16) -> Self {
        Self { address, port, protocol, side, pad: [0; 4] }
    }
}

/// In the order of the numbers.
impl Ord for Address {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.bits().cmp(&other.bits())
    }
}

impl PartialOrd for Address {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl From<core::net::IpAddr> for Address {
    fn from(address: core::net::IpAddr) -> Self {
        match address {
            core::net::IpAddr::V4(v4) => Self::v4(v4.octets()),
            core::net::IpAddr::V6(v6) => Self::v6(v6.octets()),
        }
    }
}

#[cfg(feature = "std")]
mod pod {
    use super::{Address, Counters, ExemptKey, Gate, GateName, PortKey, PortRule, RuleSet, Settings};

    macro_rules! pod {
        ($($type:ty),+) => {$(
            // SAFETY: `repr(C)`, made of fixed-width integers with explicit padding, every bit pattern valid; the sizes
            // are asserted above.
            unsafe impl aya::Pod for $type {}
        )+};
    }
    pod!(Address, Counters, ExemptKey, Gate, GateName, PortKey, PortRule, RuleSet, Settings);
}
