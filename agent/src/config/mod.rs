//! The configuration: `/etc/portcullis/portcullis.toml`, strict.
//!
//! * [`model`]: what a valid configuration says, with every default filled in.

pub mod model;
