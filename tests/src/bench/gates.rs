//! The kernel object with its maps filled as an agent fills them.

use std::{fs, iter, net::Ipv4Addr, path::PathBuf};

use aya::{
    Ebpf, TestRun, TestRunOptions,
    maps::{Array, HashMap, Map, MapError, PerCpuArray},
    programs::{Program, Xdp},
};
use portcullis::config::{Config, rules::RuleTable};
use portcullis_common::layout::{Address, Counters, FENCE_NUMBERS, Gate, Hook, RuleSet, Settings, counter_index, maps};

use crate::clock;

/// The port of every service.
pub const PORT: u16 = 5432;
/// An address of [`CLOSED`], which every object has.
pub const CLOSED_ADDRESS: [u8; 4] = [10, 200, 0, 1];
/// An address of the first open service.
pub const OPEN_ADDRESS: [u8; 4] = [10, 0, 0, 0];
/// An address of nobody.
pub const FOREIGN_ADDRESS: [u8; 4] = [10, 201, 0, 1];
/// The slot of the service that is closed; the open ones follow.
const CLOSED: u32 = 0;
/// How long the open gates stay open: longer than any benchmark runs.
const OPEN_NS: u64 = 3_600_000_000_000;
/// The variable that names the object built with the programs of `ebpf/src/bench.rs`.
const OBJECT: &str = "PORTCULLIS_BENCH_BPF";

/// A loaded object of its own: programs and maps.
#[derive(Debug)]
pub struct Object {
    ebpf: Ebpf,
}

impl Object {
    /// An object in which `services` open services share `addresses` addresses from 10.0.0.0 on, one rule each, and one
    /// more service is closed by a fence number.
    pub fn new(services: u32, addresses: u32) -> Self {
        let path = std::env::var_os(OBJECT).map(PathBuf::from);
        let path = path.unwrap_or_else(|| panic!("{OBJECT} names no object: start benchmarks by `cargo xtask bench`"));
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        let ebpf = Ebpf::load(&bytes).unwrap_or_else(|e| panic!("load {}: {e}", path.display()));
        let mut object = Self { ebpf };
        object.fill(services, addresses);
        for (name, program) in object.ebpf.programs_mut() {
            let loaded = match program {
                Program::Xdp(program) => program.load(),
                Program::SchedClassifier(program) => program.load(),
                Program::CgroupSkb(program) => program.load(),
                _ => continue,
            };
            loaded.unwrap_or_else(|e| panic!("load {name}: {e}"));
        }
        object
    }

    fn fill(&mut self, services: u32, addresses: u32) {
        let config = Config::from_toml(&config(services, addresses), "bench.toml").unwrap_or_else(|e| panic!("{e}"));
        let slots: Vec<_> = (CLOSED..).zip(&config.config.services).collect();
        let table = RuleTable::compile(&slots, &config.config.agent).unwrap_or_else(|e| panic!("{e}"));
        let mut rules: HashMap<_, Address, RuleSet> = self.map(maps::ADDRESSES);
        for (address, set) in &table.addresses {
            rules.insert(address, set, 0).unwrap_or_else(|e| panic!("write {}: {e}", maps::ADDRESSES));
        }
        let mut settings: Array<_, Settings> = self.map(maps::SETTINGS);
        settings.set(0, table.settings, 0).unwrap_or_else(|e| panic!("write {}: {e}", maps::SETTINGS));
        let mut gates: Array<_, Gate> = self.map(maps::GATES);
        let now = clock::now().as_nanos();
        for (slot, _) in slots {
            let deadline_ns = if slot == CLOSED { FENCE_NUMBERS - 1 } else { now + OPEN_NS };
            let gate = Gate { deadline_ns, generation: now, token: 1, ..Gate::default() };
            gates.set(slot, gate, 0).unwrap_or_else(|e| panic!("write {}: {e}", maps::GATES));
        }
        let mut bench: Array<_, u64> = self.map("BENCH");
        // The unit's deadline, and over how many addresses the scattering programs scatter.
        for (index, value) in [(0, now + OPEN_NS), (1, u64::from(addresses))] {
            bench.set(index, value, 0).unwrap_or_else(|e| panic!("write BENCH: {e}"));
        }
    }

    fn map<'a, T>(&'a mut self, name: &str) -> T
    where
        T: TryFrom<&'a mut Map, Error = MapError>,
    {
        let map = self.ebpf.map_mut(name).unwrap_or_else(|| panic!("the object has no map {name}"));
        T::try_from(map).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Runs a program as often as `options` say; the last answer and the mean time in nanoseconds.
    pub fn test_run(&self, name: &str, options: TestRunOptions<'_>) -> (u32, u64) {
        let result = match self.ebpf.program(name) {
            Some(Program::Xdp(program)) => program.test_run(options),
            Some(Program::SchedClassifier(program)) => program.test_run(options),
            Some(Program::CgroupSkb(program)) => program.test_run(options),
            Some(_) | None => panic!("the object has no program {name} to run on a packet"),
        };
        let result = result.unwrap_or_else(|e| panic!("run {name}: {e}"));
        (result.return_value, u64::try_from(result.duration.as_nanos()).unwrap_or(u64::MAX))
    }

    pub fn xdp(&mut self, name: &str) -> &mut Xdp {
        let program = self.ebpf.program_mut(name).unwrap_or_else(|| panic!("the object has no program {name}"));
        program.try_into().unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Packets that the closed service's gate has dropped in XDP.
    pub fn dropped(&mut self) -> u64 {
        let counters: PerCpuArray<_, Counters> = self.map(maps::COUNTERS);
        let counts = counters.get(&counter_index(CLOSED, Hook::Xdp), 0);
        let counts = counts.unwrap_or_else(|e| panic!("read {}: {e}", maps::COUNTERS));
        counts.iter().map(|count| count.dropped_packets).sum()
    }
}

fn config(services: u32, addresses: u32) -> String {
    let service = |name: &str, addresses: Vec<String>| {
        format!(
            "[[service]]\nname = \"{name}\"\nlease = {{ source = \"local\" }}\naddresses = {addresses:?}\n\
             ports = [\"tcp/{PORT}\"]\n"
        )
    };
    let closed = service("closed", vec![Ipv4Addr::from(CLOSED_ADDRESS).to_string()]);
    let open = (0..services).map(|number| {
        let own = (number..addresses).step_by(services as usize);
        let first = u32::from_be_bytes(OPEN_ADDRESS);
        service(&format!("open-{number}"), own.map(|index| Ipv4Addr::from(first + index).to_string()).collect())
    });
    iter::once(closed).chain(open).collect()
}
