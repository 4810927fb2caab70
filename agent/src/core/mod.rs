//! The safety core: pure, small, without I/O, clock, or panics. Time is passed in, effects come out as data.
//!
//! * [`time`]: instants and spans of the boot clock.
//! * [`deadline`]: the rule for time, `deadline = B + TTL * (1 - drift) - margin`.
//! * [`machine`]: the state machine of one service, `step(state, now, input) -> actions`.

#![forbid(unsafe_code)]

pub mod time;
