//! The configuration: `/etc/portcullis/portcullis.toml`, strict.
//!
//! * [`model`]: what a valid configuration says, with every default filled in.
//! * [`values`]: how prefixes, ports, endpoints and durations are written.
//! * [`rules`]: from services to the contents of the kernel's rule maps.

pub mod model;
pub mod rules;
pub mod values;
