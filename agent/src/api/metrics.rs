//! Prometheus text of what the status says.

use std::fmt::{Display, Write as _};

use super::types::{Coverage, Health, ServiceStatus, State};

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const NO_LABELS: &[(&str, &str)] = &[];

/// All metrics in the text format 0.0.4.
pub fn render(services: &[ServiceStatus], health: &Health, coverage: &Coverage) -> String {
    let mut text = String::new();
    let version = [("version", health.version.as_str()), ("identity", health.identity.as_str())];
    family(&mut text, "portcullis_info", "gauge", "The agent.", [(version.as_slice(), 1)]);
    family(&mut text, "portcullis_healthy", "gauge", "1: nothing is degraded.", [(NO_LABELS, u8::from(health.ok))]);
    family(
        &mut text,
        "portcullis_gaps_mended_total",
        "counter",
        "Times a missing or displaced program was put back.",
        [(NO_LABELS, coverage.gaps_mended)],
    );
    family(
        &mut text,
        "portcullis_coverage_warnings",
        "gauge",
        "Traffic that no gate can cut, by finding.",
        [(NO_LABELS, coverage.warnings.len())],
    );
    let events = &coverage.kernel_events;
    let events = [
        ([("event", "stamp_failed")], events.stamp_failed),
        ([("event", "unreadable_dropped")], events.unreadable_dropped),
        ([("event", "no_gate")], events.no_gate),
        ([("event", "exempt_passed")], events.exempt_passed),
    ];
    family(
        &mut text,
        "portcullis_kernel_events_total",
        "counter",
        "What the kernel programs saw of what should not happen often.",
        events.iter().map(|(labels, count)| (labels.as_slice(), count)),
    );

    let names: Vec<[(&str, &str); 1]> = services.iter().map(|service| [("service", service.name.as_str())]).collect();
    let mut per_service = |name, kind, help, value: &dyn Fn(&ServiceStatus) -> Option<String>| {
        let samples = services.iter().zip(&names);
        let samples = samples.filter_map(|(service, labels)| Some((labels.as_slice(), value(service)?)));
        family(&mut text, name, kind, help, samples);
    };
    per_service("portcullis_serving", "gauge", "1: the service is serving.", &|service| {
        Some(u8::from(service.state == State::Serving).to_string())
    });
    per_service("portcullis_manual_hold", "gauge", "1: fenced by hand.", &|service| {
        Some(u8::from(service.manual_hold.is_some()).to_string())
    });
    per_service("portcullis_degraded", "gauge", "Reasons for which the guarantee is weakened.", &|service| {
        Some(service.degraded.len().to_string())
    });
    per_service("portcullis_token", "gauge", "Fencing token of the current or last holding.", &|service| {
        service.token.map(|token| token.to_string())
    });
    per_service("portcullis_time_left_seconds", "gauge", "Time to the deadline.", &|service| {
        service.time_left_ms.map(|ms| format!("{}.{:03}", ms / 1000, ms % 1000))
    });
    per_service("portcullis_passed_packets_total", "counter", "Packets that a gate passed.", &|service| {
        Some(service.counters.passed_packets.to_string())
    });
    per_service("portcullis_passed_bytes_total", "counter", "Bytes that a gate passed.", &|service| {
        Some(service.counters.passed_bytes.to_string())
    });
    per_service("portcullis_dropped_packets_total", "counter", "Packets that a gate dropped.", &|service| {
        Some(service.counters.dropped_packets.to_string())
    });
    per_service("portcullis_dropped_bytes_total", "counter", "Bytes that a gate dropped.", &|service| {
        Some(service.counters.dropped_bytes.to_string())
    });
    per_service("portcullis_stale_packets_total", "counter", "Drops of sockets of an older opening.", &|service| {
        Some(service.counters.stale_packets.to_string())
    });
    text
}

fn family<'a, V: Display>(
    text: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    samples: impl IntoIterator<Item = (&'a [(&'a str, &'a str)], V)>,
) {
    // Writing to a String cannot fail.
    _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let labels: Vec<String> = labels.iter().map(|(key, label)| format!("{key}=\"{}\"", escape(label))).collect();
        let braced = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        _ = writeln!(text, "{name}{braced} {value}");
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
