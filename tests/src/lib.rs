//! The test world.

pub mod report;
