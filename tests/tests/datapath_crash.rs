//! An agent that dies at any instant of a start or a change opens nothing, closes nothing early, and is taken over.
#![allow(clippy::unwrap_used, reason = "tests")]

mod datapath_lab;

use std::{
    env, fs,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use aya::{
    Ebpf,
    programs::{LinkOrder, SchedClassifier, TcAttachType, tc::TcAttachOptions},
};
use datapath_lab::{Lab, agent, lab, run};
use portcullis::{
    clock::boot_now,
    config::{
        model::{Lease, Neighbours, Scope, Service, StoreLost},
        rules::RuleTable,
    },
    datapath::{DataPath, OBJECT, Options},
};

const FOLDER: &str = "PORTCULLIS_TEST_FOLDER";
const CGROUP: &str = "PORTCULLIS_TEST_CGROUP";
const CRASH_AT: &str = "PORTCULLIS_CRASH_AT";

/// Points that every start passes.
const START: [&str; 11] = [
    "start-after-lock",
    "start-after-bpffs",
    "start-after-maps",
    "start-after-programs",
    "start-after-adopt",
    "attach-between-interfaces",
    "attach-before-cgroup",
    "start-after-attach",
    "assign-before-close",
    "assign-before-name",
    "assign-after-name",
];
/// Points of a first start alone.
const FIRST: [&str; 5] =
    ["maps-before-version", "tcx-after-attach", "link-before-pin", "link-after-pin", "rules-between-changes"];
/// Points of a start that adopts, and of one that finds a stranger before our program.
const ADOPTION: [&str; 5] =
    ["adopt-after-swap", "tcx-after-attach", "link-before-pin", "link-before-rename", "link-after-pin"];

fn service(name: &str) -> Service {
    Service {
        name: name.to_owned(),
        lease: Lease::Local { ttl_cap: Duration::from_secs(30) },
        margin: Duration::from_secs(1),
        addresses: vec!["10.0.0.100/32", "10.1.0.0/24"]
            .into_iter()
            .map(|text| {
                let (address, length) = text.split_once('/').unwrap();
                portcullis::config::model::Prefix { address: address.parse().unwrap(), length: length.parse().unwrap() }
            })
            .collect(),
        behind: vec![],
        remotes: vec![],
        ports: vec![],
        remote_ports: vec![],
        scope: Scope::Service,
        neighbours: Neighbours::Keep,
        when_store_lost: StoreLost::Fence,
    }
}

/// What an agent does at its start.
fn serve(path: &mut DataPath, name: &str, agent: &portcullis::config::model::Agent) {
    let slot = path.gates().assign(name).unwrap();
    let table = RuleTable::compile(&[(slot.index(), &service(name))], agent).unwrap();
    path.apply_rules(&table).unwrap();
}

#[test]
#[ignore = "an agent to be killed: the other tests run it"]
fn victim() {
    let (folder, cgroup) = (PathBuf::from(env::var_os(FOLDER).unwrap()), PathBuf::from(env::var_os(CGROUP).unwrap()));
    let agent = agent(&folder, &cgroup);
    let (mut path, _) = DataPath::start(&Options { agent: &agent, object: OBJECT }).unwrap();
    serve(&mut path, "newcomer", &agent);
}

/// Runs an agent in the lab that dies at `point`.
fn kill_at(lab: &Lab, point: &str) {
    let status = Command::new(env::current_exe().unwrap())
        .args(["victim", "--exact", "--ignored", "--test-threads=1"])
        .env(FOLDER, lab.folder())
        .env(CGROUP, lab.cgroup())
        .env(CRASH_AT, point)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{point} was not reached");
}

#[test]
fn a_first_start_that_dies_anywhere_is_taken_over_and_has_opened_nothing() {
    for point in START.into_iter().chain(FIRST) {
        lab(move |lab| {
            run("ip link add v0 type veth peer name v1");
            kill_at(lab, point);
            let (mut path, adopted) = lab.start().unwrap();
            assert!(adopted.iter().all(|gate| gate.view.is_fenced()), "{point}: {adopted:?}");
            serve(&mut path, "newcomer", &lab.agent);
            let coverage = path.verify().unwrap();
            assert!(coverage.is_whole() && coverage.mended == 0, "{point}: {coverage:?}");
            assert_eq!(lab.pinned_links().len(), 6 + 2 + 3, "{point}: {:?}", lab.pinned_links());
        });
    }
}

#[test]
fn a_restart_that_dies_anywhere_leaves_gates_and_links_as_they_were() {
    for point in START.into_iter().chain(ADOPTION) {
        lab(move |lab| {
            run("ip link add v0 type veth peer name v1");
            let (mut path, _) = lab.start().unwrap();
            serve(&mut path, "serving", &lab.agent);
            let slot = path.gates().assign("serving").unwrap();
            let deadline = boot_now().saturating_add(Duration::from_secs(60));
            path.gates().gate(slot).open(boot_now(), 5, deadline).unwrap();
            drop(path);
            let before = lab.pinned_links();

            // Our program has to move to the front again, so that a link is replaced.
            let mut stranger = Ebpf::load(OBJECT).unwrap();
            let program: &mut SchedClassifier = stranger.program_mut("gate_tc_in").unwrap().try_into().unwrap();
            program.load().unwrap();
            let first = TcAttachOptions::TcxOrder(LinkOrder::first());
            program.attach_with_options("v0", TcAttachType::Ingress, first).unwrap();

            kill_at(lab, point);
            let names = |links: &[(String, u32)]| links.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            let left = fs::read_dir(lab.links()).unwrap().count();
            assert!(left >= before.len(), "{point}: a link is gone");

            let (mut path, adopted) = lab.start().unwrap();
            let gate = adopted.iter().find(|gate| gate.name == "serving").unwrap();
            assert_eq!((gate.slot, gate.view.deadline, gate.view.token), (slot, deadline.as_nanos(), 5), "{point}");
            assert!(adopted.iter().all(|gate| gate.name == "serving" || gate.view.is_fenced()), "{point}: {adopted:?}");
            assert_eq!(names(&lab.pinned_links()), names(&before), "{point}");
            let coverage = path.verify().unwrap();
            assert!(coverage.is_whole(), "{point}: {coverage:?}");
        });
    }
}
