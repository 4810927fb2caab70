//! The configuration: `/etc/portcullis/portcullis.toml`, strict.
//!
//! * [`model`]: what a valid configuration says, with every default filled in.
//! * [`parse`]: from TOML to the model, with every problem of a file at its place.
//! * [`values`]: how prefixes, ports, endpoints and durations are written.
//! * [`problem`] and [`report`]: what can be wrong, and how it is shown.
//! * [`check`]: what a configuration means, for `portcullis check`.
//! * [`rules`]: from services to the contents of the kernel's rule maps.

pub mod check;
pub mod model;
pub mod parse;
pub mod problem;
pub mod report;
pub mod rules;
pub mod values;

mod read;
mod validate;

pub use model::Config;
pub use parse::{LoadError, Loaded};
