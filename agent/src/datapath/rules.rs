//! The rule maps: read back as they are, and changed in an order in which no packet slips through.

use aya::maps::{MapError, lpm_trie::Key};
use portcullis_common::layout::{Address, maps as names};

use super::{DataPath, error::DataPathError, maps::Maps, sys};
use crate::{
    config::rules::{MapChange, RuleTable},
    crash,
};

const LAST_LENGTH: u32 = 128;

impl DataPath {
    /// The rules as the kernel has them, whoever wrote them.
    pub fn rules(&self) -> Result<RuleTable, DataPathError> {
        read(&self.maps)
    }

    /// Makes the kernel's rules those of `table`, and returns how many entries were written or removed.
    ///
    /// What has to change is found by reading the maps, never from memory: they may have been adopted.
    ///
    /// # Errors
    /// The maps hold part of the changes: every rule that both tables have in common stands, and calling again mends it.
    pub fn apply_rules(&mut self, table: &RuleTable) -> Result<usize, DataPathError> {
        let old = self.rules()?;
        let plan = old.plan(table);
        // The kernel hands the memory of a replaced entry to the next one at once, while a program on another CPU may
        // still be reading it: a packet would be judged by the rules of another address. So nothing is written after
        // something was freed before every program that could have seen it has ended.
        let mut freed = false;
        let named = table.slots();
        // Counted before its first rule stands, and until its last is gone.
        self.gates.mark_idle(&old.slots().union(&named).copied().collect());
        for change in &plan {
            crash::point("rules-between-changes");
            if freed && allocates(change) {
                sys::wait_out_programs().map_err(|source| DataPathError::Netlink {
                    operation: "wait for running programs to end (the membarrier system call)",
                    source,
                })?;
                freed = false;
            }
            write(&mut self.maps, change)?;
            freed |= frees(change, &old);
        }
        self.gates.mark_idle(&named);
        Ok(plan.len())
    }
}

/// Takes memory that a program may still be reading.
fn allocates(change: &MapChange) -> bool {
    match change {
        MapChange::SetPort(..) | MapChange::SetAddress(..) | MapChange::SetPrefix(..) => true,
        // An exemption has no value that a program reads; the settings stay where they are.
        MapChange::AddExempt(_)
        | MapChange::SetSettings(_)
        | MapChange::RemoveAddress(_)
        | MapChange::RemovePrefix(..)
        | MapChange::RemovePort(_)
        | MapChange::RemoveExempt(_) => false,
    }
}

/// Gives memory back that a program may still be reading.
fn frees(change: &MapChange, old: &RuleTable) -> bool {
    match change {
        MapChange::SetPort(key, _) => old.ports.contains_key(key),
        MapChange::SetAddress(address, _) => old.addresses.contains_key(address),
        MapChange::SetPrefix(length, address, _) => old.prefixes.contains_key(&(*length, *address)),
        MapChange::RemoveAddress(_) | MapChange::RemovePrefix(..) | MapChange::RemovePort(_) => true,
        MapChange::AddExempt(_) | MapChange::SetSettings(_) | MapChange::RemoveExempt(_) => false,
    }
}

fn read(maps: &Maps) -> Result<RuleTable, DataPathError> {
    let failed = |name| move |source| DataPathError::Map { operation: "read", name, source };
    Ok(RuleTable {
        addresses: maps.addresses.iter().collect::<Result<_, _>>().map_err(failed(names::ADDRESSES))?,
        prefixes: maps
            .prefixes
            .iter()
            .map(|entry| entry.map(|(key, set)| ((key.prefix_len(), key.data()), set)))
            .collect::<Result<_, _>>()
            .map_err(failed(names::PREFIXES))?,
        ports: maps.ports.iter().collect::<Result<_, _>>().map_err(failed(names::PORTS))?,
        exempt: maps.exempt.keys().collect::<Result<_, _>>().map_err(failed(names::EXEMPT))?,
        settings: maps.settings.get(&0, 0).map_err(failed(names::SETTINGS))?,
    })
}

fn write(maps: &mut Maps, change: &MapChange) -> Result<(), DataPathError> {
    let (name, operation, result) = match *change {
        MapChange::AddExempt(key) => (names::EXEMPT, "write", maps.exempt.insert(key, 1, 0)),
        MapChange::SetPort(key, rule) => (names::PORTS, "write", maps.ports.insert(key, rule, 0)),
        MapChange::SetAddress(address, set) => (names::ADDRESSES, "write", maps.addresses.insert(address, set, 0)),
        MapChange::SetPrefix(length, address, set) => {
            (names::PREFIXES, "write", maps.prefixes.insert(&key(length, address), set, 0))
        }
        MapChange::SetSettings(settings) => (names::SETTINGS, "write", maps.settings.set(0, settings, 0)),
        MapChange::RemoveAddress(address) => {
            (names::ADDRESSES, "remove an entry from", absent(maps.addresses.remove(&address)))
        }
        MapChange::RemovePrefix(length, address) => {
            (names::PREFIXES, "remove an entry from", absent(maps.prefixes.remove(&key(length, address))))
        }
        MapChange::RemovePort(key) => (names::PORTS, "remove an entry from", absent(maps.ports.remove(&key))),
        MapChange::RemoveExempt(key) => (names::EXEMPT, "remove an entry from", absent(maps.exempt.remove(&key))),
    };
    result.map_err(|source| DataPathError::Map { operation, name, source })
}

fn key(length: u32, address: Address) -> Key<Address> {
    Key::new(length.min(LAST_LENGTH), address)
}

/// What is not there need not be removed.
fn absent(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
