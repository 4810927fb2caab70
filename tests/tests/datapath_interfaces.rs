//! Interfaces that come, go, change their names, and come back.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use datapath_lab::{index, lab, run};
use portcullis::datapath::{Change, DataPath, coverage::HookState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Waits for the kernel's word, then follows it.
fn changes(path: &mut DataPath) -> Vec<Change> {
    let limit = Timespec { tv_sec: 5, tv_nsec: 0 };
    let fd = path.interfaces_fd();
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap(), 1, "nothing was heard");
    path.interfaces_ready().unwrap()
}

#[test]
fn a_new_interface_is_covered_at_once() {
    lab(|lab| {
        let (mut path, _) = lab.start().unwrap();
        assert_eq!(path.interfaces_ready().unwrap(), []);
        run("ip link add v0 type veth peer name v1");
        let (v0, v1) = (index("v0"), index("v1"));
        let new = |name: &str, index| Change::New { name: name.to_owned(), index };
        let mut found = changes(&mut path);
        found.sort_by_key(|change| format!("{change:?}"));
        assert_eq!(found, [new("v0", v0), new("v1", v1)]);
        let pinned: Vec<_> = lab.pinned_links().into_iter().map(|(name, _)| name).collect();
        for name in [format!("tcx-in-{v0}"), format!("tcx-out-{v0}"), format!("tcx-in-{v1}"), format!("tcx-out-{v1}")] {
            assert!(pinned.contains(&name), "{name} is not among {pinned:?}");
        }
        assert_eq!(path.verify().unwrap().mended, 0);
    });
}

#[test]
fn an_interface_that_comes_back_is_covered_anew() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let old = index("v0");
        run("ip link del v0");
        run("ip link add v0 type veth peer name v1");
        let new = index("v0");
        assert_ne!(old, new);
        let found = changes(&mut path);
        assert!(found.contains(&Change::Gone { name: "v0".to_owned(), index: old }), "{found:?}");
        assert!(found.contains(&Change::New { name: "v0".to_owned(), index: new }), "{found:?}");
        let pinned = lab.pinned_links();
        assert!(pinned.iter().all(|(name, _)| !name.ends_with(&format!("-{old}"))), "{pinned:?}");
        let coverage = path.verify().unwrap();
        assert!(coverage.interfaces.iter().all(|one| one.ingress == HookState::First), "{coverage:?}");
    });
}

#[test]
fn pins_of_interfaces_that_went_while_no_agent_ran_are_removed() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (path, _) = lab.start().unwrap();
        drop(path);
        let old = index("v0");
        run("ip link del v0");
        lab.start().unwrap();
        let pinned = lab.pinned_links();
        assert!(pinned.iter().all(|(name, _)| !name.ends_with(&format!("-{old}"))), "{pinned:?}");
    });
}

#[test]
fn excluded_interfaces_are_left_alone_whatever_they_were_called_before() {
    lab(|lab| {
        lab.agent.exclude_interfaces = vec!["cali*".to_owned()];
        run("ip link add cali1 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let state = |path: &mut DataPath, wanted: u32| {
            let coverage = path.verify().unwrap();
            coverage.interfaces.into_iter().find(|one| one.index == wanted).unwrap().ingress
        };
        let (cali, v1) = (index("cali1"), index("v1"));
        assert_eq!(state(&mut path, cali), HookState::Excluded);
        run("ip link set cali1 name eth7");
        let renamed = Change::Renamed { from: "cali1".to_owned(), to: "eth7".to_owned(), index: cali };
        assert_eq!(changes(&mut path), [renamed]);
        assert_eq!(state(&mut path, cali), HookState::First);
        run("ip link set v1 name cali2");
        changes(&mut path);
        assert_eq!(state(&mut path, v1), HookState::Excluded);
        assert!(
            lab.pinned_links().iter().all(|(name, _)| !name.starts_with("tcx") || !name.ends_with(&format!("-{v1}")))
        );
    });
}
