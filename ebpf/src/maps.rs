//! The maps, as `portcullis_common::layout` describes them.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{Array, HashMap, LpmTrie, PerCpuArray},
};
use portcullis_common::layout::{
    Address, Counters, EVENT_SLOTS, ExemptKey, Gate, GateName, HOOK_SLOTS, MAX_ADDRESSES, MAX_EXEMPT, MAX_GATES,
    MAX_PORTS, PortKey, PortRule, RuleSet, Settings,
};

#[map]
pub(crate) static GATES: Array<Gate> = Array::with_max_entries(MAX_GATES, BPF_F_MMAPABLE);

/// Read by user space alone.
#[map]
pub(crate) static NAMES: Array<GateName> = Array::with_max_entries(MAX_GATES, BPF_F_MMAPABLE);

#[map]
pub(crate) static SETTINGS: Array<Settings> = Array::with_max_entries(1, BPF_F_MMAPABLE);

#[map]
pub(crate) static ADDRESSES: HashMap<Address, RuleSet> = HashMap::with_max_entries(MAX_ADDRESSES, BPF_F_NO_PREALLOC);

#[map]
pub(crate) static PREFIXES: LpmTrie<Address, RuleSet> = LpmTrie::with_max_entries(MAX_ADDRESSES, BPF_F_NO_PREALLOC);

#[map]
pub(crate) static PORTS: HashMap<PortKey, PortRule> = HashMap::with_max_entries(MAX_PORTS, BPF_F_NO_PREALLOC);

#[map]
pub(crate) static EXEMPT: HashMap<ExemptKey, u32> = HashMap::with_max_entries(MAX_EXEMPT, BPF_F_NO_PREALLOC);

#[map]
pub(crate) static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(MAX_GATES * HOOK_SLOTS, 0);

#[map]
pub(crate) static EVENTS: PerCpuArray<u64> = PerCpuArray::with_max_entries(EVENT_SLOTS, 0);

#[btf_map]
pub(crate) static STAMPS: SkStorage<u64> = SkStorage::new();
