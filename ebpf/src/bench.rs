//! What the gate is measured against, and a gate whose packets spread over many rules.

use aya_ebpf::{
    bindings::xdp_action,
    helpers::bpf_ktime_get_boot_ns,
    macros::{classifier, map, xdp},
    maps::Array,
    programs::{TcContext, XdpContext},
};

/// 0: the deadline of the unit programs. 1: how many addresses the packets of [`bench_spread`] go to. 2: its state.
#[map]
static BENCH: Array<u64> = Array::with_max_entries(4, 0);

const DEADLINE: u32 = 0;
const SPREAD: u32 = 1;
const STATE: u32 = 2;

#[inline(always)]
fn read(index: u32) -> u64 {
    match BENCH.get_ptr(index) {
        // SAFETY: an array's entry, which lives as long as the map.
        Some(value) => unsafe { value.read_volatile() },
        None => 0,
    }
}

#[inline(always)]
fn is_open() -> bool {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    now < read(DEADLINE)
}

/// The least that a packet can cost.
#[xdp]
pub fn bench_drop(_: XdpContext) -> u32 {
    xdp_action::XDP_DROP
}

/// The unit: compares the boot clock with one deadline, and nothing else.
#[xdp]
pub fn bench_unit(_: XdpContext) -> u32 {
    if is_open() { xdp_action::XDP_PASS } else { xdp_action::XDP_DROP }
}

/// The same in tc.
#[classifier]
pub fn bench_unit_tc(_: TcContext) -> i32 {
    if is_open() { crate::TC_NEXT } else { aya_ebpf::bindings::TC_ACT_SHOT }
}

/// Sends each repetition to another of the addresses `10.x.y.z` before the gate judges it.
#[xdp]
pub fn bench_spread(context: XdpContext) -> u32 {
    if !scatter(&context) {
        return xdp_action::XDP_ABORTED;
    }
    crate::xdp_action(crate::packets::judge_xdp(&context))
}

/// The same without the gate: what the scattering itself costs.
#[xdp]
pub fn bench_scatter(context: XdpContext) -> u32 {
    if scatter(&context) { xdp_action::XDP_PASS } else { xdp_action::XDP_ABORTED }
}

#[inline(always)]
fn scatter(context: &XdpContext) -> bool {
    let Some(state) = BENCH.get_ptr_mut(STATE) else { return false };
    // SAFETY: an array's entry, which lives as long as the map; the benchmark runs on one CPU.
    let last = unsafe { state.read_volatile() };
    let next = last.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    // SAFETY: as above.
    unsafe { state.write_volatile(next) };
    let spread = read(SPREAD) & 0xff_ffff;
    let index = ((next >> 40) * spread) >> 24;
    let (start, end) = (context.data(), context.data_end());
    if start + 34 > end {
        return false;
    }
    let [_, a, b, c] = (index as u32).to_be_bytes();
    // SAFETY: within the packet by the line above: the last three bytes of an IPv4 header's destination.
    unsafe { *((start + 31) as *mut [u8; 3]) = [a, b, c] };
    true
}

/// Sends a frame out by the interface that it came in by: a generator, fed by test runs with live frames.
#[xdp]
pub fn bench_transmit(_: XdpContext) -> u32 {
    xdp_action::XDP_TX
}
