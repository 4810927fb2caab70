//! The safety core: pure, small, without I/O, clock, or panics. Time is passed in, effects come out as data.
//!
//! * [`time`]: instants and spans of the boot clock.
//! * [`deadline`]: the rule for time, `deadline = B + TTL * (1 - drift) - margin`.
//! * [`machine`]: the state machine of one service, `step(now, input) -> actions`.

#![forbid(unsafe_code)]
#![deny(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unreachable,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm
)]

pub mod deadline;
pub mod machine;
pub mod time;
