//! What goes over the wire. Requests are strict; answers may gain fields within `/v1`.
//!
//! Instants named `_ns` are on the boot clock (CLOCK_BOOTTIME), those named `_wall_ms` milliseconds since 1970.

use serde::{Deserialize, Serialize};

/// Bodies beyond this are refused unread.
pub const MAX_BODY_BYTES: usize = 16 * 1024;
/// Bytes of a reason.
pub const MAX_REASON: usize = 1024;
/// Bytes of a holder's name.
pub const MAX_HOLDER: usize = 256;

/// `POST .../fence`, `POST .../unfence`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldRequest {
    /// The holding that is meant: refused as stale if it is not the current one. Absent: whichever there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u64>,
    /// For the record and the status.
    #[serde(default)]
    pub reason: String,
}

/// `POST .../lease`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcquireRequest {
    pub holder: String,
    /// Cut to the service's `ttl_cap`.
    pub ttl_ms: u64,
}

/// `PUT .../lease`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenewRequest {
    pub token: u64,
}

/// `DELETE .../lease?token=N`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseQuery {
    pub token: u64,
}

/// `PUT .../mark`, after a lease store was restored from a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MarkRequest {
    /// The new high-water token: no smaller one opens the service.
    pub mark: u64,
    /// For the record.
    #[serde(default)]
    pub reason: String,
}

/// A lease that was acquired or renewed. It counts from when the request was *sent*.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseGranted {
    pub service: String,
    pub token: u64,
    /// What was granted, after the cap.
    pub ttl_ms: u64,
}

/// A lease that was released. The service is fenced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseReleased {
    pub service: String,
    pub token: u64,
}

/// Where a service is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Fenced,
    Opening,
    Serving,
    Fencing,
}

/// How far a fence was confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confirmation {
    Confirmed,
    Unconfirmed,
    Failed,
}

/// A service as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceStatus {
    pub name: String,
    pub state: State,
    /// Of the current holding, else of the last one.
    pub token: Option<u64>,
    /// Who holds the lease, where known.
    pub holder: Option<String>,
    /// When the gate closes by itself; absent while it is closed.
    pub deadline_ns: Option<u64>,
    /// From now to the deadline.
    pub time_left_ms: Option<u64>,
    /// Why the service is in this state.
    pub reason: String,
    /// Of the last fence; absent while serving and where none was made.
    pub confirmation: Option<Confirmation>,
    /// What the confirmation rests on, or lacks.
    pub evidence: Vec<String>,
    /// Fenced by hand: nothing opens the service until it is unfenced.
    pub manual_hold: Option<ManualHold>,
    pub counters: Counters,
    /// What weakens this service's guarantee right now, each with its remedy.
    pub degraded: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManualHold {
    pub reason: String,
    /// User id and process id of who asked.
    pub uid: u32,
    pub pid: i32,
    pub since_wall_ms: u64,
}

/// Summed over all hooks and CPUs since the maps were made. A packet that meets several hooks counts at each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub passed_packets: u64,
    pub passed_bytes: u64,
    pub dropped_packets: u64,
    pub dropped_bytes: u64,
    /// Of the dropped: refused by an open gate, since their socket belongs to an older opening.
    pub stale_packets: u64,
    /// 0: never.
    pub last_pass_ns: u64,
    /// First drop since a packet last passed; 0: none.
    pub first_drop_ns: u64,
}

/// `GET /v1/services`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceList {
    pub services: Vec<ServiceStatus>,
}

/// `GET /v1/health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Nothing is in `degraded`.
    pub ok: bool,
    pub version: String,
    pub identity: String,
    pub boot_id: String,
    pub pid: u32,
    /// Since the agent started.
    pub uptime_ms: u64,
    pub services: u64,
    /// What weakens the guarantee of the whole host, each with its remedy.
    pub degraded: Vec<String>,
}

/// `GET /v1/coverage`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    pub interfaces: Vec<InterfaceCoverage>,
    /// What of the services' traffic no gate can cut, each with its remedy.
    pub warnings: Vec<CoverageWarning>,
    /// How often a missing or displaced program was put back.
    pub gaps_mended: u64,
    pub kernel_events: KernelEvents,
}

/// What the kernel programs counted of what should not happen often, since the boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelEvents {
    /// Sockets that stay cut since there was no memory for their stamp (`net.core.optmem_max`).
    pub stamp_failed: u64,
    /// Packets that could not be read and were dropped because a gate was closed.
    pub unreadable_dropped: u64,
    /// Packets dropped because a rule named a gate that does not exist.
    pub no_gate: u64,
    /// Packets that passed a closed gate by an exemption.
    pub exempt_passed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceCoverage {
    pub name: String,
    pub index: u32,
    /// `tcx`, `clsact` or `none`.
    pub tc: String,
    /// `native`, `generic` or `none`.
    pub xdp: String,
    /// Why it is less than configured; absent where it is not.
    pub note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoverageWarning {
    /// Absent: the host as a whole.
    pub service: Option<String>,
    /// A word for programs, such as `uncovered_listener`.
    pub kind: String,
    pub detail: String,
}

/// `POST /v1/reload`: what the new configuration changed, by service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    /// Settings that take effect only at a restart.
    pub needs_restart: Vec<String>,
}

/// One of `GET /v1/events`, under the SSE event name of its `kind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Grows by one with each event of this agent process.
    pub sequence: u64,
    pub at_ns: u64,
    pub at_wall_ms: u64,
    pub kind: EventKind,
    /// Absent: the host as a whole.
    pub service: Option<String>,
    /// After the event.
    pub state: Option<State>,
    pub token: Option<u64>,
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A service changed its state.
    State,
    /// A lease was acquired, released or lost.
    Lease,
    /// Somebody used the socket to change something.
    Command,
    /// Attachment: an interface came or went, a gap was found or mended.
    Attachment,
    /// The host or a service became degraded, or is no longer.
    Degraded,
    /// The configuration was applied again.
    Reload,
}

impl EventKind {
    /// The word on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Lease => "lease",
            Self::Command => "command",
            Self::Attachment => "attachment",
            Self::Degraded => "degraded",
            Self::Reload => "reload",
        }
    }
}

/// The last event of a reader that was too slow, under the SSE event name `lagged`; the stream ends after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lagged {
    pub missed: u64,
}

/// Every answer with a status of 400 and above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorAnswer {
    pub error: ErrorBody,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A word for programs.
    pub code: String,
    pub message: String,
    /// What to do next.
    pub hint: String,
    /// With the code `held`: who holds the lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// With the code `held`: the lease is free after this unless it is renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
}
