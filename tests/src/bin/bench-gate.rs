//! Time per packet of the kernel programs, and packets dropped per CPU second beside nftables.
//!
//! Time is told in units of a program that only compares the boot clock with one deadline, measured in the same run, by
//! test runs of the XDP program as it stands at an interface. What tc and the cgroup programs take is printed beside.
//!
//! Dropping is compared on one veth under one flood: the closed gate in native XDP, nftables in netdev ingress and in
//! prerouting (raw), each matching the same address and port; the processor time is the dropping thread's alone.

use std::{process::ExitCode, time::Duration};

use aya::programs::XdpMode;
use portcullis_common::layout::programs;
use portcullis_tests::{
    bench::{
        flood::{Dropped, Lane, index},
        gates::{CLOSED_ADDRESS, FOREIGN_ADDRESS, OPEN_ADDRESS, Object, PORT},
        pin,
        timing::{Case, segment, shortest, skb_context, xdp_context},
    },
    report::{Limit, Report},
    world::{World, heavy},
};

/// Services of the large rule sets, the addresses shared out among them.
const SERVICES: u32 = 1000;
const BUDGET: Duration = Duration::from_secs(20);
/// Floods of each kind of dropper, in turn.
const FLOODS: usize = 5;
const FLOOD: Duration = Duration::from_millis(600);

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const TC_SHOT: u32 = 2;
const TC_NEXT: u32 = u32::MAX;
const CGROUP_PASS: u32 = 1;
const CGROUP_DROP: u32 = 0;

fn main() -> ExitCode {
    let _alone = heavy();
    let mut report = Report::bench("gate");
    let world = World::new("bench-gate");
    let mut one = Object::new(1, 1);
    let lane = Lane::new(&world);
    times(&lane, &one, &mut report);
    rates(&lane, &mut one, &mut report);
    drop(lane);
    drop(world);
    report.finish()
}

fn times(lane: &Lane, one: &Object, report: &mut Report) {
    let (thousand, hundred_thousand) = (Object::new(SERVICES, 1000), Object::new(SERVICES, 100_000));
    let interface = index(lane.receiver(), lane.interface());
    let length = segment(OPEN_ADDRESS).len();
    let xdp = |object, program, destination, answer| Case {
        object,
        program,
        packet: segment(destination),
        context: xdp_context(length, interface),
        answer,
    };
    // What goes out is judged as forwarded: a test packet has no socket.
    let skb = |program, destination, came_in, answer| Case {
        object: one,
        program,
        packet: segment(destination),
        context: skb_context(interface, came_in),
        answer,
    };
    let tc_in = programs::TC_IN;
    let cases = [
        xdp(one, "bench_unit", OPEN_ADDRESS, XDP_PASS),
        xdp(one, "bench_drop", OPEN_ADDRESS, XDP_DROP),
        xdp(one, programs::XDP_FRAGS, FOREIGN_ADDRESS, XDP_PASS),
        xdp(one, programs::XDP_FRAGS, CLOSED_ADDRESS, XDP_DROP),
        xdp(one, programs::XDP_FRAGS, OPEN_ADDRESS, XDP_PASS),
        xdp(one, "bench_scatter", OPEN_ADDRESS, XDP_PASS),
        xdp(one, "bench_spread", OPEN_ADDRESS, XDP_PASS),
        xdp(&thousand, "bench_spread", OPEN_ADDRESS, XDP_PASS),
        xdp(&hundred_thousand, "bench_spread", OPEN_ADDRESS, XDP_PASS),
        skb("bench_unit_tc", OPEN_ADDRESS, 0, TC_NEXT),
        skb(tc_in, FOREIGN_ADDRESS, 0, TC_NEXT),
        skb(tc_in, CLOSED_ADDRESS, 0, TC_SHOT),
        skb(tc_in, OPEN_ADDRESS, 0, TC_NEXT),
        skb(programs::TC_OUT, FOREIGN_ADDRESS, interface, TC_NEXT),
        skb(programs::CGROUP_IN, FOREIGN_ADDRESS, 0, CGROUP_PASS),
        skb(programs::CGROUP_IN, CLOSED_ADDRESS, 0, CGROUP_DROP),
        skb(programs::CGROUP_IN, OPEN_ADDRESS, 0, CGROUP_PASS),
    ];
    // A test packet comes in by an interface of the namespace of whoever runs it.
    let times = lane.receiver().run(|| {
        pin(None, 1);
        shortest(&cases, BUDGET)
    });
    let [unit, drop, foreign, closed, open, scatter, spread, spread_1000, spread_100_000, ref skb @ ..] = times[..]
    else {
        unreachable!("a time for each case")
    };
    let [unit_tc, tc_foreign, tc_closed, tc_open, out_foreign, cg_foreign, cg_closed, cg_open] = skb[..] else {
        unreachable!("a time for each case")
    };
    report.check("nobody's packet", foreign / unit, "units", Limit::AtMost(1.0));
    report.check("packet at a closed gate", closed / unit, "units", Limit::AtMost(1.3));
    report.check("packet at an open gate", open / unit, "units", Limit::AtMost(2.0));
    report.check("1,000 rules to one", spread_1000 / spread, "times", Limit::AtMost(1.3));
    report.check("100,000 rules to one", spread_100_000 / spread, "times", Limit::AtMost(2.5));
    report.note(format!(
        "ns per packet, XDP: unit {unit}, bare drop {drop}, nobody's {foreign}, closed {closed}, open {open}"
    ));
    report.note(format!(
        "ns per packet, open, spread over 1 rule {spread}, 1,000 {spread_1000}, 100,000 {spread_100_000}; of it the spreading {scatter}"
    ));
    let units = |time: f64| format!("{:.2}", time / unit_tc);
    report.note(format!(
        "units of {unit_tc} ns, tc: nobody's {} in, {} out, closed {}, open {}; cgroup: nobody's {}, closed {}, open {}",
        units(tc_foreign),
        units(out_foreign),
        units(tc_closed),
        units(tc_open),
        units(cg_foreign),
        units(cg_closed),
        units(cg_open),
    ));
}

fn rates(lane: &Lane, object: &mut Object, report: &mut Report) {
    let generator = Object::new(1, 1);
    let receiver = lane.receiver();
    let matched = format!("ip daddr {} tcp dport {PORT} drop", std::net::Ipv4Addr::from(CLOSED_ADDRESS));
    let ingress = format!(
        "table netdev bench {{ chain cut {{ type filter hook ingress device {} priority 0; {matched}\n}}\n}}",
        lane.interface()
    );
    let prerouting =
        format!("table ip bench {{ chain cut {{ type filter hook prerouting priority raw; {matched}\n}}\n}}");
    let interface = index(receiver, lane.interface());
    let best = |best: &mut f64, dropped: Dropped| *best = best.max(dropped.rate());
    let (mut gate_rate, mut ingress_rate, mut prerouting_rate) = (0.0, 0.0, 0.0);
    for _ in 0..FLOODS {
        let before = object.dropped();
        let program = object.xdp(programs::XDP_FRAGS);
        let link = receiver.run(|| program.attach_to_if_index(interface, XdpMode::Driver));
        let link = link.unwrap_or_else(|e| panic!("attach {}: {e}", programs::XDP_FRAGS));
        let dropped = lane.flood(&generator, FLOOD);
        let detached = object.xdp(programs::XDP_FRAGS).detach(link);
        detached.unwrap_or_else(|e| panic!("detach {}: {e}", programs::XDP_FRAGS));
        assert!(object.dropped() - before >= dropped.packets, "the gate has not dropped what came in");
        best(&mut gate_rate, dropped);
        for (rules, rate) in [(&ingress, &mut ingress_rate), (&prerouting, &mut prerouting_rate)] {
            receiver.nft(rules);
            best(rate, lane.flood(&generator, FLOOD));
            receiver.nft("flush ruleset");
        }
    }
    report.check(
        "dropped per CPU second, to nftables prerouting",
        gate_rate / prerouting_rate,
        "times",
        Limit::AtLeast(3.0),
    );
    report.note(format!(
        "million packets dropped per CPU second: closed gate {:.2}, nftables netdev ingress {:.2}, prerouting {:.2}",
        gate_rate / 1e6,
        ingress_rate / 1e6,
        prerouting_rate / 1e6,
    ));
}
