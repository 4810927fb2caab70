//! Nanoseconds per packet by test run, on a machine that does other things beside.
//!
//! Whatever disturbs a run makes it longer, never shorter. So every case is run in many short rounds, the cases in turn,
//! and the shortest round of each counts; rounds are added until none has become shorter for a while.

use std::time::Duration;

use aya::TestRunOptions;

use super::gates::{Object, PORT};
use crate::clock;

/// Repetitions within one round: some ten milliseconds.
const REPEAT: u32 = 200_000;
/// So many rounds without a shorter one end the measurement.
const STEADY_ROUNDS: u32 = 12;

/// One program on one packet.
#[derive(Debug)]
pub struct Case<'a> {
    pub object: &'a Object,
    pub program: &'static str,
    pub packet: Vec<u8>,
    pub context: Vec<u8>,
    /// What the program must answer: what takes another way is not what is measured.
    pub answer: u32,
}

/// The shortest mean time of each case, in nanoseconds.
pub fn shortest(cases: &[Case<'_>], budget: Duration) -> Vec<f64> {
    let mut best = vec![u64::MAX; cases.len()];
    let end = clock::now().saturating_add(budget);
    let mut steady = 0;
    while steady < STEADY_ROUNDS && clock::now() < end {
        steady += 1;
        for (case, best) in cases.iter().zip(&mut best) {
            let options = TestRunOptions {
                data_in: Some(&case.packet),
                ctx_in: Some(&case.context),
                repeat: REPEAT,
                ..TestRunOptions::default()
            };
            let (answer, time) = case.object.test_run(case.program, options);
            assert_eq!(answer, case.answer, "{} answers otherwise than expected", case.program);
            if time < *best {
                *best = time;
                steady = 0;
            }
        }
    }
    // The kernel rounds down; half a nanosecond is the best guess at what it cut off.
    best.into_iter().map(|time| f64::from(u32::try_from(time).unwrap_or(u32::MAX)) + 0.5).collect()
}

/// A frame with a TCP segment to `destination` that carries 100 bytes, as wide as such traffic is.
pub fn segment(destination: [u8; 4]) -> Vec<u8> {
    const LENGTH: u16 = 140;
    // Locally administered addresses, IPv4.
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    frame.extend(LENGTH.to_be_bytes());
    // Identification, "don't fragment", time to live, TCP, room for the checksum, source.
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1]);
    frame.extend(destination);
    // Without it the stack drops the packet before any hook of netfilter sees it.
    let checksum = internet_checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend(40_000u16.to_be_bytes());
    frame.extend(PORT.to_be_bytes());
    // Sequence and acknowledgement numbers, data offset, flags (PSH, ACK), window, checksum, urgent pointer.
    frame.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.resize(14 + usize::from(LENGTH), 0xaa);
    frame
}

/// RFC 1071, over a whole number of 16-bit words.
fn internet_checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

/// A `struct xdp_md`: `length` bytes that came in by `interface`.
pub fn xdp_context(length: usize, interface: u32) -> Vec<u8> {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    [0, length, 0, interface, 0, 0].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// The start of a `struct __sk_buff` at `interface`; for one on its way out, `came_in` is where it was received.
pub fn skb_context(interface: u32, came_in: u32) -> Vec<u8> {
    const INGRESS_IFINDEX: usize = 9;
    const IFINDEX: usize = 10;
    let mut words = [0u32; 11];
    words[INGRESS_IFINDEX] = came_in;
    words[IFINDEX] = interface;
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}
