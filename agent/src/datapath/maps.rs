//! The pinned maps: what they have to look like, and the check of what is there before it is adopted.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, LpmTrie, Map, MapData, MapInfo, MapType, PerCpuArray},
};
use portcullis_common::layout::{
    Address, Counters, EVENT_SLOTS, ExemptKey, Gate, GateName, HOOK_SLOTS, LAYOUT_VERSION, MAX_ADDRESSES, MAX_EXEMPT,
    MAX_GATES, MAX_PORTS, PortKey, PortRule, RuleSet, Settings, maps,
};

use super::{
    error::DataPathError,
    sys::{self, ObjectKind},
};
use crate::crash;

const NO_PREALLOC: u32 = 1;
const MMAPABLE: u32 = 1 << 10;

/// What a map has to look like.
struct Spec {
    name: &'static str,
    kind: MapType,
    key: usize,
    value: usize,
    entries: u32,
    flags: u32,
}

const fn spec(name: &'static str, kind: MapType, sizes: (usize, usize), entries: u32, flags: u32) -> Spec {
    Spec { name, kind, key: sizes.0, value: sizes.1, entries, flags }
}

/// In the order of [`maps::ALL`].
const SPECS: [Spec; maps::ALL.len()] = [
    spec(maps::GATES, MapType::Array, (4, size_of::<Gate>()), MAX_GATES, MMAPABLE),
    spec(maps::NAMES, MapType::Array, (4, size_of::<GateName>()), MAX_GATES, MMAPABLE),
    spec(maps::SETTINGS, MapType::Array, (4, size_of::<Settings>()), 1, MMAPABLE),
    spec(maps::ADDRESSES, MapType::Hash, (size_of::<Address>(), size_of::<RuleSet>()), MAX_ADDRESSES, NO_PREALLOC),
    spec(
        maps::PREFIXES,
        MapType::LpmTrie,
        (4 + size_of::<Address>(), size_of::<RuleSet>()),
        MAX_ADDRESSES,
        NO_PREALLOC,
    ),
    spec(maps::PORTS, MapType::Hash, (size_of::<PortKey>(), size_of::<PortRule>()), MAX_PORTS, NO_PREALLOC),
    spec(maps::EXEMPT, MapType::Hash, (size_of::<ExemptKey>(), 4), MAX_EXEMPT, NO_PREALLOC),
    spec(maps::COUNTERS, MapType::PerCpuArray, (4, size_of::<Counters>()), MAX_GATES * HOOK_SLOTS, 0),
    spec(maps::EVENTS, MapType::PerCpuArray, (4, 8), EVENT_SLOTS, 0),
    spec(maps::STAMPS, MapType::SkStorage, (4, 8), 0, NO_PREALLOC),
];

impl Spec {
    fn check(&self, path: &Path, info: &MapInfo) -> Result<(), DataPathError> {
        let failed = |source| DataPathError::Map { operation: "read the type of", name: self.name, source };
        let fields = [
            ("type", info.map_type().map_err(failed)? as u64, self.kind as u64),
            ("key size", info.key_size().into(), self.key as u64),
            ("value size", info.value_size().into(), self.value as u64),
            ("entries", info.max_entries().into(), self.entries.into()),
            ("flags", info.map_flags().into(), self.flags.into()),
        ];
        match fields.into_iter().find(|(_, found, expected)| found != expected) {
            None => Ok(()),
            Some((field, found, expected)) => {
                Err(DataPathError::MapLayout { path: path.to_owned(), field, found, expected })
            }
        }
    }
}

/// Checks every pinned map before anything is adopted; returns the names of those that are not pinned yet.
pub(super) fn check_pins(folder: &Path) -> Result<Vec<&'static str>, DataPathError> {
    let mut missing = Vec::new();
    for spec in &SPECS {
        let path = folder.join(spec.name);
        let (fd, kind) = match sys::open_pin(&path) {
            Ok(opened) => opened,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                missing.push(spec.name);
                continue;
            }
            Err(source) => return Err(DataPathError::Pin { operation: "open", path, source }),
        };
        if kind != ObjectKind::Map {
            return Err(DataPathError::ForeignPin { path, reason: format!("it is a {kind:?}, not a map") });
        }
        let failed = |source| DataPathError::Map { operation: "read the layout of", name: spec.name, source };
        let map = MapData::from_fd(fd).map_err(failed)?;
        spec.check(&path, &map.info().map_err(failed)?)?;
    }
    Ok(missing)
}

/// The path under which a map is pinned.
pub(super) fn pin_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(name)
}

/// Every map's pin with the map behind it, so that a pin that somebody deletes can be put back.
#[derive(Debug)]
pub(super) struct MapPins(Vec<(PathBuf, OwnedFd)>);

impl MapPins {
    /// Opens the pins of [`maps::ALL`], which are all there once the object is loaded.
    fn open(folder: &Path) -> Result<Self, DataPathError> {
        let open = |name| {
            let path = pin_path(folder, name);
            match sys::open_pin(&path) {
                Ok((fd, _)) => Ok((path, fd)),
                Err(source) => Err(DataPathError::Pin { operation: "open", path, source }),
            }
        };
        Ok(Self(maps::ALL.into_iter().map(open).collect::<Result<_, _>>()?))
    }

    /// Puts back what is gone, and returns the paths: without its pins the next agent could not adopt what is running.
    pub(super) fn mend(&self) -> Result<Vec<&Path>, DataPathError> {
        let gone = self.0.iter().filter(|(path, _)| !path.exists());
        let mend = |(path, map): &'_ (PathBuf, OwnedFd)| {
            sys::pin(map.as_fd(), path).map_err(|source| DataPathError::Pin {
                operation: "pin",
                path: path.clone(),
                source,
            })
        };
        gone.map(|entry| mend(entry).map(|()| entry.0.as_path())).collect()
    }
}

/// The maps, open. `GATES` and `NAMES` belong to [`super::gates::Gates`].
pub(super) struct Maps {
    pub(super) pins: MapPins,
    pub(super) settings: Array<MapData, Settings>,
    pub(super) addresses: HashMap<MapData, Address, RuleSet>,
    pub(super) prefixes: LpmTrie<MapData, Address, RuleSet>,
    pub(super) ports: HashMap<MapData, PortKey, PortRule>,
    pub(super) exempt: HashMap<MapData, ExemptKey, u32>,
    pub(super) counters: PerCpuArray<MapData, Counters>,
    pub(super) events: PerCpuArray<MapData, u64>,
}

impl Maps {
    /// Takes the maps out of the loaded object, and marks them with the layout's version if they are new.
    pub(super) fn take(
        object: &mut Ebpf,
        folder: &Path,
    ) -> Result<(Self, MapData, Array<MapData, GateName>), DataPathError> {
        for spec in &SPECS {
            let path = pin_path(folder, spec.name);
            let failed = |source| DataPathError::Map { operation: "read the layout of", name: spec.name, source };
            spec.check(&path, &MapInfo::from_pin(&path).map_err(failed)?)?;
        }
        let Some(Map::Array(gates)) = object.take_map(maps::GATES) else {
            return Err(DataPathError::ObjectPart { name: maps::GATES });
        };
        let names = take(object, maps::NAMES)?;
        let mut maps = Self {
            pins: MapPins::open(folder)?,
            settings: take(object, maps::SETTINGS)?,
            addresses: take(object, maps::ADDRESSES)?,
            prefixes: take(object, maps::PREFIXES)?,
            ports: take(object, maps::PORTS)?,
            exempt: take(object, maps::EXEMPT)?,
            counters: take(object, maps::COUNTERS)?,
            events: take(object, maps::EVENTS)?,
        };
        maps.check_version(folder)?;
        Ok((maps, gates, names))
    }

    /// Version 0 is a map that nobody has written yet: the agent that made it died in between.
    fn check_version(&mut self, folder: &Path) -> Result<(), DataPathError> {
        let name = maps::SETTINGS;
        let found = self.settings.get(&0, 0);
        let found = found.map_err(|source| DataPathError::Map { operation: "read", name, source })?;
        match found.layout_version {
            LAYOUT_VERSION => Ok(()),
            0 => {
                crash::point("maps-before-version");
                let settings = Settings { layout_version: LAYOUT_VERSION, ..found };
                let written = self.settings.set(0, settings, 0);
                written.map_err(|source| DataPathError::Map { operation: "write", name, source })
            }
            other => Err(DataPathError::MapLayout {
                path: pin_path(folder, name),
                field: "layout version",
                found: other.into(),
                expected: LAYOUT_VERSION.into(),
            }),
        }
    }
}

fn take<T: TryFrom<Map>>(object: &mut Ebpf, name: &'static str) -> Result<T, DataPathError> {
    let map = object.take_map(name).ok_or(DataPathError::ObjectPart { name })?;
    T::try_from(map).map_err(|_| DataPathError::ObjectPart { name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_map_of_the_layout_has_a_spec() {
        assert_eq!(SPECS.each_ref().map(|spec| spec.name), maps::ALL);
    }
}
