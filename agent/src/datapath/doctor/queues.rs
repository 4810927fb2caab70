//! Egress queues: what was queued before a gate closed still leaves, so the margin has to cover the worst drain.

use std::{io, time::Duration};

use super::Check;
use crate::datapath::{
    interfaces,
    netlink::{Netlink, attributes, text, word},
};

const RTM_GETQDISC: u16 = 38;
const TCMSG: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;

/// Queues that hold packets back no longer than the device needs to send them.
const WORK_CONSERVING: [&str; 9] =
    ["noqueue", "mq", "pfifo_fast", "pfifo", "bfifo", "fq_codel", "sfq", "clsact", "ingress"];

/// A queue that can hold packets back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shaper {
    pub interface: String,
    /// The queueing discipline's name.
    pub kind: String,
    /// The longest that a packet may stay queued; `None`: it cannot be read.
    pub worst: Option<Duration>,
}

/// Every queue of this network namespace that can hold packets back.
pub fn shapers() -> io::Result<Vec<Shaper>> {
    let mut netlink = Netlink::open()?;
    let known = interfaces::list(&mut netlink)?;
    let mut shapers = Vec::new();
    for answer in netlink.dump(RTM_GETQDISC, &[0; TCMSG])? {
        let (Some(index), Some(rest)) = (word(&answer.body, 4), answer.body.get(TCMSG..)) else { continue };
        let find = |number| attributes(rest).find(|(kind, _)| *kind == number).map(|(_, value)| value);
        let kind = find(TCA_KIND).map(text).unwrap_or_default();
        if WORK_CONSERVING.contains(&kind.as_str()) {
            continue;
        }
        let interface = known.iter().find(|one| one.index == index).map_or_else(String::new, |one| one.name.clone());
        let worst = if kind == "tbf" { find(TCA_OPTIONS).and_then(token_bucket) } else { None };
        shapers.push(Shaper { interface, kind, worst });
    }
    Ok(shapers)
}

/// A token bucket's limit (bytes) over its rate (bytes per second).
fn token_bucket(options: &[u8]) -> Option<Duration> {
    /// In `struct tc_tbf_qopt`: the rate's last word, and after the peak rate the limit.
    const RATE: usize = 8;
    const LIMIT: usize = 24;
    let find = |number| attributes(options).find(|(kind, _)| *kind == number).map(|(_, value)| value);
    let parameters = find(TCA_TBF_PARMS)?;
    let wide = find(TCA_TBF_RATE64).and_then(|value| value.try_into().ok()).map(u64::from_ne_bytes);
    let rate = wide.or_else(|| word(parameters, RATE).map(u64::from)).filter(|rate| *rate > 0)?;
    let limit = u64::from(word(parameters, LIMIT)?);
    Some(Duration::from_micros(limit.saturating_mul(1_000_000).div_ceil(rate)))
}

pub(super) fn checks() -> Vec<Check> {
    const NAME: &str = "queue drain";
    let shapers = match shapers() {
        Ok(shapers) => shapers,
        Err(error) => {
            return vec![Check::warn(NAME, format!("cannot be read: {error}"), "allow route netlink sockets")];
        }
    };
    if shapers.is_empty() {
        return vec![Check::ok(NAME, "no queue holds packets back")];
    }
    let check = |Shaper { interface, kind, worst }: Shaper| match worst {
        Some(worst) => Check::warn(
            NAME,
            format!("{interface}: {kind} lets packets out up to {worst:?} after a gate has closed"),
            format!("set every service's `margin` above {worst:?}, or shorten the queue's limit"),
        ),
        None => Check::warn(
            NAME,
            format!("{interface}: how long {kind} holds packets back cannot be read"),
            "measure its worst drain and set every service's `margin` above it",
        ),
    };
    shapers.into_iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::netlink::push_attribute;

    #[test]
    fn a_token_bucket_drains_its_limit_at_its_rate() {
        let mut parameters = [0u8; 36];
        parameters[8..12].copy_from_slice(&125_000u32.to_ne_bytes());
        parameters[24..28].copy_from_slice(&250_000u32.to_ne_bytes());
        let mut options = Vec::new();
        push_attribute(&mut options, TCA_TBF_PARMS, &parameters);
        assert_eq!(token_bucket(&options), Some(Duration::from_secs(2)));
        push_attribute(&mut options, TCA_TBF_RATE64, &250_000u64.to_ne_bytes());
        assert_eq!(token_bucket(&options), Some(Duration::from_secs(1)));
        assert_eq!(token_bucket(&[]), None);
    }
}
