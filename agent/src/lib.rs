//! Portcullis: a service is cut in the kernel at its lease's deadline, with nobody alive to do it.

pub mod config;
pub mod core;
pub mod coverage;
