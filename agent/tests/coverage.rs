//! Coverage in a network namespace of its own, with sockets of this very process.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    env, fs,
    io::Write,
    net::{TcpListener, TcpStream, UdpSocket},
    panic,
    path::Path,
    process::{self, Command},
    thread,
};

use portcullis::{
    config::{Config, model::Protocol, rules::RuleTable},
    coverage::{self, Uncovered},
};
use rustix::{io::Errno, thread::UnshareFlags};

const CONFIGURATION: &str = r#"
[agent]
identity = "node-a"

[[service]]
name = "pg-main"
lease = { source = "local" }
addresses = ["10.0.0.100"]
ports = ["tcp/5432"]
"#;

/// Runs `test` on a thread in a new network namespace, where `lo` has the service's address; it ends with the thread.
fn in_a_namespace(name: &str, test: impl FnOnce() + Send) {
    let run = || {
        // SAFETY: only the network namespace is unshared: descriptors and memory stay as they are.
        match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
            Err(Errno::PERM) => return skip(name, "needs root for a network namespace"),
            other => other.unwrap(),
        }
        for arguments in ["link set lo up", "address add 10.0.0.100/32 dev lo"] {
            assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
        }
        test();
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|payload| panic::resume_unwind(payload)));
}

/// Says so where whoever counts the tests looks.
fn skip(name: &str, why: &str) {
    println!("skipped: {why}");
    if let Some(path) = env::var_os("PORTCULLIS_SKIPS") {
        let mut file = fs::File::options().append(true).create(true).open(path).unwrap();
        writeln!(file, "{name} {why}").unwrap();
    }
}

/// Sockets by what they are: protocol, address, port, whether IPv6 alone.
fn sorted(listeners: &[coverage::Listener]) -> Vec<String> {
    let text = |one: &coverage::Listener| format!("{} {} {} {}", one.protocol, one.address, one.port, one.v6_only);
    let mut texts: Vec<String> = listeners.iter().map(text).collect();
    texts.sort();
    texts
}

#[test]
fn what_listens_is_found_with_its_owner() {
    in_a_namespace("what_listens_is_found_with_its_owner", || {
        let _covered = TcpListener::bind("0.0.0.0:5432").unwrap();
        let api = TcpListener::bind("0.0.0.0:8008").unwrap();
        let _local = TcpListener::bind("127.0.0.1:1").unwrap();
        let _dual = TcpListener::bind("[::]:2").unwrap();
        let _own = UdpSocket::bind("10.0.0.100:3").unwrap();
        fs::write("/proc/sys/net/ipv6/bindv6only", "1").unwrap();
        let _v6 = UdpSocket::bind("[::]:4").unwrap();
        // A connection listens nowhere.
        let _client = TcpStream::connect("127.0.0.1:8008").unwrap();
        let _server = api.accept().unwrap();
        let connected = UdpSocket::bind("10.0.0.100:5").unwrap();
        connected.connect("10.0.0.100:3").unwrap();

        let listeners = coverage::listeners().unwrap();
        assert_eq!(
            sorted(&listeners),
            [
                "tcp 0.0.0.0 5432 false",
                "tcp 0.0.0.0 8008 false",
                "tcp 127.0.0.1 1 false",
                "tcp :: 2 false",
                "udp 10.0.0.100 3 false",
                "udp :: 4 true",
            ]
        );

        let config = Config::from_toml(CONFIGURATION, "test").unwrap_or_else(|errors| panic!("{errors}")).config;
        let table = RuleTable::compile(&[(0, &config.services[0])], &config.agent).unwrap();
        let mut uncovered = coverage::uncovered(&config.services, &table, &listeners);
        coverage::owners::find(Path::new("/proc"), &mut uncovered);
        uncovered.sort_by_key(|one| one.listener.port);
        let pid = process::id();
        let name = fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned();
        let says = |listener: &str| {
            format!("{listener} ({name}, pid {pid}) is reachable at 10.0.0.100 and no selector of pg-main matches it")
        };
        assert_eq!(
            uncovered.iter().map(Uncovered::to_string).collect::<Vec<_>>(),
            [says("tcp [::]:2"), says("udp 10.0.0.100:3"), says("tcp 0.0.0.0:8008")]
        );
    });
}

/// More listeners than fit one datagram of the kernel's answer.
#[test]
fn a_thousand_listeners_are_all_found() {
    in_a_namespace("a_thousand_listeners_are_all_found", || {
        let sockets: Vec<UdpSocket> = (0..1000).map(|_| UdpSocket::bind("0.0.0.0:0").unwrap()).collect();
        let mut ports: Vec<u16> = sockets.iter().map(|socket| socket.local_addr().unwrap().port()).collect();
        let mut found: Vec<u16> = coverage::listeners()
            .unwrap()
            .iter()
            .map(|one| (one.protocol == Protocol::Udp).then_some(one.port).unwrap())
            .collect();
        ports.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, ports);
    });
}

/// Without a process that can be looked at nothing is known, and nothing fails.
#[test]
fn no_owner_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("12/fd")).unwrap();
    fs::write(folder.path().join("12/comm"), "postgres\n").unwrap();
    std::os::unix::fs::symlink("socket:[77]", folder.path().join("12/fd/3")).unwrap();
    let one = |inode| Uncovered {
        listener: coverage::Listener {
            protocol: Protocol::Tcp,
            address: "0.0.0.0".parse().unwrap(),
            port: 1,
            v6_only: false,
            inode,
        },
        owner: None,
        at: vec![],
        services: vec![],
    };
    let mut uncovered = [one(77), one(78), one(77)];
    coverage::owners::find(folder.path(), &mut uncovered);
    let pids: Vec<_> = uncovered.iter().map(|one| one.owner.as_ref().map(|owner| (owner.pid, &*owner.name))).collect();
    assert_eq!(pids, [Some((12, "postgres")), None, Some((12, "postgres"))]);

    let mut uncovered = [one(77)];
    coverage::owners::find(&folder.path().join("missing"), &mut uncovered);
    assert_eq!(uncovered[0].owner, None);
}
