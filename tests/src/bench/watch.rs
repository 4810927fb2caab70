//! A gate's deadline in the memory that the agent shares with the kernel programs, looked at without a system call.

use std::{
    mem::offset_of,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::MapData;
use portcullis_common::layout::{FENCE_NUMBERS, Gate, MAX_GATES, maps};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::world::Node;

const BYTES: usize = MAX_GATES as usize * size_of::<Gate>();

/// The deadline of one gate, mapped for reading.
#[derive(Debug)]
pub struct Watch {
    table: NonNull<Gate>,
    slot: usize,
}

// SAFETY: the mapping belongs to the process, is only read, and only as atomics.
unsafe impl Sync for Watch {}

impl Watch {
    /// Panics if the node has no gate of that name.
    #[track_caller]
    pub fn on(node: &Node, service: &str) -> Self {
        let slot = node.slot(service).unwrap_or_else(|| panic!("{}: no gate is called {service}", node.name()));
        let pin = node.pin(maps::GATES);
        let map = MapData::from_pin(&pin).unwrap_or_else(|e| panic!("open the pin {}: {e}", pin.display()));
        let fd = map.fd();
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let table = unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ, MapFlags::SHARED, fd, 0) };
        let table = table.unwrap_or_else(|e| panic!("map {}: {e}", pin.display()));
        let table = NonNull::new(table.cast()).expect("the kernel maps nothing at address 0");
        Self { table, slot: slot as usize }
    }

    /// Is the gate closed by command? An open one that its deadline closes does not count.
    pub fn is_fenced(&self) -> bool {
        // SAFETY: a slot lies within the table.
        let gate = unsafe { self.table.add(self.slot) };
        // SAFETY: the offset of a field lies within its gate.
        let word = unsafe { gate.byte_add(offset_of!(Gate, deadline_ns)) }.cast::<AtomicU64>();
        // SAFETY: the word is aligned, stays mapped as long as `self`, and is only written as an atomic; a relaxed load of
        // eight bytes does not write, so that memory mapped for reading is enough.
        let word = unsafe { word.as_ref() };
        word.load(Ordering::Relaxed) < FENCE_NUMBERS
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `on` with this length, and no reference into it outlives `is_fenced`.
        _ = unsafe { munmap(self.table.as_ptr().cast(), BYTES) };
    }
}
