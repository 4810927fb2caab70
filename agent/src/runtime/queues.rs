//! Shaped egress queues against the margins. What was queued before a gate closed still leaves, so a service's margin has to
//! cover the longest that a queue of this host holds a packet back.

use std::{io, time::Duration};

use super::{RuntimeError, host::Host};
use crate::{
    api::types::EventKind,
    config::model::Service,
    datapath::doctor::queues::{Shaper, shapers},
};

/// Refuses a margin that a queue's worst drain is longer than.
pub(super) fn refuse_short_margins(services: &[Service]) -> Result<(), RuntimeError> {
    // What cannot be read refuses nothing; the status says so as long as it lasts.
    let shapers = shapers().unwrap_or_default();
    match uncovered(services, &shapers).next() {
        None => Ok(()),
        Some((service, shaper, drain)) => Err(RuntimeError::ShortMargin {
            service: service.name.clone(),
            margin: service.margin,
            interface: shaper.interface.clone(),
            kind: shaper.kind.clone(),
            drain,
        }),
    }
}

/// Every margin that is too short, with the queue and its drain.
fn uncovered<'a>(
    services: &'a [Service],
    shapers: &'a [Shaper],
) -> impl Iterator<Item = (&'a Service, &'a Shaper, Duration)> {
    let pairs = services.iter().flat_map(move |service| shapers.iter().map(move |shaper| (service, shaper)));
    pairs.filter_map(|(service, shaper)| {
        let drain = shaper.worst.filter(|drain| *drain > service.margin)?;
        Some((service, shaper, drain))
    })
}

/// What weakens `services` through the queues, one sentence each.
fn complaints(services: &[Service], shapers: io::Result<Vec<Shaper>>) -> Vec<String> {
    let shapers = match shapers {
        Ok(shapers) => shapers,
        Err(error) => {
            return vec![format!(
                "the egress queues cannot be read ({error}): whether the margins cover them is not known; allow route \
                 netlink sockets"
            )];
        }
    };
    let short = uncovered(services, &shapers).map(|(service, shaper, drain)| {
        format!(
            "{}: {} of {} lets packets out up to {drain:?} after the gate has closed, its margin is {:?}; raise `margin` \
             above {drain:?}, or shorten the queue's limit",
            service.name, shaper.kind, shaper.interface, service.margin
        )
    });
    let unknown = shapers.iter().filter(|shaper| shaper.worst.is_none()).map(|shaper| {
        format!(
            "how long {} of {} holds packets back cannot be read; measure its worst drain, and set every `margin` above it",
            shaper.kind, shaper.interface
        )
    });
    short.chain(unknown).collect()
}

impl Host {
    /// Looks at the queues again: one may have come since the start, or have become slower.
    pub(super) fn look_at_queues(&mut self) {
        let complaints = complaints(&self.config.services, shapers());
        if complaints == self.queues {
            return;
        }
        let before = std::mem::replace(&mut self.queues, complaints.clone());
        for why in complaints.iter().filter(|why| !before.contains(why)) {
            tracing::warn!(why, "degraded");
            self.tell(EventKind::Degraded, None, why.clone());
        }
        if complaints.is_empty() {
            self.tell(EventKind::Degraded, None, "every margin covers the egress queues again".to_owned());
        }
        self.board.show_queues(complaints);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn services(margin: &str) -> Vec<Service> {
        let text = format!(
            "[[service]]\nname = \"web\"\nlease = {{ source = \"local\", ttl = \"60s\" }}\nmargin = \"{margin}\"\n\
             addresses = [\"10.0.0.1\"]\n"
        );
        Config::from_toml(&text, "node").unwrap().config.services
    }

    fn shaper(worst: Option<Duration>) -> Shaper {
        Shaper { interface: "eth0".into(), kind: "tbf".into(), worst }
    }

    #[test]
    fn a_margin_covers_what_is_no_longer_than_it() {
        let drain = Duration::from_secs(2);
        assert_eq!(complaints(&services("2s"), Ok(vec![shaper(Some(drain))])), [""; 0]);
        let short = complaints(&services("1999ms"), Ok(vec![shaper(Some(drain))]));
        let [said] = &short[..] else { panic!("{short:?}") };
        for word in ["web", "eth0", "tbf", "2s", "1.999s", "margin"] {
            assert!(said.contains(word), "no {word} in {said}");
        }
    }

    #[test]
    fn what_is_not_known_is_told() {
        let unknown = complaints(&services("30s"), Ok(vec![shaper(None)]));
        assert!(matches!(&unknown[..], [said] if said.contains("cannot be read")), "{unknown:?}");
        let unread = complaints(&services("30s"), Err(io::ErrorKind::PermissionDenied.into()));
        assert!(matches!(&unread[..], [said] if said.contains("cannot be read")), "{unread:?}");
    }
}
