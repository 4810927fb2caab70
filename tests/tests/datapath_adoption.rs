//! Start, restart, and what a start refuses.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use std::{fs, time::Duration};

use aya::{
    maps::{Array, Map, MapData},
    programs::{SchedClassifier, TcAttachType},
};
use datapath_lab::{lab, run};
use portcullis::{
    clock::boot_now,
    config::model::{Attach, Tc, Xdp},
    datapath::{
        DataPathError,
        coverage::{HookState, XdpState},
        uninstall_and_open_gates,
    },
};
use portcullis_common::layout::{LAYOUT_VERSION, Settings};
use rustix::{
    mount::UnmountFlags,
    thread::{UnshareFlags, unshare_unsafe},
};

#[test]
fn a_first_start_covers_the_host_and_opens_nothing() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        run("ip tuntap add dev t0 mode tun");
        let (mut path, adopted) = lab.start().unwrap();
        assert!(adopted.is_empty());
        let coverage = path.verify().unwrap();
        assert_eq!(coverage.interfaces.len(), 4);
        for interface in &coverage.interfaces {
            assert_eq!((&interface.ingress, &interface.egress), (&HookState::First, &HookState::First));
        }
        assert_eq!(coverage.cgroup.ingress, HookState::First);
        assert_eq!(coverage.cgroup.sockets, HookState::First);
        assert_eq!((coverage.mended, coverage.degraded), (0, vec![]));
        // Four interfaces with two classifiers, two with XDP, and three programs of the cgroup.
        assert_eq!(lab.pinned_links().len(), 8 + 2 + 3);
    });
}

#[test]
fn a_restart_adopts_links_and_gates() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let slot = path.gates().assign("pg-main").unwrap();
        let deadline = boot_now().saturating_add(Duration::from_secs(60));
        path.gates().gate(slot).open(boot_now(), 77, deadline).unwrap();
        let before = lab.pinned_links();
        let programs = run("ip -d link show v0");
        drop(path);

        let (mut path, adopted) = lab.start().unwrap();
        assert_eq!(lab.pinned_links(), before);
        assert_ne!(run("ip -d link show v0"), programs, "the program was not swapped");
        assert_eq!(path.verify().unwrap().mended, 0);
        let [adopted] = &adopted[..] else { panic!("{adopted:?}") };
        assert_eq!((adopted.name.as_str(), adopted.slot, adopted.view.token), ("pg-main", slot, 77));
        assert!(adopted.view.is_open(boot_now()));
        assert_eq!(path.gates().assign("pg-main").unwrap(), slot);
        assert_ne!(path.gates().assign("another").unwrap(), slot);
        // The adopted handle moves the deadline on.
        path.gates().gate(slot).renew(deadline.saturating_add(Duration::from_secs(1))).unwrap();
    });
}

#[test]
fn a_restart_after_a_first_start_that_was_cut_short_goes_on() {
    lab(|lab| {
        let (path, _) = lab.start().unwrap();
        drop(path);
        for (name, _) in lab.pinned_links() {
            fs::remove_file(lab.links().join(name)).unwrap();
        }
        for name in ["NAMES", "SETTINGS", "STAMPS"] {
            fs::remove_file(lab.maps().join(name)).unwrap();
        }
        let (mut path, adopted) = lab.start().unwrap();
        assert!(adopted.is_empty());
        assert_eq!(path.verify().unwrap().degraded, Vec::<String>::new());
    });
}

#[test]
fn a_second_agent_is_refused_by_name_of_the_first() {
    lab(|lab| {
        let (_path, _) = lab.start().unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::Locked { pid, .. } if *pid == std::process::id().to_string()));
    });
}

#[test]
fn foreign_pins_are_refused_and_left_alone() {
    lab(|lab| {
        let (path, _) = lab.start().unwrap();
        drop(path);
        let links = lab.pinned_links();

        let stranger: Array<MapData, u64> = Array::create(1, 0).unwrap();
        let gates = lab.maps().join("GATES");
        let kept = lab.maps().join("KEPT");
        fs::rename(&gates, &kept).unwrap();
        stranger.pin(&gates).unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::MapLayout { path, .. } if *path == gates), "{refused}");
        assert!(gates.exists());
        fs::rename(&kept, &gates).unwrap();

        let stranger: Array<MapData, u64> = Array::create(1, 0).unwrap();
        let link = lab.links().join("xdp-77");
        stranger.pin(&link).unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::ForeignPin { path, .. } if *path == link), "{refused}");
        assert!(link.exists());
        fs::remove_file(&link).unwrap();

        let stranger: Array<MapData, u64> = Array::create(1, 0).unwrap();
        let other = lab.links().join("stranger");
        stranger.pin(&other).unwrap();
        assert!(matches!(lab.start().unwrap_err(), DataPathError::ForeignPin { path, .. } if path == other));
        fs::remove_file(&other).unwrap();

        assert_eq!(lab.pinned_links(), links);
        lab.start().unwrap();
    });
}

#[test]
fn another_layout_version_is_refused() {
    lab(|lab| {
        let (path, _) = lab.start().unwrap();
        drop(path);
        let map = Map::from_map_data(MapData::from_pin(lab.maps().join("SETTINGS")).unwrap()).unwrap();
        let mut settings: Array<MapData, Settings> = map.try_into().unwrap();
        let other = Settings { layout_version: LAYOUT_VERSION + 1, ..Settings::default() };
        settings.set(0, other, 0).unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::MapLayout { field: "layout version", .. }), "{refused}");
    });
}

#[test]
fn links_without_their_maps_are_refused() {
    lab(|lab| {
        let (path, _) = lab.start().unwrap();
        drop(path);
        fs::remove_file(lab.maps().join("GATES")).unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::MissingMaps { missing, .. } if missing == "GATES"), "{refused}");
    });
}

#[test]
fn a_change_of_attachment_leaves_one_of_them() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        for (tc, state, filters) in [
            (Tc::Tcx, HookState::First, false),
            (Tc::Clsact, HookState::Clsact, true),
            (Tc::Auto, HookState::First, false),
        ] {
            lab.agent.tc = tc;
            let (mut path, _) = lab.start().unwrap();
            let coverage = path.verify().unwrap();
            assert!(coverage.interfaces.iter().all(|one| one.ingress == state && one.egress == state), "{coverage:?}");
            assert_eq!(lab.pinned_links().iter().any(|(name, _)| name.starts_with("tcx-")), !filters);
            assert_eq!(run("tc filter show dev v0 ingress").contains("gate_tc_in"), filters);
        }
    });
}

#[test]
fn on_fence_attaches_when_told_and_stays_over_a_restart() {
    lab(|lab| {
        lab.agent.attach = Attach::OnFence;
        let (mut path, _) = lab.start().unwrap();
        let coverage = path.verify().unwrap();
        assert_eq!(coverage.interfaces[0].ingress, HookState::NotArmed);
        assert_eq!(coverage.cgroup.ingress, HookState::NotArmed);
        assert_eq!(coverage.cgroup.sockets, HookState::First);
        let names = |lab: &datapath_lab::Lab| lab.pinned_links().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(lab), ["sock-ops"]);

        let coverage = path.attach_now().unwrap();
        assert_eq!((&coverage.interfaces[0].ingress, coverage.mended), (&HookState::First, 0));
        assert_eq!(names(lab), ["cg-in", "cg-out", "sock-ops", "tcx-in-1", "tcx-out-1"]);
        drop(path);

        // Killed while fenced: the next agent lets go only when it is told to.
        let (mut path, _) = lab.start().unwrap();
        assert_eq!(path.verify().unwrap().interfaces[0].ingress, HookState::First);
        path.detach_now().unwrap();
        assert_eq!(names(lab), ["sock-ops"]);
    });
}

#[test]
fn uninstalling_leaves_nothing() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        for tc in [Tc::Tcx, Tc::Clsact] {
            lab.agent.tc = tc;
            let (path, _) = lab.start().unwrap();
            let refused = uninstall_and_open_gates(&lab.agent).unwrap_err();
            assert!(matches!(&refused, DataPathError::Locked { .. }), "{refused}");
            drop(path);
            uninstall_and_open_gates(&lab.agent).unwrap();
            assert!(!lab.agent.bpffs.join("v1").exists());
            assert!(!run("ip -d link show v0").contains("xdp"));
            let (_, classifiers) = SchedClassifier::query_tcx("v0", TcAttachType::Ingress).unwrap();
            assert!(classifiers.is_empty());
            assert!(!run("tc filter show dev v0 ingress").contains("gate_tc_in"));
        }
        uninstall_and_open_gates(&lab.agent).unwrap();
    });
}

#[test]
fn links_of_another_version_are_refused_until_they_are_uninstalled() {
    lab(|lab| {
        let (path, _) = lab.start().unwrap();
        drop(path);
        let other = lab.agent.bpffs.join("v0");
        fs::rename(lab.agent.bpffs.join("v1"), &other).unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::OtherVersion { path } if *path == other), "{refused}");
        uninstall_and_open_gates(&lab.agent).unwrap();
        lab.start().unwrap();
    });
}

#[test]
fn an_agent_in_another_network_namespace_detaches_nothing() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (path, _) = lab.start().unwrap();
        drop(path);
        let links = lab.pinned_links();
        let _alive = fs::File::open("/proc/thread-self/ns/net").unwrap();
        // SAFETY: this thread was started for the test; nothing in it relies on its network namespace.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::OtherNamespace { .. }), "{refused}");
        assert_eq!(lab.pinned_links(), links);
    });
}

#[test]
fn a_bpffs_is_mounted_where_there_is_none() {
    lab(|lab| {
        // In this thread's mount namespace alone.
        let kernels_own = "/sys/fs/bpf";
        while rustix::mount::unmount(kernels_own, UnmountFlags::DETACH).is_ok() {}
        assert!(fs::create_dir(format!("{kernels_own}/sysfs-has-no-room")).is_err());
        lab.agent.bpffs = format!("{kernels_own}/portcullis").into();
        let (mut path, _) = lab.start().unwrap();
        assert!(path.verify().unwrap().is_whole());
        assert!(lab.pinned_links().len() >= 5);
        drop(path);
        uninstall_and_open_gates(&lab.agent).unwrap();
        rustix::mount::unmount(kernels_own, UnmountFlags::DETACH).unwrap();

        lab.agent.bpffs = "/proc/portcullis".into();
        let refused = lab.start().unwrap_err();
        assert!(matches!(&refused, DataPathError::Bpffs { .. }), "{refused}");
        assert!(refused.to_string().contains("mount -t bpf"), "{refused}");
    });
}

#[test]
fn a_change_of_the_xdp_mode_is_carried_out_at_the_start() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let modes = [(Xdp::Native, XdpState::Native), (Xdp::Generic, XdpState::Generic), (Xdp::Off, XdpState::Unused)];
        for (mode, state) in modes.iter().chain(&modes) {
            lab.agent.xdp = *mode;
            let (mut path, _) = lab.start().unwrap();
            let coverage = path.verify().unwrap();
            let found = coverage.interfaces.into_iter().find(|one| one.name == "v0").unwrap();
            assert_eq!((&found.xdp, found.ingress), (state, HookState::First));
        }
    });
}
