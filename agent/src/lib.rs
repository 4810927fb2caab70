//! Portcullis: a service is cut in the kernel at its lease's deadline, with nobody alive to do it.

pub mod api;
pub mod cli;
pub mod clock;
pub mod config;
pub mod core;
pub mod coverage;
pub mod crash;
pub mod datapath;
pub mod lease;
pub mod logging;
pub mod runtime;
