//! What kernel and user space of Portcullis share.
//!
//! * [`layout`]: the maps' names and the bytes of their keys and values.
//! * [`packet`]: from bytes to what a verdict needs to know of a packet.
//! * [`verdict`]: from a packet and the gates to pass or drop.
//!
//! Everything here is plain `no_std` Rust without `unsafe` and without a helper call, so that the very source the
//! kernel runs also runs on the host, under unit tests, property tests and a fuzzer.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod layout;
pub mod packet;
pub mod verdict;
