//! The memory-mapped gates: renewing and closing are a store each, without a system call.
//!
//! *Invariant:* nothing else writes a gate. A deadline moves only by a compare-exchange from the value this process last
//! wrote or adopted, so whoever closed in between has the last word.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::offset_of,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aya::maps::{Array, MapData, MapError};
use portcullis_common::layout::{FENCE_NUMBERS, Gate as GateLayout, GateName, MAX_GATES, gate_flags};
use rustix::{
    fd::AsFd,
    mm::{MapFlags, ProtFlags},
};
use thiserror::Error;

use super::error::DataPathError;
use crate::{clock::boot_now, core::time::BootInstant, crash};

#[cfg(test)]
mod tests;

/// Number of a gate; it belongs to one service's name until the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The number that stands in [`portcullis_common::layout::Rule::gate`].
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// Why no slot could be assigned. The service stays without a gate: its rules must not be installed, it is not served.
#[derive(Debug, Error)]
pub enum AssignError {
    #[error("service name `{name}` is empty or longer than 63 bytes; choose a shorter one")]
    BadName { name: String },
    #[error(
        "all {MAX_GATES} gates are taken (a gate belongs to its service's name until the next boot); remove services \
         and reboot this host, or spread the services over more hosts"
    )]
    Full,
    #[error("cannot read or write the table of gate names; see `portcullis doctor`")]
    Names(#[source] MapError),
}

/// Why a gate was not opened or renewed. It is closed, or closes at the deadline it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotOurs {
    /// Somebody else wrote the gate since we last did.
    #[error("the gate holds {found} where this agent last wrote {expected}: it was closed by somebody else")]
    Changed { expected: u64, found: u64 },
    /// [`Gate::open`] needs a gate that this process closed (or adopted closed).
    #[error("the gate still carries the deadline {deadline}: close it before it is opened anew")]
    NotFenced { deadline: BootInstant },
    /// [`Gate::renew`] needs an open gate.
    #[error("the gate is closed by fence number {fence}: it has to be opened, not renewed")]
    NotOpen { fence: u64 },
    /// The old deadline had passed before the new one stood: the gate was closed for a while, and is closed now.
    #[error("the deadline {deadline} had passed before it was renewed: the gate fell, and was closed for good")]
    Lapsed { deadline: BootInstant },
    /// A deadline below [`FENCE_NUMBERS`] would be a fence number.
    #[error("the deadline {deadline} lies in the first seconds of the boot, where nothing opens")]
    TooEarly { deadline: BootInstant },
}

/// One gate's three words, read as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateView {
    /// The deadline in boot-clock nanoseconds, or a fence number (below [`FENCE_NUMBERS`]).
    pub deadline: u64,
    /// The instant at which the current or last opening was decided.
    pub generation: BootInstant,
    pub token: u64,
}

impl GateView {
    /// Whether packets pass at `now`.
    pub const fn is_open(&self, now: BootInstant) -> bool {
        self.deadline >= FENCE_NUMBERS && now.as_nanos() < self.deadline
    }

    /// Whether the gate was closed by a fence number, and not by the passing of time.
    pub const fn is_fenced(&self) -> bool {
        self.deadline < FENCE_NUMBERS
    }
}

/// [`GateLayout`] with words that two processes may use at once.
#[repr(C, align(64))]
struct Cell {
    deadline: AtomicU64,
    generation: AtomicU64,
    token: AtomicU64,
    min_token: AtomicU64,
    rst_until: AtomicU64,
    flags: AtomicU64,
    rest: [AtomicU64; 2],
}

const _: () = assert!(size_of::<Cell>() == size_of::<GateLayout>());
const _: () = assert!(offset_of!(Cell, flags) == offset_of!(GateLayout, flags));

impl Cell {
    fn view(&self) -> GateView {
        loop {
            let before = self.generation.load(Ordering::Acquire);
            let token = self.token.load(Ordering::Acquire);
            let deadline = self.deadline.load(Ordering::Acquire);
            let generation = self.generation.load(Ordering::Acquire);
            if before == generation {
                return GateView { deadline, generation: BootInstant::from_nanos(generation), token };
            }
        }
    }
}

/// The mapped table and the counter that fence numbers come from.
struct Table {
    cells: NonNull<Cell>,
    length: usize,
    last_fence: AtomicU64,
}

// SAFETY: the table is a fixed piece of shared memory that outlives it and is only read and written through atomics.
unsafe impl Send for Table {}
// SAFETY: as for `Send`.
unsafe impl Sync for Table {}

impl Table {
    const BYTES: usize = MAX_GATES as usize * size_of::<Cell>();

    fn map(map: impl AsFd) -> rustix::io::Result<Self> {
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced. The map's size was checked when it
        // was adopted, and it was made with BPF_F_MMAPABLE.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                Self::BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                map,
                0,
            )
        }?;
        Self::over(address)
    }

    #[cfg(test)]
    fn anonymous() -> Self {
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                Self::BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        address.and_then(Self::over).expect("128 KiB of memory")
    }

    fn over(address: *mut core::ffi::c_void) -> rustix::io::Result<Self> {
        let cells = NonNull::new(address.cast::<Cell>()).ok_or(rustix::io::Errno::NOMEM)?;
        let table = Self { cells, length: MAX_GATES as usize, last_fence: AtomicU64::new(0) };
        // A number above every one that stands in a gate: no opening decided before a fence can match a later one.
        let highest = table.cells().iter().map(|cell| cell.deadline.load(Ordering::Acquire));
        let highest = highest.filter(|deadline| *deadline < FENCE_NUMBERS).max().unwrap_or(0);
        table.last_fence.store(highest, Ordering::Release);
        Ok(table)
    }

    fn cells(&self) -> &[Cell] {
        // SAFETY: the mapping is `length` cells long, aligned to a page, lives as long as `self`, and atomics may be
        // shared with the kernel programs.
        unsafe { std::slice::from_raw_parts(self.cells.as_ptr(), self.length) }
    }

    /// `slot` was given out by [`Gates`], so it lies within the table.
    fn cell(&self, slot: Slot) -> &Cell {
        &self.cells()[slot.0 as usize]
    }

    /// 1 to 2^32 - 1; after four billion fences of one boot it starts over.
    fn next_fence(&self) -> u64 {
        let last = self.last_fence.fetch_add(1, Ordering::AcqRel);
        1 + last % (FENCE_NUMBERS - 1)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `map` or `anonymous`, and no reference into it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.cells.as_ptr().cast(), Self::BYTES) };
        debug_assert!(unmapped.is_ok());
    }
}

/// All gates of the host, and which service each belongs to.
pub struct Gates {
    table: Arc<Table>,
    names: Array<MapData, GateName>,
    /// What `names` holds; only this process writes it.
    slots: BTreeMap<String, Slot>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("length", &self.length).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Gates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gates").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Gates {
    pub(super) fn new(gates: &MapData, names: Array<MapData, GateName>) -> Result<Self, DataPathError> {
        let table = Table::map(gates.fd()).map_err(|error| DataPathError::MapGates(error.into()))?;
        let mut slots = BTreeMap::new();
        for index in 0..MAX_GATES {
            let GateName(bytes) = names.get(&index, 0).map_err(AssignError::Names)?;
            let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            if length > 0 {
                slots.insert(String::from_utf8_lossy(&bytes[..length]).into_owned(), Slot(index));
            }
        }
        Ok(Self { table: Arc::new(table), names, slots })
    }

    /// The slot of `name`: the one it has, else the first free one, closed before it is named.
    pub fn assign(&mut self, name: &str) -> Result<Slot, AssignError> {
        if let Some(slot) = self.slots.get(name) {
            return Ok(*slot);
        }
        let key = encode(name).ok_or_else(|| AssignError::BadName { name: name.to_owned() })?;
        // Slots are given out in order and never given back.
        let next = self.slots.values().max().map_or(0, |slot| slot.0 + 1);
        if next >= MAX_GATES {
            return Err(AssignError::Full);
        }
        let slot = Slot(next);
        crash::point("assign-before-close");
        // A half-made set of maps may hold anything: no service inherits a gate.
        self.gate(slot).close();
        crash::point("assign-before-name");
        self.names.set(slot.0, key, 0).map_err(AssignError::Names)?;
        crash::point("assign-after-name");
        self.slots.insert(name.to_owned(), slot);
        Ok(slot)
    }

    /// Every slot that belongs to a name.
    pub fn named(&self) -> impl Iterator<Item = (Slot, &str)> {
        self.slots.iter().map(|(name, slot)| (*slot, name.as_str()))
    }

    /// The handle of a gate. It adopts the value it finds: of two handles to one gate, the first to write wins.
    pub fn gate(&self, slot: Slot) -> Gate {
        let last = self.table.cell(slot).deadline.load(Ordering::Acquire);
        Gate { table: Arc::clone(&self.table), slot, last }
    }

    pub fn view(&self, slot: Slot) -> GateView {
        self.table.cell(slot).view()
    }

    /// Marks the gates that no rule names, and only those, as [`gate_flags::IDLE`]. `named` are the slots of the rules.
    pub(super) fn mark_idle(&self, named: &BTreeSet<u32>) {
        for slot in self.slots.values() {
            let flags = &self.table.cell(*slot).flags;
            if named.contains(&slot.0) {
                flags.fetch_and(!gate_flags::IDLE, Ordering::AcqRel);
            } else {
                flags.fetch_or(gate_flags::IDLE, Ordering::AcqRel);
            }
        }
    }
}

/// `None`: empty, or no room for the terminating zero.
fn encode(name: &str) -> Option<GateName> {
    let mut bytes = [0; 64];
    if name.is_empty() || name.len() >= bytes.len() || name.contains('\0') {
        return None;
    }
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Some(GateName(bytes))
}

/// One gate, with the value this process last wrote to it.
#[derive(Debug)]
pub struct Gate {
    table: Arc<Table>,
    slot: Slot,
    last: u64,
}

impl Gate {
    pub const fn slot(&self) -> Slot {
        self.slot
    }

    pub fn view(&self) -> GateView {
        self.table.cell(self.slot).view()
    }

    /// What the gate's deadline is, if it is not what this process last wrote or adopted: somebody else wrote it.
    pub fn written_by_others(&self) -> Option<u64> {
        let found = self.table.cell(self.slot).deadline.load(Ordering::Acquire);
        (found != self.last).then_some(found)
    }

    /// Opens a gate that is fenced: `generation` and `token` first, the deadline last.
    ///
    /// # Errors
    /// The gate stays closed, with what closed it.
    pub fn open(&mut self, generation: BootInstant, token: u64, deadline: BootInstant) -> Result<(), NotOurs> {
        if self.last >= FENCE_NUMBERS {
            return Err(NotOurs::NotFenced { deadline: BootInstant::from_nanos(self.last) });
        }
        let cell = self.table.cell(self.slot);
        let found = cell.deadline.load(Ordering::Acquire);
        if found != self.last {
            return Err(NotOurs::Changed { expected: self.last, found });
        }
        cell.generation.store(generation.as_nanos(), Ordering::Release);
        cell.token.store(token, Ordering::Release);
        crash::point("open-before-deadline");
        self.exchange(deadline)
    }

    /// Moves the deadline of an open gate, forward or back, from the value last written.
    ///
    /// # Errors
    /// The gate is fenced: by whoever wrote it, or, if its old deadline passed before the new one stood, by this call.
    pub fn renew(&mut self, deadline: BootInstant) -> Result<(), NotOurs> {
        let before = self.last;
        if before < FENCE_NUMBERS {
            return Err(NotOurs::NotOpen { fence: before });
        }
        // A process stopped since its caller looked at the clock would reopen a gate that had fallen. One that is stopped
        // between this look and the exchange sees it at the second look, and one that is killed there never does.
        self.close_if_fallen(before)?;
        self.exchange(deadline)?;
        self.close_if_fallen(before)
    }

    fn close_if_fallen(&mut self, deadline: u64) -> Result<(), NotOurs> {
        if boot_now().as_nanos() < deadline {
            return Ok(());
        }
        self.close();
        Err(NotOurs::Lapsed { deadline: BootInstant::from_nanos(deadline) })
    }

    /// Closes the gate, whatever it holds, and returns the fence number, unique within the boot. Cannot fail.
    pub fn close(&mut self) -> u64 {
        let fence = self.table.next_fence();
        self.table.cell(self.slot).deadline.swap(fence, Ordering::AcqRel);
        self.last = fence;
        fence
    }

    /// Leaves word for a later agent that no token below this opens. For a closed gate: there the token says nothing else.
    pub fn bar(&self, below: u64) {
        self.table.cell(self.slot).token.store(below, Ordering::Release);
    }

    fn exchange(&mut self, deadline: BootInstant) -> Result<(), NotOurs> {
        let next = deadline.as_nanos();
        if next < FENCE_NUMBERS {
            return Err(NotOurs::TooEarly { deadline });
        }
        self.table
            .cell(self.slot)
            .deadline
            .compare_exchange(self.last, next, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|found| NotOurs::Changed { expected: self.last, found })?;
        self.last = next;
        Ok(())
    }
}
