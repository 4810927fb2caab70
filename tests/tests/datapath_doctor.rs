//! The host's checks, on this host and on one with a shaped queue.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use std::time::Duration;

use datapath_lab::{lab, run};
use portcullis::datapath::doctor::{CheckState, examine, queues::shapers};

#[test]
fn every_check_that_does_not_pass_has_a_remedy() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let checks = examine(&lab.agent);
        for check in &checks {
            assert_eq!(check.remedy.is_empty(), check.state == CheckState::Ok, "{check:?}");
            assert!(!check.finding.is_empty(), "{check:?}");
            assert_ne!(check.state, CheckState::Fail, "{check:?}");
        }
        for name in [
            "kernel",
            "BTF",
            "bpf()",
            "capabilities",
            "bpffs",
            "cgroup v2",
            "time namespace",
            "clock slew",
            "queue drain",
        ] {
            assert!(checks.iter().any(|check| check.name == name), "no check {name}");
        }
    });
}

#[test]
fn a_tighter_drift_bound_and_a_missing_cgroup_are_told() {
    lab(|lab| {
        lab.agent.drift_ppm = 500;
        lab.agent.cgroup_root = Some("/nowhere".into());
        let checks = examine(&lab.agent);
        let state = |name: &str| checks.iter().find(|check| check.name == name).unwrap().state;
        assert_eq!(state("drift bound"), CheckState::Warn);
        assert_eq!(state("cgroup v2"), CheckState::Fail);
        let (mut path, _) = lab.start().unwrap();
        let coverage = path.verify().unwrap();
        assert!(!coverage.is_whole());
        assert_eq!(coverage.degraded.len(), 3, "{coverage:?}");
    });
}

#[test]
fn a_token_bucket_is_measured() {
    lab(|_| {
        run("ip link add v0 type veth peer name v1");
        run("ip link set v0 up");
        assert_eq!(shapers().unwrap(), []);
        run("tc qdisc add dev v0 root tbf rate 1mbit burst 10kb limit 250000");
        let [shaper] = &shapers().unwrap()[..] else { panic!("one queue") };
        assert_eq!((shaper.interface.as_str(), shaper.kind.as_str()), ("v0", "tbf"));
        assert_eq!(shaper.worst, Some(Duration::from_secs(2)));
    });
}
