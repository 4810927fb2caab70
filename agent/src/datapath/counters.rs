//! What the kernel programs counted.

use portcullis_common::layout::{Counters, Event, Hook, counter_index, maps};

use super::{DataPath, error::DataPathError, gates::Slot};

impl DataPath {
    /// One gate's counters at each hook, summed over the CPUs. They count from the boot on, self-tests included.
    pub fn counters(&self, slot: Slot) -> Result<[(Hook, Counters); Hook::ALL.len()], DataPathError> {
        let mut sums = Hook::ALL.map(|hook| (hook, Counters::default()));
        for (hook, sum) in &mut sums {
            let values = self.maps.counters.get(&counter_index(slot.index(), *hook), 0);
            let failed = |source| DataPathError::Map { operation: "read", name: maps::COUNTERS, source };
            *sum = add(&values.map_err(failed)?);
        }
        Ok(sums)
    }

    /// How often each event happened, on all CPUs, since the boot.
    pub fn events(&self) -> Result<[(Event, u64); Event::ALL.len()], DataPathError> {
        let mut sums = Event::ALL.map(|event| (event, 0));
        for (event, sum) in &mut sums {
            let values = self.maps.events.get(&(*event as u32), 0);
            let failed = |source| DataPathError::Map { operation: "read", name: maps::EVENTS, source };
            *sum = values.map_err(failed)?.iter().sum();
        }
        Ok(sums)
    }
}

fn add(cpus: &[Counters]) -> Counters {
    let mut sum = cpus.iter().fold(Counters::default(), |sum, cpu| Counters {
        passed_packets: sum.passed_packets + cpu.passed_packets,
        passed_bytes: sum.passed_bytes + cpu.passed_bytes,
        dropped_packets: sum.dropped_packets + cpu.dropped_packets,
        dropped_bytes: sum.dropped_bytes + cpu.dropped_bytes,
        last_pass_ns: sum.last_pass_ns.max(cpu.last_pass_ns),
        first_drop_ns: 0,
        last_drop_ns: sum.last_drop_ns.max(cpu.last_drop_ns),
        stale_packets: sum.stale_packets + cpu.stale_packets,
    });
    // A CPU that no packet passed since an earlier closing still carries that one's first drop.
    let since = cpus.iter().map(|cpu| cpu.first_drop_ns).filter(|first| *first > sum.last_pass_ns);
    sum.first_drop_ns = since.min().unwrap_or(0);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_drop_is_the_first_since_any_cpu_passed_one() {
        let cpu = |last_pass_ns, first_drop_ns, dropped_packets| Counters {
            last_pass_ns,
            first_drop_ns,
            last_drop_ns: first_drop_ns,
            dropped_packets,
            ..Counters::default()
        };
        let sum = add(&[cpu(100, 90, 2), cpu(200, 230, 3), cpu(0, 210, 4), cpu(0, 0, 0)]);
        assert_eq!((sum.last_pass_ns, sum.first_drop_ns, sum.last_drop_ns, sum.dropped_packets), (200, 210, 230, 9));
        assert_eq!(add(&[cpu(100, 90, 1)]).first_drop_ns, 0);
    }
}
