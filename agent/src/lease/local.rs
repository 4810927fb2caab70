//! The local lease store: this agent is the store. It excludes within one host only.
//!
//! Acquiring takes two steps, because the token must be durable before anybody hears of it:
//! [`LocalLeases::acquire`] reserves the service and says what to write, [`LocalLeases::granted`] or
//! [`LocalLeases::refused`] tells the outcome of writing it. In between the service is held by the acquirer as far as
//! others can see.
//!
//! Renewals are not written. A holder cannot outlive its boot, so a lease of an earlier boot is void; one of this boot
//! that an earlier agent granted counts as alive for one whole TTL from the start of this agent, which is never
//! shorter than what its holder still had.

use std::{collections::HashMap, time::Duration};

use super::{Proof, store::Record};
use crate::core::time::BootInstant;

/// Every local lease of the host.
#[derive(Debug, Default)]
pub struct LocalLeases {
    leases: HashMap<String, Lease>,
    /// The highest token ever reserved, by service; outlives the lease.
    marks: HashMap<String, u64>,
    sequence: u64,
}

#[derive(Clone, Debug)]
struct Lease {
    holder: String,
    token: u64,
    ttl: Duration,
    /// When the lease is over unless renewed, on the boot clock.
    expires: BootInstant,
    /// The token is on its way to the disk; nobody has heard of it.
    pending: bool,
}

/// The answer to [`LocalLeases::acquire`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// Write `reservation.record(..)`, then call [`LocalLeases::granted`] or [`LocalLeases::refused`].
    Reserved(Reservation),
    Held {
        holder: String,
        /// At most this long, if its holder does not renew.
        expires_in: Duration,
    },
}

/// A token that was taken for an acquirer and is not durable yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub service: String,
    pub holder: String,
    pub token: u64,
    pub ttl: Duration,
    /// When the acquirer asked: the lease counts from here, however long the disk takes.
    pub asked_at: BootInstant,
}

impl Reservation {
    /// What to make durable.
    pub fn record(&self, boot_id: &str, wall_ms: u64) -> Record {
        Record {
            holder: self.holder.clone(),
            token: self.token,
            ttl_ms: u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX),
            boot_id: boot_id.to_owned(),
            granted_wall_ms: wall_ms,
        }
    }
}

/// The caller does not hold the lease (any more): it expired, was released, or is somebody else's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// A lease that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub service: String,
    pub holder: String,
    pub token: u64,
}

impl LocalLeases {
    /// The state after a start at `now`, from what the disk has. `boot_id` is the running boot's.
    pub fn restore(
        records: impl IntoIterator<Item = (String, Record)>,
        marks: impl IntoIterator<Item = (String, u64)>,
        boot_id: &str,
        now: BootInstant,
    ) -> Self {
        let mut restored = Self { marks: marks.into_iter().collect(), ..Self::default() };
        for (service, record) in records {
            let mark = restored.marks.entry(service.clone()).or_default();
            *mark = (*mark).max(record.token);
            if record.boot_id != boot_id {
                continue;
            }
            let ttl = Duration::from_millis(record.ttl_ms);
            let expires = now.saturating_add(ttl);
            let lease = Lease { holder: record.holder, token: record.token, ttl, expires, pending: false };
            restored.leases.insert(service, lease);
        }
        restored
    }

    /// Takes the lease of `service` for `holder`, unless it is held. The token is `max(last + 1, wall_ms)`.
    pub fn acquire(
        &mut self,
        service: &str,
        holder: &str,
        ttl: Duration,
        now: BootInstant,
        wall_ms: u64,
    ) -> Result<Acquire, TokensExhausted> {
        if let Some(lease) = self.leases.get(service)
            && (lease.pending || now < lease.expires)
        {
            let expires_in = lease.expires.saturating_since(now);
            return Ok(Acquire::Held { holder: lease.holder.clone(), expires_in });
        }
        let last = self.marks.get(service).copied().unwrap_or(0);
        let token = last.checked_add(1).ok_or(TokensExhausted)?.max(wall_ms);
        self.marks.insert(service.to_owned(), token);
        let expires = now.saturating_add(ttl);
        let lease = Lease { holder: holder.to_owned(), token, ttl, expires, pending: true };
        self.leases.insert(service.to_owned(), lease);
        Ok(Acquire::Reserved(Reservation {
            service: service.to_owned(),
            holder: holder.to_owned(),
            token,
            ttl,
            asked_at: now,
        }))
    }

    /// The reservation is durable. The proof counts from when the acquirer asked; [`Lost`] if that is longer ago than
    /// the TTL, in which case the lease is free again.
    pub fn granted(&mut self, reservation: &Reservation, now: BootInstant) -> Result<Proof, Lost> {
        let lease = self.leases.get_mut(&reservation.service).filter(|lease| lease.token == reservation.token);
        let lease = lease.ok_or(Lost)?;
        if now >= lease.expires {
            self.leases.remove(&reservation.service);
            return Err(Lost);
        }
        lease.pending = false;
        Ok(self.proof(reservation.asked_at, reservation.ttl, reservation.token))
    }

    /// The reservation could not be made durable. Its token is never used again, since the disk may have it after all.
    pub fn refused(&mut self, reservation: &Reservation) {
        if self.leases.get(&reservation.service).is_some_and(|lease| lease.token == reservation.token) {
            self.leases.remove(&reservation.service);
        }
    }

    /// Extends the holding by its TTL from `now` on.
    pub fn renew(&mut self, service: &str, token: u64, now: BootInstant) -> Result<Proof, Lost> {
        let lease = self.leases.get_mut(service).filter(|lease| lease.token == token && !lease.pending).ok_or(Lost)?;
        if now >= lease.expires {
            return Err(Lost);
        }
        lease.expires = now.saturating_add(lease.ttl);
        let ttl = lease.ttl;
        Ok(self.proof(now, ttl, token))
    }

    /// Ends the holding at once. Deleting the record on disk may follow later or never: an agent that finds it after a
    /// restart only waits for it to expire.
    pub fn release(&mut self, service: &str, token: u64) -> Result<Ended, Lost> {
        self.leases.get(service).filter(|lease| lease.token == token && !lease.pending).ok_or(Lost)?;
        self.remove(service).ok_or(Lost)
    }

    /// Ends every holding whose time is over at `now`.
    pub fn expire(&mut self, now: BootInstant) -> Vec<Ended> {
        let over = |lease: &Lease| !lease.pending && now >= lease.expires;
        let services: Vec<String> =
            self.leases.iter().filter(|(_, lease)| over(lease)).map(|(service, _)| service.clone()).collect();
        services.iter().filter_map(|service| self.remove(service)).collect()
    }

    /// When [`Self::expire`] next has something to do.
    pub fn next_expiry(&self) -> Option<BootInstant> {
        self.leases.values().filter(|lease| !lease.pending).map(|lease| lease.expires).min()
    }

    /// Who holds the lease of `service` at `now`, and its token. A reservation that is not durable is nobody's.
    pub fn holding(&self, service: &str, now: BootInstant) -> Option<(&str, u64)> {
        let lease = self.leases.get(service).filter(|lease| !lease.pending && now < lease.expires)?;
        Some((&lease.holder, lease.token))
    }

    /// The high-water token of `service`: none smaller was or will be granted, unless it is reset. 0: none yet.
    pub fn mark(&self, service: &str) -> u64 {
        self.marks.get(service).copied().unwrap_or(0)
    }

    /// Sets the high-water token of `service`, even lower. Whoever holds or awaits its lease loses it: a token of before
    /// would be above those of after.
    pub fn reset_mark(&mut self, service: &str, mark: u64) -> Option<Ended> {
        self.marks.insert(service.to_owned(), mark);
        self.remove(service)
    }

    fn remove(&mut self, service: &str) -> Option<Ended> {
        let (service, lease) = self.leases.remove_entry(service)?;
        Some(Ended { service, holder: lease.holder, token: lease.token })
    }

    fn proof(&mut self, sent_at: BootInstant, ttl: Duration, token: u64) -> Proof {
        self.sequence += 1;
        Proof { sent_at, ttl, token, sequence: self.sequence }
    }
}

/// The high-water token of a service is the largest number there is; the service stays fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service has used up its tokens: its mark is 2^64 - 1. Reset the mark once no older holder can be alive")]
pub struct TokensExhausted;

#[cfg(test)]
mod tests;
