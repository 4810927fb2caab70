//! What a stamped packet carries.

use std::sync::atomic::{AtomicU32, Ordering};

use portcullis::core::time::BootInstant;

/// Bytes of payload of a stamped packet, and of a record in a stream.
pub const PAYLOAD: usize = 64;

const MAGIC: [u8; 8] = *b"stamped!";
/// The sequence number of a packet that only asks whether the path is open.
const HELLO: u32 = u32::MAX;

/// The stamp at the start of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Which flow of which process.
    pub flow: u64,
    /// From 0, without gaps.
    pub sequence: u32,
    /// Read immediately before sending.
    pub sent_at: BootInstant,
}

impl Stamp {
    pub fn hello(flow: u64) -> Self {
        Self { flow, sequence: HELLO, sent_at: BootInstant::ZERO }
    }

    pub fn is_hello(&self) -> bool {
        self.sequence == HELLO
    }

    pub fn write(&self) -> [u8; PAYLOAD] {
        let mut payload = [0; PAYLOAD];
        payload[..8].copy_from_slice(&MAGIC);
        payload[8..16].copy_from_slice(&self.flow.to_be_bytes());
        payload[16..20].copy_from_slice(&self.sequence.to_be_bytes());
        payload[20..28].copy_from_slice(&self.sent_at.as_nanos().to_be_bytes());
        payload
    }

    /// The stamp at the start of `bytes`, if there is one.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (flow, rest) = rest.split_first_chunk()?;
        let (sequence, rest) = rest.split_first_chunk()?;
        let (sent_at, _) = rest.split_first_chunk()?;
        Some(Self {
            flow: u64::from_be_bytes(*flow),
            sequence: u32::from_be_bytes(*sequence),
            sent_at: BootInstant::from_nanos(u64::from_be_bytes(*sent_at)),
        })
    }
}

/// A number for a flow that no other flow of this machine has at the time.
pub(super) fn flow_id() -> u64 {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    u64::from(std::process::id()) << 32 | u64::from(COUNTER.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_as_it_was_written() {
        let stamp = Stamp { flow: 7 << 32 | 9, sequence: 123_456, sent_at: BootInstant::from_nanos(u64::MAX - 1) };
        assert_eq!(Stamp::read(&stamp.write()), Some(stamp));
        assert_eq!(Stamp::read(&stamp.write()[..27]), None);
        assert_eq!(Stamp::read(b"unstamped, and long enough to be one"), None);
    }
}
