//! From TOML to the model: every problem of a file is reported, each at its place.

use std::{collections::HashMap, fs, io, ops::Range, path::Path, time::Duration};

use thiserror::Error;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    model::{Agent, Attach, Config, Endpoint, Lease, Neighbours, Ports, Prefix, Scope, Service, StoreLost, Tc, Xdp},
    problem::{Problem, TextRule, Warning},
    read::{
        Item, Reader, Schema, boolean, choice, duration, parsed, path, socket_path, string, tables, text, wrong_type,
    },
    report::{Errors, Located},
    validate::{self, ServicePlaces},
    values::parse_drift,
};

/// A valid configuration, and what the operator should know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    pub config: Config,
    pub warnings: Vec<Located<Warning>>,
}

/// Why a configuration file gave no configuration. The running one, if any, stays in force.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error("cannot read the configuration {file}: {source}; give the right path, or create it from the example")]
    Read { file: String, source: io::Error },
    #[error("the configuration {file} is no UTF-8 text: line {line} has other bytes; save it as UTF-8")]
    NotUtf8 { file: String, line: usize },
    #[error(transparent)]
    Invalid(#[from] Errors),
}

const ROOT: Schema = Schema { place: "the file's top level", keys: &["agent", "service"], later: &[] };
const AGENT: Schema = Schema {
    place: "[agent]",
    keys: &[
        "identity",
        "socket",
        "socket_group",
        "state_dir",
        "bpffs",
        "lock",
        "cgroup_root",
        "xdp",
        "tc",
        "attach",
        "exclude_interfaces",
        "drift",
        "exempt_ssh",
        "exempt",
    ],
    later: &[],
};
const SERVICE: Schema = Schema {
    place: "[[service]]",
    keys: &[
        "name",
        "lease",
        "margin",
        "addresses",
        "behind",
        "remotes",
        "ports",
        "remote_ports",
        "scope",
        "neighbours",
        "when_store_lost",
    ],
    later: &["cgroups", "routes", "on_fence", "refuse", "on_unconfirmed", "unit"],
};
const LEASE: Schema = Schema { place: "`lease`", keys: &["source", "ttl"], later: &[] };
const OTHER_STORES: [&str; 3] = ["etcd", "kubernetes", "consul"];

/// A TTL shorter than the least cannot be renewed reliably from user space; one longer than the most is no lease.
const TTL_LEAST: Duration = Duration::from_millis(100);
const TTL_MOST: Duration = Duration::from_secs(3600);
const TTL_DEFAULT: Duration = Duration::from_secs(30);
/// The kernel's usual queue of 1000 packets drains in 12 ms at 1 Gbit/s and in 120 ms at 100 Mbit/s; that and the
/// verification of the fence fit into half a second with room to spare. Slower or shaped links need more.
const MARGIN_DEFAULT: Duration = Duration::from_millis(500);
/// Parts per million. No clock is exact, and a bound beyond a half is a broken clock.
const DRIFT_LEAST: u32 = 1;
const DRIFT_MOST: u32 = 500_000;
const DRIFT_DEFAULT: u32 = 100_000;

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// When the file cannot be read, or with everything that is wrong with it.
    pub fn load(path: &Path) -> Result<Loaded, LoadError> {
        let file = path.display().to_string();
        let bytes = fs::read(path).map_err(|source| LoadError::Read { file: file.clone(), source })?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            LoadError::NotUtf8 { file: file.clone(), line: valid.iter().filter(|&&byte| byte == b'\n').count() + 1 }
        })?;
        Ok(Self::from_toml(&text, &file)?)
    }

    /// Checks the text of a configuration; `file_name` stands in the messages.
    ///
    /// # Errors
    /// Everything that is wrong with the text; only what is wrong with its syntax, if it is no TOML.
    pub fn from_toml(text: &str, file_name: &str) -> Result<Loaded, Errors> {
        let mut reader = Reader::new(file_name, text);
        let (document, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            reader.refuse(error.span().unwrap_or(0..0), Problem::Syntax(error.message().to_owned()));
        }
        if !reader.is_clean() {
            return Err(reader.into_errors());
        }
        let (config, places) = read_document(&mut reader, document.get_ref());
        validate::exemptions(&mut reader, &config, &places);
        // Whether the rules fit is asked only when they are what the operator meant.
        if reader.is_clean() {
            validate::rules(&mut reader, &config, &places);
        }
        if !reader.is_clean() {
            return Err(reader.into_errors());
        }
        let warnings = validate::warnings(&reader, &config, &places);
        Ok(Loaded { config, warnings })
    }
}

/// Where in the file things stand that checks across several values point at.
#[derive(Default)]
pub(super) struct Places {
    /// Not there if it could not be read: nothing that rests on it is checked then.
    drift_ppm: Option<u32>,
    pub(super) attach: Range<usize>,
    pub(super) excluded: Vec<Range<usize>>,
    pub(super) exempt: Vec<Range<usize>>,
    pub(super) services: Vec<ServicePlaces>,
}

fn read_document(reader: &mut Reader<'_>, root: &DeTable<'_>) -> (Config, Places) {
    reader.known_keys(root, &ROOT, &[&AGENT, &SERVICE]);
    let mut places = Places::default();
    let empty = DeTable::new();
    let table = root.get("agent").and_then(|value| reader.table(value)).unwrap_or(&empty);
    let agent = read_agent(reader, table, &mut places);

    let mut services: Vec<Service> = Vec::new();
    let mut names: HashMap<String, Range<usize>> = HashMap::new();
    let tables = match root.get("service") {
        Some(value) => tables(value.get_ref()).unwrap_or_else(|problem| {
            reader.refuse(value.span(), problem);
            Vec::new()
        }),
        None => Vec::new(),
    };
    for value in tables {
        let Some(table) = reader.table(value) else { continue };
        let (service, place) = read_service(reader, value, table, places.drift_ppm);
        if let Some(first) = names.get(&service.name) {
            let line = reader.line_of(first);
            reader.refuse(place.name.clone(), Problem::NameTaken { name: service.name.clone(), line });
        } else if !service.name.is_empty() {
            names.insert(service.name.clone(), place.name.clone());
        }
        services.push(service);
        places.services.push(place);
    }
    validate::count(reader, &places);
    (Config { agent, services }, places)
}

fn read_agent(reader: &mut Reader<'_>, table: &DeTable<'_>, places: &mut Places) -> Agent {
    reader.known_keys(table, &AGENT, &[&SERVICE]);
    let identity = match table.get("identity") {
        Some(_) => reader.get(table, "identity", text(TextRule::Identity, is_identity)).unwrap_or_default(),
        None => host_name(reader),
    };
    let drift = |value: &DeValue<'_>| {
        let text = value.as_str().ok_or_else(|| wrong_type("a drift bound such as \"10%\"", value))?;
        let given = parse_drift(text)?;
        if (DRIFT_LEAST..=DRIFT_MOST).contains(&given) {
            Ok(given)
        } else {
            Err(Problem::DriftOutOfRange { given, least: DRIFT_LEAST, most: DRIFT_MOST })
        }
    };
    let excluded = reader.list(table, "exclude_interfaces", text(TextRule::Interface, is_interface));
    let exempt = reader.list(table, "exempt", parsed::<Endpoint>);
    places.drift_ppm = reader.get_or(table, "drift", DRIFT_DEFAULT, drift);
    places.attach = span_of(table, "attach");
    places.excluded = excluded.iter().map(|item| item.span.clone()).collect();
    places.exempt = exempt.iter().map(|item| item.span.clone()).collect();
    Agent {
        identity,
        socket: reader.get(table, "socket", socket_path).unwrap_or_else(|| "/run/portcullis/agent.sock".into()),
        socket_group: reader
            .get(table, "socket_group", text(TextRule::Group, is_group))
            .unwrap_or_else(|| "portcullis".to_owned()),
        state_dir: reader.get(table, "state_dir", path).unwrap_or_else(|| "/var/lib/portcullis".into()),
        bpffs: reader.get(table, "bpffs", path).unwrap_or_else(|| "/sys/fs/bpf/portcullis".into()),
        lock: reader.get(table, "lock", path).unwrap_or_else(|| "/run/portcullis/agent.lock".into()),
        cgroup_root: reader.get(table, "cgroup_root", path),
        xdp: reader
            .get(
                table,
                "xdp",
                choice(&[("auto", Xdp::Auto), ("native", Xdp::Native), ("generic", Xdp::Generic), ("off", Xdp::Off)]),
            )
            .unwrap_or(Xdp::Auto),
        tc: reader
            .get(table, "tc", choice(&[("auto", Tc::Auto), ("tcx", Tc::Tcx), ("clsact", Tc::Clsact)]))
            .unwrap_or(Tc::Auto),
        attach: reader
            .get(table, "attach", choice(&[("armed", Attach::Armed), ("on-fence", Attach::OnFence)]))
            .unwrap_or(Attach::Armed),
        exclude_interfaces: values(excluded),
        drift_ppm: places.drift_ppm.unwrap_or(DRIFT_DEFAULT),
        exempt_ssh: reader.get(table, "exempt_ssh", boolean).unwrap_or(true),
        exempt: values(exempt),
    }
}

fn read_service(
    reader: &mut Reader<'_>,
    header: &Spanned<DeValue<'_>>,
    table: &DeTable<'_>,
    drift_ppm: Option<u32>,
) -> (Service, ServicePlaces) {
    reader.known_keys(table, &SERVICE, &[&AGENT]);
    let name = match table.get("name") {
        Some(_) => reader.get(table, "name", text(TextRule::ServiceName, is_service_name)).unwrap_or_default(),
        None => missing(reader, header, &SERVICE, "name", "name = \"pg-main\"").unwrap_or_default(),
    };
    let lease = match table.get("lease") {
        Some(value) => reader.table(value).and_then(|lease| read_lease(reader, value, lease)),
        None => missing(reader, header, &SERVICE, "lease", "lease = { source = \"local\", ttl = \"10s\" }"),
    };
    let margin = reader.get_or(table, "margin", MARGIN_DEFAULT, duration("the margin", Duration::ZERO, TTL_MOST));
    let addresses = reader.list(table, "addresses", parsed::<Prefix>);
    let behind = reader.list(table, "behind", parsed::<Prefix>);
    let remotes = reader.list(table, "remotes", parsed::<Prefix>);
    let scopes = choice(&[("service", Scope::Service), ("node", Scope::Node)]);
    let scope = reader.get_or(table, "scope", Scope::Service, scopes);
    let place = ServicePlaces {
        name: table.get("name").map_or_else(|| header.span(), Spanned::span),
        addresses: table.get("addresses").map(Spanned::span),
        when_store_lost: span_of(table, "when_store_lost"),
    };
    for prefix in addresses.iter().chain(&behind).chain(&remotes) {
        validate::prefix(reader, prefix);
    }
    let selects = |key: &str| table.get(key).is_some_and(|list| !is_empty(list));
    for (ports, keys, of) in [
        ("ports", ["addresses", "behind"].as_slice(), "`addresses` or `behind`"),
        ("remote_ports", &["remotes"], "`remotes`"),
    ] {
        if let Some((key, _)) = table.get_key_value(ports)
            && selects(ports)
            && !keys.iter().any(|key| selects(key))
        {
            reader.refuse(key.span(), Problem::PortsWithoutAddresses { ports, of });
        }
    }
    if scope == Some(Scope::Service) && !["addresses", "behind", "remotes"].into_iter().any(selects) {
        reader.refuse(place.name.clone(), Problem::NoSelector);
    }
    if let (Some(lease), Some(margin), Some(drift_ppm)) = (&lease, margin, drift_ppm) {
        let key = if table.contains_key("margin") { "margin" } else { "lease" };
        validate::margin(reader, span_of(table, key), lease, margin, drift_ppm);
    }
    let service = Service {
        name,
        // Stands in for what was refused, as the other defaults do.
        lease: lease.unwrap_or(Lease::Local { ttl_cap: TTL_DEFAULT }),
        margin: margin.unwrap_or(MARGIN_DEFAULT),
        addresses: values(addresses),
        behind: values(behind),
        remotes: values(remotes),
        ports: values(reader.list(table, "ports", parsed::<Ports>)),
        remote_ports: values(reader.list(table, "remote_ports", parsed::<Ports>)),
        scope: scope.unwrap_or(Scope::Service),
        neighbours: reader
            .get(table, "neighbours", choice(&[("cut", Neighbours::Cut), ("keep", Neighbours::Keep)]))
            .unwrap_or(Neighbours::Cut),
        when_store_lost: reader
            .get(table, "when_store_lost", choice(&[("fence", StoreLost::Fence), ("hold", StoreLost::Hold)]))
            .unwrap_or(StoreLost::Fence),
    };
    (service, place)
}

fn read_lease(reader: &mut Reader<'_>, value: &Spanned<DeValue<'_>>, table: &DeTable<'_>) -> Option<Lease> {
    let other_store = |value: &DeValue<'_>| match string(value)? {
        source if OTHER_STORES.contains(&source) => {
            Err(Problem::StoreNotInThisVersion { source_name: source.to_owned() })
        }
        _ => choice(&[("local", ())])(value),
    };
    match table.get("source") {
        // The rest of the table belongs to that store.
        Some(_) => reader.get(table, "source", other_store)?,
        None => missing(reader, value, &LEASE, "source", "lease = { source = \"local\", ttl = \"10s\" }")?,
    }
    reader.known_keys(table, &LEASE, &[&SERVICE]);
    let ttl = reader.get_or(table, "ttl", TTL_DEFAULT, duration("the TTL", TTL_LEAST, TTL_MOST));
    ttl.map(|ttl_cap| Lease::Local { ttl_cap })
}

fn missing<T>(
    reader: &mut Reader<'_>,
    table: &Spanned<DeValue<'_>>,
    schema: &Schema,
    key: &'static str,
    example: &'static str,
) -> Option<T> {
    reader.refuse(table.span(), Problem::MissingKey { key, place: schema.place, example });
    None
}

fn values<T>(items: Vec<Item<T>>) -> Vec<T> {
    items.into_iter().map(|item| item.value).collect()
}

fn is_empty(list: &Spanned<DeValue<'_>>) -> bool {
    list.get_ref().as_array().is_some_and(|values| values.is_empty())
}

/// Where the value of `key` stands; the file's beginning when it is not there.
fn span_of(table: &DeTable<'_>, key: &str) -> Range<usize> {
    table.get(key).map(Spanned::span).unwrap_or_default()
}

fn host_name(reader: &mut Reader<'_>) -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // The kernel's name for a host that was given none.
    if !is_identity(&name) || name == "(none)" {
        reader.refuse(0..0, Problem::NoIdentity(name.clone()));
    }
    name
}

fn is_printable(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

fn is_identity(text: &str) -> bool {
    is_printable(text) && text.chars().count() <= 253
}

fn is_group(text: &str) -> bool {
    is_printable(text) && text.chars().count() <= 32
}

fn is_service_name(text: &str) -> bool {
    (1..=63).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// IFNAMSIZ leaves 15 bytes. `*` alone would leave nothing to fence on.
fn is_interface(text: &str) -> bool {
    let name = text.strip_suffix('*').unwrap_or(text);
    is_printable(name) && name.len() <= 15 && !name.contains(['/', '*', ':'])
}
