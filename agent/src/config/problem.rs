//! What can be wrong with a configuration, and what is allowed but worth a word.

use std::{net::IpAddr, time::Duration};

use portcullis_common::layout::MAX_GATES;
use thiserror::Error;

use super::{
    model::Prefix,
    report::Finding,
    rules::RuleError,
    values::{Drift, Span, ValueError},
};

/// One reason to refuse the file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    #[error("{0}")]
    Syntax(String),
    #[error("unknown key `{key}` in {place}")]
    UnknownKey { key: String, place: &'static str, nearest: Option<&'static str>, belongs: Option<&'static str> },
    #[error("`{key}` is not in this version: the service would be less protected than this file asks for")]
    NotInThisVersion { key: String },
    #[error("this version follows the lease store `local` only, not `{source_name}`")]
    StoreNotInThisVersion { source_name: String },
    #[error("`{key}` is missing in {place}")]
    MissingKey { key: &'static str, place: &'static str, example: &'static str },
    #[error("expected {expected}, found {found}")]
    WrongType { expected: &'static str, found: &'static str },
    #[error("`{given}` is not one of {}", quoted(.choices))]
    NotAChoice { given: String, choices: Vec<&'static str>, nearest: Option<&'static str> },
    #[error(transparent)]
    Value(#[from] ValueError),
    #[error("{0}")]
    BadText(TextRule),
    #[error("`{given}` is already in the list, at line {line}")]
    Duplicate { given: String, line: usize },
    #[error("service `{name}` is already at line {line}")]
    NameTaken { name: String, line: usize },
    #[error("{what} is {}, but must be {} to {}", Span(*.given), Span(*.least), Span(*.most))]
    DurationOutOfRange { what: &'static str, given: Duration, least: Duration, most: Duration },
    #[error("the drift bound is {}, but must be {} to {}", Drift(*.given), Drift(*.least), Drift(*.most))]
    DriftOutOfRange { given: u32, least: u32, most: u32 },
    #[error(
        "the gate would never open: of the TTL of {} a drift of {} leaves {}, and the margin takes {}",
        Span(*.ttl), Drift(*.drift_ppm), Span(*.usable), Span(*.margin)
    )]
    NeverOpens { ttl: Duration, drift_ppm: u32, usable: Duration, margin: Duration },
    #[error("the service selects no traffic")]
    NoSelector,
    #[error("`{ports}` without {of} select nothing")]
    PortsWithoutAddresses { ports: &'static str, of: &'static str },
    #[error("`{given}` {relation} {range}, {kind}, which cannot belong to a service")]
    SpecialAddress { given: Prefix, relation: &'static str, range: Prefix, kind: &'static str },
    #[error("`{0}` is every address there is")]
    EveryAddress(Prefix),
    #[error("the endpoint's address {address} is no address of a host: it is {kind}")]
    SpecialEndpoint { address: IpAddr, kind: &'static str },
    #[error(
        "`{endpoint}` is exempt, but {prefix} belongs to service `{service}`: its closed gate would let that through"
    )]
    ExemptIsService { endpoint: String, prefix: Prefix, service: String },
    #[error("more than {MAX_GATES} services: a host has {MAX_GATES} gates")]
    TooManyServices,
    #[error(transparent)]
    Rules(#[from] RuleError),
    #[error("`identity` is missing, and the host name `{0}` cannot stand in for it")]
    NoIdentity(String),
}

/// What a text must look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TextRule {
    #[error("a service's name must be 1 to 63 bytes of `a-z A-Z 0-9 . _ -`")]
    ServiceName,
    #[error("an identity must be 1 to 253 characters without spaces and control characters")]
    Identity,
    #[error("a group's name must be 1 to 32 characters without spaces and control characters")]
    Group,
    #[error("a path must be absolute and without NUL")]
    Path,
    #[error("a socket's path must have at most 107 bytes")]
    SocketPath,
    #[error(
        "an interface's name must be 1 to 15 bytes without spaces and slashes, or a beginning of one followed by `*`"
    )]
    Interface,
}

fn quoted(choices: &[&str]) -> String {
    let quoted: Vec<_> = choices.iter().map(|choice| format!("`{choice}`")).collect();
    quoted.join(", ")
}

impl Finding for Problem {
    const SEVERITY: &'static str = "error";

    fn help(&self) -> Option<String> {
        match self {
            Self::UnknownKey { nearest: Some(nearest), .. } | Self::NotAChoice { nearest: Some(nearest), .. } => {
                Some(format!("did you mean `{nearest}`?"))
            }
            Self::UnknownKey { key, belongs: Some(place), .. } => Some(format!("`{key}` is a key of {place}")),
            Self::NotInThisVersion { key } => {
                Some(format!("take `{key}` out to accept that, or install a version that knows it"))
            }
            Self::StoreNotInThisVersion { .. } => Some(
                "use `lease = { source = \"local\" }` and hold the lease with `portcullis run`, which excludes within \
                 this host only"
                    .to_owned(),
            ),
            Self::MissingKey { example, .. } => Some(format!("for example `{example}`")),
            Self::NeverOpens { margin, drift_ppm, .. } => {
                let least = shortest_ttl(*margin, *drift_ppm);
                Some(format!("raise the TTL above {}, or lower the margin", Span(least)))
            }
            Self::NoSelector => {
                Some("name `addresses`, `behind` or `remotes`, or the whole node with `scope = \"node\"`".to_owned())
            }
            Self::EveryAddress(_) => {
                Some("for all of this node use `scope = \"node\"` alone, or name the networks".to_owned())
            }
            Self::ExemptIsService { .. } => {
                Some("name the service's addresses more narrowly, or take the endpoint out of `exempt`".to_owned())
            }
            Self::NameTaken { .. } => Some("a name stands for one gate; choose another".to_owned()),
            Self::Duplicate { .. } => Some("take one of them out".to_owned()),
            Self::NoIdentity(_) => Some("set `identity = \"node-a\"` in [agent]".to_owned()),
            Self::Syntax(_)
            | Self::UnknownKey { .. }
            | Self::NotAChoice { .. }
            | Self::WrongType { .. }
            | Self::Value(_)
            | Self::BadText(_)
            | Self::DurationOutOfRange { .. }
            | Self::DriftOutOfRange { .. }
            | Self::PortsWithoutAddresses { .. }
            | Self::SpecialAddress { .. }
            | Self::SpecialEndpoint { .. }
            | Self::TooManyServices
            | Self::Rules(_) => None,
        }
    }
}

/// `ttl` less the drift bound: what of a TTL is certain on another clock. Rounded down.
pub(super) fn less_drift(ttl: Duration, drift_ppm: u32) -> Duration {
    let kept = u128::from(1_000_000u32.saturating_sub(drift_ppm));
    Duration::from_nanos(u64::try_from(ttl.as_nanos().saturating_mul(kept) / 1_000_000).unwrap_or(u64::MAX))
}

/// The TTL of which the drift bound and `margin` leave nothing: a longer one opens the gate. Rounded up to a millisecond.
pub(super) fn shortest_ttl(margin: Duration, drift_ppm: u32) -> Duration {
    let kept = u128::from(1_000_000u32.saturating_sub(drift_ppm)).max(1);
    let millis = (margin.as_nanos().saturating_mul(1_000_000) / kept).div_ceil(1_000_000);
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
}

/// What the file may say, but the operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Warning {
    #[error(
        "service `{0}` keeps serving when its store is lost: two nodes may serve at once, the guarantee is forfeited"
    )]
    HoldForfeits(String),
    #[error(
        "with `attach = \"on-fence\"` nothing cuts a service when the agent is dead: the dead-man's switch is forfeited"
    )]
    OnFenceForfeits,
    #[error(
        "service `{service}` is every protocol and port of {addresses}, SSH and ping included: name `ports` to narrow it"
    )]
    EveryPort { service: String, addresses: String },
    #[error("packets through `{0}` pass closed gates, but for those of this host's own sockets")]
    Excluded(String),
    #[error(
        "service `{service}` must be renewed every {}: a holder that renews each third of the TTL of {} comes too late",
        Span(*.span), Span(*.ttl)
    )]
    RenewalTooTight { service: String, span: Duration, ttl: Duration },
    #[error("no service is configured: nothing is fenced")]
    NoService,
}

impl Finding for Warning {
    const SEVERITY: &'static str = "warning";

    fn help(&self) -> Option<String> {
        None
    }
}
