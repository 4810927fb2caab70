//! What others do to our attachments is noticed, mended and told.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
};

use aya::{
    Ebpf,
    programs::{CgroupSkb, LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode, tc::TcAttachOptions},
};
use datapath_lab::{lab, run};
use portcullis::{
    config::model::Tc,
    datapath::{
        OBJECT,
        coverage::{Coverage, HookState, InterfaceCoverage, XdpState},
        uninstall_and_open_gates,
    },
};
use portcullis_common::layout::maps;

fn interface<'a>(coverage: &'a Coverage, name: &str) -> &'a InterfaceCoverage {
    coverage.interfaces.iter().find(|one| one.name == name).unwrap()
}

/// A stranger with a program at every hook it likes; its maps are its own.
fn stranger() -> Ebpf {
    Ebpf::load(OBJECT).unwrap()
}

#[test]
fn a_program_placed_before_ours_is_overtaken_as_often_as_it_comes() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        for round in 1..=3 {
            let mut stranger = stranger();
            let program: &mut SchedClassifier = stranger.program_mut("gate_tc_in").unwrap().try_into().unwrap();
            program.load().unwrap();
            let first = TcAttachOptions::TcxOrder(LinkOrder::first());
            program.attach_with_options("v0", TcAttachType::Ingress, first).unwrap();
            let id = program.info().unwrap().id();
            let order = || {
                let (_, programs) = SchedClassifier::query_tcx("v0", TcAttachType::Ingress).unwrap();
                programs.iter().map(|program| program.id()).collect::<Vec<_>>()
            };
            assert_eq!(order()[0], id);

            let coverage = path.verify().unwrap();
            assert_eq!(interface(&coverage, "v0").ingress, HookState::First);
            assert_eq!((coverage.mended, coverage.mended_now.len()), (round, 1));
            assert!(coverage.mended_now[0].contains("gate_tc_in ran before"), "{:?}", coverage.mended_now);
            let after = order();
            assert_eq!((after.len(), after[1]), (2, id), "the stranger stays, behind ours");
            assert!(path.verify().unwrap().mended_now.is_empty());
        }
        // The link that moved is the pinned one.
        drop(path);
        let pinned = lab.pinned_links();
        let (mut path, _) = lab.start().unwrap();
        assert_eq!(lab.pinned_links(), pinned);
        assert_eq!(path.verify().unwrap().mended, 0);
    });
}

#[test]
fn a_deleted_clsact_qdisc_is_put_back() {
    lab(|lab| {
        lab.agent.tc = Tc::Clsact;
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        assert_eq!(interface(&path.verify().unwrap(), "v0").egress, HookState::Clsact);
        run("tc qdisc del dev v0 clsact");
        let coverage = path.verify().unwrap();
        assert_eq!((coverage.mended, coverage.mended_now.len()), (2, 2));
        assert!(run("tc filter show dev v0 ingress").contains("gate_tc_in"));
        assert!(run("tc filter show dev v0 egress").contains("gate_tc_out"));
        assert!(path.verify().unwrap().mended_now.is_empty());

        // A restart swaps the program behind the filter and adds none.
        drop(path);
        let (mut path, _) = lab.start().unwrap();
        assert_eq!(path.verify().unwrap().mended, 0);
        assert_eq!(run("tc filter show dev v0 ingress").matches("gate_tc_in direct-action").count(), 1);
    });
}

#[test]
fn a_filter_placed_before_ours_is_overtaken() {
    lab(|lab| {
        lab.agent.tc = Tc::Clsact;
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let pin = lab.agent.bpffs.join("stranger");
        let mut stranger = stranger();
        let program: &mut SchedClassifier = stranger.program_mut("gate_tc_out").unwrap().try_into().unwrap();
        program.load().unwrap();
        program.pin(&pin).unwrap();
        run(&format!("tc filter add dev v0 ingress prio 1 handle 7 bpf da pinned {}", pin.display()));
        let coverage = path.verify().unwrap();
        assert_eq!((coverage.mended_now.len(), &interface(&coverage, "v0").ingress), (1, &HookState::Clsact));
        assert!(coverage.mended_now[0].contains("ran before"), "{:?}", coverage.mended_now);
        assert!(path.verify().unwrap().mended_now.is_empty());
        let shown = run("tc filter show dev v0 ingress");
        assert_eq!(shown.matches("gate_tc_in direct-action").count(), 1, "{shown}");
        assert!(shown.contains("handle 0x7"), "{shown}");
    });
}

#[test]
fn a_strangers_xdp_stays_and_is_told() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        for mode in [XdpMode::Driver, XdpMode::Skb] {
            let mut stranger = stranger();
            let program: &mut Xdp = stranger.program_mut("gate_xdp").unwrap().try_into().unwrap();
            program.load().unwrap();
            program.attach("v0", mode).unwrap();
            let id = format!("prog/xdp id {}", program.info().unwrap().id());
            assert!(run("ip -d link show v0").contains(&id));

            let (mut path, _) = lab.start().unwrap();
            let coverage = path.verify().unwrap();
            assert_eq!(interface(&coverage, "v0").xdp, XdpState::Occupied);
            assert_eq!(interface(&coverage, "v1").xdp, XdpState::Native);
            assert_eq!(interface(&coverage, "v0").ingress, HookState::First);
            assert!(coverage.degraded.iter().any(|reason| reason.starts_with("v0: XDP is taken")), "{coverage:?}");
            assert!(run("ip -d link show v0").contains(&id), "the stranger was detached");
            drop(path);
            uninstall_and_open_gates(&lab.agent).unwrap();
        }
    });
}

#[test]
fn large_frames_keep_native_xdp() {
    lab(|lab| {
        run("ip link add v0 mtu 9000 type veth peer name v1 mtu 9000");
        let (mut path, _) = lab.start().unwrap();
        let coverage = path.verify().unwrap();
        assert_eq!(interface(&coverage, "v0").xdp, XdpState::Native);
    });
}

#[test]
fn a_cgroup_held_by_a_stranger_is_told() {
    lab(|lab| {
        const BPF_PROG_ATTACH: libc::c_int = 8;
        const BPF_CGROUP_INET_INGRESS: u32 = 0;
        let mut stranger = stranger();
        let program: &mut CgroupSkb = stranger.program_mut("gate_cg_in").unwrap().try_into().unwrap();
        program.load().unwrap();
        let cgroup = fs::File::open(lab.cgroup()).unwrap();
        let program = program.fd().unwrap().as_fd().as_raw_fd();
        let attr = [cgroup.as_raw_fd().cast_unsigned(), program.cast_unsigned(), BPF_CGROUP_INET_INGRESS, 0, 0];
        // SAFETY: `attr` is the kernel's layout of the command (target, program, type, flags, replaced program), and
        // lives over the call.
        let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_ATTACH, attr.as_ptr(), size_of_val(&attr)) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());

        let (mut path, _) = lab.start().unwrap();
        let coverage = path.verify().unwrap();
        assert!(
            matches!(&coverage.cgroup.ingress, HookState::Missing { reason } if reason.contains("foreign program")),
            "{coverage:?}"
        );
        assert_eq!(coverage.cgroup.egress, HookState::First);
        assert_eq!(coverage.degraded.len(), 1, "{coverage:?}");
    });
}

#[test]
fn deleted_pins_are_put_back_before_the_agent_can_die() {
    lab(|lab| {
        run("ip link add v0 type veth peer name v1");
        let (mut path, _) = lab.start().unwrap();
        let before = lab.pinned_links();
        for (name, _) in &before {
            fs::remove_file(lab.links().join(name)).unwrap();
        }
        for name in maps::ALL {
            fs::remove_file(lab.maps().join(name)).unwrap();
        }
        let coverage = path.verify().unwrap();
        assert_eq!(coverage.mended_now.len(), before.len() + maps::ALL.len(), "{coverage:?}");
        assert_eq!(lab.pinned_links(), before);
        path.gates().assign("a").unwrap();
        drop(path);
        let (_, adopted) = lab.start().unwrap();
        assert_eq!(adopted.len(), 1, "the maps are the same ones");
    });
}
