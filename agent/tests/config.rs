//! The configuration from outside: what bad files are answered with, and that a model survives being written down.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use portcullis::config::{
    Config, LoadError,
    check::{CheckReport, Timing, check},
    model::{Agent, Attach, Endpoint, Lease, Neighbours, Ports, Prefix, Protocol, Scope, Service, StoreLost, Tc, Xdp},
    values::{Drift, Span},
};
use proptest::{
    collection::{btree_set, hash_set, vec},
    prelude::*,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config")
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/portcullis.toml")
}

/// Every `NAME.toml` is answered with `NAME.txt`; `UPDATE=1` writes what is answered now.
#[test]
fn every_file_gets_its_answer() {
    let mut names: Vec<PathBuf> = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    names.sort();
    let mut wrong = Vec::new();
    for path in &names {
        let name = path.file_name().unwrap().to_str().unwrap();
        let (answer, accepted) = match Config::from_toml(&fs::read_to_string(path).unwrap(), name) {
            Ok(loaded) => (CheckReport { file: name.to_owned(), loaded }.to_string(), true),
            Err(errors) => (format!("{errors}\n"), false),
        };
        assert_eq!(accepted, name.starts_with("ok-"), "{name}:\n{answer}");
        let expected = path.with_extension("txt");
        if env::var_os("UPDATE").is_some() {
            fs::write(&expected, &answer).unwrap();
        }
        let expected = fs::read_to_string(&expected).unwrap_or_default();
        if answer != expected {
            wrong.push(format!("{name}: expected\n{expected}\nbut was\n{answer}"));
        }
    }
    assert!(wrong.is_empty(), "{}\nUPDATE=1 accepts the new answers", wrong.join("\n"));
    let refused = names.iter().filter(|path| !path.file_name().unwrap().to_str().unwrap().starts_with("ok-")).count();
    assert!(refused >= 25, "only {refused} bad files");
}

#[test]
fn the_example_is_valid_without_a_warning() {
    let report = check(&example()).unwrap();
    assert_eq!(report.loaded.warnings, []);
    let service = &report.loaded.config.services[0];
    assert_eq!(service.name, "pg-main");
    // The comments of the file promise this figure.
    assert_eq!(Timing::of(service, &report.loaded.config.agent).open_for, Duration::from_secs(7));
}

/// Lines of the form `#key = value` in the example show defaults or examples: they must be valid too.
#[test]
fn the_commented_lines_of_the_example_are_valid() {
    let text = fs::read_to_string(example()).unwrap();
    let uncommented: Vec<&str> = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => rest,
            Some(_) | None => line,
        })
        .collect();
    let loaded = Config::from_toml(&uncommented.join("\n"), "example").unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(loaded.config.services.len(), 3);
    assert_eq!(loaded.warnings.len(), 2, "one for each excluded interface: {:?}", loaded.warnings);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.toml");
    assert!(matches!(check(&missing), Err(LoadError::Read { file, .. }) if file == missing.display().to_string()));

    let binary = folder.path().join("binary.toml");
    fs::write(&binary, b"[agent]\nidentity = \"\xff\"\n").unwrap();
    assert!(matches!(check(&binary), Err(LoadError::NotUtf8 { line: 2, .. })));
}

#[test]
fn one_service_more_than_gates_is_refused() {
    let service = |n: u32| {
        format!(
            "[[service]]\nname = \"s{n}\"\nlease = {{ source = \"local\" }}\naddresses = [\"10.1.{}.{}\"]\nports = [\"tcp/1\"]\n",
            n / 256,
            n % 256
        )
    };
    let most = portcullis_common::layout::MAX_GATES;
    let text: String = (0..most).map(service).collect();
    assert_eq!(Config::from_toml(&text, "many").unwrap().config.services.len(), most as usize);
    let errors = Config::from_toml(&(text + &service(most)), "many").unwrap_err();
    assert_eq!((errors.problems.len(), errors.problems[0].line), (1, 5 * most as usize + 2), "{errors}");
}

#[test]
fn a_hundred_thousand_mistakes_are_counted_not_shown() {
    let text = format!("[agent]\nidentity = \"a\"\nexempt = [{}]\n", "\"x\",".repeat(100_000));
    let errors = Config::from_toml(&text, "many").unwrap_err();
    assert_eq!(errors.problems.len() + errors.further, 100_000);
    assert!(errors.to_string().len() < 100_000);
}

fn quote(texts: impl IntoIterator<Item: ToString>) -> String {
    let quoted: Vec<_> = texts.into_iter().map(|text| format!("{:?}", text.to_string())).collect();
    format!("[{}]", quoted.join(", "))
}

fn write(config: &Config) -> String {
    let Agent {
        identity,
        socket,
        socket_group,
        state_dir,
        bpffs,
        lock,
        cgroup_root,
        xdp,
        tc,
        attach,
        exclude_interfaces,
        drift_ppm,
        exempt_ssh,
        exempt,
    } = &config.agent;
    let word = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase().replace("onfence", "on-fence");
    let mut text = format!(
        "[agent]\nidentity = {identity:?}\nsocket = {socket:?}\nsocket_group = {socket_group:?}\nstate_dir = \
         {state_dir:?}\nbpffs = {bpffs:?}\nlock = {lock:?}\nxdp = {:?}\ntc = {:?}\nattach = {:?}\nexclude_interfaces = \
         {}\ndrift = \"{}\"\nexempt_ssh = {exempt_ssh}\nexempt = {}\n",
        word(xdp),
        word(tc),
        word(attach),
        quote(exclude_interfaces),
        Drift(*drift_ppm),
        quote(exempt),
    );
    if let Some(cgroup_root) = cgroup_root {
        text += &format!("cgroup_root = {cgroup_root:?}\n");
    }
    for service in &config.services {
        let Service {
            name,
            lease: Lease::Local { ttl_cap },
            margin,
            addresses,
            behind,
            remotes,
            ports,
            remote_ports,
            scope,
            neighbours,
            when_store_lost,
        } = service;
        text += &format!(
            "[[service]]\nname = {name:?}\nlease = {{ source = \"local\", ttl = \"{}\" }}\nmargin = \"{}\"\naddresses = \
             {}\nbehind = {}\nremotes = {}\nports = {}\nremote_ports = {}\nscope = {:?}\nneighbours = {:?}\nwhen_store_lost = {:?}\n",
            Span(*ttl_cap),
            Span(*margin),
            quote(addresses),
            quote(behind),
            quote(remotes),
            quote(ports),
            quote(remote_ports),
            word(scope),
            word(neighbours),
            word(when_store_lost),
        );
    }
    text
}

fn path() -> impl Strategy<Value = PathBuf> {
    "(/[a-z.\"\\\\ ]{1,8}){1,4}".prop_map(PathBuf::from)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Sctp)]
}

fn prefix() -> impl Strategy<Value = Prefix> {
    let v4 = (0x0a00_0000..0x0aff_ffff_u32, 8..=32u8).prop_map(|(bits, length)| Prefix {
        address: IpAddr::V4(Ipv4Addr::from_bits(bits & (u32::MAX << (32 - length)))),
        length,
    });
    let v6 = (any::<u128>(), 16..=128u8).prop_map(|(bits, length)| Prefix {
        address: IpAddr::V6(Ipv6Addr::from_bits((bits >> 8 | 0xfd << 120) & (u128::MAX << (128 - length)))),
        length,
    });
    prop_oneof![v4, v6]
}

fn ports() -> impl Strategy<Value = Ports> {
    (protocol(), 1..=65535u16, 0..3u16).prop_map(|(protocol, first, more)| Ports {
        protocol,
        first,
        last: first.saturating_add(more),
    })
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    // Apart from the prefixes above, since a service's address cannot be exempt.
    let address = prop_oneof![
        any::<[u8; 2]>().prop_map(|[a, b]| IpAddr::V4(Ipv4Addr::new(192, 0, a, b))),
        any::<u16>().prop_map(|n| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n))),
    ];
    (protocol(), address, 1..=65535u16).prop_map(|(protocol, address, port)| Endpoint { protocol, address, port })
}

fn agent() -> impl Strategy<Value = Agent> {
    let paths = (path(), path(), path(), path(), proptest::option::of(path()));
    let modes = (
        prop_oneof![Just(Xdp::Auto), Just(Xdp::Native), Just(Xdp::Generic), Just(Xdp::Off)],
        prop_oneof![Just(Tc::Auto), Just(Tc::Tcx), Just(Tc::Clsact)],
        prop_oneof![Just(Attach::Armed), Just(Attach::OnFence)],
        any::<bool>(),
    );
    let lists = (btree_set("[a-z]{1,8}[*]?", 0..4), hash_set(endpoint(), 0..4));
    (paths, modes, lists, "[a-zé.-]{1,20}", "[a-z]{1,8}", 1..=500_000u32).prop_map(
        |(paths, modes, lists, identity, socket_group, drift_ppm)| {
            let (socket, state_dir, bpffs, lock, cgroup_root) = paths;
            let (xdp, tc, attach, exempt_ssh) = modes;
            Agent {
                identity,
                socket,
                socket_group,
                state_dir,
                bpffs,
                lock,
                cgroup_root,
                xdp,
                tc,
                attach,
                exclude_interfaces: lists.0.into_iter().collect(),
                drift_ppm,
                exempt_ssh,
                exempt: lists.1.into_iter().collect(),
            }
        },
    )
}

fn service() -> impl Strategy<Value = Service> {
    let prefixes = || hash_set(prefix(), 0..3).prop_map(Vec::from_iter);
    // A few ports, so that nested prefixes never need more rules than fit.
    let port = || hash_set(ports(), 0..2).prop_map(Vec::from_iter);
    let word = (prop_oneof![Just(Scope::Service), Just(Scope::Node)], any::<bool>(), any::<bool>());
    ("[a-zA-Z0-9._-]{1,63}", 100..3_600_000u64, 0..100u64, prefixes(), prefixes(), prefixes(), port(), port(), word)
        .prop_map(|(name, ttl, share, addresses, behind, remotes, ports, remote_ports, (scope, hold, cut))| {
            let selects = !(addresses.is_empty() && behind.is_empty() && remotes.is_empty());
            Service {
                name,
                lease: Lease::Local { ttl_cap: Duration::from_millis(ttl) },
                // At most a half of the TTL is left by any drift bound.
                margin: Duration::from_millis(ttl * share / 201),
                ports: if addresses.is_empty() && behind.is_empty() { vec![] } else { ports },
                remote_ports: if remotes.is_empty() { vec![] } else { remote_ports },
                addresses,
                behind,
                remotes,
                scope: if selects { scope } else { Scope::Node },
                neighbours: if cut { Neighbours::Cut } else { Neighbours::Keep },
                when_store_lost: if hold { StoreLost::Hold } else { StoreLost::Fence },
            }
        })
}

fn config() -> impl Strategy<Value = Config> {
    (agent(), vec(service(), 0..3)).prop_map(|(agent, mut services)| {
        services.sort_by(|a, b| a.name.cmp(&b.name));
        services.dedup_by(|a, b| a.name == b.name);
        // Their prefixes may overlap.
        if services.len() > 1 {
            services.iter_mut().for_each(|service| service.neighbours = Neighbours::Keep);
        }
        Config { agent, services }
    })
}

proptest! {
    #[test]
    fn a_model_survives_being_written_down(config in config()) {
        let text = write(&config);
        match Config::from_toml(&text, "generated") {
            Ok(loaded) => prop_assert_eq!(loaded.config, config),
            Err(errors) => prop_assert!(false, "{text}\n{errors}"),
        }
    }

    #[test]
    fn no_text_panics(text in any::<String>()) {
        if let Err(errors) = Config::from_toml(&text, "any") {
            prop_assert!(!errors.to_string().is_empty());
        }
    }

    /// A valid file with a piece cut out and something else put in: mostly TOML, seldom valid.
    #[test]
    fn no_damage_panics(config in config(), cut in any::<(prop::sample::Index, u8)>(), put in "[\\PC\n\"\\[\\]{}=,]{0,6}") {
        let mut text = write(&config);
        let start = text.floor_char_boundary(cut.0.index(text.len()));
        let end = text.floor_char_boundary((start + usize::from(cut.1) / 8).min(text.len()));
        text.replace_range(start..end.max(start), &put);
        if let Err(errors) = Config::from_toml(&text, "damaged") {
            prop_assert!(!errors.to_string().is_empty());
            let lines = text.lines().count() + 1;
            prop_assert!(errors.problems.iter().all(|error| error.line <= lines), "{errors}");
        }
    }

    /// Values of every type in every place.
    #[test]
    fn no_wrong_type_panics(
        key in prop::sample::select(vec!["agent", "service", "agent.exempt", "agent.drift", "agent.socket", "agent.xdp"]),
        value in prop::sample::select(vec!["1", "1.5", "true", "\"x\"", "[]", "{}", "[1]", "[[1]]", "[{}]", "1979-05-27", "[\"\"]", "\"\""]),
    ) {
        if let Err(errors) = Config::from_toml(&format!("{key} = {value}\n"), "typed") {
            prop_assert!(errors.to_string().contains("typed:1:"));
        }
    }
}
