#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::{path::PathBuf, time::Duration};

use proptest::{collection::vec, prelude::*, sample::subsequence};

use portcullis_common::layout::exempt;

use super::*;
use crate::config::model::{Attach, Endpoint, Lease, Neighbours, StoreLost, Tc, Xdp};

fn agent() -> Agent {
    Agent {
        identity: "node-a".to_owned(),
        socket: PathBuf::new(),
        socket_group: String::new(),
        state_dir: PathBuf::new(),
        bpffs: PathBuf::new(),
        lock: PathBuf::new(),
        cgroup_root: None,
        xdp: Xdp::Auto,
        tc: Tc::Auto,
        attach: Attach::Armed,
        exclude_interfaces: vec![],
        drift_ppm: 100_000,
        exempt_ssh: true,
        exempt: vec![],
    }
}

/// May share its addresses with others.
fn service(name: &str) -> Service {
    Service {
        name: name.to_owned(),
        lease: Lease::Local { ttl_cap: Duration::from_secs(30) },
        margin: Duration::from_millis(500),
        addresses: vec![],
        behind: vec![],
        remotes: vec![],
        ports: vec![],
        remote_ports: vec![],
        scope: Scope::Service,
        neighbours: Neighbours::Keep,
        when_store_lost: StoreLost::Fence,
    }
}

fn all<T: std::str::FromStr<Err: std::fmt::Debug>>(texts: &[&str]) -> Vec<T> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn at(name: &str, addresses: &[&str], ports: &[&str]) -> Service {
    Service { addresses: all(addresses), ports: all(ports), ..service(name) }
}

fn compile(services: &[Service]) -> Result<RuleTable, RuleError> {
    RuleTable::compile(&numbered(services), &agent())
}

fn numbered(services: &[Service]) -> Vec<(u32, &Service)> {
    (0..).zip(services).collect()
}

/// Every selector of every service, one after the other.
fn naive(services: &[(u32, &Service)], role: u8, address: IpAddr, protocol: u8, port: u16) -> BTreeSet<u32> {
    let end = Prefix::host(address);
    let named = |ports: &[Ports]| {
        let hit =
            |ports: &Ports| protocol_number(ports.protocol) == protocol && ports.first <= port && port <= ports.last;
        ports.is_empty() || ports.iter().any(hit)
    };
    let within = |prefixes: &[Prefix]| {
        prefixes.iter().any(|prefix| prefix.address.is_ipv4() == address.is_ipv4() && prefix.contains(&end))
    };
    let (end, needed) = (role & roles::ENDS, role & !roles::ENDS);
    let counts = |roles: u8| roles & end != 0 && roles & needed == needed;
    let hit = |service: &Service| {
        let neighbours = if service.neighbours == Neighbours::Cut { roles::NEIGHBOURS } else { 0 };
        let own = |roles, list: &[Prefix]| counts(roles | neighbours) && within(list) && named(&service.ports);
        let remote = counts(roles::REMOTE) && within(&service.remotes) && named(&service.remote_ports);
        let node = counts(roles::NODE) && service.scope == Scope::Node;
        own(roles::LOCAL, &service.addresses) || own(roles::BEHIND, &service.behind) || remote || node
    };
    services.iter().filter(|(_, service)| hit(service)).map(|(gate, _)| *gate).collect()
}

const PREFIXES: [&str; 14] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "10.0.0.0/30",
    "10.0.0.0/24",
    "10.0.0.0/8",
    "0.0.0.0/0",
    "fd00::1",
    "fd00::2",
    "fd00::/64",
    "fd00::/16",
    "::/0",
    "::/1",
    "::ffff:0:0:0/80",
];
const ENDS: [&str; 8] =
    ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.77", "192.0.2.1", "fd00::1", "fd00::5", "2001:db8::1"];
const PORTS: u16 = 11;

/// A plan is tried on every so many of the probes, since each is looked up after each change.
const STRIDE: usize = 13;

type Probe = (u8, IpAddr, u8, u16);

/// Every packet's end that can make a difference.
fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    for role in [roles::IN_DESTINATION, roles::IN_SOURCE, roles::OUT_SOURCE, roles::OUT_DESTINATION] {
        for end in ENDS {
            for protocol in [1, 6, 17] {
                for port in 0..=PORTS {
                    probes.push((role, end.parse().unwrap(), protocol, if protocol == 1 { 0 } else { port }));
                }
            }
        }
    }
    probes
}

fn ports() -> impl Strategy<Value = Ports> {
    let protocol = prop_oneof![8 => Just(Protocol::Tcp), 2 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)];
    let width = prop_oneof![8 => Just(0), 1 => 1..3u16];
    (protocol, 1..PORTS, width).prop_map(|(protocol, first, width)| Ports {
        protocol,
        first,
        last: (first + width).min(PORTS),
    })
}

fn any_service() -> impl Strategy<Value = Service> {
    let prefixes = |most| subsequence(all::<Prefix>(&PREFIXES), 0..=most);
    let node = prop_oneof![12 => Just(Scope::Service), 1 => Just(Scope::Node)];
    let neighbours = prop_oneof![8 => Just(Neighbours::Keep), 1 => Just(Neighbours::Cut)];
    (prefixes(4), prefixes(2), prefixes(2), vec(ports(), 0..9), vec(ports(), 0..4), node, neighbours).prop_map(
        |(addresses, behind, remotes, ports, remote_ports, scope, neighbours)| Service {
            addresses,
            behind,
            remotes,
            ports,
            remote_ports,
            scope,
            neighbours,
            ..service("any")
        },
    )
}

/// Services of which some pairs share what they name, so that ports pile up at one address.
fn any_services() -> impl Strategy<Value = Vec<(u32, Service)>> {
    let narrow = (subsequence(vec!["10.0.0.1", "10.0.0.2", "fd00::1"], 1..3), vec(ports(), 1..12), any::<bool>())
        .prop_map(|(addresses, ports, behind)| {
            let addresses = all(&addresses);
            if behind {
                Service { behind: addresses, ports, ..service("narrow") }
            } else {
                Service { addresses, ports, ..service("narrow") }
            }
        });
    vec(prop_oneof![1 => any_service(), 2 => narrow], 1..5)
        .prop_map(|services| (0..).zip(services).map(|(slot, service)| (slot * 3, service)).collect())
}

fn borrowed(services: &[(u32, Service)]) -> Vec<(u32, &Service)> {
    services.iter().map(|(slot, service)| (*slot, service)).collect()
}

fn apply(table: &mut RuleTable, change: MapChange) {
    match change {
        MapChange::AddExempt(key) => assert!(table.exempt.insert(key)),
        MapChange::SetPort(key, rule) => drop(table.ports.insert(key, rule)),
        MapChange::SetAddress(address, set) => drop(table.addresses.insert(address, set)),
        MapChange::SetPrefix(length, address, set) => drop(table.prefixes.insert((length, address), set)),
        MapChange::SetSettings(settings) => table.settings = settings,
        MapChange::RemoveAddress(address) => assert!(table.addresses.remove(&address).is_some()),
        MapChange::RemovePrefix(length, address) => assert!(table.prefixes.remove(&(length, address)).is_some()),
        MapChange::RemovePort(key) => assert!(table.ports.remove(&key).is_some()),
        MapChange::RemoveExempt(key) => assert!(table.exempt.remove(&key)),
    }
}

/// The one case without an order: see [`RuleTable::plan`].
fn changes_places(old: &RuleTable, new: &RuleTable, probe: Probe) -> bool {
    let (_, address, protocol, port) = probe;
    let key = PortKey::new(address.into(), protocol, port);
    let inline = |table: &RuleTable, gate| {
        let set = table.addresses.get(&key.address);
        set.is_some_and(|set| {
            in_use(set).iter().any(|rule| u32::from(rule.gate) == gate && names_port(rule, protocol, port))
        })
    };
    match (old.ports.get(&key), new.ports.get(&key)) {
        (Some(before), Some(after)) => before.gate != after.gate && inline(new, before.gate) && inline(old, after.gate),
        (Some(_), None) | (None, Some(_)) | (None, None) => false,
    }
}

/// Carries out the plan and looks, after every write, at what each probe finds.
fn walk(old: &RuleTable, new: &RuleTable, probes: impl Iterator<Item = Probe>) {
    let gates = |table: &RuleTable, (role, address, protocol, port): Probe| table.gates(role, address, protocol, port);
    let ends: Vec<_> = probes
        .filter(|&probe| !changes_places(old, new, probe))
        .map(|probe| (probe, gates(old, probe), gates(new, probe)))
        .collect();
    let mut table = old.clone();
    for change in old.plan(new) {
        apply(&mut table, change);
        for (probe, before, after) in &ends {
            let now = gates(&table, *probe);
            assert!(now.is_superset(&(before & after)), "{probe:?} lost at {change:?}");
            assert!(now.is_subset(&(before | after)), "{probe:?} gained at {change:?}");
        }
    }
    assert_eq!(&table, new);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_global_rejects: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn the_table_agrees_with_a_scan_of_all_selectors(services in any_services()) {
        let services = borrowed(&services);
        let table = RuleTable::compile(&services, &agent());
        prop_assume!(table.is_ok());
        let table = table.unwrap();
        for (role, address, protocol, port) in probes() {
            prop_assert_eq!(
                table.gates(role, address, protocol, port),
                naive(&services, role, address, protocol, port),
                "role {} {} protocol {} port {}", role, address, protocol, port
            );
            // Roles of one selector in several lists merge, so more may count than each list says by itself.
            for more in [roles::LOOPBACK, roles::OWN, roles::NEIGHBOURS] {
                let found = table.gates(role | more, address, protocol, port);
                prop_assert!(found.is_superset(&naive(&services, role | more, address, protocol, port)));
                prop_assert!(found.is_subset(&naive(&services, role, address, protocol, port)));
            }
        }
    }

    /// Of the rules of an address that cuts neighbours one stands beside it, whatever moves to the table of ports.
    #[test]
    fn neighbours_are_cut_without_a_port(services in any_services(), chosen in any::<prop::sample::Index>()) {
        let mut services = services;
        let chosen = chosen.index(services.len());
        services[chosen].1.neighbours = Neighbours::Cut;
        let gate = services[chosen].0;
        let services = borrowed(&services);
        let table = RuleTable::compile(&services, &agent());
        prop_assume!(table.is_ok());
        let table = table.unwrap();
        for network in services[chosen].1.addresses.iter().map(Network::of) {
            let set = table.addresses.get(&network.address()).or_else(|| table.prefixes.get(&(network.length, network.address())));
            let cut = |rule: &Rule| u32::from(rule.gate) == gate && rule.roles & roles::NEIGHBOURS != 0;
            prop_assert!(in_use(set.unwrap()).iter().any(cut));
        }
    }

    #[test]
    fn a_plan_never_loses_a_packet_of_a_kept_service(
        (old, new) in prop_oneof![(any_services(), any_services()), (crowd(), crowd())],
        offset in 0..STRIDE,
    ) {
        let old = RuleTable::compile(&borrowed(&old), &agent());
        let new = RuleTable::compile(&borrowed(&new), &agent());
        prop_assume!(old.is_ok() && new.is_ok());
        let (old, new) = (old.unwrap(), new.unwrap());
        walk(&old, &new, probes().into_iter().skip(offset).step_by(STRIDE));
    }

    #[test]
    fn whether_services_fit_does_not_depend_on_their_slots(services in any_services()) {
        let forwards = borrowed(&services);
        let mut slots: Vec<u32> = forwards.iter().map(|(slot, _)| *slot).collect();
        slots.reverse();
        let backwards: Vec<_> = slots.into_iter().zip(forwards.iter().map(|(_, service)| *service)).collect();
        prop_assert_eq!(
            RuleTable::compile(&forwards, &agent()).is_ok(),
            RuleTable::compile(&backwards, &agent()).is_ok()
        );
    }
}

/// Four services at one address, with mostly exact ports: the table of ports is busy.
fn crowd() -> impl Strategy<Value = Vec<(u32, Service)>> {
    let exact = (1..PORTS).prop_map(|port| Ports { protocol: Protocol::Tcp, first: port, last: port });
    let ports = prop_oneof![6 => exact, 1 => ports()];
    vec(vec(ports, 0..6), 4).prop_map(|services| {
        let crowd = (0..).zip(services).filter(|(_, ports)| !ports.is_empty());
        crowd.map(|(slot, ports)| (slot, Service { ports, ..at("crowd", &["10.0.0.1"], &[]) })).collect()
    })
}

#[test]
fn hosts_and_prefixes_stand_apart() {
    let table = compile(&[at("a", &["10.0.0.1", "10.1.0.0/16", "fd00::/64", "fd00::1"], &["tcp/1"])]).unwrap();
    let hosts: Vec<Prefix> = all(&["10.0.0.1", "fd00::1"]);
    assert_eq!(
        table.addresses.keys().copied().collect::<Vec<_>>(),
        hosts.iter().map(|h| h.address.into()).collect::<Vec<Address>>()
    );
    assert_eq!(table.prefixes.keys().map(|(length, _)| *length).collect::<Vec<_>>(), [64, 112]);
    assert_eq!(table.settings.flags, settings_flags::PREFIXES);
    assert_eq!(table.settings.roles, u32::from(roles::LOCAL & roles::ENDS));
    assert_eq!(table.settings.gates, 1);
    assert_eq!(table.settings.layout_version, LAYOUT_VERSION);
}

#[test]
fn no_service_needs_no_look_up() {
    let table = compile(&[]).unwrap();
    assert_eq!(table.settings, Settings { layout_version: LAYOUT_VERSION, roles: 0, flags: 0, gates: 0 });
    assert!(table.exempt.is_empty());
}

#[test]
fn roles_of_one_selector_merge() {
    let both =
        Service { remotes: all(&["10.0.0.1"]), remote_ports: all(&["tcp/1"]), ..at("a", &["10.0.0.1"], &["tcp/1"]) };
    let table = compile(&[both]).unwrap();
    let set = table.addresses.values().next().unwrap();
    assert_eq!((set.count, set.rules[0].roles), (1, roles::BEHIND));
}

#[test]
fn ports_beyond_the_rules_of_an_address_move_to_the_table_of_ports() {
    let ports: Vec<String> = (1..=10).map(|port| format!("tcp/{port}")).chain(["udp/5-6".to_owned()]).collect();
    let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
    let table = compile(&[at("a", &["10.0.0.1"], &ports)]).unwrap();
    let set = table.addresses.values().next().unwrap();
    assert_eq!((set.count, set.more), (6, u32::from(roles::LOCAL & roles::ENDS)));
    assert_eq!((set.rules[0].port_first, set.rules[0].port_last), (5, 6), "ranges come first");
    assert_eq!(table.ports.keys().map(|key| key.port).collect::<Vec<_>>(), [6, 7, 8, 9, 10]);
}

#[test]
fn a_port_of_two_services_stays_beside_the_address() {
    let many: Vec<String> = (1..=8).map(|port| format!("tcp/{port}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let table = compile(&[at("a", &["10.0.0.1"], &many), at("b", &["10.0.0.1"], &["tcp/8"])]).unwrap();
    assert_eq!(table.gates(roles::IN_DESTINATION, "10.0.0.1".parse().unwrap(), 6, 8), BTreeSet::from([0, 1]));
}

/// The entry of one port changes hands: the address is written first or last, whichever loses nothing.
#[test]
fn a_port_changes_hands_without_a_gap() {
    let first = |ports: u16| -> Service {
        let ports: Vec<String> = (1..=ports).map(|port| format!("tcp/{port}")).collect();
        Service { ports: ports.iter().map(|ports| ports.parse().unwrap()).collect(), ..at("first", &["10.0.0.1"], &[]) }
    };
    let at_port_9 = |name: &str| at(name, &["10.0.0.1"], &["tcp/9"]);
    let alone = compile(&[first(8), at_port_9("second")]).unwrap();
    let shared = compile(&[first(8), at_port_9("second"), at_port_9("third")]).unwrap();
    let key = PortKey::new(Address::v4([10, 0, 0, 1]), 6, 9);
    assert_eq!((alone.ports[&key].gate, shared.ports[&key].gate), (1, 2));
    walk(&alone, &shared, probes().into_iter());
    walk(&shared, &alone, probes().into_iter());
}

#[test]
fn a_port_that_does_not_fit_for_two_services_is_refused_by_name() {
    let many: Vec<String> = (1..=9).map(|port| format!("tcp/{port}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let error = compile(&[at("a", &["10.0.0.1"], &many), at("b", &["10.0.0.1"], &many)]).unwrap_err();
    let RuleError::PortTaken { address, services, .. } = &error else { panic!("{error:?}") };
    assert_eq!((address.to_string(), services.join(" ")), ("10.0.0.1".to_owned(), "a b".to_owned()));
}

#[test]
fn neighbours_cannot_be_cut_for_one_of_two_services() {
    let keep = at("keep", &["10.0.0.1"], &["tcp/1"]);
    let cut = Service { neighbours: Neighbours::Cut, ..at("cut", &["10.0.0.0/24"], &["tcp/2"]) };
    let error = compile(&[keep.clone(), cut.clone()]).unwrap_err();
    let services = vec!["keep".to_owned(), "cut".to_owned()];
    assert_eq!(error, RuleError::NeighboursShared { address: "10.0.0.1".parse().unwrap(), services });

    let behind = Service { behind: keep.addresses.clone(), addresses: vec![], ..keep.clone() };
    assert!(matches!(compile(&[behind, cut.clone()]), Err(RuleError::NeighboursShared { .. })));
    let remote = Service { remotes: keep.addresses.clone(), addresses: vec![], ports: vec![], ..keep.clone() };
    assert!(compile(&[remote, cut.clone()]).is_ok(), "what is sent to is nobody's own");
    let whole = Service { scope: Scope::Node, ..service("node") };
    assert!(compile(&[whole, cut.clone()]).is_ok(), "the whole node is no address");
    assert!(compile(&[keep, Service { neighbours: Neighbours::Keep, ..cut }]).is_ok());
}

/// Six places: the rule for neighbours, three ranges, and one of the two services of each shared port.
#[test]
fn the_rule_for_neighbours_takes_one_place() {
    let to =
        |name: &str, ports: &[&str]| Service { remotes: all(&["10.0.0.1"]), remote_ports: all(ports), ..service(name) };
    let mut services = [
        to("ranges", &["tcp/1", "udp/1-2", "udp/4-5", "udp/7-8"]),
        to("one", &["tcp/1"]),
        to("two", &["tcp/2"]),
        to("three", &["tcp/2"]),
        Service { neighbours: Neighbours::Cut, ..at("cut", &["10.0.0.1"], &["tcp/1"]) },
    ];
    for _ in 0..services.len() {
        let table = compile(&services).unwrap();
        let set = table.addresses.values().next().unwrap();
        assert_ne!(set.rules[0].roles & roles::NEIGHBOURS, 0);
        assert_eq!((set.count, table.ports.len()), (6, 2));
        services.rotate_left(1);
    }
}

/// The roles of one entry per service: the service's own selectors, the whole node's, and what both say of an address.
#[test]
fn what_is_exempt_from_a_whole_node_is_not_from_an_address() {
    let cut = Service { neighbours: Neighbours::Cut, scope: Scope::Node, ..at("node", &["10.0.0.1"], &["tcp/1"]) };
    let table = compile(&[cut]).unwrap();
    let set = table.addresses.values().next().unwrap();
    assert_eq!(
        in_use(set).iter().map(|rule| (rule.protocol, rule.roles)).collect::<Vec<_>>(),
        [(6, roles::LOCAL | roles::NEIGHBOURS), (ANY_PROTOCOL, roles::NODE)]
    );
}

#[test]
fn too_many_ranges_and_too_many_rules_of_a_prefix_are_refused() {
    let ranges: Vec<String> = (1..=9).map(|n| format!("tcp/{}-{}", n * 10, n * 10 + 5)).collect();
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    let error = compile(&[at("a", &["fd00::1"], &[&ranges[..], &["udp/1"]].concat())]).unwrap_err();
    assert_eq!(
        error,
        RuleError::TooManyRules { address: "fd00::1".parse().unwrap(), needed: 9, services: vec!["a".to_owned()] }
    );
    let exact: Vec<String> = (1..=9).map(|port| format!("tcp/{port}")).collect();
    let exact: Vec<&str> = exact.iter().map(String::as_str).collect();
    let error = compile(&[at("a", &["10.0.0.0/24"], &exact)]).unwrap_err();
    assert!(matches!(error, RuleError::TooManyRules { needed: 9, .. }), "{error:?}");
}

#[test]
fn a_rule_that_another_of_the_same_service_covers_takes_no_room() {
    let ports = ["tcp/1-100", "tcp/7", "tcp/50-60"];
    let table = compile(&[at("a", &["10.0.0.1"], &ports)]).unwrap();
    assert_eq!(table.addresses.values().next().unwrap().count, 1);
}

#[test]
fn a_whole_node_keeps_what_it_needs_to_be_reached() {
    let node = Service { scope: Scope::Node, ..service("node") };
    let table = compile(std::slice::from_ref(&node)).unwrap();
    assert_eq!(table.prefixes.keys().map(|(length, _)| *length).collect::<Vec<_>>(), [0, 96]);
    assert_eq!(table.settings.flags, settings_flags::PREFIXES);
    assert!(table.prefixes.values().all(|set| set.count == 1 && set.rules[0].roles == roles::NODE));
    let ssh = ExemptKey::new(exempt::LOCAL_PORT, Address::ANY, 6, 22);
    let dns = ExemptKey::new(exempt::REMOTE_PORT, Address::ANY, 17, 53);
    assert!(table.exempt.contains(&ssh) && table.exempt.contains(&dns));
    assert_eq!(table.exempt.len(), 8);

    let locked = RuleTable::compile(&[(0, &node)], &Agent { exempt_ssh: false, ..agent() }).unwrap();
    assert!(!locked.exempt.contains(&ssh) && locked.exempt.len() == 7);
}

#[test]
fn the_store_is_exempt_as_a_remote_endpoint() {
    let store: Endpoint = "tcp/10.0.0.2:2379".parse().unwrap();
    let agent = Agent { exempt: vec![store], ..agent() };
    let table = RuleTable::compile(&[], &agent).unwrap();
    let key = ExemptKey::new(exempt::REMOTE, store.address.into(), 6, 2379);
    assert_eq!(table.exempt, BTreeSet::from([key]));
}

#[test]
fn slots_are_checked() {
    let (a, b) = (service("a"), service("b"));
    let error = RuleTable::compile(&[(MAX_GATES, &a)], &agent()).unwrap_err();
    assert_eq!(error, RuleError::NoSuchSlot { service: "a".to_owned(), slot: MAX_GATES });
    let error = RuleTable::compile(&[(3, &a), (3, &b)], &agent()).unwrap_err();
    assert_eq!(error, RuleError::SlotTaken { slot: 3, services: vec!["a".to_owned(), "b".to_owned()] });
}

#[test]
fn a_hundred_thousand_addresses_compile() {
    let mut wide = service("wide");
    wide.ports = all(&["tcp/1"]);
    wide.addresses =
        (0..100_000u32).map(|n| Prefix::host(IpAddr::V4(std::net::Ipv4Addr::from(0x0a00_0000 + n)))).collect();
    assert_eq!(compile(&[wide.clone()]).unwrap().addresses.len(), 100_000);
    wide.addresses =
        (0..=MAX_ADDRESSES).map(|n| Prefix::host(IpAddr::V4(std::net::Ipv4Addr::from(0x0a00_0000 + n)))).collect();
    assert!(matches!(compile(&[wide]), Err(RuleError::TableFull { what: "addresses", .. })));
}
