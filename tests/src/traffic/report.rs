//! What was sent, what arrived, and how the two fit a deadline.

use std::{fmt, time::Duration};

use portcullis::core::time::BootInstant;

/// One stamped packet, or one record of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Read immediately before it was given to the kernel.
    pub sent_at: BootInstant,
    /// When the kernel had taken (or refused) it.
    pub returned_at: BootInstant,
    /// The kernel refused it with EPERM, as a cgroup program does: sent, and dropped on this side.
    pub refused: bool,
    /// When the receiver saw it, so not before it was judged; nothing: it never arrived.
    pub arrived_at: Option<BootInstant>,
}

/// One direction of traffic, packet by packet in the order of sending.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub packets: Vec<Packet>,
    /// Packets that the sender could not send for reasons of its own (a full queue). They count nowhere else.
    pub unsent: u64,
    /// Packets that the measurement itself lost or may have lost (the receiver's queue, the machine's backlog). Above 0
    /// the losses say nothing.
    pub measurement_drops: u64,
    /// Packets that arrived more than once.
    pub duplicates: u64,
}

impl Report {
    pub fn sent(&self) -> usize {
        self.packets.len()
    }

    pub fn received(&self) -> usize {
        self.arrived().count()
    }

    pub fn lost(&self) -> usize {
        self.sent() - self.received()
    }

    /// Packets per second that were really sent.
    pub fn rate(&self) -> f64 {
        match (self.packets.first(), self.packets.last()) {
            (Some(first), Some(last)) if last.sent_at > first.sent_at => {
                (self.sent() - 1) as f64 / last.sent_at.saturating_since(first.sent_at).as_secs_f64()
            }
            _ => 0.0,
        }
    }

    /// The send stamp of the last packet that arrived.
    pub fn last_received_sent_at(&self) -> Option<BootInstant> {
        self.arrived().next_back().map(|packet| packet.sent_at)
    }

    /// The send stamp of the first packet that did not arrive.
    pub fn first_lost_sent_at(&self) -> Option<BootInstant> {
        self.packets.iter().find(|packet| packet.arrived_at.is_none()).map(|packet| packet.sent_at)
    }

    /// How many packets arrived that were sent at `deadline` or later.
    pub fn received_sent_after(&self, deadline: BootInstant) -> usize {
        self.arrived().filter(|packet| packet.sent_at >= deadline).count()
    }

    /// The part of it that was sent from `from` on and before `to`: one phase of a longer story.
    pub fn between(&self, from: BootInstant, to: BootInstant) -> Self {
        let start = self.packets.partition_point(|packet| packet.sent_at < from);
        let end = self.packets.partition_point(|packet| packet.sent_at < to).max(start);
        Self { packets: self.packets[start..end].to_vec(), ..self.clone_counts() }
    }

    /// Packets by the time they were sent, in `count` buckets from `from` on.
    pub fn histogram(&self, from: BootInstant, bucket: Duration, count: usize) -> Vec<Bucket> {
        let mut buckets = vec![Bucket::default(); count];
        for packet in self.packets.iter().filter(|packet| packet.sent_at >= from) {
            let index = packet.sent_at.saturating_since(from).as_nanos() / bucket.as_nanos().max(1);
            if let Some(bucket) = usize::try_from(index).ok().and_then(|index| buckets.get_mut(index)) {
                bucket.sent += 1;
                bucket.received += u32::from(packet.arrived_at.is_some());
            }
        }
        buckets
    }

    /// Holds the traffic against a deadline. For a story with several, take the phase with [`Report::between`] first.
    pub fn cut_at(&self, deadline: BootInstant) -> Cut {
        let last_received = self.packets.iter().rposition(|packet| packet.arrived_at.is_some());
        let before_last = &self.packets[..last_received.map_or(0, |last| last + 1)];
        let first_lost = self.packets.iter().find(|packet| packet.arrived_at.is_none());
        Cut {
            last_passed_ns: last_received.map(|last| relative(self.packets[last].sent_at, deadline)),
            first_dropped_ns: first_lost.map(|packet| relative(packet.sent_at, deadline)),
            first_dropped_returned_ns: first_lost.map(|packet| relative(packet.returned_at, deadline)),
            passed_after: self.received_sent_after(deadline),
            sent_after: self.packets.iter().filter(|packet| packet.sent_at >= deadline).count(),
            overtaken: before_last.iter().filter(|packet| packet.arrived_at.is_none()).count(),
            in_flight: in_flight(before_last),
            measurement_drops: self.measurement_drops,
        }
    }

    /// Panics unless the traffic flowed until `deadline` and not a packet longer.
    #[track_caller]
    pub fn assert_cut(&self, deadline: BootInstant) {
        let cut = self.cut_at(deadline);
        if let Err(fault) = cut.verify() {
            panic!("{fault}: {cut:?}");
        }
    }

    /// Panics unless every packet arrived, and some were sent.
    #[track_caller]
    pub fn assert_whole(&self) {
        assert_eq!(self.measurement_drops, 0, "the measurement lost packets: {self}");
        assert!(self.sent() > 0, "nothing was sent: {self}");
        assert_eq!(self.lost(), 0, "packets were lost, the first sent at {:?}: {self}", self.first_lost_sent_at());
    }

    /// Panics unless no packet arrived, and some were sent.
    #[track_caller]
    pub fn assert_nothing_arrived(&self) {
        assert_eq!(self.measurement_drops, 0, "the measurement lost packets: {self}");
        assert!(self.sent() > 0, "nothing was sent: {self}");
        assert_eq!(self.received(), 0, "packets arrived, the last sent at {:?}: {self}", self.last_received_sent_at());
    }

    fn arrived(&self) -> impl DoubleEndedIterator<Item = &Packet> {
        self.packets.iter().filter(|packet| packet.arrived_at.is_some())
    }

    fn clone_counts(&self) -> Self {
        Self {
            packets: Vec::new(),
            unsent: self.unsent,
            measurement_drops: self.measurement_drops,
            duplicates: self.duplicates,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused = self.packets.iter().filter(|packet| packet.refused).count();
        write!(
            f,
            "{} sent at {:.0}/s, {} received, {} lost (of which {refused} refused to the sender), {} unsent, {} duplicates, \
             {} lost by the measurement",
            self.sent(),
            self.rate(),
            self.received(),
            self.lost(),
            self.unsent,
            self.duplicates,
            self.measurement_drops
        )
    }
}

/// Packets of one stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    pub sent: u32,
    /// Of those sent in this stretch, whenever they arrived.
    pub received: u32,
}

/// How traffic fits a deadline. Times are in nanoseconds relative to it, negative before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// When the last packet that arrived was sent.
    pub last_passed_ns: Option<i64>,
    /// When the first packet that did not arrive was sent.
    pub first_dropped_ns: Option<i64>,
    /// When the kernel had taken that packet.
    pub first_dropped_returned_ns: Option<i64>,
    /// Packets that were sent at the deadline or later and arrived: must be 0.
    pub passed_after: usize,
    /// Packets sent at the deadline or later: the cut was put to the test.
    pub sent_after: usize,
    /// Packets that did not arrive although a later one did. The path keeps the order, so they were dropped while the
    /// gate was still open: must be 0.
    pub overtaken: usize,
    /// The longest that one of the last packets that arrived was still under way when its sending had returned: the first that
    /// was dropped may have been judged this much later, when it came out of the receiving CPU's backlog.
    pub in_flight: Duration,
    pub measurement_drops: u64,
}

impl Cut {
    /// Whether the traffic flowed until the deadline, and not a packet longer.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn verify(&self) -> Result<(), &'static str> {
        let flight = i64::try_from(self.in_flight.as_nanos()).unwrap_or(i64::MAX);
        match self {
            _ if self.measurement_drops > 0 => Err("the measurement lost packets: it says nothing"),
            Cut { sent_after: 0, .. } => Err("no packet was sent after the deadline: nothing was put to the test"),
            Cut { last_passed_ns: None, .. } => Err("no packet arrived at all"),
            Cut { passed_after: 1.., .. } => Err("packets sent after the deadline arrived"),
            Cut { overtaken: 1.., .. } => Err("packets were dropped while others still passed"),
            Cut { first_dropped_returned_ns: Some(at), .. } if at.saturating_add(flight) < 0 => {
                Err("packets were dropped before the deadline")
            }
            _ => Ok(()),
        }
    }
}

/// The longest time between the return of the sending and the arrival, of the packets sent in the last 100 ms: the ones before
/// have been through other queues.
fn in_flight(arrived: &[Packet]) -> Duration {
    let Some(last) = arrived.last() else { return Duration::ZERO };
    let recent = last.sent_at.saturating_sub(Duration::from_millis(100));
    let waited = |packet: &Packet| packet.arrived_at.map(|at| at.saturating_since(packet.returned_at));
    arrived.iter().rev().take_while(|packet| packet.sent_at >= recent).filter_map(waited).max().unwrap_or_default()
}

fn relative(instant: BootInstant, to: BootInstant) -> i64 {
    instant.as_nanos().cast_signed() - to.as_nanos().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_nanos(ms * 1_000_000)
    }

    /// A packet per millisecond from 100 on; `arrives` decides by the millisecond.
    fn traffic(arrives: impl Fn(u64) -> bool) -> Report {
        let packet = |ms| Packet {
            sent_at: at(ms),
            returned_at: at(ms),
            refused: false,
            arrived_at: arrives(ms).then(|| at(ms)),
        };
        Report { packets: (100..200).map(packet).collect(), ..Report::default() }
    }

    #[test]
    fn a_cut_is_judged_on_both_sides_of_its_deadline() {
        let clean = traffic(|ms| ms < 150);
        assert_eq!(clean.cut_at(at(150)).verify(), Ok(()));
        assert_eq!(clean.last_received_sent_at(), Some(at(149)));
        assert_eq!(clean.first_lost_sent_at(), Some(at(150)));

        let fault = |report: Report, deadline| report.cut_at(at(deadline)).verify().expect_err("a fault");
        assert!(fault(traffic(|ms| ms < 151), 150).contains("after the deadline arrived"));
        assert!(fault(traffic(|ms| ms < 149), 151).contains("before the deadline"));
        assert!(fault(traffic(|ms| ms < 150 && ms != 120), 150).contains("others still passed"));
        assert!(fault(traffic(|ms| ms < 150), 200).contains("nothing was put to the test"));
        assert!(fault(traffic(|_| false), 150).contains("no packet arrived"));
        assert!(fault(Report { measurement_drops: 1, ..traffic(|ms| ms < 150) }, 150).contains("measurement"));
    }

    #[test]
    fn a_phase_is_told_apart_and_drawn() {
        let report = traffic(|ms| !(130..170).contains(&ms));
        assert_eq!(report.between(at(100), at(160)).cut_at(at(130)).verify(), Ok(()));
        let buckets = report.histogram(at(120), Duration::from_millis(20), 3);
        assert_eq!(buckets.iter().map(|b| (b.sent, b.received)).collect::<Vec<_>>(), [(20, 10), (20, 0), (20, 10)]);
    }
}
