//! Rules, gates and counters against the real programs.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use std::time::Duration;

use datapath_lab::{lab, run};
use portcullis::{
    clock::boot_now,
    config::{
        model::{Lease, Neighbours, Ports, Prefix, Protocol, Scope, Service, StoreLost},
        rules::RuleTable,
    },
    datapath::{
        DataPath,
        gates::{AssignError, Slot},
        self_test::{Judgement, Probe, SelfTestError},
    },
};
use portcullis_common::layout::{Hook, MAX_GATES};

fn prefix(text: &str) -> Prefix {
    let (address, length) = text.split_once('/').unwrap();
    Prefix { address: address.parse().unwrap(), length: length.parse().unwrap() }
}

fn ports(protocol: Protocol, port: u16) -> Ports {
    Ports { protocol, first: port, last: port }
}

fn service(name: &str, addresses: &[&str]) -> Service {
    Service {
        name: name.to_owned(),
        lease: Lease::Local { ttl_cap: Duration::from_secs(30) },
        margin: Duration::from_secs(1),
        addresses: addresses.iter().map(|text| prefix(text)).collect(),
        behind: vec![prefix("172.17.0.2/32")],
        remotes: vec![prefix("10.9.0.0/16")],
        ports: vec![ports(Protocol::Tcp, 5432), ports(Protocol::Udp, 5432)],
        remote_ports: vec![ports(Protocol::Tcp, 3260)],
        scope: Scope::Service,
        neighbours: Neighbours::Keep,
        when_store_lost: StoreLost::Fence,
    }
}

fn open(path: &mut DataPath, slot: Slot) {
    let deadline = boot_now().saturating_add(Duration::from_secs(60));
    path.gates().gate(slot).open(boot_now(), 1, deadline).unwrap();
}

#[test]
fn the_self_test_tells_open_from_closed() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let slot = path.gates().assign("pg-main").unwrap();
        let service = service("pg-main", &["10.0.0.100/32", "fd00::100/128"]);
        let table = RuleTable::compile(&[(slot.index(), &service)], &lab.agent).unwrap();
        assert!(path.apply_rules(&table).unwrap() > 0);
        let probes = Probe::of(&service);
        // Two addresses and twice the container, each with two ports, and the storage target with one.
        assert_eq!(probes.len(), 4 + 4 + 1);

        for probe in &probes {
            path.self_test(probe, Judgement::Drop).unwrap();
            let refused = path.self_test(probe, Judgement::Pass).unwrap_err();
            assert!(matches!(refused, SelfTestError::Judged { found: Judgement::Drop, .. }), "{refused}");
        }
        open(&mut path, slot);
        for probe in &probes {
            path.self_test(probe, Judgement::Pass).unwrap();
        }
        let elsewhere = Probe { port: 22, ..probes[0] };
        path.gates().gate(slot).close();
        path.self_test(&elsewhere, Judgement::Pass).unwrap();
        path.self_test(&probes[0], Judgement::Drop).unwrap();

        for (hook, counters) in path.counters(slot).unwrap() {
            let seen = matches!(hook, Hook::Xdp | Hook::TcIn | Hook::TcOut);
            assert_eq!((counters.passed_packets > 0, counters.dropped_packets > 0), (seen, seen), "{hook:?}");
        }
        assert!(path.events().unwrap().iter().all(|(_, count)| *count == 0));
    });
}

#[test]
fn rules_are_compared_with_what_the_kernel_has() {
    lab(|lab| {
        let (mut path, _) = lab.start().unwrap();
        let slot = path.gates().assign("a").unwrap();
        let wide = service("a", &["10.0.0.100/32", "10.0.0.101/32", "10.4.0.0/24", "fd00::/64"]);
        let wide = RuleTable::compile(&[(slot.index(), &wide)], &lab.agent).unwrap();
        let narrow = RuleTable::compile(&[(slot.index(), &service("a", &["10.0.0.100/32"]))], &lab.agent).unwrap();

        assert!(path.apply_rules(&wide).unwrap() > 0);
        assert_eq!(path.rules().unwrap(), wide);
        assert_eq!(path.apply_rules(&wide).unwrap(), 0);
        drop(path);

        let (mut path, _) = lab.start().unwrap();
        assert_eq!(path.rules().unwrap(), wide, "a restart changed the rules");
        assert!(path.apply_rules(&narrow).unwrap() > 0);
        assert_eq!(path.rules().unwrap(), narrow);
    });
}

#[test]
fn slots_belong_to_names_until_they_run_out() {
    lab(|lab| {
        let (mut path, _) = lab.start().unwrap();
        let gates = path.gates();
        let first = gates.assign("a").unwrap();
        assert_eq!(gates.assign("a").unwrap(), first);
        assert!(gates.assign("").is_err() && gates.assign(&"x".repeat(64)).is_err());
        gates.assign(&"x".repeat(63)).unwrap();
        let named: Vec<_> = gates.named().collect();
        assert_eq!(named.iter().map(|(_, name)| name.len()).collect::<Vec<_>>(), [1, 63]);
        // A gate that nobody has had is closed by a number of its own when it is given out.
        let fences: Vec<_> = named.iter().map(|(slot, _)| gates.view(*slot).deadline).collect();
        assert_eq!(fences, [1, 2]);
        for number in 2..MAX_GATES {
            gates.assign(&number.to_string()).unwrap();
        }
        assert!(matches!(gates.assign("one more"), Err(AssignError::Full)));
        drop(path);
        let (mut path, adopted) = lab.start().unwrap();
        assert_eq!(adopted.len(), MAX_GATES as usize);
        assert_eq!(path.gates().assign("a").unwrap(), first);
        assert!(matches!(path.gates().assign("one more"), Err(AssignError::Full)));
    });
}
